"""Queueing, fairness, refusals and retraction, on the fake engine."""

import subprocess
import sys

import pytest

from serve.memory.host import HostMemory
from serve.memory.invariants import check_tree
from serve.memory.pool import Geometry, UnifiedPool
from serve.scheduler import Scheduler
from serve.scheduler_config import SchedulerConfig
from serve.types import FinishReason, Progress, Request, SamplingParams, Unavailable
from tests.serve.fake_engine import FakeEngine, absorb, alone, row_of

PAGE = 4


def engine(pages: int = 100, states: int = 12, host: int | None = None, **options) -> FakeEngine:
    pool = UnifiedPool(Geometry(16 * (1 + states) + PAGE * pages, 16, PAGE))
    memory = HostMemory(host, pool.geometry) if host else None
    settings = dict(page=PAGE, kda_chunk=8, max_tokens=32, max_running=4, decode_interval=8) | options
    return FakeEngine(Scheduler(SchedulerConfig(**settings), pool, memory))


def order(e: FakeEngine) -> list[str]:
    """Ids in the order in which they first ran."""
    return list(dict.fromkeys(r.request.id for p in e.plans for r in p.requests))


def test_higher_priority_first_then_arrival():
    e = engine(max_running=1)
    for name, priority in (("a", 0), ("b", 0), ("low", -1), ("high", 2), ("high2", 2)):
        e.submit(name, [1, 2, 3], 2, priority=priority)
    e.run()
    assert order(e) == ["high", "high2", "a", "b", "low"]


def test_a_low_priority_is_overtaken_only_for_a_while():
    """One newcomer of higher priority per step would starve it; a step of priority is worth 10 seconds."""
    e = engine(max_running=1, ageing=10.0)
    e.submit("low", [1, 2], 2, priority=-1)
    for i in range(30):
        e.submit(f"high{i}", [1, 2], 2)
        e.step()
    assert order(e).index("low") <= 11
    e.run()


def test_waiting_too_long_ends_a_request_that_never_ran():
    e = engine(max_running=1, max_wait=5.0)
    e.submit("runs", [1, 2, 3], 20)
    e.step()
    e.submit("waits", [1, 2, 3], 2)
    e.run()
    assert e.reasons == {"runs": FinishReason.LENGTH, "waits": FinishReason.TIMEOUT}
    assert e.scheduler.stats().counts["finished_timeout"] == 1


def test_retracted_requests_do_not_time_out_and_resume_first():
    e = engine(pages=24, states=2, max_running=3, max_wait=8.0, reserve=0.0)
    requests = [e.submit(f"r{i}", [i] * 8, 30) for i in range(3)]
    e.submit("late", [9] * 4, 2)
    e.run()
    s = e.scheduler.stats()
    assert s.counts["retracted"] > 0
    assert all(e.outputs[r.id] == alone(r) and e.reasons[r.id] is FinishReason.LENGTH for r in requests)


def test_the_retracted_one_has_the_least_to_lose():
    e = engine(pages=14, states=4, max_running=2, reserve=0.0)
    e.submit("old", [1] * 16, 50)
    for _ in range(20):
        e.step()
    e.submit("new", [2] * 16, 40)
    while not e.scheduler.counts["retracted"]:
        e.step()
    assert [s.request.id for s in e.scheduler.running] == ["old"]
    [new] = e.scheduler.waiting
    assert new.request.id == "new"
    e.run()
    assert e.outputs["new"] == alone(new.request)


def test_a_hand_over_between_grid_points_gets_back_onto_the_grid():
    e = engine(max_tokens=32)
    request = Request("x", tuple(range(40)), SamplingParams(3))
    state, rows = 0, []
    for token in request.prompt[:13]:
        state = absorb(state, token)
        rows.append(row_of(state))
    e.adopt(request, Progress((), 13), (state, rows))
    e.run()
    assert [(p.requests[0].start, len(p.requests[0].tokens)) for p in e.plans[:2]] == [(13, 3), (16, 24)]
    assert e.outputs["x"] == alone(request)


def test_with_host_memory_a_retracted_request_goes_on_where_it_was():
    e = engine(pages=14, states=4, max_running=2, reserve=0.0, host=4000)
    e.submit("old", [1] * 16, 50)
    for _ in range(20):
        e.step()
    new = e.submit("new", [2] * 16, 40)
    while not e.scheduler.counts["retracted"]:
        e.step()
    [waiting] = e.scheduler.waiting
    known = len(waiting.tokens)
    e.run()
    back = next(p for p in e.plans if p.loads)
    assert [(r.start, r.tokens[0]) for r in back.requests if r.request is new] == [
        (known - 1, waiting.tokens[known - 1])
    ]
    assert e.outputs["new"] == alone(new) and e.scheduler.tree.parked == 0


def test_a_parked_request_that_is_aborted_leaves_the_host():
    e = engine(pages=14, states=4, max_running=2, reserve=0.0, host=4000)
    for i in range(2):
        e.submit(f"r{i}", [i] * 16, 40)
    while not e.scheduler.counts["retracted"]:
        e.step()
    [waiting] = e.scheduler.waiting
    assert e.scheduler.tree.parked > 0
    e.scheduler.finish(waiting.request.id)
    assert e.scheduler.tree.parked == 0
    check_tree(e.scheduler.tree)


