"""Gated activations: SiTU of K3 and SiLU of the 48B (spec model 5.1)."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.common import accumulator


def situ_glu(gate: jax.Array, up: jax.Array, beta: float, linear_beta: float | None) -> jax.Array:
    """beta tanh(gate/beta) sigmoid(gate) * linear_beta tanh(up/linear_beta); None leaves up uncapped.

    float32 inside, rounded once to gate's dtype.
    """
    dtype = accumulator(gate, up)
    g, u = gate.astype(dtype), up.astype(dtype)
    if linear_beta is not None:
        u = linear_beta * jnp.tanh(u / linear_beta)
    return (beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u).astype(gate.dtype)


def silu_glu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate * sigmoid(gate) * up; float32 inside, rounded once to gate's dtype."""
    dtype = accumulator(gate, up)
    return (jax.nn.silu(gate.astype(dtype)) * up.astype(dtype)).astype(gate.dtype)


@dataclasses.dataclass(frozen=True)
class Glu:
    """A gated activation as a static value: `glu(gate, up)`."""

    kind: str = "situ"
    beta: float = 4.0
    linear_beta: float | None = 25.0

    def __post_init__(self):
        if self.kind not in ("situ", "silu"):
            raise ValueError(f"Glu: kind is {self.kind!r}, supported are 'situ' and 'silu'; choose one")

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.kind == "silu":
            return silu_glu(gate, up)
        return situ_glu(gate, up, self.beta, self.linear_beta)
