"""Settings of the scheduler, and its estimate of how much of `max_new_tokens` requests will use."""

import dataclasses
from collections.abc import Iterable

from serve.scheduler_sequence import Sequence

RESERVE_CLIP = 4096  # new tokens that are reserved for one request at most
LAST_SHARE, DECAY_STEPS = 0.14, 600  # of the first reserve ratio (spec serving 1.7)


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Lengths in tokens, times in seconds.

    `max_tokens` bounds the rows of a step, decoding and prefill together. `max_wait` ends requests that never ran; None
    lets them wait. A step of priority is worth `ageing` seconds of waiting. Without `prefix_cache` nothing is shared.
    `reserve` is the share of its remaining new tokens set aside for each request at first: low values admit more
    and retract more.
    """

    page: int = 64
    kda_chunk: int = 64
    max_tokens: int = 2048
    max_running: int = 64
    max_waiting: int = 4096
    max_length: int = 2**20
    max_wait: float | None = None
    ageing: float = 10.0
    reserve: float = 0.7
    prefix_cache: bool = True
    decode_interval: int = 256  # a state is kept each time a decoding request crosses a multiple
    max_states_per_path: int | None = None

    def check(self, grid: int) -> None:
        """ValueError for settings under which some request could never proceed. `grid`: prefill is cut at multiples."""
        for name in ("max_running", "max_waiting", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, the minimum is 1; give a positive number")
        if not 0 <= self.reserve <= 1:
            raise ValueError(f"reserve is {self.reserve}, allowed is 0 to 1; 0.7 is usual")
        if self.max_tokens < max(grid, self.max_running):
            raise ValueError(
                f"max_tokens is {self.max_tokens}, a step needs at least {max(grid, self.max_running)}: one prefill"
                f" chunk of {grid} or a row of each of {self.max_running} running requests; raise it"
            )


class ReserveRatio:
    """Share of its remaining new tokens set aside for each request; falls while nothing is retracted."""

    def __init__(self, first: float):
        self.value = self.first = first

    def decay(self) -> None:
        last = LAST_SHARE * self.first
        self.value = max(last, self.value - (self.first - last) / DECAY_STEPS)

    def reset(self, running: list[Sequence]) -> None:
        """After a retraction: what the remaining requests have used, and a little more."""
        used = sum(s.generated + 20 for s in running)
        allowed = sum(s.request.sampling.max_new_tokens for s in running) + 1
        self.value = max(self.value, min(1.0, used / allowed))

    def pages(self, sequences: Iterable[Sequence], page: int) -> int:
        """Pages to set aside for what the sequences will draw."""
        total = 0
        for s in sequences:
            share = 1.0 if s.request.sampling.ignore_eos else self.value
            total += int(min(s.remaining, RESERVE_CLIP) * share) // page + 1
        return total
