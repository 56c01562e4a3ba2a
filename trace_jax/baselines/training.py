"""A baseline that is one adapter, trained by GRPO within a budget of rollouts.

Its curve is measured on the held-out split, for the comparison only; the last adapter is the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from model import AdapterBank
from rl.engines.protocol import Policy
from rl.learner import LearnerState
from rl.rollout import Task
from trace_jax.evaluate.command import heldout_tasks, summarise
from trace_jax.evaluate.outcomes import success_rate
from trace_jax.runtime import Runtime
from trace_jax.train import Reward, make_learner, run_grpo
from trace_jax.workdir import policy_name

POINTS = 6  # of a curve


def train_baseline(
    runtime: Runtime, name: str, adapter: AdapterBank, budget: int, tasks: Callable[[int], Sequence[Task]], reward: Reward | None = None
) -> dict[str, Any]:
    """Trains and evaluates a baseline, from where an earlier run stopped.

    Args:
      name: of the policy; its training lives in `baselines/<name>/`.
      adapter: that it begins with.
      budget: the rollouts that it may use.
      tasks: the batch of an iteration; a function of its number alone.
      reward: what it learns from, instead of the environment's own.

    Returns:
      The content of `evaluation/<name>.json`; the curve is in `evaluation/<name>_curve.json`.
    """
    config, workdir, file = runtime.config, runtime.workdir, f"evaluation/{policy_name(name)}"
    if workdir.exists(f"{file}.json"):
        return workdir.read_json(f"{file}.json")
    per_iteration = config.train.groups * config.train.group_size
    iterations = max(budget // per_iteration, 1)

    learner, heldout = make_learner(runtime), heldout_tasks(runtime)

    def policy(state: LearnerState) -> Policy:
        return Policy(name=name, version=int(state.step), adapters=learner.gathered(state.params))

    state = learner.init(adapter, seed=config.seed)
    curve: dict[str, list[float]] = {"rollouts": [], "rate": []}
    for point in range(1, POINTS + 1):
        until = round(iterations * point / POINTS)
        folder = f"baselines/{policy_name(name)}"
        state = run_grpo(runtime, learner, state, folder, name, until, tasks, policy, stop=False, reward=reward)
        found = runtime.roll_out(policy(state), name, "heldout", point, heldout, config.evaluation.temperature)
        curve["rollouts"].append(until * per_iteration)
        curve["rate"].append(success_rate(found)["rate"])
        workdir.write_json(f"{file}_curve.json", curve)
    result = summarise(name, "heldout", found, config.evaluation.temperature, heldout)
    result["training_rollouts"] = iterations * per_iteration
    workdir.write_json(f"{file}.json", result)
    return result
