"""The attention residual kernel compiles for Hopper on a host without a GPU, at K3's width."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attn_res import attn_res_mix

S = jax.ShapeDtypeStruct


@pytest.mark.parametrize("sources", [2, 9])
def test_the_kernel_compiles(hopper, kernels, sources):
    rows = [S((1024, 7168), jnp.bfloat16)] * sources
    assert kernels(lambda w, *rows: attn_res_mix(rows, w, 1e-5, impl="triton"), S((7168,), jnp.float32), *rows) == 1


def test_a_kernel_that_cannot_serve_says_why(hopper, kernels):
    rows = [S((1024, 100), jnp.bfloat16)]
    with pytest.raises(ValueError, match="triton.*multiple of 64"):
        kernels(lambda w, *rows: attn_res_mix(rows, w, 1e-5, impl="triton"), S((100,), jnp.float32), *rows)
