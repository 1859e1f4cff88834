"""Chunked KDA against a float64 run token by token, forward and backward, over random shapes and gates."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda
from pallas_kernels.kda_ref import kda_recurrent
from tests.conftest import relative_l2
from tests.pallas_kernels.oracles import kda_backward, kda_forward, kda_inputs

GATES = ["mixed", "floor", "none", "split", "spike", "slow", "unbounded"]
NAMES = ["q", "k", "v", "g", "beta", "initial state"]


def random_shapes(count):
    """(B, T, H, K, V, gate, chunk size), every one different; the length crosses tiles, chunks and 1 to 700."""
    rng = np.random.default_rng(7)
    edges = itertools.cycle([1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 700])
    shapes: dict[tuple, tuple] = {}
    while len(shapes) < count:
        i = len(shapes)
        T = next(edges) if i % 3 == 0 else int(rng.integers(1, 701))
        B, H, K, V = (int(rng.integers(1, high)) for high in (4, 4, 25, 25))
        shapes.setdefault((B, T, H, K, V), (GATES[i % len(GATES)], (64, 16, 32)[i % 3]))
    return [(*shape, *rest) for shape, rest in shapes.items()]


def check(shape, with_gradients):
    B, T, H, K, V, gate, chunk_size = shape
    rng = np.random.default_rng([B, T, H, K, V])
    inputs = kda_inputs(rng, B, T, H, K, V, gate)
    do, dstate = rng.normal(size=(B, T, H, V)), rng.normal(size=(B, H, K, V))
    bound = None if gate == "unbounded" else -5.0

    def run(*args):
        return kda(*args, lower_bound=bound, chunk_size=chunk_size)

    @jax.jit
    def both(args, cotangents):
        out, pullback = jax.vjp(run, *args)
        return out, pullback(cotangents)

    single = [jnp.asarray(a, jnp.float32) for a in inputs]
    if with_gradients:
        (o, final), gradients = both(single, (jnp.asarray(do, jnp.float32), jnp.asarray(dstate, jnp.float32)))
        wanted = kda_backward(*inputs, do, dstate)
        for name, got, want in zip(NAMES, gradients, wanted, strict=True):
            assert relative_l2(got, want) < 1e-4, (name, shape)
    else:
        o, final = jax.jit(run)(*single)
    want_o, want_states = kda_forward(*inputs)
    assert relative_l2(o, want_o) < 1e-5, shape
    assert relative_l2(final, want_states[:, -1]) < 1e-5, shape


@pytest.mark.parametrize("i", range(12))
def test_random_shapes(i):
    check(random_shapes(12)[i], with_gradients=i % 4 == 2)


@pytest.mark.slow
def test_two_hundred_random_shapes():
    with ThreadPoolExecutor(2) as pool:  # nearly all of the time is compilation, which runs outside the GIL
        list(pool.map(lambda shape: check(shape, with_gradients=True), random_shapes(200)))


@pytest.mark.parametrize("gate, chunk_size", [("mixed", 16), ("floor", 64), ("unbounded", 32)])
def test_float64_agrees_to_the_last_digits(gate, chunk_size):
    """Rounding aside, the chunked form is the recurrence: float64 inputs leave no room for a wrong term."""
    rng = np.random.default_rng(3)
    inputs = kda_inputs(rng, 2, 75, 2, 8, 6, gate)
    bound = None if gate == "unbounded" else -5.0
    with jax.enable_x64(True):
        o, final = jax.jit(lambda *a: kda(*a, lower_bound=bound, chunk_size=chunk_size))(*map(jnp.asarray, inputs))
        assert o.dtype == final.dtype == jnp.float64
    want_o, want_states = kda_forward(*inputs)
    assert relative_l2(o, want_o) < 1e-13
    assert relative_l2(final, want_states[:, -1]) < 1e-13


def test_backward_by_hand_is_the_gradient_of_the_definition():
    """Ties the truth of this file to automatic differentiation of the recurrence, both in float64."""
    rng = np.random.default_rng(4)
    inputs = kda_inputs(rng, 2, 9, 2, 5, 3)
    do, dstate = rng.normal(size=(2, 9, 2, 3)), rng.normal(size=(2, 2, 5, 3))
    with jax.enable_x64(True):
        loss = lambda *a: sum(jnp.vdot(out, w) for out, w in zip(kda_recurrent(*a)[:2], (do, dstate), strict=True))
        gradients = jax.jit(jax.grad(loss, argnums=range(6)))(*map(jnp.asarray, inputs))
    for got, want in zip(gradients, kda_backward(*inputs, do, dstate), strict=True):
        assert relative_l2(got, want) < 1e-13
