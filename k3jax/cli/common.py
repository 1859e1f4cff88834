"""Options and terminal output that `generate` and `chat` share."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from k3jax.chat.messages import EFFORTS
from k3jax.checkpoint import resolve
from k3jax.config import read_config
from k3jax.sample import sampling
from k3jax.vision import Limits, Picture, check_vision, read_media_config, read_picture


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="nano", help="preset, folder or hub id (default: %(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the most likely token (default: %(default)s)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="keep the k most likely, 0 all (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="keep this probability mass (default: %(default)s)")
    parser.add_argument(
        "--min-p", type=float, default=0.0, help="drop below this share of the best token (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: %(default)s)")
    parser.add_argument("--no-thinking", action="store_true", help="answer without a think channel")
    parser.add_argument("--effort", choices=EFFORTS, help="reasoning effort to ask for (default: none)")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for `generate` and `stream`."""
    filters = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    sampling(1, **filters)  # refuses values out of range before a model is loaded
    if args.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {args.max_new_tokens}, the minimum is 1; ask for at least one token")
    if not -(2**63) <= args.seed < 2**63:
        raise ValueError(f"seed is {args.seed}, allowed are 64-bit integers; choose one of them")
    return filters | {"max_new_tokens": args.max_new_tokens, "seed": args.seed}


def read_images(model: str, files: Sequence[str]) -> list[Picture]:
    """Pictures of image files, refused before any weight is read when the model cannot see."""
    if not files:
        return []
    Limits().check_count(len(files))
    folder = resolve(model, weights=False)
    check_vision(read_config(folder))
    media = read_media_config(folder)
    return [read_picture(Path(file).expanduser(), media) for file in files]


def user_message(text: str, pictures: Sequence[Picture]) -> dict[str, Any]:
    """A message that shows pictures before its text; an image part carries its picture."""
    if not pictures:
        return {"role": "user", "content": text}
    parts: list[dict[str, Any]] = [{"type": "image", "picture": picture} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def dim(text: str, stream: TextIO = sys.stdout) -> str:
    """Text in a faint style where the stream is a terminal that wants styles (https://no-color.org)."""
    return f"\033[2m{text}\033[22m" if stream.isatty() and not os.environ.get("NO_COLOR") else text
