"""What a parser sends while a turn is generated, and the message that it adds up to."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Reasoning:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins; `index` counts the calls of the turn from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More JSON text of the arguments of the call that began last."""

    index: int
    text: str


@dataclass(frozen=True)
class Relabel:
    """The reasoning so far was the answer: its text follows again as content."""


@dataclass(frozen=True)
class Finish:
    """The last delta: why the turn ended ("stop", "tool_calls", "length", ...) and the stop string that was found."""

    reason: str
    stop: str | None


Delta = Reasoning | Content | CallStart | CallArguments | Relabel | Finish


@dataclass
class ToolCall:
    """`arguments` is JSON text, as in OpenAI's messages."""

    name: str
    arguments: str


@dataclass
class Message:
    """A turn of the assistant; `finish_reason` and `stop` as in `Finish`, None before it."""

    reasoning: str
    content: str
    tool_calls: list[ToolCall]
    finish_reason: str | None = None
    stop: str | None = None


def join(deltas: Iterable[Delta]) -> Message:
    """The message that a turn's deltas, or the first of them, add up to."""
    reasoning: list[str] = []
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    finish_reason: str | None = None
    stop: str | None = None
    for delta in deltas:
        match delta:
            case Reasoning(text):
                reasoning.append(text)
            case Content(text):
                content.append(text)
            case CallStart(_, name):
                calls.append((name, []))
            case CallArguments(index, text):
                calls[index][1].append(text)
            case Relabel():
                reasoning.clear()
            case Finish():
                finish_reason, stop = delta.reason, delta.stop
    tool_calls = [ToolCall(name, "".join(arguments)) for name, arguments in calls]
    return Message("".join(reasoning), "".join(content), tool_calls, finish_reason, stop)
