"""An engine without a model: the state is a hash of the tokens absorbed, a latent row a hash of its prefix.

It runs plans on fake memory and compares everything it reads with what the tokens alone say.
"""

from collections.abc import Callable

import numpy as np

from serve.memory.pool import Kind
from serve.scheduler import Scheduler
from serve.types import LAST_SAMPLED, FinishReason, Output, Progress, Request, SamplingParams, StepPlan, StepResult
from tests.serve.fake_memory import FakeMemory

MASK = 2**64 - 1
VOCAB = 50


def mix(x: int) -> int:
    x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15 & MASK
    return x ^ (x >> 29)


def absorb(state: int, token: int) -> int:
    return mix(state * 3 + token + 1 & MASK)


def row_of(state: int) -> int:
    return mix(state ^ 0xABCDEF)


def draw(state: int, row_sum: int, seed: int) -> int:
    return mix(state + row_sum + seed & MASK) % VOCAB


def alone(request: Request) -> list[int]:
    """The tokens of a request, computed without any memory to manage."""
    state = rows = 0
    out: list[int] = []
    tokens, how = list(request.prompt), request.sampling
    while len(out) < how.max_new_tokens and not (out and out[-1] in how.stop_ids):
        for token in tokens:
            state = absorb(state, token)
            rows += row_of(state)
        tokens = [draw(state, rows & MASK, how.seed)]
        out += tokens
    return out


