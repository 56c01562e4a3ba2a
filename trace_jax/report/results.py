"""What the evaluation found, one result a policy, in the order in which page and terminal show them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.errors import InputError
from trace_jax.evaluate.comparison import Comparison, compare_paired
from trace_jax.evaluate.outcomes import above_floor, free_tasks
from trace_jax.evaluate.provenance import refuse_other_tasks
from trace_jax.report.reader import Reader

BASE, COMPOSED, FLOOR, BASELINE = "base", "composed", "do_nothing", "grpo_target"
STEPS = ("rollouts", "diagnose", "synthesize", "train", "compose")  # stages of spent.json that make the composed agent
_MEANING = {
    BASE: "the agent as it was",
    "uniform": "all adapters at once, each scaled by 1/K",
    "constant": "all adapters at once, at the scale that did best in training",
    "router": "one adapter for a whole episode, chosen from the prompt",
    "plain_gate": "token gate trained on plain labels, the published form",
    COMPOSED: "token gate: one slot for every token and layer",
    BASELINE: "GRPO of one adapter on the target's train tasks",
    "gepa": "the base with instructions that an LLM evolved, by GEPA",
    "swe_rl": "GRPO rewarded by likeness to the oracle's patch",
    FLOOR: "the floor: no call at all, one polite sentence",
}
_ORDER = list(_MEANING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One policy on the held-out tasks.

    Attributes:
      policy: as users write it, `adapter:x`.
      interval: 95 %, of `rate`.
      n, errors: rollouts that were scored, and those that infrastructure failed.
      as_failures: rate and interval with these as failures, None where there are none.
      tasks: id to {"trials", "successes"}.
      to_base: what changes from the base agent, None for the base itself and where it was not evaluated or cannot be compared.
      incomparable: why it cannot.
      above_floor: rate, interval and n on the tasks where doing nothing fails; None where it fails on all.
      leak: what mining, training or selection saw of the tasks.
      spent: rollouts that it took to make the policy, diagnosis and calibration included; None where that cannot be told.
    """

    policy: str
    meaning: str
    rate: float
    interval: tuple[float, float]
    n: int
    errors: int
    as_failures: dict[str, Any] | None
    pass_hat: dict[str, float]
    tasks: dict[str, dict[str, int]]
    temperature: float | None
    split: str
    to_base: Comparison | None
    incomparable: str
    above_floor: dict[str, Any] | None
    leak: list[dict[str, Any]]
    spent: int | None

    @property
    def capability(self) -> str | None:
        """Of an adapter."""
        return self.policy.removeprefix("adapter:") if self.policy.startswith("adapter:") else None


def difference(result: Result, other: Result) -> Comparison | None:
    """What changes from the other, on the tasks that both have; None where there is none."""
    return _paired(other.tasks, result.tasks)


def _paired(tasks: Mapping[str, Any], others: Mapping[str, Any]) -> Comparison | None:
    return compare_paired(tasks, others, intersect=True) if tasks.keys() & others.keys() else None


def _incomparable(data: Mapping[str, Any], base: Mapping[str, Any] | None) -> str:
    """Why a policy cannot be compared with the base, "" where it can."""
    try:
        if base is not None and data is not base:
            refuse_other_tasks(base, data, (base["policy"], data["policy"]), "evaluate both again")
    except InputError as error:
        return str(error)
    return ""


def capabilities(read: Reader) -> list[str]:
    """Those with a slot in its order, then the others that were retained."""
    routing = read.json("gate/routing.json")
    selection = read.json("diagnosis/selected_capabilities.json") or []
    return list(dict.fromkeys([*(routing["slots"][1:] if routing else []), *(entry["skill"] for entry in selection)]))


