"""Attention residual mix: random sources against float64, then K3's widest site."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.case import Check, Timing, compare, normal
from pallas_kernels.attn_res import attn_res_mix, floor

EPS = 1e-5


def inputs(rng, sources, rows, width):
    weight = normal(rng, width, dtype=jnp.float32) * (3 / width**0.5)
    return [normal(rng, rows, width) * 2.0 ** (n % 4) for n in range(sources)], weight


def check(rng) -> Iterator[Check]:
    """14 shapes: one to nine sources, 1 to 65 rows, two widths."""
    for n in range(14):
        sources, weight = inputs(rng, (1, 2, 5, 9)[n % 4], (1, 15, 16, 17, 63, 64, 65)[n // 2], (7168, 64)[n % 2])
        got, xla = (attn_res_mix(sources, weight, EPS, impl=i) for i in ("triton", "xla"))
        with jax.enable_x64(True):
            wide = [jnp.asarray(s, jnp.float64) for s in sources]
            want = attn_res_mix(wide, jnp.asarray(weight, jnp.float64), EPS, impl="ref")
        case = f"{len(sources)} sources of {sources[0].shape}"
        yield compare("attn_res_mix", case, (got,), (xla,), (want,))
        alone = attn_res_mix([s[-1:] for s in sources], weight, EPS, impl="triton")
        equal = bool(jnp.array_equal(alone, got[-1:]))
        yield Check("attn_res_mix", f"last row alone, {case}", {"bit_equal": float(equal)}, equal)


def time(rng) -> Iterator[Timing]:
    for rows, sources in ((1024, 9), (64, 9), (1, 9)):
        sets = [inputs(rng, sources, rows, 7168) for _ in range(4)]
        for impl in ("triton", "xla"):

            def step(carry, i, impl=impl):
                return carry, attn_res_mix(*carry[i % len(carry)], EPS, impl=impl)

            name = f"{rows} rows, {sources} sources"
            yield Timing("attn_res_mix", name, impl, step, sets, 2 * len(sets), floor(rows, sources, 7168))