def test_drain_finishes_what_is_here_and_refuses_the_rest():
    e = engine()
    requests = [e.submit(f"r{i}", [1, 2, i], 5) for i in range(6)]
    e.step()
    e.scheduler.drain()
    with pytest.raises(Unavailable, match="shutting down"):
        e.submit("late", [1], 1)
    e.run()
    assert e.scheduler.idle and all(e.outputs[r.id] == alone(r) for r in requests)


def test_a_full_queue_refuses():
    e = engine(max_waiting=2)
    for name in "ab":
        e.submit(name, [1], 1)
    with pytest.raises(Unavailable, match="2 requests are waiting, the limit"):
        e.submit("c", [1], 1)
    e.step()
    e.submit("c", [1], 1)


@pytest.mark.parametrize(
    ("prompt", "new", "how", "sentence"),
    [
        ([], 4, {}, "has 0 prompt tokens and max_new_tokens 4, the minimum of both is 1"),
        ([1], 0, {}, "has 1 prompt tokens and max_new_tokens 0"),
        ([1, 2], 4, {"key": ["image"]}, "has 1 cache key items for 2 prompt tokens"),
        ([1] * 300, 200, {}, "needs 300 prompt and 200 new tokens, the limit is 400 together"),
    ],
)
def test_requests_that_cannot_run_are_refused_with_one_sentence(prompt, new, how, sentence):
    e = engine(pages=56, states=12, max_length=400)
    with pytest.raises(ValueError, match=sentence):
        e.submit("x", prompt, new, **how)
    assert e.scheduler.idle


def test_an_id_in_use_is_refused():
    e = engine()
    e.submit("x", [1], 4)
    with pytest.raises(ValueError, match="request id 'x' is in use"):
        e.submit("x", [1], 4)
    assert not e.scheduler.finish("unknown")


@pytest.mark.parametrize("progress", [Progress((), 0), Progress((5,), 4), Progress((5, 6), 3)])
def test_a_hand_over_needs_something_done_and_something_left(progress):
    e = engine()
    request = Request("x", (1, 2, 3), SamplingParams(2))
    with pytest.raises(ValueError, match=f"comes with {progress.computed} of"):
        e.scheduler.submit(request, 0.0, progress)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 7}, "max_tokens is 7, a step needs at least 8"),
        ({"max_running": 40}, "max_tokens is 32, a step needs at least 40"),
        ({"max_running": 0}, "max_running is 0, the minimum is 1"),
        ({"reserve": 2.0}, "reserve is 2.0, allowed is 0 to 1"),
        ({"page": 3}, "page 3, KDA chunk 8 and dcp 1 have no common grid"),
    ],
)
def test_settings_under_which_nothing_could_run_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine(**options)


def test_namespaces_and_image_keys_separate_equal_prompts():
    e = engine(states=30)
    prompt = [1] * 24
    variants = [{}, {"namespace": ("lora", 1)}, {"namespace": ("lora", 2)}, {"key": ["a"] * 24}, {"key": ["b"] * 24}]
    for round in range(2):
        for i, how in enumerate(variants):
            e.submit(f"{round}.{i}", prompt, 2, **how)
            e.run()
            assert e.cached[f"{round}.{i}"] == 16 * round


def test_breakpoints_plant_states():
    e = engine(states=30, max_tokens=64)
    e.submit("a", list(range(40)), 2, breakpoints=(19,))
    e.run()
    e.submit("b", [*range(20), *range(30)], 2)
    e.run()
    assert e.cached["b"] == 16


def test_equal_prompts_at_once_are_computed_once():
    e = engine(states=30, max_running=8, max_tokens=256)
    requests = [e.submit(f"r{i}", [3] * 50, 4, seed=i) for i in range(6)]
    e.run()
    assert [e.cached[r.id] for r in requests] == [0] + [48] * 5
    assert all(e.outputs[r.id] == alone(r) for r in requests)
    assert sum(p.rows for p in e.plans) == 50 + 5 * 2 + 6 * 3


@pytest.mark.parametrize("overlap", [False, True])
def test_waiting_requests_share_a_fork_with_one_that_prefills(overlap):
    """The leader keeps its state where they part, whichever of its chunks that is in."""
    e = engine(states=30, pages=200, max_running=8, max_tokens=32)
    e.overlap = overlap
    first = e.submit("first", [3] * 90, 4)
    e.step()
    rest = [e.submit(f"r{i}", [3] * 50 + [10 + i] * 20, 4) for i in range(4)]
    e.run()
    assert [e.cached[r.id] for r in [first, *rest]] == [0, 48, 48, 48, 48]
    assert all(e.outputs[r.id] == alone(r) for r in [first, *rest])


def test_followers_go_on_when_their_leader_leaves():
    e = engine(states=30, pages=200, max_running=8, max_tokens=32)
    e.submit("first", [3] * 90, 4)
    e.step()
    follower = e.submit("follower", [3] * 80, 4)
    e.step()
    assert "follower" not in order(e)
    e.scheduler.finish("first")
    e.run()
    assert e.outputs["follower"] == alone(follower) and e.cached["follower"] == 64


def test_decoding_leaves_one_state_behind():
    e = engine(states=30)
    request = e.submit("a", [1] * 10, 60)
    e.run()
    counts = e.scheduler.stats().counts
    assert counts["states_decode"] == 7 and counts["states_replaced"] == 6  # at 16, 24, ... 64; 69 tokens are fed
    assert e.scheduler.tree.states == 2
    e.submit("b", [*request.prompt, *alone(request), 3], 2)
    e.run()
    assert e.cached["b"] == 64


def test_the_host_side_needs_no_jax():
    code = "import sys, serve.scheduler; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
