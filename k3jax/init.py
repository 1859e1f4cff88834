"""Random parameters, each born in its shard and in the dtype it will be stored in."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from k3jax.config import K3Config
from k3jax.params import Params, ParamSpec, is_spec, param_specs
from k3jax.sharding import Rules, shardings


def init_params(cfg: K3Config, key: jax.Array, *, mesh: Mesh | None = None, rules: Rules | None = None) -> Params:
    """normal(0, 0.02) matrices, unit norms, KDA decay as in the report (spec model 2.9), packed experts packed.

    A leaf's values depend on `key` and its place in the tree only, not on the mesh.
    """
    specs = param_specs(cfg)
    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    places = [None] * len(leaves) if mesh is None else jax.tree.leaves(shardings(specs, mesh, rules or Rules()))
    arrays = [_init_leaf(jax.random.fold_in(key, i), s, p) for i, (s, p) in enumerate(zip(leaves, places, strict=True))]
    return jax.tree.unflatten(tree, arrays)


def _init_leaf(key: jax.Array, spec: ParamSpec, place: NamedSharding | None) -> jax.Array:
    return _drawer(spec.shape, jnp.dtype(spec.dtype).name, spec.init, place)(key)


@functools.lru_cache
def _drawer(shape: tuple[int, ...], dtype: str, init: str, place: NamedSharding | None):
    """One compiled function for all leaves of a shape, kind and sharding."""
    return jax.jit(functools.partial(_draw, shape=shape, dtype=dtype, init=init), out_shardings=place)


def _draw(key: jax.Array, shape: tuple[int, ...], dtype: str, init: str) -> jax.Array:
    match init:
        case "normal":
            return 0.02 * jax.random.normal(key, shape, dtype)
        case "ones":
            return jnp.ones(shape, dtype)
        case "zeros":
            return jnp.zeros(shape, dtype)
        case "conv":
            bound = shape[-1] ** -0.5
            return jax.random.uniform(key, shape, dtype, -bound, bound)
        case "a_log":
            return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))
        case "dt_bias":  # inverse softplus of a log-uniform step size, as in Mamba-2
            dt = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(1e-3), math.log(1e-1)))
            dt = jnp.maximum(dt, 1e-4)
            return dt + jnp.log(-jnp.expm1(-dt))
        case "mxfp4":
            return jax.random.bits(key, shape, dtype)
        case "mxfp4_scale":  # codes have a standard deviation of 2.93; 2**-7 gives weights near 0.02
            return jnp.full(shape, 127 - 7, dtype)
        case _:
            raise ValueError(f"unknown initialiser {init!r}")
