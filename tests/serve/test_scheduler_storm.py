"""Many requests on little memory: every answer is the one computed alone, and nothing is left behind."""

import random

import pytest

from serve.memory.host import HostMemory
from serve.memory.invariants import check_pool, check_tree
from serve.memory.pool import Geometry, Kind, StaticPool, UnifiedPool
from serve.scheduler import Scheduler
from serve.scheduler_config import SchedulerConfig
from serve.types import FinishReason
from tests.serve.fake_engine import VOCAB, FakeEngine, alone

PAGE, CHUNK, LONGEST = 4, 8, 96
STATE = 24
REQUEST_BYTES = STATE + LONGEST  # one word per token
GEOMETRY = Geometry(STATE + 3 * REQUEST_BYTES, STATE, PAGE)  # the sink and three of the longest requests


def scheduler(static: bool = False, host: int | None = None, **options) -> Scheduler:
    settings = dict(page=PAGE, kda_chunk=CHUNK, max_tokens=32, max_running=16, decode_interval=8, reserve=0.0) | options
    pool = StaticPool(GEOMETRY, states=8) if static else UnifiedPool(GEOMETRY)
    return Scheduler(SchedulerConfig(**settings), pool, HostMemory(host, GEOMETRY) if host else None)


def check_empty(s: Scheduler) -> None:
    """Only the cache holds memory, nothing is locked, and without the cache nothing is live."""
    check_pool(s.pool)
    check_tree(s.tree)
    assert s.idle and s.pool.live(Kind.STATE) == s.tree.states and s.pool.live(Kind.PAGE) == s.tree.pages
    assert s.tree.evictable_pages == s.tree.pages and s.tree.evictable_states == s.tree.states
    assert sorted(s._lanes) == list(range(s.config.max_running))
    s.flush_cache()
    assert s.tree.parked == 0 and (s.tree.host is None or s.tree.host.used == 0)
    assert s.pool.live(Kind.STATE) == s.pool.live(Kind.PAGE) == s.tree.nodes == 0


def random_requests(rng: random.Random, engine: FakeEngine, count: int, prefix: str = "r"):
    """Prompts that share prefixes, some with stop ids, priorities and seeds; one at a time."""
    bases: list[list[int]] = [[]]
    for i in range(count):
        base = rng.choice(bases)
        prompt = base[: rng.choice([len(base), rng.randint(0, len(base))])][:48]
        prompt = prompt + rng.choices(range(VOCAB), k=rng.randint(1, 24))
        bases = (bases + [prompt])[-8:]
        new = rng.choice([rng.randint(1, 24), LONGEST - len(prompt)])
        stops = tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 2])))
        lockstep = rng.random() < 0.1
        yield engine.submit(
            f"{prefix}{i}", prompt, new, seed=i, stop_ids=stops, priority=rng.randint(0, 2), lockstep=lockstep
        )


VARIANTS = {
    "plain": {},
    "overlap": {"overlap": True},
    "cache off": {"prefix_cache": False},
    "static, overlap": {"static": True, "overlap": True},
    "host, overlap": {"host": 400, "overlap": True},
    "host, drafts, overlap": {"host": 400, "draft": True, "overlap": True},
    "drafts": {"draft": True},
    "drafts, overlap": {"draft": True, "overlap": True},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("cache", [False, True])
def test_64_requests_on_memory_for_three(overlap, cache):
    s = scheduler(prefix_cache=cache, max_running=64, max_tokens=64)
    engine = FakeEngine(s, overlap)
    requests = list(random_requests(random.Random(7), engine, 64))
    engine.run()
    for request in requests:
        assert engine.outputs[request.id] == alone(request), request.id
        stopped = engine.outputs[request.id][-1] in request.sampling.stop_ids
        assert engine.reasons[request.id] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert s.counts["retracted"] > 0
    check_empty(s)


def storm(seed: int, operations: int, overlap=False, draft=False, **options) -> Scheduler:
    """Arrivals, steps and aborts at random; ends with a drain."""
    rng = random.Random(seed)
    s = scheduler(**options)
    guesses = (lambda request: len(request.id) % 4) if draft else None
    engine = FakeEngine(s, overlap, guesses)
    source = random_requests(rng, engine, operations)
    requests, aborted = {}, set()
    for _ in range(operations):
        act = rng.random()
        if act < 0.2:
            request = next(source)
            requests[request.id] = request
        elif act < 0.25 and s._all:
            victim = rng.choice(list(s._all))
            assert s.finish(victim) and not s.finish(victim)
            aborted.add(victim)
        else:
            engine.step()
        s.ratio.value = 0.0  # admit too much
        check_pool(s.pool)
        check_tree(s.tree)
    s.drain()
    engine.run(limit=20 * operations)
    for id, request in requests.items():
        whole = alone(request)
        if id in aborted:
            assert engine.outputs[id] == whole[: len(engine.outputs[id])]
        else:
            assert engine.outputs[id] == whole, id
    check_empty(s)
    return s


@pytest.mark.parametrize("name", VARIANTS)
def test_storm(name):
    s = storm(3, 500, **VARIANTS[name])
    assert s.counts["finished_abort"] > 0 and s.counts["retracted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_long_storm(name):
    storm(4, 10_000, **VARIANTS[name])
