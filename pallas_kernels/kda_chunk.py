"""Kimi Delta Attention in chunks, plain XLA: everything parallel over chunks but three lines (spec model 2.7, 2.8).

Decays are products of exp(g) over a range of tokens. Each is formed as exp of a sum over exactly that range, taken by
a product with a 0/1 matrix: all terms have one sign, so nothing cancels, and no exponent is positive except in the
bounded diagonal tile, where it stays below half a tile times the bound.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import HIGHEST

TILE = 16  # rows of a diagonal tile
FACTORED_BOUND = -10.0  # exp(-8 * bound) must stay a float32
LOWEST_DECAY = -1e4  # exp of it is 0 in every dtype; keeps -inf out of the sums


def chunk_scan(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array,
    lower_bound: float | None,
    restart: tuple[jax.Array, jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """q, k, g [N, B, H, C, K], v [N, B, H, C, V], beta [N, B, H, C]: N chunks of C tokens, q already scaled.

    Without `restart` the chunks follow each other from initial_state [B, H, K, V]. With restart = (first [N] bool,
    sequence [N] int32) and B = 1, a first chunk starts from initial_state[sequence], [sequences, H, K, V].
    Returns o [N, B, H, C, V] and the state after every chunk [N, B, H, K, V].
    """
    parts = jax.checkpoint(_state_free, static_argnums=5)(q, k, v, g, beta, lower_bound)

    def body(state, xs):
        chunk, begin = xs
        if begin is not None:
            first, sequence = begin
            fresh = jax.lax.dynamic_index_in_dim(initial_state, sequence, keepdims=True)
            state = jnp.where(first, fresh, state)
        o, state = _advance(state, *chunk)
        return state, (o, state)

    start = initial_state if restart is None else jnp.zeros_like(initial_state[:1])
    _, (o, states) = jax.lax.scan(jax.checkpoint(body), start, (parts, restart))
    return o, states


def _advance(state, w, u, q_decayed, scores, k_rest, decay):
    """One chunk of the state-dependent part: state [B, H, K, V] -> o [B, H, C, V], next state."""
    values = u - jnp.einsum("bhck,bhkv->bhcv", w, state, precision=HIGHEST)
    o = jnp.einsum("bhck,bhkv->bhcv", q_decayed, state, precision=HIGHEST)
    o = o + jnp.einsum("bhrc,bhcv->bhrv", scores, values, precision=HIGHEST)
    state = decay[..., None] * state + jnp.einsum("bhck,bhcv->bhkv", k_rest, values, precision=HIGHEST)
    return o, state


def _state_free(q, k, v, g, beta, lower_bound):
    """Everything that does not need the state: w, u, decayed q, scores [.., C, C], remaining k, total decay."""
    C, K = q.shape[-2:]
    g = jnp.maximum(g, LOWEST_DECAY)
    before = jnp.exp(_range_sum(g, np.tri(C)))  # decay over i <= r
    after = jnp.exp(_range_sum(g, 1 - np.tri(C)))  # decay over i > r
    key_key, scores = _decayed_products(jnp.stack([k, q]), k, g, lower_bound)
    system = beta[..., None] * jnp.tril(key_key, -1)
    right = beta[..., None] * jnp.concatenate([k * before, v], axis=-1)
    solved = jax.lax.linalg.triangular_solve(system, right, left_side=True, lower=True, unit_diagonal=True)
    return solved[..., :K], solved[..., K:], q * before, scores, k * after, before[..., -1, :]


def _range_sum(g: jax.Array, mask: np.ndarray) -> jax.Array:
    """g [.., C, K], mask [R, C] of 0 and +-1 -> the sums over the rows that each mask row selects, [.., R, K]."""
    return jnp.einsum("rc,...ck->...rk", jnp.asarray(mask, g.dtype), g, precision=HIGHEST)


def _decayed_products(left, k, g, lower_bound):
    """left [2, .., C, K], k, g [.., C, K] -> [2, .., C, C]: sum_k left_r k_c exp(sum of g over c < i <= r) for r >= c."""
    C = k.shape[-2]
    strips = []
    for start in range(0, C, TILE):
        tile = slice(start, start + TILE)
        strip = [_diagonal(left[..., tile, :], k[..., tile, :], g[..., tile, :], lower_bound)]
        if start:
            # The decay from column c to row r splits at the tile's first row: c < i <= start, start < i <= r.
            past = k[..., :start, :] * jnp.exp(_range_sum(g[..., : start + 1, :], 1 - np.tri(start, start + 1)))
            in_tile = np.tri(TILE) * (np.arange(TILE) > 0)
            here = left[..., tile, :] * jnp.exp(_range_sum(g[..., tile, :], in_tile))
            strip.insert(0, jnp.einsum("...rk,...ck->...rc", here, past, precision=HIGHEST))
        strip.append(jnp.zeros((*left.shape[:-2], TILE, C - start - TILE), k.dtype))
        strips.append(jnp.concatenate(strip, axis=-1))
    return jnp.concatenate(strips, axis=-2)


def _diagonal(left, k, g, lower_bound):
    """One tile of `_decayed_products`: left [2, .., TILE, K] -> [2, .., TILE, TILE], zero above the diagonal."""
    lower = np.tri(TILE, dtype=bool)
    row = np.arange(TILE)
    if lower_bound is not None and lower_bound >= FACTORED_BOUND:
        # Both factors are taken relative to the middle row; the bound keeps them finite.
        r, i, middle = row[:, None], row[None, :], TILE // 2
        signed = 1.0 * ((middle < i) & (i <= r)) - 1.0 * ((r < i) & (i <= middle))
        decay = _range_sum(g, signed)
        product = jnp.einsum("...rk,...ck->...rc", left * jnp.exp(decay), k * jnp.exp(-decay), precision=HIGHEST)
        return jnp.where(lower, product, 0)
    r, c, i = row[:, None, None], row[None, :, None], row
    span = _range_sum(g, ((c < i) & (i <= r)).reshape(TILE * TILE, TILE))
    span = span.reshape(*g.shape[:-2], TILE, TILE, g.shape[-1])
    decay = jnp.exp(jnp.where(lower[..., None], span, -jnp.inf))  # masked before exp: no inf * 0
    return jnp.einsum("...rk,...ck,...rck->...rc", left, k, decay, precision=HIGHEST)
