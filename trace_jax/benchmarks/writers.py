"""`trace-jax export --what=results --policy=P --split=heldout --out=DIR`: rollouts of a benchmark's tasks in the benchmark's own format.

Another program can then grade them again: tau2 its results files, one a domain, and the SWE-bench harness predictions, one file a trial.
Outages are left out, and counted: neither program has a way to say that an episode was nobody's failure.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Iterable, Sequence

from rl.trajectory import Trajectory
from trace_jax.benchmarks.tau2.writer import write_results
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir, policy_name


def export_results(workdir: Workdir, policies: Sequence[str], split: str | None, out: pathlib.Path) -> list[str]:
    """Writes the rollouts of one policy; a line for each file, which says what is in it.

    Raises:
      InputError: no or several policies, no split, nothing rolled out, or tasks of no benchmark that has a format of its own.
    """
    if len(policies) != 1 or split is None:
        raise InputError("trace-jax export --what=results: give one --policy=P and its --split=train|heldout")
    found = list(workdir.read_shards(policies[0], split)) if workdir.shards(policies[0], split) else []
    if not found:
        raise InputError(f"{workdir.place()}: no rollouts of {policies[0]} on the split {split}; run trace-jax evaluate or rollout first")
    by_environment = collections.defaultdict(list)
    for t in numbered_on(found):
        by_environment[t.environment].append(t)
    for name in by_environment:
        if not name.startswith(("tau2/", "swebench")):
            shards = workdir.place(f"rollouts/{policy_name(policies[0])}/{split}")
            raise InputError(
                f"--what=results: {name} is no benchmark with a result format of its own, as tau2-bench and SWE-bench are; "
                f"its rollouts are lines that --results reads as they are: --results={shards}"
            )
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, trajectories in by_environment.items():
        if name.startswith("tau2/"):
            file = out / f"{name.removeprefix('tau2/')}.json"
            written = write_results(trajectories, file)
            lines.append(f"{file}: {written.simulations} simulations" + _left_out(written.outages))
        else:
            lines += _predictions(trajectories, out)
    return lines


def numbered_on(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """The trajectories, a trial that a task had in an earlier batch under the next number that is free."""
    taken: set[tuple[str, str, int]] = set()
    numbered = []
    for t in trajectories:
        trial = t.trial
        while (t.environment, t.task_id, trial) in taken:
            trial += 1
        taken.add((t.environment, t.task_id, trial))
        numbered.append(dataclasses.replace(t, trial=trial))
    return numbered


def _predictions(trajectories: Sequence[Trajectory], out: pathlib.Path) -> list[str]:
    from trace_jax.benchmarks.swebench.predictions import write_predictions

    trials = sorted({t.trial for t in trajectories})
    lines = []
    for trial in trials:
        file = out / ("preds.json" if len(trials) == 1 else f"preds-{trial}.json")
        of_trial = [t for t in trajectories if t.trial == trial]
        count = write_predictions(of_trial, file)
        lines.append(f"{file}: {count} predictions" + _left_out(len(of_trial) - count))
    return lines


def _left_out(outages: int) -> str:
    return f"; {outages} outages left out" if outages else ""
