"""The accelerators that a program can be compiled for without having one: what they are made of, and their devices as JAX sees them.

`v5e:4x4` is a TPU and its slice in chips, `h100:8` a GPU and how many. libtpu, or the CUDA plugin, compiles for them on any machine.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re

import jax
from jax.experimental import topologies

from trace_jax.errors import InputError
from trace_jax.preflight.libtpu import expect_no_tpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One device of a topology, by its published peak rates.

    Attributes:
      hbm: bytes that a program may use.
      flops: of bfloat16 products, per second.
      bandwidth: of the memory, bytes per second.
      interconnect: bytes per second that the device sends in a collective over one axis of its neighbours.
      devices: of the whole topology.
    """

    name: str
    device_kind: str
    hbm: int
    flops: float
    bandwidth: float
    interconnect: float
    devices: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tpu:
    """A TPU generation; memory and rates are of a JAX device.

    Attributes:
      link: bytes per second, one way along one axis.
      ring: where all axes are multiples of this they close to rings, and both directions carry.
      cores: what the N of Cloud names such as v5p-N counts in a chip.
    """

    kind: str
    hbm: float
    flops: float
    bandwidth: float
    link: float
    ring: int
    axes: int
    cores: int = 1
    devices: int = 1
    options: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gpu:
    """A GPU of a host of eight.

    Attributes:
      memory: bytes, as the driver reports it.
      link: bytes per second to its host's other GPUs, one way.
      network: the same to other hosts, over the GPU's own network card.
    """

    kind: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    compute: tuple[int, int]
    cores: int
    lanes: int
    l2: int
    shared: int
    clock: float


