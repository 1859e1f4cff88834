"""Block attention residuals: the residual stream as a running prefix and a bank of finished blocks (spec model 4)."""

import dataclasses

import jax
import jax.numpy as jnp

from k3jax.config import K3Config
from k3jax.params import AttnRes
from pallas_kernels.attn_res import attn_res_mix


@dataclasses.dataclass(frozen=True)
class Residual:
    """`prefix` [M, D] is the sum of the current block's sublayer outputs, `bank` the blocks before it.

    Without attention residuals the bank stays empty and the prefix is the ordinary residual stream.
    """

    prefix: jax.Array | None  # None: the block has just started
    bank: tuple[jax.Array, ...] = ()

    def read(self, cfg: K3Config, p: AttnRes | None) -> jax.Array:
        """The input of the next sublayer: a learned mix over bank and prefix. It is only a read."""
        sources = self.bank if self.prefix is None else (*self.bank, self.prefix)
        if p is None or len(sources) == 1:
            return sources[-1]
        score = p.norm.astype(jnp.float32) * p.proj.astype(jnp.float32)
        return attn_res_mix(sources, score, cfg.rms_norm_eps)

    def add(self, y: jax.Array) -> "Residual":
        return dataclasses.replace(self, prefix=y if self.prefix is None else self.prefix + y)

    def start_block(self) -> "Residual":
        """Bank the un-mixed prefix and start an empty one."""
        assert self.prefix is not None
        return Residual(prefix=None, bank=(*self.bank, self.prefix))


def starts_block(cfg: K3Config, layer: int) -> bool:
    return cfg.attn_res_block_size is not None and layer % cfg.attn_res_block_size == 0
