"""The dense cache: what a request carries from one step to the next.

KDA layers carry a recurrent state and a short convolution window, MLA layers one latent row per token.
"""

import dataclasses
from typing import Any, Protocol, Self

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.rows import Rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KdaCache:
    state: jax.Array  # [B, H, K, V] float32, key axis first
    conv: jax.Array  # [B, W-1, 3, H, K] the last pre-convolution rows of q, k, v, oldest first


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MlaCache:
    kv: jax.Array  # [B, S, L+R] normalised latent, then the shared key slot


class LayerCaches(Protocol):
    """What the forward pass needs of a cache, wherever its layers live."""

    @property
    def length(self) -> jax.Array: ...  # [B] int32, tokens absorbed

    def read(self, i: int) -> KdaCache | MlaCache:
        """What layer i carries."""
        ...

    def write(self, i: int, new: KdaCache | MlaCache, rows: Rows) -> Self:
        """The cache with layer i's part after a step of `rows`."""
        ...

    def advance(self, count: jax.Array) -> Self:
        """The cache after `count` [B] more tokens."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    layers: tuple[KdaCache | MlaCache, ...]
    length: jax.Array  # [B] int32, tokens absorbed

    @property
    def batch(self) -> int:
        return self.length.shape[0]

    def read(self, i: int) -> KdaCache | MlaCache:
        return self.layers[i]

    def write(self, i: int, new: KdaCache | MlaCache, rows: Rows) -> "Cache":
        return dataclasses.replace(self, layers=(*self.layers[:i], new, *self.layers[i + 1 :]))

    def advance(self, count: jax.Array) -> "Cache":
        return dataclasses.replace(self, length=self.length + count)

    def capacity(self) -> int | None:
        """Tokens the MLA layers have room for; None when no layer limits the length."""
        return next((c.kv.shape[1] for c in self.layers if isinstance(c, MlaCache)), None)


def init_cache(cfg: K3Config, batch: int, max_len: int) -> Cache:
    """An empty cache for `batch` sequences of up to `max_len` tokens, in the config's activation dtype."""
    if batch < 1 or max_len < 1:
        raise ValueError(
            f"init_cache got batch={batch}, max_len={max_len}, the minimum of both is 1; give positive sizes"
        )
    if max_len > cfg.max_position_embeddings:
        raise ValueError(
            f"max_len {max_len} exceeds the model's limit of {cfg.max_position_embeddings} tokens; ask for at most that"
        )
    layers = tuple(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), layer) for layer in _layout(cfg, batch, max_len))
    return Cache(layers=layers, length=jnp.zeros(batch, jnp.int32))


def _layout(cfg: K3Config, batch: int, max_len: int) -> list[KdaCache | MlaCache]:
    """Shape and dtype of every array of a cache."""
    struct: Any = jax.ShapeDtypeStruct
    H, K, W = cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size
    mla = MlaCache(kv=struct((batch, max_len, cfg.mla_cache_width), cfg.dtype))
    kda = KdaCache(
        state=struct((batch, H, K, K), jnp.float32),
        conv=struct((batch, W - 1, 3, H, K), cfg.dtype),
    )
    return [mla if kind == "mla" else kda for kind in cfg.layer_types]


def check_cache(cfg: K3Config, cache: Cache, batch: int) -> None:
    """ValueError unless the cache is one of this config for `batch` sequences."""
    if not isinstance(cache, Cache):
        raise ValueError(f"cache is a {type(cache).__name__}, not a Cache; make one with init_cache")
    if cache.batch != batch:
        raise ValueError(f"cache holds {cache.batch} sequences, tokens {batch}; make them equal")
    if cache.length.dtype != jnp.int32 or len(cache.layers) != cfg.num_hidden_layers:
        raise ValueError(
            f"cache has {len(cache.layers)} layers and lengths of {cache.length.dtype}, this config"
            f" {cfg.num_hidden_layers} and int32; make one with init_cache"
        )
    for i, (have, want) in enumerate(zip(cache.layers, _layout(cfg, batch, cache.capacity() or 1), strict=True)):
        same = type(have) is type(want) and all(
            (a.shape, a.dtype) == (b.shape, b.dtype)
            for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True)
        )
        if not same:
            raise ValueError(
                f"cache layer {i} is {jax.tree.map(jax.typeof, have)}, not the {want}"
                " of this config; make one with init_cache"
            )
