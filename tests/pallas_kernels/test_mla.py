"""MLA: definition and XLA path against float64, expanded against absorbed, and the merge of partial results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mla
from pallas_kernels.mla import merge_lse, mla_absorbed, mla_expanded
from pallas_kernels.mla_ref import expanded_ref
from tests.conftest import relative_l2
from tests.pallas_kernels.oracles import attention, cases

DCP = cases("dcp_merge.jsonl")
MERGES = [name for name, case in DCP.items() if "partial_out" in case]

B, S, H, DQ, DV = 3, 20, 2, 8, 6
# Query rows, then for each sequence the position of the first one and the keys stored.
SPANS = {
    "prefill": (5, [0, 0, 0], [5, 3, 1]),
    "cached prefix": (5, [0, 7, 15], [4, 11, 20]),
    "padding request": (5, [0, 6, 0], [0, 9, 5]),
    "queries past the keys": (5, [0, 2, 19], [2, 8, 20]),
    "keys of an earlier part only": (5, [40, 3, 20], [12, 2, 20]),
    "decode": (1, [0, 5, 19], [1, 6, 20]),
}


def spans(name, seed=0):
    T, q_start, kv_len = SPANS[name]
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=s) for s in ((B, T, H, DQ), (B, S, H, DQ), (B, S, H, DV)))
    return q, k, v, np.int32(q_start), np.int32(kv_len)


@functools.cache
def expanded(impl):
    return jax.jit(functools.partial(mla_expanded, scale=0.3, impl=impl))


@functools.cache
def absorbed(impl):
    return jax.jit(functools.partial(mla_absorbed, scale=0.3, latent=DQ - 1, impl=impl))


def poison(a, kv_len):
    """NaN from each sequence's kv_len on."""
    stored = np.arange(a.shape[1]) < kv_len[:, None]
    return np.float32(np.where(stored.reshape(*stored.shape, *[1] * (a.ndim - 2)), a, np.nan))


@pytest.mark.parametrize("impl", ["xla", "ref"])
@pytest.mark.parametrize("name", SPANS)
def test_expanded(name, impl):
    q, k, v, q_start, kv_len = spans(name)
    o = expanded(impl)(np.float32(q), poison(k, kv_len), poison(v, kv_len), q_start=q_start, kv_len=kv_len)
    want, lse = attention(q, k, v, 0.3, q_start, kv_len)
    assert relative_l2(o, want) < 1e-6
    assert not np.any(np.asarray(o)[np.isneginf(lse)])


@pytest.mark.parametrize("impl", ["xla", "ref"])
@pytest.mark.parametrize("name", SPANS)
def test_absorbed(name, impl):
    q, k, _, q_start, kv_len = spans(name)
    cache = k[:, :, 0]
    ctx, lse = absorbed(impl)(np.float32(q), poison(cache, kv_len), q_start=q_start, kv_len=kv_len)
    assert ctx.dtype == lse.dtype == jnp.float32
    shared = np.repeat(cache[:, :, None], q.shape[2], axis=2)
    want, want_lse = attention(q, shared, shared[..., : DQ - 1], 0.3, q_start, kv_len)
    assert relative_l2(ctx, want) < 1e-6
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", ["expanded", "absorbed"])
def test_random_spans(op):
    """60 draws of one shape: prefixes, ragged lengths, queries beyond the keys, requests without any."""
    T = 5
    for seed in range(60):
        rng = np.random.default_rng(seed)
        q, k, v = (rng.normal(size=s) for s in ((B, T, H, DQ), (B, S, H, DQ), (B, S, H, DV)))
        kv_len = rng.integers(0, S + 1, B)
        q_start = np.where(rng.random(B) < 0.7, np.maximum(kv_len - T, 0), rng.integers(0, S, B))
        where = dict(q_start=np.int32(q_start), kv_len=np.int32(kv_len))
        if op == "expanded":
            out = expanded("xla")(np.float32(q), poison(k, kv_len), poison(v, kv_len), **where)
        else:
            out, _ = absorbed("xla")(np.float32(q), poison(k[:, :, 0], kv_len), **where)
            k = np.repeat(k[:, :, :1], H, axis=2)
            v = k[..., : DQ - 1]
        np.testing.assert_allclose(out, attention(q, k, v, 0.3, q_start, kv_len)[0], rtol=0, atol=5e-6)


