"""Kimi Delta Attention: the public ops. `kda_ref.py` defines them, `kda_chunk.py` is the XLA path."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import Floor, accumulator, cdiv, choose
from pallas_kernels.conv import short_conv
from pallas_kernels.gpu import differentiable
from pallas_kernels.kda_chunk import TILE, chunk_scan
from pallas_kernels.kda_gpu import run_kernel, why_not_kernel
from pallas_kernels.kda_ref import kda_recurrent, kda_recurrent_packed, kda_step

__all__ = ["floor", "kda", "kda_gate", "kda_step", "kda_step_slots", "l2_norm", "short_conv"]


def l2_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x [..., K] / sqrt(sum(x^2) + eps) in float32: eps joins the sum, not the mean."""
    x = x.astype(accumulator(x))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + eps)


def kda_gate(f: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float | None) -> jax.Array:
    """Log-decay g [..., H, K] float32 from f [..., H, K], a_log [H] and dt_bias [H, K] (spec model 2.3).

    lower_bound (K3: -5) bounds it: lower_bound * sigmoid(exp(a_log) * z); None is -exp(a_log) * softplus(z).
    """
    dtype = accumulator(f, a_log, dt_bias)
    rate = jnp.exp(a_log.astype(dtype))[:, None]
    z = f.astype(dtype) + dt_bias.astype(dtype)
    return -rate * jax.nn.softplus(z) if lower_bound is None else lower_bound * jax.nn.sigmoid(rate * z)


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None = None,
    *,
    cu_seqlens: jax.Array | None = None,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    return_states: bool = False,
    impl: str = "auto",
) -> tuple[jax.Array, ...]:
    """Gated delta rule with a decay per key channel.

    q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], initial_state [B, H, K, V] (zeros if absent). q and k are
    l2-normalised, q is scaled by K^-0.5 here, g <= 0 is the log-decay, beta follows its sigmoid. lower_bound is
    the bound that g keeps, None if it keeps none. Computes in float32 (float64 if an input is).

    cu_seqlens [N+1] int32 packs N sequences into B = 1: sequence n owns rows cu_seqlens[n]:cu_seqlens[n+1] and
    states are [N, H, K, V]. Rows from cu_seqlens[-1] on may hold anything, NaN included: their output and gradient
    are 0.

    Returns o [B, T, H, V] in v's dtype and the final state. return_states adds the states after every full chunk,
    a sequence whose length is a multiple of chunk_size ending with its final state: [B, T // chunk_size, H, K, V], or
    packed [T // chunk_size, H, K, V], each sequence's length // chunk_size states after the previous one's, then zeros.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    if k.shape != q.shape or g.shape != q.shape or v.shape[:3] != (B, T, H) or beta.shape != (B, T, H):
        raise ValueError(
            f"kda: q {q.shape}, k {k.shape}, g {g.shape}, v {v.shape}, beta {beta.shape} do not fit together;"
            " pass q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H]"
        )
    if T < 1:
        raise ValueError(f"kda: got {T} tokens, the minimum is 1; skip the call for an empty step")
    if chunk_size < TILE or chunk_size % TILE:
        raise ValueError(f"kda: chunk_size {chunk_size} is not a positive multiple of {TILE}; choose 16, 32 or 64")
    if cu_seqlens is not None:
        cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
        if B != 1:
            raise ValueError(f"kda: cu_seqlens needs batch 1, got {B}; pack the rows of all sequences into one")
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = accumulator(q, k, v, g, beta)
    if initial_state is None:
        initial_state = jnp.zeros((sequences, H, K, V), dtype)
    if initial_state.shape != (sequences, H, K, V):
        raise ValueError(
            f"kda: initial_state {initial_state.shape} does not fit;"
            f" pass [{sequences}, {H}, {K}, {V}] (sequences, H, K, V)"
        )
    reason = why_not_kernel(q, v, chunk_size, k, g, beta)
    usable = ("xla", "ref") if reason else ("xla", "triton", "ref")  # auto changes once the kernel is checked on a GPU
    impl = choose("kda", impl, usable, {"triton": reason or ""})
    if impl == "triton":
        options = dict(lower_bound=lower_bound, chunk_size=chunk_size, return_states=return_states)
        return _kernel(q, k, v, g, beta, initial_state, cu_seqlens, options)
    out_dtype = v.dtype
    q, k, v, g, beta, initial_state = (a.astype(dtype) for a in (q, k, v, g, beta, initial_state))
    inputs = (q, k, v, g, beta, initial_state)
    if cu_seqlens is not None:
        packed = _packed_ref if impl == "ref" else _packed
        o, final, states = packed(*inputs, cu_seqlens, lower_bound, chunk_size, return_states)
    elif impl == "ref":
        o, final, every = kda_recurrent(*inputs)
        states = every[:, chunk_size - 1 :: chunk_size] if return_states else None
    elif T == 1:
        o, final = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], initial_state)
        o, states = o[:, None], jnp.zeros((B, 0, H, K, V), dtype)
    else:
        o, final, states = _dense(*inputs, lower_bound, chunk_size)
    o = o.astype(out_dtype)
    return (o, final, states) if return_states else (o, final)


def _kernel(q, k, v, g, beta, initial_state, cu_seqlens, options):
    H, K = q.shape[2:]
    every = options["chunk_size"] if options["return_states"] else 0

    def forward(q, k, v, g, beta, initial_state, cu):
        unused = jnp.zeros(H), jnp.zeros((H, K))
        bound = options["lower_bound"]
        return run_kernel(q, k, v, g, beta, *unused, initial_state, cu, raw=False, bound=bound, every=every)

    def definition(q, k, v, g, beta, initial_state, cu):
        return kda(q, k, v, g, beta, initial_state, cu_seqlens=cu, impl="xla", **options)

    return differentiable(forward, definition)(q, k, v, g, beta, initial_state, cu_seqlens)


def _dense(q, k, v, g, beta, initial_state, lower_bound, C):
    B, T, H, K = q.shape
    full = T // C
    C = min(C, cdiv(T, TILE) * TILE)
    N = cdiv(T, C)

    def chunks(a):  # [B, T, H, ...] -> [N, B, H, C, ...]; padding neither decays nor writes
        a = jnp.pad(a, [(0, 0), (0, N * C - T), *[(0, 0)] * (a.ndim - 2)])
        a = a.reshape(B, N, C, *a.shape[2:])
        return jnp.moveaxis(a, (1, 3), (0, 2))

    o, states = chunk_scan(
        chunks(q * K**-0.5), chunks(k), chunks(v), chunks(g), chunks(beta), initial_state, lower_bound
    )
    o = jnp.moveaxis(o, (0, 2), (1, 3)).reshape(B, N * C, H, -1)[:, :T]
    return o, states[-1], jnp.moveaxis(states, 0, 1)[:, :full]


def _packed(q, k, v, g, beta, initial_state, cu, lower_bound, C, return_states):
    """Lay every sequence out in chunks of its own, scan them all, and pick rows and states back out."""
    T, S = q.shape[1], initial_state.shape[0]
    N = (T + S * (C - 1)) // C  # each sequence wastes less than one chunk
    length = cu[1:] - cu[:-1]
    ends = jnp.cumsum(-(-length // C))  # chunks up to and including each sequence
    begins = ends - -(-length // C)

    chunk = jnp.arange(N)
    sequence = _owner(ends, chunk)
    offset = ((chunk - begins[sequence]) * C)[:, None] + jnp.arange(C)  # [N, C] position in its sequence
    source = jnp.where(offset < length[sequence][:, None], cu[sequence][:, None] + offset, T)

    def chunks(a):  # [1, T, H, ...] -> [N, 1, H, C, ...]
        a = a[0].at[source].get(mode="fill", fill_value=0)
        return jnp.moveaxis(a, 2, 1)[:, None]

    first = chunk == begins[sequence]
    scale = q.shape[-1] ** -0.5
    o, states = chunk_scan(
        chunks(q * scale), chunks(k), chunks(v), chunks(g), chunks(beta), initial_state, lower_bound, (first, sequence)
    )
    row = jnp.arange(T)
    owner = _owner(cu[1:], row)
    place = begins[owner] * C + row - cu[owner]
    o = jnp.moveaxis(o[:, 0], 1, 2).reshape(N * C, *v.shape[2:])
    o = o.at[jnp.where(row < cu[-1], place, N * C)].get(mode="fill", fill_value=0)[None]

    states = states[:, 0]
    final = jnp.where((length > 0)[:, None, None, None], states[jnp.maximum(ends - 1, 0)], initial_state)
    if not return_states:
        return o, final, None
    full = length // C
    slot = jnp.arange(T // C)
    owner = _owner(jnp.cumsum(full), slot)
    which = begins[owner] + slot - (jnp.cumsum(full) - full)[owner]
    return o, final, states.at[jnp.where(slot < jnp.sum(full), which, N)].get(mode="fill", fill_value=0)


def _owner(ends: jax.Array, index: jax.Array) -> jax.Array:
    """The sequence that holds each index, given where each sequence ends; the last one beyond the end."""
    found = jnp.searchsorted(ends, index, side="right", method="compare_all")
    return jnp.minimum(found, ends.shape[0] - 1).astype(jnp.int32)


def _packed_ref(q, k, v, g, beta, initial_state, cu, lower_bound, C, return_states):
    T, S = q.shape[1], initial_state.shape[0]
    row = jnp.arange(T)
    sequence = jnp.where(row < cu[-1], jnp.searchsorted(cu[1:], row, side="right"), S)
    o, final, states = kda_recurrent_packed(q[0], k[0], v[0], g[0], beta[0], initial_state, sequence)
    if not return_states:
        return o[None], final, None
    position = row - cu[jnp.minimum(sequence, S - 1)]
    full = (sequence < S) & ((position + 1) % C == 0)
    rows = jnp.nonzero(full, size=T // C, fill_value=T)[0]
    return o[None], final, states.at[rows].get(mode="fill", fill_value=0)


def kda_step_slots(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, pool: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token per request on a pool of states: q, k, g [B, H, K], v [B, H, V], beta [B, H], pool [P, H, K, V].

    slots [B] int32, distinct, names each row's state; -1 marks a padding row, which gets output 0 and touches no slot.
    Returns o [B, H, V] in v's dtype and the pool.
    """
    real = slots >= 0
    index = jnp.where(real, slots, pool.shape[0])
    o, state = kda_step(q, k, v, g, beta, pool.at[index].get(mode="fill", fill_value=0))
    pool = pool.at[index].set(state.astype(pool.dtype), mode="drop")
    return jnp.where(real[:, None, None], o, 0).astype(v.dtype), pool


def floor(tokens: int, heads: int, key: int, value: int, *, sequences: int = 1, chunk_size: int = 16) -> Floor:
    """Forward with 2-byte q, k, v, g, o and beta, states read and written once in float32 (spec kernels 1.3)."""
    per_token = 2 * (3 * key + 2 * value + 1)
    states = 2 * 4 * key * value * sequences
    flops = 6 * key * value + 4 * chunk_size * (key + value)
    return Floor(bytes=heads * (tokens * per_token + states), flops=heads * tokens * flops)
