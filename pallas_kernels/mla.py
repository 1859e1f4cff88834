"""Multi-head latent attention: expanded for prefill, absorbed for decode, and the merge of partial results."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import Floor, accumulator, cdiv, choose, precision
from pallas_kernels.mla_ref import absorbed_ref, expanded_ref, stored

BLOCK_SCORES = 2**26  # scores held at once


def mla_expanded(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    q_start: jax.Array,
    kv_len: jax.Array,
    impl: str = "auto",
) -> jax.Array:
    """q [B, T, H, Dq], k [B, S, H, Dq], v [B, S, H, Dv], q_start and kv_len [B] int32 -> o [B, T, H, Dv] in v's dtype.

    Query t of sequence b stands at position q_start[b] + t and sees keys s <= that with s < kv_len[b]; one that sees
    none gets 0. Keys and values from kv_len on may hold anything. Softmax in float32.
    """
    if k.shape != (q.shape[0], k.shape[1], *q.shape[2:]) or v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"mla_expanded: q {q.shape}, k {k.shape}, v {v.shape} do not fit;"
            " pass q [B, T, H, Dq], k [B, S, H, Dq], v [B, S, H, Dv]"
        )
    _check_span("mla_expanded", q, q_start, kv_len)
    if choose("mla_expanded", impl, ("xla", "ref")) == "ref":
        return expanded_ref(q, k, v, scale=scale, q_start=q_start, kv_len=kv_len)[0].astype(v.dtype)
    o, _ = _attend(q, stored(k, kv_len), stored(v, kv_len), scale, q_start, kv_len, "bshd")
    return o.astype(v.dtype)


def mla_absorbed(
    q: jax.Array,
    cache: jax.Array,
    *,
    scale: float,
    q_start: jax.Array,
    kv_len: jax.Array,
    latent: int,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Attention in latent space: q [B, T, H, L+R], cache [B, S, L+R] shared by all heads, the value its first `latent`
    columns.

    Visibility as in `mla_expanded`. Returns ctx [B, T, H, L] and the natural-log sum of the exponentiated scores lse
    [B, T, H], both float32; a query that sees no key gets ctx 0 and lse -inf, which `merge_lse` then ignores.
    """
    if cache.ndim != 3 or cache.shape[0] != q.shape[0] or cache.shape[2] != q.shape[3] or not 0 < latent <= q.shape[3]:
        raise ValueError(
            f"mla_absorbed: q {q.shape}, cache {cache.shape}, latent {latent} do not fit;"
            " pass q [B, T, H, L+R], cache [B, S, L+R] and latent L"
        )
    _check_span("mla_absorbed", q, q_start, kv_len)
    if choose("mla_absorbed", impl, ("xla", "ref")) == "ref":
        return absorbed_ref(q, cache, scale=scale, q_start=q_start, kv_len=kv_len, latent=latent)
    cache = stored(cache, kv_len)
    return _attend(q, cache, cache[..., :latent], scale, q_start, kv_len, "bsd")


def merge_lse(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Exact merge of attention over disjoint key sets: outs [P, ..., V], lses [P, ...] (natural log) -> out, lse.

    A part with lse -inf contributes nothing whatever its output holds; if all parts are empty, out is 0 and lse -inf.
    """
    if outs.shape[:-1] != lses.shape:
        raise ValueError(
            f"merge_lse: outs {outs.shape} and lses {lses.shape} do not fit; pass [P, ..., V] and [P, ...]"
        )
    dtype = accumulator(outs, lses)
    outs, lses = outs.astype(dtype), lses.astype(dtype)
    seen = lses > -jnp.inf
    peak = jnp.max(lses, axis=0)
    weight = jnp.where(seen, jnp.exp(lses - jnp.where(peak > -jnp.inf, peak, 0)), 0)
    total = jnp.sum(weight, axis=0)
    out = jnp.sum(weight[..., None] * jnp.where(seen[..., None], outs, 0), axis=0)
    return out / jnp.where(total > 0, total, 1)[..., None], peak + jnp.log(total)


def _check_span(op: str, q: jax.Array, q_start: jax.Array, kv_len: jax.Array) -> None:
    if q_start.shape != q.shape[:1] or kv_len.shape != q.shape[:1]:
        raise ValueError(
            f"{op}: q_start {q_start.shape} and kv_len {kv_len.shape} must be [{q.shape[0]}], one per sequence;"
            " pass arrays"
        )


def _attend(q, k, v, scale, q_start, kv_len, keys):
    """`keys` is "bshd" (a key per head) or "bsd" (one for all). Blocks of queries, so few scores exist at a time."""
    B, T, H, _ = q.shape
    block = functools.partial(_block, k=k, v=v, scale=scale, kv_len=kv_len, keys=keys)
    rows = max(16, BLOCK_SCORES // (B * H * k.shape[1]))
    if T <= rows:
        return block(q, q_start[:, None] + jnp.arange(T))
    n = cdiv(T, rows)
    q = jnp.pad(q, [(0, 0), (0, n * rows - T), (0, 0), (0, 0)])
    q = jnp.moveaxis(q.reshape(B, n, rows, H, -1), 1, 0)  # [n, B, rows, H, Dq]
    position = q_start[:, None] + jnp.arange(n * rows).reshape(n, 1, rows)  # [n, B, rows]
    o, lse = jax.lax.map(jax.checkpoint(lambda xs: block(*xs)), (q, position))
    o = jnp.moveaxis(o, 0, 1).reshape(B, n * rows, H, -1)[:, :T]
    return o, jnp.moveaxis(lse, 0, 1).reshape(B, n * rows, H)[:, :T]


def _block(q, position, *, k, v, scale, kv_len, keys):
    """q [B, T, H, Dq], position [B, T] -> o [B, T, H, Dv], lse [B, T, H]."""
    dtype = accumulator(q, k, v)
    exact = precision(q.dtype)
    scores = jnp.einsum(f"bthd,{keys}->bths", q, k, precision=exact, preferred_element_type=dtype) * scale
    key = jnp.arange(k.shape[1])
    visible = (key <= position[..., None]) & (key < kv_len[:, None, None])  # [B, T, S]
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weight = jnp.exp(scores - jnp.where(peak > -jnp.inf, peak, 0))
    total = jnp.sum(weight, axis=-1)  # [B, T, H]
    o = jnp.einsum(f"bths,{keys}->bthd", weight.astype(v.dtype), v, precision=exact, preferred_element_type=dtype)
    return o / jnp.where(total > 0, total, 1)[..., None], peak[..., 0] + jnp.log(total)


def floor_expanded(tokens: int, keys: int, heads: int, query: int, value: int, *, itemsize: int = 2) -> Floor:
    """`tokens` queries that end at the last of `keys` keys, causal: q, k, v read once and o written once."""
    pairs = tokens * keys - tokens * (tokens - 1) // 2
    moved = itemsize * heads * (tokens + keys) * (query + value)
    return Floor(bytes=moved, flops=2 * heads * pairs * (query + value))


def floor_absorbed(
    batch: int, keys: int, heads: int, latent: int, shared: int, *, queries: int = 1, itemsize: int = 2
) -> Floor:
    """Decode: every cached row read once for all heads, queries read and contexts written once."""
    moved = itemsize * batch * (keys * (latent + shared) + queries * heads * (2 * latent + shared))
    return Floor(bytes=moved, flops=2 * batch * queries * heads * keys * (2 * latent + shared))
