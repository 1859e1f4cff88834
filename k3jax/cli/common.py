"""Options and terminal output that `generate` and `chat` share."""

import argparse
import os
import sys
from typing import Any, TextIO

from k3jax.chat.messages import EFFORTS


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
    names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed")
    return {name: getattr(args, name) for name in names}


def dim(text: str, stream: TextIO = sys.stdout) -> str:
    """Text in a faint style where the stream is a terminal that wants styles (https://no-color.org)."""
    return f"\033[2m{text}\033[22m" if stream.isatty() and not os.environ.get("NO_COLOR") else text
