"""One table from the meaning of an axis to mesh axes; the only place that knows the mesh.

Parameters, adapters and activations name what their axes mean; the table says which mesh axes carry that meaning. A mesh axis that is
absent, already used by the array or does not divide it leaves the axis whole, so every mesh is legal for every model.

Mesh axes: `data` repeats everything, `fsdp` shards parameters and gathers them where they are used, `expert` shards experts, `tensor`
shards heads and FFN widths. The batch is split over the first three, so that no device computes another's tokens outside of its experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "expert", "tensor")
# meaning -> mesh axes that may carry it: the first that fits, or for the batch all that fit
RULES: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "layers": (),
    "vocab": ("tensor", "fsdp"),
    "logits": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "experts": ("expert",),
}


def mesh_axes(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh) -> list[tuple[str, ...]]:
    """For each axis of an array of `shape` the mesh axes that it is split over; () leaves it whole."""
    used: set[str] = set()
    found = []
    for size, axis in zip(shape, axes, strict=True):
        taken: tuple[str, ...] = ()
        for name in RULES[axis] if axis else ():
            fits = mesh.shape.get(name, 1) > 1 and name not in used and size % mesh.shape[name] == 0
            if fits and (axis == "batch" or not taken):
                taken, size = (*taken, name), size // mesh.shape[name]
        used.update(taken)
        found.append(taken)
    return found


def partition(shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh) -> NamedSharding:
    """The sharding of an array of `shape` whose axes mean `axes`; None means nothing and stays whole."""
    split = mesh_axes(shape, axes, mesh)
    return NamedSharding(mesh, PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in split)))


def distribute(tree: Any, shardings: Any) -> Any:
    """Arrays that every process holds whole, each laid out by the sharding at its place of an equal tree; shapes stay shapes."""

    def put(x: jax.Array | np.ndarray | jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.Array | jax.ShapeDtypeStruct:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.make_array_from_callback(x.shape, sharding, np.asarray(x).__getitem__)

    return jax.tree.map(put, tree, shardings)


def constrain(x: jax.Array, axes: Sequence[str | None], mesh: Mesh | None) -> jax.Array:
    """`x` with the sharding of its axes' meaning asserted to the compiler; nothing without a mesh."""
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition(x.shape, axes, mesh))
