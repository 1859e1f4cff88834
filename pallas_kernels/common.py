"""What every op shares: choosing an implementation, precision, and the cost floor."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST


class Floor(NamedTuple):
    """The least an op can cost: bytes that must cross device memory once, and floating point operations."""

    bytes: int
    flops: int


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def choose(op: str, impl: str, usable: Sequence[str], unusable: dict[str, str] | None = None) -> str:
    """The implementation that `impl` names; "auto" takes the first usable one.

    `unusable` maps implementations that exist but cannot serve this call to the reason.
    """
    if impl == "auto":
        return usable[0]
    if impl in usable:
        return impl
    reason = (unusable or {}).get(impl, "there is no such implementation of this op")
    raise ValueError(
        f"{op}: impl {impl!r} cannot be used because {reason}; choose one of {', '.join(('auto', *usable))}"
    )


def accumulator(*arrays: jax.Array) -> jnp.dtype:
    """The dtype to compute in: float32, or float64 when an input already is."""
    return jnp.dtype(jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32)


def precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Exact products for float32 and float64; bfloat16 products are exact in a float32 accumulator anyway."""
    return HIGHEST if jnp.dtype(dtype).itemsize >= 4 else None
