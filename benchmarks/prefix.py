"""How much of what could be reused the prefix cache reuses: `python -m benchmarks.prefix`.

Traces of prompts run through scheduler, pool and tree without a device. The oracle has infinite memory and a state at
every checkpoint length: it resumes after the longest prefix, in whole checkpoints, of anything that was there before.
"""

import argparse
import dataclasses
import itertools
import random
from collections.abc import Iterator

from serve.memory.keys import extend_keys
from serve.memory.pool import Geometry, UnifiedPool
from serve.scheduler import Scheduler
from serve.scheduler_config import SchedulerConfig
from serve.types import Request, SamplingParams, StepResult

GRID = 64  # tokens: page, KDA chunk and checkpoint
STATE, PAGE = 56_171_520, 64 * 27_648  # bytes, K3 at tp 8 (spec serving 0)

Turn = tuple[list[int], list[int]]  # prompt, answer


def multi_turn(rng: random.Random, users: int = 24, turns: int = 6) -> Iterator[Turn]:
    """Conversations with one system text, in random order; a turn adds a question and the answer before it."""
    system = _ids(rng, 700)
    history = {u: list(system) for u in range(users)}
    order = [u for u in range(users) for _ in range(turns)]
    rng.shuffle(order)
    for u in order:
        history[u] += _ids(rng, rng.randint(50, 600))
        answer = _ids(rng, rng.randint(50, 500))
        yield list(history[u]), answer
        history[u] += answer


def fork_tree(rng: random.Random, branches: int = 4, depth: int = 3, visits: int = 160) -> Iterator[Turn]:
    """Prompts along random paths of a tree of shared texts, each with an end of its own."""
    texts: dict[tuple[int, ...], list[int]] = {(): _ids(rng, 1000)}
    for level in range(1, depth + 1):
        for path in itertools.product(range(branches), repeat=level):
            texts[path] = _ids(rng, rng.randint(200, 1000))
    for _ in range(visits):
        path = tuple(min(rng.randrange(branches), rng.randrange(branches)) for _ in range(depth))
        prompt = [t for level in range(depth + 1) for t in texts[path[:level]]]
        yield prompt + _ids(rng, rng.choice((16, 63, 64, 65, 400))), _ids(rng, 32)


TRACES = {"multi-turn": multi_turn, "fork tree": fork_tree}


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(150_000) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Rate:
    """Tokens. `tree` is what pages and states of the oracle-less tree take with unlimited memory, in bytes."""

    prompt: int
    oracle: int
    cached: int
    tree: int

    @property
    def of_oracle(self) -> float:
        return self.cached / self.oracle


def oracle(trace: list[Turn]) -> int:
    """Prompt tokens found again with infinite memory and a state everywhere, never the whole prompt."""
    seen: set[bytes] = set()
    found = 0
    for prompt, answer in trace:
        keys: list[bytes] = []
        extend_keys(keys, prompt + answer, GRID)
        usable = keys[: (len(prompt) - 1) // GRID]
        found += GRID * next((i for i, key in enumerate(usable) if key not in seen), len(usable))
        seen.update(keys)
    return found


def replay(trace: list[Turn], total: int) -> tuple[int, int]:
    """(cached prompt tokens, bytes of the tree at the end) of the trace, one request after the other."""
    scheduler = Scheduler(
        SchedulerConfig(page=GRID, max_tokens=2048, decode_interval=GRID), UnifiedPool(Geometry(total, STATE, PAGE))
    )
    for i, (prompt, answer) in enumerate(trace):
        scheduler.submit(Request(str(i), prompt, SamplingParams(len(answer))), now=i)
        drawn = iter(answer)
        while not scheduler.idle:
            plan = scheduler.schedule(now=i)
            scheduler.complete(plan, StepResult([[next(drawn)] if part.samples else [] for part in plan.requests]))
    stats = scheduler.stats()
    return stats.counts["cached_tokens"], stats.cached_pages * PAGE + stats.cached_states * STATE


def measure(name: str, share: float, seed: int = 0) -> Rate:
    """Replay a trace with memory for `share` of the tree that unlimited memory would build."""
    trace = list(TRACES[name](random.Random(seed)))
    _, tree = replay(trace, 2**40)
    running = STATE + PAGE * (max(len(p) + len(a) for p, a in trace) // GRID + 2)
    cached, _ = replay(trace, int(share * tree) + 2 * STATE + running)
    return Rate(sum(len(p) for p, _ in trace), oracle(trace), cached, tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(f"{'trace':12} {'memory':>7} {'prompt':>9} {'oracle':>8} {'cached':>8} {'of oracle':>9}")
    for name in TRACES:
        for share in (1.0, 0.5, 0.25):
            r = measure(name, share, args.seed)
            print(
                f"{name:12} {r.tree * share / 2**30:6.1f}G {r.prompt:9} {r.oracle / r.prompt:8.1%}"
                f" {r.cached / r.prompt:8.1%} {r.of_oracle:9.1%}"
            )


if __name__ == "__main__":
    main()
