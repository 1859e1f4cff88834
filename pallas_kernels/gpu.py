"""Where a program will run, and how a Triton kernel gets into it.

The call is jax-triton's, reduced to what these kernels use, plus `registers`: a cap on the registers of a thread, which
decides how many programs share a multiprocessor and which jax-triton does not pass on.
"""

import functools
import importlib.util
import zlib
from collections.abc import Sequence
from typing import Any

import jax

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
CAPABILITY = 90
MAX_GRID = 65535  # programs along the second and third axis of a grid
_TYPES = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int32": "*i32"}


def device_kind() -> str:
    """Kind of the device that is traced for: the abstract mesh's if one is set, else the default device's."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described is not None else jax.devices()[0].device_kind


def on_hopper() -> bool:
    return any(name in device_kind().split() for name in HOPPER)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not_triton() -> str | None:
    """The reason why no Triton kernel can run on the target device, None if they can."""
    if not on_hopper():
        return f"the device is {device_kind()!r} and the kernel is written for NVIDIA Hopper"
    if not has_triton():
        return "the package triton is missing (pip install 'k3jax[cuda]')"
    return None


def differentiable(forward, definition):
    """`forward`, differentiated as `definition`, which computes the same function of the same arguments."""

    @jax.custom_vjp
    def op(*args):
        return forward(*args)

    def op_fwd(*args):
        return forward(*args), args

    def op_bwd(args, cotangents):
        return jax.vjp(definition, *args)[1](cotangents)

    op.defvjp(op_fwd, op_bwd)
    return op


def like(a: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)


def triton_call(
    *args: jax.Array,
    kernel: Any,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    num_warps: int,
    num_stages: int = 3,
    registers: int | None = None,
    fuse: bool = True,
    aliases: dict[int, int] | None = None,
    zeroed: Sequence[int] = (),
    **constants: Any,
) -> Sequence[jax.Array]:
    """Compile `kernel(*args, *outputs, **constants)` for Hopper, which needs no GPU, and call it.

    aliases maps inputs to the outputs that share their memory; outputs in `zeroed` are cleared before the launch; fuse
    lets the compiler contract a * b + c.
    """
    types = [str(a.dtype) for a in args] + [str(o.dtype) for o in out_shape]
    signature = tuple(_TYPES[t] for t in types)
    options = (("num_warps", num_warps), ("num_stages", num_stages), ("enable_fp_fusion", fuse), ("maxnreg", registers))
    compiled = compile_kernel(kernel, signature, tuple(sorted(constants.items())), options)
    clear = [0] * len(args) + [o.size * o.dtype.itemsize if i in zeroed else 0 for i, o in enumerate(out_shape)]
    return jax.ffi.ffi_call(
        "triton_kernel_call_ffi",
        out_shape,
        input_output_aliases=aliases or {},
    )(*args, opaque=_launch(compiled, name, (*grid, 1, 1)[:3], clear, num_warps))


@functools.cache
def compile_kernel(kernel, signature, constants, options):
    """Triton's compiled kernel; the arrays of signature, all aligned to 16 bytes, come first in its arguments."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arrays = dict(zip(kernel.arg_names, signature, strict=False))
    source = ASTSource(
        kernel,
        constexprs=dict(constants),
        signature={n: arrays.get(n, "constexpr") for n in kernel.arg_names},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(signature))},
    )
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=dict(options))


def _launch(compiled, name: str, grid: tuple[int, ...], clear: Sequence[int], num_warps: int) -> bytes:
    """The launch as XLA's Triton call reads it; empty on a host without JAX's CUDA plugin, where nothing can launch."""
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "TritonKernel"):
        return b""
    asm, shared = compiled.asm, compiled.metadata.shared
    kernel = gpu_triton.TritonKernel(
        compiled.metadata.name, num_warps, 1, shared, asm["ptx"], str(asm["ttir"]), CAPABILITY
    )
    parameters = [gpu_triton.create_array_parameter(nbytes, 16) for nbytes in clear]
    call = gpu_triton.TritonKernelCall(kernel, *grid, parameters)
    return zlib.compress(call.to_proto(name, b""))
