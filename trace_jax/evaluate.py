"""Success of policies on the target's held-out split, side by side, with intervals.

The held-out tasks are used here alone: nothing is mined, trained, selected or calibrated on them. All policies face the same tasks at the
same temperature, fixed in the config. A task that infrastructure failed is left out and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from envs import EnvironmentFault, Verdict
from envs.harness.players import play as play_harness
from envs.probes import play, say
from model import load_gate
from rl.rollout import Task
from rl.task_router import TaskRouter
from rl.trajectory import Trajectory, encode_shard
from trace_jax.cli import Arguments
from trace_jax.outcomes import pass_hat, rate_line, success_rate
from trace_jax.policies import Mixture, find_policy, load_mixture, read_routing, routed_tasks, trained_mixture, with_slots
from trace_jax.runtime import Runtime, open_runtime
from trace_jax.workdir import policy_name


def summarise(policy: str, split: str, trajectories: Sequence[Trajectory], temperature: float | None) -> dict[str, Any]:
    """The content of `evaluation/<policy>.json`; no temperature for a policy that samples nothing."""
    tasks: dict[str, dict[str, int]] = defaultdict(lambda: {"trials": 0, "successes": 0})
    for t in trajectories:
        if t.error is None:
            tasks[t.task_id]["trials"] += 1
            tasks[t.task_id]["successes"] += int(t.success)
    overall = success_rate(trajectories) | {"pass_hat": pass_hat([(c["trials"], c["successes"]) for c in tasks.values()])}
    return {
        "policy": policy,
        "split": split,
        "temperature": temperature,
        "rollouts": len(trajectories),
        "tasks": dict(tasks),
        "overall": overall,
    }


def heldout_tasks(runtime: Runtime) -> list[Task]:
    """The tasks of the evaluation, the same for every policy."""
    return runtime.target_tasks("heldout", runtime.config.evaluation.trials)


def evaluate(runtime: Runtime, name: str, mixture: Mixture | None) -> dict[str, Any]:
    """Evaluates one policy on the held-out split, or reads what an earlier run found.

    Args:
      name: as users write it, `adapter:x`; names the file.
      mixture: the trained adapters; None before there are any.

    Raises:
      InputError: no such policy in this workdir, or the step that makes it has not run.
    """
    path = f"evaluation/{policy_name(name)}.json"
    tasks = heldout_tasks(runtime)
    if runtime.workdir.exists(path):
        runtime.progress.advance(len(tasks), earlier=True)
        return runtime.workdir.read_json(path)
    if name == "router" and mixture is not None:
        read_routing(runtime, mixture.slots)
        router = TaskRouter.from_json(runtime.workdir.read_json("gate/router.json"))
        tasks, policy = routed_tasks(runtime, router, mixture, tasks), "router"
    else:
        policy = find_policy(runtime, name, mixture)
    temperature = runtime.config.evaluation.temperature
    found = runtime.roll_out(policy, name, "heldout", 0, tasks, temperature)
    result = summarise(name, "heldout", found, temperature)
    runtime.workdir.write_json(path, result)
    return result


def do_nothing(runtime: Runtime) -> dict[str, Any]:
    """The floor: an agent that makes no call and says that all is done."""
    if runtime.workdir.exists("evaluation/do_nothing.json"):
        return runtime.workdir.read_json("evaluation/do_nothing.json")
    tasks = runtime.target_tasks("heldout", 1)
    found = [
        Trajectory(
            id=task.id,
            environment=task.package.name,
            task_id=task.task_id,
            reward=reward,
            success=reward is not None and reward >= runtime.config.diagnosis.success,
            error=fault and {"kind": fault.kind, "message": str(fault)},
        )
        for task, (reward, fault) in zip(tasks, _floor(runtime, tasks), strict=True)
    ]
    result = summarise("do_nothing", "heldout", found, None)
    runtime.workdir.write_json("evaluation/do_nothing.json", result)
    return result


def _floor(runtime: Runtime, tasks: Sequence[Task]) -> list[tuple[float | None, EnvironmentFault | None]]:
    """What doing nothing earns, or why nobody knows."""
    if not runtime.config.benchmark.name:
        seeds, knobs = [task.seed for task in tasks], runtime.config.target.knobs
        return [(one.reward, one.fault) for one in play(runtime.pool, runtime.target, seeds, say("all done."), knobs=knobs, turns=1)]
    found: dict[str, Verdict | EnvironmentFault] = {}
    for target in runtime.targets:
        own = [task for task in tasks if task.package is target]
        listed = [target.all_tasks[task.seed] for task in own]
        verdicts = play_harness(runtime.harness, target, listed, lambda _, ask, target=target: target.do_nothing(ask))
        found |= {task.id: verdict for task, verdict in zip(own, verdicts, strict=True)}
    answers = [found[task.id] for task in tasks]
    return [(None, one) if isinstance(one, EnvironmentFault) else (one.reward, None) for one in answers]


def evaluate_all(runtime: Runtime, capabilities: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What `evaluation.policies` names, the floor, and examples of the gate's choices for the report."""
    mixture = load_mixture(runtime, capabilities)
    names = []
    for name in runtime.config.evaluation.policies:
        names += [f"adapter:{c}" for c in capabilities] if name == "adapters" else [name]
    results = {name: evaluate(runtime, name, mixture) for name in names}
    results["do_nothing"] = do_nothing(runtime)
    if "composed" in names:
        write_examples(runtime, mixture)
    return results


def write_examples(runtime: Runtime, mixture: Mixture) -> None:
    """`gate/examples.jsonl.zst`: held-out trajectories of the composed policy with the slot of every token, and the text of every token
    id."""
    workdir = runtime.workdir
    if not workdir.read_json("gate/routing.json")["kept"]:
        return
    found = [t for t in workdir.read_shards("composed", "heldout", [0]) if t.error is None]
    longest = sorted(found, key=lambda t: (-len(t.messages), t.id))[: runtime.config.report.trajectories]
    gate = load_gate(workdir.path("gate/gate.safetensors"))
    workdir.write_bytes("gate/examples.jsonl.zst", encode_shard(with_slots(runtime, mixture, gate, longest)))
    workdir.write_json("gate/pieces.json", [runtime.chat.decode([token]) for token in range(runtime.model.config.vocab_size)])


def main(arguments: Arguments) -> None:
    """`trace-jax evaluate --policy=P,...`."""
    config = arguments.config.evaluation
    with open_runtime(arguments, "evaluate", len(arguments.policy) * config.tasks * config.trials) as runtime:
        mixture = trained_mixture(runtime)
        for name in arguments.policy:
            print(rate_line(name, evaluate(runtime, name, mixture)["overall"]))
