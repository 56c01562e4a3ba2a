"""Arrays put onto the devices straight from what is read, so that no host holds more than it must.

A host reads the part of a tensor that its own devices hold, once, however many of them share a slice; the layers of a stacked parameter
are read and put one by one.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

Read = Callable[[tuple[slice, ...]], np.ndarray]  # index with one slice an axis -> the elements there, in any dtype and memory order


def place(shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None, read: Read) -> jax.Array:
    """The array of `shape` that `read` gives, laid out by `sharding` (None: whole on the default device).

    `read` is asked once, for the smallest box around the slices of this host's devices. Host memory beyond the result: that box.
    """
    array = jax.block_until_ready(_put(shape, sharding, read))
    gc.collect(0)  # only then does JAX let go of what it copied from
    return array.astype(dtype)


def place_stacked(shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None, reads: Sequence[Read]) -> jax.Array:
    """The array of `shape` [n, ...] whose layers the n `reads` give, each without the leading axis, which `sharding` must leave whole.

    Each layer is put and copied into the result on the devices before the next is read. Host memory beyond the result: one layer's box; on
    a CPU, where the devices are the host, once more if it had to be cut or transposed.
    """
    if len(reads) != shape[0]:
        raise ValueError(f"{len(reads)} layers for an array of shape {shape}")
    if sharding is not None and sharding.shard_shape(shape)[0] != shape[0]:
        raise ValueError(f"{sharding} splits the leading axis, the layers, of an array of shape {shape}; leave it whole")
    result, insert = jnp.zeros(shape, dtype, device=sharding), _insertion(sharding)
    for i, read in enumerate(reads):
        layer = _put((1, *shape[1:]), sharding, lambda index, read=read: read(index[1:])[None])
        result = jax.block_until_ready(insert(result, layer, i))  # else many layers would wait in memory
    return result


def _put(shape: tuple[int, ...], sharding: Sharding | None, read: Read) -> jax.Array:
    """The array on the devices, in the dtype that it is read in: casting is their work."""
    if sharding is None:
        return jax.device_put(read(tuple(slice(0, size) for size in shape)))
    held = {device: _bounds(index, shape) for device, index in sharding.addressable_devices_indices_map(shape).items()}
    box = tuple(slice(min(part.start for part in axis), max(part.stop for part in axis)) for axis in zip(*held.values(), strict=True))
    data = read(box)
    shards = []
    for device, index in held.items():
        inside = tuple(slice(part.start - whole.start, part.stop - whole.start) for part, whole in zip(index, box, strict=True))
        shards.append(jax.device_put(data[inside], device))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


@functools.cache
def _insertion(sharding: Sharding | None) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """The compiled function of (stack [n, ...], layer [1, ...], i) that puts `layer` at `i`, in place."""

    def insert(stack: jax.Array, layer: jax.Array, i: int) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(stack, layer.astype(stack.dtype), i, axis=0)

    return jax.jit(insert, donate_argnums=0, out_shardings=sharding)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[slice]:
    """`index` with its ends written out."""
    return [slice(*part.indices(size)[:2]) for part, size in zip(index, shape, strict=True)]
