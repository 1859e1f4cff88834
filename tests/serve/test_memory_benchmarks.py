"""What the benchmarks print must hold: unified memory against static splits, the prefix cache against the oracle."""

import pytest

from benchmarks.pool import LENGTHS, compare, overhead
from benchmarks.prefix import TRACES, measure, oracle


def test_the_oracle_counts_whole_checkpoints_and_never_the_whole_prompt():
    a = list(range(200))
    assert oracle([(a, []), (a, [])]) == 192
    assert oracle([(a[:128], []), (a[:128], [])]) == 64
    assert oracle([(a, a), ([*a, *a, 1], []), (a[:150] + a, [])]) == 384 + 128


def test_all_running_requests_are_in_every_step():
    assert len(overhead(running=4, steps=3, context=70)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("name", LENGTHS)
def test_unified_memory_runs_as_many_as_the_best_static_split(name):
    unified, static = compare(name, points=8)
    assert unified.peak >= 0.95 * max(load.peak for load in static.values())
    assert unified.mean >= 0.95 * max(load.mean for load in static.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_half_the_memory_keeps_nine_tenths_of_the_hits(name):
    assert measure(name, share=0.5).of_oracle >= 0.9
