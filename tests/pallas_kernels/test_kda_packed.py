"""Packed sequences, carried and returned states, single steps, and refusals of `kda`."""

import functools

import jax
import numpy as np
import pytest

from pallas_kernels.kda import kda, kda_gate, kda_step, kda_step_slots, l2_norm
from tests.conftest import relative_l2
from tests.pallas_kernels.oracles import kda_backward, kda_forward, kda_inputs, normalise, sigmoid

ROWS, SEQUENCES, CHUNK = 160, 6, 32
LENGTHS = [
    [1, 40, 0, 64, 32, 17],  # one token, an empty one, whole chunks, and a few rows of slack
    [0, 0, 160, 0, 0, 0],
    [33, 1, 1, 1, 95, 29],
    [0, 0, 0, 0, 0, 0],
]


@jax.jit
def packed(rows, states, cu, do, dstate):
    def forward(rows, states):
        o, final, every = kda(*rows, states, cu_seqlens=cu, chunk_size=CHUNK, return_states=True)
        return (o, final), every

    out, pullback, every = jax.vjp(forward, rows, states, has_aux=True)
    return out, every, pullback((do, dstate))


@pytest.mark.parametrize("gate", ["mixed", "unbounded"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_sequences_are_what_each_is_alone(lengths, gate):
    """Outputs, final states, states along the way and gradients; the slack rows hold NaN."""
    rng = np.random.default_rng(11)
    *rows, _ = kda_inputs(rng, 1, ROWS, 2, 7, 5, gate)
    states = rng.normal(size=(SEQUENCES, 2, 7, 5))
    do, dstate = rng.normal(size=(1, ROWS, 2, 5)), rng.normal(size=states.shape)
    cu = np.cumsum([0, *lengths])
    for a in rows:
        a[:, cu[-1] :] = np.nan
    as32 = functools.partial(jax.tree.map, np.float32)
    results = packed(*as32((rows, states)), np.int32(cu), *as32((do, dstate)))
    (o, final), every, (gradients, dstates) = jax.device_get(results)

    want_every = []
    for n, (begin, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        part, start = [a[:, begin:end] for a in rows], states[n : n + 1]
        if begin == end:
            assert np.array_equal(final[n], np.float32(states[n])) and np.array_equal(dstates[n], np.float32(dstate[n]))
            continue
        want_o, want_states = kda_forward(*part, start)
        want_every += list(want_states[0, CHUNK - 1 :: CHUNK])
        assert relative_l2(o[:, begin:end], want_o) < 1e-5
        assert relative_l2(final[n], want_states[0, -1]) < 1e-5
        *want, want_start = kda_backward(*part, start, do[:, begin:end], dstate[n : n + 1])
        for got, expected in zip(gradients, want, strict=True):
            assert relative_l2(got[:, begin:end], expected) < 1e-4
        assert relative_l2(dstates[n], want_start[0]) < 1e-4
    for got, expected in zip(every, want_every, strict=False):
        assert relative_l2(got, expected) < 1e-5
    assert len(every) == ROWS // CHUNK and not np.any(every[len(want_every) :])
    for slack in (o[:, cu[-1] :], *(a[:, cu[-1] :] for a in gradients)):
        assert not np.any(slack)


def test_packed_definition():
    rng = np.random.default_rng(12)
    *rows, _ = kda_inputs(rng, 1, ROWS, 2, 7, 5)
    states = rng.normal(size=(SEQUENCES, 2, 7, 5))
    cu = np.cumsum([0, *LENGTHS[0]])
    for a in rows:
        a[:, cu[-1] :] = np.nan
    run = jax.jit(functools.partial(kda, impl="ref"))
    o, final = jax.device_get(run(*map(np.float32, (*rows, states)), cu_seqlens=np.int32(cu)))
    assert not np.any(o[:, cu[-1] :])
    for n, (begin, end) in enumerate(zip(cu[:-1], cu[1:], strict=True)):
        if begin < end:
            want_o, want_states = kda_forward(*(a[:, begin:end] for a in rows), states[n : n + 1])
            assert relative_l2(o[:, begin:end], want_o) < 1e-5
            assert relative_l2(final[n], want_states[0, -1]) < 1e-5


@pytest.mark.parametrize("impl", ["xla", "ref"])
def test_states_after_every_full_chunk(impl):
    inputs = kda_inputs(np.random.default_rng(13), 2, 70, 2, 6, 4)
    run = jax.jit(functools.partial(kda, lower_bound=-5.0, chunk_size=32, return_states=True, impl=impl))
    _, _, states = run(*map(np.float32, inputs))
    assert relative_l2(states, kda_forward(*inputs)[1][:, [31, 63]]) < 1e-5


@pytest.mark.parametrize("T", [1, 20])
def test_no_full_chunk_gives_no_state(T):
    inputs = kda_inputs(np.random.default_rng(13), 2, T, 2, 6, 4)
    for impl in ("xla", "ref"):
        shapes = jax.eval_shape(functools.partial(kda, return_states=True, impl=impl), *map(np.float32, inputs))
        assert [s.shape for s in shapes] == [(2, T, 2, 4), (2, 2, 6, 4), (2, 0, 2, 6, 4)]


def test_without_an_initial_state_it_is_zero():
    *rows, state = map(np.float32, kda_inputs(np.random.default_rng(14), 1, 18, 2, 6, 4))
    run = jax.jit(kda)
    for got, expected in zip(run(*rows), run(*rows, 0 * state), strict=True):
        assert np.array_equal(got, expected)


def test_a_step_is_a_chunk_of_one_token():
    """Equal to the last bit: decode and a one-token call are the same function."""
    *rows, state = map(np.float32, kda_inputs(np.random.default_rng(15), 3, 1, 2, 6, 4))
    o, final = jax.jit(kda)(*rows, state)
    step_o, step_state = jax.jit(kda_step)(*(a[:, 0] for a in rows), state)
    pool_o, pool = jax.jit(kda_step_slots)(*(a[:, 0] for a in rows), state[[2, 0, 1]], np.int32([1, 2, 0]))
    for got in (step_o, pool_o):
        assert np.array_equal(got, o[:, 0])
    assert np.array_equal(step_state, final)
    assert np.array_equal(pool, np.asarray(final)[[2, 0, 1]])


def test_normalisation_and_unbounded_gate():
    rng = np.random.default_rng(16)
    x = rng.normal(size=(3, 2, 5)) * 10.0 ** rng.integers(-6, 6, size=(3, 2, 1))
    x[0, 0] = 0  # eps keeps a zero vector zero
    np.testing.assert_allclose(l2_norm(np.float32(x)), normalise(x), rtol=1e-5)
    f, a_log, bias = 20 * rng.normal(size=(4, 2, 5)), rng.normal(size=2), rng.normal(size=(2, 5))
    z, rate = f + bias, np.exp(a_log)[:, None]
    softplus = np.maximum(z, 0) + np.log1p(np.exp(-np.abs(z)))
    args = [np.float32(a) for a in (f, a_log, bias)]
    np.testing.assert_allclose(kda_gate(*args, None), -rate * softplus, rtol=2e-5)
    np.testing.assert_allclose(kda_gate(*args, -5.0), -5 * sigmoid(rate * z), rtol=2e-4, atol=1e-30)
    extreme = np.float32([[[3e38, -3e38]]])
    assert kda_gate(extreme, args[1][:1], extreme[0] * 0, -5.0).tolist() == [[[-5.0, 0.0]]]


def test_constant_keys_and_full_writes_stay_exact():
    """The worst conditioned triangular system: every key equal, beta 1, no decay."""
    q, k, v, g, beta, state = kda_inputs(np.random.default_rng(17), 1, 128, 1, 8, 8)
    k, g, beta = np.broadcast_to(k[:, :1], k.shape), 0 * g, 0 * beta + 1
    o, final = jax.jit(functools.partial(kda, lower_bound=-5.0))(*map(np.float32, (q, k, v, g, beta, state)))
    want_o, want_states = kda_forward(q, k, v, g, beta, state)
    assert relative_l2(o, want_o) < 1e-5
    assert relative_l2(final, want_states[:, -1]) < 1e-5


@pytest.mark.parametrize(
    "change, message",
    [
        ({"chunk_size": 40}, "chunk_size 40 .* multiple of 16; choose"),
        ({"chunk_size": 0}, "chunk_size 0"),
        ({"impl": "mosaic_tpu"}, "'mosaic_tpu' cannot be used because .*; choose one of auto"),
        ({"initial_state": np.zeros((2, 2, 4, 6), np.float32)}, r"\(2, 2, 4, 6\) does not fit; pass \[2, 2, 6, 4\]"),
        ({"cu_seqlens": np.int32([0, 20])}, "needs batch 1, got 2; pack"),
        ({"beta": np.zeros((2, 20), np.float32)}, r"beta \(2, 20\) do not fit"),
    ],
)
def test_refusals(change, message):
    arrays = dict(
        zip("q k v g beta".split(), map(np.float32, kda_inputs(np.random.default_rng(0), 2, 20, 2, 6, 4)), strict=False)
    )
    with pytest.raises(ValueError, match=message):
        kda(**arrays | change)
    empty = {name: a[:, :0] for name, a in arrays.items()}
    with pytest.raises(ValueError, match="0 tokens, the minimum is 1"):
        kda(**empty)
