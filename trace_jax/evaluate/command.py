"""Success of policies on the target's held-out split, side by side, with intervals, paired with the base, above the floor.

The held-out tasks are used here alone: nothing is mined, trained, selected or calibrated on them; what says otherwise in the workdir is
shown in red (`trace_jax.evaluate.hygiene`). All policies face the same tasks at the same temperature, fixed in the config. A rollout that
infrastructure failed is left out and counted, and beside that counted as a failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from envs import EnvironmentFault, Verdict
from envs.harness.players import play as play_harness
from envs.probes import play, say
from rl.rollout import Task
from rl.task_router import TaskRouter
from rl.trajectory import Trajectory, encode_shard
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.evaluate.comparison import Comparison, compare_paired
from trace_jax.evaluate.hygiene import find_leaks, task_key, told, used_tasks
from trace_jax.evaluate.outcomes import above_floor, count_tasks, cut_off, free_tasks, overall_success, rate_line
from trace_jax.evaluate.provenance import provenance, refuse_other_tasks
from trace_jax.evaluate.results import print_results
from trace_jax.evaluate.task_names import some
from trace_jax.policies import Mixture, composed_gate, find_policy, load_mixture, read_routing, routed_tasks, trained_mixture, with_slots
from trace_jax.runtime import Runtime, open_runtime
from trace_jax.workdir import policy_name


def summarise(
    policy: str, split: str, trajectories: Sequence[Trajectory], temperature: float | None, tasks: Sequence[Task] = ()
) -> dict[str, Any]:
    """The content of `evaluation/<policy>.json`; no temperature for a policy that samples nothing.

    Args:
      tasks: what was played, for the record of grader and definitions.
    """
    errors: dict[str, int] = {}
    for t in trajectories:
        if t.error is not None:
            errors[t.task_id] = errors.get(t.task_id, 0) + 1
    return {
        "policy": policy,
        "split": split,
        "temperature": temperature,
        "rollouts": len(trajectories),
        "tasks": count_tasks(trajectories),
        "overall": overall_success(trajectories),
        "errors": errors,
        **({"provenance": provenance(tasks)} if tasks else {}),
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
    tasks = played = heldout_tasks(runtime)
    if runtime.workdir.exists(path):
        runtime.progress.advance(len(tasks), earlier=True)
        return _read_again(runtime, path, name, tasks)
    if name == "router" and mixture is not None:
        read_routing(runtime, mixture.slots)
        router = TaskRouter.from_json(runtime.workdir.read_json("gate/router.json"))
        tasks, policy = routed_tasks(runtime, router, mixture, tasks), "router"
    else:
        policy = find_policy(runtime, name, mixture)
    temperature = runtime.config.evaluation.temperature
    found = runtime.roll_out(policy, name, "heldout", 0, tasks, temperature)
    result = summarise(name, "heldout", found, temperature, played)
    runtime.workdir.write_json(path, result)
    return result


def _read_again(runtime: Runtime, path: str, name: str, tasks: Sequence[Task]) -> dict[str, Any]:
    """What an earlier run found, if it was on the tasks as they are now."""
    found = runtime.workdir.read_json(path)
    refuse_other_tasks(found, {"provenance": provenance(tasks)}, (runtime.workdir.place(path), "the target as it is now"), _fix(name))
    return found


def _fix(name: str) -> str:
    return (
        f"remove evaluation/{policy_name(name)}.json and rollouts/{policy_name(name)}/heldout, and run trace-jax evaluate --policy={name}"
    )


def heldout_rollouts(runtime: Runtime, name: str) -> Iterable[Trajectory]:
    """What `evaluate` rolled out of a policy, as far as it is still there."""
    return runtime.workdir.read_shards(name, "heldout") if runtime.workdir.shards(name, "heldout") else ()


def do_nothing(runtime: Runtime) -> dict[str, Any]:
    """The floor: an agent that makes no call and says that all is done."""
    tasks = runtime.target_tasks("heldout", 1)
    if runtime.workdir.exists("evaluation/do_nothing.json"):
        return _read_again(runtime, "evaluation/do_nothing.json", "do_nothing", tasks)
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
    result = summarise("do_nothing", "heldout", found, None, tasks)
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


def evaluate_all(
    runtime: Runtime, capabilities: Sequence[str], policies: Sequence[str] | None = None, leaks: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[str, Any]]:
    """The policies, the floor, and examples of the gate's choices for the report.

    Args:
      policies: of `evaluation.policies`; None is all of them.
      leaks: of earlier rounds, whose agents the policies are made of.
    """
    mixture = load_mixture(runtime, capabilities)
    names = []
    for name in runtime.config.evaluation.policies if policies is None else policies:
        names += [f"adapter:{c}" for c in capabilities] if name == "adapters" else [name]
    results = {name: evaluate(runtime, name, mixture) for name in names}
    results["do_nothing"] = do_nothing(runtime)
    note_leaks(runtime, results, leaks)
    pair(runtime, results)
    if "composed" in names:
        write_examples(runtime, mixture)
    return results


def leaks_of(runtime: Runtime) -> list[dict[str, Any]]:
    """What mining, training or selection saw of the evaluated tasks, see `find_leaks`."""
    return find_leaks(used_tasks(runtime.workdir), {task_key(t.package.name, t.task_id) for t in heldout_tasks(runtime)})


def note_leaks(runtime: Runtime, results: Mapping[str, dict[str, Any]], earlier: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """`leaks_of` the run, behind those of earlier rounds, written as `leak` into the policies' files."""
    leaks = [*map(dict, earlier), *leaks_of(runtime)]
    for name, found in results.items():
        if name != "do_nothing" and found.get("leak", []) != leaks:
            _note(runtime, name, found, leak=leaks)
    return leaks


