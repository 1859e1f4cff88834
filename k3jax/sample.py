"""Logits to tokens: temperature, top-k, top-p and min-p per row, with a seed per row.

A row's draw depends on its seed and the token's position only, never on its place in a batch.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import short

GREEDY_BELOW = 1e-6  # temperatures under this pick the most likely token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Per-row sampling parameters, each [B]. top_k 0, top_p 1 and min_p 0 switch a filter off."""

    temperature: jax.Array  # float32
    top_k: jax.Array  # int32
    top_p: jax.Array  # float32
    min_p: jax.Array  # float32
    seed: jax.Array  # uint32


def sampling(
    rows: int, *, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, batch: int | None = None
) -> Sampling:
    """`Sampling` of `rows` rows from scalars or per-row sequences, padded with greedy rows to `batch`.

    ValueError for a value outside its range.
    """
    padding = (batch or rows) - rows

    def column(name: str, value, dtype, low: float, high: float, above: bool = False) -> jax.Array:
        array = np.asarray(value)
        if array.dtype.kind not in ("iu" if np.issubdtype(dtype, np.integer) else "iuf") or array.shape not in (
            (),
            (1,),
            (rows,),
        ):
            kind = "a whole number" if np.issubdtype(dtype, np.integer) else "a number"
            raise ValueError(
                f"{name} is {short(value)}, expected {kind} for all rows or one for each of {rows}; pass that"
            )
        array = np.broadcast_to(array, (rows,))
        inside = (array > low if above else array >= low) & (array <= high)
        if not inside.all():
            raise ValueError(
                f"{name} is {array[~inside][0]}, allowed is {'above ' if above else ''}{low} to {high};"
                " choose a value in that range"
            )
        return jnp.asarray(np.pad(array.astype(dtype), (0, padding)))

    return Sampling(
        temperature=column("temperature", temperature, np.float32, 0.0, 100.0),
        top_k=column("top_k", top_k, np.int32, 0, 2**31 - 1),
        top_p=column("top_p", top_p, np.float32, 0.0, 1.0, above=True),
        min_p=column("min_p", min_p, np.float32, 0.0, 1.0),
        seed=column("seed", seed, np.uint32, 0, 2**32 - 1),
    )


def sample(logits: jax.Array, params: Sampling, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logits [B, vocab] float32, position [B] of the token being drawn -> token [B] int32, log-probability [B].

    Order: temperature, top-k, top-p over what top-k kept, min-p relative to the most likely token, draw. The
    log-probability is of the unmodified distribution (before temperature and filters), in nats.
    """
    greedy = params.temperature < GREEDY_BELOW
    scaled = logits / jnp.where(greedy, 1.0, params.temperature)[:, None]
    filtered = ~greedy & ((params.top_k > 0) | (params.top_p < 1) | (params.min_p > 0))
    scaled = jax.lax.cond(jnp.any(filtered), lambda x: jnp.where(_kept(x, params), x, -jnp.inf), lambda x: x, scaled)

    def noise(seed: jax.Array, at: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), at)
        return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

    drawn = jax.lax.cond(
        jnp.all(greedy),
        lambda: jnp.zeros_like(scaled),
        lambda: jnp.where(greedy[:, None], 0.0, jax.vmap(noise)(params.seed, position)),
    )
    token = jnp.argmax(scaled + drawn, axis=-1).astype(jnp.int32)
    logprob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
    return token, logprob


def _kept(scaled: jax.Array, params: Sampling) -> jax.Array:
    """[B, vocab] bool: tokens that survive the filters. Ties are broken towards the lower id."""
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(scaled.shape[-1])
    by_k = (params.top_k[:, None] <= 0) | (rank < params.top_k[:, None])
    p = jax.nn.softmax(jnp.where(by_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(p, axis=-1) - p  # mass of the more likely tokens: the one that crosses top_p is kept
    by_p = (before < params.top_p[:, None]) | (params.top_p[:, None] >= 1)
    by_min = p >= params.min_p[:, None] * p[:, :1]
    kept = (by_k & by_p & by_min) | (rank == 0)
    inverse = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(kept, inverse, axis=-1)
