"""data/cases/kda_numerics.jsonl: inputs by its fill rule, expected values of a float64 run and central differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda, kda_gate, kda_step_slots, l2_norm, short_conv
from tests.conftest import relative_l2
from tests.pallas_kernels.oracles import cases, kda_backward, kda_forward, normalise, sigmoid

CASES = cases("kda_numerics.jsonl")
FORWARD = [name for name, case in CASES.items() if "o_sum" in case.get("expect", {})]
GRADIENT = [name for name in CASES if name.startswith("KD-grad-")]
CHUNKS = [16, 32, 64]


def fill(a, b, *shape):
    return np.sin(a * (np.arange(np.prod(shape)) + 1) + b).reshape(shape)


def raw_inputs(case):
    """q, k (not normalised), v, g, beta [1, T, H, ..] and the initial state [1, H, K, V], float64."""
    T, H, K, V = (case[n] for n in "THKV")
    gate = fill(0.37, 0.5, 1, T, H, K)
    g = {
        "safe": -5 * sigmoid(3 * gate),
        "floor": np.full_like(gate, -5.0),
        "split": np.where(np.arange(K) % 2 == 0, 0.0, -5.0) * np.ones_like(gate),
        "spike": np.where(np.arange(T)[:, None, None] == T // 2, -5.0, -0.001) * np.ones_like(gate),
    }[case["gate"]]
    q, k, v = fill(0.7, 0.1, 1, T, H, K), fill(1.1, 0.3, 1, T, H, K), fill(0.9, -0.2, 1, T, H, V)
    beta = sigmoid(2 * fill(0.53, 0.2, 1, T, H))
    state = 0.1 * fill(0.61, 0.9, 1, H, K, V) * case.get("initial_state", False)
    return q, k, v, g, beta, state


def inputs(case):
    q, k, *rest = raw_inputs(case)
    return normalise(q), normalise(k), *rest


def random_rows(rng, n, H, K, V):
    q, k = (normalise(rng.normal(size=(1, n, H, K))) for _ in range(2))
    g, beta = -5 * rng.random(size=(1, n, H, K)), rng.random(size=(1, n, H))
    return q, k, rng.normal(size=(1, n, H, V)), g, beta


def single(arrays):
    return [np.float32(a) for a in arrays]


def check(case, o, state, atol=None):
    """o [T, H, V] and the final state [H, K, V] against the expected numbers."""
    o, state = np.asarray(o, np.float64), np.asarray(state, np.float64)
    found = {
        "o_last_head0": o[-1, 0], "o_sum": o.sum(), "o_abs_sum": np.abs(o).sum(),
        "state_head0_row0": state[0, 0], "state_sum": state.sum(), "state_abs_sum": np.abs(state).sum(),
    }  # fmt: skip
    assert found.keys() == case["expect"].keys()
    for name, value in found.items():
        want = np.array(case["expect"][name])
        assert np.all(np.abs(value - want) <= (atol or case["tol_fp32"])), (name, value, want)


@functools.partial(jax.jit, static_argnames=("chunk_size", "return_states", "impl"))
def jitted(*arrays, **options):
    return kda(*arrays, lower_bound=-5.0, **options)


def run(*arrays, **options):
    return jax.device_get(jitted(*arrays, **options))  # slices of numpy arrays compile nothing


def test_the_float64_oracle_gives_the_expected_values():
    assert len(FORWARD) == 9
    for name in FORWARD:
        o, states = kda_forward(*inputs(CASES[name]))
        check(CASES[name], o[0], states[0, -1], atol=1e-7)  # the file holds ten digits of sums up to 446


@pytest.mark.parametrize(
    "name, chunk_size", [(name, 64) for name in FORWARD] + [("KD-tail-65", 16), ("KD-tail-65", 32)]
)
def test_whole(name, chunk_size):
    o, final = run(*single(inputs(CASES[name])), chunk_size=chunk_size)
    check(CASES[name], o[0], final[0])


@pytest.mark.parametrize("name", FORWARD)
def test_definition(name):
    o, final = run(*single(inputs(CASES[name])), impl="ref")
    check(CASES[name], o[0], final[0])


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", [name for name in FORWARD if CASES[name]["T"] <= 65])
def test_cut_in_two_at_every_position(name, chunk_size):
    check_cuts(name, chunk_size, np.minimum(np.arange(66), CASES[name]["T"]))


def test_cut_of_the_longest():
    check_cuts("KD-tail-500", 64, np.linspace(0, 500, 30).astype(int))


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_cut_of_the_longest_at_every_position(chunk_size):
    check_cuts("KD-tail-500", chunk_size, np.arange(501))


def check_cuts(name, chunk_size, cuts):
    """Row b of a batch ends after cuts[b] tokens; a second call carries its state on."""
    case = CASES[name]
    T, width = case["T"], 500 if case["T"] > 65 else 65
    *rows, state = single(inputs(case))
    t = np.arange(width)
    state = np.repeat(state, len(cuts), axis=0)

    def part(begin, end):  # tokens begin..end of each row, then k = v = g = beta = 0, which leaves the state alone
        index, valid = np.minimum(begin[:, None] + t, T - 1), t < (end - begin)[:, None]
        return [a[0][index] * valid.reshape(*valid.shape, *[1] * (a.ndim - 2)) for a in rows]

    first, middle = run(*part(0 * cuts, cuts), state, chunk_size=chunk_size)
    second, final = run(*part(cuts, 0 * cuts + T), middle, chunk_size=chunk_size)
    for b, cut in enumerate(cuts):
        check(case, np.concatenate([first[b, :cut], second[b, : T - cut]]), final[b])


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("name", FORWARD)
def test_second_of_three_in_a_packed_batch(name, chunk_size):
    case = CASES[name]
    *rows, state = single(inputs(case))
    rng = np.random.default_rng(0)
    before, after = (single(random_rows(rng, n, 2, 8, 8)) for n in (21, 37))
    cu = np.cumsum([0, 21, case["T"], 37])
    packed = [np.concatenate(parts, axis=1) for parts in zip(before, rows, after, strict=True)]
    packed = [np.pad(a, [(0, 0), (0, 560 - cu[-1]), *[(0, 0)] * (a.ndim - 2)], constant_values=np.nan) for a in packed]
    states = np.concatenate([0 * state + 0.3, state, 0 * state - 0.2])
    o, final = run(*packed, states, cu_seqlens=np.int32(cu), chunk_size=chunk_size)
    check(case, o[0, 21 : 21 + case["T"]], final[1])


@pytest.mark.parametrize("name", ["KD-tail-65-S0", "KD-gate-floor", "KD-gate-split", "KD-gate-spike"])
def test_bfloat16_inputs(name):
    """Against a float64 run on the rounded inputs: the state stays float32, the output is rounded once."""
    *rows, state = inputs(CASES[name])
    rounded = [a.astype(jnp.bfloat16) for a in rows]
    o, final = run(*rounded, np.float32(state))
    assert o.dtype == jnp.bfloat16 and final.dtype == jnp.float32
    want_o, want_states = kda_forward(*(np.asarray(a, np.float64) for a in rounded), state)
    np.testing.assert_allclose(final, want_states[:, -1], rtol=0, atol=2e-5)
    np.testing.assert_allclose(np.asarray(o, np.float64), want_o, rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("name, chunk_size", [(name, 64) for name in GRADIENT] + [("KD-grad-spike", 16)])
def test_gradients(name, chunk_size):
    """Of sum(o * cos(0.3 n)) with respect to q and k before they are normalised, v, g and beta."""
    case = CASES[name]
    *rows, _ = raw_inputs(case)
    loss, gradients = _loss_and_gradients(chunk_size)(*single(rows))
    expect = case["expect"]
    np.testing.assert_allclose(loss, expect["loss"], rtol=0, atol=2e-5)
    for which, got in zip(["q", "k", "v", "g", "beta"], gradients, strict=True):
        got = np.asarray(got, np.float64)
        np.testing.assert_allclose(np.linalg.norm(got), expect[f"d{which}_norm"], rtol=case["rtol"], err_msg=which)
        close = case["rtol"] * np.abs(expect[f"d{which}_last4"]).max()
        np.testing.assert_allclose(got.reshape(-1)[-4:], expect[f"d{which}_last4"], rtol=0, atol=close, err_msg=which)


@functools.cache
def _loss_and_gradients(chunk_size):
    def loss(q, k, v, g, beta):
        o, _ = kda(l2_norm(q), l2_norm(k), v, g, beta, lower_bound=-5.0, chunk_size=chunk_size)
        return jnp.vdot(o.reshape(-1), np.cos(0.3 * np.arange(o.size)).astype(np.float32))

    return jax.jit(jax.value_and_grad(loss, argnums=range(5)))


def test_slack_rows_of_a_packed_buffer():
    """NaN in slack rows, then finite slack behind a linear layer: all as float64 says of the rows in use alone."""
    setup = CASES["KD-slack"]["setup"]
    cu, used = np.int32(setup["cu_seqlens"]), setup["cu_seqlens"][-1]
    rng = np.random.default_rng(1)
    rows = single(random_rows(rng, setup["rows"], 2, 6, 5))
    weight, do = np.float32(rng.normal(size=(5, 5))), np.float32(rng.normal(size=(1, used, 2, 5)))

    @jax.jit
    def everything(weight, *rows):
        def forward(weight, q, k, v, g, beta):
            v = jnp.einsum("bthv,vw->bthw", v, weight)
            o, _ = kda(q, k, v, g, beta, cu_seqlens=cu, lower_bound=-5.0, chunk_size=16)
            return o[:, :used]

        o, pullback = jax.vjp(forward, weight, *rows)
        return o, pullback(do)

    exact = [np.float64(a[:, :used]) for a in rows]
    exact[2] = exact[2] @ np.float64(weight)
    want_o, want = np.zeros((1, used, 2, 5)), [np.zeros_like(a) for a in exact]
    for begin, end in zip(cu[:-1], cu[1:], strict=True):
        part, zero = [a[:, begin:end] for a in exact], np.zeros((1, 2, 6, 5))
        want_o[:, begin:end] = kda_forward(*part, zero)[0]
        gradients = kda_backward(*part, zero, np.float64(do[:, begin:end]), zero)
        for into, gradient in zip(want, gradients, strict=False):
            into[:, begin:end] = gradient
    want_weight = np.einsum("bthv,bthw->vw", np.float64(rows[2][:, :used]), want[2])
    want[2] = want[2] @ np.float64(weight).T  # with respect to the rows before the layer

    poisoned = [a.copy() for a in rows]
    for a in poisoned:
        a[:, used:] = np.nan
    for buffer in (poisoned, rows):
        o, (of_weight, *gradients) = jax.device_get(everything(weight, *buffer))
        assert relative_l2(o, want_o) < 1e-5
        for got, expected in zip(gradients, want, strict=True):
            assert relative_l2(got[:, :used], expected) < 1e-4
            assert np.array_equal(got[:, used:], np.zeros_like(got[:, used:]))
    assert relative_l2(of_weight, want_weight) < 1e-4


def test_states_at_a_cadence():
    expect = CASES["KD-ckpt-130"]["expect"]
    _, final, states = run(*single(inputs(CASES["KD-ckpt-130"])[:5]), chunk_size=64, return_states=True)
    assert states.shape == (1, 2, 2, 8, 8)
    for at, state in ((64, states[0, 0]), (128, states[0, 1]), (130, final[0])):
        state = np.asarray(state, np.float64)
        np.testing.assert_allclose(state.sum(), expect[f"state_sum_at_{at}"], rtol=0, atol=2e-5)
        np.testing.assert_allclose(np.abs(state).sum(), expect[f"state_abs_sum_at_{at}"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("impl", ["xla", "ref"])
@pytest.mark.parametrize("i", range(3))
def test_states_at_a_cadence_are_counted_per_sequence(i, impl):
    case = CASES["KD-ckpt-varlen"]["cases"][i]
    lengths, positions = case["lengths"], case["checkpoint_positions"]
    rows = single(random_rows(np.random.default_rng(i), 82, 2, 6, 5))
    cu = np.cumsum([0, *lengths, *[0] * (5 - len(lengths))])
    _, _, states = run(*rows, cu_seqlens=np.int32(cu), chunk_size=case["cadence"], return_states=True, impl=impl)
    want = []
    for n, at in enumerate(positions):
        part = [np.float64(a[:, cu[n] : cu[n + 1]]) for a in rows]
        if at:
            want += list(kda_forward(*part, np.zeros((1, 2, 6, 5)))[1][0, np.array(at) - 1])
    assert len(want) == case["rows_needed"] <= len(states)
    for got, expected in zip(states, want, strict=False):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert not np.any(states[len(want) :])


def test_padding_rows_of_a_decode_batch():
    setup = CASES["KD-decode-pad"]["setup"]
    rows, pad = setup["padded_to"], setup["padding_index"]
    rng = np.random.default_rng(2)
    pool = start = np.float32(rng.normal(size=(setup["slots"], 2, 6, 5)))
    serial = {s: np.float64(pool[s])[None] for s in setup["batch_slots"]}
    step = jax.jit(kda_step_slots)
    for t in range(50):
        slots = [2] if t >= 40 else setup["batch_slots"]  # at last slot 0 belongs to a request that waits
        index = np.full(rows, pad)
        index[: len(slots)] = slots
        if t == 40:
            waiting = np.asarray(pool[0])
        token = [a[0] for a in single(random_rows(rng, rows, 2, 6, 5))]
        for a in token:
            a[len(slots) :] = np.nan
        o, pool = jax.device_get(step(*token, pool, np.int32(index)))
        assert np.array_equal(o[len(slots) :], np.zeros((rows - len(slots), 2, 5)))
        for n, slot in enumerate(slots):
            want, states = kda_forward(*(np.float64(a[n])[None, None] for a in token), serial[slot])
            serial[slot] = states[:, -1]
            np.testing.assert_allclose(o[n], want[0, 0], rtol=0, atol=1e-5)
    for slot in (1, 3):
        assert np.array_equal(pool[slot], start[slot])
    assert np.array_equal(pool[0], waiting)
    for slot, want in serial.items():
        assert relative_l2(pool[slot], want[0]) < 1e-5


@pytest.mark.parametrize("sizes", CASES["KD-conv-chunks"]["setup"]["chunk_sizes"], ids=str)
def test_short_convolution_over_chunks(sizes):
    setup, expect = CASES["KD-conv-chunks"]["setup"], CASES["KD-conv-chunks"]["expect"]
    x, weight = np.float32(setup["x"]), jnp.asarray(setup["kernel_oldest_to_newest"], jnp.float32)[None]
    window, parts, at = jnp.zeros((1, 3, 1)), [], 0
    for size in sizes:
        y, window = short_conv(jnp.asarray(x[None, at : at + size, None]), weight, window, activation=None)
        parts.append(y[0, :, 0])
        at += size
        assert str(at) not in expect["window_after"] or window.ravel().tolist() == expect["window_after"][str(at)]
    np.testing.assert_allclose(np.concatenate(parts), expect["y"], rtol=1e-6)


def test_gate_values():
    for case in CASES["KD-gate-values"]["values"]:
        f, a_log, dt_bias = (jnp.asarray(case[n], jnp.float32) for n in ("a", "A_log", "dt_bias"))
        g = kda_gate(f.reshape(1, 1), a_log.reshape(1), dt_bias.reshape(1, 1), case["lower_bound"])
        np.testing.assert_allclose(g[0, 0], case["log_decay"], rtol=1e-6)
        np.testing.assert_allclose(np.exp(np.float64(g[0, 0])), case["decay"], rtol=2e-6)
