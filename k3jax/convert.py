"""Checkpoint to checkpoint: pack, unpack and re-shard stored tensors without building parameters."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from k3jax.checkpoint import adapt, check
from k3jax.checkpoint_map import entries
from k3jax.config import MXFP4_BLOCK, ConfigError, K3Config, read_config
from k3jax.config_hf import quantization_block
from k3jax.files import read_json
from k3jax.params import param_specs
from k3jax.safetensors_io import Pending, TensorFolder, write_folder
from pallas_kernels.mxfp4 import Mxfp4, quantize

PACKED, SCALE = "_packed", "_scale"


def convert(source: Path, target: Path, *, experts: str | None, shard_bytes: int) -> dict[str, Any]:
    """Write the tensors of `source` into `target` in shards; returns the config.json for them.

    `experts`: "mxfp4" packs routed experts to the nearest code, "bf16" unpacks them exactly, None keeps them.
    The source is checked against its config first.
    """
    files = TensorFolder(source)
    cfg = adapt(read_config(source), files)
    check(cfg, entries(cfg, param_specs(cfg)), files)
    config = read_json(source / "config.json", ConfigError)
    text = config.get("text_config", config)
    config.pop("quantization_config", None)
    text.pop("quantization_config", None)
    if experts == "mxfp4" or (experts is None and cfg.mxfp4_experts):
        text["quantization_config"] = quantization_block()
    K3Config.from_hf(config)  # refuses widths that MXFP4 cannot hold before anything is written
    write_folder(target, _tensors(files, experts), shard_bytes)
    return config


def _tensors(files: TensorFolder, experts: str | None) -> Iterator[Pending]:
    for name, info in files.tensors.items():
        stem = name.removesuffix(PACKED)
        is_expert = ".experts." in name
        if experts == "bf16" and name.endswith(PACKED):
            shape = (info.shape[0], info.shape[1] * 2)
            yield Pending(stem, shape, "BF16", functools.partial(_unpack, files, stem))
        elif experts == "bf16" and is_expert and name.endswith(SCALE):
            continue
        elif experts == "mxfp4" and is_expert and name.endswith(".weight"):
            out, width = info.shape
            packed = _Packed(files, name)
            yield Pending(name + PACKED, (out, width // 2), "U8", functools.partial(packed.part, "packed"))
            yield Pending(name + SCALE, (out, width // MXFP4_BLOCK), "U8", functools.partial(packed.part, "scale"))
        else:
            yield Pending(name, info.shape, info.dtype, functools.partial(_read, files, name))


def _read(files: TensorFolder, name: str) -> np.ndarray:
    array = files.read(name)
    files.close()
    return array


def _unpack(files: TensorFolder, stem: str) -> np.ndarray:
    packed, scale = _read(files, stem + PACKED), _read(files, stem + SCALE)
    weight = Mxfp4(packed=jnp.asarray(packed), scale=jnp.asarray(scale.reshape(packed.shape[0], -1)))
    return np.asarray(weight.dequantize(jnp.bfloat16))


class _Packed:
    """Quantises once for the two tensors that come of it."""

    def __init__(self, files: TensorFolder, name: str):
        self.files, self.name = files, name
        self.result: Mxfp4 | None = None

    def part(self, which: str) -> np.ndarray:
        if self.result is None:
            self.result = quantize(_read(self.files, self.name).astype(np.float32))
        return np.asarray(getattr(self.result, which))
