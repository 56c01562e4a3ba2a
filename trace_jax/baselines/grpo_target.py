"""GRPO of one adapter on the target's train tasks, with as many rollouts as the four steps spent on the composed agent.

It sees what GRPO sees in life: a fixed set of tasks, taken in turn, shuffled anew every pass. Its curve is measured on the held-out split,
for the report only; the last adapter is the one that counts.
"""

from __future__ import annotations

import random
from typing import Any

from rl.engines.protocol import Policy
from rl.learner import LearnerState
from rl.rollout import Task
from trace_jax.evaluate import heldout_tasks, summarise
from trace_jax.outcomes import success_rate
from trace_jax.runtime import Runtime
from trace_jax.train import initial_adapter, make_learner, run_grpo

NAME = "grpo_target"
_POINTS = 6  # of the curve


def target_tasks(runtime: Runtime, iteration: int) -> list[Task]:
    """The groups of one iteration: the train tasks in a new order every pass, each pass with random numbers of its own."""
    groups, size, count = runtime.config.train.groups, runtime.config.train.group_size, runtime.target_size("train")
    found: list[Task] = []
    for position in range(iteration * groups, (iteration + 1) * groups):
        over, place = divmod(position, count)
        order = list(range(count))
        random.Random(f"{runtime.config.seed} {over}").shuffle(order)
        found += runtime.target_tasks("train", size, label="training", places=[order[place]], earlier=over * size)
    return found


def train_on_target(runtime: Runtime, budget: int) -> dict[str, Any]:
    """Trains and evaluates the baseline; `budget` is the number of rollouts that it may use.

    Returns:
      The content of `evaluation/grpo_target.json`; the curve is in `evaluation/grpo_target_curve.json`.
    """
    config, workdir = runtime.config, runtime.workdir
    if workdir.exists(f"evaluation/{NAME}.json"):
        return workdir.read_json(f"evaluation/{NAME}.json")
    per_iteration = config.train.groups * config.train.group_size
    iterations = max(budget // per_iteration, 1)

    learner = make_learner(runtime)

    def policy(state: LearnerState) -> Policy:
        return Policy(name=NAME, version=int(state.step), adapters=learner.gathered(state.params))

    state = learner.init(initial_adapter(runtime, NAME), seed=config.seed)
    curve: dict[str, list[float]] = {"rollouts": [], "rate": []}
    for point in range(1, _POINTS + 1):
        until = round(iterations * point / _POINTS)
        state = run_grpo(
            runtime,
            learner,
            state,
            f"baselines/{NAME}",
            NAME,
            until,
            lambda iteration: target_tasks(runtime, iteration),
            policy,
            stop=False,
        )
        found = runtime.roll_out(policy(state), NAME, "heldout", point, heldout_tasks(runtime), config.evaluation.temperature)
        curve["rollouts"].append(until * per_iteration)
        curve["rate"].append(success_rate(found)["rate"])
        workdir.write_json(f"evaluation/{NAME}_curve.json", curve)
    result = summarise(NAME, "heldout", found, config.evaluation.temperature) | {"training_rollouts": iterations * per_iteration}
    workdir.write_json(f"evaluation/{NAME}.json", result)
    return result
