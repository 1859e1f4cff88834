"""What every task yields: one problem with its answer, as chat messages, and which side of the split it is on."""

import dataclasses
import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

HELD_OUT_BYTES = 26  # of 256: about a tenth of all problems are never trained on

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example 37*48"}},
            "required": ["expression"],
        },
    },
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question and the turns that answer it. `key` says what is asked, whatever the wording."""

    task: str
    key: str
    user: str
    answer: str
    reasoning: str = ""
    calls: tuple[str, ...] = ()  # expressions the calculator evaluates before the answer
    plan: str = ""  # reasoning of the turn that calls

    @property
    def held_out(self) -> bool:
        return is_held_out(self.key)

    def messages(self) -> list[dict[str, Any]]:
        """The user's message, then the calling turn and its results when there are calls, then the answer."""
        answer = {"role": "assistant", "reasoning_content": self.reasoning, "content": self.answer}
        if not self.calls:
            return [self.question(), answer]
        calling = {
            "role": "assistant",
            "reasoning_content": self.plan,
            "content": "",
            "tool_calls": [_call(i, expression) for i, expression in enumerate(self.calls, start=1)],
        }
        results = [result(i, str(evaluate(expression))) for i, expression in enumerate(self.calls, start=1)]
        return [self.question(), calling, *results, answer]

    def question(self) -> dict[str, Any]:
        return {"role": "user", "content": self.user}


def is_held_out(key: str) -> bool:
    """Decided by a hash of the problem alone, so that no seed and no wording moves a problem across."""
    return hashlib.sha256(key.encode()).digest()[0] < HELD_OUT_BYTES


def result(index: int, content: str) -> dict[str, Any]:
    """The calculator's message for call `index` (from 1)."""
    return {"role": "tool", "tool": "calculator", "tool_call_id": f"calculator:{index}", "content": content}


def _call(index: int, expression: str) -> dict[str, Any]:
    arguments = json.dumps({"expression": expression})
    return {
        "id": f"calculator:{index}",
        "type": "function",
        "function": {"name": "calculator", "arguments": arguments},
    }


def evaluate(expression: str) -> int:
    """The calculator: one +, - or * of two whole numbers. ValueError for anything else."""
    for sign, apply in (("+", int.__add__), ("*", int.__mul__), ("-", int.__sub__)):
        left, found, right = expression.replace(" ", "").partition(sign)
        if found and left.isdecimal() and right.isdecimal():
            return apply(int(left), int(right))
    raise ValueError(f"expression is {expression!r}, the calculator takes two whole numbers and one of + - *")


def vary(rng: random.Random, templates: Sequence[str], **values: Any) -> str:
    """One of the templates filled in; some lose their capital letter or full stop, some gain a space or line end."""
    text = rng.choice(templates).format(**values)
    if text[0].isalpha() and rng.random() < 0.2:
        text = text[0].lower() + text[1:]
    if text[-1] == "." and rng.random() < 0.3:
        text = text[:-1]
    if rng.random() < 0.06:
        text += rng.choice((" ", "\n"))
    return text
