"""Attention residual mix: a program per token reads every source row once, with a running softmax (spec kernels 9)."""

import jax
import triton
import triton.language as tl

from pallas_kernels.gpu import triton_call

MAX_SOURCES = 9
MAX_WIDTH = 8192
WARPS = 4


@triton.jit
def mix_kernel(
    s0, s1, s2, s3, s4, s5, s6, s7, s8, weight, out,
    N: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    c = tl.arange(0, BLOCK)
    mask = c < D
    sources = (s0, s1, s2, s3, s4, s5, s6, s7, s8)
    w = tl.load(weight + c, mask=mask, other=0)
    mix = tl.zeros([BLOCK], tl.float32)
    total = 0.0
    top = -float("inf")
    for n in tl.static_range(N):
        x = tl.load(sources[n] + row + c, mask=mask, other=0).to(tl.float32)
        score = tl.sum(x * w, axis=0) * tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
        highest = tl.maximum(top, score)
        keep, p = tl.exp(top - highest), tl.exp(score - highest)
        mix = mix * keep + p * x
        total = total * keep + p
        top = highest
    tl.store(out + row + c, (mix / total).to(out.dtype.element_ty), mask=mask)


def mix(sources, score_weight, eps):
    """See `attn_res.attn_res_mix`; at most MAX_SOURCES sources of at most MAX_WIDTH channels, a multiple of 64."""
    first = sources[0]
    D = first.shape[-1]
    rows = first.size // D
    flat = [s.reshape(rows, D) for s in sources]
    padded = flat + [flat[0]] * (MAX_SOURCES - len(flat))
    (out,) = triton_call(
        *padded, score_weight.astype("float32"),
        kernel=mix_kernel, name="attn_res_mix", grid=(rows,), num_warps=WARPS,
        out_shape=[jax.ShapeDtypeStruct((rows, D), first.dtype)],
        N=len(flat), D=D, BLOCK=triton.next_power_of_2(D), EPS=eps,
    )  # fmt: skip
    return out.reshape(first.shape)
