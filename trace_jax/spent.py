"""What a run has cost: rollouts and sampled tokens from the manifests of its shards, seconds as its processes wrote them down, and what the
LLM behind analysis and generation was paid.

A rollout counts once however often the run was interrupted, so that a baseline that may use as many gets the same number after a resume.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from trace_jax.agents.record import bill
from trace_jax.workdir import Workdir

_SECONDS = "seconds.jsonl"


def stage_of(folder: str, split: str) -> str:
    """The stage of a run that rolls out `rollouts/<folder>/<split>`; "train" and "heldout" are the splits of the target."""
    if split in ("train", "heldout"):
        return "rollouts" if (folder, split) == ("base", "train") else "evaluate"
    if split.startswith("calibration-"):
        return "synthesize"
    if folder == "grpo_target":
        return "baseline"
    own = split.startswith("own-") or split == "agreement" or (split in ("training", "validation") and folder.startswith("adapter-"))
    return "train" if own else "compose"


def add_seconds(workdir: Workdir, stage: str, seconds: float) -> None:
    """Notes what a process spent on a stage."""
    workdir.append_jsonl(_SECONDS, {"stage": stage, "seconds": seconds})


def write_spent(workdir: Workdir) -> dict[str, Any]:
    """Writes and returns `spent.json`: {stages: {name: {seconds, rollouts, sampled_tokens}}, total: {...}}, and where an LLM was asked
    agents: {requests, input_tokens, output_tokens, cost, estimated}."""
    stages: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "rollouts": 0, "sampled_tokens": 0})
    for row in workdir.read_jsonl(_SECONDS):
        stages[row["stage"]]["seconds"] += row["seconds"]
    for name in workdir.list("rollouts"):
        if name.endswith("/manifest.json"):
            _, folder, split, _ = name.split("/")
            for shard in workdir.read_json(name)["shards"].values():
                stages[stage_of(folder, split)]["rollouts"] += shard["trajectories"]
                stages[stage_of(folder, split)]["sampled_tokens"] += shard["sampled_tokens"]
    total = {key: sum(stage[key] for stage in stages.values()) for key in ("seconds", "rollouts", "sampled_tokens")}
    spent = {"stages": dict(stages), "total": total}
    if paid := bill(workdir):
        spent["agents"] = paid
    workdir.write_json("spent.json", spent)
    return spent
