"""One buffer for both kinds of state: KDA slots from the low end, MLA pages from the high end (spec serving 4).

Host-side bookkeeping only. Ids handed out are virtual and stay valid until freed; compaction changes where they
lie. A step asks for `moves` and physical tables last, so tables never go stale.
"""

import dataclasses
import enum
import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Kind(enum.IntEnum):
    STATE = 0  # one KDA slot: recurrent state and convolution window of every KDA layer
    PAGE = 1  # latent rows of `page` tokens in every MLA layer


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Bytes of the buffer and of one unit of each kind. Physical unit i of a kind starts at byte i * unit.

    Bytes below `floor` are the sink: unit 0 of both kinds lies there, is never allocated, and takes the reads
    and writes of padding rows.
    """

    total: int
    state: int
    page: int

    def __post_init__(self):
        if min(self.total, self.state, self.page) < 1:
            raise ValueError(
                f"pool has total={self.total}, state={self.state}, page={self.page} bytes, the minimum is 1;"
                " give positive sizes"
            )
        sink = self.first(Kind.STATE) * self.state
        least = sink + 3 * self.state + self.page
        if least > self.units(Kind.PAGE) * self.page:
            raise ValueError(
                f"pool of {self.total} bytes cannot serve: a sink of {sink}, three states of {self.state} and a page of"
                f" {self.page} need {least} in whole pages; give more memory or a smaller page"
            )

    @property
    def floor(self) -> int:
        return max(self.state, self.page)

    def unit(self, kind: Kind) -> int:
        return self.state if kind is Kind.STATE else self.page

    def first(self, kind: Kind) -> int:
        """First physical unit that may be allocated."""
        return -(-self.floor // self.unit(kind))

    def units(self, kind: Kind) -> int:
        """Physical units of the whole buffer, sink included."""
        return self.total // self.unit(kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """Copy physical unit `source` over physical unit `target` of one kind."""

    kind: Kind
    source: int
    target: int


@dataclasses.dataclass(frozen=True)
class Usage:
    """Where the bytes are: sink, state end (live units and holes), gap, page end. Counts are units."""

    geometry: Geometry
    states: int
    state_holes: int
    pages: int
    page_holes: int
    gap: int  # bytes between the two ends
    moves: int  # since the start


class Pool(Protocol):
    """What the prefix tree and the scheduler need of device memory.

    Capacity is never an error: `allocate` returns None when `fits` is false. Freeing what is not live raises.
    """

    geometry: Geometry
    shared: bool  # freeing one kind can make room for the other

    def fits(self, states: int = 0, pages: int = 0) -> bool:
        """Whether so many more units (negative: fewer) can be live at once."""
        ...

    def available(self, kind: Kind) -> int:
        """Units of one kind that could be allocated now."""
        ...

    def allocate(self, kind: Kind, count: int) -> list[int] | None:
        """`count` virtual ids, all or none. May move live units; see `take_moves`."""
        ...

    def free(self, kind: Kind, ids: Sequence[int]) -> None: ...

    def live(self, kind: Kind) -> int: ...

    def physical(self, kind: Kind, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32 physical units of virtual ids, valid until the next `allocate`."""
        ...

    def settled(self, kind: Kind, identity: int) -> int:
        """Physical unit where the content lay when `take_moves` was last called."""
        ...

    def take_moves(self) -> list[Move]:
        """Moves since the last call, to run before anything else is written.

        Every unit moves at most once and no target is a source: any order is right, and all at once.
        """
        ...

    def usage(self) -> Usage: ...


class End:
    """One end of the buffer. Place k counts units from the end's own side; `span` is the watermark."""

    def __init__(self, base: int, step: int, capacity: int):
        self.base, self.step, self.capacity = base, step, capacity
        self.span = 0
        self.live = 0
        self.place = [-1] * (capacity + 1)  # virtual id -> place
        self.owner = [-1] * capacity  # place -> virtual id
        self.table = np.full(capacity + 1, -1, np.int32)  # virtual id -> physical unit
        self.table[0] = 0
        self.free_ids = list(range(capacity, 0, -1))
        self.settled: dict[int, int] = {}  # moved id -> place at the last step
        self.fresh: set[int] = set()  # allocated since the last step: no content yet
        self._holes: list[int] = []  # heap, may hold stale places

    @property
    def holes(self) -> int:
        return self.span - self.live

    def _lowest_hole(self) -> int:
        while True:
            k = heapq.heappop(self._holes)
            if k < self.span and self.owner[k] < 0:
                return k

    def _bind(self, identity: int, k: int) -> None:
        self.place[identity] = k
        self.owner[k] = identity
        self.table[identity] = self.base + self.step * k

    def take(self, count: int) -> list[int]:
        """Allocate into holes first, then past the watermark; the caller made sure that there is room."""
        ids = []
        for _ in range(count):
            identity = self.free_ids.pop()
            if self.holes:
                k = self._lowest_hole()
            else:
                k = self.span
                self.span += 1
            self.live += 1
            self._bind(identity, k)
            self.fresh.add(identity)
            ids.append(identity)
        return ids

    def free(self, identity: int) -> None:
        k = self.place[identity] if 0 < identity <= self.capacity else -1
        if k < 0:
            raise ValueError(f"unit {identity} is not allocated; free each id once")
        self.place[identity] = self.table[identity] = -1
        self.owner[k] = -1
        self.live -= 1
        self.free_ids.append(identity)
        self.fresh.discard(identity)
        self.settled.pop(identity, None)
        self._absorb()
        if k < self.span:
            heapq.heappush(self._holes, k)
        if len(self._holes) > 2 * self.holes + 64:
            self._holes = [k for k in range(self.span) if self.owner[k] < 0]

    def _absorb(self) -> None:
        while self.span and self.owner[self.span - 1] < 0:
            self.span -= 1

    def retreat(self, units: int) -> int:
        """Lower the watermark by at least `units` (at most `holes`), moving survivors; returns the moves made."""
        target, moved = self.span - units, 0
        while self.span > target:
            identity, hole = self.owner[self.span - 1], self._lowest_hole()
            if identity not in self.fresh:
                self.settled.setdefault(identity, self.span - 1)
            self.owner[self.span - 1] = -1
            self._bind(identity, hole)
            moved += 1
            self._absorb()
        return moved

    def take_moves(self, kind: Kind) -> list[Move]:
        """A place is left by its topmost unit and filled from above, so old content never follows old content."""
        moves = [
            Move(kind, self.base + self.step * old, self.base + self.step * self.place[v])
            for v, old in self.settled.items()
        ]
        self.settled.clear()
        self.fresh.clear()
        return moves


