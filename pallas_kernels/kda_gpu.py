"""The chunked GPU kernel behind `kda` and `kda_prefill`: what it serves, how rows become chunks, its gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator
from pallas_kernels.gpu import MAX_GRID, why_not_triton

CHUNK = 32  # tokens of a chunk


def why_not_kernel(q: jax.Array, v: jax.Array, chunk_size: int, *others: jax.Array) -> str | None:
    """The reason why the GPU kernel cannot serve q and v [B, T, H, K] and the other inputs, None if it can."""
    if q.shape[-1] != 128 or v.shape[-1] != 128:
        return f"it serves 128 key and value channels and these are {q.shape[-1]} and {v.shape[-1]}"
    if v.dtype != jnp.bfloat16:
        return f"its products carry 11 bits, which suits bfloat16 values, and v is {v.dtype}"
    if q.shape[0] * q.shape[1] > (MAX_GRID // 2) * CHUNK:
        return f"it takes up to {MAX_GRID // 2 * CHUNK} tokens and got {q.shape[0] * q.shape[1]}"
    if accumulator(q, *others) == jnp.float64:
        return "it computes in float32 and an input is float64"
    if chunk_size % CHUNK:
        return f"it works in chunks of {CHUNK} and chunk_size is {chunk_size}"
    return why_not_triton()


def run_kernel(q, k, v, f, b, a_log, dt_bias, initial_state, cu_seqlens, *, raw, bound, every):
    """Forward on the GPU, returning as `kda` does; `every` > 0 asks for the states after that many tokens each.

    raw False: q and k are normalised already, f is the log-decay and b the write strength.
    """
    from pallas_kernels.kda_prefill_triton import prefill

    B, T, H, K = q.shape
    if cu_seqlens is None:
        chunks, S = cut_even(B, T, every or CHUNK), B
    else:
        chunks, S = cut_packed(T, cu_seqlens.astype(jnp.int32), every or CHUNK), cu_seqlens.shape[0] - 1
    if initial_state is None:
        initial_state = jnp.zeros((S, H, K, K), jnp.float32)
    a_log, dt_bias, initial_state = (a.astype(jnp.float32) for a in (a_log, dt_bias, initial_state))
    snapshots = B * (T // every) if every else 0
    q, k, values, f, b = (a.reshape(B * T, *a.shape[2:]) for a in (q, k, v, f, b))
    o, final, states = prefill(
        q, k, values, f, b, a_log, dt_bias, initial_state, chunks, raw=raw, bound=bound, snapshots=snapshots
    )
    o = o.reshape(v.shape)
    if not every:
        return o, final
    states = states[:snapshots]
    return o, final, states.reshape(B, T // every, H, K, K) if cu_seqlens is None else states


class Chunks(NamedTuple):
    """How T rows of S sequences are cut into chunks, none of which spans two sequences."""

    row: jax.Array  # [N] int32 first row of each chunk
    length: jax.Array  # [N] int32 its rows; below 0: minus the rows that belong to no sequence; 0: nothing
    first: jax.Array  # [S+1] int32 first chunk of each sequence
    snapshot: jax.Array  # [N] int32 place of the state after the chunk, -1 for none


def cut_even(B: int, T: int, every: int) -> Chunks:
    """B sequences of T rows each; a snapshot after every full `every` tokens, a multiple of a chunk."""
    per = -(-T // CHUNK)
    s, n = jnp.divmod(jnp.arange(B * per, dtype=jnp.int32), per)
    done = (n + 1) * CHUNK
    return Chunks(
        row=s * T + n * CHUNK,
        length=jnp.minimum(CHUNK, T - n * CHUNK),
        first=jnp.arange(B + 1, dtype=jnp.int32) * per,
        snapshot=jnp.where((done % every == 0) & (done <= T), s * (T // every) + done // every - 1, -1),
    )


def cut_packed(T: int, cu_seqlens: jax.Array, every: int) -> Chunks:
    """Sequence s owns rows cu_seqlens[s]:cu_seqlens[s+1] of T; rows after the last belong to none."""
    S = cu_seqlens.shape[0] - 1
    N = -(-T // CHUNK) + S  # enough for every sequence's last, partial chunk and for the rows after the last
    length = cu_seqlens[1:] - cu_seqlens[:-1]
    zero = jnp.zeros(1, jnp.int32)
    first = jnp.concatenate([zero, jnp.cumsum(-(-length // CHUNK), dtype=jnp.int32)])
    kept = jnp.concatenate([zero, jnp.cumsum(length // every, dtype=jnp.int32)])
    n = jnp.arange(N, dtype=jnp.int32)
    s = jnp.minimum(jnp.searchsorted(first[1:], n, side="right"), S - 1)
    done = (n - first[s] + 1) * CHUNK
    row = cu_seqlens[s] + done - CHUNK
    owned = n < first[-1]
    tail = jnp.minimum(cu_seqlens[-1] + (n - first[-1]) * CHUNK, T)
    wanted = owned & (done % every == 0) & (done <= length[s])
    return Chunks(
        row=jnp.where(owned, row, tail),
        length=jnp.where(owned, jnp.minimum(CHUNK, cu_seqlens[s + 1] - row), -jnp.minimum(CHUNK, T - tail)),
        first=first,
        snapshot=jnp.where(wanted, kept[s] + done // every - 1, -1),
    )
