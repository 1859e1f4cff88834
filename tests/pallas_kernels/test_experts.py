"""Routed experts, dense and packed, against a float64 loop over every chosen pair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import moe_block
from pallas_kernels.moe import Glu, experts
from pallas_kernels.mxfp4 import Mxfp4
from tests.conftest import relative_l2
from tests.pallas_kernels import oracles

N, TOP_K, E, D, F = 23, 3, 8, 32, 64
GLU = Glu("situ", beta=4.0, linear_beta=25.0)
PLAN = jax.jit(moe_block.plan_blocks, static_argnums=(1, 2))
RUN = jax.jit(experts, static_argnames=("glu", "impl"))


def problem(kind, seed=0):
    """x, weights, the matrices as the op takes them and as float64 [E, in, out]."""
    rng = np.random.default_rng(seed)
    x = np.float32(rng.normal(size=(N, D)))
    weights = np.float32(rng.random(size=(N, TOP_K)))
    shapes = (E, F, D), (E, F, D), (E, D, F)  # [E, out, in], as a checkpoint stores them
    if kind == "dense":
        stored = [np.float32(rng.normal(size=s) * s[-1] ** -0.5) for s in shapes]
        return x, weights, [np.swapaxes(w, 1, 2) for w in stored], [np.float64(np.swapaxes(w, 1, 2)) for w in stored]
    packed = [rng.integers(0, 256, (*s[:-1], s[-1] // 2), np.uint8) for s in shapes]
    scale = [rng.integers(121, 126, (*s[:-1], s[-1] // 32), np.uint8) for s in shapes]
    values = [np.swapaxes(oracles.mxfp4_values(*w), 1, 2) for w in zip(packed, scale, strict=True)]
    return x, weights, [Mxfp4(*map(jnp.asarray, w)) for w in zip(packed, scale, strict=True)], values


def distinct(rng):
    return np.int32([rng.permutation(E)[:TOP_K] for _ in range(N)])


ROUTES = {
    "random": distinct(np.random.default_rng(1)),
    "two experts get no token": np.int32([np.random.default_rng(n).choice([0, 2, 3, 6], 3, False) for n in range(N)]),
    "all tokens to one expert": np.full((N, TOP_K), 4, np.int32),
    "some of no expert here": np.where(np.random.default_rng(2).random((N, TOP_K)) < 0.5, -1, distinct(
        np.random.default_rng(3))).astype(np.int32),
    "none of any": np.full((N, TOP_K), E, np.int32),
}  # fmt: skip


@pytest.mark.parametrize("impl", ["xla", "ref"])
@pytest.mark.parametrize("kind", ["dense", "mxfp4"])
@pytest.mark.parametrize("route", ROUTES)
def test_experts(route, kind, impl):
    x, weights, matrices, values = problem(kind)
    y = RUN(x, ROUTES[route], weights, *matrices, glu=GLU, impl=impl)
    assert y.dtype == jnp.float32
    want = oracles.experts(np.float64(x), ROUTES[route], np.float64(weights), *values)
    assert relative_l2(y, want) < 2e-6


@pytest.mark.parametrize("impl", ["xla", "ref"])
@pytest.mark.parametrize("kind", ["dense", "mxfp4"])
def test_parts_of_the_experts_sum_to_the_whole(kind, impl):
    x, weights, matrices, values = problem(kind)
    ids = ROUTES["random"]

    def part(begin, end, ids=ids, first_expert=0):
        own = jax.tree.map(lambda w: w[begin:end], matrices)
        return RUN(x, ids, weights, *own, glu=GLU, first_expert=first_expert, impl=impl)

    parts = [part(begin, begin + 4, first_expert=begin) for begin in (0, 4)]
    want = oracles.experts(np.float64(x), ids, np.float64(weights), *values)
    assert relative_l2(sum(np.float64(p) for p in parts), want) < 2e-6
    assert np.array_equal(parts[1], part(4, 8, ids=ids - 4))


def test_shared_blocks_do_not_mix_rows():
    """A row's result is the same alone, among others, and whatever the others hold."""
    x, weights, matrices, _ = problem("dense")
    ids = ROUTES["random"]
    y = RUN(x, ids, weights, *matrices, glu=GLU)
    other = x.copy()
    other[1:] = np.nan
    assert np.array_equal(RUN(other, ids, weights, *matrices, glu=GLU)[0], y[0])


