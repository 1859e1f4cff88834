"""Expert routing by a full sort (spec model 5.3)."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import HIGHEST, accumulator


def route_ref(
    x: jax.Array, weight: jax.Array, bias: jax.Array, *, top_k: int, renormalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """x [N, D], weight [D, E], bias [E] -> ids [N, top_k] int32 and weights [N, top_k]."""
    dtype = accumulator(x, weight)
    logits = jnp.matmul(x.astype(dtype), weight.astype(dtype), precision=HIGHEST)
    scores = 1 / (1 + jnp.exp(-logits))
    ids = jnp.argsort(-(scores + bias), axis=1, stable=True)[:, :top_k]  # stable: the lower id wins ties
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * scale
