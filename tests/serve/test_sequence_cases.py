"""Public-report cases SQ-01 to SQ-12, the host's half of each: what is scheduled, kept, freed and returned."""

import random

import pytest

from serve.memory.invariants import check_pool, check_tree
from serve.memory.pool import Geometry, Kind, StaticPool, UnifiedPool
from serve.scheduler import Scheduler
from serve.scheduler_config import SchedulerConfig
from serve.types import FinishReason, Request, SamplingParams, StepResult
from tests.serve.fake_engine import VOCAB, FakeEngine, alone

PAGE = 64


def engine(pages: int = 200, states: int | None = None, unified: int = 40, overlap=False, **options) -> FakeEngine:
    """Pages and checkpoints of 64 tokens; with `states` two fixed regions, else one that holds `unified` states too."""
    geometry = Geometry(32 * (2 + (states or unified)) + PAGE * pages, 32, PAGE)
    pool = UnifiedPool(geometry) if states is None else StaticPool(geometry, states)
    return FakeEngine(
        Scheduler(SchedulerConfig(**(dict(page=PAGE, max_tokens=64, max_running=8) | options)), pool), overlap
    )


def ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def finish_alone(e: FakeEngine, id: str, prompt: list[int], new: int = 8) -> int:
    """Run one request to its end, check its tokens, return how much of its prompt was cached."""
    request = e.submit(id, prompt, new)
    e.run()
    assert e.outputs[id] == alone(request)
    return e.cached[id]


TOY = dict(prompt=(2,), tokens=[0, 1, 4, 6, 5, 2, 0, 1, 4])
TOY_STEPS = [
    ([0, 1, 3], [0, 1, 4], 1.5),
    ([5, 5, 5], [6], 4.75),
    ([5, 2, 0], [5, 2, 0, 1], 3.296875),
    ([3], [4], 2.6484375),
]


@pytest.mark.parametrize(("limit", "expected"), [(100, TOY["tokens"]), (6, TOY["tokens"][:6])])
def test_sq01_sq02_drafts_commit_what_serial_decoding_would(limit, expected):
    """The state after each verification is that of the tokens the host counts as computed: s = s/2 + token."""
    s = Scheduler(SchedulerConfig(page=4, kda_chunk=4, max_tokens=16, max_running=4), UnifiedPool(Geometry(900, 16, 4)))
    s.submit(Request("a", TOY["prompt"], SamplingParams(limit)), 0.0)
    emitted, reason = [], None
    for i, (draft, tokens, state) in enumerate(TOY_STEPS):
        if reason:
            break
        s.propose("a", draft)
        plan = s.schedule(0.0)
        [part] = plan.requests
        if i == 0:  # the prompt is absorbed first; its draw is the current token of the case
            assert part.tokens == [2] and part.draft == 0
            [output] = s.complete(plan, StepResult([[tokens[0]]]))
            emitted += output.tokens
            s.propose("a", draft[1:])
            plan = s.schedule(0.0)
            [part] = plan.requests
            draft, tokens = draft[1:], tokens[1:]
        room = limit - len(emitted)  # drafts never reach past the limit
        assert part.tokens == [emitted[-1], *draft[: room - 1]] and part.draft == len(part.tokens) - 1
        sequence = s.running[0]
        [output] = s.complete(plan, StepResult([tokens[:room]]))
        emitted, reason = emitted + output.tokens, output.reason
        toy = 0.0
        for token in [2, *emitted, 0, 0][: sequence.computed]:
            toy = 0.5 * toy + token
        assert reason or toy == state
    assert emitted == expected
    assert reason is (FinishReason.LENGTH if limit == 6 else None)


