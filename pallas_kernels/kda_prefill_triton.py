"""Chunked KDA forward on tensor cores (spec kernels 1.1, 2.2): a parallel launch per chunk, then a scan per sequence.

`prepare_kernel` turns a chunk of C tokens into what does not depend on the state: w and u of the delta rule's
triangular system, the decayed queries and keys and the masked scores. `scan_kernel` carries the state, transposed
[V, K], in the accumulators of the matrix unit, so that it feeds the next product from registers.

Operands are float16, eight times finer than bfloat16: everything but values and state is bounded by 1 (a delta rule
with unit keys contracts), and those two are held relative to a power of two of the sequence's largest value. Decays of
a range of tokens are exp2 of a product of the log-decays, as two float16 terms, with a 0/1 matrix.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from pallas_kernels.gpu import like, triton_call

C = 32  # tokens of a chunk
D = 128  # key and value channels
PREPARE_WARPS = 2  # 32 rows are two of the matrix unit's tiles: more warps would repeat each other
PREPARE_REGISTERS = 168  # a thread; six programs share a multiprocessor
PREPARE_BD = 32  # channels at a time
SCAN_BV = 64  # value channels of a program of the scan
SCAN_STAGES = 3  # chunks in flight
# exp of half a tile of log-decays must stay a float32: at 32 rows a bounded gate, at 16 a floor that
# keeps 4.5e-5 of what a token should have erased, an eighth of the operands' rounding.
LOWEST_OF_32 = 5.0
LOWEST_OF_16 = 10.0
LOG2E = tl.constexpr(1.4426950408889634)
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no inline assembly


@triton.jit
def _span(hi, lo, choose):
    """Sums of g = hi + lo [C, D] over the rows that each row of choose [C, C] (-1, 0, 1) names."""
    choose = choose.to(tl.float16)
    return tl.dot(choose, lo, tl.dot(choose, hi))


@triton.jit
def _tf32(x):
    """Nearest value with a 10 bit fraction: the matrix unit would cut, not round."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
    else:
        return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    """To one unit in the last place: one exponential and one reciprocal, no division."""
    y = 1.0 + tl.exp2(x * -LOG2E)
    if ASSEMBLY:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [y], tl.float32, is_pure=True, pack=1)
    else:
        return 1.0 / y


