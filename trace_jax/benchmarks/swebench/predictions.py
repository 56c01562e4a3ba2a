"""Predictions for the SWE-bench harness: the patches of trajectories, in the two forms that it reads.

`.json` is the dictionary by instance id that mini-swe-agent and SWE-agent write too, `.jsonl` one prediction a line. The patch of a
trajectory is `actual` of its check `patch`, whoever made the trajectory. An episode that infrastructure ended has no prediction: the
harness would count it as a failure of the agent.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable

from rl.trajectory import Trajectory
from trace_jax.errors import InputError


def write_predictions(trajectories: Iterable[Trajectory], path: str | pathlib.Path) -> int:
    """Writes the predictions of `trajectories`, one an instance; returns how many.

    Raises:
      InputError: a path with another ending, a trajectory without a patch, or an instance with several trials.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".json", ".jsonl"):
        raise InputError(f"{path}: predictions are written to a file that ends in .json or .jsonl")
    found: dict[str, dict[str, str]] = {}
    for t in trajectories:
        if t.error is not None:
            continue
        if "patch" not in t.checks:
            raise InputError(f"{path}: trajectory {t.id} has no patch (check 'patch'); only rollouts and trajectories of agents have one")
        if t.task_id in found:
            raise InputError(f"{path}: {t.task_id} has several trials; write one file for each trial")
        model = str(t.policy.get("name") or "trace-jax")
        found[t.task_id] = {"model_name_or_path": model, "instance_id": t.task_id, "model_patch": t.checks["patch"]["actual"]}
    if path.suffix == ".json":
        text = json.dumps(found, indent=2, ensure_ascii=False) + "\n"
    else:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.values())
    path.write_text(text, encoding="utf-8")
    return len(found)
