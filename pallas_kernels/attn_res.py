"""Attention residual: a learned softmax over earlier blocks of the residual (K3 report eq. 8-9, spec model 4.1)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res_ref import attn_res_ref
from pallas_kernels.common import HIGHEST, Floor, accumulator, choose


def attn_res_mix(
    sources: Sequence[jax.Array] | jax.Array, score_weight: jax.Array, eps: float, *, impl: str = "auto"
) -> jax.Array:
    """sources: n arrays [..., D], or one [n, ..., D]; score_weight [D], norm gain times score direction.

    The score of a source is rms_norm(source) . score_weight; the mix [..., D] is the softmax-weighted sum of the raw
    sources, float32 inside and rounded once to their dtype.
    """
    rows = list(sources)
    if not rows or any(r.shape != rows[0].shape for r in rows) or score_weight.shape != rows[0].shape[-1:]:
        raise ValueError(
            f"attn_res_mix: sources {[r.shape for r in rows]} and score_weight {score_weight.shape} do not fit;"
            " pass at least one source, all [..., D], and score_weight [D]"
        )
    if choose("attn_res_mix", impl, ("xla", "ref")) == "ref":
        return attn_res_ref(rows, score_weight, eps)
    dtype = accumulator(*rows)
    weight = score_weight.astype(dtype)
    wide = [r.astype(dtype) for r in rows]
    scores = [
        jnp.einsum("...d,d->...", r, weight, precision=HIGHEST) * jax.lax.rsqrt(jnp.mean(r * r, axis=-1) + eps)
        for r in wide
    ]
    p = jax.nn.softmax(jnp.stack(scores), axis=0)  # [n, ...]
    mix = functools.reduce(jnp.add, [p[j][..., None] * r for j, r in enumerate(wide)])
    return mix.astype(rows[0].dtype)


def floor(tokens: int, sources: int, width: int, *, itemsize: int = 2) -> Floor:
    """Every source read once, the mix written once."""
    return Floor(bytes=tokens * width * itemsize * (sources + 1), flops=tokens * sources * width * 6)
