"""`trace-jax evaluate --results=A,B,...`: result files of several policies on the same tasks, side by side and paired with the first."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from rl.trajectory import Trajectory
from trace_jax.benchmarks.results import read_results
from trace_jax.diagnose.diagnosis import do_nothing_tasks
from trace_jax.errors import InputError
from trace_jax.evaluate.comparison import Comparison, compare_paired
from trace_jax.evaluate.outcomes import above_floor, count_tasks, overall_success, rate_line
from trace_jax.evaluate.provenance import definition, refuse_other_definitions
from trace_jax.evaluate.task_names import by_number, some


def print_results(paths: Sequence[str], console: Console, intersect: bool = False, success: float | None = None) -> None:
    """Prints rates with intervals, the floor as far as the files tell, and what changes from the first file to each other.

    Args:
      intersect: compare on the tasks that two files share, where they have others too.
      success: the reward from which on a trajectory is a success; None: as the benchmark itself says.

    Raises:
      InputError: a file that cannot be read, or files of other tasks or other definitions of them.
    """
    names = name_files(paths)
    runs = {name: read_results([path], success) for name, path in zip(names, paths, strict=True)}
    for name, found in runs.items():
        print(rate_line(name, overall_success(found)))
    free = {task for found in runs.values() for task in do_nothing_tasks(found)}
    counts = {name: count_tasks(found) for name, found in runs.items()}
    if free:
        print(f"doing nothing solves at least {len(free)} tasks: {some(sorted(free, key=by_number), 20)}; on the others:")
        for name, tasks in counts.items():
            print(rate_line(f"  {name}", above_floor(tasks, free)))
    first = names[0]
    for name in names[1:]:
        comparison = compare_runs(runs[first], runs[name], (first, name), intersect)
        print(f"{name} to {first}: {comparison.told()}")
        for what, tasks in (("fixed", comparison.fixed), ("broken", comparison.broken)):
            if tasks:
                console.print(escape(f"  {what}: {', '.join(sorted(tasks, key=by_number))}"), soft_wrap=True, highlight=False)


def compare_runs(
    a: Sequence[Trajectory], b: Sequence[Trajectory], names: tuple[str, str] = ("a", "b"), intersect: bool = False
) -> Comparison:
    """`compare_paired` of the trajectories of two result files.

    Tasks that only one was run on are refused, unless to `intersect`; those that infrastructure failed in one are left out and counted.

    Raises:
      InputError: other environments, tasks, or definitions of a task.
    """
    environments = [{t.environment for t in run} for run in (a, b)]
    if environments[0] != environments[1]:
        first, second = (", ".join(sorted(found)) for found in environments)
        raise InputError(f"{names[0]} is of {first}, {names[1]} of {second}; give files of one benchmark")
    refuse_other_definitions(definition(a), definition(b), names)
    tried = [count_tasks(run, errors_fail=True) for run in (a, b)]
    compare_paired(*tried, names=names, intersect=intersect, fix="--intersect compares on those that both have")
    return compare_paired(count_tasks(a), count_tasks(b), names=names, intersect=True)


def name_files(paths: Sequence[str]) -> list[str]:
    """The files by their names, and by their paths where names are the same.

    Raises:
      InputError: one file twice.
    """
    if len(set(paths)) < len(paths):
        raise InputError(f"--results: {next(p for p in paths if paths.count(p) > 1)} is given twice; give each result file once")
    names = [pathlib.Path(path).stem for path in paths]
    return names if len(set(names)) == len(names) else list(paths)
