"""Sizes of an image on its way to the tower, by arithmetic alone (spec model 9.8). No jax and no decoding here."""

import dataclasses
import math

from k3jax.vision.media_config import K3_MEDIA, MediaConfig


@dataclasses.dataclass(frozen=True)
class ImageSize:
    """`resized` and `padded` are (width, height) in pixels; `grid` is (1, rows, columns) in patches."""

    resized: tuple[int, int]
    padded: tuple[int, int]
    grid: tuple[int, int, int]
    tokens: int


def image_size(width: int, height: int, media: MediaConfig = K3_MEDIA) -> ImageSize:
    """What an image of width x height pixels becomes; it is never enlarged."""
    if width < 1 or height < 1:
        raise ValueError(f"image size {width}x{height} has no pixels; give an image of at least 1x1")
    patch, cell = media.patch_size, media.cell
    most = media.patch_limit_on_one_side * patch
    area = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(media.in_patch_limit / area), most / width, most / height)
    resized = tuple(min(max(1, int(side * scale)), most) for side in (width, height))
    w, h = (-(-side // cell) * cell for side in resized)
    return ImageSize(
        resized=(resized[0], resized[1]),
        padded=(w, h),
        grid=(1, h // patch, w // patch),
        tokens=(h // cell) * (w // cell),
    )
