"""The prefix tree against contents: a page or state is right when it holds the digest of the prefix it stands for."""

import dataclasses
import random

import numpy as np
import pytest

from serve.memory.host import HostMemory
from serve.memory.invariants import check_pool, check_tree
from serve.memory.keys import extend_keys
from serve.memory.node import Node
from serve.memory.pool import Geometry, Kind, StaticPool, UnifiedPool
from serve.memory.tree import PrefixTree
from tests.serve.fake_memory import FakeMemory

PAGE = 2  # tokens
GEOMETRY = Geometry(460, 20, 3)


def keys_of(items, namespace=None) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, items, PAGE, namespace)
    return keys


def word(key: bytes) -> int:
    return int.from_bytes(key[:8])


@dataclasses.dataclass
class Run:
    keys: list[bytes]
    slot: int
    table: np.ndarray
    node: Node
    done: int  # pages computed
    last: Node | None = None


class Driver:
    """Requests that absorb a page at a time, on fake memory; every operation is one step."""

    def __init__(self, seed: int, host: int | None = None, cap: int | None = None, static: int | None = None):
        self.rng = random.Random(seed)
        self.pool = UnifiedPool(GEOMETRY) if static is None else StaticPool(GEOMETRY, static)
        self.tree = PrefixTree(self.pool, HostMemory(host, GEOMETRY) if host else None, cap)
        self.memory = FakeMemory(GEOMETRY)
        self.runs: list[Run] = []
        self.prompts: list[list[int]] = [[]]
        self.resumed = 0

    def place(self, kind: Kind, identity: int) -> int:
        return int(self.pool.physical(kind, [identity])[0])

    def step(self, copies=(), writes=()) -> None:
        """Prepare, copy slots, write (kind, virtual id, key) and poison what is free."""
        stores, loads = self.tree.take_transfers()
        self.memory.prepare(stores, self.pool.take_moves(), loads)
        for source, target in copies:
            content = self.memory.unit(Kind.STATE, self.place(Kind.STATE, source))
            self.memory.unit(Kind.STATE, self.place(Kind.STATE, target))[:] = content
        for kind, identity, key in writes:
            self.memory.unit(kind, self.place(kind, identity))[:] = word(key)
        live = [(k, self.place(k, v)) for k in Kind for v, at in enumerate(self.pool.ends[k].place) if at >= 0]
        self.memory.poison(live)

    def expect(self, kind: Kind, identity: int, key: bytes) -> None:
        assert (self.memory.unit(kind, self.place(kind, identity)) == word(key)).all(), "wrong contents"

    def start(self) -> None:
        base = self.rng.choice(self.prompts)
        cut = self.rng.choice([len(base), self.rng.randint(0, len(base)), 0])
        prompt = base[:cut][:30] + self.rng.choices([0, 1], k=self.rng.randint(1, 9))
        self.prompts = (self.prompts + [prompt])[-12:]
        keys = keys_of(prompt)
        if not keys:
            return
        match = self.tree.lookup(keys, (len(prompt) - 1) // PAGE)
        assert match == self.tree.lookup(keys, (len(prompt) - 1) // PAGE)
        match = self.tree.acquire(match)
        fresh = len(keys) - match.pages + match.loads
        if not self.tree.can_make_room(1, fresh):
            self.release(match.node, match.state_node)
            return
        assert self.tree.make_room(1, 0)
        slot = self.pool.allocate(Kind.STATE, 1)
        assert self.tree.make_room(0, fresh)  # evicts after units moved in this step
        pages = self.pool.allocate(Kind.PAGE, fresh)
        self.tree.load(match, pages[: match.loads])
        self.tree.make_room(self.rng.randint(0, 2), self.rng.randint(0, 9))  # stores after loads were queued
        table = np.array(self.tree.path_pages(match.node) + pages[match.loads :], np.int32)
        assert len(table) == len(keys)
        run = Run(keys, slot[0], table, match.node, match.resume)
        copies = []
        if match.state_node:
            self.resumed += 1
            if match.state_node.state is None:
                self.tree.load_state(match.state_node, run.slot)
            else:
                copies = [(match.state_node.state, run.slot)]
        self.step(copies)
        if match.state_node:
            self.tree.unlock_state(match.state_node)
            self.expect(Kind.STATE, run.slot, keys[match.resume - 1])
        for i in range(match.pages):
            self.expect(Kind.PAGE, table[i], keys[i])
        self.runs.append(run)

    def release(self, node: Node, state_node: Node | None) -> None:
        if state_node:
            self.tree.unlock_state(state_node)
        self.tree.unlock(node)

    def advance(self) -> None:
        run = self.rng.choice(self.runs)
        if run.done == len(run.keys):
            return self.finish(run)
        start, run.done = run.done, self.rng.randint(run.done + 1, len(run.keys))
        writes = [(Kind.PAGE, run.table[i], run.keys[i]) for i in range(max(start, run.node.end), run.done)]
        snapshot = None
        if self.tree.make_room(1, 0):
            [snapshot] = self.pool.allocate(Kind.STATE, 1)
        end = self.rng.randint(start + 1, run.done)
        writes.append((Kind.STATE, run.slot, run.keys[run.done - 1]))
        if snapshot is not None:
            writes.append((Kind.STATE, snapshot, run.keys[end - 1]))
        self.step(writes=writes)
        if snapshot is not None:
            node = self.tree.donate(run.node, run.keys, run.table, end, snapshot, "end")
            if node.end > run.node.end:
                self.tree.lock(node)
                self.tree.unlock(run.node)
                run.node = node
            if run.last and self.rng.random() < 0.5:
                self.tree.discard_state(run.last)
            run.last = node

    def finish(self, run: Run) -> None:
        self.runs.remove(run)
        self.pool.free(Kind.STATE, [run.slot])
        self.pool.free(Kind.PAGE, run.table[run.node.end :].tolist())
        self.tree.unlock(run.node)

    def check(self) -> None:
        check_pool(self.pool)
        check_tree(self.tree)
        stack = [self.tree.root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            for key, page in zip(node.keys, node.pages or (), strict=False):
                self.expect(Kind.PAGE, page, key)
            if node.state is not None:
                self.expect(Kind.STATE, node.state, node.keys[-1])
        for run in self.runs:
            for i in range(run.done):
                self.expect(Kind.PAGE, run.table[i], run.keys[i])
            if run.done:
                self.expect(Kind.STATE, run.slot, run.keys[run.done - 1])
        assert self.pool.live(Kind.STATE) == self.tree.states + len(self.runs)
        held = sum(len(r.table) - r.node.end for r in self.runs)
        assert self.pool.live(Kind.PAGE) == self.tree.pages + held

    def drive(self, operations: int) -> None:
        for _ in range(operations):
            act = self.rng.random()
            if act < 0.35 or not self.runs:
                self.start()
            elif act < 0.9:
                self.advance()
            elif act < 0.96:
                self.finish(self.rng.choice(self.runs))
            elif act < 0.99:
                states, pages = self.rng.randint(0, 5), self.rng.randint(0, 30)
                able = self.tree.can_make_room(states, pages)
                before = self.tree.pages, self.tree.states
                assert self.tree.make_room(states, pages) == able == self.pool.fits(states, pages)
                assert able or before == (self.tree.pages, self.tree.states)
                self.step()
            else:
                self.tree.clear()
                self.step()
            self.check()
        for run in list(self.runs):
            self.finish(run)
        self.tree.clear()
        self.check()
        assert self.pool.live(Kind.STATE) == self.pool.live(Kind.PAGE) == self.tree.nodes == 0
        assert self.tree.host is None or self.tree.host.used == 0


VARIANTS = [{}, {"host": 300}, {"cap": 2}, {"static": 9}, {"static": 5, "host": 90, "cap": 1}]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_contents_survive_random_operations(variant):
    driver = Driver(seed=1, **variant)
    driver.drive(500)
    assert driver.resumed > 10


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_contents_survive_many_random_operations(variant):
    Driver(seed=2, **variant).drive(10_000)


class Small:
    """A tree fed with whole prompts, two tokens a page."""

    def __init__(self, **options):
        self.pool = UnifiedPool(GEOMETRY)
        self.tree = PrefixTree(self.pool, **options)

    def add(self, items, *ends, namespace=None) -> Node:
        """Donate states after `ends` pages, as one request would; returns the deepest node."""
        keys = keys_of(items, namespace)
        match = self.tree.acquire(self.tree.lookup(keys, len(keys)))
        if match.state_node:
            self.tree.unlock_state(match.state_node)
        fresh = self.pool.allocate(Kind.PAGE, len(keys) - match.pages)
        table = np.array(self.tree.path_pages(match.node) + fresh, np.int32)
        node = match.node
        for end in ends:
            [state] = self.pool.allocate(Kind.STATE, 1)
            given = self.tree.donate(node, keys, table, end, state, "end")
            if given.end > node.end:
                self.tree.lock(given)
                self.tree.unlock(node)
                node = given
        self.pool.free(Kind.PAGE, table[node.end :].tolist())
        self.tree.unlock(node)
        check_tree(self.tree)
        return node

    def find(self, items, namespace=None) -> tuple[int, int]:
        match = self.tree.lookup(keys_of(items, namespace), len(items) // PAGE)
        return match.pages, match.resume


def test_a_fork_is_known_but_resumes_at_the_nearest_state():
    small = Small()
    small.add([1, 1, 2, 2, 3, 3, 4, 4], 4)
    assert small.find([1, 1, 2, 2, 3, 3, 4, 4, 9, 9]) == (4, 4)
    assert small.find([1, 1, 2, 2, 3, 3, 9, 9]) == (3, 0)
    assert small.find([1, 1, 2, 2, 3, 3]) == (3, 0)
    small.add([1, 1, 2, 2, 3, 3, 9, 9], 2, 4)
    assert small.find([1, 1, 2, 2, 3, 3, 9, 9]) == (4, 4)
    assert small.find([1, 1, 2, 2, 3, 3, 7]) == (3, 2)
    assert (small.tree.pages, small.tree.states) == (5, 3)


def test_the_second_donor_of_a_prefix_frees_its_copies():
    small = Small()
    first, second = (small.add([1, 1, 2, 2], 2) for _ in range(2))
    assert first is second and (small.pool.live(Kind.PAGE), small.pool.live(Kind.STATE)) == (2, 1)


def test_namespaces_and_images_never_share():
    small = Small()
    small.add([1, 1, 2, 2], 2, namespace=("adapter", 1))
    assert small.find([1, 1, 2, 2], namespace=("adapter", 1)) == (2, 2)
    assert small.find([1, 1, 2, 2], namespace=("adapter", 2)) == small.find([1, 1, 2, 2]) == (0, 0)
    small.add([1, "sha:a", "sha:a", 2], 2)
    assert small.find([1, "sha:a", "sha:a", 2]) == (2, 2)
    assert small.find([1, "sha:b", "sha:b", 2]) == (0, 0)


def test_states_go_before_pages_of_a_live_path_and_leaves_go_whole():
    """State 1 of 3 is the oldest: it goes alone, its page stays. Then the leaf goes with the pages only it used."""
    small = Small()
    small.add([1, 1, 2, 2, 3, 3], 1, 2, 3)
    assert small.tree.make_room(states=small.pool.available(Kind.STATE) + 1)
    assert (small.tree.pages, small.tree.states) == (3, 2)
    assert small.find([1, 1, 9, 9]) == (1, 0)
    assert small.tree.make_room(states=small.pool.available(Kind.STATE) + 1)
    assert (small.tree.pages, small.tree.states) == (3, 1)
    assert small.tree.make_room(states=small.pool.available(Kind.STATE) + 1)
    assert (small.tree.pages, small.tree.states, small.tree.nodes) == (0, 0, 0)


def test_the_least_recently_resumed_prefix_goes_first():
    small = Small()
    for first in (1, 2, 3):
        small.add([first, 0, first, 0], 2)
    small.add([1, 0, 1, 0], 2)  # used again
    taken = small.pool.allocate(Kind.STATE, small.pool.available(Kind.STATE))
    for gone in (2, 3, 1):
        assert small.find([gone, 0, gone, 0]) == (2, 2)
        assert small.tree.make_room(states=1)
        assert small.find([gone, 0, gone, 0]) == (0, 0)
        taken += small.pool.allocate(Kind.STATE, small.pool.available(Kind.STATE))


def test_pages_pay_for_a_state_and_states_for_pages():
    small = Small()
    small.add(list(range(60)), 30)
    wanted = small.pool.available(Kind.STATE) + 2
    assert small.tree.make_room(states=wanted) and small.tree.pages == 0
    small.add([1, 1, 2, 2], 1, 2)
    assert small.tree.make_room(pages=small.pool.available(Kind.PAGE) + 1) and small.tree.states == 1


def test_locked_prefixes_stay_and_are_no_error():
    small = Small()
    small.add([1, 1, 2, 2], 2)
    match = small.tree.acquire(small.tree.lookup(keys_of([1, 1, 2, 2]), 2))
    assert not small.tree.make_room(states=small.pool.available(Kind.STATE) + 1)
    small.tree.unlock_state(match.state_node)
    assert small.tree.make_room(states=small.pool.available(Kind.STATE) + 1)
    assert (small.tree.pages, small.tree.states) == (2, 0)
    small.tree.unlock(match.node)
    assert small.tree.nodes == 0
    check_tree(small.tree)


def test_the_path_cap_drops_the_shallowest_but_never_a_fork():
    small = Small(max_states_per_path=2)
    small.add([1, 1, 2, 2, 3, 3], 1)
    small.add([1, 1, 9, 9], 2)
    small.add([1, 1, 2, 2, 3, 3, 4, 4], 2, 3, 4)
    path = small.tree.lookup(keys_of([1, 1, 2, 2, 3, 3, 4, 4]), 4).node.path()
    assert [(n.end, n.state is not None) for n in path] == [(1, True), (2, False), (3, False), (4, True)]


def test_a_prefix_returns_from_the_host():
    small = Small(host=HostMemory(100, GEOMETRY))
    small.add([1, 1, 2, 2, 3, 3], 1, 3)
    assert small.tree.make_room(pages=146) and small.tree.pages == small.tree.states == 0
    assert small.tree.host.used == 3 * 3 + 2 * 20
    match = small.tree.acquire(small.tree.lookup(keys_of([1, 1, 2, 2, 3, 3, 4]), 3))
    assert (match.pages, match.resume, match.loads) == (3, 3, 3)
    pages = small.pool.allocate(Kind.PAGE, 3)
    small.tree.load(match, pages)
    small.tree.load_state(match.state_node, *small.pool.allocate(Kind.STATE, 1))
    stores, loads = small.tree.take_transfers()
    assert [t.kind for t in stores].count(Kind.PAGE) == 3 and len(stores) == 5
    stored = {(t.kind, t.host) for t in stores}
    assert len(loads) == 4 and all((t.kind, t.host) in stored for t in loads)
    assert small.tree.path_pages(match.node) == pages and small.tree.host.used == 2 * 20


def test_host_memory_too_small_for_anything_is_refused():
    with pytest.raises(ValueError, match="host memory of 22 bytes cannot hold a state and a page"):
        HostMemory(22, GEOMETRY)
