"""One table from logical axis names to mesh axes; the only place that knows the mesh.

Parameters name what their axes mean; the table says which mesh axis carries that meaning. A mesh axis that is absent, already used by the
array or does not divide it leaves the axis whole.
"""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

RULES: dict[str, tuple[str, ...]] = {
    "layers": (),
    "vocab": ("tensor", "fsdp"),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "norm": (),
}


def partition(shape: Sequence[int], axes: Sequence[str], mesh: Mesh) -> NamedSharding:
    """The sharding of an array of `shape` whose axes mean `axes`."""
    used: set[str] = set()
    spec = []
    for size, axis in zip(shape, axes, strict=True):
        fits = (name for name in RULES[axis] if name in mesh.shape and name not in used and size % mesh.shape[name] == 0)
        name = next(fits, None)
        spec.append(name)
        used |= {name} - {None}
    return NamedSharding(mesh, PartitionSpec(*spec))
