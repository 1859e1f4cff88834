"""RMS norm."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] / sqrt(mean(x^2) + eps) * weight [D]; float32 inside, rounded once to x's dtype."""
    dtype = accumulator(x)
    y = x.astype(dtype)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * weight.astype(dtype)).astype(x.dtype)
