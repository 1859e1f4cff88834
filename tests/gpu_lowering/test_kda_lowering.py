"""Every KDA kernel compiles for Hopper on a host without a GPU, at K3's and the 48B's shapes (spec kernels 15.5)."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import kda_decode as dec
from pallas_kernels.kda import kda
from pallas_kernels.kda_prefill import kda_prefill

K = 128
MODELS = {"k3": (96, -5.0), "48b": (32, None), "k3 on 8 devices": (12, -5.0)}  # heads, lower bound of the log-decay
EVERY = [*list(MODELS)[:2], pytest.param("k3 on 8 devices", marks=pytest.mark.slow)]
S, bf16, f32, i32 = jax.ShapeDtypeStruct, jnp.bfloat16, jnp.float32, jnp.int32


def rows(*lead, H):
    return dec.KdaRows(
        qkv=S((*lead, 3, H, K), bf16), f=S((*lead, H, K), bf16), b=S((*lead, H), f32), gate=S((*lead, H, K), bf16)
    )


def pools(P, H):
    return S((P, H, K, K), f32), S((P, 3, 3, H, K), bf16)


@pytest.mark.parametrize("model", EVERY)
def test_decode_verify_and_fold_compile(hopper, kernels, model):
    H, bound = MODELS[model]
    heads = dec.KdaHeads(conv=S((3, H, K, 4), f32), a_log=S((H,), f32), dt_bias=S((H, K), f32), norm=S((K,), f32))
    slots, options = S((64,), i32), dict(lower_bound=bound, eps=1e-5, impl="triton")
    decode = lambda *a: dec.kda_decode(*a, **options)
    assert kernels(decode, rows(64, H=H), heads, *pools(70, H), slots) == 1
    verify = lambda *a: dec.kda_verify(*a, **options)
    assert kernels(verify, rows(64, 8, H=H), heads, *pools(70, H), slots) == 1
    record = jax.eval_shape(verify, rows(64, 8, H=H), heads, *pools(70, H), slots)[1]
    fold = lambda *a: dec.kda_fold(*a, impl="triton")
    assert kernels(fold, record, S((64, 8, 3, H, K), bf16), *pools(70, H), slots, slots) == 1


@pytest.mark.parametrize("model", EVERY)
def test_prefill_compiles(hopper, kernels, model):
    H, bound = MODELS[model]
    wide, tokens = S((1, 8192, H, K), bf16), S((1, 8192, H), bf16)
    inputs = (wide, wide, wide, wide, tokens, S((H,), f32), S((H, K), f32))
    assert kernels(lambda *a: kda_prefill(*a, lower_bound=bound, impl="triton"), *inputs) == 2
    packed = lambda cu, *a: kda_prefill(*a, cu_seqlens=cu, lower_bound=bound, return_states=True, impl="triton")
    assert kernels(packed, S((9,), i32), *inputs) == 2


def test_kda_of_prepared_inputs_compiles(hopper, kernels):
    wide = S((2, 256, 96, K), bf16)
    assert (
        kernels(
            lambda *a: kda(*a, lower_bound=-5.0, impl="triton"),
            *(wide, wide, wide, S(wide.shape, f32), S((2, 256, 96), f32)),
        )
        == 2
    )


def test_gradient_runs_the_xla_path_backward(hopper, kernels):
    wide = S((1, 64, 2, K), bf16)
    loss = lambda q, k, v, g, beta: kda(q, k, v, g, beta, lower_bound=-5.0, impl="triton")[0].astype(f32).sum()
    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))
    assert kernels(value_and_grad, wide, wide, wide, S(wide.shape, f32), S((1, 64, 2), f32)) == 2


@pytest.mark.parametrize(
    ("K", "dtype", "chunk", "reason"),
    [(64, bf16, 64, "128 key"), (128, f32, 64, "bfloat16"), (128, bf16, 16, "chunks")],
)
def test_auto_leaves_what_the_kernel_cannot_serve_to_xla(hopper, kernels, K, dtype, chunk, reason):
    wide = S((1, 64, 2, K), dtype)
    inputs = (wide, wide, wide, wide, S((1, 64, 2), f32))
    assert kernels(lambda *a: kda(*a, lower_bound=-5.0, chunk_size=chunk), *inputs) == 0
    with pytest.raises(ValueError, match=f"triton.*{reason}"):
        kernels(lambda *a: kda(*a, lower_bound=-5.0, chunk_size=chunk, impl="triton"), *inputs)


@pytest.mark.parametrize(
    ("states", "kept_as", "reason"),
    [((4, 2, K, K), f32, "float16"), ((4, 2, 64, 64), f32, "128 channels"), ((4, 2, K, K), bf16, "float32 states")],
)
def test_decode_leaves_what_the_kernel_cannot_serve_to_xla(hopper, kernels, states, kept_as, reason):
    width = states[-1]
    dtype = jnp.float16 if reason == "float16" else bf16
    row = dec.KdaRows(
        qkv=S((3, 3, 2, width), dtype), f=S((3, 2, width), dtype), b=S((3, 2), f32), gate=S((3, 2, width), dtype)
    )
    heads = dec.KdaHeads(
        conv=S((3, 2, width, 4), f32), a_log=S((2,), f32), dt_bias=S((2, width), f32), norm=S((width,), f32)
    )
    inputs = (row, heads, S(states, kept_as), S((4, 3, 3, 2, width), dtype), S((3,), i32))
    decode = lambda *a, impl="auto": dec.kda_decode(*a, lower_bound=-5.0, eps=1e-5, impl=impl)
    assert kernels(decode, *inputs) == 0
    with pytest.raises(ValueError, match=f"kda_decode: impl 'triton' .*{reason}"):
        kernels(lambda *a: decode(*a, impl="triton"), *inputs)


def test_auto_on_a_cpu_is_xla_and_an_explicit_kernel_says_why_not(kernels):
    wide = S((1, 64, 2, K), bf16)
    inputs = (wide, wide, wide, wide, S((1, 64, 2), f32))
    assert kernels(lambda *a: kda(*a, lower_bound=-5.0), *inputs) == 0
    with pytest.raises(ValueError, match="'cpu'.*Hopper"):
        jax.eval_shape(lambda *a: kda(*a, lower_bound=-5.0, impl="triton"), *inputs)
