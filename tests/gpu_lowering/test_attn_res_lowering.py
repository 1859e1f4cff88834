"""The attention residual kernel compiles for Hopper on a host without a GPU, at K3's width."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attn_res import attn_res_mix

S = jax.ShapeDtypeStruct


@pytest.mark.parametrize(("tokens", "sources", "launches"), [(1024, 9, 1), (4, 9, 0), (1024, 10, 0)])
def test_auto_takes_the_kernel_where_it_is_faster_and_serves(hopper, kernels, tokens, sources, launches):
    rows = [S((tokens, 7168), jnp.bfloat16)] * sources
    mix = lambda w, *rows: attn_res_mix(rows, w, 1e-5)
    assert kernels(mix, S((7168,), jnp.float32), *rows) == launches


def test_a_kernel_that_cannot_serve_says_why(hopper, kernels):
    rows = [S((1024, 100), jnp.bfloat16)]
    with pytest.raises(ValueError, match="triton.*multiple of 64"):
        kernels(lambda w, *rows: attn_res_mix(rows, w, 1e-5, impl="triton"), S((100,), jnp.float32), *rows)