class UnifiedPool:
    """The two-ended pool. A kind that needs bytes makes the other close its holes; nothing else moves."""

    shared = True

    def __init__(self, geometry: Geometry):
        self.geometry = geometry
        first = {kind: geometry.first(kind) for kind in Kind}
        units = {kind: geometry.units(kind) for kind in Kind}
        self.ends = (
            End(first[Kind.STATE], 1, units[Kind.STATE] - first[Kind.STATE]),
            End(units[Kind.PAGE] - 1, -1, units[Kind.PAGE] - first[Kind.PAGE]),
        )
        self.moves = 0

    def _frontiers(self, states: int, pages: int) -> tuple[int, int]:
        """Byte above the state end and byte where the page end begins, for so many units in each."""
        g = self.geometry
        return (self.ends[0].base + states) * g.state, (self.ends[1].base + 1 - pages) * g.page

    @property
    def gap(self) -> int:
        high, low = self._frontiers(self.ends[0].span, self.ends[1].span)
        return low - high

    def fits(self, states: int = 0, pages: int = 0) -> bool:
        states += self.ends[0].live
        pages += self.ends[1].live
        if states > self.ends[0].capacity or pages > self.ends[1].capacity:
            return False
        high, low = self._frontiers(states, pages)
        return high <= low

    def available(self, kind: Kind) -> int:
        high, low = self._frontiers(self.ends[0].live, self.ends[1].live)
        end = self.ends[kind]
        return min((low - high) // self.geometry.unit(kind), end.capacity - end.live)

    def allocate(self, kind: Kind, count: int) -> list[int] | None:
        if not (self.fits(states=count) if kind is Kind.STATE else self.fits(pages=count)):
            return None
        end, peer = self.ends[kind], self.ends[1 - kind]
        short = (count - end.holes) * self.geometry.unit(kind) - self.gap
        if count > end.holes and short > 0:
            self.moves += peer.retreat(-(-short // self.geometry.unit(Kind(1 - kind))))
        return end.take(count)

    def free(self, kind: Kind, ids: Sequence[int]) -> None:
        for identity in ids:
            self.ends[kind].free(int(identity))

    def live(self, kind: Kind) -> int:
        return self.ends[kind].live

    def physical(self, kind: Kind, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.ends[kind].table[ids]

    def settled(self, kind: Kind, identity: int) -> int:
        end = self.ends[kind]
        return end.base + end.step * end.settled.get(identity, end.place[identity])

    def compact(self, limit: int | None = None) -> None:
        """Close the holes of both ends, for idle moments; `limit` bounds the moves."""
        for end in self.ends:
            while end.holes and limit != 0:
                self.moves += end.retreat(1)
                limit = limit if limit is None else limit - 1

    def take_moves(self) -> list[Move]:
        return [move for kind in Kind for move in self.ends[kind].take_moves(kind)]

    def usage(self) -> Usage:
        low, high = self.ends
        return Usage(self.geometry, low.live, low.holes, high.live, high.holes, self.gap, self.moves)


class StaticPool(UnifiedPool):
    """Two fixed regions, `states` slots and the rest pages: what unified memory is measured against."""

    shared = False

    def __init__(self, geometry: Geometry, states: int):
        super().__init__(geometry)
        high, low = self._frontiers(states, 0)
        if states < 1 or low - high < geometry.page:
            raise ValueError(
                f"{states} state slots leave no page in {geometry.total} bytes; choose between 1 and"
                f" {(low - geometry.page) // geometry.state - self.ends[0].base}"
            )
        self.limit = (states, (low - high) // geometry.page)

    def fits(self, states: int = 0, pages: int = 0) -> bool:
        return self.ends[0].live + states <= self.limit[0] and self.ends[1].live + pages <= self.limit[1]

    def available(self, kind: Kind) -> int:
        return self.limit[kind] - self.ends[kind].live
