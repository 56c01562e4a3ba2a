"""`trace-jax compare`: the composed agent beside what its users would do instead, on the same engine, trainer, tasks and budget.

    the four steps -> the baselines that apply -> the same with fewer capabilities -> a table and two curves

What the workdir has already is not done again. `evaluation/comparison.json` holds everything that is shown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
from rich.table import Table

from trace_jax.agents import usage_of
from trace_jax.baselines import capability_curve, grpo_target, prompt_evolution, swe_rl
from trace_jax.baselines.single import evaluate_single, makes_adapter
from trace_jax.cli import Arguments
from trace_jax.evaluate.command import compare_evaluations, evaluate, leaks_of, print_leaks
from trace_jax.policies import load_mixture
from trace_jax.report import write_report
from trace_jax.report.comparison import write_charts
from trace_jax.run import run
from trace_jax.runtime import Runtime, open_runtime, plan
from trace_jax.spent import STEPS, TRAINED, rollouts_of_steps, spent_on, stage_of
from trace_jax.synthesize import NEEDS_ATTENTION, require_finished
from trace_jax.workdir import policy_name

FILE = "evaluation/comparison.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A policy of the table.

    Attributes:
      rate, interval, n: success on the held-out tasks.
      to_base: `Comparison.to_json` of base and this policy; None for the base.
      rollouts, sampled_tokens: what it took to make it, evaluation left out; of all its steps, diagnosis and calibration too.
      agent_tokens: of the LLM that wrote prompts.
      note: what a reader of the row should know.
    """

    policy: str
    rate: float
    interval: tuple[float, float]
    n: int
    to_base: dict[str, Any] | None
    rollouts: int
    sampled_tokens: int
    agent_tokens: int = 0
    note: str = ""


def compare(runtime: Runtime) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Everything that is missing; the content of `evaluation/comparison.json`, and what step 2 found.

    Raises:
      InputError: a step or a baseline cannot be done as the config wants it; the message names the field.
      Unfinished: an LLM did not answer, or none of its environments is usable.
    """
    config, workdir, settings = runtime.config, runtime.workdir, runtime.config.baselines
    if "gepa" in settings.policies and not workdir.exists(FILE):
        prompt_evolution.make_reflection_agent(runtime)  # what is missing is said before hours of rollouts
    environments = run(runtime, _stages(runtime, sum(plan(config).values()), 4))
    capabilities = runtime.usable()
    budget = settings.rollouts or rollouts_of_steps(workdir)
    runtime.plan(plan(config, len(capabilities)) | _stages(runtime, budget, len(capabilities)))
    with runtime.stage("baseline"):
        found, left_out = _baselines(runtime, budget)
    against_capabilities: dict[str, Any] = {}
    if settings.capabilities:
        with runtime.stage("capabilities"):
            against_capabilities = _against_capabilities(runtime, found, budget)
    result = {
        "target": runtime.target.name,
        "budget": budget,
        "policies": [dataclasses.asdict(row) for row in _rows(runtime, found)],
        "left_out": left_out,
        "leak": leaks_of(runtime),
        "against_rollouts": _against_rollouts(runtime, found, against_capabilities),
        "against_capabilities": against_capabilities,
    }
    workdir.write_json(FILE, result)
    write_charts(workdir, result)
    workdir.processes.agree(lambda: write_report(workdir))
    return result, environments


def _stages(runtime: Runtime, budget: float, capabilities: int) -> dict[str, float]:
    """What comes behind the run, with the rollouts of each."""
    config, settings = runtime.config, runtime.config.baselines
    heldout = config.evaluation.tasks * config.evaluation.trials
    trained = [name for name in settings.policies if name in ("grpo_target", "swe_rl") or (name == "single" and settings.single_budget)]
    evolving = min(settings.gepa_rollouts or settings.rollouts or budget, budget) if "gepa" in settings.policies else 0
    stages = {"baseline": len(trained) * (budget + 6 * heldout) + evolving + 2 * heldout}
    if settings.capabilities:
        stages["capabilities"] = sum(capability_curve.plan_of(runtime, k) + evolving + heldout for k in range(1, capabilities + 1))
    return stages


def _baselines(runtime: Runtime, budget: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """(evaluations by the names of the config, why others are left out)."""
    mixture = load_mixture(runtime, runtime.usable())
    found, left_out = {"base": evaluate(runtime, "base", mixture)}, {}

    def train_swe_rl() -> dict[str, Any] | str:
        packages = swe_rl.patch_packages(runtime)
        if not packages:
            return f"does not apply: {runtime.target.name} and its capability environments have no patches to compare"
        return swe_rl.train_swe_rl(runtime, packages, budget)

    makers: dict[str, Callable[[], dict[str, Any] | str]] = {
        "grpo_target": lambda: grpo_target.train_on_target(runtime, budget),
        "single": lambda: evaluate_single(runtime, budget),
        "gepa": lambda: prompt_evolution.evolve(runtime, runtime.config.baselines.gepa_rollouts or budget),
        "swe_rl": train_swe_rl,
        "router": lambda: evaluate(runtime, "router", mixture),
        "uniform": lambda: evaluate(runtime, "uniform", mixture),
    }
    for name, make in makers.items():
        if name in runtime.config.baselines.policies:
            made = make()
            (left_out if isinstance(made, str) else found)[name] = made
    return found | {"composed": evaluate(runtime, "composed", mixture)}, left_out


def _rows(runtime: Runtime, found: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The table, from what was evaluated."""
    base, rows = found["base"], []
    agent_tokens = usage_of(runtime.workdir).get(prompt_evolution.NAME)
    for name, result in found.items():
        policy, overall = result["policy"], result["overall"]
        against = None if name == "base" else compare_evaluations(base, result)
        spent = spent_on(runtime.workdir, _costs(runtime, name, policy))
        rows.append(
            Row(
                policy=policy,
                rate=overall["rate"],
                interval=tuple(overall["interval"]),
                n=overall["n"],
                to_base=against and against.to_json(),
                **spent,
                agent_tokens=agent_tokens.input_tokens + agent_tokens.output_tokens if name == "gepa" and agent_tokens else 0,
                note=result.get("note", ""),
            )
        )
    return rows


