"""What the page says of the run as a whole: how far it is, its rounds, its config, and what locked its environments in."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trace_jax.config import Config, EvaluationSection
from trace_jax.report import results as found
from trace_jax.report.diagnosis import diagnosed
from trace_jax.report.reader import Reader

SHIPPED = Config().model.path  # the checkpoint of the quickstart, whose deficits are planted
_LAYERS = {
    "namespaces": "a network and a host name of its own, with nothing in them",
    "uid": "a user that owns nothing",
    "limits": "no processes, no growing file, bounded memory and time",
    "no_new_privs": "no privileges, and no way to get any",
    "landlock": "no file system, no network ports",
    "seccomp": "no system calls but the few that compute and answer",
}


def capability_styles(read: Reader) -> dict[str, str]:
    """Capability to the style that it has all over the page, that of its slot."""
    return {name: f"s{n}" for n, name in enumerate(found.capabilities(read), 1)}


def progress(read: Reader) -> list[tuple[str, str, bool]]:
    """(what, command, done) of each step."""
    retained = [e["skill"] for e in read.json("diagnosis/selected_capabilities.json") or []]
    calibrations = {c: read.json(f"environments/{c}/calibration.json") for c in retained}
    usable = [c for c, result in calibrations.items() if result and result.get("usable", result["verdict"] == "ok")]
    names, composed = read.list("evaluation"), read.json("gate/routing.json") is not None
    return [
        ("base rollouts", "rollout --policy=base --split=train", any(n.endswith(".jsonl.zst") for n in read.list(diagnosed(read)))),
        ("diagnosis", "diagnose", read.json("diagnosis/selected_capabilities.json") is not None),
        # nobody may have an environment for one of them, which stops no later step
        ("environments", "synthesize", bool(retained) and (composed or all(calibrations.values()))),
        ("adapters", "train", bool(usable) and all(read.json(f"adapters/{c}/summary.json") for c in usable)),
        ("gate", "compose", composed),
        ("evaluation", "evaluate --policy=base,composed", {"evaluation/base.json", "evaluation/composed.json"} <= set(names)),
    ]


def rounds(read: Reader) -> list[dict[str, Any]]:
    """The rounds, with what their agents are in words; none where there was one round only."""
    shown = []
    for entry in (read.json("rounds.json") or {"rounds": []})["rounds"]:
        told = "the agent stays as it was" if entry["round"] > 1 and (entry["composed"] == "previous" or not entry["new"]) else ""
        shown.append(entry | {"told": told})
    return shown


def played(read: Reader) -> str:
    """The name of the environment that the base was rolled out in on the target's tasks, "" before it was."""
    shards = [name for name in read.list(diagnosed(read)) if name.endswith(".jsonl.zst")]
    return next((t.environment for name in shards for t in read.shard(name)), "")


def settings(stored: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """(field, value, whether it differs from the default) of the config of config.json."""
    defaults = dict(_flat(Config().to_json()))
    return [(name, value, name in defaults and value != defaults[name]) for name, value in _flat(stored.get("config", {}))]


def evaluated_policies(stored: Mapping[str, Any]) -> Sequence[str]:
    """What the config wants evaluated."""
    return stored.get("config", {}).get("evaluation", {}).get("policies", EvaluationSection().policies)


def sandbox(read: Reader) -> dict[str, Any] | None:
    """What the environments ran in: (layer, what it takes away, "on" or why it was not)."""
    stored = read.json("sandbox.json")
    if stored is None:
        return None
    names = dict.fromkeys([*_LAYERS, *stored["layers"], *stored["missing"]])
    rows = [(name, _LAYERS.get(name, ""), "on" if name in stored["layers"] else stored["missing"].get(name, "off")) for name in names]
    return {"mode": stored["mode"], "rows": rows}


def children(read: Reader, folder: str, first: Iterable[str]) -> list[str]:
    """The folders of a folder, those in `first` before the others."""
    names = {pathlib.PurePosixPath(name).parts[1] for name in read.list(folder)}
    return [name for name in first if name in names] + sorted(names - set(first))


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