def test_absorbed_is_expanded():
    """q_n . (W_k c) = (W_k^T q_n) . c and W_v (sum p c) = sum p (W_v c), spec model 3.4."""
    B, T, S, H, N, L, R, V = 2, 3, 11, 3, 6, 5, 4, 7
    rng = np.random.default_rng(1)
    q_n, q_r, c, k_r = (rng.normal(size=s) for s in ((B, T, H, N), (B, T, H, R), (B, S, L), (B, S, R)))
    w_k, w_v = rng.normal(size=(L, H, N)), rng.normal(size=(L, H, V))
    where = dict(scale=(N + R) ** -0.5, q_start=np.int32([2, 8]), kv_len=np.int32([5, 11]))

    k = np.concatenate([np.einsum("bsl,lhn->bshn", c, w_k), np.repeat(k_r[:, :, None], H, axis=2)], axis=-1)
    v = np.einsum("bsl,lhv->bshv", c, w_v)
    expanded = mla_expanded(np.float32(np.concatenate([q_n, q_r], -1)), np.float32(k), np.float32(v), **where)

    q = np.concatenate([np.einsum("bthn,lhn->bthl", q_n, w_k), q_r], axis=-1)
    ctx, _ = mla_absorbed(np.float32(q), np.float32(np.concatenate([c, k_r], -1)), latent=L, **where)
    assert relative_l2(np.einsum("bthl,lhv->bthv", np.float64(ctx), w_v), expanded) < 2e-6


@pytest.mark.parametrize("sign", [1, -1])
def test_huge_scores(sign):
    """Scores beyond +-50000: every one finite in the result, the sum of exponentials too."""
    q, k, v, q_start, kv_len = spans("cached prefix")
    q, k = np.abs(q), sign * np.abs(k)
    q, k, v = (np.float32(a) for a in (q * 2000, k * 50, v))
    o, lse = (
        jax.jit(functools.partial(f, scale=1.0))(q, k, v, q_start=q_start, kv_len=kv_len)
        for f in (mla_expanded, lambda *a, **w: expanded_ref(*a, **w)[1])
    )
    want, want_lse = attention(*(np.float64(a) for a in (q, k, v)), 1.0, q_start, kv_len)
    np.testing.assert_allclose(o, want, rtol=0, atol=2e-2)  # the scores themselves round by 1e5 * 2**-24
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)
    assert np.abs(want_lse).min() > 5e4


def test_bfloat16():
    q, k, v, q_start, kv_len = spans("cached prefix")
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in (q, k, v))
    want, want_lse = attention(*(np.float64(a) for a in (q, k, v)), 0.3, q_start, kv_len)
    o = mla_expanded(q, k, v, scale=0.3, q_start=q_start, kv_len=kv_len)
    assert o.dtype == jnp.bfloat16
    assert relative_l2(o, want) < 2**-8  # weights and output are each rounded once
    ctx, lse = mla_absorbed(q, k[:, :, 0], scale=0.3, q_start=q_start, kv_len=kv_len, latent=5)
    shared = np.repeat(np.float64(k[:, :, :1]), 2, axis=2)
    want, want_lse = attention(np.float64(q), shared, shared[..., :5], 0.3, q_start, kv_len)
    assert ctx.dtype == lse.dtype == jnp.float32
    assert relative_l2(ctx, want) < 2**-8
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=1e-5)  # before any rounding


def loss_and_gradients(impl):
    def loss(q, k, v, q_start, kv_len):
        o = mla_expanded(q, k, v, scale=0.3, q_start=q_start, kv_len=kv_len, impl=impl)
        return jnp.sum(jnp.sin(o))

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


def test_gradients_and_blocks_of_queries(monkeypatch):
    """40 queries in blocks of 16: the same values and gradients as all at once, in float64 to the last digits."""
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=s) for s in ((2, 40, 2, 4), (2, 44, 2, 4), (2, 44, 2, 3)))
    k[:, 35] *= 500  # most queries do not see this key
    q_start, kv_len = np.array([0, 3]), np.array([40, 44])
    monkeypatch.setattr(mla, "BLOCK_SCORES", 1)
    with jax.enable_x64(True):
        loss, gradients = loss_and_gradients("xla")(q, k, v, q_start, kv_len)
        want, want_gradients = loss_and_gradients("ref")(q, k, v, q_start, kv_len)
    np.testing.assert_allclose(want, np.sin(attention(q, k, v, 0.3, q_start, kv_len)[0]).sum(), rtol=1e-12)
    np.testing.assert_allclose(loss, want, rtol=1e-12)
    for got, expected in zip(gradients, want_gradients, strict=True):
        assert relative_l2(got, expected) < 1e-12


@pytest.mark.parametrize("impl", ["xla", "ref"])
@pytest.mark.parametrize("name", ["padding request", "prefill"])
def test_gradients_ignore_what_is_not_stored(name, impl):
    q, k, v, q_start, kv_len = spans(name)
    run = loss_and_gradients(impl)
    clean = run(*map(np.float32, (q, k, v)), q_start, kv_len)
    poisoned = run(np.float32(q), poison(k, kv_len), poison(v, kv_len), q_start, kv_len)
    for got, expected in zip(jax.tree.leaves(poisoned), jax.tree.leaves(clean), strict=True):
        assert np.array_equal(got, expected)


