"""Single capability GRPO: the best single adapter, on every token.

Which one is the best was measured by step 4 on unseen seeds of the capability environments; the target's held-out tasks have no say. By
default it is the adapter as step 3 left it. With `baselines.single_budget` it is trained on in its environment, on new seeds, until it has
had as many rollouts as the other baselines.
"""

from __future__ import annotations

from typing import Any

from rl.rollout import Task
from trace_jax.baselines.training import train_baseline
from trace_jax.evaluate.command import evaluate
from trace_jax.policies import load_mixture
from trace_jax.runtime import TRAINING, Runtime
from trace_jax.spent import spent_on
from trace_jax.train import load_adapter
from trace_jax.workdir import policy_name


def best_capability(runtime: Runtime) -> str:
    """The capability whose adapter did best on the selection seeds of all capability environments.

    Raises:
      InputError: step 4 has not run.
    """
    rates = {name: found["rate"] for name, found in runtime.workdir.read_json("gate/routing.json")["validation"].items()}
    return max((name for name in rates if name.startswith("adapter:")), key=rates.__getitem__).removeprefix("adapter:")


def makes_adapter(capability: str, folder: str, split: str) -> bool:
    """Whether `rollouts/<folder>/<split>` is part of what a capability's adapter cost: diagnosis, calibration, training."""
    calibration = split == f"calibration-{capability}" or split.startswith(f"calibration-{capability}-r")
    trained = folder == policy_name(f"adapter:{capability}") and split in ("training", "validation")
    return (folder, split) == ("base", "train") or calibration or trained


def evaluate_single(runtime: Runtime, budget: int) -> dict[str, Any]:
    """Evaluates the baseline; trains it before where the config says so, on what is left of `budget` rollouts.

    Returns:
      The content of an evaluation's file, its policy `single:<capability>`.
    """
    capability, train = best_capability(runtime), runtime.config.train
    name = f"single:{capability}"
    if not runtime.config.baselines.single_budget:
        mixture = load_mixture(runtime, runtime.usable())
        return evaluate(runtime, f"adapter:{capability}", mixture) | {"policy": name, "note": "the adapter of step 3"}
    package, hint_ratio = runtime.environment(capability), runtime.calibration(capability)["hint_ratio"]
    earlier = spent_on(runtime.workdir, lambda folder, split: makes_adapter(capability, folder, split))["rollouts"]

    def tasks(iteration: int) -> list[Task]:
        first = TRAINING + (train.iterations + iteration) * train.groups
        return runtime.with_hints(package, hint_ratio, runtime.tasks(package, "training", first, train.groups, train.group_size))

    found = train_baseline(runtime, name, load_adapter(runtime, capability), budget - earlier, tasks)
    rollouts = earlier + found["training_rollouts"]
    return found | {"training_rollouts": rollouts, "note": "the adapter of step 3, trained on with the rollouts of all steps"}
