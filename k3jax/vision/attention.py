"""Bidirectional attention among the patches of one item, many items packed in a row."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator, cdiv, precision

BLOCK_SCORES = 2**26  # scores held at once


def item_attention(q: jax.Array, k: jax.Array, v: jax.Array, item: jax.Array, scale: float) -> jax.Array:
    """q, k, v [N, H, K], item [N] int32 -> [N, H, K] in v's dtype; a patch sees those with its item number.

    Softmax in float32; blocks of queries, so that few scores exist at a time.
    """
    N, H, _ = q.shape
    block = functools.partial(_block, k=k, v=v, key_item=item, scale=scale)
    rows = max(16, BLOCK_SCORES // (H * N))
    if N <= rows:
        return block(q, item)
    n = cdiv(N, rows)
    padding = n * rows - N
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(n, rows, H, -1)
    query_item = jnp.pad(item, (0, padding), constant_values=-1).reshape(n, rows)
    out = jax.lax.map(jax.checkpoint(lambda xs: block(*xs)), (q, query_item))
    return out.reshape(n * rows, H, -1)[:N]


def _block(q, query_item, *, k, v, key_item, scale):
    dtype, exact = accumulator(q), precision(q.dtype)
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision=exact, preferred_element_type=dtype) * scale
    scores = jnp.where(query_item[:, None] == key_item, scores, jnp.finfo(dtype).min)
    weight = jax.nn.softmax(scores, axis=-1)
    out = jnp.einsum("hqk,khd->qhd", weight.astype(v.dtype), v, precision=exact, preferred_element_type=dtype)
    return out.astype(v.dtype)
