"""The two-ended pool against contents: what was written under an id is read back under it, whatever moved."""

import random

import numpy as np
import pytest

from serve.memory.invariants import check_pool
from serve.memory.pool import Geometry, Kind, StaticPool, UnifiedPool
from tests.serve.fake_memory import FakeMemory

GEOMETRIES = [Geometry(1000, 37, 10), Geometry(997, 10, 37), Geometry(640, 16, 16), Geometry(5000, 301, 64)]


def drive(pool: UnifiedPool, operations: int, seed: int) -> None:
    """Random allocations, frees, compactions and steps; a write goes to physical places read after the moves."""
    rng = random.Random(seed)
    memory = FakeMemory(pool.geometry)
    content: dict[tuple[Kind, int], int] = {}
    fresh: list[tuple[Kind, int]] = []
    counter = 0
    for _ in range(operations):
        kind = rng.choice(list(Kind))
        act = rng.random()
        if act < 0.45:
            n = rng.randint(1, 6)
            expected = pool.available(kind) >= n
            ids = pool.allocate(kind, n)
            assert (ids is not None) == expected
            for v in ids or []:
                assert (kind, v) not in content and v > 0
                content[kind, v] = 0
                fresh.append((kind, v))
        elif act < 0.8:
            mine = [v for k, v in content if k is kind]
            gone = rng.sample(mine, min(len(mine), rng.randint(1, 6)))
            pool.free(kind, gone)
            for v in gone:
                del content[kind, v]
        elif act < 0.83 and isinstance(pool, UnifiedPool):
            pool.compact(rng.choice([None, 1, 3]))
        else:
            settled = {(k, v): pool.settled(k, v) for k, v in content if (k, v) not in fresh}
            for (k, v), place in settled.items():
                assert (memory.unit(k, place) == content[k, v]).all()
            moves = pool.take_moves()
            sources, targets = {(m.kind, m.source) for m in moves}, {(m.kind, m.target) for m in moves}
            assert len(sources) == len(moves) == len(targets) and sources.isdisjoint(targets)
            rng.shuffle(moves)
            memory.move(moves)
            for k, v in fresh:
                if (k, v) in content:
                    counter += 1
                    content[k, v] = counter
                    memory.unit(k, int(pool.physical(k, [v])[0]))[:] = counter
            fresh.clear()
            for (k, v), value in content.items():
                assert (memory.unit(k, int(pool.physical(k, [v])[0])) == value).all(), "contents were lost"
        check_pool(pool)
    assert not memory.words[: pool.geometry.floor].any(), "something wrote into the sink"


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_contents_survive_random_operations(geometry):
    drive(UnifiedPool(geometry), 500, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_contents_survive_many_random_operations(geometry):
    drive(UnifiedPool(geometry), 10_000, seed=2)


def test_static_pool_keeps_its_split():
    pool = StaticPool(Geometry(1000, 37, 10), states=5)
    assert pool.available(Kind.STATE) == 5
    assert pool.available(Kind.PAGE) == (1000 - 37 * 6) // 10
    assert pool.allocate(Kind.STATE, 6) is None
    assert len(pool.allocate(Kind.STATE, 5)) == 5 and pool.available(Kind.PAGE) == 77
    drive(StaticPool(Geometry(1000, 37, 10), states=9), 500, seed=3)


def test_holes_of_one_kind_fund_the_other():
    """Floor 100; seven states fill 100..800, twenty pages 800..1000. Freed pages in the middle fund one more state."""
    pool = UnifiedPool(Geometry(1000, 100, 10))
    assert len(pool.allocate(Kind.STATE, 7)) == 7
    pages = pool.allocate(Kind.PAGE, 20)
    assert pool.gap == 0 and pool.allocate(Kind.STATE, 1) is None and pool.allocate(Kind.PAGE, 1) is None
    pool.take_moves()
    assert sorted(pool.physical(Kind.PAGE, pages).tolist()) == list(range(80, 100))
    pool.free(Kind.PAGE, pages[0:20:2])
    assert pool.usage().page_holes == 10 and pool.fits(states=1) and not pool.fits(states=1, pages=1)
    [state] = pool.allocate(Kind.STATE, 1)
    assert pool.physical(Kind.STATE, [state]).tolist() == [8]
    moves = pool.take_moves()
    assert len(moves) == 5 and all(m.kind is Kind.PAGE and m.source < 90 <= m.target for m in moves)
    assert pool.usage().page_holes == 0 and pool.gap == 0


def test_a_full_pack_leaves_no_hole():
    pool = UnifiedPool(GEOMETRIES[0])
    states, pages = pool.allocate(Kind.STATE, 8), pool.allocate(Kind.PAGE, 40)
    pool.free(Kind.STATE, states[::3])
    pool.free(Kind.PAGE, pages[::3])
    pool.compact()
    usage = pool.usage()
    assert (usage.states, usage.pages, usage.state_holes, usage.page_holes) == (5, 26, 0, 0)
    assert all(end.span == end.live for end in pool.ends)


def test_one_request_can_have_everything():
    """One state and pages up to the last byte, one page at a time, however the pool was used before."""
    pool = UnifiedPool(GEOMETRIES[0])
    drive(pool, 200, seed=5)
    for kind in Kind:
        pool.free(kind, [v for v, k in enumerate(pool.ends[kind].place) if k >= 0])
    pool.allocate(Kind.STATE, 1)
    count = pool.available(Kind.PAGE)
    assert count == (1000 - 2 * 37) // 10
    assert all(pool.allocate(Kind.PAGE, 1) for _ in range(count)) and pool.allocate(Kind.PAGE, 1) is None


@pytest.mark.parametrize("identity", [0, 3, 10_000, -1])
def test_freeing_what_is_not_live_raises(identity):
    pool = UnifiedPool(GEOMETRIES[0])
    ids = pool.allocate(Kind.STATE, 3)
    pool.free(Kind.STATE, ids)
    with pytest.raises(ValueError, match=f"unit {identity} is not allocated"):
        pool.free(Kind.STATE, [identity])


def test_sizes_that_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="three states of 100 and a page of 10 need 410 in whole pages"):
        Geometry(409, 100, 10)
    with pytest.raises(ValueError, match="minimum is 1"):
        Geometry(100, 0, 10)
    with pytest.raises(ValueError, match="99 state slots leave no page in 1000 bytes; choose between 1 and 25"):
        StaticPool(Geometry(1000, 37, 10), states=99)
    assert StaticPool(Geometry(1000, 37, 10), states=25).available(Kind.PAGE) == 3  # 1000 - 26 * 37 = 38 bytes


def test_padding_ids_map_to_the_sink():
    pool = UnifiedPool(GEOMETRIES[0])
    assert pool.physical(Kind.STATE, np.zeros(3, np.int32)).tolist() == [0, 0, 0]
