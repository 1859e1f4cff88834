"""KDA at decode: from the projections of a token to the gated head outputs, on pools of states and windows.

`kda_decode` takes one token per request. `kda_verify` takes the rows of a draft without touching the pools and
records what `kda_fold` needs to commit any prefix of them; the fold equals that many decode steps, bit for bit when
one implementation does both (spec kernels 5 and 6, spec speculative 7).
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common import Floor, accumulator, choose
from pallas_kernels.conv import short_conv
from pallas_kernels.gpu import MAX_GRID, why_not_triton
from pallas_kernels.kda import kda_gate, l2_norm
from pallas_kernels.kda_ref import kda_step
from pallas_kernels.norm import rms_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaHeads:
    """What one layer's heads own: H heads of K = V channels, windows of W taps."""

    conv: jax.Array  # [3, H, K, W] taps of q, k, v; tap W-1 is on the current token
    a_log: jax.Array  # [H]
    dt_bias: jax.Array  # [H, K]
    norm: jax.Array  # [K] gain of the output norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaRows:
    """The projections of rows [*R]; what a request's token brings to its heads."""

    qkv: jax.Array  # [*R, 3, H, K] before the convolution
    f: jax.Array  # [*R, H, K] decay before its gate
    b: jax.Array  # [*R, H] write strength before its sigmoid
    gate: jax.Array  # [*R, H, K] output gate before its sigmoid


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaRecord:
    """All that the state needs of a drafted row: 1,284 bytes a head, where the state after the row has 65,536."""

    k: jax.Array  # [B, R, H, K] float32, normalised
    v: jax.Array  # [B, R, H, K] in the rows' dtype
    g: jax.Array  # [B, R, H, K] float32 log-decay
    beta: jax.Array  # [B, R, H] float32


def kda_decode(
    rows: KdaRows,
    heads: KdaHeads,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array,
    *,
    lower_bound: float | None,
    eps: float,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token per request: rows [B], states [P, H, K, K] float32, windows [P, W-1, 3, H, K], slots [B] int32.

    slots, distinct, name each request's place in both pools; -1 marks a padding row, which gets 0 and touches no
    place. A pool of several layers is passed as [layers * P, ...] with slots offset by layer * P.
    Returns the normalised and gated head outputs [B, H, K] in the rows' dtype and both pools, donated ones in place.
    """
    _check("kda_decode", rows, heads, states, windows, slots, rows.qkv.shape[:1])
    if _choose("kda_decode", impl, jax.tree.leaves(rows), states, windows) == "triton":
        from pallas_kernels.kda_decode_triton import decode

        return decode(rows, heads, states, windows, slots, lower_bound, eps)
    at = jnp.where(slots >= 0, slots, states.shape[0])
    one = jax.tree.map(lambda a: a[:, None], rows)
    q, k, v, g, beta, window = _prepare(one, heads, windows.at[at].get(mode="fill", fill_value=0), lower_bound)
    o, state = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], states.at[at].get(mode="fill", fill_value=0))
    states = states.at[at].set(state.astype(states.dtype), mode="drop")
    windows = windows.at[at].set(window, mode="drop")
    return _finish(o, rows, heads, slots, eps), states, windows


def kda_verify(
    rows: KdaRows,
    heads: KdaHeads,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array,
    *,
    lower_bound: float | None,
    eps: float,
    impl: str = "auto",
) -> tuple[jax.Array, KdaRecord]:
    """R drafted rows per request: rows [B, R], pools and slots as in `kda_decode`, which are only read.

    Returns the head outputs [B, R, H, K], the same as R decode steps give, and the record for `kda_fold`. A padding
    request gets output 0; its record holds anything.
    """
    _check("kda_verify", rows, heads, states, windows, slots, rows.qkv.shape[:2])
    if _choose("kda_verify", impl, jax.tree.leaves(rows), states, windows) == "triton":
        from pallas_kernels.kda_decode_triton import verify

        out, record = verify(rows, heads, states, windows, slots, lower_bound, eps)
        return out, KdaRecord(*record)
    at = jnp.where(slots >= 0, slots, states.shape[0])
    q, k, v, g, beta, _ = _prepare(rows, heads, windows.at[at].get(mode="fill", fill_value=0), lower_bound)

    def token(state, row):
        q, k, v, g, beta = row
        o, state = kda_step(q, k, v, g, beta, state)
        return state, o

    time_first = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, g, beta))
    _, o = jax.lax.scan(token, states.at[at].get(mode="fill", fill_value=0).astype(q.dtype), time_first)
    out = _finish(jnp.moveaxis(o, 0, 1), rows, heads, slots, eps)
    return out, KdaRecord(k=k, v=v, g=g, beta=beta)


def kda_fold(
    record: KdaRecord,
    qkv: jax.Array,
    states: jax.Array,
    windows: jax.Array,
    slots: jax.Array,
    count: jax.Array,
    *,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Commit the first count [B] int32 recorded rows of each request to both pools, donated ones in place.

    qkv [B, R, 3, H, K] are the rows that were verified. Several layers fold in one call: give each (layer, request)
    pair a row of B and a slot of a [layers * P, ...] pool. slot -1 or count 0 leaves everything as it is.
    """
    B, R, H, K = record.k.shape
    if qkv.shape != (B, R, 3, H, K) or slots.shape != (B,) or count.shape != (B,) or states.shape[1:] != (H, K, K):
        raise ValueError(
            f"kda_fold: record {record.k.shape}, qkv {qkv.shape}, states {states.shape}, slots {slots.shape} and"
            f" count {count.shape} do not fit; pass [B, R, H, K], [B, R, 3, H, K], [P, H, K, K], [B] and [B]"
        )
    if _choose("kda_fold", impl, [record.v, qkv], states, windows) == "triton":
        from pallas_kernels.kda_decode_triton import fold

        return fold(record, qkv, states, windows, slots, count)
    at = jnp.where((slots >= 0) & (count > 0), slots, states.shape[0])

    def token(state, row):
        i, (k, v, g, beta) = row
        _, new = kda_step(k, k, v, g, beta, state)
        return jnp.where((i < count)[:, None, None, None], new, state), None

    time_first = tuple(jnp.moveaxis(a, 1, 0) for a in (record.k, record.v, record.g, record.beta))
    state = states.at[at].get(mode="fill", fill_value=0)
    state, _ = jax.lax.scan(token, state, (jnp.arange(R), time_first))
    window = windows.at[at].get(mode="fill", fill_value=0)
    W = window.shape[1] + 1
    both = jnp.concatenate([window, qkv.astype(window.dtype)], axis=1)
    window = jax.vmap(lambda rows, n: jax.lax.dynamic_slice_in_dim(rows, n, W - 1))(both, count)
    return states.at[at].set(state, mode="drop"), windows.at[at].set(window, mode="drop")


def _prepare(rows, heads, window, lower_bound):
    """rows [B, R], window [B, W-1, 3, H, K] -> q, k, v, g [B, R, H, K], beta [B, R, H], the window after them."""
    mixed, window = short_conv(rows.qkv.astype(accumulator(rows.qkv)), heads.conv, window)
    kind = jnp.finfo(rows.qkv.dtype)  # rounded as in a prompt; a mere cast may be compiled away
    mixed = jax.lax.reduce_precision(mixed, kind.nexp, kind.nmant)
    q, k, v = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2].astype(rows.qkv.dtype)
    g = kda_gate(rows.f, heads.a_log, heads.dt_bias, lower_bound)
    beta = jax.nn.sigmoid(rows.b.astype(g.dtype))
    return l2_norm(q), l2_norm(k), v, g, beta, window


