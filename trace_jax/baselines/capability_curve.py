"""Success against the number of capabilities: composed with the k adapters of largest gap, and prompts that are told of the same k.

The adapters are those of step 3. For each k below their number a gate of its own is trained, in `capabilities/<k>/`, a workdir like the
run's with links to what they share: what every slot does on the seeds of the k environments was rolled out by step 4 already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trace_jax.baselines import prompt_evolution
from trace_jax.baselines.single import makes_adapter
from trace_jax.compose import compose
from trace_jax.evaluate.command import evaluate
from trace_jax.policies import load_mixture
from trace_jax.runtime import Runtime
from trace_jax.spent import STEPS, spent_on, stage_of
from trace_jax.workdir import policy_name


def compose_first(runtime: Runtime, count: int) -> dict[str, Any]:
    """The agent of the first `count` capabilities on the held-out tasks, all of them are the run's own.

    Returns:
      {"capabilities", "rate", "interval", "rollouts"}: `capabilities` are their names, `rollouts` what it takes to make this agent.
    """
    usable, workdir = runtime.usable(), runtime.workdir
    chosen, file = usable[:count], f"capabilities/{count}/point.json"
    if count == len(usable):
        found = evaluate(runtime, "composed", load_mixture(runtime, usable))
        return _point(chosen, found, spent_on(workdir, lambda folder, split: stage_of(folder, split) in STEPS))
    if workdir.exists(file):
        runtime.progress.advance(plan_of(runtime, count), earlier=True)
        return workdir.read_json(file)
    if not any(t.success for c in chosen for t in workdir.read_shards(f"adapter:{c}", f"gate-{c}")):
        found = evaluate(runtime, "base", None)  # adapters that solve nothing cannot be composed
        return _point(chosen, found, spent_on(workdir, lambda folder, split: _making(chosen, folder, split)))
    measured = [(folder, f"{kind}-{c}") for folder in _slots(chosen) for kind in ("gate", "selection") for c in chosen]
    shared = [f"rollouts/{folder}/{split}" for folder, split in measured]
    inner = workdir.within(f"capabilities/{count}", ["diagnosis", "environments", "adapters", *shared])
    with runtime.within(inner) as part:
        compose(part, chosen)
        found = evaluate(part, "composed", load_mixture(part, chosen))
    spent = spent_on(workdir, lambda folder, split: (folder, split) in measured or _making(chosen, folder, split))
    own = spent_on(inner, lambda folder, split: stage_of(folder, split) == "compose")
    point = _point(chosen, found, {key: spent[key] + own[key] for key in spent})
    workdir.write_json(file, point)
    return point


def prompt_first(runtime: Runtime, count: int, budget: int) -> dict[str, Any]:
    """The same for instructions, evolved by an LLM that is told of the first `count` capabilities."""
    found = prompt_evolution.evolve(runtime, budget, count)
    spent = {"rollouts": found["training_rollouts"]}
    return _point(runtime.usable()[:count], found, spent)


def plan_of(runtime: Runtime, count: int) -> int:
    """Rollouts of composing `count` adapters, nearly."""
    config = runtime.config
    grpo = config.gate.grpo_iterations * config.train.groups * config.train.group_size
    return (
        grpo + count * (5 * config.train.selection_seeds + 4 * config.gate.table_seeds) + config.evaluation.tasks * config.evaluation.trials
    )


def _slots(capabilities: Sequence[str]) -> list[str]:
    return ["base", *(policy_name(f"adapter:{c}") for c in capabilities)]


def _making(capabilities: Sequence[str], folder: str, split: str) -> bool:
    """With the checks of step 3, which are part of its cost."""
    return split == "agreement" or any(makes_adapter(c, folder, split) or split == f"own-{c}" for c in capabilities)


def _point(capabilities: Sequence[str], found: dict[str, Any], spent: dict[str, int]) -> dict[str, Any]:
    overall = found["overall"]
    return {"capabilities": list(capabilities), "rate": overall["rate"], "interval": overall["interval"], "rollouts": spent["rollouts"]}
