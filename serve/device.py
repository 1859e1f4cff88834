"""The pool on the device: one flat buffer of units, the cache that reads and writes it, and the jitted step.

A unit is a KDA slot (state and convolution window of every KDA layer) or an MLA page (latent rows of `page` tokens
in every MLA layer). Units are whole rows of 512 bytes, so an int32 row index reaches a terabyte.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.cache import KdaCache, MlaCache
from k3jax.config import K3Config
from k3jax.model import logits_of, step
from k3jax.params import Params
from k3jax.rows import Rows, rectangle
from k3jax.sample import Sampling, sample
from serve.memory.pool import Geometry, Kind

WORDS = 128  # uint32 words in a row
ROW_BYTES = 4 * WORDS


@dataclasses.dataclass(frozen=True)
class Layout:
    """Rows of a unit of each kind, and the first row of each layer's part of its unit."""

    page: int  # tokens
    state_rows: int
    page_rows: int
    first: tuple[int, ...]

    @staticmethod
    def of(cfg: K3Config, page: int) -> "Layout":
        state = pages = 0
        first = []
        for kind in cfg.layer_types:
            if kind == "kda":
                first.append(state)
                state += sum(_rows(shape, dtype) for shape, dtype in _kda_parts(cfg))
            else:
                first.append(pages)
                pages += _rows((page, cfg.mla_cache_width), cfg.dtype)
        return Layout(page, max(state, 1), max(pages, 1), tuple(first))

    def rows(self, kind: Kind) -> int:
        return self.state_rows if kind is Kind.STATE else self.page_rows

    def geometry(self, total: int) -> Geometry:
        """The pool in `total` bytes of memory, in whole rows."""
        total -= total % ROW_BYTES
        return Geometry(total=total, state=self.state_rows * ROW_BYTES, page=self.page_rows * ROW_BYTES)


def _kda_parts(cfg: K3Config) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """Shape and dtype of a layer's recurrent state and convolution window."""
    H, K = cfg.kda_num_heads, cfg.kda_head_dim
    return ((H, K, K), "float32"), ((cfg.short_conv_kernel_size - 1, 3, H, K), cfg.dtype)


def _rows(shape: tuple[int, ...], dtype: Any) -> int:
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // ROW_BYTES)


def _pack(x: jax.Array, lead: int) -> jax.Array:
    """x [*lead axes, ...] -> rows [*lead axes, n, WORDS] uint32, the last row padded with zeros."""
    flat = x.reshape(*x.shape[:lead], -1)
    per_word = 4 // flat.dtype.itemsize
    rows = _rows(flat.shape[lead:], flat.dtype)
    flat = jnp.pad(flat, [(0, 0)] * lead + [(0, rows * WORDS * per_word - flat.shape[-1])])
    if per_word > 1:
        flat = flat.reshape(*flat.shape[:-1], -1, per_word)
    return jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(*x.shape[:lead], rows, WORDS)


