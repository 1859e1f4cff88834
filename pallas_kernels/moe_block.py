"""Routed experts on any backend: rows sorted by expert into blocks of one expert each, a scan over the blocks."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator, cdiv, precision
from pallas_kernels.glu import Glu
from pallas_kernels.mxfp4 import Mxfp4

MIN_ROWS = 8
MAX_ROWS = 128
GATHERED_BYTES = 2**26  # of unpacked expert weights that blocks running at once may read


def experts_blocked(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w1: jax.Array | Mxfp4,
    w3: jax.Array | Mxfp4,
    w2: jax.Array | Mxfp4,
    glu: Glu,
) -> jax.Array:
    """x [N, D], ids [N, top_k] in 0..E (E: no expert here), weights [N, top_k] -> [N, Dout] float32."""
    E = jax.tree.leaves(w1)[0].shape[0]
    N, top_k = ids.shape
    pairs = N * top_k
    rows = min(max(MIN_ROWS, 1 << (cdiv(pairs, E) - 1).bit_length()), MAX_ROWS)
    expert, pair = plan_blocks(ids.reshape(-1), E, rows)

    def block(xs):
        expert, pair = xs
        gate, up, down = (_matrix(w, expert, x.dtype) for w in (w1, w3, w2))
        return _mlp(x.at[pair // top_k].get(mode="fill", fill_value=0), gate, up, down, glu)

    out = jax.lax.map(jax.checkpoint(block), (expert, pair), batch_size=_at_once(w1, w3, w2))  # [blocks, rows, Dout]
    out = out.reshape(-1, out.shape[-1])
    # Where each pair's row landed; pairs without an expert here read zeros.
    place = (
        jnp.full(pairs, out.shape[0], jnp.int32)
        .at[pair.reshape(-1)]
        .set(jnp.arange(out.shape[0], dtype=jnp.int32), mode="drop")
    )
    picked = out.at[place.reshape(N, top_k)].get(mode="fill", fill_value=0)  # [N, top_k, Dout]
    dtype = accumulator(x, weights)
    return sum(weights[:, j, None].astype(dtype) * picked[:, j].astype(dtype) for j in range(top_k))


def _at_once(*weights: jax.Array | Mxfp4) -> int | None:
    """Blocks to run at once: small unpacked experts many, which training on a GPU needs; packed ones one by one."""
    per_expert = 0
    for w in weights:
        if isinstance(w, Mxfp4):
            return None
        per_expert += w.size * w.dtype.itemsize // w.shape[0]
    return max(1, GATHERED_BYTES // per_expert)


def plan_blocks(ids: jax.Array, experts: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """ids [P] in 0..experts -> the expert of each block [blocks] and the pairs in it [blocks, rows].

    Pairs of one expert keep their order. Empty places hold P; blocks past the last hold only those.
    """
    P = ids.shape[0]
    blocks = (P + min(experts, P) * (rows - 1)) // rows
    order = jnp.argsort(ids, stable=True).astype(jnp.int32)
    count = jnp.bincount(ids, length=experts + 1)[:experts]
    pair_start = jnp.cumsum(count) - count
    block_count = -(-count // rows)
    block_end = jnp.cumsum(block_count)
    block = jnp.arange(blocks)
    expert = jnp.minimum(jnp.searchsorted(block_end, block, side="right", method="compare_all"), experts - 1)
    offset = (block - (block_end - block_count)[expert])[:, None] * rows + jnp.arange(rows)
    source = jnp.where(offset < count[expert][:, None], pair_start[expert][:, None] + offset, P)
    return expert.astype(jnp.int32), order.at[source].get(mode="fill", fill_value=P)


def _mlp(x, gate, up, down, glu):
    """x [rows, D] through one expert, accumulated in float32; the activation is rounded once, to x's dtype."""
    dtype, exact = accumulator(x), precision(x.dtype)
    g = jnp.einsum("nd,df->nf", x, gate, precision=exact, preferred_element_type=dtype)
    u = jnp.einsum("nd,df->nf", x, up, precision=exact, preferred_element_type=dtype)
    h = glu(g, u).astype(x.dtype)
    return jnp.einsum("nf,fd->nd", h, down, precision=exact, preferred_element_type=dtype)


def _matrix(w, expert, dtype):
    """One expert's matrix [in, out]; packed weights are expanded one expert at a time."""
    part = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, expert, keepdims=False), w)
    return jnp.swapaxes(part.dequantize(dtype), -1, -2) if isinstance(w, Mxfp4) else part.astype(dtype)
