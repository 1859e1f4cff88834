"""KDA over whole prompts, from the convolved projections to the heads' outputs: the norms and gates are inside."""

import functools

import jax

from pallas_kernels.common import choose
from pallas_kernels.gpu import differentiable
from pallas_kernels.kda import kda, kda_gate, l2_norm
from pallas_kernels.kda_gpu import run_kernel, why_not_kernel


def kda_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    f: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    cu_seqlens: jax.Array | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    return_states: bool = False,
    impl: str = "auto",
) -> tuple[jax.Array, ...]:
    """`kda` of l2_norm(q), l2_norm(k), v, kda_gate(f, a_log, dt_bias, lower_bound) and sigmoid(b).

    q, k, v, f [B, T, H, K] as the convolution and the projection leave them, b [B, T, H], a_log [H], dt_bias [H, K];
    initial_state, cu_seqlens, chunk_size and return_states, the packing and the result are those of `kda`.
    """
    if f.shape != q.shape or a_log.shape != q.shape[2:3] or dt_bias.shape != q.shape[2:]:
        raise ValueError(
            f"kda_prefill: f {f.shape}, a_log {a_log.shape}, dt_bias {dt_bias.shape} do not fit q {q.shape};"
            " pass f [B, T, H, K], a_log [H] and dt_bias [H, K]"
        )
    reason = why_not_kernel(q, v, chunk_size, k, f, b)
    usable = ("xla", "ref") if reason else ("xla", "triton", "ref")  # auto changes once the kernel is checked on a GPU
    impl = choose("kda_prefill", impl, usable, {"triton": reason or ""})

    def definition(q, k, v, f, b, a_log, dt_bias, initial_state, cu_seqlens, impl="xla"):
        g = kda_gate(f, a_log, dt_bias, lower_bound)
        return kda(
            l2_norm(q), l2_norm(k), v, g, jax.nn.sigmoid(b.astype(g.dtype)), initial_state, cu_seqlens=cu_seqlens,
            lower_bound=lower_bound, chunk_size=chunk_size, return_states=return_states, impl=impl,
        )  # fmt: skip

    args = (q, k, v, f, b, a_log, dt_bias, initial_state, cu_seqlens)
    if impl != "triton":
        return definition(*args, impl=impl)
    every = chunk_size if return_states else 0
    return differentiable(functools.partial(run_kernel, raw=True, bound=lower_bound, every=every), definition)(*args)
