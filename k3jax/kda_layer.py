"""Kimi Delta Attention layer: projections, short convolution and gates around `pallas_kernels.kda` (spec model 2)."""

import jax
import jax.numpy as jnp

from k3jax.cache import KdaCache
from k3jax.config import K3Config
from k3jax.layers import linear
from k3jax.params import Kda
from k3jax.rows import Rows
from pallas_kernels.kda import kda, kda_gate, l2_norm, short_conv
from pallas_kernels.norm import rms_norm


def kda_layer(cfg: K3Config, p: Kda, x: jax.Array, rows: Rows, cache: KdaCache) -> tuple[jax.Array, KdaCache]:
    """x [M, D] (already normalised) -> y [M, D] and the cache after this step's rows."""
    H, K = cfg.kda_num_heads, cfg.kda_head_dim
    M = x.shape[0]
    raw = jnp.stack([linear(x, w).reshape(M, H, K) for w in (p.q_proj, p.k_proj, p.v_proj)], axis=1)  # [M, 3, H, K]
    mixed, conv = short_conv(rows.to_rectangle(raw), p.conv, cache.conv, n_valid=rows.count)  # [R, W, 3, H, K]
    q, k, v = mixed[:, :, 0], mixed[:, :, 1], mixed[:, :, 2]

    f = linear(linear(x, p.f_a), p.f_b).reshape(M, H, K)
    g = kda_gate(rows.to_rectangle(f), p.a_log, p.dt_bias, cfg.gate_lower_bound)  # [R, W, H, K] log-decay
    beta = jax.nn.sigmoid(rows.to_rectangle(linear(x, p.b_proj, jnp.float32)))  # [R, W, H]

    # A cell without a token must leave the state alone: no decay, nothing written.
    valid = rows.valid[:, :, None, None]
    g = jnp.where(valid, g, 0.0)
    k, v = jnp.where(valid, l2_norm(k), 0.0), jnp.where(valid, v, 0)
    beta = jnp.where(valid[..., 0], beta, 0.0)
    o, state = kda(l2_norm(q), k, v.astype(jnp.float32), g, beta, cache.state, lower_bound=cfg.gate_lower_bound)

    gate = _output_gate(p, x)
    o = rms_norm(rows.to_rows(o), p.o_norm, cfg.rms_norm_eps)  # [M, H, K] float32
    o = o * jax.nn.sigmoid(gate.reshape(M, H, K).astype(jnp.float32))
    y = linear(o.reshape(M, H * K).astype(x.dtype), p.o_proj)
    return y, KdaCache(state=state, conv=conv)


def _output_gate(p: Kda, x: jax.Array) -> jax.Array:
    """Full rank in K3, low rank in the 48B."""
    if p.g_proj is not None:
        return linear(x, p.g_proj)
    assert p.g_a is not None and p.g_b is not None
    return linear(linear(x, p.g_a), p.g_b)
