"""Routed experts: the public op. `moe_ref.py` defines it, `moe_block.py` is the XLA path."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import Floor, choose
from pallas_kernels.glu import Glu, silu_glu, situ_glu
from pallas_kernels.moe_block import experts_blocked
from pallas_kernels.moe_ref import experts_ref
from pallas_kernels.mxfp4 import Mxfp4

__all__ = ["Glu", "experts", "floor", "silu_glu", "situ_glu"]


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    w1: jax.Array | Mxfp4,
    w3: jax.Array | Mxfp4,
    w2: jax.Array | Mxfp4,
    *,
    glu: Glu,
    first_expert: int | jax.Array = 0,
    impl: str = "auto",
) -> jax.Array:
    """Weighted sum over each row's chosen experts of w2(glu(w1 x, w3 x)).

    x [N, D], ids [N, top_k] int32, weights [N, top_k] float32; w1, w3 [E, D, F] and w2 [E, F, Dout], or `Mxfp4`
    [E, F, D] and [E, Dout, F]. The E experts given are number first_expert and up: other ids add nothing, so that
    devices with a part of the experts each can sum their results. Returns [N, Dout] float32, summed in the order of
    top_k. Differentiable in x, weights and, where they are arrays, w1, w3, w2.
    """
    E, D, F = _dims(w1)
    if _dims(w3) != (E, D, F) or _dims(w2)[:2] != (E, F) or x.shape[-1] != D or ids.shape != weights.shape:
        raise ValueError(
            f"experts: x {x.shape}, ids {ids.shape}, weights {weights.shape}, w1 {_dims(w1)}, w3 {_dims(w3)},"
            f" w2 {_dims(w2)} (experts, in, out) do not fit;"
            " pass x [N, D], ids and weights [N, top_k], w1 and w3 [E, D, F], w2 [E, F, Dout]"
        )
    if choose("experts", impl, ("xla", "ref")) == "ref":
        return experts_ref(x, ids, weights, w1, w3, w2, glu=glu, first_expert=first_expert)
    local = ids - first_expert
    local = jnp.where((local >= 0) & (local < E), local, E)
    return experts_blocked(x, local, weights, w1, w3, w2, glu)


def _dims(w: jax.Array | Mxfp4) -> tuple[int, ...]:
    """(experts, in, out)."""
    return (w.shape[0], w.shape[2], w.shape[1]) if isinstance(w, Mxfp4) else w.shape


def floor(
    tokens: int, experts_hit: int, top_k: int, width: int, inner: int, *, bits: float = 4.25, itemsize: int = 2
) -> Floor:
    """Weights of the experts that are hit read once (bits per weight: 4.25 for MXFP4), rows in and out once."""
    weights = 3 * width * inner
    moved = int(experts_hit * weights * bits / 8) + 2 * itemsize * tokens * width
    return Floor(bytes=moved, flops=2 * tokens * top_k * weights)
