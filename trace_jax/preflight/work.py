"""What one execution of a compiled program takes, from its optimised HLO text: operations, memory traffic, collectives, kernels.

XLA's own cost analysis counts the body of a loop once, so a model that scans its layers looks one layer deep. Here a body counts as often
as it runs. Numbers are of one device: the text is the program that every device runs on its shard.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import NamedTuple

from trace_jax.preflight.hlo import Computation, Instruction, Module, arrays, parse, size, trip_count
from trace_jax.preflight.memory import touched_bytes


class Collective(NamedTuple):
    """The collectives of one kind.

    Attributes:
      bytes: that a device sends for them when they run as rings.
      overlapped: those of `bytes` that the schedule lets run beside other work.
    """

    count: int
    bytes: float
    overlapped: float = 0.0


@dataclasses.dataclass
class Work:
    """What one execution takes.

    Attributes:
      flops: of matrix products and convolutions; those inside of `kernels` are not known.
      touched: bytes of the device's memory that are read and written, each as often as an instruction names it.
      collectives: by kind, such as "all-gather".
      kernels: calls of custom kernels by name, such as Pallas kernels.
      unknown_loops: names of loops that data alone ends; their bodies are counted once.
    """

    flops: float = 0.0
    touched: float = 0.0
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
    kernels: Counter[str] = dataclasses.field(default_factory=Counter)
    unknown_loops: set[str] = dataclasses.field(default_factory=set)

    def add(self, other: Work, times: int = 1) -> None:
        self.flops += times * other.flops
        self.touched += times * other.touched
        for kind, more in other.collectives.items():
            old = self.collectives.get(kind, Collective(0, 0.0))
            self.collectives[kind] = Collective(*(a + times * b for a, b in zip(old, more, strict=True)))
        for name, count in other.kernels.items():
            self.kernels[name] += times * count
        self.unknown_loops |= other.unknown_loops


def count_work(text: str) -> Work:
    """The work of one execution of a program.

    Args:
      text: `compiled.as_text()`.

    Raises:
      ValueError: the text is no HLO module.
    """
    return _Counter(parse(text)).of(None)


class _Counter:
    """Walks the calls of a module, each computation once."""

    def __init__(self, module: Module):
        self._module = module
        self._done: dict[str, Work] = {}

    def of(self, name: str | None, fused: bool = False) -> Work:
        """The work of a computation; of the whole program for None. What stands in a fusion touches no memory; the fusion does."""
        computation = self._module.computations[name] if name else self._module.entry
        if computation.name not in self._done:
            work = Work()
            for instruction in computation.instructions.values():
                self._count(work, instruction, computation, fused)
            self._done[computation.name] = work
        return self._done[computation.name]

    def _count(self, work: Work, instruction: Instruction, computation: Computation, fused: bool) -> None:
        opcode, attributes = instruction.opcode, instruction.attributes
        if not fused:
            work.touched += touched_bytes(instruction, computation, self._module)
        if opcode == "dot":
            work.flops += _dot_flops(instruction, computation)
        elif opcode == "convolution":
            work.flops += _convolution_flops(instruction, computation)
        elif opcode == "while":
            trips = trip_count(instruction, computation, self._module)
            if trips is None:
                work.unknown_loops.add(instruction.name)
            for role in ("condition", "body"):
                work.add(self.of(instruction.called(role)), 1 if trips is None else trips)
        elif opcode == "fusion":
            work.add(self.of(instruction.called("calls"), fused=True))
        elif opcode == "async-start":
            work.add(_overlapped(self.of(instruction.called("calls"))))
        elif opcode in ("call", "call-start"):
            work.add(self.of(instruction.called("to_apply")))
        elif opcode == "conditional":  # the branch that takes most
            branches = re.findall(r"(?:branch_computations|true_computation|false_computation)=(\{.*?\}|[^,]+)", attributes)
            names = re.findall(r"[\w.\-]+", " ".join(branches))
            work.add(max((self.of(name) for name in names), key=lambda w: (w.flops, sum(c.bytes for c in w.collectives.values()))))
        elif opcode == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', attributes)[1]
            if target not in _NO_WORK:
                # all Pallas kernels of a TPU share one target; their instruction has the kernel's name
                work.kernels[re.sub(r"(\.\d+|\.clone)+$", "", instruction.name) if target == "tpu_custom_call" else target] += 1
        elif kind := _collective_kind(instruction, computation):
            self._count_collective(work, kind, instruction, computation)

    def _count_collective(self, work: Work, kind: str, instruction: Instruction, computation: Computation) -> None:
        overlapped = instruction.opcode.endswith("-start") and '"is_sync":true' not in instruction.attributes
        # the TPU compiler spreads a collective over a chain of fusions, beside other work; the first of them counts
        if "chain_id=" in instruction.attributes:
            overlapped = any("AsyncCollectiveStart" in x.attributes for x in computation.instructions.values())
            if not overlapped:
                return
        devices = _group_size(instruction.attributes, self._module.devices)
        if devices > 1:
            sent = _RING[kind](devices) * sum(size(x.shape) for x in computation.inputs(instruction))
            work.add(Work(collectives={kind: Collective(1, sent, sent if overlapped else 0.0)}))


# Bytes that a device of a ring of n sends per byte of its operand. An all-gather passes n - 1 shards on, each as large as the operand; an
# all-reduce is a reduce-scatter and an all-gather. An all-to-all goes more than one hop, which a torus makes up for by its other links.
_RING = {
    "all-gather": lambda n: n - 1,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}
# Buffers, hints of sharding and marks of the scheduler.
_NO_WORK = {"AllocateBuffer", "ConcatBitcast", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
_NO_WORK |= {"AsyncCollectiveStart", "AsyncCollectiveDone", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked"}


def _collective_kind(instruction: Instruction, computation: Computation) -> str | None:
    kind = instruction.opcode.removesuffix("-start")
    # the TPU compiler writes a reduce-scatter as an all-reduce and a slice in one fusion
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        return "reduce-scatter"
    return kind if kind in _RING else None


def _overlapped(work: Work) -> Work:
    return dataclasses.replace(work, collectives={kind: c._replace(overlapped=c.bytes) for kind, c in work.collectives.items()})


def _group_size(attributes: str, devices: int) -> int:
    """Devices that take part in one collective, from any of the forms in which HLO writes the groups."""
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        # an axis, or with `:(before)size` a part of one
        return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2]))
    return devices  # no groups: all take part. Pairs of a collective-permute cost the same however many they are.


def _numbers(attributes: str, name: str) -> list[int]:
    found = re.search(rf"\b{name}=\{{([\d,]*)\}}", attributes)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _dot_flops(dot: Instruction, computation: Computation) -> float:
    """Two per element of the result and contracted index."""
    (_, result), (_, left) = arrays(dot.shape)[0], arrays(computation.inputs(dot)[0].shape)[0]
    return 2.0 * math.prod(result) * math.prod(left[axis] for axis in _numbers(dot.attributes, "lhs_contracting_dims"))


def _convolution_flops(convolution: Instruction, computation: Computation) -> float:
    """Two per multiply-add that meets a real element, neither padding nor the gaps of a dilation.

    The TPU compiler writes every matrix product as a convolution; a batch dimension becomes a spatial one whose dilation leaves a single
    product per position, so padding must not count.
    """
    (_, left), (_, kernel) = (arrays(x.shape)[0] for x in computation.inputs(convolution))
    _, result = arrays(convolution.shape)[0]
    a, b, c = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes).groups()
    window = dict(re.findall(r"(\w+)=([\w\-]+)", (re.search(r"window=\{(.*?)\}", convolution.attributes) or ["", ""])[1]))
    spatial = sorted(set(a) - {"b", "f"})

    def per_axis(name: str, default: str) -> list[str]:
        return window[name].split("x") if name in window else [default] * len(spatial)

    products = 1
    options = [per_axis(*o) for o in (("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))]
    for axis, stride, pad, lhs, rhs in zip(spatial, *options, strict=True):
        sizes = left[a.index(axis)], kernel[b.index(axis)], result[c.index(axis)]
        products *= _products(*sizes, int(stride), int(pad.split("_")[0]), int(lhs), int(rhs))
    groups = {name: int(n) for name, n in re.findall(r"(feature|batch)_group_count=(\d+)", convolution.attributes)}
    features = left[a.index("f")] // groups.get("feature", 1) * result[c.index("f")]
    return 2.0 * products * features * (left[a.index("b")] // groups.get("batch", 1))


def _products(size: int, taps: int, positions: int, stride: int, pad: int, dilation: int, spread: int) -> int:
    """Pairs of a position of the result and a tap of the kernel that meet an element of the input, along one axis."""
    if (stride, pad, dilation) == (1, 0, 1) and size == positions + (taps - 1) * spread:
        return positions * taps
    places = (place * stride - pad + tap * spread for place in range(positions) for tap in range(taps))
    return sum(0 <= at < size * dilation and at % dilation == 0 for at in places)
