"""What the HTTP layer asks of an engine: token ids in, token ids out. No arrays of jax here."""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Sampling:
    """How to draw a request's tokens; the HTTP layer has checked every range.

    Switched off are: top_k 0, top_p 1, min_p 0, penalties 0, 0 and 1, logprobs None, an empty logit_bias. Generation
    ends with a drawn id of `stop_ids` (already empty of the checkpoint's own ones with `ignore_eos`), which is banned
    for the first `min_new_tokens`. `logprobs` is how many of the most likely tokens to report beside the drawn one.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # in [0, 2**32)
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_new_tokens: int = 0


class GrammarMatcher(Protocol):
    """What may follow the tokens accepted so far; belongs to one request."""

    def mask(self) -> np.ndarray:
        """[vocab] bool, True where a token may come next; at least one is."""
        ...

    def accept(self, token: int) -> bool:
        """Move on by a drawn token; False if the mask forbade it."""
        ...

    def rollback(self, tokens: int) -> None:
        """Take back the last accepted tokens, those of a rejected draft."""
        ...


@dataclass(frozen=True)
class Generate:
    """One sequence to continue. A higher `priority` runs earlier; `adapter` is a loaded one, None the base model."""

    prompt: tuple[int, ...]
    sampling: Sampling
    priority: int = 0
    adapter: str | None = None
    grammar: GrammarMatcher | None = None


@dataclass(frozen=True)
class Tokens:
    """New tokens of a sequence.

    `logprobs` has one entry per id, in nats, of the unmodified distribution; so has `top`, the most likely ids and
    theirs, where the request asked. A drawn stop id is the last of `ids`. The last item of a sequence, and only it, has
    a finish reason. `cached_tokens` of the prompt came from the prefix cache, the same number in every item.
    """

    ids: list[int]
    logprobs: list[float]
    top: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Limits:
    """Sizes in tokens. `max_request_tokens` is the longest prompt plus output that the memory can ever hold."""

    vocab_size: int
    max_position_embeddings: int
    max_request_tokens: int

    @property
    def longest(self) -> int:
        return min(self.max_position_embeddings, self.max_request_tokens)


class Unavailable(RuntimeError):
    """The engine cannot take a request now: its queue is full, it waited too long, or it is shutting down."""


class Backend(Protocol):
    """An engine. Methods are called in the event loop's thread and must not block it."""

    def generate(self, request: Generate) -> AsyncGenerator[Tokens, None]:
        """Closing the generator, at any stage, aborts the request and frees what it holds.

        Raises ValueError before the first item for a request that can never run, and Unavailable for one that cannot
        now.
        """
        ...

    def limits(self) -> Limits: ...

    def stats(self) -> Mapping[str, Any]:
        """Live numbers, cheap to ask for.

        Names of numbers are those of the metrics (spec serving 8.7), without prefix: num_running_reqs, num_queue_reqs,
        cache_hit_rate (0 to 1), ...; a name that ends in `_total` only grows. `pool` draws the memory:
        {"bytes": capacity, "state_bytes": what the state end holds, "page_bytes": what the page end holds}. What
        else is plain JSON is shown in /server_info.
        """
        ...

    async def flush_cache(self) -> None:
        """Forget cached prefixes; Unavailable while requests run."""
        ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Load or replace an adapter; ValueError if it is unfit, NotImplementedError without adapter support."""
        ...

    async def unload_adapter(self, name: str) -> None: ...

    def ready(self) -> bool:
        """Warm and alive."""
        ...
