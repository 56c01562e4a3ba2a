"""Bytes of the device's memory that one instruction reads and writes.

An instruction reads its operands and writes its result, with three exceptions that matter in a program that scans its layers: a slice
reads what it cuts out and not the whole stack, an update in place writes the update alone, and what the compiler put into on-chip memory is
not in the device's. A fusion is one instruction; for each of its parameters it is what its inner instructions do with it.
"""

from __future__ import annotations

import re

from trace_jax.preflight.hlo import Computation, Instruction, Module, size

# They name or pass on what others read and write, or wait for it; what a loop or a call does is counted inside of it.
_NOTHING = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "call-start", "call-update"}
_NOTHING |= {"async-start", "async-update"}
_IN_PLACE = ("dynamic-update-slice", "scatter")
_SLICES = ("dynamic-slice", "gather", "slice")
_IN_PASSING = ("bitcast", "reshape", "transpose", "copy", "convert")  # inside of a fusion: a slice of it takes as much of its operand


def touched_bytes(x: Instruction, computation: Computation, module: Module) -> float:
    """Bytes that an instruction, which stands in no fusion, reads and writes."""
    if x.opcode in _NOTHING or x.opcode.endswith("-done"):
        return 0.0
    inputs = computation.inputs(x)
    if x.opcode == "fusion":
        callee = module.computations[x.called("calls")]
        parameters = ((int(p.operands), p) for p in callee.instructions.values() if p.opcode == "parameter")
        return sum(_read(p, callee, module, _off_chip(inputs[n].shape)) for n, p in parameters) + _written(x.shape, callee, module)
    if x.opcode in _SLICES:
        return 2 * _off_chip(x.shape)
    if x.opcode in _IN_PLACE:
        return 2 * _update(x, computation) if _off_chip(x.shape) else 0.0
    written = _parts(x.shape)
    if x.opcode.endswith("-start"):  # (operand, result, marks), but of a copy (result, operand, mark)
        written = written[:1] if x.opcode == "copy-start" else written[1:2] or written
    return sum(_off_chip(y.shape) for y in inputs) + sum(map(_off_chip, written))


def _read(x: Instruction, computation: Computation, module: Module, whole: float) -> float:
    """Bytes that a fusion reads of what `x` stands for, `whole` bytes of the device's memory."""
    read = 0.0
    for user in computation.instructions.values() if whole else ():
        for n in (n for n, name in enumerate(user.inputs) if name == x.name):
            if user.opcode in _SLICES and n == 0:
                read += size(user.shape)
            elif user.opcode == "fusion":
                callee = module.computations[user.called("calls")]
                parameter = next(p for p in callee.instructions.values() if p.opcode == "parameter" and int(p.operands) == n)
                read += _read(parameter, callee, module, whole)
            elif user.opcode in _IN_PASSING and user is not computation.root:
                read += _read(user, computation, module, whole)
            elif user.opcode != "tuple" and not (user.opcode in _IN_PLACE and n == 0):  # a result that is `x` itself, or lies in it
                return whole
    return min(read, whole)


def _written(shape: str, computation: Computation, module: Module) -> float:
    """Bytes that a fusion of this result writes."""
    root = computation.root
    results, parts = computation.inputs(root) if root.opcode == "tuple" else [root], _parts(shape)
    if len(parts) != len(results):  # one instruction of several results, or tuples in tuples
        return sum(map(_off_chip, parts))
    written = 0.0
    for part, result in zip(parts, results, strict=True):
        while result.opcode == "bitcast":
            (result,) = computation.inputs(result)
        if not _off_chip(part) or result.opcode == "parameter":
            continue
        if result.opcode == "fusion":
            written += _written(part, module.computations[result.called("calls")], module)
        elif result.opcode in _IN_PLACE:
            written += _update(result, computation)
        else:
            written += size(part)
    return written


def _update(x: Instruction, computation: Computation) -> float:
    """Bytes of what is written into the operand of an update in place."""
    inputs = computation.inputs(x)
    return sum(size(y.shape) for y in (inputs[1:2] if x.opcode == "dynamic-update-slice" else inputs[len(inputs) // 2 + 1 :]))


def _parts(shape: str) -> list[str]:
    """The arrays of a shape, each with its layout."""
    return re.findall(r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?", shape)


def _off_chip(shape: str) -> float:
    """Bytes of a shape that lie in the device's memory: a layout with S(n) is elsewhere."""
    return sum(size(part) for part in _parts(shape) if "S(" not in part)
