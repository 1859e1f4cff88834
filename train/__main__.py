"""The `k3jax-train` command: sft and eval."""

import argparse
import sys
import traceback
from collections.abc import Sequence

from train.config import describe_options, read_sft_config
from train.tasks import TASKS


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="k3jax-train", description="Train small K3 models and measure them.")
    debug = argparse.ArgumentParser(add_help=False)
    debug.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    sft = commands.add_parser(
        "sft",
        parents=[debug],
        help="supervised training on the generated tasks",
        description="Supervised training on the generated tasks; started again, it continues from its last checkpoint.",
        epilog=f"options in CONFIG:\n{describe_options()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sft.add_argument("config", metavar="CONFIG", help="TOML file, for example train/configs/nano.toml")
    sft.add_argument("--out", help="replaces the config's out (default: the config's)")
    sft.add_argument("--seed", type=int, help="replaces the config's seed (default: the config's)")
    sft.add_argument("--steps", type=int, help="replaces the config's steps (default: the config's)")
    sft.add_argument("--workers", type=int, help="replaces the config's workers (default: the config's)")
    sft.add_argument("--stop-after", type=int, metavar="STEP", help="save and stop at this step (default: the last)")
    sft.set_defaults(run=_sft)

    score = commands.add_parser(
        "eval",
        parents=[debug],
        help="greedy accuracy on held-out problems",
        description="Greedy accuracy on held-out problems by task.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    score.add_argument("model", nargs="?", default="nano", help="preset with weights, folder or hub id")
    score.add_argument("--task", choices=sorted(TASKS), action="append", help="one task, may be repeated; None is all")
    score.add_argument("-n", type=int, default=256, help="problems per task and mode")
    score.add_argument("--seed", type=int, default=0, help="which problems")
    score.add_argument("--mode", choices=("thinking", "direct", "both"), default="both", help="chat mode")
    score.add_argument("--max-new-tokens", type=int, default=128, help="limit of one turn")
    score.set_defaults(run=_eval)
    return parser


def _sft(args: argparse.Namespace) -> int:
    from train.loop import sft

    overrides = {"out": args.out, "seed": args.seed, "steps": args.steps, "workers": args.workers}
    config = read_sft_config(args.config, **overrides)
    if args.stop_after is not None and args.stop_after < 1:
        raise ValueError(f"--stop-after is {args.stop_after}, the minimum is 1; give a step of the run")
    folder = sft(config, stop_after=args.stop_after)
    print(folder)
    return 0


def _eval(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from k3jax.chat import load_tokenizer
    from k3jax.checkpoint import load
    from train.evaluate import score, table

    if args.n < 1:
        raise ValueError(f"-n is {args.n}, the minimum is 1; ask for at least one problem")
    tokenizer = load_tokenizer(args.model)
    cfg, params = load(args.model)
    modes = {"thinking": (True,), "direct": (False,), "both": (True, False)}[args.mode]
    scores = []
    pairs = [(task, thinking) for task in args.task or TASKS for thinking in modes]
    for task, thinking in tqdm(pairs, unit="task", disable=None):
        one = score(
            cfg,
            params,
            tokenizer,
            task,
            n=args.n,
            seed=args.seed,
            thinking=thinking,
            max_new_tokens=args.max_new_tokens,
        )
        scores.append(one)
    print(table(scores))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; bad input is one sentence on stderr and status 2."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        else:
            print(f"k3jax-train {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
