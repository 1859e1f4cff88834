"""Depthwise causal short convolution with a carried window (spec model 2.2)."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator


def short_conv(
    x: jax.Array,
    weight: jax.Array,
    state: jax.Array,
    n_valid: jax.Array | None = None,
    *,
    activation: str | None = "silu",
) -> tuple[jax.Array, jax.Array]:
    """x [B, T, *C], weight [*C, W] (tap W-1 on the current token), state [B, W-1, *C] -> y [B, T, *C], new state.

    The state holds the last W-1 rows before the convolution, oldest first, zeros at the start of a sequence. Only the
    first n_valid [B] int32 rows of each sequence are real: later ones enter neither the new state nor, through
    it, anything else, and n_valid 0 returns the state unchanged. float32 inside; y in x's dtype, state in its own.
    """
    W = weight.shape[-1]
    if weight.shape[:-1] != x.shape[2:] or state.shape != (x.shape[0], W - 1, *x.shape[2:]):
        raise ValueError(
            f"short_conv: weight {weight.shape} and state {state.shape} do not fit x {x.shape};"
            " pass weight [*C, W] and state [B, W-1, *C] for x [B, T, *C]"
        )
    if activation not in ("silu", None):
        raise ValueError(f"short_conv: activation is {activation!r}, supported are 'silu' and None; choose one")
    T = x.shape[1]
    dtype = accumulator(x, weight)
    if n_valid is not None:
        valid = jnp.arange(T) < n_valid[:, None]
        x = jnp.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), x, 0)
    window = jnp.concatenate([state.astype(dtype), x.astype(dtype)], axis=1)  # [B, W-1+T, *C]
    taps = (window[:, j : j + T] * weight[..., j].astype(dtype) for j in range(W))
    y = functools.reduce(jnp.add, taps)
    if activation == "silu":
        y = jax.nn.silu(y)
    if n_valid is None:
        kept = window[:, T:]
    else:
        kept = jax.vmap(lambda rows, n: jax.lax.dynamic_slice_in_dim(rows, n, W - 1))(window, n_valid)
    return y.astype(x.dtype), kept.astype(state.dtype)
