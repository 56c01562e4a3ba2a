"""Result files that other programs wrote, as trajectories: which format a file has, and several files in one list.

A format is a module with two functions: `recognises(path) -> bool`, which looks at names in a folder or at the beginning of a file, and
`read(path) -> Iterator[Trajectory]`, which gives one trajectory after the other and does not hold the file. The first module that
recognises a path reads it. What can be said of a file only as a whole (conversations of other tasks) is raised after its last trajectory.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence

from rl.trajectory import Trajectory
from trace_jax.benchmarks import TOLERANCE
from trace_jax.benchmarks.json_files import opening
from trace_jax.benchmarks.own import lines
from trace_jax.benchmarks.swebench import mini, reports, swe_agent
from trace_jax.benchmarks.tau2 import results as tau2
from trace_jax.benchmarks.tau2 import taubench
from trace_jax.benchmarks.toolsandbox import results as toolsandbox
from trace_jax.errors import InputError

FORMATS = (lines, tau2, taubench, mini, swe_agent, reports, toolsandbox)  # reports accepts any folder that holds logs of its grader
_KNOWN = (
    "tau2-bench (results.json with info, tasks, simulations), tau-bench (a list of task_id, reward, traj), SWE-bench (trajectories of "
    "mini-swe-agent or SWE-agent, a harness report, a log tree), ToolSandbox (a folder with result_summary.json), or lines of your own "
    "(.jsonl, .jsonl.zst or a folder of them, see docs/own_benchmark.md)"
)


def read_results(paths: Sequence[str | pathlib.Path], success: float | None = None) -> list[Trajectory]:
    """The trajectories of one or more result files, pooled.

    With one path an id is `task#trial`; with several it is `domain:task#trial`, and trials of a task that occurs in more than one file
    are numbered on, in the order of the files.

    Args:
      success: the reward from which on a trajectory is a success; None: as the benchmark itself says.

    Raises:
      InputError: a file that is missing, damaged, of another format, given twice, or whose conversations belong to other tasks.
    """
    pooled: list[Trajectory] = []
    following: dict[tuple[str, str], int] = {}
    seen: dict[bytes, int] = {}
    for number, path in enumerate(paths):
        offset, before = dict(following), collections.Counter()
        for t in read_result_file(path):
            if run := conversation(t):
                before[seen.setdefault(run, number)] += 1
            key = (t.environment, t.task_id)
            t.trial += offset.get(key, 0)
            following[key] = max(following.get(key, 0), t.trial + 1)
            if len(paths) > 1:
                t.id = f"{t.environment.rpartition('/')[2]}:{t.task_id}#{t.trial}"
                t.group = t.id.rpartition("#")[0]
            if success is not None and t.reward is not None:
                t = dataclasses.replace(t, success=t.reward >= success - TOLERANCE)
            pooled.append(t)
        if len(before) == 1 and number not in before:  # agents at temperature 0 may well say the same now and then, but not everywhere
            raise InputError(f"{path}: all of its conversations are also in {paths[before.popitem()[0]]}; give each result file once")
    return pooled


def read_result_file(path: str | pathlib.Path) -> Iterator[Trajectory]:
    """The trajectories of one result file or folder, ids `task#trial`; raises as `read_results`, while it is read."""
    path = pathlib.Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file; --results takes result files or folders of {_KNOWN}")
    for form in FORMATS:
        if form.recognises(path):
            yield from form.read(path)
            return
    if path.is_dir():
        raise InputError(f"{path}: the folder has no results of {_KNOWN}; give the folder that the benchmark wrote, or a file")
    if "entries.item.judge_verdict" in opening(path):
        raise InputError(f"{path}: verdicts of an LLM that judged a run, which never decide what passed; give the run's own result file")
    raise InputError(f"{path}: not a result file of {_KNOWN}")


def conversation(t: Trajectory) -> bytes | None:
    """A digest of an episode in which the agent said something; others, and files of verdicts alone, may well be equal."""
    if t.error is not None or all(m["role"] != "assistant" for m in t.messages):
        return None
    run = json.dumps([t.environment, t.task_id, t.reward, t.messages], sort_keys=True, default=str)
    return hashlib.sha256(run.encode()).digest()
