"""MXFP4 weights: 4-bit E2M1 codes with one power-of-two scale per 32 input columns (spec model 7.2)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

BLOCK = 32  # input columns per scale
BIAS = 127  # scale byte b means 2 ** (b - 127)
NAN_SCALE = 255


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """A packed matrix, or a stack of them, in checkpoint layout [..., out, in].

    Byte j of a row holds column 2j in its low nibble and 2j+1 in its high one; bit 3 of a nibble is the sign.
    """

    packed: jax.Array  # [..., out, in/2] uint8
    scale: jax.Array  # [..., out, in/32] uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape [..., out, in]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * 2)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The values [..., out, in]; exact in float32 and bfloat16, subnormals included."""
        if self.packed.shape[-1] * 2 != self.scale.shape[-1] * BLOCK:
            raise ValueError(
                f"Mxfp4: packed {self.packed.shape} holds {self.shape[-1]} columns, scale {self.scale.shape} covers"
                f" {self.scale.shape[-1] * BLOCK}; pass one scale per {BLOCK} columns"
            )
        codes = jnp.stack([self.packed & 0xF, self.packed >> 4], axis=-1).reshape(*self.scale.shape, BLOCK)
        bits = _float32_bits(codes.astype(jnp.uint32), self.scale[..., None].astype(jnp.int32)).reshape(self.shape)
        if dtype == jnp.bfloat16:  # the upper half; a cast could flush subnormals
            return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
        return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


def _float32_bits(code: jax.Array, scale: jax.Array) -> jax.Array:
    """code uint32 (4 bits), scale int32 (a byte) -> the bits of code * 2**(scale - 127) as a float32.

    Codes 2..7 are (1 + half) * 2**(code//2 - 1), code 1 is 2**-1: the product only adds exponents.
    """
    magnitude = code & 7
    half = jnp.where(magnitude > 1, magnitude & 1, 0)
    exponent = scale + (magnitude >> 1).astype(jnp.int32) - 1
    normal = (jnp.maximum(exponent, 0).astype(jnp.uint32) << 23) | (half << 22)
    subnormal = ((2 + half) << 21) >> jnp.maximum(-exponent, 0).astype(jnp.uint32)
    bits = jnp.where(exponent > 0, normal, subnormal)
    bits = jnp.where(exponent > 254, jnp.uint32(0x7F800000), bits)  # beyond float32: infinity
    return jnp.where(magnitude == 0, 0, bits) | ((code >> 3) << 31)


def check_scales(scale: np.ndarray) -> None:
    """Refuse scale byte 255, which is not a number."""
    bad = np.argwhere(np.asarray(scale) == NAN_SCALE)
    if len(bad):
        where = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"MXFP4 scale at {where} is byte 255 (not a number), the largest valid is 254; download it again"
        )


def quantize(w: jax.Array | np.ndarray) -> Mxfp4:
    """w [..., out, in] to the nearest codes; in must be a multiple of 32.

    The scale of a block is 2**(floor(log2(max |w|)) - 2) (OCP MX 1.0), or twice that where it lowers the
    squared error. Values that are already MXFP4 come back unchanged; float32 subnormals may become 0.
    """
    w = jnp.asarray(w, jnp.float32)
    if w.shape[-1] % BLOCK:
        raise ValueError(
            f"quantize: {w.shape[-1]} input columns are not a multiple of {BLOCK};"
            " pad the weight or keep it in bfloat16"
        )
    blocks = w.reshape(*w.shape[:-1], -1, BLOCK)
    peak = jnp.max(jnp.abs(blocks), axis=-1)
    _, exponent = jnp.frexp(peak)  # peak = m * 2**exponent, m in [0.5, 1)
    low = jnp.where(peak > 0, jnp.clip(exponent - 3 + BIAS, 0, 252), BIAS)
    codes = [_encode(blocks, low + step) for step in (0, 1)]
    errors = [_squared_error(blocks, c, low + step) for step, c in enumerate(codes)]
    better = errors[1] < errors[0]
    code = jnp.where(better[..., None], codes[1], codes[0]).astype(jnp.uint8).reshape(*w.shape[:-1], -1, 2)
    return Mxfp4(packed=code[..., 0] | (code[..., 1] << 4), scale=jnp.where(better, low + 1, low).astype(jnp.uint8))


def _encode(blocks: jax.Array, scale: jax.Array) -> jax.Array:
    """Nearest code of blocks [..., 32] under scale [...] (int32 byte), ties to the even code, as uint32."""
    factor = jax.lax.bitcast_convert_type((254 - scale).astype(jnp.uint32) << 23, jnp.float32)  # 2**(127 - scale)
    x = jnp.abs(blocks) * factor[..., None]
    below = [x > m for m in (0.25, 1.25, 2.5, 5.0)] + [x >= m for m in (0.75, 1.75, 3.5)]
    code = sum((b.astype(jnp.uint32) for b in below), start=jnp.uint32(0))
    return code | (jnp.signbit(blocks).astype(jnp.uint32) << 3)


def _squared_error(blocks: jax.Array, code: jax.Array, scale: jax.Array) -> jax.Array:
    """Squared error of each block in units of its lower scale, so that tiny weights do not underflow."""
    bits = _float32_bits(code, scale[..., None])
    error = jax.lax.bitcast_convert_type(bits, jnp.float32) - blocks
    peak = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    return jnp.sum((error / jnp.where(peak > 0, peak, 1)) ** 2, axis=-1)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def fake_quant(w: jax.Array, axis: int = -1) -> jax.Array:
    """w as MXFP4 would store it, input columns along `axis`, in w's dtype; the gradient passes straight through."""
    moved = jnp.moveaxis(w, axis, -1)
    return jnp.moveaxis(quantize(moved).dequantize(w.dtype), -1, axis)


@fake_quant.defjvp
def _fake_quant_jvp(axis, primals, tangents):
    return fake_quant(primals[0], axis), tangents[0]


def cut(w: Mxfp4, axis: str, index: int, parts: int) -> Mxfp4:
    """Part `index` of `parts` equal ones along "in" or "out", each value with its own scale."""
    if axis not in ("in", "out"):
        raise ValueError(f"cut: axis is {axis!r}, a weight has 'in' and 'out'; choose one")
    dim = -1 if axis == "in" else -2
    size = w.shape[dim]
    unit = BLOCK if axis == "in" else 1
    if size % (parts * unit):
        raise ValueError(
            f"cut: {size} {axis} columns in {parts} parts are not multiples of {unit};"
            f" use at most {size // unit} parts that divide them"
        )

    def take(a):
        width = a.shape[dim] // parts
        part = slice(index * width, (index + 1) * width)
        return a[..., part] if axis == "in" else a[..., part, :]

    return Mxfp4(packed=take(w.packed), scale=take(w.scale))
