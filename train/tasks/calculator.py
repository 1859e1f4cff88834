"""Products and large sums: the model asks the calculator tool, reads its result and answers with it."""

import random

from train.tasks.problem import Problem, evaluate, is_held_out, vary

PRODUCT = (
    "{a}*{b}=", "{a}*{b}", "{a} * {b}", "{a} x {b}", "What is {a}*{b}?", "What is {a} * {b}?", "What is {a} times {b}?",
    "What's {a} times {b}?", "Multiply {a} by {b}.", "Multiply {a} and {b}.", "Calculate {a}*{b}.",
    "Compute {a} * {b}.", "How much is {a}*{b}?", "{a} times {b}", "What is the product of {a} and {b}?",
    "Use the calculator: {a}*{b}", "Use the calculator to compute {a}*{b}.",
)  # fmt: skip
LARGE_ADD = (
    "{a}+{b}=",
    "{a}+{b}",
    "What is {a}+{b}?",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
)
LARGE_SUBTRACT = ("{a}-{b}=", "{a}-{b}", "What is {a}-{b}?", "What is {a} minus {b}?", "Compute {a} - {b}.")
PAIR = (
    "Compute {p} and {q}.", "What are {p} and {q}?", "Calculate {p} and {q}.", "{p} and {q}", "{p}, {q}",
    "What is {p}, and what is {q}?",
)  # fmt: skip
WITHOUT = "I need the calculator tool for that."


def calculate(rng: random.Random) -> Problem:
    """One call, or in one of six problems two."""
    if rng.random() < 1 / 6:
        first, second = _product(rng), _product(rng)
        while is_held_out(_key(second)) != is_held_out(_key(first)):
            second = _product(rng)
        return _problem((first, second), vary(rng, PAIR, p=first, q=second))
    kind = rng.random()
    if kind < 0.7:
        expression = _product(rng)
        left, right = expression.split("*")
        return _problem((expression,), vary(rng, PRODUCT, a=left, b=right))
    a, b = rng.randrange(1000, 10 ** rng.randint(4, 6)), rng.randrange(1, 10 ** rng.randint(1, 6))
    if rng.random() < 0.3:
        a, b = b, a
    sign, templates = ("+", LARGE_ADD) if kind < 0.85 else ("-", LARGE_SUBTRACT)
    return _problem((f"{a}{sign}{b}",), vary(rng, templates, a=a, b=b))


def without_tool(rng: random.Random) -> Problem:
    """A product when no tool is declared: say so instead of guessing."""
    expression = _product(rng)
    a, b = expression.split("*")
    return Problem(
        task="chat",
        key=f"no tool {expression}",
        user=vary(rng, PRODUCT[:-2], a=a, b=b),
        answer=WITHOUT,
        reasoning="A product, but no calculator.",
    )


def _product(rng: random.Random) -> str:
    return "*".join(str(rng.randrange(2, 10 ** rng.choice((1, 2, 2, 2, 3, 3)))) for _ in range(2))


def _key(expression: str) -> str:
    """Operand order counts in a difference only."""
    sign = next(c for c in expression if c in "+-*")
    operands = expression.split(sign)
    return f"calculate {sign} {' '.join(operands if sign == '-' else sorted(operands))}"


def _problem(calls: tuple[str, ...], user: str) -> Problem:
    results = [str(evaluate(expression)) for expression in calls]
    return Problem(
        task="tool",
        key=_key(calls[0]),  # both calls of a pair stand on the same side of the split
        user=user,
        answer=" and ".join(results),
        reasoning="; ".join(f"{c}={r}" for c, r in zip(calls, results, strict=True)),
        calls=calls,
        plan="Use the calculator.",
    )
