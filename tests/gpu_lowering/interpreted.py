"""The Triton kernels run by Triton's interpreter on numpy arrays, against the definitions in float64.

python -m tests.gpu_lowering.interpreted prints one JSON object of relative errors. A process of its own, because
TRITON_INTERPRET must be set before a kernel is decorated. The interpreter cuts where it should round to bfloat16, so
float32 inputs carry the comparison.
"""

import json
import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from triton.runtime.interpreter import GridExecutor  # noqa: E402

from pallas_kernels import attn_res_triton, kda_decode, kda_decode_triton, kda_gpu, kda_prefill_triton  # noqa: E402
from pallas_kernels.attn_res import attn_res_mix  # noqa: E402
from pallas_kernels.kda_prefill import kda_prefill  # noqa: E402
from tests.conftest import relative_l2  # noqa: E402

H, K, EPS = 1, 128, 1e-5
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int32": "i32"}


class Pointer:
    """A numpy array as the interpreter takes a device array."""

    def __init__(self, array):
        self.array, self.dtype = array, TYPES[str(array.dtype)]

    def data_ptr(self):
        return self.array.ctypes.data


class Executor(GridExecutor):
    """Arguments stay where they are; the original copies them with PyTorch."""

    def _init_args_hst(self, args, kwargs):
        return args, kwargs

    def _restore_args_dev(self, *unused):
        pass


def call(*args, kernel, name, grid, out_shape, num_warps, num_stages=3, registers=None, fuse=True, aliases=None,
         zeroed=(), **constants):  # fmt: skip
    """`gpu.triton_call`; outputs start as NaN, or 77 where they are integers."""
    inputs = [np.array(a) for a in args]
    outputs = [np.full(o.shape, 0 if i in zeroed else np.nan, o.dtype) for i, o in enumerate(out_shape)]
    for i, o in (aliases or {}).items():
        outputs[o] = inputs[i]
    Executor(kernel.rewrite(), kernel.arg_names, grid, [])(*map(Pointer, (*inputs, *outputs)), **constants)
    return [jnp.asarray(o) for o in outputs]


def prefill(bound, f_value=None, scale=1.0) -> dict[str, float]:
    """Packed sequences of 1 to 65 tokens, one empty, rows of no sequence NaN; kept states after every 32 tokens."""
    rng = np.random.default_rng(0)
    cu = np.cumsum([0, 33, 1, 0, 65, 16]).astype(np.int32)
    T, S, used = int(cu[-1]) + 7, len(cu) - 1, int(cu[-1])
    q, k, v, f = rng.standard_normal((4, T, H, K))
    v = v * scale
    f = f if f_value is None else np.full_like(f, f_value)
    b, a_log, dt_bias = rng.standard_normal((T, H)), rng.standard_normal(H), rng.standard_normal((H, K))
    initial = rng.standard_normal((S, H, K, K)).astype(np.float32)
    inputs = [jnp.asarray(a, jnp.float32).at[used:].set(jnp.nan) for a in (q, k, v, f, b)]
    gates = [jnp.asarray(a, jnp.float32) for a in (a_log, dt_bias)]
    chunks = kda_gpu.cut_packed(T, jnp.asarray(cu), 32)
    options = dict(raw=True, bound=bound, snapshots=T // 32)
    o, final, states = kda_prefill_triton.prefill(*inputs, *gates, jnp.asarray(initial), chunks, **options)
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in (*(a[None] for a in inputs), *gates, initial)]
        want = kda_prefill(
            *wide, cu_seqlens=jnp.asarray(cu), lower_bound=bound, chunk_size=32, return_states=True, impl="ref"
        )
        errors = [
            relative_l2(g, w) for g, w in zip((o[:used], final, states), (want[0][0, :used], *want[1:]), strict=True)
        ]
    return dict(zip(("o", "final", "states"), errors, strict=True)) | {"tail": float(np.abs(o[used:]).max())}


def decode(bound) -> dict[str, float]:
    rng = np.random.default_rng(1)
    B, R, P = 3, 3, 5
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    rows = kda_decode.KdaRows(normal(B, R, 3, H, K), normal(B, R, H, K), normal(B, R, H), normal(B, R, H, K))
    heads = kda_decode.KdaHeads(normal(3, H, K, 4), normal(H), normal(H, K), normal(K))
    states, windows = normal(P, H, K, K), normal(P, 3, 3, H, K)
    slots, count = jnp.array([4, -1, 2], jnp.int32), jnp.array([3, 3, 1], jnp.int32)
    options = dict(lower_bound=bound, eps=EPS, impl="xla")
    one = jax.tree.map(lambda a: a[:, 0], rows)
    pools = (heads, states, windows, slots)
    got = kda_decode_triton.decode(one, *pools, bound, EPS)
    out, record = kda_decode_triton.verify(rows, *pools, bound, EPS)
    folded = kda_decode_triton.fold(kda_decode.KdaRecord(*record), rows.qkv, states, windows, slots, count)
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), tree)
        exact = (*wide((heads, states, windows)), slots)
        want = kda_decode.kda_decode(wide(one), *exact, **options)
        want_out, want_record = kda_decode.kda_verify(wide(rows), *exact, **options)
        want_folded = kda_decode.kda_fold(want_record, *wide((rows.qkv, states, windows)), slots, count, impl="xla")
        pairs = {"decode": (got, want), "verify": ((out,), (want_out,)), "fold": (folded, want_folded)}
        return {
            f"{n} {i}": relative_l2(*p) for n, (g, w) in pairs.items() for i, p in enumerate(zip(g, w, strict=True))
        }


def mix() -> dict[str, float]:
    rng = np.random.default_rng(2)
    sources = [jnp.asarray(rng.standard_normal((3, 192)) * 2**n, jnp.float32) for n in range(4)]
    weight = jnp.asarray(rng.standard_normal(192) * 0.2, jnp.float32)
    return {
        "mix": relative_l2(attn_res_triton.mix(sources, weight, EPS), attn_res_mix(sources, weight, EPS, impl="ref"))
    }


if __name__ == "__main__":
    for module in (attn_res_triton, kda_decode_triton, kda_prefill_triton):
        module.triton_call = call  # type: ignore[attr-defined]
    report = {
        "prefill": prefill(-5.0),
        "prefill without a bound": prefill(None),
        "prefill, all gates at -5": prefill(-5.0, f_value=60.0),
        "prefill, all gates at 0": prefill(-5.0, f_value=-200.0),
        "prefill, values near 1e6": prefill(-5.0, scale=1e6),
        "decode": decode(-5.0),
        "decode without a bound": decode(None),
        "mix": mix(),
    }
    print(json.dumps(report))