def _unpack(rows: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Inverse of `_pack`: rows [*lead, n, WORDS] -> [*lead, *shape]."""
    lead = rows.shape[:-2]
    flat = jax.lax.bitcast_convert_type(rows, jnp.dtype(dtype)).reshape(*lead, -1)
    return flat[..., : math.prod(shape)].reshape(*lead, *shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PooledCache:
    """`k3jax.cache.Cache` for R requests whose layers live in the pool; a layer's part is gathered when it is read."""

    pool: jax.Array  # [rows, WORDS] uint32
    slots: jax.Array  # [R] int32 physical KDA slot, 0 for padding requests
    fresh: jax.Array  # [R] bool, the slot holds nothing yet: read it as zeros
    pages: jax.Array  # [R, P] int32 physical pages in order of position, 0 where none
    length: jax.Array  # [R] int32 tokens absorbed
    write_from: jax.Array  # [R] int32, pages that end at or before this position are shared: never written
    cfg: K3Config = dataclasses.field(metadata=dict(static=True))
    layout: Layout = dataclasses.field(metadata=dict(static=True))

    def read(self, i: int) -> KdaCache | MlaCache:
        cfg, at = self.cfg, self.layout.first[i]
        if cfg.layer_types[i] == "mla":
            entry = (self.layout.page, cfg.mla_cache_width)
            index = self._page_rows(self.pages, at, _rows(entry, cfg.dtype))
            kv = _unpack(self.pool[index], entry, cfg.dtype)  # [R, P, page, L+R]
            return MlaCache(kv=kv.reshape(kv.shape[0], -1, kv.shape[-1]))
        parts = []
        for shape, dtype in _kda_parts(cfg):
            part = _unpack(self.pool[self._slot_rows(at, _rows(shape, dtype))], shape, dtype)
            parts.append(jnp.where(self.fresh.reshape(-1, *[1] * len(shape)), 0, part))
            at += _rows(shape, dtype)
        return KdaCache(state=parts[0], conv=parts[1])

    def write(self, i: int, new: KdaCache | MlaCache, rows: Rows) -> "PooledCache":
        at = self.layout.first[i]
        if isinstance(new, MlaCache):
            return self._write_pages(at, new.kv, rows)
        pool = self.pool
        for part in (new.state, new.conv):
            packed = _pack(part, 1)
            pool = pool.at[self._slot_rows(at, packed.shape[1])].set(packed)
            at += packed.shape[1]
        return dataclasses.replace(self, pool=pool)

    def _write_pages(self, at: int, kv: jax.Array, rows: Rows) -> "PooledCache":
        """Write the pages that this step's rows touch; the others did not change."""
        page, P = self.layout.page, self.pages.shape[1]
        touched = min((rows.width + page - 2) // page + 1, P)
        ordinal = (self.length // page)[:, None] + jnp.arange(touched)  # [R, touched]
        begins, end = ordinal * page, (self.length + rows.count)[:, None]
        used = (ordinal < P) & (begins < end) & (begins + page > self.write_from[:, None]) & (rows.count > 0)[:, None]
        ordinal = jnp.minimum(ordinal, P - 1)
        target = jnp.where(used, jnp.take_along_axis(self.pages, ordinal, axis=1), 0)  # others hit the sink
        kv = kv.reshape(kv.shape[0], P, page, -1)
        packed = _pack(jnp.take_along_axis(kv, ordinal[:, :, None, None], axis=1), 2)
        return dataclasses.replace(self, pool=self.pool.at[self._page_rows(target, at, packed.shape[2])].set(packed))

    def advance(self, count: jax.Array) -> "PooledCache":
        return dataclasses.replace(self, length=self.length + count)

    def _slot_rows(self, at: int, rows: int) -> jax.Array:
        return self.slots[:, None] * self.layout.state_rows + at + jnp.arange(rows)

    def _page_rows(self, pages: jax.Array, at: int, rows: int) -> jax.Array:
        return pages[..., None] * self.layout.page_rows + at + jnp.arange(rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One step of R requests with up to W rows each, as host tables; padding requests have count 0."""

    tokens: jax.Array  # [R, W] int32; -1 takes the request's last sampled token
    count: jax.Array  # [R] int32 rows of each request
    row: jax.Array  # [R] int32 place in the table of last tokens, 0 for padding
    slots: jax.Array  # [R] int32
    fresh: jax.Array  # [R] bool
    pages: jax.Array  # [R, P] int32
    length: jax.Array  # [R] int32 tokens absorbed before the step
    write_from: jax.Array  # [R] int32
    sampling: Sampling  # [R] each
    bias: jax.Array  # [R, vocab] float32, added to the logits before the draw
    repetition: jax.Array  # [R, vocab] float32, penalty that positive logits are divided and negative multiplied by


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drawn:
    """What a step gives back, [R] and [R, TOP]."""

    token: jax.Array
    logprob: jax.Array  # of the unmodified distribution, nats
    top_ids: jax.Array
    top_logprobs: jax.Array


TOP = 20  # most alternatives that a request may ask for


@functools.partial(jax.jit, static_argnames=("cfg", "layout"), donate_argnames=("pool", "last"))
def run_step(
    cfg: K3Config, layout: Layout, params: Params, pool: jax.Array, last: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array, Drawn]:
    """Absorb the batch's rows and draw one token per request -> (pool, last sampled tokens, drawn).

    The draw of a request whose prompt is not complete yet means nothing, and neither does its entry in `last`.
    """
    R, W = batch.tokens.shape
    tokens = jnp.where(batch.tokens < 0, last[batch.row][:, None], batch.tokens)
    cache = PooledCache(pool, batch.slots, batch.fresh, batch.pages, batch.length, batch.write_from, cfg, layout)
    rows = rectangle(batch.count, W)
    hidden, cache = step(cfg, params, tokens.reshape(R * W), rows, cache)
    logits = logits_of(params, rows.last(hidden))
    scaled = jnp.where(logits > 0, logits / batch.repetition, logits * batch.repetition)
    token, _ = sample(scaled + batch.bias, batch.sampling, cache.length)
    logprobs = jax.nn.log_softmax(logits)
    top_logprobs, top_ids = jax.lax.top_k(logprobs, min(TOP, logprobs.shape[-1]))
    drawn = Drawn(token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0], top_ids, top_logprobs)
    return cache.pool, last.at[jnp.where(batch.count > 0, batch.row, 0)].set(token), drawn


@functools.partial(jax.jit, static_argnames=("rows",), donate_argnames=("pool",))
def copy_units(pool: jax.Array, rows: int, source: jax.Array, target: jax.Array) -> jax.Array:
    """Copy units of `rows` rows each: all sources are read before any target is written; pad with 0, 0 (the sink)."""
    offset = jnp.arange(rows)
    return pool.at[target[:, None] * rows + offset].set(pool[source[:, None] * rows + offset])


@functools.partial(jax.jit, static_argnames=("rows",))
def read_unit(pool: jax.Array, rows: int, unit: jax.Array) -> jax.Array:
    """One unit [rows, WORDS] of the pool, to be kept in host memory."""
    return pool[unit * rows + jnp.arange(rows)]


@functools.partial(jax.jit, donate_argnames=("pool",))
def write_unit(pool: jax.Array, content: jax.Array, unit: jax.Array) -> jax.Array:
    """Inverse of `read_unit`."""
    return pool.at[unit * content.shape[0] + jnp.arange(content.shape[0])].set(content)
