"""What preflight prints: a table of the programs beside each other, and what to change where one does not fit.

Times are a roofline at the published peak rates, hence lower bounds: what a real step adds is in no compiled program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from trace_jax.preflight.accelerators import Accelerator
from trace_jax.preflight.program import DoesNotFit, Program

_FULL = 0.9  # of the memory: above, fragmentation or a second program's buffers end a run
_SAME = 2.0  # times the analytic operations that a compiled program may have; rematerialisation alone adds a third


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
    """Whether it compiled and holds no more than the device has. GPU programs compile whatever they need."""
    return isinstance(program, Program) and program.peak <= accelerator.hbm


def render(
    config: str,
    topology: str,
    accelerator: Accelerator,
    programs: Sequence[Program | DoesNotFit],
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
        "",
        *_table([["per device", *(program.name for program in fitting)], *_rows(fitting, accelerator, flops)] if fitting else []),
        *_notes(programs, accelerator, flops),
    ]
    for program in programs:
        lines += advice(program, accelerator)
    if all(fits(program, accelerator) for program in programs):
        lines.append(f"All {len(programs)} programs fit.")
    return "\n".join(lines) + "\n"


def advice(program: Program | DoesNotFit, accelerator: Accelerator) -> Iterator[str]:
    """What to change, in the order in which to try it, and why; nothing where less than 90 % of the memory is taken."""
    if isinstance(program, Program) and program.peak <= _FULL * accelerator.hbm:
        return
    decoding = "decode" in program.name or "prefill" in program.name
    aim = _FULL * accelerator.hbm
    if isinstance(program, DoesNotFit):
        yield f"{program.name} does not fit: it needs {_size(program.needed)} of {_size(program.available)}. {program.message}"
        factor, shrunk = program.needed / aim, f"{_size(program.needed)} must become {_size(aim)}"
    else:
        verdict = "does not fit" if program.peak > accelerator.hbm else "leaves too little room"
        yield f"{program.name} {verdict}: {_size(program.peak)} of {_size(accelerator.hbm)}, {program.peak / accelerator.hbm:.0%}."
        room = aim - program.held
        factor = program.temporaries / room if room > 0 else math.inf
        shrunk = f"temporaries of {_size(program.temporaries)} must become {_size(room)}"
    steps = []
    if factor == math.inf:
        steps.append(f"nothing in {'rollout' if decoding else 'train'} helps: {_size(program.held)} are held whatever the temporaries")
    elif decoding:
        steps.append(f"rollout.lanes down, to 1/{math.ceil(factor)} at most: {shrunk}, and the cache is an argument that shrinks too")
        steps.append("rollout.context down: the cache is lanes x context")
    else:
        steps.append(f"train.remat=true, if it is not yet, stores less: {shrunk}")
        steps.append(f"train.micro_rows down, to 1/{math.ceil(factor)}: activations are linear in it, the loss does not depend on it")
        steps.append("train.pack_length down, if the longest episode allows: activations are linear in it too")
    if isinstance(program, Program):
        ways = 2 ** max(1, math.ceil(math.log2(program.held / (aim / 2))))  # half of the memory is for the temporaries
        left = f"{_size(program.arguments)} of arguments become {_size(program.arguments / ways)}"
        steps.append(f"mesh.fsdp, or mesh.expert where there are experts, x {ways}: {left}")
        steps.append(f"more chips: x {ways} where mesh.fsdp and mesh.expert already take all {accelerator.devices} devices")
    else:
        steps.append("mesh.fsdp, or mesh.expert where there are experts, x 2: weights, adapters and optimizer are split further")
        steps.append(f"more chips: x {2 ** math.ceil(math.log2(max(2.0, factor)))}, where the mesh already takes all {accelerator.devices}")
    yield from (f"  {n}. {step}" for n, step in enumerate(steps, 1))


def _rows(programs: Sequence[Program], accelerator: Accelerator, flops: Mapping[str, float]) -> Iterator[list[str]]:
    def row(label: str, cell) -> list[str]:
        return [label, *(cell(program) for program in programs)]

    for label, field in (("arguments", "arguments"), ("outputs", "outputs"), ("  in donated arguments", "aliased")):
        yield row(label, lambda p, field=field: _size(getattr(p, field)))
    yield row("temporaries", lambda p: _size(p.temporaries))
    yield row("code", lambda p: _size(p.code))
    yield row("peak", lambda p: _size(p.peak))
    yield row("peak of HBM", lambda p: f"{p.peak / accelerator.hbm:.1%}")
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
    for program in programs:
        if isinstance(program, DoesNotFit):
            continue
        if program.unknown_loops:
            names = ", ".join(program.unknown_loops)
            yield f"* {program.name}: loops that data alone ends are counted once: {names}."
        known = flops.get(program.name)
        if known and program.dot_flops > _SAME * known:
            times = program.dot_flops / known
            yield f"{program.name}: the compiled products are {times:.1f} x the analytic FLOPs. With experts: libtpu before 0.0.50, that of"
            yield "JAX before 0.12, takes the weight gradients of grouped products over all experts."
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
