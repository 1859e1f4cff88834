"""MXFP4: every byte under every scale, packing against a brute force over the 16 values, cutting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mxfp4 import Mxfp4, check_scales, cut, fake_quant, quantize
from tests.pallas_kernels.oracles import E2M1, cases, mxfp4_values

CASES = cases("mxfp4.jsonl")
DEQUANTIZE = jax.jit(Mxfp4.dequantize, static_argnums=1)
QUANTIZE = jax.jit(quantize)


def packed(bytes_hex, scales, rows=1):
    codes = np.frombuffer(bytes.fromhex(bytes_hex), np.uint8).reshape(rows, -1)
    return Mxfp4(jnp.asarray(codes), jnp.asarray(np.uint8(scales).reshape(rows, -1)))


def every_byte():
    """All 256 bytes (16 blocks) in a row, one row per scale byte 0..254."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    return Mxfp4(jnp.asarray(codes), jnp.asarray(np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)))


def bits(a):
    """The stored bits, so that -0.0 and subnormals count."""
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


@pytest.mark.parametrize("name", ["MX-01", "MX-02"])
def test_order_and_scales(name):
    case = CASES[name]
    w = packed(case["bytes_hex"], case["scales"])
    assert w.shape == (1, len(case["expect"]))
    assert np.array_equal(bits(DEQUANTIZE(w, jnp.float32)[0]), bits(np.float32(case["expect"])))


