"""What a benchmark is made of: a numeric check and a timing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common import Floor

ALLOWED = 1.1  # error of a kernel over that of the XLA path, both against float64
ROUNDING = 1e-5  # an error below this is float32 rounding in another order


@dataclasses.dataclass(frozen=True)
class Check:
    op: str
    case: str
    values: dict[str, float]
    passed: bool


@dataclasses.dataclass(frozen=True)
class Timing:
    """step(carry, i) -> (carry, output) is one call of the op; `repeats` of them touch different buffers."""

    op: str
    shape: str
    impl: str
    step: Callable
    carry: Any
    repeats: int
    floor: Floor


def normal(rng: np.random.Generator, *shape: int, dtype=jnp.bfloat16) -> jax.Array:
    """Standard normal values, drawn on the device."""
    return jax.random.normal(jax.random.key(int(rng.integers(1 << 30))), shape, jnp.float32).astype(dtype)


def relative_error(got, want) -> float:
    """||got - want|| / ||want|| in float64; NaN in either, or a want of zeros that got is not, never passes."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / size if size else float(np.any(got != 0))


def compare(op: str, case: str, got, xla, want, *, limits: dict[int, float] | None = None) -> Check:
    """Outputs of a kernel and of the XLA path against float64.

    Output 0 must be as good as the XLA path's by ALLOWED. The others, float32 states that the XLA path computes
    without low-precision products, have a limit of their own.
    """
    values: dict[str, float] = {}
    passed = True
    for i, (g, x, w) in enumerate(zip(got, xla, want, strict=True)):
        mine, theirs = relative_error(g, w), relative_error(x, w)
        values[f"error_{i}"], values[f"xla_{i}"] = mine, theirs
        limit = max(ALLOWED * theirs, ROUNDING) if i == 0 else (limits or {}).get(i, 1e-3)
        passed &= mine <= limit
    return Check(op, case, values, bool(passed))
