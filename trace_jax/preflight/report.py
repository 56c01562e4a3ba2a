"""What preflight prints: a table of the programs beside each other, and what to change where one does not fit.

Times are a roofline at the published peak rates, hence lower bounds: what a real step adds is in no compiled program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trace_jax.preflight.accelerators import Accelerator
from trace_jax.preflight.program import DoesNotFit, Program

_FULL = 0.9  # of the memory: above, fragmentation or a second program's buffers end a run
_SAME = 2.0  # times the analytic operations that a compiled program may have; rematerialisation alone adds a third


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What of a config decides how much memory a program takes.

    Attributes:
      mesh: devices along each axis.
      weights: bytes of a device for its part of the model.
    """

    micro_rows: int
    pack_length: int
    remat: bool
    lanes: int
    mesh: Mapping[str, int]
    weights: int

    @property
    def rows_at_a_time(self) -> int:
        """Fewer rows than this leave devices without one."""
        return math.prod(self.mesh[axis] for axis in ("data", "fsdp", "expert"))


class Roofline(NamedTuple):
    """Seconds of one execution.

    Attributes:
      compute: operations at the peak rate, the analytic or the compiled ones, whichever are more.
      memory: what the instructions read and write, at the rate of the device's memory.
      interconnect: collectives as rings.
      exposed: those of `interconnect` that the schedule does not run beside other work.
    """

    compute: float
    memory: float
    interconnect: float
    exposed: float

    @property
    def limit(self) -> str:
        return max(("compute", "memory", "interconnect"), key=lambda term: getattr(self, term))

    @property
    def step(self) -> float:
        """Compute, memory and overlapped collectives run beside each other; the exposed collectives come on top."""
        return max(self.compute, self.memory, self.interconnect - self.exposed) + self.exposed


def roofline(program: Program, accelerator: Accelerator, flops: float | None = None) -> Roofline:
    """The times of a program.

    Args:
      flops: analytic operations per device; the custom kernels' are in no compiled count.
    """
    sent, overlapped = (sum(getattr(c, field) for c in program.collectives.values()) for field in ("bytes", "overlapped"))
    return Roofline(
        compute=max(flops or 0.0, program.dot_flops) / accelerator.flops,
        memory=program.touched / accelerator.bandwidth,
        interconnect=sent / accelerator.interconnect,
        exposed=(sent - overlapped) / accelerator.interconnect,
    )


def fits(program: Program | DoesNotFit, accelerator: Accelerator) -> bool:
    """Whether it compiled and, with what a run holds beside it, takes no more than the device has. GPU programs always compile."""
    return isinstance(program, Program) and program.total <= accelerator.hbm


def render(
    config: str,
    topology: str,
    accelerator: Accelerator,
    programs: Sequence[Program | DoesNotFit],
    settings: Settings,
    flops: Mapping[str, float] | None = None,
) -> str:
    """The report as plain text.

    Args:
      config: the config's name.
      flops: analytic operations per device and execution, by the program's name.
    """
    flops = flops or {}
    fitting = [program for program in programs if isinstance(program, Program)]
    lines = [
        f"{config or 'config'} on {topology}: {accelerator.devices} x {accelerator.device_kind}, each {_size(accelerator.hbm)}, "
        f"{_engineering(accelerator.flops)}FLOP/s, memory {_engineering(accelerator.bandwidth)}B/s, "
        f"links {_engineering(accelerator.interconnect)}B/s",
        f"mesh {', '.join(f'{axis} {n}' for axis, n in settings.mesh.items())}; micro-batches of {settings.micro_rows} x "
        f"{settings.pack_length} tokens{', rematerialised' if settings.remat else ''}; {settings.lanes} lanes an engine",
        "",
        *_table([["per device", *(program.name for program in fitting)], *_rows(fitting, accelerator, flops)] if fitting else []),
        *_notes(programs, accelerator, flops),
    ]
    for program in programs:
        lines += advice(program, accelerator, settings)
    if all(fits(program, accelerator) for program in programs):
        lines.append(f"All {len(programs)} programs fit.")
    return "\n".join(lines) + "\n"


