"""The `k3jax-serve` command: an OpenAI-compatible server around one engine."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
from tqdm import tqdm

from k3jax.chat import load_tokenizer
from k3jax.checkpoint import load
from serve.engine import Engine, EngineConfig
from serve.http.app import create_app
from serve.http.options import add_arguments, options_from
from serve.http.server import listen, run

COMPILED = Path("~/.cache/k3jax/compiled")


def build_parser() -> argparse.ArgumentParser:
    default = EngineConfig()
    parser = argparse.ArgumentParser(prog="k3jax-serve", description=__doc__)
    parser.add_argument("--model", default="nano", help="preset, folder or hub id (default: %(default)s)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; others can reach 0.0.0.0 (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    parser.add_argument(
        "--drain",
        type=float,
        default=30.0,
        help="seconds that running requests have after a signal (default: %(default)s)",
    )
    parser.add_argument("--access-log", action="store_true", help="log a line per request")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--memory", type=float, default=default.memory / 2**30, help="GiB for states and pages (default: %(default)s)"
    )
    engine.add_argument(
        "--host-memory",
        type=float,
        default=default.host_memory / 2**30,
        help="GiB for evicted ones, 0 is off (default: %(default)s)",
    )
    engine.add_argument("--page", type=int, default=default.page, help="tokens per page (default: %(default)s)")
    engine.add_argument(
        "--max-running", type=int, default=default.max_running, help="requests that run together (default: %(default)s)"
    )
    engine.add_argument(
        "--max-waiting", type=int, default=default.max_waiting, help="requests that may wait (default: %(default)s)"
    )
    engine.add_argument(
        "--max-wait", type=float, help="seconds after which a request that never ran gets 503 (default: never)"
    )
    engine.add_argument(
        "--max-length", type=int, default=default.max_length, help="tokens of prompt and answer (default: %(default)s)"
    )
    engine.add_argument(
        "--max-tokens", type=int, default=default.max_tokens, help="rows of a step (default: %(default)s)"
    )
    engine.add_argument("--no-prefix-cache", action="store_true", help="share nothing between requests")
    engine.add_argument(
        "--static-states", type=int, help="cut the memory in two with so many states (default: unified)"
    )
    engine.add_argument(
        "--compiled",
        type=Path,
        default=COMPILED,
        metavar="DIR",
        help="keeps compiled programs for the next start (default: %(default)s)",
    )
    add_arguments(parser)
    return parser


def engine_config(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        memory=int(args.memory * 2**30),
        host_memory=int(args.host_memory * 2**30),
        page=args.page,
        max_running=args.max_running,
        max_waiting=args.max_waiting,
        max_length=args.max_length,
        max_tokens=args.max_tokens,
        max_wait=args.max_wait,
        prefix_cache=not args.no_prefix_cache,
        static_states=args.static_states,
    )


def serve(args: argparse.Namespace) -> int:
    options = options_from(args)
    jax.config.update("jax_compilation_cache_dir", str(args.compiled.expanduser()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    sock = listen(args.host, args.port)
    tokenizer = load_tokenizer(args.model)
    engine = Engine(*load(args.model), engine_config(args))
    shapes = engine.warm_up()
    with tqdm(total=engine.shapes, desc="compiling", unit="shape", disable=not sys.stderr.isatty()) as bar:
        for _ in shapes:
            bar.update()
    engine.start()
    host, port = sock.getsockname()[:2]
    print(f"{args.model} is served on http://{host}:{port}/v1, a page on http://{host}:{port}/", flush=True)
    try:
        run(create_app(engine, tokenizer, options), sock, args.drain, args.access_log)
    finally:
        engine.stop()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; bad input is one sentence on stderr and status 2."""
    args = build_parser().parse_args(argv)
    try:
        return serve(args)
    except (ValueError, OSError) as error:
        if args.debug:
            traceback.print_exc()
        else:
            print(f"k3jax-serve: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
