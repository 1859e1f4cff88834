"""Multi-head latent attention by its definition: all scores at once, float32 (spec model 3.2, 3.4)."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import HIGHEST, accumulator


def expanded_ref(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, q_start: jax.Array, kv_len: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """q [B, T, H, Dq], k [B, S, H, Dq], v [B, S, H, Dv], q_start, kv_len [B] -> o [B, T, H, Dv], lse [B, T, H].

    Query t of sequence b stands at q_start[b] + t and sees keys s <= that with s < kv_len[b].
    """
    dtype = accumulator(q, k, v)
    T, S = q.shape[1], k.shape[1]
    k, v = stored(k, kv_len), stored(v, kv_len)
    scores = jnp.einsum("bthd,bshd->bths", q.astype(dtype), k.astype(dtype), precision=HIGHEST) * scale
    position = q_start[:, None] + jnp.arange(T)  # [B, T]
    key = jnp.arange(S)
    visible = (key <= position[..., None]) & (key < kv_len[:, None, None])  # [B, T, S]
    visible = visible[:, :, None]
    scores = jnp.where(visible, scores, -jnp.inf)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weight = jnp.exp(scores - jnp.where(peak > -jnp.inf, peak, 0))
    total = jnp.sum(weight, axis=-1)  # [B, T, H]
    o = jnp.einsum("bths,bshd->bthd", weight, v.astype(dtype), precision=HIGHEST)
    o = o / jnp.where(total > 0, total, 1)[..., None]
    return o, peak[..., 0] + jnp.log(total)


def stored(a: jax.Array, kv_len: jax.Array) -> jax.Array:
    """a [B, S, ...] with 0 from each sequence's kv_len on: a weight of 0 does not silence a NaN, nor its gradient."""
    real = jnp.arange(a.shape[1]) < kv_len[:, None]
    return jnp.where(real.reshape(*real.shape, *[1] * (a.ndim - 2)), a, 0)


def absorbed_ref(
    q: jax.Array, cache: jax.Array, *, scale: float, q_start: jax.Array, kv_len: jax.Array, latent: int
) -> tuple[jax.Array, jax.Array]:
    """q [B, T, H, L+R], cache [B, S, L+R], every head sharing it -> ctx [B, T, H, L], lse [B, T, H]."""
    shared = jnp.broadcast_to(cache[:, :, None], (*cache.shape[:2], q.shape[2], cache.shape[2]))
    return expanded_ref(q, shared, shared[..., :latent], scale=scale, q_start=q_start, kv_len=kv_len)
