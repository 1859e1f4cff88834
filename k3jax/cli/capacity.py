"""`k3jax capacity`: GPUs, memory, tp, dcp and lengths in; requests, tokens and the limiting pool out."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from k3jax.capacity import KV_BYTES, STATE_BYTES, Capacity, Deployment, capacity
from k3jax.cli.info import describe
from k3jax.cli.table import gigabytes, human_bytes, table

PLOT_LENGTHS = [2**n for n in range(10, 21)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    d = Deployment()
    parser.add_argument("--model", default="k3", help="preset, folder or hub id (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=d.gpus, help="GPUs in all (default: %(default)s)")
    parser.add_argument(
        "--gpu-memory",
        type=float,
        default=d.gpu_memory / 1e9,
        help="GB per GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--memory-fraction",
        type=float,
        default=d.memory_fraction,
        help="share of it to use (default: %(default)s)",
    )
    parser.add_argument(
        "--workspace",
        type=float,
        default=d.workspace / 1e9,
        help="GB per GPU kept for activations (default: %(default)s)",
    )
    parser.add_argument(
        "--tp",
        type=int,
        default=d.tp,
        help="GPUs that share one copy of the attention (default: %(default)s)",
    )
    parser.add_argument(
        "--dcp",
        type=int,
        default=d.dcp,
        help="ranks that share one MLA cache (default: %(default)s)",
    )
    parser.add_argument("--page", type=int, default=d.page, help="tokens per page and rank (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=d.slots, help="KDA states per request (default: %(default)s)")
    parser.add_argument(
        "--state-dtype",
        default=d.state_dtype,
        choices=list(STATE_BYTES),
        help="(default: %(default)s)",
    )
    parser.add_argument("--kv-dtype", default=d.kv_dtype, choices=list(KV_BYTES), help="(default: %(default)s)")
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[8192, 131072, 1048576],
        help="tokens per request (default: %(default)s)",
    )
    parser.add_argument("--plot", metavar="PNG", help="also draw requests against length into this file")


def run(args: argparse.Namespace) -> int:
    where = Deployment(
        gpus=args.gpus,
        gpu_memory=gigabytes("--gpu-memory", args.gpu_memory),
        memory_fraction=args.memory_fraction,
        tp=args.tp,
        dcp=args.dcp,
        page=args.page,
        slots=args.slots,
        state_dtype=args.state_dtype,
        kv_dtype=args.kv_dtype,
        workspace=gigabytes("--workspace", args.workspace),
    )
    cfg, source, _ = describe(args.model)
    results = [capacity(cfg, where, n) for n in args.lengths]
    print(f"{source} on {where.gpus} GPUs, tp {where.tp}, dcp {where.dcp}\n")
    print(report(results))
    if args.plot:
        draw(
            Path(args.plot),
            args.model,
            [capacity(cfg, where, n) for n in PLOT_LENGTHS if n <= cfg.max_position_embeddings],
        )
        print(f"\nwrote {args.plot}")
    return 0


def report(results: Sequence[Capacity]) -> str:
    first = results[0]
    per_gpu = [
        ["per GPU", "bytes", ""],
        ["weights", f"{first.weights:,}", human_bytes(first.weights)],
        ["pool for states and pages", f"{first.pool:,}", human_bytes(first.pool)],
        ["one KDA state slot", f"{first.state_slot:,}", human_bytes(first.state_slot)],
        ["MLA cache per token", f"{first.kv_token:,.0f}", human_bytes(first.kv_token)],
    ]
    fits = [["length", "bytes per request", "requests", "tokens", "mostly"]]
    fits += [[f"{r.length:,}", f"{r.request:,}", f"{r.requests:,}", f"{r.tokens:,}", r.limit] for r in results]
    tail = (
        "The weights alone do not fit: use more GPUs, or more memory per GPU."
        if first.pool <= 0
        else f"Longest single request: {first.tokens_alone:,} tokens."
    )
    return "\n\n".join((table(per_gpu, (1, 2)), table(fits, (0, 1, 2, 3)), tail))


def draw(path: Path, name: str, results: Sequence[Capacity]) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed; run pip install 'k3jax[plot]'") from None
    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.loglog([r.length for r in results], [max(r.requests, 0.1) for r in results], marker="o", base=2)
    axes.set(xlabel="tokens per request", ylabel="concurrent requests", title=f"Capacity of {name}")
    axes.grid(True, which="both", alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