@pytest.mark.parametrize("name", MERGES)
def test_merge(name):
    case = DCP[name]
    outs, expect = np.float32(case["partial_out"]), np.float32(case["expect_out"])
    lses, expect_lse = (
        np.float32([[-np.inf if x is None else x for x in row] for row in rows])
        for rows in (case["partial_lse_natural_log"], [case["expect_lse"]])
    )
    for buffer in (outs, np.where(np.isneginf(lses)[..., None], np.float32(np.nan), outs)):
        out, lse = jax.jit(merge_lse)(buffer, lses)
        np.testing.assert_allclose(out, expect, rtol=1e-6)
        np.testing.assert_allclose(lse, expect_lse[0], rtol=1e-6)


def test_merge_of_any_split_is_the_whole():
    """Random cuts of the keys into parts, some of them empty, for several query rows per request."""
    q, k, v, q_start, kv_len = spans("cached prefix")
    cache, part = np.float32(k[:, :, 0]), absorbed("xla")
    whole = part(np.float32(q), cache, q_start=q_start, kv_len=kv_len)
    for seed in range(8):
        cuts = np.sort(np.random.default_rng(seed).integers(0, S + 1, 4))
        parts = []
        for begin, end in zip([0, *cuts], [*cuts, S], strict=True):
            moved = np.roll(cache, -begin, axis=1)
            stored = np.clip(kv_len, begin, end) - begin
            parts.append(part(np.float32(q), moved, q_start=q_start - begin, kv_len=np.int32(stored)))
        merged = merge_lse(*(jnp.stack(x) for x in zip(*parts, strict=True)))
        for got, expected in zip(merged, whole, strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_keys_dealt_out_to_ranks(ranks):
    """DC-05: token i lives on rank i mod N, decode steps from context 1 to 17."""
    H, L, R, longest = 3, 6, 2, 17
    rng = np.random.default_rng(3)
    cache = np.float32(rng.normal(size=(1, 24, L + R)))
    dealt = np.stack([cache[0, rank::ranks] for rank in range(ranks)])  # [ranks, 24 / ranks, L+R]
    step = jax.jit(functools.partial(mla_absorbed, scale=0.4, latent=L))
    for context in range(1, longest + 1):
        q = np.float32(rng.normal(size=(1, 1, H, L + R)))
        whole = step(q, cache, q_start=np.int32([context - 1]), kv_len=np.int32([context]))
        held = np.int32([len(range(rank, context, ranks)) for rank in range(ranks)])
        outs, lses = step(np.repeat(q, ranks, axis=0), dealt, q_start=held - 1, kv_len=held)
        for got, expected in zip(merge_lse(outs, lses), whole, strict=True):
            np.testing.assert_allclose(got, expected[0], rtol=0, atol=1e-6)


def test_gradient_through_a_merge():
    """The gradient of merged parts is that of one attention, with an empty part among them."""
    q, k, _, q_start, kv_len = spans("decode")
    cache = np.float32(k[:, :, 0])
    keep = np.float32(np.arange(cache.shape[1]) < 6)

    def loss(q, split):
        part = lambda rows, n: mla_absorbed(q, rows, scale=0.3, latent=5, q_start=n - 1, kv_len=n)
        if not split:
            out, lse = part(cache, kv_len)
        else:
            first = np.minimum(kv_len, 6)
            parts = [part(cache * keep[:, None], first), part(np.roll(cache, -6, axis=1), kv_len - first)]
            out, lse = merge_lse(*(jnp.stack(x) for x in zip(*parts, strict=True)))
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

    one, two = (jax.jit(jax.grad(functools.partial(loss, split=split)))(np.float32(q)) for split in (False, True))
    np.testing.assert_allclose(two, one, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "op, change, message",
    [
        (mla_expanded, {"k": np.zeros((2, 5, 2, 5))}, r"k \(2, 5, 2, 5\), .* do not fit; pass"),
        (mla_expanded, {"kv_len": np.zeros(2, np.int32)}, r"kv_len \(2,\) must be \[3\], one per sequence"),
        (mla_expanded, {"impl": "best"}, "impl 'best' cannot be used because .*; choose one of auto, xla, ref"),
        (mla_absorbed, {"latent": 9}, "latent 9 do not fit; pass"),
        (mla_absorbed, {"q_start": np.zeros((2, 5), np.int32)}, r"q_start \(2, 5\)"),
    ],
)
def test_refusals(op, change, message):
    q, k, v, q_start, kv_len = spans("prefill")
    arguments = dict(q=q, scale=1.0, q_start=q_start, kv_len=kv_len)
    arguments |= dict(k=k, v=v) if op is mla_expanded else dict(cache=k[:, :, 0], latent=4)
    with pytest.raises(ValueError, match=message):
        op(**arguments | change)
    with pytest.raises(ValueError, match=r"lses \(2, 2\) do not fit"):
        merge_lse(np.zeros((2, 3, 4)), np.zeros((2, 2)))