@triton.jit
def _power_of_two(x):
    """Largest power of two below x >= 0, kept in 2**-96..2**96."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 31 << 23), 223 << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _row_scale(x, at, mask):
    row = tl.load(x + at, mask=mask, other=0).to(tl.float32)
    return tl.rsqrt(tl.sum(row * row, axis=1) + 1e-6)[:, None]


@triton.jit
def prepare_kernel(
    q, k, v, f, b, a_log, dt_bias, chunk_row, chunk_length,
    w_out, u_out, q_out, k_out, score_out, decay_out, peak_out, o,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, TILE: tl.constexpr, RAW: tl.constexpr,
    BOUND: tl.constexpr, LOWEST: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """RAW: q, k before their norm, f and b before the gates; else q and k normalised, f the log-decay, b the strength.

    A chunk_length below 0 marks that many rows of no sequence, whose output is 0. TILE rows share an anchor row, C or
    C / 2: half a tile of log-decays of at least LOWEST must not overflow exp.
    """
    h = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(chunk_row + chunk)
    length = tl.load(chunk_length + chunk)
    r = tl.arange(0, C)
    i = r[:, None]
    j = r[None, :]
    all = tl.arange(0, D)[None, :]
    start = (row.to(tl.int64) * H + h) * D
    if length <= 0:
        tl.store(o + start + i * (H * D) + all, tl.zeros([C, D], o.dtype.element_ty), mask=i < -length)
        return
    mask = i < length
    here = (chunk * H + h).to(tl.int64)
    middle = i // TILE * TILE + TILE // 2 - 1
    from_middle = ((middle < j) & (j <= i)).to(tl.int32) - ((i < j) & (j <= middle)).to(tl.int32)
    k_scale = tl.full([C, 1], 1.0, tl.float32)
    q_scale = tl.full([C, 1], 1.0, tl.float32)
    rate = 1.0
    if RAW:
        k_scale = _row_scale(k + start, i * (H * D) + all, mask)
        q_scale = _row_scale(q + start, i * (H * D) + all, mask)
        rate = tl.exp(tl.load(a_log + h))
    keys = tl.zeros([C, C], tl.float32)
    score = tl.zeros([C, C], tl.float32)
    far_keys = tl.zeros([C, C], tl.float32)
    far_score = tl.zeros([C, C], tl.float32)
    for part in tl.range(0, D, BD, num_stages=1):
        d = part + tl.arange(0, BD)
        at = i * (H * D) + d[None, :]
        wide = here * C * D + i * D + d[None, :]
        g = tl.load(f + start + at, mask=mask, other=0).to(tl.float32)
        if RAW:
            z = g + tl.load(dt_bias + h * D + d)[None, :]
            if BOUND is None:
                g = -rate * (tl.maximum(z, 0.0) + tl.log2(1 + tl.exp2(tl.abs(z) * -LOG2E)) / LOG2E)
            else:
                g = BOUND * _sigmoid(rate * z)
        g = tl.where(mask, tl.maximum(g, LOWEST), 0.0) * LOG2E
        first = tl.sum(tl.where(i < C // 2, g, 0.0), axis=0)
        second = tl.sum(tl.where(i < C // 2, 0.0, g), axis=0)
        tl.store(decay_out + here * D + d, tl.exp2(first + second))
        hi = g.to(tl.float16)
        lo = (g - hi.to(tl.float32)).to(tl.float16)
        e = _span(hi, lo, from_middle)
        forth = tl.exp2(e)
        back = tl.exp2(-e)
        if TILE == C:
            before = forth * tl.exp2(first)[None, :]
            after = back * tl.exp2(second)[None, :]
        else:
            e = _span(hi, lo, (((TILE <= j) & (j <= i)) | ((i < j) & (j < TILE))).to(tl.int32))
            near = tl.exp2(e)
            far = tl.exp2(tl.where(i < TILE, first[None, :], second[None, :]) - e)
            before = tl.where(i < TILE, far, near * tl.exp2(first)[None, :])
            after = tl.where(i < TILE, near * tl.exp2(second)[None, :], far)
        kk = tl.load(k + start + at, mask=mask, other=0).to(tl.float32) * k_scale
        tl.store(k_out + wide, (kk * after).to(tl.float16))
        tl.store(w_out + wide, (kk * before).to(tl.float16))
        right = tl.trans(_tf32(kk * back))
        keys = tl.dot(_tf32(kk * forth), right, keys)
        qq = tl.load(q + start + at, mask=mask, other=0).to(tl.float32) * q_scale
        tl.store(q_out + wide, (qq * before).to(tl.float16))
        score = tl.dot(_tf32(qq * forth), right, score)
        if TILE < C:
            left = tl.trans((kk * near).to(tl.float16))
            far_keys = tl.dot((kk * near).to(tl.float16), left, far_keys)
            far_score = tl.dot((qq * near).to(tl.float16), left, far_score)
    if TILE < C:
        same = i // TILE == j // TILE
        keys = tl.where(same, keys, far_keys)
        score = tl.where(same, score, far_score)
    tl.store(score_out + here * C * C + i * C + j, tl.where(i >= j, score, 0.0).to(tl.float16))

    beta = tl.load(b + (row + r).to(tl.int64) * H + h, mask=r < length, other=0).to(tl.float32)
    if RAW:
        beta = tl.where(r < length, _sigmoid(beta), 0.0)
    keys = tl.where(i > j, keys, 0.0) * beta[:, None]
    # (1 + keys)^-1 by doubling the solved blocks: with B between two solved halves, X becomes X - X B X.
    solved = tl.where(i == j, 1.0, tl.where((i >> 1) == (j >> 1), -keys, 0.0))
    for level in tl.static_range(1, LEVELS):
        between = tl.where(((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level)), keys, 0.0)
        x = solved.to(tl.float16)
        solved -= tl.dot(tl.dot(x, between.to(tl.float16)).to(tl.float16), x)
    solved = (solved * beta[None, :]).to(tl.float16)
    values = tl.load(v + start + i * (H * D) + all, mask=mask, other=0).to(tl.float32)
    peak = _power_of_two(tl.max(tl.max(tl.abs(values), axis=1), axis=0))
    tl.store(peak_out + here, peak)
    values = (values * (1 / peak)).to(tl.float16)
    u = tl.dot(tl.trans(values), tl.trans(solved))
    tl.store(u_out + here * C * D + tl.arange(0, D)[:, None] * C + j, u.to(tl.float16))
    tl.debug_barrier()  # w_out holds the decayed keys
    wide = here * C * D + i * D + all
    tl.store(w_out + wide, (-tl.dot(solved, tl.load(w_out + wide))).to(tl.float16))


@triton.jit
def scan_kernel(
    w, u, q, k, score, decay, peak, chunk_row, chunk_length, first_chunk, snapshot, initial, _o, o, final, states,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, SNAPSHOTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """first_chunk [S+1]: sequence s owns those chunks; snapshot [chunks]: where the state after a chunk goes, or -1."""
    vs = tl.program_id(0) * BV + tl.arange(0, BV)
    h = tl.program_id(1)
    s = tl.program_id(2)
    begin = tl.load(first_chunk + s)
    end = tl.load(first_chunk + s + 1)
    d = tl.arange(0, D)
    r = tl.arange(0, C)
    here = (s * H + h).to(tl.int64) * D * D + d[:, None] * D + vs[None, :]
    state = tl.trans(tl.load(initial + here).to(tl.float32))
    largest = tl.max(tl.max(tl.abs(state), axis=1), axis=0)
    for c in tl.range(begin, end, 128):
        i = c + tl.arange(0, 128)
        largest = tl.maximum(largest, tl.max(tl.load(peak + i * H + h, mask=i < end, other=0), axis=0))
    unit = _power_of_two(largest)
    state = state * (1 / unit)
    for c in tl.range(begin, end, num_stages=STAGES):
        at = (c * H + h).to(tl.int64)
        wide = at * C * D + r[:, None] * D + d[None, :]
        values = tl.load(u + at * C * D + vs[:, None] * C + r[None, :]).to(tl.float32)
        values = values * (tl.load(peak + at) / unit)
        old = state.to(tl.float16)
        values = tl.dot(old, tl.trans(tl.load(w + wide)), values).to(tl.float16)
        out = tl.dot(old, tl.trans(tl.load(q + wide)))
        out = tl.dot(values, tl.trans(tl.load(score + at * C * C + r[:, None] * C + r[None, :])), out)
        state = tl.dot(values, tl.load(k + wide), state * tl.load(decay + at * D + d)[None, :])
        row = tl.load(chunk_row + c) + r
        place = (row.to(tl.int64) * H + h)[:, None] * D + vs[None, :]
        out = tl.trans(out * (unit * D**-0.5)).to(o.dtype.element_ty)
        tl.store(o + place, out, mask=(r < tl.load(chunk_length + c))[:, None])
        if SNAPSHOTS:
            target = tl.load(snapshot + c).to(tl.int64)
            if target >= 0:
                there = (target * H + h) * D * D + d[:, None] * D + vs[None, :]
                tl.store(states + there, tl.trans(state * unit))
    tl.store(final + here, tl.trans(state * unit))


def prefill(q, k, v, f, b, a_log, dt_bias, initial, chunks, *, raw, bound, snapshots):
    """q, k, v, f [T, H, D], b [T, H], initial [S, H, D, D], chunks a `kda_prefill.Chunks`.

    Returns o [T, H, D] in v's dtype, the final states and max(snapshots, 1) states kept on the way.
    """
    T, H, _ = q.shape
    N, S = chunks.row.shape[0], initial.shape[0]
    out = jax.ShapeDtypeStruct
    tile, square = out((N, H, C, D), jnp.float16), out((N, H, C, C), jnp.float16)
    bounded = bound is not None and bound >= -LOWEST_OF_32
    *parts, o = triton_call(
        q, k, v, f, b, a_log, dt_bias, chunks.row, chunks.length,
        kernel=prepare_kernel, name="kda_prepare", grid=(H, N), num_warps=PREPARE_WARPS, registers=PREPARE_REGISTERS,
        out_shape=[
            *[tile] * 4, square, out((N, H, D), jnp.float32), out((N, H), jnp.float32), out((T, H, D), v.dtype),
        ],
        H=H, D=D, C=C, LEVELS=C.bit_length() - 1, RAW=raw, BOUND=bound, BD=PREPARE_BD,
        TILE=32 if bounded else 16, LOWEST=-LOWEST_OF_32 if bounded else -LOWEST_OF_16,
    )  # fmt: skip
    return triton_call(
        *parts, chunks.row, chunks.length, chunks.first, chunks.snapshot, initial, o,
        kernel=scan_kernel, name="kda_scan", grid=(D // SCAN_BV, H, S), num_warps=SCAN_BV // 16, num_stages=SCAN_STAGES,
        out_shape=[like(o), out((S, H, D, D), jnp.float32), out((max(snapshots, 1), H, D, D), jnp.float32)],
        aliases={12: 0}, zeroed=(2,) if snapshots else (),
        H=H, D=D, C=C, BV=SCAN_BV, SNAPSHOTS=snapshots > 0, STAGES=SCAN_STAGES,
    )  # fmt: skip
