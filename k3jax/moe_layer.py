"""Latent mixture of experts with shared experts (spec model 5.3, 5.4)."""

import jax

from k3jax.config import K3Config
from k3jax.layers import glu, linear, mlp
from k3jax.params import Moe
from pallas_kernels.moe import experts
from pallas_kernels.norm import rms_norm
from pallas_kernels.router import route


def moe_layer(cfg: K3Config, p: Moe, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [M, D] (already normalised) -> y [M, D], chosen experts [M, top_k] and their weights [M, top_k]."""
    ids, weights = route(
        x, p.router, p.router_bias,
        top_k=cfg.num_experts_per_token, renormalize=cfg.moe_renormalize, scale=cfg.routed_scaling_factor,
    )  # fmt: skip
    z = x if p.latent_down is None else linear(x, p.latent_down)
    y = experts(z, ids, weights, p.w1, p.w3, p.w2, glu=glu(cfg)).astype(x.dtype)
    if p.latent_norm is not None:
        y = rms_norm(y, p.latent_norm, cfg.rms_norm_eps)
    if p.latent_up is not None:
        y = linear(y, p.latent_up)
    return y + mlp(cfg, p.shared, x), ids, weights
