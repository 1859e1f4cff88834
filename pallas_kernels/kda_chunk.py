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
    n = C // TILE
    g = jnp.maximum(g, LOWEST_DECAY)
    left, k_tile, g_tile = (_tiles(a) for a in (jnp.stack([k, q]), k, g))
    tri = np.tri(TILE)
    sums = _range_sum(g_tile, np.concatenate([tri, 1 - tri]))
    upto, rest = jnp.exp(sums[..., :TILE, :]), jnp.exp(sums[..., TILE:, :])  # from the tile's start, to its end
    span = _spans(sums[..., TILE - 1, :])

    # The decay from column c to a row r of a later tile splits at the ends of the tiles between them.
    past = (k_tile * rest)[..., None, :, :, :] * span[..., :n, 1:, None, :]  # [.., n, n, TILE, K], columns c of each r
    past = past.reshape(*past.shape[:-3], C, K)
    earlier = jnp.einsum("...rk,...ck->...rc", left * upto, past, precision=HIGHEST)
    earlier = earlier.reshape(*earlier.shape[:-1], n, TILE)  # [2, .., n, TILE, n, TILE]
    diagonal = _diagonal(left, k_tile, g_tile, lower_bound)[..., None, :]
    row, column = np.arange(n)[:, None, None, None], np.arange(n)[:, None]
    products = jnp.where(column < row, earlier, jnp.where(column == row, diagonal, 0))
    key_key, scores = products.reshape(2, *g.shape[:-2], C, C)

    before = (upto * span[..., :n, 0, None, :]).reshape(k.shape)  # decay over i <= r
    after = (rest * span[..., n, 1:, None, :]).reshape(k.shape)  # decay over i > r
    system = beta[..., None] * jnp.tril(key_key, -1)
    right = beta[..., None] * jnp.concatenate([k * before, v], axis=-1)
    solved = _solve(system, right)
    return solved[..., :K], solved[..., K:], q * before, scores, k * after, span[..., n, 0, :]


def _solve(lower: jax.Array, right: jax.Array) -> jax.Array:
    """x of (I + lower) x = right: lower [.., C, C] strictly lower triangular, right and x [.., C, K].

    Scaling the rows by the inverse of the diagonal tiles leaves I + off, with off ** n = 0 for n tiles, so that
    x = (I - off)(I + off**2)(I + off**4).. of what is on the right.
    """
    n = lower.shape[-1] // TILE
    grid = lower.reshape(*lower.shape[:-2], n, TILE, n, TILE)
    diagonal = jnp.moveaxis(jnp.diagonal(grid, axis1=-4, axis2=-2), -1, -3)  # [.., n, TILE, TILE]
    identity = jnp.broadcast_to(jnp.eye(TILE, dtype=lower.dtype), diagonal.shape)
    inverse = jax.lax.linalg.triangular_solve(diagonal, identity, left_side=True, lower=True, unit_diagonal=True)
    x = _product(inverse, _tiles(right)).reshape(right.shape)
    if n == 1:
        return x
    below = np.kron(np.tri(n, k=-1), np.ones((TILE, TILE))) > 0
    power = _product(inverse, _tiles(jnp.where(below, lower, 0))).reshape(lower.shape)
    x = x - _product(power, x)
    for _ in range((n - 1).bit_length() - 1):
        power = _product(power, power)
        x = x + _product(power, x)
    return x


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """[.., R, C] @ [.., C, K]."""
    return jnp.einsum("...rc,...ck->...rk", a, b, precision=HIGHEST)


def _tiles(a: jax.Array) -> jax.Array:
    """[.., C, K] -> [.., n, TILE, K]."""
    return a.reshape(*a.shape[:-2], -1, TILE, a.shape[-1])


def _range_sum(g: jax.Array, mask: np.ndarray) -> jax.Array:
    """g [.., C, K], mask [R, C] of 0 and +-1 -> the sums over the rows that each mask row selects, [.., R, K]."""
    return _product(jnp.asarray(mask, g.dtype), g)


def _spans(total: jax.Array) -> jax.Array:
    """total [.., n, K], log-decay of each tile -> [.., n+1, n+1, K]: at [end, start] the decay of tiles start:end."""
    n, K = total.shape[-2:]
    end, start, tile = np.arange(n + 1)[:, None, None], np.arange(n + 1)[:, None], np.arange(n)
    mask = (start <= tile) & (tile < end)
    return jnp.exp(_range_sum(total, mask.reshape(-1, n))).reshape(*total.shape[:-2], n + 1, n + 1, K)


def _diagonal(left, k, g, lower_bound):
    """Products within a tile, left [2, .., TILE, K], k, g [.., TILE, K] -> [2, .., TILE, TILE]:
    sum_k left_r k_c exp(sum of g over c < i <= r) for r >= c, else 0."""
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
