"""Addition, subtraction and comparison; the reasoning works column by column from the right."""

import random

from train.tasks.problem import Problem, vary

ADD = (
    "{a}+{b}=", "{a}+{b}=", "{a}+{b}", "{a} + {b}", "{a} + {b} =", "{a}+{b}=?", "{a} + {b} = ?", "What is {a}+{b}?",
    "What is {a} + {b}?", "What is {a} plus {b}?", "What's {a} + {b}?", "What's {a} plus {b}?", "Add {a} and {b}.",
    "Calculate {a}+{b}.", "Compute {a} + {b}.", "How much is {a}+{b}?", "How much is {a} plus {b}?", "{a} plus {b}",
    "Please add {a} and {b}.", "What is the sum of {a} and {b}?",
)  # fmt: skip
SUBTRACT = (
    "{a}-{b}=", "{a}-{b}=", "{a}-{b}", "{a} - {b}", "{a} - {b} =", "{a}-{b}=?", "{a} - {b} = ?", "What is {a}-{b}?",
    "What is {a} - {b}?", "What is {a} minus {b}?", "What's {a} - {b}?", "What's {a} minus {b}?",
    "Subtract {b} from {a}.", "Calculate {a}-{b}.", "Compute {a} - {b}.", "How much is {a}-{b}?",
    "How much is {a} minus {b}?", "{a} minus {b}", "Please take {b} from {a}.",
    "What is the difference of {a} and {b}?",
)  # fmt: skip
LARGER = (
    "Which is larger, {a} or {b}?",
    "Which number is larger: {a} or {b}?",
    "max({a}, {b})",
    "Larger of {a} and {b}?",
)
SMALLER = (
    "Which is smaller, {a} or {b}?", "Which number is smaller: {a} or {b}?", "min({a}, {b})", "Smaller of {a} and {b}?",
)  # fmt: skip
LESS = ("Is {a} less than {b}?", "{a}<{b}?", "Is {a} smaller than {b}?")
GREATER = ("Is {a} greater than {b}?", "{a}>{b}?", "Is {a} larger than {b}?")


def add(rng: random.Random, digits: int) -> Problem:
    a, b = _operands(rng, digits)
    return addition(a, b, vary(rng, ADD, a=a, b=b), f"add{digits}")


def addition(a: int, b: int, user: str, task: str) -> Problem:
    """a+b and b+a are one problem: both stand on the same side of the split."""
    key = f"add {min(a, b)} {max(a, b)}"
    return Problem(task=task, key=key, user=user, answer=str(a + b), reasoning=add_steps(a, b))


def subtract(rng: random.Random, digits: int) -> Problem:
    a, b = _operands(rng, digits)
    return subtraction(a, b, vary(rng, SUBTRACT, a=a, b=b), f"sub{digits}")


def subtraction(a: int, b: int, user: str, task: str) -> Problem:
    return Problem(task=task, key=f"sub {a} {b}", user=user, answer=str(a - b), reasoning=subtract_steps(a, b))


def compare(rng: random.Random) -> Problem:
    """Numbers of up to three digits, often close to each other."""
    a = _number(rng, rng.choice((1, 2, 2, 3, 3)))
    near = int("".join(rng.sample(str(a), len(str(a)))))
    b = rng.choice((_number(rng, 1), _number(rng, 2), _number(rng, 3), _number(rng, len(str(a))), near))
    kind = rng.choice(("larger", "smaller", "less", "greater"))
    if a == b and kind in ("larger", "smaller"):
        kind = "less"
    templates = {"larger": LARGER, "smaller": SMALLER, "less": LESS, "greater": GREATER}[kind]
    answer = {
        "larger": str(max(a, b)),
        "smaller": str(min(a, b)),
        "less": "Yes" if a < b else "No",
        "greater": "Yes" if a > b else "No",
    }[kind]
    user = vary(rng, templates, a=a, b=b)
    return Problem(
        task="compare", key=f"compare {min(a, b)} {max(a, b)}", user=user, answer=answer, reasoning=compare_steps(a, b)
    )


def _operands(rng: random.Random, digits: int) -> tuple[int, int]:
    """Three in four times both of exactly that many digits, else each of one to that many."""
    if rng.random() < 0.75:
        return _number(rng, digits), _number(rng, digits)
    return _number(rng, rng.randint(1, digits)), _number(rng, rng.randint(1, digits))


def _number(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digit pairs from the right, the shorter number padded with zeros."""
    width = max(len(str(a)), len(str(b)))
    pairs = zip(f"{a:0{width}}", f"{b:0{width}}", strict=True)
    return [(int(x), int(y)) for x, y in pairs][::-1]


def add_steps(a: int, b: int) -> str:
    """27+48 -> `7+8=15; 2+4+1=7; 75`."""
    steps, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        steps.append(f"{x}+{y}{'+1' if carry else ''}={total}")
        carry = total // 10
    return "; ".join([*steps, str(a + b)])


def subtract_steps(a: int, b: int) -> str:
    """52-37 -> `12-7=5; 5-1-3=1; 15`; 37-52 -> `37<52; ` and the same, then `; -15`."""
    if a < b:
        return f"{a}<{b}; {subtract_steps(b, a)}; {a - b}"
    steps, borrow, digits = [], 0, ""
    for x, y in _columns(a, b):
        lent = 10 if x - borrow < y else 0
        left = x + lent - borrow - y
        steps.append(f"{x + lent}{'-1' if borrow else ''}-{y}={left}")
        borrow, digits = lent // 10, f"{left}{digits}"
    return "; ".join([*steps, *([digits] if digits != str(a - b) else []), str(a - b)])


def compare_steps(a: int, b: int) -> str:
    """345, 354 -> `3=3; 4<5; 345<354`; numbers of unequal length compare by it."""
    relation = "=" if a == b else "<" if a < b else ">"
    x, y = str(a), str(b)
    if len(x) != len(y):
        return f"{len(x)}{relation}{len(y)} digits; {a}{relation}{b}"
    steps = []
    for p, q in zip(x, y, strict=True):
        steps.append(f"{p}{'=' if p == q else relation}{q}")
        if p != q:
            break
    return "; ".join([*steps, f"{a}{relation}{b}"])
