"""`trace-jax diagnose`: step 1 on the workdir's rollouts of the base agent, or on result files that another tool wrote.

With `--results` and without a workdir it only prints, and starts no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rl.trajectory import Trajectory
from trace_jax.benchmarks.tau2 import read_results
from trace_jax.cli import Arguments
from trace_jax.config import Config
from trace_jax.diagnose.diagnosis import Diagnosis, diagnose
from trace_jax.diagnose.report import print_diagnosis
from trace_jax.diagnose.select import decode_selection
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir

if TYPE_CHECKING:
    from trace_jax.runtime import Runtime

_SELECTION = "diagnosis/selected_capabilities.json"
_TOLERANCE = 1e-6  # graders compute rewards in floating point


def diagnose_workdir(runtime: Runtime) -> None:
    """Step 1 of a run; its files go to `diagnosis/`, the selection last, and where that exists the step is done."""
    if not runtime.workdir.exists(_SELECTION):
        _diagnose(runtime.config, runtime.workdir, _rollouts(runtime.workdir))


def _rollouts(workdir: Workdir) -> Iterable[Trajectory]:
    if not workdir.shards("base", "train"):
        raise InputError(
            f"{workdir.root}: no rollouts to diagnose; run trace-jax rollout --policy=base --split=train, or give --results=FILE"
        )
    return workdir.read_shards("base", "train")


def _diagnose(config: Config, workdir: Workdir | None, trajectories: Iterable[Trajectory]) -> Diagnosis:
    settings = config.diagnosis
    earlier = workdir is not None and workdir.exists(_SELECTION)
    return diagnose(
        [_graded(t, settings.success) for t in trajectories],
        runs=settings.runs,
        coverage=settings.coverage,
        gap=settings.gap,
        min_runs=settings.min_runs,
        seed=config.seed,
        blind=settings.blind,
        write=workdir.write_bytes if workdir else None,
        previous=decode_selection(workdir.read_json(_SELECTION), str(workdir.root / _SELECTION)) if earlier else (),
    )


def _graded(trajectory: Trajectory, success: float) -> Trajectory:
    """The trajectory, a success from the threshold of the config on."""
    if trajectory.reward is None:
        return trajectory
    return dataclasses.replace(trajectory, success=trajectory.reward >= success - _TOLERANCE)


def main(arguments: Arguments) -> None:
    """Prints the diagnosis, and writes it when there is a workdir.

    Raises:
      InputError: neither results nor a workdir with rollouts, or a result file that cannot be used.
    """
    if not arguments.results and arguments.workdir is None:
        raise InputError("trace-jax diagnose: give --results=FILE,... or the --workdir of a run")
    trajectories = read_results(arguments.results) if arguments.results else _rollouts(arguments.workdir)
    print_diagnosis(_diagnose(arguments.config, arguments.workdir, trajectories))
