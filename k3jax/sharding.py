"""Logical axes to mesh axes, in one place."""

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from k3jax.params import Params, ParamSpec, is_spec


@dataclasses.dataclass(frozen=True)
class Rules:
    """Mesh axis (or None: replicated) of each logical parameter axis."""

    vocab: str | None = "tp"
    embed: str | None = None
    heads: str | None = "tp"
    ffw: str | None = "tp"
    experts: str | None = "tp"
    expert_in: str | None = None
    expert_out: str | None = None

    def spec(self, axes: tuple[str | None, ...]) -> P:
        """PartitionSpec of logical `axes`; one mesh axis may shard one dimension only."""
        mesh_axes = [None if a is None else getattr(self, a) for a in axes]
        used = [a for a in mesh_axes if a is not None]
        if len(set(used)) != len(used):
            raise ValueError(
                f"logical axes {axes} map to {tuple(mesh_axes)}, one mesh axis for two dimensions; change the rules"
            )
        return P(*mesh_axes)


def shardings(specs: Params, mesh: Mesh, rules: Rules) -> Params:
    """A NamedSharding per parameter; refuses a dimension that its mesh axis does not divide."""

    def one(path, spec: ParamSpec) -> NamedSharding:
        partition = rules.spec(spec.axes)
        for size, axis in zip(spec.shape, partition, strict=True):
            if axis is not None and axis not in mesh.shape:
                raise ValueError(f"rules name mesh axis {axis!r}, the mesh has {tuple(mesh.shape)}; rename one of them")
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{jax.tree_util.keystr(path)} has a dimension of {size}, mesh axis {axis!r} has"
                    f" {mesh.shape[axis]} devices; choose a divisor or replicate that axis"
                )
        return NamedSharding(mesh, partition)

    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_spec)
