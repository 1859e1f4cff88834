"""Multi-head latent attention without positions: expanded for long query blocks, absorbed for short (spec model 3)."""

import jax
import jax.numpy as jnp

from k3jax.cache import MlaCache
from k3jax.config import K3Config
from k3jax.layers import linear
from k3jax.params import Mla
from k3jax.rows import Rows
from pallas_kernels.mla import mla_absorbed, mla_expanded
from pallas_kernels.norm import rms_norm

INNER_NORM_EPS = 1e-6  # q_a and kv_a norms keep the released class default, not rms_norm_eps (spec model 3.1)


def mla_layer(
    cfg: K3Config, p: Mla, x: jax.Array, rows: Rows, cache: MlaCache, length: jax.Array
) -> tuple[jax.Array, MlaCache]:
    """x [M, D] (already normalised), length [R] tokens cached before this step -> y [M, D] and the cache."""
    H, N, L, V = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.kv_lora_rank, cfg.v_head_dim
    M = x.shape[0]
    query = linear(x, p.q_proj) if p.q_proj is not None else _latent_query(p, x)
    q = rows.to_rectangle(query.reshape(M, H, cfg.qk_head_dim))  # [R, W, H, N+R]

    raw = linear(x, p.kv_a)
    latent = rms_norm(raw[:, :L], p.kv_a_norm, INNER_NORM_EPS)
    entry = rows.to_rectangle(jnp.concatenate([latent, raw[:, L:]], axis=-1))  # [R, W, L+R]
    kv = _append(cache.kv, entry, rows, length)

    up = p.kv_b.reshape(L, H, N + V).astype(x.dtype)
    scale, kv_len = cfg.qk_head_dim**-0.5, length + rows.count
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    if expand(cfg, rows.width):
        kv_up = jnp.einsum("bsl,lhe->bshe", kv[..., :L], up, precision=precision)  # [R, S, H, N+V]
        shared = jnp.broadcast_to(kv[:, :, None, L:], (*kv_up.shape[:3], cfg.qk_rope_head_dim))
        k = jnp.concatenate([kv_up[..., :N], shared], axis=-1)
        o = mla_expanded(q, k, kv_up[..., N:], scale=scale, q_start=length, kv_len=kv_len)
    else:
        absorbed = jnp.einsum("bthn,lhn->bthl", q[..., :N], up[..., :N], precision=precision)
        latent_q = jnp.concatenate([absorbed, q[..., N:]], axis=-1)
        ctx, _ = mla_absorbed(latent_q, kv, scale=scale, q_start=length, kv_len=kv_len, latent=L)
        o = jnp.einsum("bthl,lhv->bthv", ctx.astype(x.dtype), up[..., N:], precision=precision)

    o = rows.to_rows(o).reshape(M, H * V).astype(x.dtype)
    if p.g_proj is not None:
        o = (o.astype(jnp.float32) * jax.nn.sigmoid(linear(x, p.g_proj, jnp.float32))).astype(x.dtype)
    return linear(o, p.o_proj), MlaCache(kv=kv)


def expand(cfg: K3Config, width: int) -> bool:
    """True when up-projecting every cached row costs less than attending in latent space for `width` queries.

    Per head and cached row: expanding costs L*(N+V) products once, and saves (2L+R) - (N+R+V) per query.
    """
    L, N, V = cfg.kv_lora_rank, cfg.qk_nope_head_dim, cfg.v_head_dim
    return width * (2 * L - N - V) > L * (N + V)


def _latent_query(p: Mla, x: jax.Array) -> jax.Array:
    assert p.q_a is not None and p.q_a_norm is not None and p.q_b is not None
    return linear(rms_norm(linear(x, p.q_a), p.q_a_norm, INNER_NORM_EPS), p.q_b)


def _append(kv: jax.Array, entry: jax.Array, rows: Rows, length: jax.Array) -> jax.Array:
    """Write entry [R, W, L+R] at each request's next positions; cells without a token are dropped."""
    R, S = kv.shape[:2]
    position = length[:, None] + jnp.arange(rows.width)  # [R, W]
    position = jnp.where(rows.valid, position, S)
    return kv.at[jnp.arange(R)[:, None], position].set(entry.astype(kv.dtype), mode="drop")
