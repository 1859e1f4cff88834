"""Device time of an op: bundles of calls in one jit, over rotated buffers: neither dispatch nor cache counts."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp


def microseconds(step: Callable, carry, repeats: int, *, seconds: float = 0.25) -> tuple[float, float]:
    """Median time in us of one `step(carry, i) -> (carry, output)` in each of two passes.

    A copy of carry is donated from bundle to bundle; i is a static counter that picks other buffers. A bundle makes
    `repeats` calls, and returns the outputs so that none is removed as dead.
    """

    def bundle(carry):
        outputs = []
        for i in range(repeats):
            carry, out = jax.lax.optimization_barrier(step(carry, i))  # else equal calls are merged
            outputs.append(out)
        return carry, outputs

    run = jax.jit(bundle, donate_argnums=0)
    carry, outputs = jax.block_until_ready(run(jax.tree.map(jnp.copy, carry)))
    start = time.perf_counter()
    carry, outputs = jax.block_until_ready(run(carry))
    del outputs
    queued = 4 + int(0.02 / (time.perf_counter() - start))  # enough to hide the wait at the end
    medians = []
    for _ in range(2):
        samples: list[float] = []
        end = time.perf_counter() + seconds / 2
        while len(samples) < 5 or time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(queued):
                carry, outputs = run(carry)
                del outputs
            jax.block_until_ready(carry)
            samples.append((time.perf_counter() - start) / (queued * repeats) * 1e6)
        medians.append(statistics.median(samples))
    return medians[0], medians[1]


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of copying 2 GiB."""
    x = jnp.zeros((1 << 29,), jnp.float32) + 0.5
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(10):
            y = jnp.copy(x)
        jax.block_until_ready(y)
        best = max(best, 20 * x.nbytes / (time.perf_counter() - start))
    return best
