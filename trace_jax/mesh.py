"""The mesh of a run: the config's axes over the devices that there are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from model.sharding import AXES
from trace_jax.config import MeshSection
from trace_jax.errors import InputError


def make_mesh(section: MeshSection, devices: Sequence[jax.Device]) -> Mesh | None:
    """The devices as (data, fsdp, expert, tensor); None for one device, which needs no mesh.

    Raises:
      InputError: the axes do not multiply to the number of devices.
    """
    sizes = {axis: getattr(section, axis) for axis in AXES}
    rest = math.prod(size for name, size in sizes.items() if name != "fsdp")
    if len(devices) % rest:
        raise InputError(f"config section 'mesh': data x expert x tensor = {rest} does not divide the {len(devices)} devices")
    sizes["fsdp"] = section.fsdp or len(devices) // rest
    if (product := math.prod(sizes.values())) != len(devices):
        raise InputError(
            f"config section 'mesh': data x fsdp x expert x tensor = {product}, there are {len(devices)} devices; "
            "set mesh.fsdp=0 to give it all that the others leave"
        )
    if len(devices) == 1:
        return None
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes))
