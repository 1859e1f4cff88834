"""Images of any sizes as one batch of patches whose shape comes from a short list, so that few programs compile."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from k3jax.config import VisionConfig

# Patches of one batch. The last holds the largest image of K3's limits (67,268 patches with its padding).
PATCHES = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 69632)
TOGETHER = 4096  # small images share a batch up to this many patches; attention costs the square of the batch
MAX_SIDE = 512  # rows or columns that the rotary table has

Grid = tuple[int, int, int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """N patches of several items, one item after the other and padding at the end; M >= tokens of all of them.

    An item is an image or a short video, its grid (frames, rows, columns) counted in patches.
    """

    pixels: jax.Array  # [N, 3, P, P] float32, normalised
    item: jax.Array  # [N] int32, -1 for padding
    place: jax.Array  # [N, 3] int32: frame, row and column of the patch
    grid: jax.Array  # [N, 3] int32: the grid of its item
    source: jax.Array  # [M, F, corners] int32: patches that make a token, N where there is none; F = 1 without videos
    frames: jax.Array  # [M] int32: frames of the token's item


def pack(cfg: VisionConfig, pixels: np.ndarray, grids: Sequence[Grid]) -> Packed:
    """pixels [n, 3, P, P] float32, the patches of all items, frame by frame and row by row -> Packed, on the host.

    ValueError for a grid that the tower does not have, or pixels that do not fit the grids.
    """
    P = cfg.patch_size
    for grid in grids:
        _check_grid(cfg, grid)
    counts = [t * h * w for t, h, w in grids]
    if not grids or pixels.shape != (sum(counts), 3, P, P):
        raise ValueError(f"pixels {pixels.shape} do not fit the grids {list(grids)}; pass [{sum(counts)}, 3, {P}, {P}]")
    N = bucket(sum(counts))
    kh, kw = cfg.merge_kernel_size
    F = cfg.init_pos_emb_time if any(t > 1 for t, _, _ in grids) else 1
    out: dict[str, Any] = {
        "pixels": np.zeros((N, 3, P, P), np.float32),
        "item": np.full(N, -1, np.int32),
        "place": np.zeros((N, 3), np.int32),
        "grid": np.ones((N, 3), np.int32),
        "source": np.full((N // (kh * kw), F, kh * kw), N, np.int32),
        "frames": np.ones(N // (kh * kw), np.int32),
    }
    out["pixels"][: len(pixels)] = pixels
    start = token = 0
    for i, ((t, h, w), count) in enumerate(zip(grids, counts, strict=True)):
        here = slice(start, start + count)
        out["item"][here] = i
        out["place"][here] = np.stack(np.meshgrid(*map(np.arange, (t, h, w)), indexing="ij"), -1).reshape(-1, 3)
        out["grid"][here] = t, h, w
        index = np.arange(start, start + count, dtype=np.int32).reshape(t, h // kh, kh, w // kw, kw)
        index = index.transpose(1, 3, 0, 2, 4).reshape(-1, t, kh * kw)  # [tokens, t, corners]
        out["source"][token : token + len(index), :t] = index
        out["frames"][token : token + len(index)] = t
        start, token = start + count, token + len(index)
    return Packed(**out)


def bucket(patches: int) -> int:
    """The smallest batch that holds so many patches."""
    for size in PATCHES:
        if patches <= size:
            return size
    raise ValueError(f"{patches:,} patches exceed the largest batch of {PATCHES[-1]:,}; shrink the image")


def batches(grids: Iterable[Grid]) -> Iterator[list[int]]:
    """Indices of consecutive items to pack together."""
    group: list[int] = []
    total = 0
    for i, (t, h, w) in enumerate(grids):
        if group and total + t * h * w > TOGETHER:
            yield group
            group, total = [], 0
        group.append(i)
        total += t * h * w
    if group:
        yield group


def _check_grid(cfg: VisionConfig, grid: Grid) -> None:
    t, h, w = grid
    kh, kw = cfg.merge_kernel_size
    if not (1 <= t <= cfg.init_pos_emb_time):
        raise ValueError(f"grid {grid} has {t} frames, allowed are 1 to {cfg.init_pos_emb_time}; cut the video")
    if h < 1 or w < 1 or h % kh or w % kw:
        raise ValueError(f"grid {grid} is not a multiple of the merge {kh}x{kw}; pad the image")
    if max(h, w) > MAX_SIDE:
        raise ValueError(f"grid {grid} has a side over the limit of {MAX_SIDE} patches; shrink the image")
