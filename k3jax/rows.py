"""Which rows of a step belong to which request.

A step is ragged: M token rows of R requests. Decode (one row each), verification (a few) and a prefill
chunk (many) are the same function. Row-wise layers see `[M, ...]`; the sequence mixers see the rectangle
`[R, W, ...]`, where request r owns the first `count[r]` of W rows.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Row layout of one step. `request[m] == R` marks a padding row."""

    count: jax.Array  # [R] int32, rows of each request in this step
    request: jax.Array | None  # [M] int32; None: rows already form the rectangle, M = R * width
    offset: jax.Array | None  # [M] int32, index of the row among its request's rows
    width: int = dataclasses.field(metadata=dict(static=True))  # W >= max(count)

    @property
    def valid(self) -> jax.Array:
        """[R, W] bool: the cells that hold a token."""
        return jnp.arange(self.width) < self.count[:, None]

    def to_rectangle(self, x: jax.Array) -> jax.Array:
        """x [M, ...] -> [R, W, ...]; cells without a token hold 0 (ragged) or the padding row's value."""
        R = self.count.shape[0]
        if self.request is None:
            return x.reshape(R, self.width, *x.shape[1:])
        empty = jnp.zeros((R, self.width, *x.shape[1:]), x.dtype)
        return empty.at[self.request, self.offset].set(x, mode="drop")

    def to_rows(self, x: jax.Array) -> jax.Array:
        """x [R, W, ...] -> [M, ...]; padding rows hold 0 (ragged) or their own cell."""
        if self.request is None:
            return x.reshape(-1, *x.shape[2:])
        return x.at[self.request, self.offset].get(mode="fill", fill_value=0)

    def last(self, x: jax.Array) -> jax.Array:
        """x [M, ...] -> [R, ...]: each request's last row (an arbitrary row where count is 0)."""
        rectangle = self.to_rectangle(x)
        return rectangle[jnp.arange(rectangle.shape[0]), jnp.maximum(self.count - 1, 0)]


def rectangle(count: jax.Array, width: int) -> Rows:
    """Rows that already lie as `[R, width]`, request r's tokens first."""
    return Rows(count=count.astype(jnp.int32), request=None, offset=None, width=width)


def ragged(row_splits: jax.Array, rows: int, width: int) -> Rows:
    """Packed rows: request r owns rows row_splits[r]:row_splits[r+1] of `rows`; later rows are padding.

    row_splits [R+1] int32 starts at 0 and does not decrease; no request may own more than `width` rows.
    """
    row = jnp.arange(rows)
    request = jnp.searchsorted(row_splits, row, side="right") - 1
    count = row_splits[1:] - row_splits[:-1]
    inside = row < row_splits[-1]
    start = jnp.take(row_splits, request, mode="clip")
    return Rows(
        count=count.astype(jnp.int32),
        request=jnp.where(inside, request, count.shape[0]).astype(jnp.int32),
        offset=jnp.where(inside, row - start, 0).astype(jnp.int32),
        width=width,
    )
