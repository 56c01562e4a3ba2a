"""The mesh of a run: the config's axes over the devices that there are, and what of it one process has to itself.

The learner uses the devices of all processes. The engine of a process uses its own: it samples its share of the rollouts and waits for
nobody. Where a process holds a whole copy of the parameters (`mesh.data` a multiple of the processes, as by default) its engine takes them
as they lie; else it loads a second copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding

from model import CausalLM
from model.sharding import AXES
from trace_jax.config import MeshSection
from trace_jax.errors import InputError


def make_mesh(section: MeshSection, devices: Sequence[jax.Device]) -> Mesh | None:
    """The devices as (data, fsdp, expert, tensor); None for one device, which needs no mesh.

    Raises:
      InputError: the axes do not multiply to the number of devices.
    """
    processes = len({device.process_index for device in devices})
    sizes = {axis: getattr(section, axis) for axis in AXES}
    if not section.data and not section.fsdp:
        sizes["data"] = processes
    free = "fsdp" if sizes["data"] else "data"
    rest = math.prod(size for name, size in sizes.items() if name != free)
    if len(devices) % rest:
        others = " x ".join(name for name in AXES if name != free)
        raise InputError(f"config section 'mesh': {others} = {rest} does not divide the {len(devices)} devices")
    sizes[free] = sizes[free] or len(devices) // rest
    if (product := math.prod(sizes.values())) != len(devices):
        raise InputError(
            f"config section 'mesh': data x fsdp x expert x tensor = {product}, there are {len(devices)} devices; "
            "set mesh.fsdp=0 to give it all that the others leave"
        )
    if len(devices) == 1:
        return None
    shape = tuple(sizes.values())
    if processes > 1 and sizes["data"] % processes == 0:  # copies side by side: all that is sharded stays within a process
        inner = (sizes["data"] // processes, *shape[1:])
        grid = mesh_utils.create_hybrid_device_mesh(inner, (processes, 1, 1, 1), devices, process_is_granule=True)
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, tuple(sizes))


def engine_mesh(section: MeshSection, mesh: Mesh) -> Mesh:
    """The part of a run's mesh that the engine of one process has, see above; its devices need not be there.

    Raises:
      InputError: the devices of a process cannot be split as the section says.
    """
    devices, data = list(mesh.devices.flat), mesh.shape["data"]
    processes = len({device.process_index for device in devices})
    if data % processes == 0:
        return Mesh(mesh.devices[: data // processes], mesh.axis_names)
    own = [device for device in devices if device.process_index == devices[0].process_index]
    axes = engine_axes(section)
    return make_mesh(axes, own) or Mesh(np.asarray(own).reshape(1, 1, 1, 1), mesh.axis_names)


def engine_axes(section: MeshSection) -> MeshSection:
    """How the devices of one process share the work of its engine where they do not hold a whole copy of the parameters anyway."""
    return MeshSection(expert=section.expert, tensor=section.tensor)


def local_copy(model: CausalLM) -> CausalLM | None:
    """The model on this process's devices alone, in the same buffers; None where the process holds only a part of the parameters."""
    mesh = model.mesh.local_mesh
    parameters = {}
    for name, x in model.parameters().items():
        own, sharding = [shard.data for shard in x.addressable_shards], NamedSharding(mesh, x.sharding.spec)
        if sharding.shard_shape(x.shape) != own[0].shape:
            return None
        parameters[name] = own[0] if mesh.size == 1 else jax.make_array_from_single_device_arrays(x.shape, sharding, own)
    return CausalLM(model.config, mesh=None if mesh.size == 1 else mesh, parameters=parameters)
