"""Settings of the image processor: K3's values, or those of a folder's `preprocessor_config.json`. No jax here."""

import dataclasses
from pathlib import Path
from typing import Any

from k3jax.config import ConfigError
from k3jax.files import read_json


@dataclasses.dataclass(frozen=True)
class MediaConfig:
    """`media_proc_cfg` of the released processor (spec model 9.8). Limits count patches of `patch_size` pixels."""

    patch_size: int = 14
    merge_kernel_size: int = 2
    in_patch_limit: int = 65536
    patch_limit_on_one_side: int = 512
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    chessboard_square_size: int = 8
    chessboard_square_on_top_left: bool = True  # the square there is white
    chessboard_white: int = 255
    chessboard_gray: int = 180

    def __post_init__(self):
        for key in (
            "patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side", "chessboard_square_size",
        ):  # fmt: skip
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"media_proc_cfg.{key} is {value!r}, the minimum is 1; give a positive integer")
        if self.patch_limit_on_one_side % self.merge_kernel_size:
            raise ConfigError(
                f"media_proc_cfg.patch_limit_on_one_side {self.patch_limit_on_one_side} is not a multiple of"
                f" merge_kernel_size {self.merge_kernel_size}; padding would pass the limit"
            )
        for key in ("image_mean", "image_std"):
            value = getattr(self, key)
            if (
                len(value) != 3
                or not all(isinstance(v, int | float) for v in value)
                or (key[-3:] == "std" and 0 in value)
            ):
                raise ConfigError(f"media_proc_cfg.{key} is {list(value)!r}, expected 3 numbers; see the released file")

    @property
    def cell(self) -> int:
        """Pixels on a side of what becomes one token."""
        return self.patch_size * self.merge_kernel_size


K3_MEDIA = MediaConfig()
_FIXED: dict[str, Any] = {"fixed_output_tokens": None, "transparent_bg_fill_stage": "after_resize"}
_BOARD = {
    "chessboard_square_size": "chessboard_square_size",
    "chessboard_square_on_top_left": "chessboard_square_on_top_left",
    "white": "chessboard_white",
    "gray": "chessboard_gray",
}


def read_media_config(folder: str | Path) -> MediaConfig:
    """From `preprocessor_config.json` of a model folder; without the file, K3's values."""
    path = Path(folder) / "preprocessor_config.json"
    if not path.is_file():
        return K3_MEDIA
    data = read_json(path, ConfigError)
    media = data.get("media_proc_cfg", {}) if isinstance(data, dict) else None
    board = media.get("transparent_bg_config") or {} if isinstance(media, dict) else None
    if not isinstance(media, dict) or not isinstance(board, dict):
        raise ConfigError(f"{path} has no object media_proc_cfg; download it again")
    for key, allowed in _FIXED.items():
        if media.get(key, allowed) != allowed:
            raise ConfigError(f"media_proc_cfg.{key} is {media[key]!r}, supported is {allowed!r}; change it")
    if board.get("pattern", "chessboard") != "chessboard":
        raise ConfigError(
            f"transparent_bg_config.pattern is {board['pattern']!r}, supported is 'chessboard'; change it"
        )
    names = {field.name for field in dataclasses.fields(MediaConfig)}
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in media.items() if key in names}
    values |= {ours: board[key] for key, ours in _BOARD.items() if key in board}
    return MediaConfig(**values)
