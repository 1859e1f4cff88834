"""Pieces every layer shares: the linear map, the activation of a config, the dense MLP, the head."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from k3jax.config import K3Config
from k3jax.params import Mlp
from pallas_kernels.moe import Glu


def linear(x: jax.Array, w: jax.Array, out_dtype: DTypeLike | None = None) -> jax.Array:
    """x [..., in] @ w [in, out] in x's dtype with float32 accumulation; rounds once, to `out_dtype` or x's dtype."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    accumulate = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.einsum(
        "...i,io->...o",
        x,
        w.astype(x.dtype),
        precision=precision,
        preferred_element_type=accumulate,
    )
    return y.astype(out_dtype or x.dtype)


def glu(cfg: K3Config) -> Glu:
    """SiTU with its two betas for K3, plain SiLU for the 48B (spec model 5.1)."""
    if cfg.hidden_act == "silu":
        return Glu("silu")
    return Glu("situ", beta=cfg.activation_situ_beta or 1.0, linear_beta=cfg.activation_situ_linear_beta)


def mlp(cfg: K3Config, p: Mlp, x: jax.Array) -> jax.Array:
    """x [M, D] -> [M, D]."""
    return linear(glu(cfg)(linear(x, p.gate), linear(x, p.up)), p.down)