def advice(program: Program | DoesNotFit, accelerator: Accelerator, settings: Settings) -> Iterator[str]:
    """What to change, in the order in which to try it, and why; nothing where less than 90 % of the memory is taken."""
    aim = _FULL * accelerator.hbm
    if isinstance(program, DoesNotFit):
        yield f"{program.name} does not fit: it needs {_size(program.needed)} of {_size(program.available)}. {program.message}"
        temporaries, held = program.needed, settings.weights + program.beside  # `needed` is, most times, without the arguments
    elif program.total > aim:
        verdict = "does not fit" if program.total > accelerator.hbm else "leaves too little room"
        yield f"{program.name} {verdict}: {_size(program.total)} of {_size(accelerator.hbm)}, {program.total / accelerator.hbm:.0%}."
        temporaries, held = program.temporaries, program.held + program.beside
    else:
        return
    if settings.weights > aim:
        steps = [f"nothing in train or rollout helps: the weights alone take {_size(settings.weights)} of each device"]
    else:
        steps = [*_less_work(program, temporaries, aim - held, settings)]
    steps += _split_further(held + temporaries, aim, accelerator, settings)
    yield from (f"  {n}. {step}" for n, step in enumerate(steps, 1))


def _less_work(program: Program | DoesNotFit, temporaries: float, room: float, settings: Settings) -> Iterator[str]:
    """Settings that shrink the temporaries, and what the engine holds."""
    if "gradient" in program.name and temporaries > room:
        share, rows, least = max(room, 0.0) / temporaries, settings.micro_rows, settings.rows_at_a_time
        shrunk = f"temporaries of {_size(temporaries)} " + (f"must become {_size(room)}" if room > 0 else "find no room beside the rest")
        if not settings.remat:
            yield f"train.remat=true stores less: {shrunk}"
        if rows > least:
            fewer = max(least, int(rows * share) // least * least)
            yield f"train.micro_rows={fewer}, from {rows}: activations are linear in it, the loss does not depend on it; {shrunk}"
        if room > 0 and rows * share < least:
            length = int(settings.pack_length * share * max(1, rows / least)) // 256 * 256
            few = "with that" if rows > least else "with one row a device already"
            yield f"{few}, train.pack_length and rollout.context down from {settings.pack_length} to {length}: {shrunk}"
    if "decode" in program.name or program.beside > settings.weights / 4:
        yield f"rollout.lanes down from {settings.lanes}, or rollout.context: the engine's cache is lanes x context"


def _split_further(total: float, aim: float, accelerator: Accelerator, settings: Settings) -> Iterator[str]:
    """Axes of the mesh, and chips, that make each device's part smaller."""
    copies = settings.mesh["data"]
    if copies > 1:
        yield (
            f"mesh.data=1: {copies} copies of the weights, {_size(settings.weights)} a device, become one that mesh.fsdp splits "
            "(and gathers in every step)"
        )
    chips = 2 ** max(1, math.ceil(math.log2(total / aim)))
    yield f"more chips: x {chips}, with mesh.data=1, since {accelerator.devices} hold {_size(total)} each"


def _rows(programs: Sequence[Program], accelerator: Accelerator, flops: Mapping[str, float]) -> Iterator[list[str]]:
    def row(label: str, cell) -> list[str]:
        return [label, *(cell(program) for program in programs)]

    for label, field in (("arguments", "arguments"), ("outputs", "outputs"), ("  in donated arguments", "aliased")):
        yield row(label, lambda p, field=field: _size(getattr(p, field)))
    yield row("temporaries", lambda p: _size(p.temporaries))
    yield row("code", lambda p: _size(p.code))
    yield row("peak", lambda p: _size(p.peak))
    yield row("beside it in a run", lambda p: _size(p.beside))
    yield row("together, of HBM", lambda p: f"{p.total / accelerator.hbm:.1%}")
    yield []
    yield row("FLOPs, analytic", lambda p: _engineering(flops[p.name]) if p.name in flops else "-")
    yield row("FLOPs, compiled products", lambda p: _engineering(p.dot_flops) + ("*" if p.unknown_loops else ""))
    yield row("memory, read and written", lambda p: _size(p.touched))
    for kernel in sorted({kernel for p in programs for kernel in p.kernels}):
        yield row(f"  kernel {kernel}", lambda p, kernel=kernel: f"{p.kernels[kernel]:,} x" if kernel in p.kernels else "-")
    for kind in sorted({kind for p in programs for kind in p.collectives}):
        yield row(kind, lambda p, kind=kind: _collective(p.collectives[kind]) if kind in p.collectives else "-")
    yield []
    times = {p.name: roofline(p, accelerator, flops.get(p.name)) for p in programs}
    for term in ("compute", "memory", "interconnect"):
        yield row(f"time of {term}", lambda p, term=term: _seconds(getattr(times[p.name], term)))
    yield row("  not overlapped", lambda p: _seconds(times[p.name].exposed))
    yield row("limited by", lambda p: times[p.name].limit)
    yield row("expected time, at best", lambda p: _seconds(times[p.name].step))
    yield row("compiled in", lambda p: f"{p.compile_seconds:.0f} s")


def _notes(programs: Sequence[Program | DoesNotFit], accelerator: Accelerator, flops: Mapping[str, float]) -> Iterator[str]:
    yield ""
    yield "Of one execution, loops as often as they run at most; times at the peak rates above. Memory: what the instructions read and"
    yield "write. Collectives: bytes that a device sends, as rings. Expected: the largest term, and the collectives that nothing hides."
    yield "Beside a step a run holds the optimizer's state or the weights, the engine's cache and its copy of the adapters."
    for program in programs:
        if isinstance(program, DoesNotFit):
            continue
        if program.unknown_loops:
            names = ", ".join(program.unknown_loops)
            yield f"* {program.name}: loops that data alone ends are counted once: {names}."
        known = flops.get(program.name)
        if known and program.dot_flops > _SAME * known:
            times = program.dot_flops / known
            yield f"{program.name}: the compiled products are {times:.1f} x the analytic FLOPs. With experts:"
            yield "libtpu before 0.0.50, that of JAX before 0.12, makes their weight gradients over all experts of a device."
    yield ""


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines, the first column to the left and the others to the right; an empty row is an empty line."""
    if rows:
        widths = [max(len(row[column]) for row in rows if row) for column in range(len(rows[0]))]
        for row in rows:
            first, *others = zip(row, widths, strict=True) if row else [("", 0)]
            yield "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in others)]).rstrip()


def _size(size: float) -> str:
    return _scaled(size, {"GiB": 2**26, "MiB": 2**16, "KiB": 1}, {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10})


def _seconds(time: float) -> str:
    return _scaled(time, {"s": 1, "ms": 1e-4, "us": 0}, {"s": 1, "ms": 1e-3, "us": 1e-6})


def _scaled(number: float, least: Mapping[str, float], units: Mapping[str, float]) -> str:
    """The number in the first unit that it is large enough for."""
    unit = next((unit for unit, bound in least.items() if number and number >= bound), None)
    return f"{number / units[unit]:.2f} {unit}" if unit else "0"


def _engineering(number: float) -> str:
    """`3.83 T`."""
    power = min(5, int(math.log10(number) / 3)) if number >= 1 else 0
    return f"{number / 1000**power:.4g} {'kMGTP'[power - 1]}" if power else f"{number:.4g}"


def _collective(collective) -> str:
    return f"{collective.count:,} x, {_size(collective.bytes)}"
