"""Whether tasks that a policy is evaluated on had a part in making it: in mining, training or selection.

A figure on such tasks is no figure of unseen tasks. What was used is told from the workdir: `diagnosis/mined.json`, and every shard of
rollouts but those of the evaluation. A task is a pair of its environment and its id there, so that seeds of capability environments and
tasks of other domains stay apart.
"""

from __future__ import annotations

import functools
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import zstandard
from rich.console import Console
from rich.markup import escape

from rl.trajectory import Trajectory
from trace_jax.config.sections import PACKAGE
from trace_jax.errors import InputError
from trace_jax.evaluate.task_names import by_number, some
from trace_jax.workdir import Workdir

MINED = "diagnosis/mined.json"
EVALUATION = "heldout"  # the split whose rollouts are the evaluation's own
# how a trajectory's line begins: its first three fields, and the split where it is written next
_HEAD = re.compile(rb'\{"id":"(?:[^"\\]|\\.)*","environment":("(?:[^"\\]|\\.)*"),"task_id":("(?:[^"\\]|\\.)*")')

Task = tuple[str, str]  # environment, id


def task_key(environment: str, task_id: str) -> Task:
    """A task as all files name it: ids in shards carry the environment or its domain in front, `desk:17`, `airline:2`."""
    for prefix in (f"{environment}:", f"{environment.rpartition('/')[2]}:"):
        task_id = task_id.removeprefix(prefix)
    return environment, task_id


def write_mined(workdir: Workdir, trajectories: Sequence[Trajectory], files: Sequence[str] = ()) -> None:
    """Notes in `diagnosis/mined.json` which tasks, of which result files, a diagnosis sees: those of the train split where it is named."""
    splits = {t.split for t in trajectories}
    tasks = sorted({task_key(t.environment, t.task_id) for t in trajectories if t.split == "train" or "train" not in splits})
    workdir.write_json(MINED, {"results": [str(file) for file in files], "tasks": tasks})


def used_tasks(workdir: Workdir) -> dict[str, set[Task]]:
    """What made the policies of a workdir: `diagnosis` and `rollouts/<policy>/<split>` to their tasks."""

    def read() -> dict[str, list[Task]]:
        used: dict[str, set[Task]] = {}
        if workdir.exists(MINED) and (mined := workdir.read_json(MINED))["results"]:  # else it is of rollouts/base/train
            used["diagnosis"] = {(environment, task) for environment, task in mined["tasks"]}
        for name in workdir.list("rollouts"):
            folder, _, file = name.rpartition("/")
            if file.endswith(".jsonl.zst") and not folder.endswith(f"/{EVALUATION}"):
                used.setdefault(folder, set()).update(_tasks_of_shard(workdir.read_bytes(name), workdir.place(name)))
        return {where: sorted(tasks) for where, tasks in used.items()}

    return {where: {(e, t) for e, t in tasks} for where, tasks in workdir.processes.agree(read).items()}


def _tasks_of_shard(data: bytes, path: str) -> set[Task]:
    """The tasks of a shard, from the heads of its lines: its tokens are not parsed."""
    heads = set()
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as stream:
            for line in io.BufferedReader(stream):
                head = _HEAD.match(line)
                if head is None:
                    raise InputError(f"{path}: not a shard of trajectories; remove its folder and roll out again")
                heads.add(head.groups())
    except zstandard.ZstdError as error:
        raise InputError(f"{path}: {error}; remove its folder and roll out again") from error
    return {task_key(json.loads(environment), json.loads(task)) for environment, task in heads}


def find_leaks(used: dict[str, set[Task]], evaluated: Iterable[Task]) -> list[dict[str, Any]]:
    """What `evaluation/<policy>.json` holds as `leak`: {"purpose", "where", "tasks"} for each place that saw evaluated tasks.

    Args:
      used: of `used_tasks`.
      evaluated: of `task_key`.
    """
    evaluated = set(evaluated)
    found = []
    for where, tasks in used.items():
        if shared := sorted((tasks & evaluated), key=lambda task: (len(task[1]), task)):
            found.append({"purpose": purpose(where), "where": where, "tasks": [task for _, task in shared]})
    return found


def purpose(where: str) -> str:
    """What a place of `used_tasks` is for."""
    if where in ("diagnosis", "rollouts/base/train", "rollouts/previous/train"):
        return "mining"
    return "training" if where.rpartition("/")[2] in ("training", "train") else "selection"


def told(leak: dict[str, Any]) -> str:
    """`mining saw 3 of the evaluated tasks (diagnosis): 2, 4, 7`."""
    count = len(leak["tasks"])
    return f"{leak['purpose']} saw {count} of the evaluated tasks ({leak['where']}): {some(leak['tasks'])}"


# --- official splits ----------------------------------------


@functools.cache
def test_splits() -> dict[str, frozenset[str]]:
    """Environment to the ids of its official test split, of benchmarks that have one."""
    data = json.loads((PACKAGE / "benchmarks" / "test_splits.json").read_text("utf-8"))
    return {environment: frozenset(ids) for environment, ids in data["test"].items()}


def warn_of_test_splits(trajectories: Iterable[Trajectory], console: Console) -> None:
    """Says in red that a diagnosis of these has seen tasks on which agents are to be evaluated."""
    for environment, tasks in of_test_splits(trajectories).items():
        count = f"{len(tasks)} of the {len(test_splits()[environment])} tasks of the official test split of {environment}"
        console.print(
            f"[bold red]LEAK: this mines {count}: {escape(some(tasks))}; nothing made of it may be evaluated on them[/]",
            soft_wrap=True,
            highlight=False,
        )


def of_test_splits(trajectories: Iterable[Trajectory]) -> dict[str, list[str]]:
    """Environment to those of the trajectories' tasks that belong to its official test split; only where there are some."""
    found: dict[str, set[str]] = {}
    for t in trajectories:
        environment, task = task_key(t.environment, t.task_id)
        if task in test_splits().get(environment, ()):
            found.setdefault(environment, set()).add(task)
    return {environment: sorted(tasks, key=by_number) for environment, tasks in found.items()}
