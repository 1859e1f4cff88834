"""The `k3jax` command: generate, chat, info, convert, capacity."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from k3jax.cli import capacity, chat, convert, generate, info

COMMANDS = {
    "generate": (generate, "answer prompts"),
    "chat": (chat, "talk to a model in the terminal"),
    "info": (info, "layers, parameters and bytes of a preset or a checkpoint"),
    "convert": (convert, "pack, unpack and re-shard a checkpoint"),
    "capacity": (capacity, "how many requests and tokens fit a group of GPUs"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="k3jax", description="Kimi K3 in pure JAX.")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error"
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; bad input is one sentence on stderr and status 2."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:  # ConfigError and CheckpointError are ValueErrors
        if args.debug:
            traceback.print_exc()
        else:
            print(f"k3jax {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
