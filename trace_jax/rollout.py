"""`trace-jax rollout`: a policy in the target environment, its trajectories into the workdir."""

from __future__ import annotations

from rl.engines.protocol import Policy
from rl.trajectory import Trajectory
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.evaluate.command import evaluate, heldout_rollouts, print_cut_off
from trace_jax.evaluate.outcomes import rate_line, success_rate
from trace_jax.policies import find_policy, trained_mixture
from trace_jax.runtime import BASE, Runtime, open_runtime


def roll_out_train_split(runtime: Runtime, policy: Policy = BASE, *, earlier: int = 0) -> list[Trajectory]:
    """A policy on the train split, `diagnosis.trials` times each task, after `earlier` trials of others."""
    tasks = runtime.target_tasks("train", runtime.config.diagnosis.trials, earlier=earlier)
    return runtime.roll_out(policy, policy.name, "train", 0, tasks)


def main(arguments: Arguments) -> None:
    """`trace-jax rollout --policy=P --split=train|heldout`.

    Raises:
      InputError: no such policy, or the router on the train split, on which nothing asks for it.
    """
    config, heldout = arguments.config, arguments.split == "heldout"
    if "router" in arguments.policy and not heldout:
        raise InputError("--policy=router: rolls out on --split=heldout only")
    tasks = (config.evaluation.tasks, config.evaluation.trials) if heldout else (config.target.train_tasks, config.diagnosis.trials)
    with open_runtime(arguments, "evaluate" if heldout else "rollouts", len(arguments.policy) * tasks[0] * tasks[1]) as runtime:
        mixture = trained_mixture(runtime)
        for name in arguments.policy:
            if heldout:
                found = evaluate(runtime, name, mixture)["overall"]
                trajectories = heldout_rollouts(runtime, name)
            else:
                trajectories = roll_out_train_split(runtime, find_policy(runtime, name, mixture))
                found = success_rate(trajectories)
            print(rate_line(name, found))
            print_cut_off(trajectories)
