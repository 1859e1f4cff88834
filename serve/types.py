"""What the layers of the server pass to each other: a request, the plan of one step, and its outcome. No jax."""

import dataclasses
import enum
from collections.abc import Hashable, Sequence

import numpy as np

from serve.memory.host import Transfer
from serve.memory.pool import Move

LAST_SAMPLED = -1  # in a plan's tokens: the token that the previous step drew for this lane


class Unavailable(RuntimeError):
    """No new request can be taken now: the queue is full or the server is draining."""


class FinishReason(enum.StrEnum):
    STOP = "stop"  # a stop id was drawn, or a stop string seen by whoever decodes
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"  # waited longer than the limit without ever running


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens; ranges are checked where requests enter. Off: top_k 0, top_p 1, min_p 0, logprobs None.

    A drawn id of `stop_ids` ends the request and is its last token. `ignore_eos` says that no end is expected before
    `max_new_tokens`, so admission reserves all of them.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue. A higher `priority` runs earlier.

    `namespace` keeps prefixes apart: adapter and its version, cache salt. `key` stands for the prompt in the prefix
    cache, one item per token, where ids alone do not tell (image positions: the image's hash). `breakpoints` are
    prompt lengths, in tokens, at which others will likely branch off. `lockstep`: the next token may only be drawn
    once the host knows the last one (grammars).
    """

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    namespace: Hashable = None
    key: Sequence[int | str | bytes] | None = None
    breakpoints: tuple[int, ...] = ()
    lockstep: bool = False


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a request is that goes on elsewhere: new tokens so far, and how many tokens its state has absorbed."""

    generated: tuple[int, ...]
    computed: int


@dataclasses.dataclass(frozen=True)
class Location:
    """Where a running request's state and latent rows lie: `pages` hold the rows of `progress.computed` tokens."""

    progress: Progress
    slot: int  # physical
    pages: np.ndarray  # [n] int32, physical


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Keep the state after `length` tokens of the request in a slot.

    `length` lies within the step's rows: in prefill at their end or a multiple of the KDA chunk after their start, in
    decoding at a crossing of the interval. In a step that verifies a draft it may exceed what is
    accepted; the slot's content does not matter then.
    """

    length: int
    slot: int  # physical


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request's part of a step: rows of `tokens` at positions `start`, `start + 1`, ...

    Rows below `write_from` have latent rows in their pages already: theirs go to the sink. `pages` covers all
    positions up to the last row. With `samples`, a token is drawn after the last row; rows after the first of a
    decoding request are a draft to verify. `fresh`: the slot is to be cleared first. `insert`: the state and the rows
    before `start` come from elsewhere and are to be put into the slot and the pages first.
    """

    request: Request
    lane: int  # row in the device's tables, the request's own while it runs
    tokens: list[int]
    start: int
    write_from: int
    slot: int  # physical
    pages: np.ndarray  # [n] int32, physical
    samples: bool
    fresh: bool
    insert: bool
    snapshots: tuple[Snapshot, ...]
    draft: int = 0  # rows at the end that are guesses


@dataclasses.dataclass(frozen=True)
class Finished:
    """A request that ended without a step: it waited too long."""

    id: str
    reason: FinishReason


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One step. Run in this order: stores, moves, loads, copies, clears and inserts, the rows, snapshots.

    All units are physical. Plans are run in the order in which they were made, and each is given to `complete` once.
    """

    number: int
    requests: list[PlannedRequest]
    stores: list[Transfer]  # device to host, from where units lie before the moves
    moves: list[Move]
    loads: list[Transfer]  # host to device
    copies: list[tuple[int, int]]  # KDA slots, (source, target)
    finished: list[Finished]

    @property
    def empty(self) -> bool:
        """Nothing for the device to do."""
        return not (self.requests or self.stores or self.moves or self.loads)

    @property
    def rows(self) -> int:
        return sum(len(r.tokens) for r in self.requests)


@dataclasses.dataclass(frozen=True)
class StepResult:
    """Per planned request, in order, the tokens it gained: the accepted draft and one more, none without `samples`."""

    tokens: Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Output:
    """What a step brought to one request. Tokens end at a stop id or at the limit, whatever was drawn beyond."""

    id: str
    tokens: list[int]
    reason: FinishReason | None
    cached_tokens: int  # of the prompt, at first admission
