"""Requests enter, run step by step, and leave.

Call order: `schedule`, run the plan, `complete`. One step ahead, the next `schedule` comes before the `complete` of the
step in flight, but never two. Not thread-safe: one thread calls everything. Capacity never raises: requests wait,
optional states are skipped, or running requests are retracted and later resumed with the tokens they have.
"""

import dataclasses

from serve.memory.pool import Usage
from serve.scheduler_check import check_progress, check_request
from serve.scheduler_sequence import Sequence
from serve.scheduler_steps import Steps
from serve.types import FinishReason, Location, Progress, Request, Unavailable


@dataclasses.dataclass(frozen=True)
class Stats:
    """A moment's numbers. `counts` only grow; token counts there are of prompts at admission."""

    running: int
    waiting: int
    usage: Usage
    cached_pages: int
    cached_states: int
    reserve_ratio: float
    counts: dict[str, int]


class Scheduler(Steps):
    """All there is to call, with `schedule` and `complete`. The pool must be empty, and nobody else may use it."""

    def submit(self, request: Request, now: float, progress: Progress | None = None) -> None:
        """Queue a request; `now` in seconds of any steady clock. With `progress` it goes on where another scheduler or
        an earlier run left it, and its first step asks for an insert.

        ValueError when it can never run, Unavailable when it cannot be taken at this time.
        """
        if request.id in self._all:
            raise ValueError(f"request id {request.id!r} is in use; choose another")
        check_request(request, self.max_request_tokens)
        if progress:
            check_progress(request, progress)
        if self.draining:
            raise Unavailable("the server is shutting down and takes no new requests; send it to another one")
        if len(self.waiting) >= self.config.max_waiting:
            raise Unavailable(f"{self.config.max_waiting} requests are waiting, the limit; retry later")
        sequence = Sequence(request, next(self._numbers), now, progress)
        self._all[request.id] = sequence
        self.waiting.add(sequence)

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> bool:
        """End a request at any stage and free what it holds; what a step in flight still draws for it is dropped.

        False when no such request is left.
        """
        sequence = self._all.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, reason)
        return True

    def locate(self, request_id: str) -> Location | None:
        """Where a running request lies until the next `schedule`, to extract it; `finish` then frees it here.

        None when it is not running or a step in flight has its newest token.
        """
        s = self._all.get(request_id)
        return None if s is None or s.lane < 0 or s.unread else self.memory.locate(s)

    def propose(self, request_id: str, draft: list[int]) -> None:
        """Guesses that the request's next step verifies; they hold for that step only."""
        if sequence := self._all.get(request_id):
            sequence.draft = list(draft)

    def drain(self) -> None:
        """Take no new requests; those that are here go on to their end."""
        self.draining = True

    @property
    def idle(self) -> bool:
        """Nothing waits, runs, or is in flight."""
        return not (self._all or self._in_flight)

    def flush_cache(self) -> None:
        """Forget every prefix that no running request uses."""
        self.tree.clear()

    def stats(self) -> Stats:
        return Stats(
            running=len(self.running),
            waiting=len(self.waiting),
            usage=self.pool.usage(),
            cached_pages=self.tree.pages,
            cached_states=self.tree.states,
            reserve_ratio=self.ratio.value,
            counts=dict(self.counts + self.memory.counts + self.tree.counts),
        )
