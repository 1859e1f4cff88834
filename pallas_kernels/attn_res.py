"""Attention residual: a learned softmax over earlier blocks of the residual (K3 report eq. 8-9, spec model 4.1)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res_ref import attn_res_ref
from pallas_kernels.common import HIGHEST, Floor, accumulator, choose
from pallas_kernels.gpu import differentiable, why_not_triton


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
    reason = _why_not_kernel(rows)
    usable = ("xla", "ref") if reason else ("xla", "triton", "ref")  # auto changes once the kernel is checked on a GPU
    impl = choose("attn_res_mix", impl, usable, {"triton": reason or ""})
    if impl == "ref":
        return attn_res_ref(rows, score_weight, eps)
    if impl == "triton":
        from pallas_kernels.attn_res_triton import mix

        return differentiable(lambda rows, w: mix(rows, w, eps), lambda rows, w: _xla(rows, w, eps))(rows, score_weight)
    return _xla(rows, score_weight, eps)


def _why_not_kernel(rows: list[jax.Array]) -> str | None:
    D = rows[0].shape[-1]
    if len(rows) > 9 or D > 8192 or D % 64 or rows[0].size == 0:
        return (
            f"it mixes up to 9 sources of up to 8192 channels, a multiple of 64, and got {len(rows)} of {rows[0].shape}"
        )
    if any(r.dtype != jnp.bfloat16 for r in rows):
        return f"it reads bfloat16 and got {sorted({str(r.dtype) for r in rows})}"
    return why_not_triton()


def _xla(rows, score_weight, eps):
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