def load_results(read: Reader) -> dict[str, Result]:
    """Policy to result: the base, the adapters, the mixtures, the composed agent, the baselines, the floor."""
    files = {}
    for name in read.list("evaluation"):
        data = read.json(name) if name.endswith(".json") else None
        if isinstance(data, dict) and "overall" in data:
            files[data["policy"]] = data
    spent = _spent(read)
    routing = read.json("gate/routing.json") or {}
    base, solved = files.get(BASE), free_tasks(files[FLOOR]["tasks"]) if FLOOR in files else []
    results = {}
    order = capabilities(read)
    for policy in sorted(files, key=lambda policy: _place(policy, order)):
        data = files[policy]
        tasks = {task: counts for task, counts in data["tasks"].items() if counts["trials"]}
        incomparable = _incomparable(data, base)
        results[policy] = Result(
            policy=policy,
            meaning=meaning(policy, routing),
            rate=data["overall"]["rate"],
            interval=tuple(data["overall"]["interval"]),
            n=data["overall"].get("n", sum(counts["trials"] for counts in tasks.values())),
            errors=data["overall"].get("errors", 0),
            as_failures=data["overall"].get("errors_as_failures"),
            pass_hat=data["overall"].get("pass_hat", {}),
            tasks=tasks,
            temperature=data.get("temperature"),
            split=data["split"],
            to_base=None if policy == BASE or base is None or incomparable else _paired(base["tasks"], tasks),
            incomparable=incomparable,
            above_floor=above_floor(tasks, solved) if solved else None,
            leak=data.get("leak", []),
            spent=data.get("training_rollouts", spent.get(policy)),
        )
    return results


def best_adapter(results: Mapping[str, Result]) -> Result | None:
    """The single adapter with the highest success."""
    return max((r for r in results.values() if r.capability), key=lambda r: r.rate, default=None)


def leaks(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """What mining, training or selection saw of the evaluated tasks, each place once."""
    return list({leak["where"]: leak for result in results.values() for leak in result.leak}.values())


def free(results: Mapping[str, Result]) -> list[str]:
    """The tasks that doing nothing solves."""
    return free_tasks(results[FLOOR].tasks) if FLOOR in results else []


def rollouts_of_steps(spent: Mapping[str, Any]) -> int:
    """Rollouts that the composed agent cost, its evaluation left out; `spent` is the content of spent.json."""
    return int(sum(spent["stages"][name]["rollouts"] for name in STEPS if name in spent["stages"]))


def _spent(read: Reader) -> dict[str, int]:
    spent = read.json("spent.json")
    if spent is None:
        return {}
    found = {BASE: 0, COMPOSED: rollouts_of_steps(spent), FLOOR: 0}
    first = spent["stages"].get("rollouts", {}).get("rollouts", 0)
    for capability in capabilities(read):
        summary, calibration = read.json(f"adapters/{capability}/summary.json"), read.json(f"environments/{capability}/calibration.json")
        if summary and calibration:
            rounds = (read.json(f"environments/{capability}/generation.json") or {"rounds": []})["rounds"]
            tried = [one["calibration"] for one in rounds if one.get("calibration")] or [calibration]  # the accepted package's included
            calibrating = sum(one.get("spent", one["n_rollouts"]) for one in tried)
            found[f"adapter:{capability}"] = int(first + calibrating + summary["rollouts"])
    return found


def meaning(policy: str, routing: Mapping[str, Any]) -> str:
    """What a policy is, in a few words; `routing` is the content of gate/routing.json."""
    if policy == COMPOSED and routing.get("composed") == "previous":
        return "the gate was not kept; this is the agent of the round before"
    if policy == COMPOSED and routing and not routing["kept"]:
        return f"the gate was not kept; this is {routing['composed']}"
    if policy.startswith("single:"):
        return "the best single adapter, on every token"
    return "one adapter on every token" if policy.startswith("adapter:") else _MEANING.get(policy, "a baseline")


def _place(policy: str, order: Sequence[str]) -> tuple[float, int, str]:
    """Adapters behind the base, baselines that we do not know before the floor."""
    capability = policy.removeprefix("adapter:")
    if capability != policy:
        return 0.5, order.index(capability) if capability in order else len(order), policy
    return (_ORDER.index(policy) if policy in _ORDER else len(_ORDER) - 1.5), 0, policy
