"""Float32 masters to a Hugging Face style folder with packed experts, and back."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from k3jax.checkpoint import save
from k3jax.config import K3Config
from k3jax.params import Moe, Params, is_spec, param_specs
from pallas_kernels.mxfp4 import Mxfp4, quantize


def packed(cfg: K3Config, params: Params) -> tuple[K3Config, Params]:
    """The config and parameters that a checkpoint holds: experts as MXFP4, the rest in its stored dtype."""
    target = dataclasses.replace(cfg, mxfp4_experts=True, dtype="bfloat16")
    params = _map_experts(lambda w: quantize(jnp.swapaxes(w, -1, -2)), params)  # [E, in, out] -> [E, out, in]
    cast = jax.tree.map(lambda spec, p: p.astype(spec.dtype), param_specs(target), params, is_leaf=is_spec)
    return target, cast


def unpacked(params: Params) -> Params:
    """Experts as float32 arrays [E, in, out], exactly; the rest as it is."""
    return _map_experts(
        lambda w: jnp.swapaxes(w.dequantize(jnp.float32), -1, -2) if isinstance(w, Mxfp4) else w, params
    )


def _map_experts(change: Callable[[Any], Any], params: Params) -> Params:
    layers = []
    for layer in params.layers:
        if isinstance(moe := layer.ffn, Moe):
            moe = dataclasses.replace(moe, w1=change(moe.w1), w3=change(moe.w3), w2=change(moe.w2))
            layer = dataclasses.replace(layer, ffn=moe)
        layers.append(layer)
    return dataclasses.replace(params, layers=tuple(layers))


def export(folder: Path, cfg: K3Config, params: Params) -> None:
    """Write `config.json` and the safetensors file beside the tokenizer files that are already there."""
    save(folder, *packed(cfg, params))
