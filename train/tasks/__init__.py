"""Generated problems with exact answers: arithmetic, strings, calculator calls and small talk.

Every problem depends on its seed only. A tenth of the problems of each task, chosen by a hash of what is asked, is
held out: training never draws them, evaluation draws nothing else.
"""

import functools
import random
from collections.abc import Callable

from train.tasks import arithmetic, calculator, strings
from train.tasks.problem import CALCULATOR, Problem, evaluate, is_held_out, result

__all__ = ["CALCULATOR", "TASKS", "Problem", "draw", "evaluate", "is_held_out", "problems", "result"]

TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "add2": functools.partial(arithmetic.add, digits=2),
    "add3": functools.partial(arithmetic.add, digits=3),
    "sub2": functools.partial(arithmetic.subtract, digits=2),
    "sub3": functools.partial(arithmetic.subtract, digits=3),
    "compare": arithmetic.compare,
    "reverse": strings.reverse,
    "copy": strings.copy,
    "count": strings.count,
    "tool": calculator.calculate,
}


def draw(task: str, rng: random.Random, *, held_out: bool) -> Problem:
    """The next problem of `task` on the wanted side of the split."""
    if task not in TASKS:
        raise ValueError(f"task is {task!r}, known are {', '.join(TASKS)}; choose one of these")
    while True:
        problem = TASKS[task](rng)
        if problem.held_out == held_out:
            return problem


def problems(task: str, n: int, *, seed: int, held_out: bool) -> list[Problem]:
    """n problems of `task`, the same for the same seed; repeats are possible where a task has few."""
    if n < 1:
        raise ValueError(f"n is {n}, the minimum is 1; ask for at least one problem")
    rng = random.Random(f"{task} {seed}")
    return [draw(task, rng, held_out=held_out) for _ in range(n)]
