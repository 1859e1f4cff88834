"""Kimi Delta Attention, token by token in float32: the definition of correct (K3 report eq. 1, spec model 2.4)."""

import jax
import jax.numpy as jnp

from pallas_kernels.common import HIGHEST, accumulator


def kda_step(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token: q, k, g [..., K], v [..., V], beta [...], state [..., K, V] -> o [..., V] and the new state.

    k and q are normalised, q not yet scaled; g is the log-decay of each key channel.
    """
    dtype = accumulator(q, k, v, g, beta, state)
    q, k, v, g, beta, state = (a.astype(dtype) for a in (q, k, v, g, beta, state))
    state = jnp.exp(g)[..., None] * state
    read = jnp.einsum("...kv,...k->...v", state, k, precision=HIGHEST)
    u = beta[..., None] * (v - read)
    state = state + k[..., None] * u[..., None, :]
    o = jnp.einsum("...kv,...k->...v", state, q * q.shape[-1] ** -0.5, precision=HIGHEST)
    return o, state


def kda_recurrent(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, initial_state: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H], initial_state [B, H, K, V].

    Returns o [B, T, H, V], the final state and the state after every token [B, T, H, K, V].
    """

    def token(state, row):
        q, k, v, g, beta = row
        o, state = kda_step(q, k, v, g, beta, state)
        return state, (o, state)

    rows = tuple(jnp.moveaxis(a, 1, 0) for a in (q, k, v, g, beta))  # time first
    dtype = accumulator(q, k, v, g, beta, initial_state)
    final, (o, states) = jax.lax.scan(token, initial_state.astype(dtype), rows)
    return jnp.moveaxis(o, 0, 1), final, jnp.moveaxis(states, 0, 1)


def kda_recurrent_packed(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    sequence: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of N sequences one after the other: q, k, g [T, H, K], v [T, H, V], beta [T, H].

    initial_state [N, H, K, V]; sequence [T] int32 names the owner of each row, N for rows that belong to none.
    Returns o [T, H, V] (zero where no owner), the final states and the owner's state after every row [T, H, K, V].
    """
    N = initial_state.shape[0]
    dtype = accumulator(q, k, v, g, beta, initial_state)
    owned = sequence < N
    q, k, v, g, beta = (jnp.where(owned.reshape(-1, *[1] * (a.ndim - 1)), a, 0) for a in (q, k, v, g, beta))

    def token(pool, row):
        q, k, v, g, beta, owner = row
        o, state = kda_step(q, k, v, g, beta, pool.at[owner].get(mode="fill", fill_value=0))
        return pool.at[owner].set(state, mode="drop"), (o, state)

    final, (o, states) = jax.lax.scan(token, initial_state.astype(dtype), (q, k, v, g, beta, sequence))
    return jnp.where(owned[:, None, None], o, 0), final, states
