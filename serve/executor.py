"""Runs the plans of the scheduler on the device, in shapes from fixed lists."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.decode import CHUNKS, bucket
from k3jax.params import Params
from k3jax.sample import Sampling
from serve.device import ROW_BYTES, WORDS, Batch, Drawn, Layout, copy_units, read_unit, run_step, write_unit
from serve.memory.host import Transfer
from serve.memory.pool import Geometry, Kind
from serve.types import PlannedRequest, StepPlan

COPIES = (1, 8, 64)  # units of one copy
Adjustment = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Batch shapes beside `CHUNKS`: requests of a decode and of a prefill batch, pages of a request's table."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    pages: tuple[int, ...]

    @staticmethod
    def of(max_running: int, max_pages: int) -> "Buckets":
        """Each list grows fourfold, so that a batch is at most three quarters padding."""
        return Buckets(decode=_fourfold(max_running), prefill=(1, 4), pages=_fourfold(max_pages))


def _fourfold(last: int) -> tuple[int, ...]:
    return (*itertools.takewhile(lambda n: n < last, (4**i for i in itertools.count())), last)


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows of one request between two states that are kept."""

    part: PlannedRequest
    start: int
    tokens: list[int]
    keep: tuple[int, ...]  # slots that get a copy of the state after these rows
    last: bool  # of the request's part


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was drawn for one request."""

    token: int
    logprob: float
    top_ids: np.ndarray
    top_logprobs: np.ndarray


class Pending:
    """A step that is on its way; its arrays come to the host while the next one runs."""

    def __init__(self) -> None:
        self._drawn: list[Drawn] = []
        self._place: dict[int, tuple[int, int]] = {}  # request of the plan -> batch, row

    def add(self, drawn: Drawn, requests: Iterable[int | None]) -> None:
        for leaf in jax.tree.leaves(drawn):
            leaf.copy_to_host_async()
        self._place |= {r: (len(self._drawn), i) for i, r in enumerate(requests) if r is not None}
        self._drawn.append(drawn)

    def fetch(self) -> dict[int, Answer]:
        """Answers by the request's index in the plan; waits for the device."""
        drawn = jax.device_get(self._drawn)

        def answer(d: Drawn, row: int) -> Answer:
            return Answer(
                int(d.token[row]), float(d.logprob[row]), np.asarray(d.top_ids)[row], np.asarray(d.top_logprobs)[row]
            )

        return {request: answer(drawn[b], row) for request, (b, row) in self._place.items()}