# hbm: what libtpu 0.0.50 itself calls available when a program does not fit. flops, bandwidth: Google's system architecture pages
# (cloud.google.com/tpu/docs, v4 to tpu7x). link, ring: "How to think about TPUs" (jax-ml.github.io/scaling-book). v4 runs as one device a
# chip (megacore), as on live hosts; a tpu7x chip is two devices, which share its links.
_TPUS = {
    "v4": _Tpu(
        kind="TPU v4",
        hbm=30.75,
        flops=275e12,
        bandwidth=1228e9,
        link=45e9,
        ring=4,
        axes=3,
        cores=2,
        options=(("chip_config_name", "megacore"),),
    ),
    "v5e": _Tpu(kind="TPU v5 lite", hbm=15.75, flops=197e12, bandwidth=819e9, link=45e9, ring=16, axes=2),
    "v5p": _Tpu(kind="TPU v5", hbm=95.73, flops=459e12, bandwidth=2765e9, link=90e9, ring=4, axes=3, cores=2),
    "v6e": _Tpu(kind="TPU v6 lite", hbm=31.24, flops=918e12, bandwidth=1638e9, link=90e9, ring=16, axes=2),
    "tpu7x": _Tpu(kind="TPU7x", hbm=94.74, flops=1153.5e12, bandwidth=3690e9, link=45e9, ring=4, axes=3, cores=2, devices=2),
}
# The SXM boards of NVIDIA's data sheets: dense bfloat16, memory bandwidth, NVLink one way, a card of 400 Gb/s (A100: 200) a GPU.
# The rest is what the compiler asks: multiprocessors, their lanes and shared memory, L2, clock (white papers, CUDA programming guide).
_HOPPER = {"compute": (9, 0), "cores": 132, "lanes": 128, "l2": 50 << 20, "shared": 228 << 10, "clock": 1.98}
_GPUS = {
    "a100": _Gpu(
        kind="NVIDIA A100-SXM4-80GB", memory=85.0e9, flops=312e12, bandwidth=2039e9, link=300e9, network=25e9,
        compute=(8, 0), cores=108, lanes=64, l2=40 << 20, shared=164 << 10, clock=1.41,
    ),
    "h100": _Gpu(kind="NVIDIA H100 80GB HBM3", memory=84.9e9, flops=989e12, bandwidth=3350e9, link=450e9, network=50e9, **_HOPPER),
    "h200": _Gpu(kind="NVIDIA H200", memory=150.1e9, flops=989e12, bandwidth=4800e9, link=450e9, network=50e9, **_HOPPER),
}  # fmt: skip
_HOST = 8  # GPUs
_EXAMPLES = "v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4, tpu7x:2x2x4, a100:8, h100:8, h200:8"
# The shapes in which chips are let; v5e and v6e in a plane, the others in a block.
_SHAPES = {
    2: {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"},
    3: {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8", 1024: "8x8x16"},
}
_ALIASES = {"v5litepod": "v5e", "v7x": "tpu7x", "v7": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e", "v5lite": "v5e"}


def find(topology: str) -> Accelerator:
    """A device of a topology. Of a GPU's memory a program may use the share that JAX takes: XLA_PYTHON_CLIENT_MEM_FRACTION, or 75 %.

    Raises:
      InputError: there is no such accelerator, or the name is misspelt; the message has the accepted spelling.
    """
    name, shape = _split(topology)
    if name in _GPUS:
        gpu, count = _GPUS[name], shape[0]
        share = float(os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
        link = gpu.link if count <= _HOST else gpu.network
        rates = {"flops": gpu.flops, "bandwidth": gpu.bandwidth, "interconnect": link}
        return Accelerator(name=name, device_kind=gpu.kind, hbm=int(gpu.memory * share), devices=count, **rates)
    tpu = _TPUS[name]
    link = tpu.link * (1 if any(n % tpu.ring for n in shape) else 2)
    rates = {"flops": tpu.flops, "bandwidth": tpu.bandwidth, "interconnect": link}
    return Accelerator(name=name, device_kind=tpu.kind, hbm=int(tpu.hbm * 2**30), devices=math.prod(shape) * tpu.devices, **rates)


def name_of_kind(kind: str) -> str | None:
    """`v5p` of the `device_kind` that JAX gives it; None of one that the tables do not have."""
    return {part.kind: name for table in (_GPUS, _TPUS) for name, part in table.items()}.get(kind)


def of_device(device: jax.Device) -> Accelerator | None:
    """What the tables know of a device that is there; None of one that they do not have."""
    name = name_of_kind(device.device_kind)
    return name and find(f"{name}:1" if name in _GPUS else f"{name}:{'x'.join('1' * _TPUS[name].axes)}")


def topology_devices(topology: str) -> list[jax.Device]:
    """Devices to compile for; nothing can run on them.

    Raises:
      InputError: as `find`; or libtpu, or the CUDA plugin, is not installed, or refuses the shape.
    """
    name, shape = _split(topology)
    return _gpu_devices(topology, name, shape[0]) if name in _GPUS else _tpu_devices(topology, name, shape)


def _tpu_devices(topology: str, name: str, shape: tuple[int, ...]) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise InputError(f"--topology={topology}: compiling for a TPU needs libtpu, and no TPU: pip install 'trace-jax[tpu]'")
    expect_no_tpu()
    options = dict(_TPUS[name].options)
    if math.prod(shape) == 1:  # the default is hosts of four chips
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        return list(topologies.get_topology_desc(f"{name}:{'x'.join(map(str, shape))}", "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        shapes = ", ".join(f"{name}:{shape}" for shape in _SHAPES[len(shape)].values())
        raise InputError(f"--topology={topology}: libtpu: {str(error).splitlines()[0]}; slices are {shapes}") from error


def _gpu_devices(topology: str, name: str, count: int) -> list[jax.Device]:
    if not any(importlib.util.find_spec(plugin) for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin")):
        raise InputError(f"--topology={topology}: compiling for a GPU needs the CUDA plugin, and no GPU: pip install 'trace-jax[gpu]'")
    # without this the plugin does not load where there is no cuDNN
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    layout = f"1x{max(1, count // _HOST)}x{min(count, _HOST)}"
    try:
        return list(topologies.get_topology_desc(name, "cuda", target_config=_target(_GPUS[name]), topology=layout).devices)
    except NotImplementedError as error:  # JAX was in use before, and gave the plugin up
        message = f"--topology={topology}: JAX could not load its CUDA plugin; set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1"
        raise InputError(message) from error


def _target(gpu: _Gpu) -> str:
    """The GPU as XLA's `GpuTargetConfigProto`, in text form."""
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": gpu.shared,
        "shared_memory_per_block_optin": gpu.shared - 1024,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(gpu.bandwidth),
        "l2_cache_size": gpu.l2,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": int(gpu.memory),
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    fields = " ".join(f"{name}: {value}" for name, value in device.items())
    major, minor = gpu.compute
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{gpu.kind}"'
    )


def _split(topology: str) -> tuple[str, tuple[int, ...]]:
    """`("v5e", (4, 4))` of "v5e:4x4"."""

    def refuse(why: str):
        raise InputError(f"--topology={topology}: {why}")

    name, colon, size = topology.lower().partition(":")
    cloud = re.fullmatch(r"([a-z0-9]+?)-(\d+)", topology.lower())
    word = cloud[1] if cloud else name
    word = _ALIASES.get(word, word)
    if word not in _TPUS and word not in _GPUS:
        refuse(f"no such accelerator; there are {_EXAMPLES}")
    if cloud:  # a Cloud name; those of some generations count two cores a chip
        count = int(cloud[2])
        chips = count // _TPUS[word].cores if word in _TPUS else count
        spelt = str(chips) if word in _GPUS else _SHAPES[_TPUS[word].axes].get(chips)
        refuse(f"write {word}:{spelt}, {chips} chips" if spelt else f"give the shape of the slice in chips, such as {_example(word)}")
    if name != word:
        refuse(f"write {word}:{size}" if size else f"write {_example(word)}")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", size):
        refuse(f"the size is missing or malformed; write such as {_example(name)}")
    shape = tuple(int(n) for n in size.split("x"))
    if name in _TPUS and len(shape) != _TPUS[name].axes:
        slices = _SHAPES[_TPUS[name].axes]
        same = slices.get(math.prod(shape))
        refuse(f"the shape of a {name} slice has {_TPUS[name].axes} axes, in chips" + (f": write {name}:{same}" if same else ""))
    if name in _GPUS and (len(shape) != 1 or (shape[0] > _HOST and shape[0] % _HOST)):
        refuse(f"expected {name}:COUNT, up to {_HOST} GPUs or whole hosts of {_HOST}")
    return name, shape


def _example(name: str) -> str:
    return next(example for example in _EXAMPLES.split(", ") if example.startswith(name))
