"""What the evaluation found, one result a policy, in the order in which page and terminal show them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trace_jax.report.reader import Reader
from trace_jax.statistics import bootstrap_weights, percentile_interval

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


@dataclasses.dataclass(frozen=True)
class Difference:
    """A difference of success rates on the tasks that two policies share, with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One policy on the held-out tasks.

    Attributes:
      policy: as users write it, `adapter:x`.
      interval: 95 %, of `rate`.
      n, errors: rollouts that were scored, and those that infrastructure failed.
      tasks: id to share of successful trials.
      to_base: difference to the base agent, None for the base itself and where it was not evaluated.
      spent: rollouts that it took to make the policy, diagnosis and calibration included; None where that cannot be told.
    """

    policy: str
    meaning: str
    rate: float
    interval: tuple[float, float]
    n: int
    errors: int
    pass_hat: dict[str, float]
    by_stressors: dict[str, dict[str, float]]
    tasks: dict[str, float]
    temperature: float | None
    split: str
    to_base: Difference | None
    spent: int | None

    @property
    def capability(self) -> str | None:
        """Of an adapter."""
        return self.policy.removeprefix("adapter:") if self.policy.startswith("adapter:") else None


def difference(tasks: Mapping[str, float], others: Mapping[str, float]) -> Difference | None:
    """Paired over the tasks that both have, with a bootstrap over tasks; None where there is none."""
    shared = np.array([tasks[task] - others[task] for task in tasks if task in others])
    if not len(shared):
        return None
    low, high = percentile_interval(_weights(len(shared)) @ shared / len(shared))
    return Difference(float(shared.mean()), float(low), float(high))


@functools.lru_cache(maxsize=2)
def _weights(count: int) -> np.ndarray:
    """Bootstrap weights of `count` tasks; drawing them takes half a second, and all policies face the same number."""
    return bootstrap_weights(np.arange(count), draws=2000, seed=0)


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
    base = _shares(files[BASE]) if BASE in files else {}
    results = {}
    order = capabilities(read)
    for policy in sorted(files, key=lambda policy: _place(policy, order)):
        data, shares = files[policy], _shares(files[policy])
        results[policy] = Result(
            policy=policy,
            meaning=_meaning(policy, routing),
            rate=data["overall"]["rate"],
            interval=tuple(data["overall"]["interval"]),
            n=data["overall"].get("n", sum(task["trials"] for task in data["tasks"].values())),
            errors=data["overall"].get("errors", 0),
            pass_hat=data["overall"].get("pass_hat", {}),
            by_stressors=data.get("by_stressors", {}),
            tasks=shares,
            temperature=data.get("temperature"),
            split=data["split"],
            to_base=None if policy == BASE else difference(shares, base),
            spent=data.get("training_rollouts", spent.get(policy)),
        )
    return results


def best_adapter(results: Mapping[str, Result]) -> Result | None:
    """The single adapter with the highest success."""
    return max((r for r in results.values() if r.capability), key=lambda r: r.rate, default=None)


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


def _shares(data: Mapping[str, Any]) -> dict[str, float]:
    return {task: counts["successes"] / counts["trials"] for task, counts in data["tasks"].items() if counts["trials"]}


def _meaning(policy: str, routing: Mapping[str, Any]) -> str:
    if policy == COMPOSED and routing and not routing["kept"]:
        return f"the gate was not kept; this is {routing['composed']}"
    return "one adapter on every token" if policy.startswith("adapter:") else _MEANING.get(policy, "a baseline")


def _place(policy: str, order: Sequence[str]) -> tuple[float, int, str]:
    """Adapters behind the base, baselines that we do not know before the floor."""
    capability = policy.removeprefix("adapter:")
    if capability != policy:
        return 0.5, order.index(capability) if capability in order else len(order), policy
    return (_ORDER.index(policy) if policy in _ORDER else len(_ORDER) - 1.5), 0, policy
