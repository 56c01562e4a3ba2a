"""What a run has cost: rollouts and sampled tokens from the manifests of its shards, seconds and devices as its processes wrote them down,
and what the LLM behind analysis and generation was paid.

A rollout counts once however often the run was interrupted, so that a baseline that may use as many gets the same number after a resume.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from trace_jax.agents.record import bill
from trace_jax.workdir import Workdir

# baselines that roll out to be made; the folders of their rollouts have the name alone, or with more behind a hyphen
TRAINED = ("grpo_target", "single", "gepa", "swe_rl")
STEPS = ("rollouts", "synthesize", "train", "compose")  # the stages that roll out to make the composed agent
_SECONDS = "seconds.jsonl"


def stage_of(folder: str, split: str) -> str:
    """The stage of a run that rolls out `rollouts/<folder>/<split>`; "train" and "heldout" are the splits of the target."""
    if split in ("train", "heldout"):
        return "rollouts" if split == "train" and folder in ("base", "previous") else "evaluate"
    if split.startswith("calibration-"):
        return "synthesize"
    if folder.partition("-")[0] in TRAINED:
        return "baseline"
    own = split.startswith("own-") or split == "agreement" or (split in ("training", "validation") and folder.startswith("adapter-"))
    return "train" if own else "compose"


def add_seconds(workdir: Workdir, stage: str, seconds: float) -> None:
    """Notes what a process spent on a stage, and the devices that the run held meanwhile."""
    import jax  # where seconds are counted it is there already; who only adds up does not need it

    devices = jax.devices()
    held = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    workdir.append_jsonl(_SECONDS, {"stage": stage, "seconds": seconds, "devices": held})


def spent_on(workdir: Workdir, wanted: Callable[[str, str], bool]) -> dict[str, int]:
    """{rollouts, sampled_tokens} of those `rollouts/<folder>/<split>` of which `wanted(folder, split)`."""
    shards = [shard for folder, split, shard in _shards(workdir) if wanted(folder, split)]
    return {name: sum(shard[key] for shard in shards) for name, key in (("rollouts", "trajectories"), ("sampled_tokens", "sampled_tokens"))}


def rollouts_of_steps(workdir: Workdir) -> int:
    """The rollouts that the composed agent has cost."""
    return spent_on(workdir, lambda folder, split: stage_of(folder, split) in STEPS)["rollouts"]


def _shards(workdir: Workdir, within: str = "rollouts") -> Iterator[tuple[str, str, dict[str, int]]]:
    """(folder, split, what its manifest says) of every shard; those of the workdirs in a folder are theirs alone."""
    for name in workdir.list(within, own=True):
        if name.endswith("/manifest.json") and "/rollouts/" in f"/{name}":
            *_, folder, split, _ = name.split("/")
            for shard in workdir.read_json(name)["shards"].values():
                yield folder, split, shard


def write_spent(workdir: Workdir) -> dict[str, Any]:
    """Writes and returns `spent.json`: {stages: {name: {seconds, rollouts, sampled_tokens}}, total: {...}}, of the devices that were held
    devices: [{platform, kind, count, seconds}], several where a run went on elsewhere, and where an LLM was asked agents: {requests,
    input_tokens, output_tokens, cost, estimated}."""
    stages: dict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "rollouts": 0, "sampled_tokens": 0})
    held: dict[tuple[str, str, int], float] = defaultdict(float)
    for row in workdir.read_jsonl(_SECONDS):
        stages[row["stage"]]["seconds"] += row["seconds"]
        if devices := row.get("devices"):  # runs of old did not write them down
            held[devices["platform"], devices["kind"], devices["count"]] += row["seconds"]
    for folder, split, shard in _shards(workdir):
        stages[stage_of(folder, split)]["rollouts"] += shard["trajectories"]
        stages[stage_of(folder, split)]["sampled_tokens"] += shard["sampled_tokens"]
    for _, _, shard in _shards(workdir, "capabilities"):  # of trace-jax compare, which composes fewer of them too
        stages["capabilities"]["rollouts"] += shard["trajectories"]
        stages["capabilities"]["sampled_tokens"] += shard["sampled_tokens"]
    total = {key: sum(stage[key] for stage in stages.values()) for key in ("seconds", "rollouts", "sampled_tokens")}
    spent: dict[str, Any] = {"stages": dict(stages), "total": total}
    if held:
        spent["devices"] = [{"platform": p, "kind": k, "count": n, "seconds": seconds} for (p, k, n), seconds in held.items()]
    if paid := bill(workdir):
        spent["agents"] = paid
    workdir.write_json("spent.json", spent)
    return spent
