"""Routing against a float64 sort: ties, bias, renormalisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import route
from tests.conftest import relative_l2
from tests.pallas_kernels.oracles import sigmoid

IMPLS = ["xla", "ref"]


def routed(x, weight, bias, impl, top_k=4, renormalize=True, scale=1.0):
    run = jax.jit(functools.partial(route, top_k=top_k, renormalize=renormalize, scale=scale, impl=impl))
    ids, weights = run(x, weight, bias)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32
    return np.asarray(ids), np.asarray(weights)


def truth(x, weight, bias, top_k, renormalize, scale):
    """Also the smallest gap between neighbours of the order, which says whether float32 may sort otherwise."""
    scores = sigmoid(np.float64(x) @ np.float64(weight))
    order = np.argsort(-(scores + bias), axis=1, kind="stable")
    gap = np.abs(np.diff(np.take_along_axis(scores + bias, order, axis=1), axis=1)).min()
    ids = order[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    if renormalize and top_k > 1:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return ids, weights * scale, gap


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "top_k, renormalize, scale", [(1, True, 1.0), (4, False, 1.0), (4, True, 2.446), (16, True, 1.0)]
)
def test_random(top_k, renormalize, scale, impl):
    rng = np.random.default_rng(8)
    x, weight = np.float32(rng.normal(size=(9, 20))), np.float32(rng.normal(size=(20, 16)) * 0.3)
    bias = np.float32(0.3 * rng.normal(size=16))
    want_ids, want, gap = truth(x, weight, bias, top_k, renormalize, scale)
    assert gap > 1e-5
    ids, weights = routed(x, weight, bias, impl, top_k, renormalize, scale)
    assert np.array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_go_to_the_lower_id(impl):
    x = np.float32([[1.0], [-2.0]])
    weight = np.float32([[0.5, 2, 0.5, 2, 2, -1, 0.5, -1]])
    ids, weights = routed(x, weight, np.zeros(8, np.float32), impl, top_k=5)
    assert ids.tolist() == [[1, 3, 4, 0, 2], [5, 7, 0, 2, 6]]
    ids, weights = routed(0 * x, weight, np.zeros(8, np.float32), impl, top_k=5)
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    np.testing.assert_allclose(weights, 0.2, rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_bias_selects_and_never_weighs(impl):
    x, weight = np.ones((1, 1), np.float32), np.float32([[3, 2, 1, 0]])
    bias = np.float32([-10, 0, 0, 10])
    ids, weights = routed(x, weight, bias, impl, top_k=2, renormalize=False)
    assert ids.tolist() == [[3, 1]]
    np.testing.assert_allclose(weights, [[0.5, sigmoid(np.array(2.0))]], rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_scores_that_vanish(impl):
    """Logits of -200: every score is 0 in float32, and the sum that divides is guarded."""
    ids, weights = routed(np.ones((1, 1), np.float32), np.full((1, 6), -200, np.float32), np.zeros(6, np.float32), impl)
    assert ids.tolist() == [[0, 1, 2, 3]] and not np.any(weights)


@pytest.mark.parametrize("impl", IMPLS)
def test_bfloat16_rows_are_scored_in_float32(impl):
    """896 experts with logits around 2: the order is that of float64, which logits in bfloat16 would lose."""
    rng = np.random.default_rng(9)
    x = jnp.asarray(rng.normal(size=(4, 64)), jnp.bfloat16).at[:, 0].set(1)
    weight, bias = np.float32(rng.normal(size=(64, 896)) * 0.02), np.zeros(896, np.float32)
    weight[0] += 2
    ids, weights = routed(x, weight, bias, impl, top_k=16)
    want_ids, want, _ = truth(np.float64(x), weight, bias, 16, True, 1.0)
    assert np.array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want, rtol=2e-6)
    logits = np.float64(x) @ np.float64(weight)
    assert np.diff(np.sort(logits)[:, -17:]).min() > 1e-5
    rounded = np.float64(jnp.asarray(logits, jnp.bfloat16))
    assert not np.array_equal(np.argsort(-rounded, axis=1, kind="stable")[:, :16], want_ids)


def test_gradient_of_the_weights():
    rng = np.random.default_rng(10)
    x, weight, bias = rng.normal(size=(5, 8)), rng.normal(size=(8, 7)), np.zeros(7)
    ids = truth(x, weight, bias, 3, True, 1.0)[0]

    def by_formula(x, weight):
        s = jnp.take_along_axis(1 / (1 + jnp.exp(-x @ weight)), ids, axis=1)
        return jnp.sum(jnp.sin(3 * s / s.sum(axis=1, keepdims=True)))

    def ours(x, weight):
        weights = route(x, weight, jnp.zeros(7, x.dtype), top_k=3, renormalize=True, scale=1.0)[1]
        return jnp.sum(jnp.sin(3 * weights))

    with jax.enable_x64(True):
        want = jax.grad(by_formula, argnums=(0, 1))(x, weight)
    got = jax.jit(jax.grad(ours, argnums=(0, 1)))(np.float32(x), np.float32(weight))
    for a, b in zip(got, want, strict=True):
        assert relative_l2(a, b) < 1e-5


def test_refusals():
    x, weight, bias = np.zeros((2, 4), np.float32), np.zeros((4, 8), np.float32), np.zeros(8, np.float32)
    how = dict(top_k=2, renormalize=True, scale=1.0)
    with pytest.raises(ValueError, match="top_k 9 is outside 1..8"):
        route(x, weight, bias, **how | {"top_k": 9})
    with pytest.raises(ValueError, match=r"bias \(4,\) do not fit x \(2, 4\)"):
        route(x, weight, bias[:4], **how)
    with pytest.raises(ValueError, match="impl 'radix' cannot be used"):
        route(x, weight, bias, **how, impl="radix")
