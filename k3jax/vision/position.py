"""Positions of patches: the resized table, the time table, rotary angles (spec model 9.3). All float32."""

import jax
import jax.numpy as jnp
import numpy as np

ROPE_BASE = 10000.0


def table_embedding(table: jax.Array, place: jax.Array, grid: jax.Array) -> jax.Array:
    """table [Gh, Gw, D], place and grid [N, 3] -> [N, D]: the table resized to each item's rows x columns, read there.

    Bilinear, half-pixel centres, no antialias. Four reads per patch, so one program serves every size.
    """
    row0, row1, down = _source(place[:, 1], grid[:, 1], table.shape[0])
    column0, column1, right = _source(place[:, 2], grid[:, 2], table.shape[1])
    table = table.astype(jnp.float32)
    upper = (1 - right) * table[row0, column0] + right * table[row0, column1]
    lower = (1 - right) * table[row1, column0] + right * table[row1, column1]
    return (1 - down) * upper + down * lower


def _source(index: jax.Array, size: jax.Array, table: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The two rows of `table` that output `index` of `size` lies between, and the weight [N, 1] of the second."""
    scale = table / size.astype(jnp.float32)
    at = jnp.maximum((index.astype(jnp.float32) + 0.5) * scale - 0.5, 0)
    first = jnp.minimum(at.astype(jnp.int32), table - 1)
    return first, jnp.minimum(first + 1, table - 1), (at - first.astype(jnp.float32))[:, None]


def time_embedding(frames: int, width: int, place: jax.Array, grid: jax.Array) -> jax.Array:
    """[N, D]: row `frame` of the fixed table of `frames` rows for items of several frames, 0 for still images."""
    omega = ROPE_BASE ** (-np.arange(width // 2) / (width // 2))
    angle = np.arange(frames)[:, None] * omega
    table = jnp.asarray(np.concatenate([np.sin(angle), np.cos(angle)], axis=-1), jnp.float32)
    return jnp.where(grid[:, :1] > 1, table[place[:, 0]], 0)


def rotary_angles(place: jax.Array, head_dim: int) -> jax.Array:
    """[N, head_dim / 2]: pair 2j turns by column * theta_j, pair 2j + 1 by row * theta_j; frames do not count."""
    theta = ROPE_BASE ** (-4 * np.arange(head_dim // 4) / head_dim)
    position = place[:, :0:-1].astype(jnp.float32)  # [N, 2]: column, row
    return (jnp.asarray(theta, jnp.float32)[:, None] * position[:, None]).reshape(len(place), -1)


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """x [N, H, K], angles [N, K/2]; a pair is two adjacent channels. float32 inside."""
    even, odd = jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2), -1, 0)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