def _costs(runtime: Runtime, name: str, policy: str) -> Callable[[str, str], bool]:
    """Which rollouts a policy took to make."""
    if name == "base":
        return lambda folder, split: False
    if name == "single":
        capability, trained = policy.removeprefix("single:"), policy_name(policy)
        return lambda folder, split: makes_adapter(capability, folder, split) or (folder, split) == (trained, "training")
    if name in ("router", "uniform"):  # of composing, the router needs each adapter's own trajectories alone
        own = [(f"adapter-{c}", f"gate-{c}") for c in runtime.usable()] if name == "router" else []
        return lambda folder, split: stage_of(folder, split) in ("rollouts", "synthesize", "train") or (folder, split) in own
    if name == "composed":
        return lambda folder, split: stage_of(folder, split) in STEPS
    return lambda folder, split: (folder, split) == (name, "training")


def _against_capabilities(runtime: Runtime, found: Mapping[str, Mapping[str, Any]], budget: int) -> dict[str, Any]:
    """{"composed" | "gepa": points for 0, 1, ... capabilities}."""
    counts = range(1, len(runtime.usable()) + 1)
    base = found["base"]["overall"]
    start = {"capabilities": [], "rate": base["rate"], "interval": base["interval"], "rollouts": 0}
    points = {"composed": [start, *(capability_curve.compose_first(runtime, count) for count in counts)]}
    if "gepa" in found:
        each, plain = runtime.config.baselines.gepa_rollouts or budget, found["gepa"]
        start = {"capabilities": [], **{key: plain["overall"][key] for key in ("rate", "interval")}, "rollouts": plain["training_rollouts"]}
        points["gepa"] = [start, *(capability_curve.prompt_first(runtime, count, each) for count in counts)]
    return points


def _against_rollouts(runtime: Runtime, found: Mapping[str, Any], against_capabilities: Mapping[str, Any]) -> dict[str, Any]:
    """{policy: {"rollouts", "rate"}}: of the composed agent after each capability, of the others as they were trained."""
    base, curves = found["base"]["overall"]["rate"], {}
    for name, result in found.items():
        if name in TRAINED:
            file = f"evaluation/{policy_name(result['policy'])}_curve.json"
            if runtime.workdir.exists(file):
                curve = runtime.workdir.read_json(file)
                earlier = result["training_rollouts"] - curve["rollouts"][-1]  # of steps before the baseline's own training
                curves[result["policy"]] = {"rollouts": [0, *(earlier + x for x in curve["rollouts"])], "rate": [base, *curve["rate"]]}
    points = against_capabilities.get("composed") or [{"rollouts": 0, "rate": base}, _last(runtime, found)]
    return curves | {"composed": {key: [point[key] for point in points] for key in ("rollouts", "rate")}}


def _last(runtime: Runtime, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"rollouts": rollouts_of_steps(runtime.workdir), "rate": found["composed"]["overall"]["rate"]}


def comparison_table(result: Mapping[str, Any]) -> Table:
    """What the terminal shows of `evaluation/comparison.json`: eighty columns."""
    title = "Success on held-out tasks, per cent, with 95 % intervals"
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold")
    for heading in ("success", "points to base", "p", "rollouts", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["policies"]:
        change = ["", ""]
        if to_base := row["to_base"]:
            change = [_with_interval(to_base["difference"], to_base["interval"], "+"), f"{to_base['p']:.1g}"]
        tokens = row["sampled_tokens"] + row["agent_tokens"]
        success = _with_interval(row["rate"], row["interval"])
        table.add_row(row["policy"], success, *change, f"{row['rollouts']:,}", f"{tokens / 1e3:,.0f} k")
    said = [f"{row['policy']}: {row['note']}." for row in result["policies"] if row["note"]]
    said += [f"{name} {why}." for name, why in result["left_out"].items()]
    for name, points in result["against_capabilities"].items():
        rates = ", ".join(f"{100 * point['rate']:.1f}" for point in points)
        said.append(f"{name} with 0, 1, ... capabilities: {rates}.")
    table.caption = "\n".join(["Rollouts and tokens: what it took to make a policy, its evaluation left out.", *said])
    return table


def _with_interval(value: float, interval: Sequence[float], sign: str = "") -> str:
    """`76.8 [73, 81]`, of shares."""
    low, high = interval
    return f"{100 * value:{sign}.1f} [{100 * low:{sign}.0f}, {100 * high:{sign}.0f}]"


def main(arguments: Arguments) -> None:
    """`trace-jax compare`.

    Raises:
      Unfinished: a capability needs attention; all else is done.
    """
    with open_runtime(arguments) as runtime:
        result, environments = compare(runtime)
    console = rich.console.Console()
    console.print(comparison_table(result))
    print_leaks(result["leak"], console)
    print(f"curves: {arguments.workdir.place('evaluation')}, comparison.json and score_against_*.svg")
    print(f"report: {arguments.workdir.place('report.html')}")
    require_finished(arguments.workdir, environments, NEEDS_ATTENTION)
