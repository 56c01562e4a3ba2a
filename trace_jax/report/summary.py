"""The run in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trace_jax.agents.protocol import Usage
from trace_jax.evaluate.comparison import Comparison
from trace_jax.report import results as found
from trace_jax.report.results import Result
from trace_jax.report.text import duration, percent, percent_interval, points


def sentences(
    results: Mapping[str, Result],
    target: str,
    diagnosis: Mapping[str, Any] | None,
    routing: Mapping[str, Any] | None,
    spent: Mapping[str, Any] | None,
    planted: bool = False,
) -> list[str]:
    """What a reader should know who reads nothing else, as far as the run has come.

    Args:
      diagnosis: of `sections.diagnosis`.
      routing, spent: the content of routing.json and spent.json.
      planted: whether the base is the checkpoint that comes with trace-jax.
    """
    said = []
    base, composed = results.get(found.BASE), results.get(found.COMPOSED)
    best, floor, baseline = found.best_adapter(results), results.get(found.FLOOR), results.get(found.BASELINE)
    if base:
        tasks = f"{len(base.tasks):,} {'held-out' if base.split == 'heldout' else base.split} tasks of {target}"
        said.append(f"On {tasks} the base agent succeeds in {_rate(base)}.")
    if planted and (base or diagnosis):
        said.append("This agent comes with trace-jax, and its deficits were planted: it learnt from a teacher that fails on purpose.")
    if composed:
        against = f": {_compared(composed.to_base, 'the base')}" if composed.to_base else ""
        said.append(f"The composed agent succeeds in {_rate(composed)}{against}.")
        if change := composed.to_base:
            fixed = f"{len(change.fixed):,} {'task' if len(change.fixed) == 1 else 'tasks'}"
            said.append(f"It solves {fixed} that the base agent fails, and fails {len(change.broken):,} that the base agent solves.")
    if best:
        against = found.difference(composed, best) if composed else None
        ours = f"; the composed agent is {_compared(against, 'it')}" if against else ""
        said.append(f"The best single adapter, {best.capability}, reaches {_rate(best)}{ours}.")
    if baseline:
        cost = f", with {baseline.spent:,} rollouts," if baseline.spent else ""
        against = found.difference(composed, baseline) if composed else None
        ours = f"; the composed agent is {_compared(against, 'it')}" if against else ""
        said.append(f"The baseline, GRPO on the target's own train tasks{cost} reaches {_rate(baseline)}{ours}.")
    if floor:
        said.append(f"Doing nothing succeeds in {percent(floor.rate)}: the floor.")
    if solved := found.free(results):
        others = "; ".join(f"{r.policy} {_rate_of(r.above_floor)}" for r in (base, best, composed) if r)
        said.append(f"Where doing nothing fails, on the other {len(floor.tasks) - len(solved):,} tasks: {others}.")
    if routing:
        said.append(_gate(routing))
    if diagnosis:
        rows = diagnosis["rows"]
        kept = [row.name for row in rows if row.retained]
        of = f" of {len(rows)} candidate capabilities" if len(rows) > len(kept) else " capability" if len(kept) == 1 else " capabilities"
        said.append(f"The diagnosis retained {len(kept)}{of}: {', '.join(kept)}." if kept else "The diagnosis retained no capability.")
    if spent:
        total = spent["total"]
        steps = found.rollouts_of_steps(spent)
        said.append(
            f"Diagnosis, calibration, training and composition took {steps:,} rollouts. Everything, evaluations included, took "
            f"{total['rollouts']:,.0f} rollouts, {total['sampled_tokens']:,.0f} sampled tokens and {duration(total['seconds'])}."
        )
        if spent.get("agents"):
            said.append(paid(spent["agents"]))
    return said


def paid(agents: Mapping[str, Any]) -> str:
    """What the LLM agents of diagnosis and synthesis have cost."""
    usage = Usage(agents["requests"], agents["input_tokens"], agents["output_tokens"], agents["cost"])
    guess = ", partly estimated" if agents.get("estimated") else ""
    return f"The LLM agents gave {usage.told()}{guess}."


def _gate(routing: Mapping[str, Any]) -> str:
    rates = {name: row["rate"] for name, row in routing["validation"].items()}
    best = max((name for name in rates if name.startswith("adapter:")), key=rates.__getitem__, default=None)
    figures = f"{percent(rates['gate'])} with the gate" if "gate" in rates else ""
    figures += f", {percent(rates[best])} with the best single adapter" if best and figures else ""
    where = f" on unseen seeds of the capability environments ({figures})" if figures else ""
    if routing["composed"] == "previous":
        return f"The token gate was not kept: it did no better than the agent of the round before{where}, which composed still is."
    if routing["kept"]:
        return f"The token gate was kept: it did better than every single adapter{where}."
    return f"The token gate was not kept: it did no better than the best single adapter{where}. So composed is {routing['composed']}."


def _rate(result: Result) -> str:
    return f"{percent(result.rate)} (95\u00a0% interval {percent_interval(result.interval)})"


def _rate_of(figures: Mapping[str, Any]) -> str:
    return f"{percent(figures['rate'])} ({percent_interval(figures['interval'])})"


def _compared(difference: Comparison, other: str) -> str:
    """`12.0 points above the base (8.1 to 16.0)`, and whether that may be chance."""
    if not (difference.difference or any(difference.interval)):
        return f"no better and no worse than {other}"
    interval = f"{points(difference.interval[0])} to {points(difference.interval[1])}"
    size = f"{abs(100 * difference.difference):.1f} points {'above' if difference.difference >= 0 else 'below'} {other}"
    return f"{size} ({interval})" if difference.clear else f"{size} ({interval}, so it may be chance)"
