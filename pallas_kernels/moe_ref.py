"""Routed experts by a loop over all of them, float32 (spec model 5.4)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.common import HIGHEST, accumulator
from pallas_kernels.mxfp4 import Mxfp4


def experts_ref(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w1: jax.Array | Mxfp4,
    w3: jax.Array | Mxfp4,
    w2: jax.Array | Mxfp4,
    *,
    glu: Callable[[jax.Array, jax.Array], jax.Array],
    first_expert: int | jax.Array = 0,
) -> jax.Array:
    """x [N, D], ids and weights [N, top_k] -> sum over the chosen experts of weight * w2(glu(w1 x, w3 x)), [N, D]."""
    dtype = accumulator(x, weights)
    x = x.astype(dtype)
    y = jnp.zeros((x.shape[0], _matrix(w2, 0).shape[1]), dtype)
    for e in range(len(w1.packed) if isinstance(w1, Mxfp4) else len(w1)):
        gate, up, down = (_matrix(w, e).astype(dtype) for w in (w1, w3, w2))
        h = glu(jnp.matmul(x, gate, precision=HIGHEST), jnp.matmul(x, up, precision=HIGHEST))
        weight = jnp.sum(jnp.where(ids == first_expert + e, weights, 0), axis=1, keepdims=True)
        y = y + weight * jnp.matmul(h, down, precision=HIGHEST)
    return y


def _matrix(w: jax.Array | Mxfp4, e: int) -> jax.Array:
    """Expert e's matrix [in, out]."""
    if isinstance(w, Mxfp4):
        return jnp.swapaxes(Mxfp4(w.packed[e], w.scale[e]).dequantize(), -1, -2)
    return w[e]