class Executor:
    """Owns the pool on the device. Calls return before the device is done; the pool orders them."""

    def __init__(self, cfg: K3Config, params: Params, layout: Layout, geometry: Geometry, buckets: Buckets, lanes: int):
        self.cfg, self.params, self.layout, self.buckets = cfg, params, layout, buckets
        self.pool = jnp.zeros((geometry.total // ROW_BYTES, WORDS), jnp.uint32)
        self.last = jnp.zeros(lanes + 1, jnp.int32)  # the first is for padding
        self._neutral: dict[int, dict[str, jax.Array]] = {}
        self._host: dict[tuple[Kind, int], np.ndarray] = {}
        self._storing: dict[tuple[Kind, int], jax.Array] = {}  # on their way to `_host`

    def run(self, plan: StepPlan, adjust: Mapping[int, Adjustment]) -> Pending:
        """Dispatch a step. `adjust` holds `Adjust.arrays` of requests by their index in the plan."""
        self._host |= {handle: np.asarray(unit) for handle, unit in self._storing.items()}
        self._storing = {}
        for store in plan.stores:
            self._store(store)
        for kind, moves in itertools.groupby(plan.moves, key=lambda move: move.kind):
            self._copy(kind, [(m.source, m.target) for m in moves])
        for load in plan.loads:
            self._load(load)
        self._copy(Kind.STATE, plan.copies)
        pending = Pending()
        for segments in itertools.zip_longest(*(_segments(part) for part in plan.requests)):
            indexed = [(i, s) for i, s in enumerate(segments) if s is not None]
            for width, group in self._groups(indexed):
                self._step(width, group, adjust, pending)
            self._copy(Kind.STATE, [(s.part.slot, slot) for _, s in indexed for slot in s.keep])
        return pending

    def shapes(self) -> list[tuple[int, int, int]]:
        """Rows, requests and pages of every batch."""
        of = self.buckets
        decode = [(1, r, p) for r in of.decode for p in of.pages]
        return decode + [(w, r, p) for w in CHUNKS for r in of.prefill for p in of.pages]

    def warm_up(self) -> Iterator[None]:
        """Compile everything; an item per batch shape."""
        for kind in Kind:
            for n in COPIES:
                self._copy(kind, [(0, 0)] * n)
            sink = read_unit(self.pool, self.layout.rows(kind), jnp.int32(0))
            self.pool = write_unit(self.pool, sink, jnp.int32(0))
        for w, r, p in self.shapes():
            batch = self._batch(w, r, p, [], {})
            self.pool, self.last, _ = run_step(self.cfg, self.layout, self.params, self.pool, self.last, batch)
            yield
        self.pool.block_until_ready()

    def _groups(self, segments: list[tuple[int, Segment]]) -> Iterator[tuple[int, list[tuple[int, Segment]]]]:
        """Batches of one width: decoding rows together, longer parts by chunk size."""

        def width(item: tuple[int, Segment]) -> int:
            rows = len(item[1].tokens)
            return 1 if rows == 1 else bucket(rows, CHUNKS, "rows of a chunk")

        for w, items in itertools.groupby(sorted(segments, key=width), key=width):
            most = self.buckets.decode[-1] if w == 1 else self.buckets.prefill[-1]
            for group in itertools.batched(items, most):
                yield w, list(group)

    def _step(
        self, width: int, group: list[tuple[int, Segment]], adjust: Mapping[int, Adjustment], pending: Pending
    ) -> None:
        R = bucket(len(group), self.buckets.decode if width == 1 else self.buckets.prefill, "requests of a batch")
        P = bucket(max(1, *(len(s.part.pages) for _, s in group)), self.buckets.pages, "pages of a request")
        batch = self._batch(width, R, P, group, adjust)
        self.pool, self.last, drawn = run_step(self.cfg, self.layout, self.params, self.pool, self.last, batch)
        pending.add(drawn, [i if s.last and s.part.samples else None for i, s in group])

    def _batch(
        self, width: int, R: int, P: int, group: Sequence[tuple[int, Segment]], adjust: Mapping[int, Adjustment]
    ) -> Batch:
        tokens, pages = np.zeros((R, width), np.int32), np.zeros((R, P), np.int32)
        count, row, slots, length, write_from = np.zeros((5, R), np.int32)
        fresh = np.zeros(R, bool)
        temperature, top_p, min_p = np.zeros(R, np.float32), np.ones(R, np.float32), np.zeros(R, np.float32)
        top_k, seed = np.zeros(R, np.int32), np.zeros(R, np.uint32)
        adjusted = {j: adjust[i] for j, (i, s) in enumerate(group) if s.last and i in adjust}
        for j, (_, s) in enumerate(group):
            n, part, how = len(s.tokens), s.part, s.part.request.sampling
            tokens[j, :n], count[j], length[j] = s.tokens, n, s.start
            pages[j, : len(part.pages)] = part.pages
            row[j], slots[j], write_from[j] = part.lane + 1, part.slot, part.write_from
            fresh[j] = part.fresh and s.start == part.start
            temperature[j], top_k[j], top_p[j], min_p[j] = how.temperature, how.top_k, how.top_p, how.min_p
            seed[j] = how.seed & 0xFFFFFFFF
        return Batch(
            tokens=jnp.asarray(tokens),
            count=jnp.asarray(count),
            row=jnp.asarray(row),
            slots=jnp.asarray(slots),
            fresh=jnp.asarray(fresh),
            pages=jnp.asarray(pages),
            length=jnp.asarray(length),
            write_from=jnp.asarray(write_from),
            sampling=Sampling(*(jnp.asarray(a) for a in (temperature, top_k, top_p, min_p, seed))),
            **self._adjustments(R, adjusted),
        )

    def _adjustments(self, R: int, by_row: Mapping[int, Adjustment]) -> dict[str, jax.Array]:
        """Arrays for the batch; the neutral ones stay on the device."""
        shape = (R, self.cfg.vocab_size)
        if not by_row:
            if R not in self._neutral:
                self._neutral[R] = {"bias": jnp.zeros(shape), "repetition": jnp.ones(shape)}
            return self._neutral[R]
        bias, repetition = np.zeros(shape, np.float32), np.ones(shape, np.float32)
        for row, arrays in by_row.items():
            bias[row], repetition[row] = arrays
        return {"bias": jnp.asarray(bias), "repetition": jnp.asarray(repetition)}

    def _copy(self, kind: Kind, pairs: Sequence[tuple[int, int]]) -> None:
        for group in itertools.batched(pairs, COPIES[-1]):
            padded = [*group, *[(0, 0)] * (bucket(len(group), COPIES, "copies") - len(group))]
            source, target = np.array(padded, np.int32).T
            self.pool = copy_units(self.pool, self.layout.rows(kind), jnp.asarray(source), jnp.asarray(target))

    def _store(self, transfer: Transfer) -> None:
        unit = read_unit(self.pool, self.layout.rows(transfer.kind), jnp.int32(transfer.device))
        unit.copy_to_host_async()
        self._storing[transfer.kind, transfer.host] = unit

    def _load(self, transfer: Transfer) -> None:
        unit = self._host[transfer.kind, transfer.host]
        self.pool = write_unit(self.pool, jnp.asarray(unit), jnp.int32(transfer.device))


def _segments(part: PlannedRequest) -> list[Segment]:
    """Cut a request's rows where a state is kept, and into chunks of the largest size at multiples of it."""
    end = part.start + len(part.tokens)
    kept: dict[int, list[int]] = {s.length: [] for s in part.snapshots if part.start < s.length <= end}
    for s in part.snapshots:
        if s.length in kept:
            kept[s.length].append(s.slot)
    chunk = CHUNKS[-1]
    cuts = {*kept, *range((part.start // chunk + 1) * chunk, end, chunk), end}
    out, start = [], part.start
    for cut in sorted(cuts):
        rows = part.tokens[start - part.start : cut - part.start]
        out.append(Segment(part, start, rows, tuple(kept.get(cut, ())), cut == end))
        start = cut
    return out
