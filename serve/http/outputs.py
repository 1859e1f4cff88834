"""Token ids of one sequence to what a client sees of it, with the bookkeeping of its usage and its end."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from k3jax.chat.deltas import CallArguments, CallStart, Content, Delta, Finish, Reasoning
from k3jax.chat.detokenizer import Detokenizer
from k3jax.chat.reader import OutputReader
from k3jax.chat.stops import StopStrings
from k3jax.chat.tokenizer import Tokenizer
from serve.http.backend import Sampling, Tokens

LOWEST = -9999.0  # a log-probability of minus infinity, which JSON cannot say


class TokenLogprob(NamedTuple):
    """A generated token; `top` are the most likely ids and their log-probabilities in nats."""

    id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class Step:
    """What one delivery adds; `tokens` only where log-probabilities were asked for.

    `ended` marks the last one. The output itself may be ahead of the steps that a reader has taken.
    """

    deltas: list[Delta]
    tokens: list[TokenLogprob]
    ended: bool


class Output(abc.ABC):
    """Base: counts tokens and decides when the sequence is over. `finish_reason` is None until then."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling):
        self.tokenizer, self.sampling = tokenizer, sampling
        self.completion_tokens = self.reasoning_tokens = self.cached_tokens = 0
        self.ids: list[int] = []  # without the stop id
        self.finish_reason: str | None = None
        self.matched_stop: str | int | None = None

    def feed(self, item: Tokens) -> Step:
        """Take a delivery; what follows a stop string or the end of the turn is dropped."""
        self.cached_tokens = item.cached_tokens
        ids = item.ids
        drawn_stop = ids[-1] if item.finish_reason == "stop" and ids and ids[-1] in self.sampling.stop_ids else None
        if drawn_stop is not None:
            ids = ids[:-1]
        deltas: list[Delta] = []
        tokens: list[TokenLogprob] = []
        for i, id in enumerate(ids):
            self.completion_tokens += 1
            self.ids.append(id)
            deltas += self._read(id)
            if self.sampling.logprobs is not None:
                top = item.top[i] if item.top else {}
                tokens.append(TokenLogprob(id, _finite(item.logprobs[i]), {k: _finite(v) for k, v in top.items()}))
            if self._over():
                deltas += self._end("stop")
                break
        else:
            if item.finish_reason is not None:
                self.completion_tokens += drawn_stop is not None
                self.matched_stop = drawn_stop
                deltas += self._end(item.finish_reason)
        return Step(_joined(self._shown(deltas)), tokens, self.finish_reason is not None)

    def _end(self, reason: str) -> list[Delta]:
        deltas = self._finish(reason)
        end = deltas[-1]
        assert isinstance(end, Finish)
        self.finish_reason = end.reason
        if end.stop is not None:
            self.matched_stop = end.stop
        return deltas

    @abc.abstractmethod
    def _read(self, id: int) -> list[Delta]:
        """Deltas of one more id."""

    @abc.abstractmethod
    def _over(self) -> bool:
        """Whether the turn has ended."""

    @abc.abstractmethod
    def _finish(self, reason: str) -> list[Delta]:
        """The last deltas, `Finish` at the end."""

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        return deltas


class ChatOutput(Output):
    """A turn of the assistant; tool calls vanish unless `calls`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        thinking: bool,
        calls: bool,
        stop: str | Sequence[str],
        stream_calls: bool,
    ):
        super().__init__(tokenizer, sampling)
        self._reader = OutputReader(tokenizer, thinking, stop, stream_calls)
        self._calls = calls
        self._closed = False
        self._reasons = thinking and tokenizer.xtml  # still in the think channel

    def _read(self, id: int) -> list[Delta]:
        if self._reasons and self.tokenizer.is_special(id):
            self._reasons = False
            self.reasoning_tokens = self.completion_tokens - 1
        ended = self._reader.ended
        deltas = self._reader.feed([id])
        if self._reader.ended and not ended:  # by the turn's closing tag, else by a stop string, which is text
            self._closed = self.tokenizer.is_special(id)
        return deltas

    def _over(self) -> bool:
        return self._reader.ended and not (self.sampling.ignore_eos and self._closed)

    def _finish(self, reason: str) -> list[Delta]:
        if self._reasons:
            self.reasoning_tokens = self.completion_tokens
        return self._reader.finish(reason)

    def _end(self, reason: str) -> list[Delta]:
        deltas = super()._end(reason)
        if self.finish_reason == "tool_calls" and not self._calls:
            self.finish_reason = "stop"
        return deltas

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        return deltas if self._calls else [d for d in deltas if not isinstance(d, CallStart | CallArguments)]


class TextOutput(Output):
    """Plain text: all of it is content."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, *, stop: str | Sequence[str], skip_special: bool):
        super().__init__(tokenizer, sampling)
        self._stops = StopStrings(stop)
        self._detokenizer = Detokenizer(tokenizer.token_bytes)
        self._skip_special = skip_special

    def _read(self, id: int) -> list[Delta]:
        if self.tokenizer.is_special(id) and self._skip_special:
            return []
        return _content(self._stops.feed(self._detokenizer.feed(id)))

    def _over(self) -> bool:
        return self._stops.matched is not None

    def _finish(self, reason: str) -> list[Delta]:
        rest = self._stops.feed(self._detokenizer.finish()) + self._stops.flush()
        return [*_content(rest), Finish(reason, self._stops.matched)]


def _content(text: str) -> list[Delta]:
    return [Content(text)] if text else []


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind as one delta."""
    out: list[Delta] = []
    for delta in deltas:
        last: Any = out[-1] if out else None
        match delta:
            case Content() | Reasoning() if type(last) is type(delta):
                out[-1] = type(delta)(last.text + delta.text)
            case CallArguments() if isinstance(last, CallArguments) and last.index == delta.index:
                out[-1] = CallArguments(delta.index, last.text + delta.text)
            case _:
                out.append(delta)
    return out


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
