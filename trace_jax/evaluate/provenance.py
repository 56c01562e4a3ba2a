"""By which grader, and on which definition of its task, a figure was found: what must be equal before two figures are compared.

Benchmarks mend their tasks from release to release, which moves scores by as much as a better agent does; so a comparison across
definitions is refused. `evaluation/<policy>.json` holds the record as `provenance`; a file without one is taken at its word.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from envs.package import Package
from rl.trajectory import Trajectory
from trace_jax.errors import InputError
from trace_jax.evaluate.task_names import by_number, some

if TYPE_CHECKING:
    from rl.rollout import Task  # brings JAX, which who reads a workdir does not need

_DIGITS = 16  # hexadecimal, of a task's hash: enough to tell two definitions apart


def provenance(tasks: Iterable[Task]) -> dict[str, Any]:
    """{"grader", "tasks": {id: hash}} of tasks.

    The grader of a package is its version with the digest of its files; the same digest, its knobs and the seed are a task. A benchmark's
    target names its grader itself and has a hash of each definition.
    """
    graders, hashes, known = set(), {}, {}
    for task in tasks:
        target = task.package
        if isinstance(target, Package):
            graders.add(f"{target.name} {target.version} ({target.digest[:_DIGITS]})")
            hashes[task.task_id] = _digest([target.digest, target.resolve_knobs(task.knobs), task.seed])
        else:
            graders.add(target.grader)
            if target.name not in known:
                known[target.name] = {info.number: info.hash[:_DIGITS] for split in ("train", "heldout") for info in target.tasks(split)}
            hashes[task.task_id] = known[target.name][task.seed]
    return {"grader": ", ".join(sorted(graders)), "tasks": hashes}


def definition(trajectories: Iterable[Trajectory]) -> dict[str, dict[str, Any]]:
    """The same of each task of a result file: check name to what the grader expects, as far as the checks tell.

    Actions are listed whole, whatever the agent did; of other checks a trajectory may lack some, if its grading ended early.
    """
    found: dict[str, dict[str, Any]] = {}
    for t in trajectories:
        checks = found.setdefault(t.task_id, {})
        for name, check in t.checks.items():
            if check["expected"] is not None:
                expected = check["expected"]
                if isinstance(expected, dict):  # how an action is classed differs between releases, what it is does not
                    expected = {key: expected[key] for key in ("name", "arguments") if key in expected} or expected
                checks.setdefault(name, expected)
    return found


def refuse_other_tasks(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str], fix: str) -> None:
    """Compares the records of two evaluations.

    Args:
      a, b: contents of `evaluation/<policy>.json`.
      fix: ends the message.

    Raises:
      InputError: another split, grader, or definition of a task that both have.
    """
    first, second = (x.get("provenance") or {} for x in (a, b))
    for what, before, after in (
        ("on split", a.get("split"), b.get("split")),
        ("by grader", first.get("grader"), second.get("grader")),
    ):
        if before and after and before != after:
            raise InputError(f"{names[0]} was evaluated {what} {before!r}, {names[1]} {what} {after!r}; {fix}")
    hashes, others = first.get("tasks", {}), second.get("tasks", {})
    changed = [task for task, one in hashes.items() if others.get(task, one) != one]
    _refuse(changed, names, fix)


def refuse_other_definitions(a: Mapping[str, Any], b: Mapping[str, Any], names: tuple[str, str]) -> None:
    """Compares two `definition`s; raises as `refuse_other_tasks`."""
    changed = []
    for task in a.keys() & b.keys():
        actions, others = ({n: x for n, x in checks.items() if n.startswith("action:")} for checks in (a[task], b[task]))
        same = all(a[task][name] == b[task][name] for name in a[task].keys() & b[task].keys())
        if not same or (actions and others and actions != others):
            changed.append(task)
    _refuse(changed, names, "grade both files by one release of the benchmark, such as with tau2 evaluate-trajs --fresh-tasks")


def _refuse(changed: Sequence[str], names: tuple[str, str], fix: str) -> None:
    if changed:
        which = some(sorted(changed, key=by_number))
        raise InputError(f"{names[0]} and {names[1]} were graded on other definitions of {len(changed)} tasks: {which}; {fix}")


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGITS]
