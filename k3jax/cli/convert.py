"""`k3jax convert SRC DST`: pack or unpack the experts and re-shard, one shard in memory at a time."""

import argparse
import json
import shutil
from pathlib import Path

from k3jax.checkpoint import resolve
from k3jax.cli.table import gigabytes, human_bytes
from k3jax.convert import convert
from k3jax.safetensors_io import TensorFolder

CARRIED = (
    "tiktoken.model",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "encoding_k3.py",
    "chat_prose.json",
    "preprocessor_config.json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="preset, folder or hub id")
    parser.add_argument("target", type=Path, help="folder to write; must not exist or be empty")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pack", action="store_true", help="bf16 experts to MXFP4 (rounds to the nearest code)")
    which.add_argument("--unpack", action="store_true", help="MXFP4 experts to bf16 (exact)")
    parser.add_argument("--shard-size", type=float, default=5.0, help="GB per file (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    shard_bytes = gigabytes("--shard-size", args.shard_size)
    if shard_bytes < 1:
        raise ValueError(f"--shard-size is {args.shard_size}, it must be above 0; give GB per file")
    source = resolve(args.source)
    if args.target.exists() and (not args.target.is_dir() or any(args.target.iterdir())):
        raise ValueError(f"{args.target} exists and is not an empty folder; choose a new one")
    experts = "mxfp4" if args.pack else "bf16" if args.unpack else None
    config = convert(source, args.target, experts=experts, shard_bytes=shard_bytes)
    (args.target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in CARRIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, args.target / name)
    files = TensorFolder(args.target)
    stored = sum(t.nbytes for t in files.tensors.values())
    print(f"wrote {len(files.tensors):,} tensors, {human_bytes(stored)}, to {args.target}")
    return 0
