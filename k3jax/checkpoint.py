"""Hugging Face style folders to parameters and back, one tensor at a time, straight into their shards."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from k3jax.checkpoint_map import Entry, aliases, entries
from k3jax.config import ConfigError, K3Config, read_config, short
from k3jax.params import Params, is_spec, param_specs
from k3jax.presets import PRESETS, shipped_folder
from k3jax.safetensors_io import DTYPES, CheckpointError, Pending, TensorFolder, write_folder
from k3jax.sharding import Rules, shardings
from pallas_kernels.mxfp4 import check_scales

SHARD_BYTES = 5 * 10**9


def resolve(model: str | Path, *, weights: bool = True) -> Path:
    """Folder of a shipped preset, a local folder, or a hub id (`org/name`, downloaded through huggingface-hub).

    `weights=False` downloads the config and tokenizer files only.
    """
    shipped = shipped_folder(str(model))
    if shipped is not None:
        return shipped
    try:
        path = Path(model).expanduser()
        found = bool(str(model)) and path.is_dir()
    except (RuntimeError, OSError, TypeError, ValueError):  # no such home, a name that is too long, no path at all
        found = False
    if found:
        return path
    if str(model) in PRESETS:
        raise CheckpointError(
            f"preset {model!r} has a config but no weights here;"
            f" give a folder, or use init_params(preset({model!r}), key)"
        )
    parts = str(model).split("/")
    if len(parts) == 2 and all(parts) and not str(model).startswith((".", "/", "~")):
        return _download(str(model), weights)
    raise CheckpointError(
        f"{str(model)[:100]} is not a folder, a preset ({', '.join(PRESETS)}) or a hub id org/name; give one of these"
    )


def _download(repo: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "tiktoken.model", "*.jinja", "encoding_k3.py", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{repo} is no local folder and could not be downloaded ({reason}); give a folder"
        ) from None


def load(
    model: str | Path, *, mesh: Mesh | None = None, rules: Rules | None = None, dtype: Any = None
) -> tuple[K3Config, Params]:
    """(config, parameters) of a preset with weights, a folder, or a hub id.

    `dtype` is the dtype of activations: float32 on CPU and bfloat16 elsewhere by default. Weights keep their stored
    dtype and experts stay packed. With `mesh` each device reads only its own slices. Every name, shape and dtype is
    checked before any device memory is spent; `CheckpointError` names the first offender.
    """
    folder = resolve(model)
    cfg = read_config(folder)
    if dtype is None:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        cfg = dataclasses.replace(cfg, dtype=jnp.dtype(dtype).name)
    except TypeError:
        raise ConfigError(f"dtype is {short(dtype)}, supported are 'bfloat16' and 'float32'; use one") from None
    files = TensorFolder(folder)
    cfg = adapt(cfg, files)
    specs = param_specs(cfg)
    table = entries(cfg, specs)
    found = check(cfg, table, files)
    places = [None] * len(table) if mesh is None else jax.tree.leaves(shardings(specs, mesh, rules or Rules()))
    leaves = [_load_leaf(entry, files, found, place) for entry, place in zip(table, places, strict=True)]
    return cfg, jax.tree.unflatten(jax.tree.structure(specs, is_leaf=is_spec), leaves)


def adapt(cfg: K3Config, files: TensorFolder) -> K3Config:
    """What the tensors decide rather than the config: whether experts are packed, whether vision is present."""
    packed = any(name.endswith(".weight_packed") for name in files.tensors)
    vision = any(name.startswith(("vision_tower.", "mm_projector.")) for name in files.tensors)
    return dataclasses.replace(cfg, mxfp4_experts=packed, vision=cfg.vision if vision else None)


def check(cfg: K3Config, table: list[Entry], files: TensorFolder) -> dict[str, str]:
    """Canonical name -> name in the files, after checking presence, shape and dtype of all and that none is extra."""
    found = {}
    for entry in table:
        for name in entry.names:
            actual = next((n for n in (name, *aliases(name)) if n in files.tensors), None)
            if actual is None:
                raise CheckpointError(
                    f"tensor {name} is missing from {files.folder}; download the checkpoint again or fix config.json"
                )
            info = files.tensors[actual]
            if not _shape_fits(entry, info.shape):
                raise CheckpointError(
                    f"tensor {actual} has shape {list(info.shape)}, config.json asks for {list(entry.stored_shape)};"
                    " use the config that belongs to these weights"
                )
            allowed = ("U8",) if entry.spec.dtype == jnp.uint8 else ("BF16", "F32")
            if info.dtype not in allowed:
                raise CheckpointError(
                    f"tensor {actual} has dtype {info.dtype}, supported is {' or '.join(allowed)}; convert it first"
                )
            found[name] = actual
    used = set(found.values())
    extra = [name for name in files.tensors if name not in used]
    if extra:
        raise CheckpointError(
            f"tensor {extra[0]} and {len(extra) - 1} more are not part of this config;"
            " use the config that belongs to these weights"
        )
    return found


def _shape_fits(entry: Entry, shape: tuple[int, ...]) -> bool:
    if entry.layout == "a_log":  # any padding or singleton axes around the heads
        return int(np.prod(shape)) >= entry.spec.shape[0] and sum(n > 1 for n in shape) <= 1
    if entry.path.endswith(".scale"):  # some exports keep singleton axes
        return [n for n in shape if n > 1] == [n for n in entry.stored_shape if n > 1]
    return shape == entry.stored_shape


def _load_leaf(entry: Entry, files: TensorFolder, found: dict[str, str], place: Any) -> jax.Array:
    stored = {files.tensors[found[name]].dtype for name in entry.names}
    dtype = np.dtype(np.float32) if "F32" in stored or entry.spec.dtype == jnp.float32 else DTYPES[stored.pop()]
    shape = entry.spec.shape
    if place is None:
        leaf = _load_shard(entry, tuple(slice(0, n) for n in shape), None, dtype, files, found)
    else:
        shards: dict[tuple[slice, ...], jax.Array] = {}  # read once, copied to the devices that repeat it
        arrays = []
        for device, index in place.addressable_devices_indices_map(shape).items():
            if index not in shards:
                shards[index] = _load_shard(entry, index, device, dtype, files, found)
            arrays.append(jax.device_put(shards[index], device))
        leaf = jax.make_array_from_single_device_arrays(shape, place, arrays)
    leaf.block_until_ready()
    files.close()
    return leaf


def _load_shard(
    entry: Entry, index: tuple[slice, ...], device: Any, dtype: np.dtype, files: TensorFolder, found: dict[str, str]
) -> jax.Array:
    """The part of a parameter that `index` (slices of its memory shape) names, on its device.

    The experts of a stack go there one by one, so that the host holds one stored tensor at a time.
    """
    if not entry.stacked:
        part = _read_one(entry, entry.names[0], entry.spec.shape, index, files, found)
        return jax.device_put(part.astype(dtype, copy=False), device)
    names = entry.names[index[0]]
    stack = None
    for i, name in enumerate(names):
        part = _read_one(entry, name, entry.spec.shape[1:], index[1:], files, found).astype(dtype, copy=False)
        if stack is None:
            stack = jnp.zeros((len(names), *part.shape), dtype, device=device)
        stack = _put(stack, jax.device_put(part, device), i).block_until_ready()
    assert stack is not None  # a stack has at least one expert
    return stack


@functools.partial(jax.jit, donate_argnames=("stack",))
def _put(stack: jax.Array, part: jax.Array, i: int) -> jax.Array:
    return stack.at[i].set(part)


def _read_one(
    entry: Entry,
    name: str,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    files: TensorFolder,
    found: dict[str, str],
) -> np.ndarray:
    actual = found[name]
    if entry.layout == "transpose":
        array = files.read(actual, index[::-1])
        bits = array.view(f"u{array.itemsize}")  # numpy copies its own dtypes faster than bfloat16
        return np.ascontiguousarray(bits.T).view(array.dtype)
    if entry.layout == "a_log":
        return files.read(actual).reshape(-1)[: shape[0]][index]
    if files.tensors[actual].shape == shape:
        array = files.read(actual, index)
    else:
        array = files.read(actual).reshape(shape)[index]
    if entry.path.endswith(".scale"):
        try:
            check_scales(array)
        except ValueError as error:
            raise CheckpointError(f"tensor {actual}: {error}") from None
    return array


def save(folder: str | Path, cfg: K3Config, params: Params, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write `config.json` and safetensors in the released format; loading them gives bit-identical parameters."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_folder(folder, _pending(cfg, params), shard_bytes)
    (folder / "config.json").write_text(json.dumps(cfg.to_hf(), indent=2) + "\n")


def _pending(cfg: K3Config, params: Params) -> Iterator[Pending]:
    table = entries(cfg, param_specs(cfg))
    leaves = jax.tree.leaves(params)
    if len(leaves) != len(table):
        raise ValueError(
            f"parameters have {len(leaves)} arrays, the config {len(table)}; pass the config they belong to"
        )
    for entry, leaf in zip(table, leaves, strict=True):
        if leaf.shape != entry.spec.shape:
            raise ValueError(
                f"parameter {entry.path} has shape {leaf.shape}, the config {entry.spec.shape};"
                " pass the config they belong to"
            )
        host = _HostCopy(leaf)
        dtype = next((name for name, d in DTYPES.items() if d == leaf.dtype), None)
        if dtype is None:
            raise ValueError(
                f"parameter {entry.path} is {leaf.dtype}, safetensors here hold {', '.join(DTYPES)}; cast it first"
            )
        for i, name in enumerate(entry.names):
            yield Pending(name, entry.stored_shape, dtype, functools.partial(_stored, entry, host, i))


class _HostCopy:
    """numpy view of one parameter, made when its first tensor is written and dropped with it."""

    def __init__(self, leaf: jax.Array):
        self.leaf = leaf
        self.array: np.ndarray | None = None

    def __call__(self) -> np.ndarray:
        if self.array is None:
            self.array = np.asarray(self.leaf)
        return self.array


def _stored(entry: Entry, host: _HostCopy, item: int) -> np.ndarray:
    """Memory layout back to the stored layout."""
    array = host()
    if entry.stacked:
        array = array[item]
    if entry.layout == "transpose":
        return array.T
    if entry.layout == "a_log":
        padded = np.zeros(int(np.prod(entry.stored_shape)), array.dtype)
        padded[: array.size] = array.reshape(-1)
        return padded.reshape(entry.stored_shape)
    return array.reshape(entry.stored_shape)