def test_extreme_scales():
    low, high, bad = CASES["MX-03"]["cases"]
    for case in (low, high):
        w = packed(f"{case['nibble']:x}" * 32, [case["scale"]])
        assert np.array_equal(DEQUANTIZE(w, jnp.float32), np.full((1, 32), case["expect"], np.float32))
    with pytest.raises(ValueError, match=r"scale at \(1, 2\) is byte 255 \(not a number\), the largest valid is 254"):
        check_scales(np.uint8([[254, 0, 1], [1, 2, bad["scale"]]]))
    check_scales(np.uint8([[0, 254]]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_byte_under_every_scale_is_exact(dtype):
    w = every_byte()
    values = mxfp4_values(np.asarray(w.packed), np.asarray(w.scale))
    want = np.where(np.abs(values) < 2.0**128, values, np.copysign(np.inf, values))  # beyond float32: infinite
    assert np.array_equal(np.float64(np.asarray(want, dtype)), want)
    assert np.array_equal(bits(DEQUANTIZE(w, dtype)), bits(np.asarray(want, dtype)))


def test_float16_and_float64():
    w = Mxfp4(every_byte().packed[112:132], every_byte().scale[112:132])
    values = mxfp4_values(np.asarray(w.packed), np.asarray(w.scale))
    assert np.array_equal(DEQUANTIZE(w, jnp.float16), np.float16(values))
    with jax.enable_x64(True):
        assert np.array_equal(w.dequantize(jnp.float64), values)


def test_packing_what_is_packed_changes_no_value():
    w = every_byte()
    values = np.asarray(DEQUANTIZE(w, jnp.float32))
    again = np.asarray(DEQUANTIZE(QUANTIZE(values), jnp.float32))
    finite = np.asarray(w.scale[:, 0]) <= 252  # above, some codes are infinite
    lost = finite[:, None] & (bits(again) != bits(values))
    assert np.all(np.abs(values[lost]) < 2.0**-126) and not np.any(again[lost])  # subnormals may flush to zero


def brute_force(w, low):
    """Nearest codes of w [blocks, 32] under scale bytes low [blocks], of two equally near the even one; the error."""
    grid = E2M1[:8] * np.exp2(low[:, None].astype(np.float64) - 127)  # [blocks, 8]
    distance = np.abs(np.abs(w)[..., None] - grid[:, None])
    distance[..., 1::2] *= 1 + 1e-15  # prefer even codes
    code = np.argmin(distance, axis=-1)
    error = np.sum((np.abs(w) - np.take_along_axis(grid, code, axis=1)) ** 2, axis=-1)
    return code + 8 * np.signbit(w), error


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_packing_is_round_to_nearest(spread):
    """The scale is 2**(floor(log2(peak)) - 2) of OCP MX, or twice that where the squared error is lower."""
    rng = np.random.default_rng(0)
    w = np.float32(rng.normal(size=(400, 32)) * np.exp(spread * rng.normal(size=(400, 32))))
    w *= np.exp2(rng.integers(-60, 60, size=(400, 1))).astype(np.float32)
    w[0] = 0
    w[1] = np.float32(2.0**-90) * np.arange(32)
    w[2, 1:] = -0.0
    out = QUANTIZE(w)
    scale = np.int64(out.scale[:, 0])
    peak = np.abs(np.float64(w)).max(axis=1)
    ocp = np.where(peak > 0, np.floor(np.log2(np.where(peak > 0, peak, 1))) - 2 + 127, 127).astype(int)
    assert set(scale - ocp) == {0, 1}
    (_, low), (_, high) = (brute_force(np.float64(w), ocp + step) for step in (0, 1))
    chosen, other = np.where(scale == ocp, (low, high), (high, low))
    assert np.all(chosen <= other * (1 + 1e-5))
    codes = np.stack([np.asarray(out.packed) & 15, np.asarray(out.packed) >> 4], axis=-1).reshape(w.shape)
    assert np.array_equal(codes, brute_force(np.float64(w), scale)[0])


def test_packing_ties_and_saturation():
    """Under scale 2**0: half-way points go to the even code, values up to 6 keep their scale."""
    points = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    w = np.zeros((1, 32), np.float32)
    w[0, :15] = [*points, *(-p for p in points), 6.0]
    out = QUANTIZE(w)
    assert out.scale.tolist() == [[127]]
    got = DEQUANTIZE(out, jnp.float32)[0, :15].tolist()
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert got == [*even, *(-e for e in even), 6.0]
    w = np.repeat(np.float32([[6.9], [7.1]]), 32, axis=1)  # nearer to 6, nearer to 8
    assert QUANTIZE(w).scale.tolist() == [[127], [128]]


def test_stacks_of_matrices():
    w = np.float32(np.random.default_rng(1).normal(size=(3, 4, 64)))
    out = QUANTIZE(w)
    assert out.shape == (3, 4, 64) and out.packed.shape == (3, 4, 32) and out.scale.shape == (3, 4, 2)
    for n in range(3):
        one = QUANTIZE(w[n])
        assert np.array_equal(one.packed, out.packed[n]) and np.array_equal(one.scale, out.scale[n])
    assert np.array_equal(DEQUANTIZE(out, jnp.float32), mxfp4_values(*map(np.asarray, (out.packed, out.scale))))


def _with_gradient(w, axis):
    """fake_quant(w) and the gradient of the sum of its squares."""
    out, pullback = jax.vjp(lambda w: fake_quant(w, axis), w)
    return out, pullback(2 * out)[0]


@pytest.mark.parametrize("axis", [-1, 0])
def test_fake_quantisation_passes_the_gradient_through(axis):
    w = np.float32(np.random.default_rng(2).normal(size=(32, 64)))
    out, gradient = jax.jit(lambda w: _with_gradient(w, axis))(w)
    want = np.moveaxis(DEQUANTIZE(QUANTIZE(np.moveaxis(w, axis, -1)), jnp.float32), -1, axis)
    assert np.array_equal(out, want) and np.any(out != w)
    assert np.array_equal(gradient, 2 * out)
    assert jax.eval_shape(fake_quant, jnp.asarray(w, jnp.bfloat16)).dtype == jnp.bfloat16


def test_cutting_keeps_each_value_with_its_scale():
    """MX-04: two devices along the columns, two along the rows, eight too many."""
    setup = CASES["MX-04"]["setup"]
    w = packed(setup["bytes_hex"], setup["scales"], setup["rows"])
    assert w.shape == (setup["rows"], setup["cols"])
    per_block = lambda part: np.asarray(DEQUANTIZE(part, jnp.float32))[:, ::32].tolist()
    assert per_block(cut(w, "in", 0, 2)) == [[0.25, 0.5], [4, 8]]
    assert per_block(cut(w, "in", 1, 2)) == [[1, 2], [16, 32]]
    assert per_block(cut(w, "out", 0, 2)) == [[0.25, 0.5, 1, 2]]
    assert per_block(cut(w, "out", 1, 2)) == [[4, 8, 16, 32]]
    with pytest.raises(ValueError, match="128 in columns in 8 parts are not multiples of 32; use at most 4 parts"):
        cut(w, "in", 0, 8)
    whole = np.asarray(DEQUANTIZE(w, jnp.float32))
    for axis, dim in (("in", 1), ("out", 0)):
        parts = [DEQUANTIZE(cut(w, axis, i, 2), jnp.float32) for i in range(2)]
        assert np.array_equal(np.concatenate(parts, axis=dim), whole)


def test_refusals():
    with pytest.raises(ValueError, match="48 input columns are not a multiple of 32; pad"):
        quantize(np.zeros((2, 48), np.float32))
    with pytest.raises(ValueError, match="axis is 'rows', a weight has 'in' and 'out'"):
        cut(packed("00" * 16, [127]), "rows", 0, 1)
    with pytest.raises(ValueError, match="holds 32 columns, scale .* covers 64; pass one scale per 32"):
        packed("00" * 16, [127, 127]).dequantize()
