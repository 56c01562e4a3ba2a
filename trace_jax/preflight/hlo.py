"""Optimised HLO text as computations of instructions, and how often a loop runs.

CPU and GPU print a loop's trip count; the TPU compiler drops it, so it is also worked out from the loop itself: a counter that starts at a
constant, is moved by a constant and compared with one. That is every `scan` and `fori_loop`. A `while_loop` that may end earlier counts to
its bound; one that goes by data alone has no count.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line: `name = shape opcode(operands), attributes`. Of a constant, `operands` is its literal."""

    name: str
    shape: str
    opcode: str
    operands: str
    attributes: str

    @property
    def inputs(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.operands)

    def called(self, role: str) -> str:
        """The computation that is called as `calls`, `body`, `condition`, `to_apply`."""
        return re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)[1]


@dataclasses.dataclass
class Computation:
    name: str
    instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
    root: Instruction | None = None

    def inputs(self, instruction: Instruction) -> list[Instruction]:
        return [self.instructions[name] for name in instruction.inputs]


@dataclasses.dataclass
class Module:
    computations: dict[str, Computation]
    entry: Computation
    devices: int


def parse(text: str) -> Module:
    """The computations of an HLO module.

    Raises:
      ValueError: there is no entry computation.
    """
    header = dict(re.findall(r"\b(num_partitions|replica_count)=(\d+)", text.partition("\n")[0]))
    computations: dict[str, Computation] = {}
    entry = computation = None
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            computation = computations[found[2]] = Computation(found[2])
            entry = computation if found[1] else entry
        elif computation and (found := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)", line)):
            instruction = _instruction(found[2], re.sub(r"/\*.*?\*/", "", found[3]))
            computation.instructions[instruction.name] = instruction
            computation.root = instruction if found[1] else computation.root
    if entry is None:
        raise ValueError("this is no HLO module: it has no ENTRY computation")
    return Module(computations, entry, math.prod(map(int, header.values())))


def _instruction(name: str, rest: str) -> Instruction:
    end = _close(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _close(rest, start)
    return Instruction(name, shape, rest[:start], rest[start + 1 : end], rest[end + 1 :])


def _close(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise ValueError(f"a parenthesis is never closed: {text[start : start + 80]}")


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """The arrays of a shape, a tuple's in order, as (type, dimensions)."""
    return [(kind, [int(n) for n in dims.split(",") if n]) for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)]


def size(shape: str) -> float:
    """Bytes of a shape."""
    return sum(_width(kind) * math.prod(dims) for kind, dims in arrays(shape))


def _width(kind: str) -> float:
    """Bytes of one element: `bf16` 2, `s4` 0.5, `f8e4m3fn` 1, `c64` 8."""
    bits = re.match(r"[a-z]+?(\d+)", kind)
    return int(bits[1]) / 8 if bits else 1.0  # pred; tokens are empty


def trip_count(loop: Instruction, caller: Computation, module: Module) -> int | None:
    """How often the body of a `while` runs, at most; None where nothing but data decides.

    Args:
      caller: the computation that the loop stands in, which has its initial state.
    """
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(found[1])
    condition, body = (module.computations[loop.called(role)] for role in ("condition", "body"))
    tests, state = _evaluate(condition.root, condition, module), caller.inputs(loop)[0]
    if not isinstance(tests, list) or state.opcode != "tuple" or body.root.opcode != "tuple":
        return None
    start, after = caller.inputs(state), body.inputs(body.root)

    def side(value: _Linear) -> tuple[int, int] | None:
        """Of one side of a comparison, its value at first and by how much an iteration moves it."""
        if value.element is None:
            return value.offset, 0
        first, moved = _evaluate(start[value.element], caller, module), _evaluate(after[value.element], body, module)
        if not (isinstance(first, _Linear) and first.element is None and isinstance(moved, _Linear) and moved.element == value.element):
            return None
        return first.offset + value.offset, moved.offset

    bounds = [_iterations(test.direction, side(test.left), side(test.right)) for test in tests]
    return min((bound for bound in bounds if bound is not None), default=None)


def _iterations(direction: str, left: tuple[int, int] | None, right: tuple[int, int] | None) -> int | None:
    """How long a comparison of two values (at first, per iteration) stays true; None for ever, or where one is not known."""
    if left is None or right is None:
        return None
    distance, step = right[0] - left[0], left[1] - right[1]
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    if direction == "NE":
        return distance // step if step and distance % step == 0 and distance // step >= 0 else None
    return max(0, math.ceil(distance / step)) if step > 0 and direction != "EQ" else None


class _Linear(NamedTuple):
    """An element of the loop's state plus an offset; without an element, a constant."""

    element: int | None
    offset: int


class _Comparison(NamedTuple):
    direction: str
    left: _Linear
    right: _Linear


_Value = _Linear | list[_Comparison] | None  # comparisons that must all hold


def _evaluate(x: Instruction, computation: Computation, module: Module, given: Mapping[int, _Value] | None = None) -> _Value:
    """The value of a scalar of a loop's condition or body, None if it is nothing that a counter is made of.

    Args:
      given: the values of the parameters, inside of a fusion.
    """

    def values(of: Instruction = x) -> Sequence[_Value]:
        return [_evaluate(y, computation, module, given) for y in computation.inputs(of)]

    def inside(of: Instruction, element: int | None = None) -> _Value:
        callee = module.computations[of.called("calls")]
        result = callee.root if element is None else callee.inputs(callee.root)[element]
        return _evaluate(result, callee, module, dict(enumerate(values(of))))

    if x.opcode == "constant":
        return _Linear(None, int(x.operands)) if re.fullmatch(r"-?\d+", x.operands) else None
    if x.opcode == "parameter":
        return given.get(int(x.operands)) if given else None
    if x.opcode in ("copy", "bitcast", "copy-start", "copy-done"):
        return values()[0]
    if x.opcode == "get-tuple-element":
        (of,), index = computation.inputs(x), int(re.search(r"\bindex=(\d+)", x.attributes)[1])
        if of.opcode == "parameter" and given is None:
            return _Linear(index, 0)
        return inside(of, index) if of.opcode == "fusion" and module.computations[of.called("calls")].root.opcode == "tuple" else None
    if x.opcode == "fusion":
        return inside(x)
    if x.opcode == "and":
        return [test for value in values() if isinstance(value, list) for test in value] or None
    if x.opcode in ("add", "subtract", "compare"):
        left, right = values()
        if not isinstance(left, _Linear) or not isinstance(right, _Linear):
            return None
        if x.opcode == "compare":
            return [_Comparison(re.search(r"direction=(\w+)", x.attributes)[1], left, right)]
        if x.opcode == "add" and None in (left.element, right.element):
            return _Linear(right.element if left.element is None else left.element, left.offset + right.offset)
        if x.opcode == "subtract" and right.element is None:
            return _Linear(left.element, left.offset - right.offset)
    return None
