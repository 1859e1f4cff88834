"""Problems: exact answers by independent arithmetic, and a split that neither seed nor wording crosses."""

import random
import re

import pytest

from train.conversations import conversation
from train.tasks import TASKS, draw, evaluate, problems
from train.tasks.arithmetic import add_steps, compare_steps, subtract_steps

WEIGHTS = {task: 1.0 for task in TASKS} | {"chat": 1.0}


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def expected(problem) -> str:
    """The answer worked out from the user's words alone."""
    words = problem.user.strip().rstrip(".?").lower()
    if problem.task.startswith("add"):
        return str(sum(numbers(words)))
    if problem.task.startswith("sub"):
        a, b = numbers(words)
        return str(b - a if " from " in words else a - b)
    if problem.task == "compare":
        a, b = numbers(words)
        if "larger of" in words or "which is larger" in words or "number is larger" in words or "max" in words:
            return str(max(a, b))
        if "smaller of" in words or "which is smaller" in words or "number is smaller" in words or "min" in words:
            return str(min(a, b))
        less = "less" in words or "smaller" in words or "<" in words
        return "Yes" if (a < b if less else a > b) else "No"
    if problem.task == "tool":
        return " and ".join(str(eval(e)) for e in re.findall(r"\d+[*+-]\d+", " ".join(problem.calls)))
    quoted = re.search(r'"(.*)"', problem.user)
    if problem.task == "reverse":
        skip = {"reverse", "reversed", "the", "string", "spell", "backwards", "write", "what", "is"}
        text = quoted.group(1) if quoted else next(w for w in re.findall(r"[a-z]+", words) if w not in skip)
        return text[::-1]
    if problem.task == "copy":
        text = re.sub(r"^(repeat after me:|repeat|copy:|copy|say|echo|write)", "", words, flags=re.I).strip()
        return quoted.group(1) if quoted else text
    if found := re.search(r"count (\w): (\w+)", words):
        return str(found.group(2).count(found.group(1)))
    letter = re.search(r"(?:how many|letter|does|often is) (\w)\b", words)
    return str(re.findall(r"\w+", words)[-1].count(letter.group(1)))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("held_out", [False, True])
def test_answers_are_right(task, held_out):
    for problem in problems(task, 300, seed=3, held_out=held_out):
        ambiguous = task == "reverse" and problem.key.split()[1] in ("string", "reverse", "spell", "write", "the")
        if not ambiguous:
            assert problem.answer == expected(problem), problem


def test_the_split_is_of_what_is_asked():
    for task in TASKS:
        train = {p.key for p in problems(task, 2000, seed=0, held_out=False)}
        test = {p.key for p in problems(task, 500, seed=1, held_out=True)}
        assert train and test and not train & test


def test_both_orders_of_a_sum_stand_on_one_side():
    sides = {}
    for problem in problems("add2", 3000, seed=0, held_out=False) + problems("add2", 2000, seed=0, held_out=True):
        sides.setdefault(tuple(sorted(numbers(problem.user))), set()).add(problem.held_out)
    assert len(sides) > 2000
    assert all(len(side) == 1 for side in sides.values())


def test_training_conversations_hold_no_held_out_problem():
    """Every sum and difference in any wording, found again in the text of a conversation, follow-ups included."""
    held = {p.key for task in ("add2", "sub2") for p in problems(task, 3000, seed=5, held_out=True)}
    asked = 0
    for i in range(1500):
        rng = random.Random(f"conversation {i}")
        for message in conversation(rng, WEIGHTS, 0.6).messages:
            for a, sign, b in re.findall(r"^(\d+) ?([+-]) ?(\d+)", str(message["content"])):
                a, b = int(a), int(b)
                key = f"add {min(a, b)} {max(a, b)}" if sign == "+" else f"sub {a} {b}"
                asked += 1
                assert key not in held
    assert asked > 100


def test_problems_depend_on_the_seed_only():
    assert problems("count", 20, seed=1, held_out=True) == problems("count", 20, seed=1, held_out=True)
    assert problems("count", 20, seed=1, held_out=True) != problems("count", 20, seed=2, held_out=True)


@pytest.mark.parametrize("a, b", [(27, 48), (999, 1), (0, 0), (5, 600), (100, 37), (52, 37), (37, 52), (345, 354)])
def test_every_step_of_the_reasoning_is_true(a, b):
    for steps in (add_steps(a, b), subtract_steps(a, b), compare_steps(a, b)):
        for step in steps.split("; "):
            if "digits" in step or re.fullmatch(r"-?\d+", step):
                continue
            relation = re.sub(r"\b0+(\d)", r"\1", step).replace("=", "==")
            assert eval(relation), step
    assert add_steps(a, b).split("; ")[-1] == str(a + b)
    assert subtract_steps(a, b).split("; ")[-1] == str(a - b)


def test_calculator_refuses_anything_but_one_operation():
    assert [evaluate(e) for e in ("37*48", "5 - 12", "1+2")] == [1776, -7, 3]
    for bad in ("", "1", "1+2+3", "2**3", "a+1", "__import__('os')", "1/2"):
        with pytest.raises(ValueError, match="the calculator takes"):
            evaluate(bad)


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="task is 'sums', known are add2"):
        draw("sums", random.Random(0), held_out=True)
    with pytest.raises(ValueError, match="n is 0, the minimum is 1"):
        problems("add2", 0, seed=0, held_out=True)
