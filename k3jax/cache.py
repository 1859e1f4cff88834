"""The dense cache: what a request carries from one step to the next.

KDA layers carry a recurrent state and a short convolution window, MLA layers one latent row per token.
"""

import dataclasses
from typing import Protocol, Self

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
    H, K, W = cfg.kda_num_heads, cfg.kda_head_dim, cfg.short_conv_kernel_size

    def layer(kind: str) -> KdaCache | MlaCache:
        if kind == "mla":
            return MlaCache(kv=jnp.zeros((batch, max_len, cfg.mla_cache_width), cfg.dtype))
        return KdaCache(
            state=jnp.zeros((batch, H, K, K), jnp.float32),
            conv=jnp.zeros((batch, W - 1, 3, H, K), cfg.dtype),
        )

    return Cache(layers=tuple(layer(t) for t in cfg.layer_types), length=jnp.zeros(batch, jnp.int32))