@pytest.mark.parametrize("tokens, blocks", [(1, 3), (700, None)])
def test_few_and_many_rows(tokens, blocks):
    """One token touches top_k blocks; many tokens fill blocks of up to 128 rows."""
    _, _, matrices, values = problem("dense")
    rng = np.random.default_rng(4)
    x, weights = np.float32(rng.normal(size=(tokens, D))), np.float32(rng.random(size=(tokens, TOP_K)))
    ids = np.int32([rng.permutation(E)[:TOP_K] for _ in range(tokens)])
    y = RUN(x, ids, weights, *matrices, glu=GLU)
    assert relative_l2(y, oracles.experts(np.float64(x), ids, np.float64(weights), *values)) < 2e-6
    if blocks:
        assert moe_block.plan_blocks(ids.reshape(-1), E, moe_block.MIN_ROWS)[0].shape == (blocks,)


@pytest.mark.parametrize("seed", range(4))
def test_plan_of_blocks(seed):
    """Every pair with an expert is in exactly one block, of its expert, in order; nothing else is in any."""
    rng = np.random.default_rng(seed)
    P, experts_, rows = 61, 6, 8
    ids = np.int32(rng.integers(0, experts_ + 1, P) if seed else np.full(P, 2))  # 6: no expert here
    expert, pair = map(np.asarray, PLAN(ids, experts_, rows))
    placed = pair[pair < P]
    assert sorted(placed) == sorted(np.flatnonzero(ids < experts_)) and np.all(pair <= P)
    assert np.array_equal(ids[placed], np.repeat(expert, np.sum(pair < P, axis=1)))
    for e in range(experts_):
        of_expert = pair[expert == e]
        assert np.array_equal(of_expert[of_expert < P], np.flatnonzero(ids == e))


def test_bfloat16():
    x, weights, matrices, values = problem("mxfp4")
    x = jnp.asarray(x, jnp.bfloat16)
    y = RUN(x, ROUTES["random"], weights, *matrices, glu=GLU)
    assert y.dtype == jnp.float32  # only the activation between the two products is rounded
    want = oracles.experts(np.float64(x), ROUTES["random"], np.float64(weights), *values)
    assert relative_l2(y, want) < 2**-9


def test_silu():
    x, weights, matrices, values = problem("dense")
    y = RUN(x, ROUTES["random"], weights, *matrices, glu=Glu("silu"))
    silu = lambda gate, up: gate * oracles.sigmoid(gate) * up
    want = oracles.experts(np.float64(x), ROUTES["random"], np.float64(weights), *values, glu=silu)
    assert relative_l2(y, want) < 2e-6


@pytest.mark.parametrize(
    "kind, at_once", [("dense", 0), ("dense", moe_block.GATHERED_BYTES), ("mxfp4", moe_block.GATHERED_BYTES)]
)
def test_gradients(kind, at_once, monkeypatch):
    """Against automatic differentiation of a dense float64 formula: every expert on every row, weighted."""
    monkeypatch.setattr(moe_block, "GATHERED_BYTES", at_once)  # 0: blocks one by one
    x, weights, matrices, values = problem(kind)
    ids = ROUTES["some of no expert here"]

    def dense(x, weights, w1, w3, w2):
        g, u = jnp.einsum("nd,edf->nef", x, w1), jnp.einsum("nd,edf->nef", x, w3)
        h = 4 * jnp.tanh(g / 4) * jax.nn.sigmoid(g) * 25 * jnp.tanh(u / 25)
        share = jnp.einsum("nk,nke->ne", weights, jnp.asarray(ids[..., None] == np.arange(E), weights.dtype))
        return jnp.sum(jnp.sin(jnp.einsum("ne,nef,efd->nd", share, h, w2)))

    def ours(x, weights, *matrices):
        return jnp.sum(jnp.sin(experts(x, ids, weights, *matrices, glu=GLU)))

    which = range(5 if kind == "dense" else 2)
    with jax.enable_x64(True):
        want = jax.jit(jax.grad(dense, argnums=which))(np.float64(x), np.float64(weights), *values)
    got = jax.jit(jax.grad(ours, argnums=which))(x, weights, *matrices)
    for name, a, b in zip(["x", "weights", "w1", "w3", "w2"], got, want, strict=False):
        assert relative_l2(a, b) < 1e-5, name


@pytest.mark.parametrize(
    "change, message",
    [
        ({"ids": np.zeros((N, 2), np.int32)}, r"ids \(23, 2\), weights \(23, 3\).* do not fit"),
        ({"w2": np.zeros((E, D, D))}, r"w2 \(8, 32, 32\) \(experts, in, out\) do not fit"),
        ({"impl": "pallas"}, "impl 'pallas' cannot be used"),
    ],
)
def test_refusals(change, message):
    x, weights, (w1, w3, w2), _ = problem("dense")
    arguments = dict(x=x, ids=ROUTES["random"], weights=weights, w1=w1, w3=w3, w2=w2, glu=GLU)
    with pytest.raises(ValueError, match=message):
        functools.partial(experts, **arguments | change)()
