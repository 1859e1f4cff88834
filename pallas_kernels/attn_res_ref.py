"""Attention residual, written as the formula reads (spec model 4.1)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common import HIGHEST, accumulator
from pallas_kernels.norm import rms_norm


def attn_res_ref(sources: Sequence[jax.Array], score_weight: jax.Array, eps: float) -> jax.Array:
    """sources: n arrays [..., D], score_weight [D] -> mix [..., D]."""
    dtype = accumulator(*sources)
    v = jnp.stack(sources).astype(dtype)  # [n, ..., D]
    score = jnp.einsum(
        "n...d,d->n...",
        rms_norm(v, jnp.ones_like(score_weight, dtype), eps),
        score_weight.astype(dtype),
        precision=HIGHEST,
    )
    weight = jnp.exp(score - jnp.max(score, axis=0))
    weight = weight / jnp.sum(weight, axis=0)
    return jnp.sum(weight[..., None] * v, axis=0).astype(sources[0].dtype)
