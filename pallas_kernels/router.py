"""Expert routing: sigmoid scores, a selection bias, the top k (spec model 5.3)."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import HIGHEST, Floor, accumulator, choose
from pallas_kernels.router_ref import route_ref


def route(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array,
    *,
    top_k: int,
    renormalize: bool,
    scale: float,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """x [N, D], weight [D, E], bias [E] -> expert ids [N, top_k] int32, best first, and weights [N, top_k] float32.

    Scores are float32 throughout. The bias takes part in the selection only; of equal scores the lower id wins.
    """
    E = weight.shape[1]
    if weight.shape[0] != x.shape[-1] or bias.shape != (E,):
        raise ValueError(
            f"route: weight {weight.shape} and bias {bias.shape} do not fit x {x.shape}; pass [D, E] and [E]"
        )
    if not 1 <= top_k <= E:
        raise ValueError(f"route: top_k {top_k} is outside 1..{E}, the number of experts; choose one inside")
    if choose("route", impl, ("xla", "ref")) == "ref":
        return route_ref(x, weight, bias, top_k=top_k, renormalize=renormalize, scale=scale)
    dtype = accumulator(x, weight)
    logits = jnp.einsum("nd,de->ne", x.astype(dtype), weight.astype(dtype), precision=HIGHEST)
    scores = jax.nn.sigmoid(logits)
    _, ids = jax.lax.top_k(scores + bias.astype(dtype), top_k)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if renormalize and top_k > 1:
        weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
    return ids.astype(jnp.int32), weights * scale


def floor(tokens: int, width: int, experts: int, top_k: int, *, itemsize: int = 2) -> Floor:
    """x and the router weight read once, ids and weights written once."""
    moved = itemsize * width * (tokens + experts) + 8 * tokens * top_k
    return Floor(bytes=moved, flops=2 * tokens * width * experts)
