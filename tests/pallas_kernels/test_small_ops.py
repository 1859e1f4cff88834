"""Attention residual, gated activations, RMS norm and the short convolution against their formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res_mix
from pallas_kernels.conv import short_conv
from pallas_kernels.glu import Glu, silu_glu, situ_glu
from pallas_kernels.norm import rms_norm
from tests.conftest import relative_l2
from tests.pallas_kernels.oracles import sigmoid, situ

EPS = 1e-5


def rms(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def mix(sources, weight):
    """sources [n, ..., D]."""
    scores = rms(sources, weight).sum(axis=-1)
    p = np.exp(scores - scores.max(axis=0))
    return np.sum((p / p.sum(axis=0))[..., None] * sources, axis=0)


@pytest.mark.parametrize("impl", ["xla", "ref"])
@pytest.mark.parametrize("n", [1, 2, 9])
def test_attention_residual(n, impl):
    rng = np.random.default_rng(n)
    sources = rng.normal(size=(n, 6, 48)) * 10.0 ** rng.integers(-4, 5, size=(n, 6, 1))
    sources[0, 0] = 0
    weight = rng.normal(size=48)
    run = jax.jit(functools.partial(attn_res_mix, eps=EPS, impl=impl))
    rows = np.float32(sources)
    assert relative_l2(run(list(rows), np.float32(weight)), mix(sources, weight)) < 1e-5
    if n == 2:  # one stacked array is the same call
        assert np.array_equal(run(rows, np.float32(weight)), run(list(rows), np.float32(weight)))


@pytest.mark.parametrize("impl", ["xla", "ref"])
def test_attention_residual_of_large_scores_and_bfloat16(impl):
    rng = np.random.default_rng(3)
    sources, weight = rng.normal(size=(4, 6, 48)), rng.normal(size=48)
    run = jax.jit(functools.partial(attn_res_mix, eps=EPS, impl=impl))
    assert relative_l2(run(list(np.float32(sources)), np.float32(1e4 * weight)), mix(sources, 1e4 * weight)) < 1e-3
    rounded = jnp.asarray(sources, jnp.bfloat16)
    out = run(list(rounded), np.float32(weight))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(out), mix(np.float64(rounded), weight), rtol=2**-8, atol=1e-5)


def test_attention_residual_gradient():
    """dv_l = p_l dmix + dscore_l dscore/dv_l, dscore_l = p_l (dmix . v_l - sum_j p_j dmix . v_j): spec kernels 9."""
    rng = np.random.default_rng(4)
    v, weight, dmix = rng.normal(size=(3, 5, 16)), rng.normal(size=16), rng.normal(size=(5, 16))
    rstd = 1 / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + EPS)
    unit = v * rstd
    p = np.exp(unit @ weight)
    p = (p / p.sum(axis=0))[..., None]
    along = np.sum(dmix * v, axis=-1, keepdims=True)
    dscore = p * (along - np.sum(p * along, axis=0))
    dv = p * dmix + dscore * rstd * (weight - unit * np.mean(unit * weight, axis=-1, keepdims=True))
    for impl in ("xla", "ref"):
        loss = lambda v, w, impl=impl: jnp.vdot(attn_res_mix(list(v), w, EPS, impl=impl), np.float32(dmix))
        got_v, got_weight = jax.jit(jax.grad(loss, argnums=(0, 1)))(np.float32(v), np.float32(weight))
        assert relative_l2(got_v, dv) < 1e-5
        assert relative_l2(got_weight, np.sum(dscore * unit, axis=(0, 1))) < 1e-5


LARGE = np.concatenate([np.linspace(-12, 12, 97), [-1e30, -1e4, -300, -88.5, 88.5, 300, 1e4, 1e30]])


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ_at_any_size(linear_beta):
    gate, up = (a.ravel() for a in np.meshgrid(LARGE, LARGE if linear_beta else LARGE[:97]))
    out = jax.jit(lambda g, u: situ_glu(g, u, 4.0, linear_beta))(np.float32(gate), np.float32(up))
    want = situ(gate, up, 4.0, linear_beta)
    np.testing.assert_allclose(out, want, rtol=3e-6, atol=1e-30)
    if linear_beta:
        assert np.abs(out).max() <= 100


def test_silu_at_any_size():
    gate, up = (a.ravel() for a in np.meshgrid(LARGE, LARGE[:97]))
    np.testing.assert_allclose(silu_glu(np.float32(gate), np.float32(up)), gate * sigmoid(gate) * up, 3e-6, 1e-30)


def test_situ_gradient():
    """(1 - t^2) s + b t s (1 - s) by gate and 1 - tanh^2(u / b2) by up, finite wherever (spec kernels 11)."""
    gate, up = (a.ravel() for a in np.meshgrid(LARGE, LARGE))
    t, s, cap = np.tanh(gate / 4), sigmoid(gate), np.tanh(up / 25)
    got = jax.jit(jax.grad(lambda g, u: jnp.sum(situ_glu(g, u, 4.0, 25.0)), argnums=(0, 1)))
    by_gate, by_up = got(np.float32(gate), np.float32(up))
    np.testing.assert_allclose(by_gate, ((1 - t * t) * s + 4 * t * s * (1 - s)) * 25 * cap, rtol=1e-4, atol=2e-5)
    np.testing.assert_allclose(by_up, 4 * t * s * (1 - cap * cap), rtol=1e-4, atol=2e-6)


def test_activation_as_a_value():
    gate, up = np.float32([[-3.0, 0.5, 2.0]]), np.float32([[30.0, -1.0, 0.25]])
    assert np.array_equal(Glu()(gate, up), situ_glu(gate, up, 4.0, 25.0))
    assert np.array_equal(Glu("situ", 2.0, None)(gate, up), situ_glu(gate, up, 2.0, None))
    assert np.array_equal(Glu("silu")(gate, up), silu_glu(gate, up))
    rounded = Glu()(jnp.asarray(gate, jnp.bfloat16), jnp.asarray(up, jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(rounded), situ(gate, up), rtol=2**-8)
    with pytest.raises(ValueError, match="kind is 'gelu', supported are"):
        Glu("gelu")


def test_rms_norm():
    rng = np.random.default_rng(5)
    x = rng.normal(size=(7, 33)) * 10.0 ** rng.integers(-8, 9, size=(7, 1))
    x[0] = 0
    weight = rng.normal(size=33)
    y = rms_norm(np.float32(x), np.float32(weight), EPS)
    np.testing.assert_allclose(y, rms(x, weight), rtol=1e-5)
    rounded = jnp.asarray(x, jnp.bfloat16)
    y = rms_norm(rounded, np.float32(weight), EPS)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(y), rms(np.float64(rounded), weight), rtol=2**-8)


def convolve(x, weight, state, activation):
    """x [B, T, C], weight [C, W], state [B, W-1, C] -> y [B, T, C]."""
    rows = np.concatenate([state, x], axis=1)
    W = weight.shape[-1]
    y = np.stack([np.einsum("bwc,cw->bc", rows[:, t : t + W], weight) for t in range(x.shape[1])], axis=1)
    return y * sigmoid(y) if activation == "silu" else y


@pytest.mark.parametrize("activation", ["silu", None])
def test_short_convolution_of_ragged_rows(activation):
    """Rows from n_valid on hold NaN: they reach neither the rows before them nor the window."""
    rng = np.random.default_rng(6)
    n_valid = np.array([0, 1, 2, 3, 5, 8])
    x, weight, state = rng.normal(size=(6, 8, 2, 3)), rng.normal(size=(2, 3, 4)), rng.normal(size=(6, 3, 2, 3))
    poisoned = np.where((np.arange(8) < n_valid[:, None])[..., None, None], x, np.nan)
    run = jax.jit(functools.partial(short_conv, activation=activation))
    y, window = run(*map(np.float32, (poisoned, weight, state)), np.int32(n_valid))
    want = convolve(x.reshape(6, 8, 6), weight.reshape(6, 4), state.reshape(6, 3, 6), activation).reshape(x.shape)
    for b, n in enumerate(n_valid):
        np.testing.assert_allclose(y[b, :n], want[b, :n], rtol=0, atol=1e-5)
        assert np.array_equal(window[b], np.float32(np.concatenate([state[b], x[b, :n]])[n:]))

    def loss(x, weight, state):
        y, window = short_conv(x, weight, state, np.int32(n_valid), activation=activation)
        return jnp.sum(jnp.where((np.arange(8) < n_valid[:, None])[..., None, None], y, 0) ** 2) + jnp.sum(window**2)

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    clean = gradients(*map(np.float32, (x, weight, state)))
    for got, expected in zip(gradients(*map(np.float32, (poisoned, weight, state))), clean, strict=True):
        assert np.array_equal(got, expected) and np.any(got)


def test_short_convolution_of_bfloat16():
    rng = np.random.default_rng(7)
    x, state = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((2, 5, 6), (2, 3, 6)))
    weight = np.float32(rng.normal(size=(6, 4)))
    y, window = short_conv(x, weight, state)
    assert y.dtype == window.dtype == jnp.bfloat16
    want = convolve(*(np.float64(a) for a in (x, weight, state)), "silu")
    np.testing.assert_allclose(np.float64(y), want, rtol=2**-8, atol=1e-6)
    assert np.array_equal(window, x[:, 2:])


def test_refusals():
    x, weight = np.zeros((2, 5, 6), np.float32), np.zeros((6, 4), np.float32)
    with pytest.raises(ValueError, match=r"state \(2, 4, 6\) do not fit x \(2, 5, 6\); pass"):
        short_conv(x, weight, np.zeros((2, 4, 6), np.float32))
    with pytest.raises(ValueError, match="activation is 'relu', supported are"):
        short_conv(x, weight, np.zeros((2, 3, 6), np.float32), activation="relu")
    with pytest.raises(ValueError, match=r"score_weight \(5,\) do not fit"):
        attn_res_mix([x, x], np.zeros(5, np.float32), EPS)
    with pytest.raises(ValueError, match="at least one source"):
        attn_res_mix([], np.zeros(5, np.float32), EPS)