@pytest.mark.parametrize("draft", [[3], [9, 9, 9]])
def test_sq03_sq04_a_draft_that_disagrees_commits_one_token(draft):
    s = Scheduler(SchedulerConfig(page=4, kda_chunk=4, max_tokens=16, max_running=4), UnifiedPool(Geometry(900, 16, 4)))
    s.submit(Request("a", (0,), SamplingParams(8)), 0.0)
    s.complete(s.schedule(0.0), StepResult([[1]]))
    s.propose("a", draft)
    plan = s.schedule(0.0)
    assert plan.requests[0].tokens == [1, *draft]
    [output] = s.complete(plan, StepResult([[4]]))
    assert output.tokens == [4] and s.running[0].computed == 2
    plan = s.schedule(0.0)
    assert (plan.requests[0].start, plan.requests[0].tokens, plan.requests[0].draft) == (2, [4], 0)


def test_sq05_a_repeated_prompt_is_cached_at_its_first_repeat():
    a = ids(200)
    b, c = a[:150] + ids(50, 1), a[:60] + ids(140, 2)
    e = engine()
    cached = [finish_alone(e, str(i), prompt) for i, prompt in enumerate([a, a, b, b, c])]
    assert cached == [0, 192, 128, 192, 0]


def test_sq05_with_one_chunk_the_fork_is_planted_by_the_second_request():
    """One chunk leaves the end state alone; the second through a fork plants the fork's and its own end."""
    a, b, c = (ids(140) + ids(60, seed) for seed in (1, 2, 3))
    e = engine(max_tokens=256)
    assert [finish_alone(e, name, p) for name, p in (("a", a), ("b", b), ("b2", b), ("c", c))] == [0, 0, 192, 128]
    plan = next(p for p in e.plans if p.requests and p.requests[0].request.id == "b")
    assert [s.length for s in plan.requests[0].snapshots] == [128, 192]
    assert (plan.requests[0].start, plan.requests[0].write_from) == (0, 128)
    assert e.scheduler.stats().counts["replayed_tokens"] == 128


@pytest.mark.parametrize("overlap", [False, True])
def test_sq06_states_kept_in_mixed_steps_are_real(overlap):
    e = engine(overlap=overlap, decode_interval=64, max_tokens=128)
    for i in range(4):
        e.submit(f"long{i}", ids(10, i), 150)
    for _ in range(6):
        e.step()
    x = ids(320, 9)
    requests = [e.submit("x", x, 8)]
    while "x" not in e.reasons:
        e.step()
    assert any(len(p.requests) == 5 and len(p.requests[-1].tokens) > 1 for p in e.plans)
    requests += [e.submit("more", x + ids(10, 3), 8), e.submit("changed", x[:-1] + [(x[-1] + 1) % VOCAB], 8)]
    e.run()
    for request in requests:
        assert e.outputs[request.id] == alone(request)
    assert (e.cached["more"], e.cached["changed"]) == (320, 256)
    stored = {s.length for p in e.plans for r in p.requests for s in r.snapshots if r.request.id == "x"}
    assert stored >= {64, 256, 320} and all(length % 64 == 0 for length in stored)


def test_sq07_dropped_waiters_give_everything_back():
    e = engine(pages=60, states=4, max_running=1, max_wait=20.0)
    p = ids(128)
    finish_alone(e, "warm", p)
    e.submit("run", ids(70, 5), 40)
    e.step()
    for name in ("w1", "w2", "w3"):
        e.submit(name, [*p, 1], 8)
    e.step()
    assert e.scheduler.finish("w1") and e.scheduler.finish("w2")
    e.run()
    assert e.reasons["w3"] is FinishReason.TIMEOUT and len(e.outputs["run"]) == 40
    s = e.scheduler
    assert s.pool.available(Kind.STATE) == 4 - s.tree.states
    assert s.pool.live(Kind.PAGE) == s.tree.pages == s.tree.evictable_pages
    assert s.tree.evictable_states == s.tree.states
    check_tree(s.tree)
    assert finish_alone(e, "fresh", [*p, 1]) == 128


def test_sq08_a_state_without_a_slot_is_skipped_and_counted():
    e = engine(pages=60, states=3, max_tokens=192)  # all start in one step
    requests = [e.submit(str(i), ids(64, i), 20) for i in range(3)]
    while e.scheduler.counts["finished_length"] == 0:
        e.step()
    assert e.scheduler.stats().counts["states_skipped"] == 3
    e.run()
    assert all(e.outputs[r.id] == alone(r) for r in requests)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stage", ["decoding", "prefill", "queued"])
