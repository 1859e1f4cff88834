"""GPU kernels: numerics against float64 first, then time, then one table.

python -m benchmarks.gpu [op ...] [--out FILE] [--peer FILE] [--checks-only]
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import cases_attn_res, cases_kda
from benchmarks.case import Check
from benchmarks.timing import copy_bandwidth, microseconds

RESULTS = Path(__file__).parent / "results"
PEAK_FLOPS = 989e12  # dense bf16 of the data sheet

CASES: dict[str, tuple[tuple[Callable, ...], tuple[Callable, ...]]] = {
    "kda_decode": ((cases_kda.check_decode,), (cases_kda.time_decode, cases_kda.time_verify_fold)),
    "attn_res_mix": ((cases_attn_res.check,), (cases_attn_res.time,)),
    "kda_prefill": ((cases_kda.check_prefill, cases_kda.check_prefill_neighbours), (cases_kda.time_prefill,)),
}


def main(argv: list[str] | None = None) -> int:
    """Returns 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("ops", nargs="*", metavar="op", help=f"ops to run, all by default: {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, help="JSON file to write (default: benchmarks/results/DATE.json)")
    parser.add_argument("--peer", type=Path, help="JSON that benchmarks.peer_fla wrote on the same card")
    parser.add_argument("--checks-only", action="store_true", help="no timing")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.ops) - set(CASES))
    if unknown:
        parser.error(f"unknown op {unknown[0]!r}; choose from {', '.join(CASES)}")
    device = jax.devices()[0]
    if device.platform != "gpu":
        parser.error(f"the default device is {device.device_kind!r}, these benchmarks need a GPU; run them on one")
    ops = args.ops or list(CASES)

    report: dict[str, Any] = {
        "card": device.device_kind,
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0], "triton": _version("triton")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "checks": [],
        "timings": [],
    }
    out = args.out or RESULTS / f"{report['date'][:10]}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def save():  # after every step, so that a run cut short leaves what it found
        out.write_text(json.dumps(report, indent=1) + "\n")

    checks = []
    for op in ops:
        for fn in CASES[op][0]:
            checks += show_checks(fn)
            report["checks"] = [vars(c) for c in checks]
            save()
    if not args.checks_only:
        report["copy_bytes_per_s"] = bandwidth = copy_bandwidth()
        for row in time_all(ops, bandwidth, json.loads(args.peer.read_text()) if args.peer else {}):
            report["timings"].append(row)
            save()
    failed = [c for c in checks if not c.passed]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks passed; wrote {out}")
    return 1 if failed else 0


def show_checks(fn: Callable) -> list[Check]:
    checks = []
    for check in fn(np.random.default_rng(0)):
        checks.append(check)
        if not check.passed:
            print(f"FAILED {check.op} {check.case} {check.values}", flush=True)
    worst: dict[str, float] = {}
    for name in sorted({k for c in checks for k in c.values}):
        worst[name] = max(c.values.get(name, 0.0) for c in checks)
    ratios = [c.values["error_0"] / c.values["xla_0"] for c in checks if c.values.get("xla_0")]
    ratio = f" error over XLA's at most {max(ratios):.3f}" if ratios else ""
    print(f"{fn.__name__}: {len(checks)} checks, {sum(c.passed for c in checks)} passed;{ratio}", flush=True)
    print("   largest " + ", ".join(f"{k} {v:.2e}" for k, v in worst.items()), flush=True)
    return checks


def time_all(ops: list[str], bandwidth: float, peer: dict[str, float]) -> Iterator[dict]:
    """Times every case of ops and prints its row of the table."""
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    columns = ("us", "again", "floor us", "of floor", "peer us", "speed-up")
    print(f"{'op':12} {'shape':28} {'impl':7} " + " ".join(f"{c:>9}" for c in columns))
    for fn in (fn for op in ops for fn in CASES[op][1]):
        for t in fn(np.random.default_rng(0)):
            us, again = microseconds(t.step, t.carry, t.repeats)
            floor = max(t.floor.bytes / bandwidth, t.floor.flops / PEAK_FLOPS) * 1e6
            other = peer.get(f"{t.op} {t.shape}")
            beside = f"{other:9.1f} {other / us:9.2f}" if other else ""
            numbers = f"{us:9.1f} {again:9.1f} {floor:9.1f} {floor / us:9.2f} {beside}"
            print(f"{t.op:12} {t.shape:28} {t.impl:7} {numbers}", flush=True)
            yield dict(op=t.op, shape=t.shape, impl=t.impl, us=us, again=again, floor_us=floor, peer_us=other)


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
