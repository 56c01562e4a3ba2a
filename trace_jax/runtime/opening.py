"""From a command's arguments to its runtime: progress, the log of stalls, the compilation cache and the iterations to be profiled."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

import jax
from rich.console import Console

from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.progress import Progress
from trace_jax.runtime.fit import fit
from trace_jax.runtime.runtime import Runtime
from trace_jax.runtime.stages import plan


@contextlib.contextmanager
def open_runtime(arguments: Arguments, stage: str | None = None, rollouts: float | None = None) -> Iterator[Runtime]:
    """The runtime of a command.

    Args:
      stage: the one stage that the command is, of so many `rollouts` or as many as in a run; None leaves the stages to the command.
    """
    stages = plan(arguments.config, 1 if arguments.capability else 4)
    if stage:
        stages = {stage: rollouts or stages[stage]}
    keep_compiled_programs()
    processes = arguments.workdir.processes
    with contextlib.ExitStack() as stack:
        name = f"stall{f'-{processes.index}' if processes.index else ''}.log"
        stall_log = stack.enter_context(arguments.workdir.log(name).open("a"))
        console = Console(stderr=True, quiet=not processes.leads)
        progress = stack.enter_context(Progress(stages, stall_log=stall_log, console=console))
        profiled = _steps(arguments.profile_steps)
        runtime = stack.enter_context(Runtime(fit(arguments.config, jax.devices()), arguments.workdir, progress, profiled))
        runtime.plan(stages)
        if stage:
            stack.enter_context(runtime.stage(stage))
        yield runtime


def _steps(words: Sequence[str]) -> list[int]:
    if odd := [word for word in words if not word.strip().isdecimal()]:
        raise InputError(f"--profile_steps: {odd[0]!r} is no number; give iterations, counted from 0, such as 2,3")
    return [int(word) for word in words]


def keep_compiled_programs() -> None:
    """Compiled programs are kept for the next command in the user's cache folder, unless JAX is told of another place."""
    if jax.config.jax_compilation_cache_dir is None:
        folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "trace-jax"
        jax.config.update("jax_compilation_cache_dir", str(folder))
