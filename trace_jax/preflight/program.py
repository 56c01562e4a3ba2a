"""A lowered step, compiled: the memory that it takes, the work of one execution, or by how much it does not fit."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Mapping

import jax

from trace_jax.preflight.work import Collective, count_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled program. Bytes and operations are of one device, and of one execution with loops as often as they run.

    Attributes:
      aliased: bytes of the outputs that lie in the donated arguments.
      code: bytes of the program itself.
      beside: bytes that a run holds on the device beside the program's own.
      dot_flops: of matrix products and convolutions, without those inside of `kernels`.
      touched: bytes of the device's memory that are read and written, each as often as an instruction names it.
      collectives: by kind; bytes are those that the device sends.
      kernels: calls of custom kernels by name.
      unknown_loops: loops that data alone ends and whose bodies were counted once.
    """

    name: str
    arguments: int
    outputs: int
    temporaries: int
    aliased: int = 0
    code: int = 0
    beside: int = 0
    dot_flops: float = 0.0
    touched: float = 0.0
    collectives: Mapping[str, Collective] = dataclasses.field(default_factory=dict)
    kernels: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unknown_loops: tuple[str, ...] = ()
    compile_seconds: float = 0.0

    @property
    def held(self) -> int:
        """Bytes that are there whatever the temporaries: arguments, outputs of their own, code."""
        return self.arguments + self.outputs - self.aliased + self.code

    @property
    def peak(self) -> int:
        """Bytes that the runtime holds while the program runs. The temporaries are one block that is taken at the start."""
        return self.held + self.temporaries

    @property
    def total(self) -> int:
        """Bytes that are taken on the device while the program runs in a run."""
        return self.peak + self.beside


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoesNotFit:
    """A program that the compiler gave up on.

    Attributes:
      needed: bytes that it asked for, where it gave up.
      available: bytes of the device.
      message: the compiler's, its first line.
      beside: bytes that a run holds on the device beside the program's own.
    """

    name: str
    needed: int
    available: int
    message: str
    beside: int = 0
    compile_seconds: float = 0.0


def compile_program(name: str, lowered: jax.stages.Lowered) -> Program | DoesNotFit:
    """Compiles what `jit(...).lower(...)` gave.

    Raises:
      jax.errors.JaxRuntimeError: the compiler failed for another reason than the device's memory, such as a kernel whose tiles do not
        fit on the chip.
    """
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = read_out_of_memory(name, str(error))
        if refused is None:
            raise
        return dataclasses.replace(refused, compile_seconds=time.perf_counter() - start)
    seconds, memory, work = time.perf_counter() - start, compiled.memory_analysis(), count_work(compiled.as_text())
    return Program(
        name=name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        dot_flops=work.flops,
        touched=work.touched,
        collectives=work.collectives,
        kernels=work.kernels,
        unknown_loops=tuple(sorted(work.unknown_loops)),
        compile_seconds=seconds,
    )


# How the TPU compilers say that a program is too large. The same words with "vmem" are about a kernel's tiles.
_SIZE = r"([\d.]+)([BKMGT]?)"
_OUT_OF_MEMORY = (
    rf"HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)",
    rf"Used {_SIZE} of {_SIZE} hbm",
    rf"TensorCore Hbm usage: {_SIZE}.*exceeding available bytes: {_SIZE}",
)


def read_out_of_memory(name: str, message: str) -> DoesNotFit | None:
    """What an error of the compiler says about the device's memory, None if it is about something else."""
    found = next((found for pattern in _OUT_OF_MEMORY if (found := re.search(pattern, message))), None)
    if found is None or "RESOURCE_EXHAUSTED" not in message:
        return None
    needed, available = (
        int(float(number) * 1024 ** "BKMGT".index(unit or "B")) for number, unit in (found.groups()[:2], found.groups()[2:])
    )
    return DoesNotFit(name=name, needed=needed, available=available, message=" ".join(message.partition(" HLO module")[0].split())[:400])
