"""Unified memory against the best static split, and the scheduler's own time: `python -m benchmarks.pool`.

Each mix of requests runs through scheduler and pool without a device, once per split. Every split sees the same
requests in the same order, all waiting from the start. Peak and mean are requests that run at once.
"""

import argparse
import dataclasses
import random
import statistics
import time

from serve.memory.pool import Geometry, Kind, Pool, StaticPool, UnifiedPool
from serve.scheduler import Scheduler
from serve.scheduler_config import SchedulerConfig
from serve.types import Request, SamplingParams, StepResult

TOKENS = 64  # of a page
STATE, PAGE = 56_171_520, TOKENS * 27_648  # bytes, K3 at tp 8 (spec serving 0)
GEOMETRY = Geometry(16 * 10**9, STATE, PAGE)
LENGTHS = {  # prompt tokens, new tokens
    "short": [((100, 800), (20, 120))],
    "long": [((16_000, 48_000), (20, 120))],
    "mixed": [((100, 800), (20, 120)), ((100, 800), (20, 120)), ((16_000, 48_000), (20, 120))],
}
COUNTS = {"short": 600, "long": 60, "mixed": 150}


@dataclasses.dataclass(frozen=True)
class Load:
    peak: int
    mean: float
    steps: int
    retracted: int


def mix(name: str, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for i in range(COUNTS[name]):
        prompt, new = rng.choice(LENGTHS[name])
        ids = [rng.randrange(150_000) for _ in range(rng.randint(*prompt))]
        requests.append(Request(str(i), ids, SamplingParams(rng.randint(*new))))
    return requests


def run(pool: Pool, requests: list[Request]) -> Load:
    """All requests to their end; a step may prefill as much as it likes, so that memory alone limits what runs."""
    config = SchedulerConfig(page=TOKENS, max_tokens=2**20, max_running=1024)
    scheduler = Scheduler(config, pool)
    for request in requests:
        scheduler.submit(request, now=0.0)
    running = []
    while not scheduler.idle:
        plan = scheduler.schedule(now=0.0)
        running.append(len(scheduler.running))
        scheduler.complete(plan, StepResult([[1] if part.samples else [] for part in plan.requests]))
    return Load(max(running), statistics.mean(running), len(running), scheduler.counts["retracted"])


def splits(requests: list[Request], points: int) -> list[int]:
    """State counts to try, up to as many as leave room for the longest request, denser among the few."""
    longest = max(len(r.prompt) + r.sampling.max_new_tokens for r in requests)
    free = UnifiedPool(GEOMETRY)
    pages = -(-longest // TOKENS) + 1
    most = 1
    while most < free.available(Kind.STATE) and free.fits(most + 1, pages):
        most += 1
    shares = [(i + 1) / points for i in range(points)] + [1 / n for n in (12, 16, 24, 32) if n > points]
    return sorted({max(1, round(most * share)) for share in shares})


def compare(name: str, points: int, seed: int = 0) -> tuple[Load, dict[int, Load]]:
    """(unified, static by number of states) for one mix."""
    requests = mix(name, seed)
    static = {n: run(StaticPool(GEOMETRY, n), requests) for n in splits(requests, points)}
    return run(UnifiedPool(GEOMETRY), requests), static


def overhead(running: int = 64, steps: int = 400, context: int = 4000) -> list[float]:
    """Seconds per step spent in `schedule` and `complete` with so many requests decoding."""
    pool = UnifiedPool(Geometry(64 * 10**9, STATE, PAGE))
    scheduler = Scheduler(SchedulerConfig(page=TOKENS, max_tokens=2**20, max_running=running), pool)
    for i in range(running):
        ids = [i * 7 + j for j in range(context)]
        scheduler.submit(Request(str(i), ids, SamplingParams(steps + 50, ignore_eos=True)), now=0.0)
    seconds = []
    for step in range(steps + 20):
        start = time.perf_counter()
        plan = scheduler.schedule(now=0.0)
        planned = time.perf_counter()
        result = StepResult([[step] if part.samples else [] for part in plan.requests])
        middle = time.perf_counter()
        scheduler.complete(plan, result)
        if step >= 20:
            assert len(plan.requests) == running
            seconds.append(planned - start + time.perf_counter() - middle)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=12, help="static splits to try per mix (default 12)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'mix':6} {'pool':>22} {'peak':>5} {'mean':>7} {'steps':>6} {'retracted':>9}")
    for name in LENGTHS:
        unified, static = compare(name, args.points, args.seed)
        best = max(static, key=lambda n: (static[n].peak, static[n].mean))
        rows = {"unified": unified, f"best static, {best} states": static[best]}
        for other in (min(static), max(static)):
            rows.setdefault(f"static, {other} states", static[other])
        for label, load in rows.items():
            print(f"{name:6} {label:>22} {load.peak:5} {load.mean:7.1f} {load.steps:6} {load.retracted:9}")
        print(f"{name:6} {'unified / best':>22} {unified.peak / static[best].peak:5.2f}")
    seconds = sorted(overhead())
    median, p99 = statistics.median(seconds), seconds[int(0.99 * len(seconds))]
    print(f"schedule + complete, 64 decoding at 4,000 tokens: median {median * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
