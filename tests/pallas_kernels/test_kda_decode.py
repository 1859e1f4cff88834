"""Decode, verify and fold on pools against the plain composition of the ops, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kda_decode as dec
from tests.conftest import relative_l2

B, R, H, K, W, P = 3, 4, 2, 8, 4, 6
EPS = 1e-5
SLOTS = np.array([4, -1, 2], np.int32)


def inputs(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype)
    rows = dec.KdaRows(qkv=normal(B, R, 3, H, K), f=normal(B, R, H, K), b=normal(B, R, H), gate=normal(B, R, H, K))
    heads = dec.KdaHeads(conv=normal(3, H, K, W), a_log=normal(H), dt_bias=normal(H, K), norm=normal(K))
    return rows, heads, normal(P, H, K, K), normal(P, W - 1, 3, H, K)


def one(rows, t):
    return jax.tree.map(lambda a: a[:, t], rows)


def by_hand(rows, heads, states, windows, slots, bound):
    """One token per request in numpy float64, request by request and head by head: spec model 2.2 to 2.6."""
    rows, heads = jax.tree.map(lambda a: np.asarray(a, np.float64), (rows, heads))
    states, windows = np.array(states, np.float64), np.array(windows, np.float64)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    out = np.zeros((B, H, K))
    for r, slot in enumerate(slots):
        if slot < 0:
            continue
        both = np.concatenate([windows[slot], rows.qkv[r][None]])  # [W, 3, H, K]
        windows[slot] = both[1:]
        mixed = np.einsum("wphk,phkw->phk", both, heads.conv)
        q, k, v = mixed * sigmoid(mixed)
        for h in range(H):
            z, rate = rows.f[r, h] + heads.dt_bias[h], np.exp(heads.a_log[h])
            g = -rate * np.log1p(np.exp(z)) if bound is None else bound * sigmoid(rate * z)
            qh, kh = (x[h] / np.sqrt(np.sum(x[h] ** 2) + 1e-6) for x in (q, k))
            S = np.exp(g)[:, None] * states[slot, h]
            S = S + np.outer(kh, sigmoid(rows.b[r, h]) * (v[h] - kh @ S))
            states[slot, h] = S
            o = qh @ S * K**-0.5
            o = o / np.sqrt(np.mean(o**2) + EPS) * heads.norm
            out[r, h] = o * sigmoid(rows.gate[r, h])
    return out, states, windows


@pytest.mark.parametrize("bound", [-5.0, None])
def test_decode_is_the_formula_and_touches_only_its_slots(bound):
    rows, heads, states, windows = inputs(0)
    got = dec.kda_decode(one(rows, 0), heads, states, windows, jnp.asarray(SLOTS), lower_bound=bound, eps=EPS)
    want = by_hand(one(rows, 0), heads, states, windows, SLOTS, bound)
    for g, w in zip(got, want, strict=True):
        assert relative_l2(g, w) < 1e-6
    untouched = np.array([0, 1, 3, 5])
    assert np.array_equal(got[1][untouched], states[untouched])
    assert np.array_equal(got[2][untouched], windows[untouched])
    assert not np.any(np.asarray(got[0][1]))


def test_a_padding_row_of_nan_leaks_nowhere():
    rows, heads, states, windows = inputs(1)
    row = one(rows, 0)
    poisoned = jax.tree.map(lambda a: a.at[1].set(jnp.nan), row)
    slots = jnp.asarray(SLOTS)
    clean = dec.kda_decode(row, heads, states, windows, slots, lower_bound=-5.0, eps=EPS)
    dirty = dec.kda_decode(poisoned, heads, states, windows, slots, lower_bound=-5.0, eps=EPS)
    for a, b in zip(clean, dirty, strict=True):
        assert np.array_equal(a, b)


def test_verify_gives_the_outputs_of_steps_and_fold_their_state():
    rows, heads, states, windows = inputs(2)
    slots, options = jnp.asarray(SLOTS), dict(lower_bound=-5.0, eps=EPS)
    out, record = dec.kda_verify(rows, heads, states, windows, slots, **options)
    count = np.array([4, 4, 2], np.int32)
    s, w = states, windows
    for t in range(R):
        live = jnp.asarray(np.where(t < count, SLOTS, -1))
        o, s, w = dec.kda_decode(one(rows, t), heads, s, w, live, **options)
        real = np.asarray(live) >= 0
        assert relative_l2(out[real, t], o[real]) < 1e-6
    folded = dec.kda_fold(record, rows.qkv, states, windows, slots, jnp.asarray(count))
    assert relative_l2(folded[0], s) < 1e-6
    assert np.array_equal(folded[1], w)


def test_folding_nothing_leaves_the_pools():
    rows, heads, states, windows = inputs(3)
    slots = jnp.asarray(SLOTS)
    _, record = dec.kda_verify(rows, heads, states, windows, slots, lower_bound=-5.0, eps=EPS)
    folded = dec.kda_fold(record, rows.qkv, states, windows, slots, jnp.zeros(B, jnp.int32))
    assert np.array_equal(folded[0], states) and np.array_equal(folded[1], windows)


def test_records_and_raw_rows_are_a_33rd_of_snapshots():
    record = jax.eval_shape(
        lambda *a: dec.kda_verify(*a, lower_bound=-5.0, eps=EPS)[1],
        dec.KdaRows(*(jax.ShapeDtypeStruct((1, 8, *s), jnp.bfloat16) for s in ((3, 1, 128), (1, 128), (1,), (1, 128)))),
        dec.KdaHeads(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 1, 128, 4), (1,), (1, 128), (128,)))),
        jax.ShapeDtypeStruct((1, 1, 128, 128), jnp.float32),
        jax.ShapeDtypeStruct((1, 3, 3, 1, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )  # fmt: skip
    kept = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(record)) + 8 * 3 * 128 * 2  # and the raw rows
    assert kept * 32 <= 8 * (128 * 128 * 4 + 3 * 3 * 128 * 2)  # a state and a window per row


@pytest.mark.parametrize("wrong", ["states", "slots", "rows"])
def test_shapes_that_do_not_fit_are_refused(wrong):
    rows, heads, states, windows = inputs(4)
    row, slots = one(rows, 0), jnp.asarray(SLOTS)
    states = states[..., :-1] if wrong == "states" else states
    slots = slots[:2] if wrong == "slots" else slots
    row = jax.tree.map(lambda a: a[:, :1], row) if wrong == "rows" else row
    with pytest.raises(ValueError, match="kda_decode: .* do not fit"):
        dec.kda_decode(row, heads, states, windows, slots, lower_bound=-5.0, eps=EPS)
