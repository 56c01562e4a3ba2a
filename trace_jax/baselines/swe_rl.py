"""SWE-RL: GRPO whose reward is how like a patch is to the oracle's.

`R = -1` for an answer in the wrong form, else the ratio of `difflib.SequenceMatcher` between the patch that was handed in and the oracle's,
in [0, 1] (arXiv 2502.18449, section 2.2). No test decides anything. It needs environments that show both patches in their verdict, as the
check `patch`: `expected` is the oracle's, `actual` what was handed in, empty or None where that was no patch.
"""

from __future__ import annotations

import difflib
from typing import Any

from envs import Package
from envs.probes import play, say
from rl.rollout import Task
from rl.trajectory import Trajectory
from trace_jax.baselines.grpo_target import target_tasks
from trace_jax.baselines.training import train_baseline
from trace_jax.runtime import TRAINING, Runtime
from trace_jax.train import initial_adapter

NAME = "swe_rl"
PATCH = "patch"
MALFORMED = -1.0


def patch_similarity(trajectory: Trajectory) -> float:
    """The reward of SWE-RL. An episode that did not come to its end handed nothing in."""
    patch = trajectory.checks.get(PATCH)
    if patch is None or not patch["actual"]:
        return MALFORMED
    return difflib.SequenceMatcher(None, patch["actual"], patch["expected"], autojunk=False).ratio()


def patch_packages(runtime: Runtime) -> list[Package]:
    """The environments of the run whose verdict shows patches: the target, as the base's rollouts tell, or else those of the
    capabilities."""

    def shows(package: Package) -> bool:
        (one,) = play(runtime.pool, package, [TRAINING], say("all done."), turns=1)
        return any(PATCH in score.checks for score in one.scores)

    # some graders say of a patch only that it must apply
    if any("@@" in str(t.checks[PATCH]["expected"]) for t in runtime.workdir.read_shards("base", "train") if PATCH in t.checks):
        return [runtime.target]
    return [package for capability in runtime.usable() if shows(package := runtime.environment(capability))]


def train_swe_rl(runtime: Runtime, packages: list[Package], budget: int) -> dict[str, Any]:
    """Trains and evaluates the baseline on the packages in turn, see `train_baseline`."""
    train = runtime.config.train

    def tasks(iteration: int) -> list[Task]:
        if packages == [runtime.target]:
            return target_tasks(runtime, iteration)
        found: list[Task] = []
        for group in range(iteration * train.groups, (iteration + 1) * train.groups):
            found += runtime.tasks(packages[group % len(packages)], "training", TRAINING + group, 1, train.group_size)
        return found

    return train_baseline(runtime, NAME, initial_adapter(runtime, NAME), budget, tasks, patch_similarity)
