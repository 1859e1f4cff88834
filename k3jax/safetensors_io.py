"""Safetensors folders: lazy reading by name and slice, and streaming sharded writing.

A file is mapped only while one parameter is read, so its pages leave resident memory afterwards.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from k3jax.files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "U8": np.dtype(np.uint8),
}


class CheckpointError(ValueError):
    """A checkpoint that is truncated, mis-shaped, incomplete or has tensors the model lacks."""


@dataclass(frozen=True)
class TensorInfo:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors name, such as "BF16"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0


class TensorFolder:
    """The tensors of a folder: headers are read at once, data on request."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, TensorInfo] = {}
        self._open: dict[Path, Any] = {}
        for file, listed in _files(folder).items():
            found = self._headers(file)
            absent = [name for name in listed if name not in found]
            if absent:
                raise CheckpointError(
                    f"{file.name} lacks {absent[0]} that {INDEX} places there; download that shard again"
                )
            twice = next((name for name in found if name in self.tensors), None)
            if twice is not None:
                raise CheckpointError(
                    f"{twice} stands in both {self.tensors[twice].file.name} and {file.name}; remove one of them"
                )
            self.tensors |= found

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """The tensor, or only the slice of it that `index` names."""
        info = self.tensors[name]
        if info.file not in self._open:
            self._open[info.file] = _open_file(info.file)
        handle = self._open[info.file]
        if index is None or len(info.shape) == 0:
            return handle.get_tensor(name)
        bounds = (s.indices(n) for s, n in zip(index, info.shape, strict=True))
        return handle.get_slice(name)[tuple(slice(start, stop) for start, stop, _ in bounds)]

    def close(self) -> None:
        """Unmap every file; a later read maps it again."""
        self._open.clear()

    def _headers(self, file: Path) -> dict[str, TensorInfo]:
        handle = _open_file(file)
        slices = ((name, handle.get_slice(name)) for name in handle.keys())
        return {name: TensorInfo(file, tuple(s.get_shape()), s.get_dtype()) for name, s in slices}


def _open_file(file: Path) -> Any:
    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated or not a safetensors file ({error}); download it again") from None


def _files(folder: Path) -> dict[Path, list[str]]:
    """Weight files of a folder and the names each must hold (empty list: whatever it holds)."""
    if (folder / INDEX).is_file():
        try:
            weight_map = read_json(folder / INDEX, CheckpointError)["weight_map"]
            by_file: dict[Path, list[str]] = {}
            for name, file in weight_map.items():
                by_file.setdefault(folder / file, []).append(name)
        except (KeyError, TypeError, AttributeError):
            raise CheckpointError(f"{folder / INDEX} has no readable weight_map; download it again") from None
        for file in by_file:
            if "\0" in str(file):
                raise CheckpointError(f"{INDEX} names a file with a NUL character; download the index again")
            if file.resolve().parent != folder.resolve() and not file.is_symlink():
                raise CheckpointError(f"{INDEX} names {file}, outside the model folder; download the index again")
            if not file.is_file():
                raise CheckpointError(f"{file} is missing although {INDEX} names it; download it")
        return by_file
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors weights; give a folder that has them")
    return {file: [] for file in files}


@dataclass(frozen=True)
class Pending:
    """A tensor to be written: `make` yields its array when its shard's turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def write_folder(folder: Path, tensors: Iterable[Pending], shard_bytes: int) -> None:
    """Write `tensors` in order into shards of at most `shard_bytes` (one tensor may exceed it).

    One shard is in host memory at a time. Files appear under their names only when complete, the index last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[list[Pending]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    single = len(shards) == 1
    names = [SINGLE] if single else [f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors" for i in range(len(shards))]
    stale = [p for p in (*folder.glob("model*.safetensors"), folder / INDEX) if p.is_file() and p.name not in names]
    weight_map = {t.name: file for file, shard in zip(names, shards, strict=True) for t in shard}
    total = sum(t.nbytes for shard in shards for t in shard)
    for file in names:
        shard = shards.pop(0)  # a written shard's host copies are freed with it
        arrays = {t.name: np.ascontiguousarray(t.make()) for t in shard}
        partial = folder / f"{file}.partial"
        save_file(arrays, partial, metadata={"format": "pt"})
        partial.rename(folder / file)
    for path in stale:
        path.unlink()
    if not single:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
        partial = folder / f"{INDEX}.partial"
        partial.write_text(text)
        partial.rename(folder / INDEX)
