"""Success of policies on the target's held-out split, side by side, with intervals.

The held-out tasks are used here alone: nothing is mined, trained, selected or calibrated on them. All policies face the same tasks at the
same temperature, fixed in the config. A task that infrastructure failed is left out and counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from model import load_gate
from rl.rollout import Task
from rl.task_router import TaskRouter
from rl.trajectory import Trajectory, encode_shard
from trace_jax.cli import Arguments
from trace_jax.outcomes import pass_hat, success_rate
from trace_jax.policies import Mixture, find_policy, load_mixture, routed_tasks, trained_mixture, with_slots
from trace_jax.runtime import HELDOUT_TASKS, Runtime, open_runtime
from trace_jax.workdir import policy_name


def summarise(policy: str, split: str, trajectories: Sequence[Trajectory], temperature: float) -> dict[str, Any]:
    """The content of `evaluation/<policy>.json`."""
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
    config = runtime.config.evaluation
    return runtime.tasks(runtime.target, "heldout", HELDOUT_TASKS, config.tasks, config.trials)


def evaluate(runtime: Runtime, name: str, mixture: Mixture | None) -> dict[str, Any]:
    """Evaluates one policy on the held-out split, or reads what an earlier run found.

    Args:
      name: as users write it, `adapter:x`; names the file.
      mixture: the trained adapters; None before there are any.
    """
    path = f"evaluation/{policy_name(name)}.json"
    tasks = heldout_tasks(runtime)
    if runtime.workdir.exists(path):
        runtime.progress.advance(len(tasks), earlier=True)
        return runtime.workdir.read_json(path)
    if name == "router":
        router = TaskRouter.from_json(runtime.workdir.read_json("gate/router.json"))
        for capability in mixture.capabilities:
            runtime.engine.load(mixture.adapter(capability))
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
    tasks = heldout_tasks(runtime)
    episodes = [runtime.pool.open(task.package, task.seed, task.package.resolve_knobs(task.knobs)) for task in tasks]
    for op, arguments in (("reset", ()), ("respond", ("all done.",))):
        runtime.pool.batch([(episode, op, arguments) for episode in episodes])
    scores = runtime.pool.batch([(episode, "score", ()) for episode in episodes])
    found = [
        Trajectory(
            id=f"{task.task_id}#{task.trial}",
            environment=task.package.name,
            task_id=task.task_id,
            split=task.split,
            seed=task.seed,
            trial=task.trial,
            policy={"name": "do_nothing", "version": 0},
            reward=score.reward,
            success=score.reward >= runtime.config.diagnosis.success,
        )
        for task, score in zip(tasks, scores, strict=True)
    ]
    result = summarise("do_nothing", "heldout", found, 0.0)
    runtime.workdir.write_json("evaluation/do_nothing.json", result)
    return result


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
    with open_runtime(arguments) as runtime:
        mixture = trained_mixture(runtime)
        for name in arguments.policy:
            overall = evaluate(runtime, name, mixture)["overall"]
            print(f"{name:<40} {overall['rate']:.3f} [{overall['interval'][0]:.3f}, {overall['interval'][1]:.3f}]  n = {overall['n']}")
