"""What requests hold in the pool and in the prefix tree, and how a step's plan refers to it."""

import collections
import dataclasses

from serve.memory.keys import common_pages
from serve.memory.node import Node
from serve.memory.pool import Kind, Pool
from serve.memory.tree import PrefixTree
from serve.scheduler_sequence import Sequence
from serve.types import Finished, Location, PlannedRequest, Progress, Snapshot, StepPlan

MAX_SNAPSHOTS = 2  # per request and step


@dataclasses.dataclass(slots=True)
class Kept:
    """A state to be kept after a step, in a slot that nobody owns until then."""

    length: int
    slot: int
    origin: str


@dataclasses.dataclass(slots=True)
class Slice:
    """One request's part of a step, in virtual ids."""

    sequence: Sequence
    tokens: list[int]
    start: int
    samples: bool
    prefill: bool = False
    draft: int = 0
    fresh: bool = False
    insert: bool = False
    source: Node | None = None  # its state is copied into the request's slot first
    kept: list[Kept] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Residency:
    """`grid`: prefix lengths at which prefill keeps states; `track`: those at which decoding does. Both in tokens."""

    def __init__(self, pool: Pool, tree: PrefixTree, page: int, grid: int, track: int, cache: bool):
        self.pool, self.tree, self.page, self.grid, self.track, self.cache = pool, tree, page, grid, track, cache
        self.counts: collections.Counter[str] = collections.Counter()

    def start(self, s: Sequence, reserve: int, cached: bool) -> Slice | None:
        """Give a request its slot and the pages of all known tokens, or nothing. `reserve`: pages to leave for others.

        Returns the beginnings of its first slice. The found prefix stays locked; its state until `build`.
        """
        keys = s.page_keys(self.page)
        limit = (len(s.tokens) - 1) // self.page if cached and self.cache and not s.inserted else 0
        match = self.tree.acquire(self.tree.lookup(keys, limit))
        total = -(-len(s.tokens) // self.page)
        new = total - match.pages + match.loads
        if not (self.tree.can_make_room(1, new + reserve) and self.tree.make_room(1, new)):
            if match.state_node:
                self.tree.unlock_state(match.state_node)
            self.tree.unlock(match.node)
            return None
        slots, pages = self.pool.allocate(Kind.STATE, 1), self.pool.allocate(Kind.PAGE, new)
        assert slots is not None and pages is not None
        self.tree.load(match, pages[: match.loads])
        s.admit(slots[0], self.tree.path_pages(match.node) + pages[match.loads :], match, self.page)
        branch = s.write_from // self.grid * self.grid
        s.branch = branch if branch > s.computed else 0
        if s.cached is None:
            s.cached = match.resume * self.page
            self.counts["prompt_tokens"] += s.prompt_length
            self.counts["known_tokens"] += s.write_from
            self.counts["cached_tokens"] += s.cached
            self.counts["replayed_tokens"] += s.write_from - s.cached
        if match.state_node and match.state_node.state is None:
            self.tree.load_state(match.state_node, s.slot)
        part = Slice(s, [], s.computed, samples=False, prefill=True, fresh=not s.computed, source=match.state_node)
        if s.parked:
            self.tree.unpark(s.parked, s.slot, s.table[: len(s.parked.pages)].tolist())
        part.insert = s.inserted > 0 and s.parked is None
        s.inserted, s.parked = 0, None
        return part

    def grow(self, missing: dict[Sequence, int]) -> None:
        """Append so many pages to each table; the caller made room."""
        pages = self.pool.allocate(Kind.PAGE, sum(missing.values()))
        assert pages is not None
        for s, count in missing.items():
            s.table[s.held : s.held + count] = pages[:count]
            s.held += count
            del pages[:count]

    def locate(self, s: Sequence) -> Location:
        pages = self.pool.physical(Kind.PAGE, s.table[: -(-s.computed // self.page)])
        return Location(Progress(tuple(s.tokens[s.prompt_length :]), s.computed), self._slot(s.slot), pages)

    def park(self, s: Sequence) -> None:
        """Before the release of a retracted request: keep its state and pages on the host, where there is one."""
        if s.computed and not (s.unread and s.guessing):
            s.parked = self.tree.park(s.slot, s.table[: -(-s.computed // self.page)].tolist())
            s.inserted = s.computed if s.parked else 0

    def discard(self, s: Sequence) -> None:
        """Free what a waiting request has on the host."""
        if s.parked:
            self.tree.unpark(s.parked)
            s.parked = None

    def release(self, s: Sequence) -> None:
        """Free what is the request's own; what it gave to the tree stays there."""
        assert s.node is not None
        self.pool.free(Kind.STATE, [s.slot])
        self.pool.free(Kind.PAGE, s.table[s.node.end : s.held].tolist())
        self.tree.unlock(s.node)
        s.forget()

    # States to keep

    def _points(self, part: Slice) -> list[tuple[int, str]]:
        """Lengths in (start, end] whose state is worth keeping, the most useful first."""
        s, end = part.sequence, part.end
        if not part.prefill:
            track = end // self.track * self.track
            return [(track, "decode")] if track > part.start else []
        wanted = [(s.branch, "branch"), *((fork, "branch") for fork in sorted(s.forks, reverse=True))]
        wanted += [(b // self.grid * self.grid, "hint") for b in sorted(s.request.breakpoints, reverse=True)]
        wanted = [(length, origin) for length, origin in wanted if part.start < length <= end]
        wanted.insert(1, (end // self.grid * self.grid, "end"))
        if end == len(s.tokens):  # the same prompt again can use all but its last token
            wanted.append(((end - 1) // self.grid * self.grid, "end"))
        points: dict[int, str] = {}
        for length, origin in wanted:
            if part.start < length:
                points.setdefault(length, origin)
        return list(points.items())[:MAX_SNAPSHOTS]

    def follow(self, s: Sequence, slices: list[Slice]) -> bool:
        """Whether a waiting request had better wait for the state of one that prefills the same tokens now.

        The leader is asked to keep its state where the two part. A request waits for one leader at most.
        """
        if s.leader is not None:
            return s.leader.lane >= 0 and s.leader.collected < s.fork
        if not self.cache or s.inserted or s.retracted:
            return False
        keys, limit = s.page_keys(self.page), (len(s.tokens) - 1) // self.page
        leader, fork = None, 0
        for part in slices:
            if part.prefill:
                shared = common_pages(part.sequence.keys, keys, 0, limit) * self.page // self.grid * self.grid
                if shared > max(fork, part.start):
                    leader, fork = part.sequence, shared
        if leader is None or fork <= self.tree.lookup(keys, limit).resume * self.page:
            return False
        s.leader, s.fork = leader, fork
        leader.forks.append(fork)
        self.counts["followers"] += 1
        return True

    def keep(self, slices: list[Slice]) -> None:
        """Find slots for the states that this step can leave behind; where there is none, the state is not kept."""
        if not self.cache:
            return
        for part in sorted(slices, key=lambda p: not p.prefill):
            for length, origin in self._points(part):
                if self.tree.make_room(states=1):
                    slots = self.pool.allocate(Kind.STATE, 1)
                    assert slots is not None
                    part.kept.append(Kept(length, slots[0], origin))
                else:
                    self.counts["states_skipped"] += 1

    def collect(self, part: Slice, current: bool, computed: int) -> None:
        """After a step: give the kept states to the tree, with the pages before them; free those that are void."""
        s = part.sequence
        if current:
            s.collected = part.end
        for kept in sorted(part.kept, key=lambda k: k.length):
            if not current or kept.length > computed:
                self.pool.free(Kind.STATE, [kept.slot])
                continue
            assert s.node is not None
            keys, end = s.page_keys(self.page), kept.length // self.page
            node = self.tree.donate(s.node, keys, s.table, end, kept.slot, kept.origin)
            if node.end > s.node.end:
                self.tree.lock(node)
                self.tree.unlock(s.node)
                s.node = node
            if kept.origin == "decode":
                if s.track is not None and s.track is not node:
                    self.tree.discard_state(s.track)
                s.track = node

    # The plan

    def build(self, number: int, slices: list[Slice], finished: list[Finished]) -> StepPlan:
        """Physical tables, after the last allocation of the step; unlocks the states that the plan copies."""
        slot_of = self.pool.physical(Kind.STATE, [p.sequence.slot for p in slices]).tolist() if slices else []
        requests, copies = [], []
        for part, slot in zip(slices, slot_of, strict=True):
            s = part.sequence
            if part.source is not None and part.source.state is not None:
                copies.append((self._slot(part.source.state), slot))
            requests.append(
                PlannedRequest(
                    request=s.request,
                    lane=s.lane,
                    tokens=part.tokens,
                    start=part.start,
                    write_from=s.write_from,
                    slot=slot,
                    pages=self.pool.physical(Kind.PAGE, s.table[: -(-part.end // self.page)]),
                    samples=part.samples,
                    fresh=part.fresh,
                    insert=part.insert,
                    snapshots=tuple(Snapshot(k.length, self._slot(k.slot)) for k in part.kept),
                    draft=part.draft,
                )
            )
        stores, loads = self.tree.take_transfers()
        plan = StepPlan(number, requests, stores, self.pool.take_moves(), loads, copies, finished)
        for part in slices:
            if part.source is not None:
                self.tree.unlock_state(part.source)
                part.source = None
        return plan

    def _slot(self, identity: int) -> int:
        return int(self.pool.physical(Kind.STATE, [identity])[0])
