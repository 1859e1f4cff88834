"""Peak resident memory of `k3jax.load`: `python -m benchmarks.load`.

Writes random weights with the layer shapes of `mini` (fewer layers, experts and words by default, so that it fits a
small machine), loads them in a fresh process, and prints that process's peak next to the size of the files.
"""

import argparse
import dataclasses
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

import k3jax

ALLOWED = 2 * 2**30  # bytes above the files: two tensors, the runtime and its code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of mini's 13 (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=16, help="of mini's 64 (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=8192, help="of mini's 163840 (default: %(default)s)")
    parser.add_argument("--load", metavar="FOLDER", help="only load FOLDER and print the peak in bytes")
    args = parser.parse_args()
    if args.load:
        jax.block_until_ready(k3jax.load(args.load))
        print(peak_resident())
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.layers, args.experts, args.vocab)
        stored = sum(f.stat().st_size for f in Path(folder).iterdir())
        command = [sys.executable, "-m", "benchmarks.load", "--load", folder]
        peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"files            {stored / 2**30:8.3f} GiB")
    print(f"peak resident    {peak / 2**30:8.3f} GiB")
    print(f"above the files  {(peak - stored) / 2**30:8.3f} GiB, allowed {ALLOWED / 2**30:.0f}")
    return 0 if peak - stored < ALLOWED else 1


def peak_resident() -> int:
    """Bytes. The kernel's own high-water mark: getrusage would count the parent that started this process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def write(folder: Path, layers: int, experts: int, vocab: int) -> None:
    mini = k3jax.preset("mini")
    cfg = dataclasses.replace(
        mini,
        num_hidden_layers=layers,
        layer_types=mini.layer_types[:layers],
        num_experts=experts,
        vocab_size=vocab,
        vision=None,
        **{f"{name}_token_id": i for i, name in enumerate(("bos", "eos", "pad", "media_placeholder"))},
    )
    k3jax.save(folder, cfg, k3jax.init_params(cfg, jax.random.key(0)), shard_bytes=2 * 10**9)


if __name__ == "__main__":
    sys.exit(main())
