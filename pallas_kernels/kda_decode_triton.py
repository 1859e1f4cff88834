"""KDA decode, verify and fold, one launch each: a program holds the whole state of a head (spec kernels 5, 6)."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.gpu import like, triton_call
from pallas_kernels.kda_step_triton import (
    REGISTERS,
    WARPS,
    D,
    advance,
    conv,
    conv_load,
    gated_norm,
    l2_norm,
    load_taps,
    log_decay,
    read,
    shift,
)  # fmt: skip


@triton.jit
def decode_kernel(
    raw, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, slots, _states, _windows, out, states, windows,
    H: tl.constexpr, D: tl.constexpr, BOUND: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    d = tl.arange(0, D)
    head = h * D + d
    here = row * H * D + head
    if slot < 0:
        tl.store(out + here, tl.zeros([D], out.dtype.element_ty))
        return
    C: tl.constexpr = 3 * H * D
    raw += row * C
    windows += slot * 3 * C
    tile = states + (slot * H + h) * D * D + d[:, None] * D + d[None, :]
    state = tl.load(tile)
    # All other loads before the first wait: a barrier would hold them back.
    q_in = conv_load(raw, conv_weight, windows, head, C)
    k_in = conv_load(raw, conv_weight, windows, H * D + head, C)
    v_in = conv_load(raw, conv_weight, windows, 2 * H * D + head, C)
    decay = tl.load(f + here).to(tl.float32)
    rate, bias = tl.load(a_log + h), tl.load(dt_bias + head)
    strength = tl.load(b + row * H + h).to(tl.float32)
    across = d[None, :]
    opening = tl.load(gate + row * H * D + h * D + across).to(tl.float32)
    gain = tl.load(norm_weight + across)
    q = l2_norm(conv(q_in))
    k = l2_norm(conv(k_in))
    v = conv(v_in)
    state = advance(state, k, v, log_decay(decay, rate, bias, BOUND), tl.sigmoid(strength))
    tl.store(tile, state)
    o = gated_norm(read(state, q), opening, gain, D, EPS)
    shift(q_in, windows, head, C)
    shift(k_in, windows, H * D + head, C)
    shift(v_in, windows, 2 * H * D + head, C)
    tl.store(out + row * H * D + h * D + across, o.to(out.dtype.element_ty))


@triton.jit
def verify_kernel(
    raw, f, b, gate, conv_weight, a_log, dt_bias, norm_weight, slots, states, windows,
    out, k_out, v_out, g_out, beta_out, q_out,
    H: tl.constexpr, D: tl.constexpr, BOUND: tl.constexpr, EPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    d = tl.arange(0, D)
    head = h * D + d
    if slot < 0:
        for t in range(ROWS):
            tl.store(out + (request * ROWS + t) * H * D + head, tl.zeros([D], out.dtype.element_ty))
        return
    C: tl.constexpr = 3 * H * D
    windows += slot * 3 * C
    states += (slot * H + h) * D * D
    for t in range(ROWS):
        row = request * ROWS + t
        at = row * H * D + head
        q = _conv_row(raw, conv_weight, windows, request * ROWS, t, head, C)
        k = _conv_row(raw, conv_weight, windows, request * ROWS, t, H * D + head, C)
        v = _conv_row(raw, conv_weight, windows, request * ROWS, t, 2 * H * D + head, C)
        g = log_decay(tl.load(f + at).to(tl.float32), tl.load(a_log + h), tl.load(dt_bias + head), BOUND)
        tl.store(q_out + at, l2_norm(q))
        tl.store(k_out + at, l2_norm(k))
        tl.store(v_out + at, v.to(v_out.dtype.element_ty))
        tl.store(g_out + at, g)
        tl.store(beta_out + row * H + h, tl.sigmoid(tl.load(b + row * H + h).to(tl.float32)))
    tl.debug_barrier()
    state = tl.load(states + d[:, None] * D + d[None, :])
    for t in range(ROWS):
        row = request * ROWS + t
        at = row * H * D + head
        v = tl.load(v_out + at).to(tl.float32)
        state = advance(state, tl.load(k_out + at), v, tl.load(g_out + at), tl.load(beta_out + row * H + h))
        across = row * H * D + h * D + d[None, :]
        opening, gain = tl.load(gate + across).to(tl.float32), tl.load(norm_weight + d[None, :])
        o = gated_norm(read(state, tl.load(q_out + at)), opening, gain, D, EPS)
        tl.store(out + across, o.to(out.dtype.element_ty))


@triton.jit
def _conv_row(raw, weight, window, first, t, at, C: tl.constexpr):
    """`conv` of row t of a request whose rows start at `first`: earlier rows and the window precede it."""
    x = tl.load(raw + (first + t) * C + at), _past(raw, window, first, t - 1, at, C)
    older = _past(raw, window, first, t - 2, at, C), _past(raw, window, first, t - 3, at, C)
    return conv((x + older, load_taps(weight, at)))


@triton.jit
def _past(raw, window, first, t, at, C: tl.constexpr):
    """Row t of a request, or of the three tokens before it where t < 0."""
    if t >= 0:
        row = tl.load(raw + (first + t) * C + at)
    else:
        row = tl.load(window + (t + 3) * C + at).to(raw.dtype.element_ty)
    return row


@triton.jit
def fold_kernel(
    k, v, g, beta, raw, slots, count, _states, _windows, states, windows,
    H: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + request).to(tl.int64)
    n = tl.load(count + request)
    if (slot < 0) | (n <= 0):
        return
    d = tl.arange(0, D)
    tile = states + (slot * H + h) * D * D + d[:, None] * D + d[None, :]
    state = tl.load(tile)
    for t in range(n):
        row = (request * ROWS + t) * H + h
        at = row * D + d
        state = advance(
            state, tl.load(k + at), tl.load(v + at).to(tl.float32), tl.load(g + at), tl.load(beta + row)
        )  # fmt: skip
    tl.store(tile, state)
    C: tl.constexpr = 3 * H * D
    windows += slot * 3 * C
    for part in tl.static_range(3):
        at = (part * H + h) * D + d
        oldest = _past(raw, windows, request * ROWS, n - 3, at, C)
        middle = _past(raw, windows, request * ROWS, n - 2, at, C)
        newest = tl.load(raw + (request * ROWS + n - 1) * C + at)
        tl.store(windows + at, oldest.to(windows.dtype.element_ty))
        tl.store(windows + C + at, middle.to(windows.dtype.element_ty))
        tl.store(windows + 2 * C + at, newest.to(windows.dtype.element_ty))


def decode(rows, heads, states, windows, slots, lower_bound, eps):
    """See `kda_decode.kda_decode`."""
    B, _, H, _ = rows.qkv.shape
    return triton_call(
        *_inputs(rows, heads), slots.astype(jnp.int32), states, windows,
        kernel=decode_kernel, name="kda_decode", grid=(H, B), num_warps=WARPS, registers=REGISTERS, fuse=False,
        out_shape=[jax.ShapeDtypeStruct((B, H, D), rows.qkv.dtype), like(states), like(windows)], aliases={9: 1, 10: 2},
        H=H, D=D, BOUND=lower_bound, EPS=eps,
    )  # fmt: skip


def verify(rows, heads, states, windows, slots, lower_bound, eps):
    """See `kda_decode.kda_verify`: out and the fields of its record."""
    B, R, _, H, _ = rows.qkv.shape
    wide = jax.ShapeDtypeStruct((B, R, H, D), jnp.float32)
    narrow = jax.ShapeDtypeStruct((B, R, H, D), rows.qkv.dtype)
    out, *record, _ = triton_call(
        *_inputs(rows, heads), slots.astype(jnp.int32), states, windows,
        kernel=verify_kernel, name="kda_verify", grid=(H, B), num_warps=WARPS, registers=REGISTERS, fuse=False,
        out_shape=[narrow, wide, narrow, wide, jax.ShapeDtypeStruct((B, R, H), jnp.float32), wide],
        H=H, D=D, BOUND=lower_bound, EPS=eps, ROWS=R,
    )  # fmt: skip
    return out, record


def fold(record, qkv, states, windows, slots, count):
    """See `kda_decode.kda_fold`."""
    B, R, H, _ = record.k.shape
    slots, count = slots.astype(jnp.int32), count.astype(jnp.int32)
    return triton_call(
        record.k, record.v, record.g, record.beta, qkv, slots, count, states, windows,
        kernel=fold_kernel, name="kda_fold", grid=(H, B), num_warps=WARPS, registers=REGISTERS, fuse=False,
        out_shape=[like(states), like(windows)], aliases={7: 0, 8: 1},
        H=H, D=D, ROWS=R,
    )  # fmt: skip


def _inputs(rows, heads):
    wide = (a.astype(jnp.float32) for a in (heads.conv, heads.a_log, heads.dt_bias, heads.norm))
    return rows.qkv, rows.f, rows.b, rows.gate, *wide
