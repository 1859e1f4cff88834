"""Image files to the pixels that the tower sees, as the released processor makes them (spec model 9.8). No jax here."""

import dataclasses
import functools
import hashlib
import io
from pathlib import Path

import numpy as np
from PIL import Image

from k3jax.vision.media_config import K3_MEDIA, MediaConfig
from k3jax.vision.resize import image_size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ALPHA_MODES = ("LA", "La", "RGBA", "RGBa", "PA")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is refused before any pixel is decoded."""

    max_bytes: int = 20 * 2**20  # of one file
    max_pixels: int = 8192 * 8192
    max_side: int = 32768  # pixels; a resize needs memory in proportion to the longer side
    max_frames: int = 1  # further frames of a file within the limit are not seen
    max_images: int = 64  # of one request

    def check_count(self, images: int) -> None:
        if images > self.max_images:
            raise ValueError(f"{images} images were given, the limit is {self.max_images}; send fewer")


LIMITS = Limits()


@dataclasses.dataclass(frozen=True, eq=False)
class Picture:
    """One image ready for the tower. `width` and `height` are those of the file: the prompt states them."""

    width: int
    height: int
    pixels: np.ndarray  # [rows * P, columns * P, 3] uint8, resized, opaque, padded
    media: MediaConfig

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def grid(self) -> tuple[int, int, int]:
        """(1, rows, columns) in patches."""
        P = self.media.patch_size
        return 1, self.pixels.shape[0] // P, self.pixels.shape[1] // P

    @property
    def tokens(self) -> int:
        _, rows, columns = self.grid
        return rows * columns // self.media.merge_kernel_size**2

    def patches(self) -> np.ndarray:
        """[rows * columns, 3, P, P] float32, normalised, row by row."""
        (_, rows, columns), P = self.grid, self.media.patch_size
        mean, std = (np.array(v, np.float32) for v in (self.media.image_mean, self.media.image_std))
        x = (self.pixels.astype(np.float32) / 255 - mean) / std
        x = x.reshape(rows, P, columns, P, 3).transpose(0, 2, 4, 1, 3)  # [rows, columns, 3, P, P]
        return np.ascontiguousarray(x).reshape(-1, 3, P, P)

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of what the tower sees: equal exactly for pictures with equal embeddings under one model.

        The key of a prefix cache needs it: all images share one placeholder token.
        """
        header = f"{self.pixels.shape} {self.media}".encode()
        return hashlib.sha256(header + b"\0" + self.pixels.tobytes()).digest()


def read_picture(
    source: bytes | str | Path, media: MediaConfig = K3_MEDIA, limits: Limits = LIMITS, name: str | None = None
) -> Picture:
    """Picture from the bytes of a file or its path. Every refusal is a ValueError of one sentence that starts with
    `name`; limits are checked on the file's header, before its pixels are decoded. EXIF rotation is not applied."""
    if isinstance(source, bytes):
        name, data = name or "the image", source
    else:
        path = Path(source)
        name = name or str(path)
        if not path.is_file():
            raise ValueError(f"{name} is not a file; give the path of an image")
        with path.open("rb") as file:
            data = file.read(limits.max_bytes + 1)
    if not data:
        raise ValueError(f"{name} is empty; give a {', '.join(FORMATS)} file")
    if len(data) > limits.max_bytes:
        raise ValueError(f"{name} is larger than the limit of {limits.max_bytes:,} bytes; compress or shrink it")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ValueError(f"{name} has more than the limit of {limits.max_pixels:,} pixels; shrink it") from None
    except Image.UnidentifiedImageError:
        raise ValueError(f"{name} has no readable header of an image; give a {', '.join(FORMATS)} file") from None
    except Exception as error:  # a decoder meets hostile bytes: it may raise anything
        raise _undecodable(name, error) from None
    with image:
        _check_header(image, name, limits)
        try:
            image.load()
            return picture_of(image, media)
        except Exception as error:
            raise _undecodable(name, error) from None


def picture_of(image: Image.Image, media: MediaConfig = K3_MEDIA) -> Picture:
    """Picture from a decoded Pillow image of any mode.

    It is resized in its stored mode and converted afterwards, so palette and 1-bit images use their nearest pixels.
    """
    if image.mode in ("PA", "La"):  # Pillow would blend palette indices, and has no way from La to RGB
        image = image.convert("RGBA" if image.mode == "PA" else "LA")
    size = image_size(*image.size, media)
    resized = image.resize(size.resized, Image.Resampling.BICUBIC)
    if resized.mode in _ALPHA_MODES or (resized.mode == "P" and "transparency" in resized.info):
        rgb = _on_board(np.asarray(resized.convert("RGBA")), media)
    else:
        rgb = np.asarray(resized.convert("RGB"))
    (right, bottom), (w, h) = size.padded, size.resized
    pixels = np.pad(rgb, ((0, bottom - h), (0, right - w), (0, 0)))
    return Picture(width=image.width, height=image.height, pixels=pixels, media=media)


def _on_board(rgba: np.ndarray, media: MediaConfig) -> np.ndarray:
    """rgba [h, w, 4] uint8 over the chessboard -> [h, w, 3] uint8."""
    row, column = (np.arange(n) // media.chessboard_square_size for n in rgba.shape[:2])
    odd = (row[:, None] + column) % 2 == 1
    white = odd != media.chessboard_square_on_top_left
    board = np.where(white, media.chessboard_white, media.chessboard_gray).astype(np.float32)[..., None]
    alpha = rgba[..., 3:].astype(np.float32) / 255
    blended = alpha * rgba[..., :3].astype(np.float32) + (1 - alpha) * board
    return np.clip(blended, 0, 255).astype(np.uint8)


def _check_header(image: Image.Image, name: str, limits: Limits) -> None:
    w, h = image.size
    if w < 1 or h < 1:
        raise ValueError(f"{name} has {w}x{h} pixels, the minimum is 1x1; give another image")
    if w * h > limits.max_pixels:
        raise ValueError(f"{name} has {w}x{h} pixels, the limit is {limits.max_pixels:,} pixels; shrink it")
    if max(w, h) > limits.max_side:
        raise ValueError(f"{name} has {w}x{h} pixels, the limit of a side is {limits.max_side:,}; shrink it")
    try:  # the further pictures of an MPO photo are not an animation
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    except Exception as error:
        raise _undecodable(name, error) from None
    if frames > limits.max_frames:
        raise ValueError(f"{name} has {frames} frames, the limit is {limits.max_frames}; send a still image")


def _undecodable(name: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return ValueError(f"{name} cannot be decoded ({reason[:100]}); save the image again")