class FakeEngine:
    """Runs a scheduler's plans, one step ahead with `overlap`. `drafts` makes guesses for some requests."""

    def __init__(self, scheduler: Scheduler, overlap: bool = False, draft: Callable[[Request], int] | None = None):
        self.scheduler, self.overlap, self.draft = scheduler, overlap, draft
        self.memory = FakeMemory(scheduler.pool.geometry)
        self.lanes = np.full(scheduler.config.max_running, -7, np.int64)
        self.truth: dict[str, list[int]] = {}  # all tokens, known here before the scheduler hears of them
        self.states: dict[str, list[int]] = {}  # states[n] after n tokens
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.arrays: dict[str, tuple[int, list[int]]] = {}  # handed over, not yet inserted
        self.now = 0.0
        self.steps = 0
        self.pending: tuple[StepPlan, StepResult] | None = None
        self.plans: list[StepPlan] = []

    def submit(self, id: str, prompt, new: int = 8, **how) -> Request:
        options = {k: how.pop(k) for k in ("priority", "namespace", "key", "breakpoints", "lockstep") if k in how}
        request = Request(id, tuple(prompt), SamplingParams(max_new_tokens=new, **how), **options)
        self.scheduler.submit(request, self.now)
        self.truth[id] = list(prompt)
        self.states[id] = [0]
        self.outputs[id] = []
        return request

    def adopt(self, request: Request, progress: Progress, arrays: tuple[int, list[int]]) -> None:
        """Continue a request that another engine gave away."""
        self.scheduler.submit(request, self.now, progress)
        self.truth[request.id] = [*request.prompt, *progress.generated]
        self.states[request.id] = [0]
        self.outputs[request.id] = list(progress.generated)
        self.arrays[request.id] = arrays

    def step(self) -> StepPlan:
        """Plan, run, and complete this step, or with overlap the one before."""
        self.now += 1.0
        self.steps += 1
        if self.pending and self.steps % 5 == 0:  # an engine may also catch up first
            self._complete(*self.pending)
            self.pending = None
        if self.draft:
            self._propose(self.draft)
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        for f in plan.finished:
            self.reasons[f.id] = f.reason
        result = self._run(plan)
        done, self.pending = ((plan, result), None) if not self.overlap else (self.pending, (plan, result))
        if done:
            self._complete(*done)
        return plan

    def _complete(self, plan: StepPlan, result: StepResult) -> None:
        for output in self.scheduler.complete(plan, result):
            self._take(output)

    def run(self, limit: int = 5000) -> None:
        while self.scheduler._all:
            self.step()
            assert self.steps < limit, "no end in sight"
        if self.pending:
            self._complete(*self.pending)
            self.pending = None
        assert self.scheduler.idle

    def _propose(self, guesses: Callable[[Request], int]) -> None:
        for s in self.scheduler.running:
            truth, state, rows = list(s.tokens), 0, 0
            for token in truth:
                state = absorb(state, token)
                rows += row_of(state)
            draft = []
            for i in range(guesses(s.request)):
                draft.append(draw(state, rows & MASK, s.request.sampling.seed))
                state = absorb(state, draft[-1])
                rows += row_of(state)
                if (s.number + i + s.generated) % 3 == 0:
                    draft[-1] = (draft[-1] + 1) % VOCAB
            self.scheduler.propose(s.request.id, draft)

    def _take(self, output: Output) -> None:
        assert output.id not in self.reasons
        self.outputs[output.id] += output.tokens
        self.cached[output.id] = output.cached_tokens
        if output.reason:
            self.reasons[output.id] = output.reason

    # The device

    def _slot(self, slot: int) -> np.ndarray:
        assert slot > 0
        return self.memory.unit(Kind.STATE, slot)

    def _run(self, plan: StepPlan) -> StepResult:
        self.memory.prepare(plan.stores, plan.moves, plan.loads)
        for source, target in plan.copies:
            self._slot(target)[:] = self._slot(source)
        for part in plan.requests:
            if part.fresh:
                self._slot(part.slot)[:] = 0
            if part.insert:
                self._insert(part, *self.arrays.pop(part.request.id))
        assert len({p.slot for p in plan.requests}) == len(plan.requests) == len({p.lane for p in plan.requests})
        results, writes = [], []
        for part in plan.requests:
            drawn, states = self._forward(part)
            results.append(drawn)
            writes += [(s.slot, states.get(s.length, 0xBAD)) for s in part.snapshots]
        for slot, state in writes:
            self._slot(slot)[:] = state
        pool = self.scheduler.pool
        live = [(k, int(pool.ends[k].table[v])) for k in Kind for v, at in enumerate(pool.ends[k].place) if at >= 0]
        self.memory.poison(live)
        return StepResult(results)

    def extract(self, id: str) -> tuple[Progress, tuple[int, list[int]]] | None:
        """A running request's progress, and its state and latent rows."""
        found = self.scheduler.locate(id)
        if found is None:
            return None
        rows = self._rows(found.pages, found.progress.computed).tolist()
        return found.progress, (int(self._slot(found.slot)[0]), rows)

    def _insert(self, part, state: int, rows: list[int]) -> None:
        assert len(rows) == part.start
        self._slot(part.slot)[:] = state
        page = self.scheduler.config.page
        for position, row in enumerate(rows):
            self.memory.unit(Kind.PAGE, part.pages[position // page])[position % page] = row

    def _forward(self, part) -> tuple[list[int], dict[int, int]]:
        id, page = part.request.id, self.scheduler.config.page
        truth, states = self.truth[id], self.states[id]
        if not part.draft:
            grid, end = self.scheduler.config.kda_chunk, part.start + len(part.tokens)
            assert all(s.length == end or (s.length - part.start) % grid == 0 for s in part.snapshots)
        assert len(part.pages) * page >= part.start + len(part.tokens) and 0 not in part.pages
        state = int(self._slot(part.slot)[0])
        assert (self._slot(part.slot) == state).all(), "a slot was torn"
        while len(states) <= part.start:
            states.append(absorb(states[-1], truth[len(states) - 1]))
        assert state == states[part.start], f"{id}: wrong state at {part.start}"
        after: dict[int, int] = {}
        drawn: list[int] = []
        sure = len(part.tokens) - part.draft
        for i, token in enumerate(part.tokens):
            assert token != LAST_SAMPLED or not part.request.lockstep
            token = int(self.lanes[part.lane]) if token == LAST_SAMPLED else token
            if i >= sure and token != drawn[-1]:
                break  # a wrong guess: it and what follows is not absorbed
            position = part.start + i
            if i < sure:
                assert token == truth[position], f"{id}: wrong token at {position}"
            state = after[position + 1] = absorb(state, token)
            if position >= part.write_from:
                self.memory.unit(Kind.PAGE, part.pages[position // page])[position % page] = row_of(state)
            if part.samples and i >= sure - 1:
                drawn.append(draw(state, self._row_sum(part.pages, position + 1), part.request.sampling.seed))
        self._slot(part.slot)[:] = state
        for length, value in after.items():
            if length == len(states):
                states.append(value)
        self._check_rows(id, part.pages, max(after, default=part.start))
        if drawn:
            truth += drawn
            self.lanes[part.lane] = drawn[-1]
        return drawn, after

    def _rows(self, pages: np.ndarray, length: int) -> np.ndarray:
        return np.concatenate([self.memory.unit(Kind.PAGE, p) for p in pages])[:length]

    def _row_sum(self, pages: np.ndarray, length: int) -> int:
        return int(self._rows(pages, length).sum(dtype=np.uint64))

    def _check_rows(self, id: str, pages: np.ndarray, length: int) -> None:
        expected = [row_of(s) for s in self.states[id][1 : length + 1]]
        assert self._rows(pages, length).tolist() == expected, f"{id}: wrong latent rows"