def test_sq09_a_closed_connection_frees_everything_at_once(stage, overlap):
    e = engine(overlap=overlap, max_running=1 if stage == "queued" else 8)
    other = e.submit("other", ids(30), 60)
    e.step()
    e.step()
    level = e.scheduler.pool.live(Kind.STATE), e.scheduler.pool.live(Kind.PAGE)
    e.submit("gone", ids(250 if stage == "prefill" else 20, 1), 4096)
    for _ in range(6 if stage == "decoding" else 3):
        e.step()
    assert bool(e.outputs["gone"]) == (stage == "decoding")
    e.scheduler.finish("gone")
    e.scheduler.flush_cache()
    assert len(e.scheduler.running) == 1 and len(e.scheduler.waiting) == 0
    held = sum(len(part.kept) for parts in e.scheduler._in_flight.values() for part in parts)
    assert (e.scheduler.pool.live(Kind.STATE) - held, e.scheduler.pool.live(Kind.PAGE)) == level
    steps, before = len(e.plans), len(e.outputs["gone"])
    e.run()
    assert all(r.request.id != "gone" for p in e.plans[steps:] for r in p.requests)
    assert len(e.outputs["gone"]) == before and e.outputs["other"] == alone(other)
    check_pool(e.scheduler.pool)


def test_sq10_a_prompt_that_never_fits_is_refused_and_blocks_nobody():
    e = engine(pages=16, max_length=4000, unified=2)  # 16 pages and two states, of which one request needs one
    with pytest.raises(ValueError, match="needs 1500 prompt and 8 new tokens, the limit is 1024 together"):
        e.submit("big", ids(1500))
    with pytest.raises(ValueError, match="the limit is 100 together"):
        engine(max_length=100).submit("long", ids(101))
    e.submit("small", ids(10))
    assert e.step().requests[0].request.id == "small"


@pytest.mark.parametrize("length", [63, 64, 65, 100])
def test_sq11_a_chunk_larger_than_what_decoding_leaves_still_runs(length):
    e = engine(max_running=48, pages=400, unified=100)
    decoders = [e.submit(f"d{i}", ids(3, i), 60) for i in range(40)]
    while any(not e.outputs[d.id] for d in decoders):
        e.step()
    late = e.submit("late", ids(length, 99), 4)
    for _ in range(10):
        assert e.step().rows > 0
    assert e.outputs["late"]
    e.run()
    assert all(e.outputs[r.id] == alone(r) for r in [*decoders, late])


@pytest.mark.parametrize("warm", [False, True])
def test_sq12_a_request_moves_to_another_engine(warm):
    """Prefill here, decode there: the hand-off token is fed once, and the other engine starts from real contents."""
    first, second = engine(), engine(max_running=16)
    for n in (1, 63, 64, 65, 127, 128, 200, 300, 500, 1000):
        if warm:
            finish_alone(first, f"warm{n}", ids(n, n))
        request = first.submit(str(n), ids(n, n), 64)
        while not first.outputs[str(n)]:
            assert first.extract(str(n)) is None or not first.scheduler._all[str(n)].decoding
            first.step()
        progress, arrays = first.extract(str(n))
        assert (progress.computed, len(progress.generated)) == (n, 1)
        first.scheduler.finish(str(n))
        second.adopt(request, progress, arrays)
        plan = second.step()
        assert [(r.start, r.tokens, r.insert, r.fresh) for r in plan.requests if r.request is request] == [
            (n, list(progress.generated), True, False)
        ]
    second.run()
    for n in (1, 63, 64, 65, 127, 128, 200, 300, 500, 1000):
        assert second.outputs[str(n)] == alone(Request(str(n), ids(n, n), SamplingParams(64)))
    assert first.scheduler.idle
