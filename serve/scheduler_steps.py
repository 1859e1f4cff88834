"""One step of continuous batching: which rows of which requests it has, and what its outcome means (spec serving 1)."""

import collections
import itertools

from serve.memory.host import HostMemory
from serve.memory.keys import checkpoint_grid, track_grid
from serve.memory.pool import Kind, Pool
from serve.memory.tree import PrefixTree
from serve.scheduler_config import ReserveRatio, SchedulerConfig
from serve.scheduler_memory import Residency, Slice
from serve.scheduler_queue import WaitingQueue
from serve.scheduler_sequence import Sequence
from serve.types import LAST_SAMPLED, Finished, FinishReason, Output, StepPlan, StepResult


class Steps:
    """Decoding requests get their rows first, then those that prefill, then the queue, as long as the budget lasts.

    Prefill is cut at grid points only. When what decoding leaves is too little for any, the next step turns the order.
    `max_request_tokens`: most tokens, prompt and new ones together, that memory and model allow one request.
    """

    def __init__(self, config: SchedulerConfig, pool: Pool, host: HostMemory | None = None):
        self.config, self.pool = config, pool
        self.grid = checkpoint_grid(config.page, config.kda_chunk)
        config.check(self.grid)
        self.tree = PrefixTree(pool, host, config.max_states_per_path)
        track = track_grid(self.grid, config.decode_interval)
        self.memory = Residency(pool, self.tree, config.page, self.grid, track, config.prefix_cache)
        self.running: list[Sequence] = []  # in order of admission
        self.waiting = WaitingQueue(config.ageing)
        self.ratio = ReserveRatio(config.reserve)
        self.counts: collections.Counter[str] = collections.Counter()
        self.draining = False
        self._all: dict[str, Sequence] = {}
        self._lanes = list(range(config.max_running - 1, -1, -1))
        self._numbers = itertools.count()
        self._in_flight: dict[int, list[Slice]] = {}
        self._finished: list[Finished] = []
        self._prefill_first = False  # decoding left no room for a whole chunk: this time it comes second
        self.max_request_tokens = min(config.max_length, self._alone())

    def _alone(self) -> int:
        """Tokens whose pages fit an empty pool beside one state."""
        low, high = 0, self.pool.geometry.units(Kind.PAGE)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.pool.fits(1, middle) else (low, middle)
        return low * self.config.page

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. With nothing to run before the step in flight is complete, the plan is empty."""
        assert len(self._in_flight) <= 1, "complete the older step in flight first"
        self._expire(now)
        retracted = self._grow()
        decoders = [s for s in self.running if self._ready(s)]
        slices: list[Slice] = []
        budget = self.config.max_tokens
        if not self._prefill_first:
            budget = self._plan_decode(decoders, slices, budget)
        budget, starved = self._plan_prefill(slices, budget)
        if not retracted:
            starved |= self._admit(slices, budget)
        if self._prefill_first:
            self._plan_decode(decoders, slices, self.config.max_tokens - sum(len(p.tokens) for p in slices))
        self._prefill_first = starved and not any(p.prefill for p in slices)
        self.memory.keep(slices)
        finished, self._finished = self._finished, []
        plan = self.memory.build(next(self._numbers), slices, finished)
        self._in_flight[plan.number] = slices
        return plan

    def complete(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take in what a step drew. Steps are completed in the order in which they were planned."""
        slices = self._in_flight.pop(plan.number)
        outputs = []
        for part, drawn in zip(slices, result.tokens, strict=True):
            s = part.sequence
            current = s.lane >= 0  # neither ended nor retracted meanwhile
            computed = part.end
            tokens: list[int] = []
            if s.finish is None and part.samples:
                tokens = self._accept(s, part, list(drawn))
                if part.draft:
                    computed = part.start + len(drawn)
                if current:
                    s.computed += computed - part.end
                computed = min(computed, len(s.tokens))  # tokens drawn past the end are not kept
            self.memory.collect(part, current, computed)
            if tokens:
                reason = self._reason(s)
                outputs.append(Output(s.request.id, tokens, reason, s.cached or 0))
                if reason:
                    self._end(s, reason)
        return outputs

    def _accept(self, s: Sequence, part: Slice, drawn: list[int]) -> list[int]:
        """Append the drawn tokens up to a stop id or the limit; returns those appended."""
        if not 1 <= len(drawn) <= 1 + part.draft:
            raise ValueError(
                f"step result has {len(drawn)} tokens for request {s.request.id!r}, expected 1 to {1 + part.draft}"
            )
        how = s.request.sampling
        s.unread -= 1
        s.drawn += len(drawn) - 1
        kept = []
        for token in drawn[: how.max_new_tokens - s.generated]:
            kept.append(token)
            if token in how.stop_ids:
                break
        for token in kept:
            s.add_token(token)
        return kept

    def _reason(self, s: Sequence) -> FinishReason | None:
        if s.tokens[-1] in s.request.sampling.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if s.generated >= s.request.sampling.max_new_tokens else None

    def _expire(self, now: float) -> None:
        limit = self.config.max_wait
        if limit is not None:
            for s in [s for s in self.waiting if not s.retracted and now - s.arrival > limit]:
                self._finished.append(Finished(s.request.id, FinishReason.TIMEOUT))
                self._end(s, FinishReason.TIMEOUT)

    def _ready(self, s: Sequence) -> bool:
        """Whether a decoding request can have rows in the next step."""
        if s.unread and (s.request.lockstep or s.guessing):
            return False
        return s.decoding and s.remaining > 0

    def _missing(self) -> dict[Sequence, int]:
        """Pages that decoding requests lack for their next rows."""
        page, missing = self.config.page, {}
        for s in self.running:
            if self._ready(s):
                if s.draft:
                    s.draft = [] if s.unread else s.draft[: s.remaining - 1]
                pages = -(-(s.computed + 1 + len(s.draft)) // page)
                if pages > s.held:
                    missing[s] = pages - s.held
        return missing

    def _grow(self) -> bool:
        """Pages for the next rows of every decoding request; True if others were retracted for it."""
        retracted = False
        while missing := self._missing():
            if self.tree.make_room(pages=sum(missing.values())):
                self.memory.grow(missing)
                break
            if any(s.draft for s in missing):
                for s in missing:
                    s.draft = []
                continue
            if len(self.running) < 2 or any(s.remaining == 0 for s in self.running):
                break  # the step in flight will give memory back; those who lack pages sit this one out
            self._retract(
                min(self.running, key=lambda s: (s.request.priority, s.generated, -s.prompt_length, -s.number))
            )
            retracted = True
        if retracted:
            self.ratio.reset(self.running)
        elif self.running:
            self.ratio.decay()
        return retracted

    def _plan_decode(self, decoders: list[Sequence], slices: list[Slice], budget: int) -> int:
        page = self.config.page
        for s in decoders:
            rows = 1 + len(s.draft)
            if rows <= budget and s.computed + rows <= s.held * page:
                tokens = [LAST_SAMPLED if s.unread else s.tokens[s.computed], *s.draft]
                slices.append(Slice(s, tokens, s.computed, samples=True, draft=len(s.draft)))
                self._advance(s, rows, samples=True)
                s.guessing, s.draft = bool(s.draft), []
                budget -= rows
        return budget

    def _plan_prefill(self, slices: list[Slice], budget: int) -> tuple[int, bool]:
        """The budget that is left, and whether a request got no rows at all."""
        starved = False
        for s in self.running:
            if not s.decoding:
                rows = self._plan_chunk(Slice(s, [], s.computed, samples=False, prefill=True), slices, budget)
                budget -= rows
                starved |= not rows
        return budget, starved

    def _chunk(self, start: int, end: int, budget: int) -> int:
        """Rows of the next chunk: all that is left, or as much as the budget allows up to a grid point.

        One that starts between two grid points, handed over or paused there, goes to the next point at most.
        """
        if start % self.grid:
            end = min(end, start + -start % self.grid)
        if end - start <= budget:
            return end - start
        return max(0, (start + budget) // self.grid * self.grid - start)

    def _plan_chunk(self, part: Slice, slices: list[Slice], budget: int) -> int:
        s = part.sequence
        rows = self._chunk(s.computed, s.prefill_end, budget)
        if rows == 0:
            return 0
        part.tokens = s.tokens[s.computed : s.computed + rows]
        part.samples = s.computed + rows == s.prefill_end
        slices.append(part)
        self._advance(s, rows, part.samples)
        s.guessing = False
        return rows

    def _advance(self, s: Sequence, rows: int, samples: bool) -> None:
        s.computed += rows
        s.drawn += samples
        s.unread += samples

    def _admit(self, slices: list[Slice], budget: int) -> bool:
        """Start waiting requests while rows, lanes and memory last; True if rows are what was lacking."""
        for s in list(self.waiting) if self._lanes else ():
            if not self._lanes:
                break
            if self.memory.follow(s, slices):
                continue
            if not self._chunk(s.inserted, len(s.tokens), budget):
                return True
            reserve = self.ratio.pages([*self.running, s], self.config.page) if self.running else 0
            part = self.memory.start(s, reserve, cached=True)
            if part is None and not self.running:
                part = self.memory.start(s, 0, cached=False)
            if part is None:
                break
            self.waiting.remove(s)
            s.lane = self._lanes.pop()
            self.running.append(s)
            budget -= self._plan_chunk(part, slices, budget)
        return False

    # Leaving

    def _leave(self, s: Sequence) -> None:
        """Out of the running list or the queue, with everything it holds freed."""
        if s.lane < 0:
            self.waiting.remove(s)
            self.memory.discard(s)
            return
        self.running.remove(s)
        self.memory.release(s)
        self._lanes.append(s.lane)
        s.lane = -1
        s.draft = []

    def _retract(self, s: Sequence) -> None:
        self.memory.park(s)
        self._leave(s)
        s.retracted = True
        self.waiting.add(s)
        self.counts["retracted"] += 1

    def _end(self, s: Sequence, reason: FinishReason) -> None:
        self._leave(s)
        s.finish = reason
        del self._all[s.request.id]
        self.counts[f"finished_{reason}"] += 1