def _finish(o, rows, heads, slots, eps):
    o = rms_norm(o, heads.norm, eps) * jax.nn.sigmoid(rows.gate.astype(accumulator(o)))
    real = (slots >= 0).reshape(-1, *[1] * (o.ndim - 1))
    return jnp.where(real, o, 0).astype(rows.qkv.dtype)


def _check(op, rows, heads, states, windows, slots, lead):
    H, K, W = heads.conv.shape[1:]
    fits = (
        rows.qkv.shape == (*lead, 3, H, K)
        and rows.f.shape == rows.gate.shape == (*lead, H, K)
        and rows.b.shape == (*lead, H)
        and heads.a_log.shape == (H,)
        and heads.dt_bias.shape == (H, K)
        and heads.norm.shape == (K,)
        and states.shape[1:] == (H, K, K)
        and windows.shape == (states.shape[0], W - 1, 3, H, K)
        and slots.shape == lead[:1]
    )
    if not fits:
        shapes = jax.tree.map(jnp.shape, (rows, heads, states, windows, slots))
        raise ValueError(
            f"{op}: {shapes} do not fit together; pass rows [*R, 3, H, K], states [P, H, K, K],"
            " windows [P, W-1, 3, H, K] and one slot per request"
        )


def _choose(op, impl, projections, states, windows):
    reason = _why_not_kernel(projections, states, windows) or why_not_triton()
    usable = ("xla",) if reason else ("xla", "triton")  # auto changes once the kernels are checked on a GPU
    return choose(op, impl, usable, {"triton": reason or ""})


def _why_not_kernel(projections, states, windows):
    if states.shape[-1] != 128 or windows.shape[1] != 3:
        return f"it serves 128 channels and 4 taps and these are {states.shape[-1]} and {windows.shape[1] + 1}"
    if states.dtype != jnp.float32:
        return f"it keeps float32 states and these are {states.dtype}"
    if len(projections[0]) > MAX_GRID:
        return f"it takes up to {MAX_GRID} requests and got {len(projections[0])}"
    wide = [str(a.dtype) for a in (*projections, windows) if a.dtype not in (jnp.float32, jnp.bfloat16)]
    return f"it reads float32 and bfloat16 and got {wide[0]}" if wide else None


def floor_decode(batch: int, heads: int, key: int, *, taps: int = 4, itemsize: int = 2) -> Floor:
    """State and window read and written, the projections read and the outputs written, once."""
    state = 2 * 4 * key * key
    window = 2 * itemsize * 3 * key * (taps - 1)
    return Floor(bytes=batch * heads * (state + window + itemsize * 6 * key), flops=batch * heads * 7 * key * key)


def floor_fold(requests: int, rows: int, heads: int, key: int, *, taps: int = 4, itemsize: int = 2) -> Floor:
    """States read and written once, the records of `rows` committed rows read once."""
    state = 2 * 4 * key * key + itemsize * 3 * key * (taps - 1) * 2
    record = rows * (8 * key + itemsize * key + 4)
    return Floor(bytes=requests * heads * (state + record), flops=requests * heads * rows * 5 * key * key)


def floor_verify(requests: int, rows: int, heads: int, key: int, *, taps: int = 4, itemsize: int = 2) -> Floor:
    """States read once, the projections of the drafted rows read, outputs and records written."""
    state = 4 * key * key + itemsize * 3 * key * (taps - 1)
    row = itemsize * 6 * key + 8 * key + itemsize * key + 4
    return Floor(bytes=requests * heads * (state + rows * row), flops=requests * heads * rows * 7 * key * key)
