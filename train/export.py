"""Float32 masters to a Hugging Face style folder with packed experts."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp

from k3jax.checkpoint import save
from k3jax.config import K3Config
from k3jax.params import Moe, Params, is_spec, param_specs
from pallas_kernels.mxfp4 import Mxfp4, quantize


def packed(cfg: K3Config, params: Params) -> tuple[K3Config, Params]:
    """The config and parameters that a checkpoint holds: experts as MXFP4, the rest in its stored dtype."""
    target = dataclasses.replace(cfg, mxfp4_experts=True, dtype="bfloat16")
    layers = tuple(
        dataclasses.replace(layer, ffn=_packed(layer.ffn)) if isinstance(layer.ffn, Moe) else layer
        for layer in params.layers
    )
    params = dataclasses.replace(params, layers=layers)
    cast = jax.tree.map(lambda spec, p: p.astype(spec.dtype), param_specs(target), params, is_leaf=is_spec)
    return target, cast


def _packed(moe: Moe) -> Moe:
    def pack(w: jax.Array | Mxfp4) -> Mxfp4:
        assert isinstance(w, jax.Array)
        return quantize(jnp.swapaxes(w, -1, -2))  # [E, in, out] -> [E, out, in]

    return dataclasses.replace(moe, w1=pack(moe.w1), w3=pack(moe.w3), w2=pack(moe.w2))


def export(folder: Path, cfg: K3Config, params: Params) -> None:
    """Write `config.json` and the safetensors file beside the tokenizer files that are already there."""
    save(folder, *packed(cfg, params))