def _note(runtime: Runtime, name: str, found: dict[str, Any], **more: Any) -> None:
    if any(found.get(key) != value for key, value in more.items()):
        found |= more
        runtime.workdir.write_json(f"evaluation/{policy_name(name)}.json", found)


def pair(runtime: Runtime, results: Mapping[str, dict[str, Any]]) -> dict[str, Comparison]:
    """Each policy beside the base, or where that was not evaluated beside the first; goes into its file as `paired`.

    Raises:
      InputError: two were evaluated on other tasks, or graded otherwise.
    """
    workdir = runtime.workdir
    first = "base" if "base" in results or workdir.exists("evaluation/base.json") else next(iter(results))
    to = results.get(first) or workdir.read_json(f"evaluation/{first}.json")
    found = {name: compare_evaluations(to, result) for name, result in results.items() if name not in (first, "do_nothing")}
    for name, comparison in found.items():
        _note(runtime, name, results[name], paired={"to": first, **comparison.to_json()})
    return found


def compare_evaluations(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """`compare_paired` of two contents of `evaluation/<policy>.json`.

    A task all of whose trials infrastructure failed for one policy is left out for both.

    Raises:
      InputError: other tasks, another split, grader or definition of a task.
    """
    names = (a["policy"], b["policy"])
    refuse_other_tasks(a, b, names, _fix(names[0]))
    failed = {task for x in (a, b) for task in x.get("errors", {}) if task not in x["tasks"]}
    left = ({task: counts for task, counts in x["tasks"].items() if task not in failed} for x in (a, b))
    return compare_paired(*left, names=names)


def write_examples(runtime: Runtime, mixture: Mixture) -> None:
    """`gate/examples.jsonl.zst`: held-out trajectories of the composed policy with the slot of every token, and the text of every token
    id."""
    workdir = runtime.workdir
    if (gate := composed_gate(runtime, workdir.read_json("gate/routing.json"))) is None:
        return
    found = [t for t in workdir.read_shards("composed", "heldout", [0]) if t.error is None]
    longest = sorted(found, key=lambda t: (-len(t.messages), t.id))[: runtime.config.report.trajectories]
    workdir.write_bytes("gate/examples.jsonl.zst", encode_shard(with_slots(runtime, mixture, gate, longest)))
    workdir.write_json("gate/pieces.json", [runtime.chat.decode([token]) for token in range(runtime.model.config.vocab_size)])


def print_floor(floor: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> None:
    """The floor; where it is not zero, the tasks that it solves, and every policy's success on the others."""
    print(rate_line("do_nothing", floor["overall"]))
    free = free_tasks(floor["tasks"])
    if free:
        print(f"doing nothing solves {len(free)} of {len(floor['tasks'])} tasks: {some(free, 20)}; on the others:")
        for name, found in results.items():
            print(rate_line(f"  {name}", above_floor(found["tasks"], free)))


def print_cut_off(trajectories: Iterable[Trajectory]) -> None:
    """How the episodes ended where most were cut off, below the policy's figures."""
    if said := cut_off(list(trajectories)):
        print(f"  {said}")


def print_leaks(leaks: Sequence[Mapping[str, Any]], console: Console) -> None:
    """One line in red for each."""
    for leak in leaks:
        console.print(f"[bold red]LEAK: {escape(told(leak))}; these are no unseen tasks[/]", soft_wrap=True, highlight=False)


def main(arguments: Arguments) -> None:
    """`trace-jax evaluate --policy=P,...`, or `--results=FILE,...` for what other tools have evaluated.

    Raises:
      InputError: neither of the two, or both.
    """
    if arguments.results:
        if arguments.policy or arguments.workdir:
            raise InputError("trace-jax evaluate: --results compares files, without --workdir and --policy; leave out one or the other")
        print_results(arguments.results, Console(), arguments.intersect, arguments.config.diagnosis.success)
        return
    if not arguments.policy or arguments.workdir is None:
        raise InputError("trace-jax evaluate: give --workdir=DIR --policy=P,... or --results=FILE,...")
    config = arguments.config.evaluation
    with open_runtime(arguments, "evaluate", len(arguments.policy) * config.tasks * config.trials) as runtime:
        mixture = trained_mixture(runtime)
        results = {}
        for name in arguments.policy:
            results[name] = evaluate(runtime, name, mixture)
            print(rate_line(name, results[name]["overall"]))
            print_cut_off(heldout_rollouts(runtime, name))
        floor = do_nothing(runtime)
        leaks, paired = note_leaks(runtime, results), pair(runtime, results)
        print_floor(floor, results)
        for name, comparison in paired.items():
            print(f"{name} to {results[name]['paired']['to']}: {comparison.told()}")
        print_leaks(leaks, Console())
