"""GRPO of one adapter on the target's train tasks, with as many rollouts as the four steps spent on the composed agent.

It sees what GRPO sees in life: a fixed set of tasks, taken in turn, shuffled anew every pass.
"""

from __future__ import annotations

import random
from typing import Any

from rl.rollout import Task
from trace_jax.baselines.training import train_baseline
from trace_jax.runtime import Runtime
from trace_jax.train import initial_adapter

NAME = "grpo_target"


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
    """Trains and evaluates the baseline, see `train_baseline`; `budget` is the number of rollouts that it may use."""
    return train_baseline(runtime, NAME, initial_adapter(runtime, NAME), budget, lambda iteration: target_tasks(runtime, iteration))
