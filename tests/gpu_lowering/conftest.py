"""A Hopper GPU to trace for, described rather than present (spec kernels 15.5)."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh


@pytest.fixture
def hopper():
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        yield


@pytest.fixture
def kernels():
    """kernels(fn, *args): Triton launches of fn lowered for CUDA; every kernel is compiled to PTX on the way."""

    def count(fn, *args) -> int:
        lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",))
        return lowered.as_text().count("@triton_kernel_call_ffi")

    return count
