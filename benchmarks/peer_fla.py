"""Times of fla-core's KDA on the same card, for the peer column: python -m benchmarks.peer_fla OUT.json

It needs PyTorch and fla-core, which this project does not depend on, and a process without JAX on the GPU.
"""

import json
import sys
from pathlib import Path

import torch
import triton
from fla.ops.kda import chunk_kda


def inputs(T, H):
    def normal(*shape, **kw):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, **kw)

    q, k, v, g = (normal(1, T, H, 128) for _ in range(4))
    a_log = torch.randn(H, device="cuda")
    return q, k, v, g, normal(1, T, H), a_log, torch.randn(H * 128, device="cuda")


def main(out: Path) -> None:
    times = {}
    for T, H in ((8192, 96), (8192, 12), (32768, 12), (8192, 32)):
        q, k, v, g, b, a_log, dt_bias = inputs(T, H)
        bounded = dict(safe_gate=True, lower_bound=-5.0) if H != 32 else {}

        def forward(q=q, k=k, v=v, g=g, b=b, a_log=a_log, dt_bias=dt_bias, bounded=bounded):
            return chunk_kda(
                q, k, v, g, torch.sigmoid(b), A_log=a_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, output_final_state=True, **bounded,
            )  # fmt: skip

        with torch.no_grad():
            forward()
            times[f"kda_prefill B1 T{T} H{H}"] = 1e3 * triton.testing.do_bench(
                forward, warmup=50, rep=200, return_mode="median"
            )
        print(f"B1 T{T} H{H}", times[f"kda_prefill B1 T{T} H{H}"], "us", flush=True)
    out.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
