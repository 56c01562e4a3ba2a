"""`trace-jax rollout`: a policy in the target environment, its trajectories into the workdir."""

from __future__ import annotations

from rl.engines.protocol import Policy
from rl.trajectory import Trajectory
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.evaluate import evaluate
from trace_jax.outcomes import success_rate
from trace_jax.policies import find_policy, trained_mixture
from trace_jax.runtime import TRAIN_TASKS, Runtime, open_runtime


def roll_out_train_split(runtime: Runtime, policy: Policy | None = None) -> list[Trajectory]:
    """A policy, by default the base agent, on the train split, `diagnosis.trials` times each task."""
    config = runtime.config
    policy = policy or Policy(name="base", version=0)
    tasks = runtime.tasks(runtime.target, "train", TRAIN_TASKS, config.target.train_tasks, config.diagnosis.trials)
    return runtime.roll_out(policy, policy.name, "train", 0, tasks)


def main(arguments: Arguments) -> None:
    """`trace-jax rollout --policy=P --split=train|heldout`.

    Raises:
      InputError: the router on the train split, on which nothing asks for it.
    """
    with open_runtime(arguments) as runtime:
        mixture = trained_mixture(runtime)
        for name in arguments.policy:
            if arguments.split == "heldout":
                found = evaluate(runtime, name, mixture)["overall"]
            elif name == "router":
                raise InputError("--policy=router: rolls out on --split=heldout only")
            else:
                found = success_rate(roll_out_train_split(runtime, find_policy(runtime, name, mixture)))
            print(f"{name}: success {found['rate']:.3f} [{found['interval'][0]:.3f}, {found['interval'][1]:.3f}], n = {found['n']}")
