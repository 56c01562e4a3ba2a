"""How the adapters and the gate were trained: figures over the iterations, each with its name in words and its unit.

A figure that never changes is told in a line instead of being drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from trace_jax.report import budgets
from trace_jax.report.charts import Series, lines
from trace_jax.report.reader import Reader
from trace_jax.report.text import figure, number
from trace_jax.report.whole_run import children


@dataclasses.dataclass(frozen=True)
class Figure:
    """A key of metrics.jsonl in words. `unit` is "%" for a share, else what stands behind the number, "" for none."""

    title: str
    unit: str = ""


FIGURES: dict[str, dict[str, Figure]] = {
    "Outcome": {
        "reward": Figure("mean reward", "%"),
        "success": Figure("success", "%"),
        "validation": Figure("reward on validation seeds", "%"),
        "hinted_share": Figure("rollouts with a hint", "%"),
        "hinted_success": Figure("success with a hint", "%"),
        "unhinted_success": Figure("success without a hint", "%"),
        "constant_share": Figure("groups with one reward only, which teach nothing", "%"),
    },
    "Policy": {
        "entropy": Figure("entropy of the next token", "nats"),
        "base_k3": Figure("divergence from the base, k3 estimate a token", "nats"),
        "logprob": Figure("log-probability of the sampled tokens", "nats"),
    },
    "Loss": {
        "loss": Figure("loss"),
        "clip_share": Figure("tokens with a clipped ratio", "%"),
        "dual_clip_share": Figure("tokens at the dual clip", "%"),
        "masked_share": Figure("tokens masked out of the loss", "%"),
        "dropped_share": Figure("tokens dropped as outliers", "%"),
        "capped_share": Figure("tokens with a capped importance weight", "%"),
        "hinted_weight": Figure("importance weight of hinted tokens"),
        "hinted_masked_share": Figure("hinted tokens masked out", "%"),
        "effective_sample_share": Figure("effective sample size, of the tokens", "%"),
        "grad_norm": Figure("norm of the gradient"),
        "learning_rate": Figure("learning rate"),
        "skipped": Figure("updates skipped"),
    },
    "Lengths and errors": {
        "sampled_tokens": Figure("sampled tokens of a rollout"),
        "action_tokens": Figure("sampled tokens of an update"),
        "turns": Figure("turns of a rollout"),
        "tool_errors": Figure("tool errors of a rollout"),
        "invalid_action": Figure("rollouts that ended with an invalid action", "%"),
        "truncated": Figure("rollouts that were cut short", "%"),
    },
    "Engine and learner": {
        "engine_gap": Figure("difference of log-probabilities, engine to learner", "nats"),
        "policy_lag": Figure("lag of the sampled tokens behind the learner", "updates"),
        "fill": Figure("batch filled with tokens", "%"),
        "compiles": Figure("programs compiled so far"),
    },
    "Time of an iteration": {
        "seconds/rollout": Figure("waiting for rollouts", "s"),
        "seconds/sync": Figure("handing the policy to the engine", "s"),
        "seconds/pack": Figure("packing", "s"),
        "seconds/transfer": Figure("moving the batch to the devices", "s"),
        "seconds/step": Figure("update", "s"),
    },
}
_TABLE = ("reward", "success", "entropy", "base_k3", "clip_share", "policy_lag", "sampled_tokens", "turns", "tool_errors")
_COUNTS = ("groups", "groups_constant", "groups_too_small", "trajectories_kept")  # constant_share says the same


def training(read: Reader, styles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The curves of each adapter, and its success on unseen seeds before and after."""
    shown = []
    for name in children(read, "adapters", styles):
        rows, style = read.jsonl(f"adapters/{name}/metrics.jsonl"), styles.get(name, "s1")
        if rows:
            summary = read.json(f"adapters/{name}/summary.json")
            shown.append({"name": name, "style": style, "summary": summary, **curves(rows, name, style)})
    return shown


def curves(rows: Sequence[Mapping[str, Any]], name: str, style: str) -> dict[str, Any]:
    """What happened over the iterations.

    Returns:
      rows: how many there are. main: the chart of reward and success, or of the loss where there is no reward. more: group to (title,
      chart). constant: (title, value) of what never changed. table: headings and rows of the main figures, thinned.
    """
    present = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (int, float)) and key != "step")
    main = [key for key in ("reward", "success") if key in present] or [key for key in ("loss",) if key in present]
    named = {key: figure for group in FIGURES.values() for key, figure in group.items()}

    def series(key: str, dash: int = 0) -> Series:
        found = [row for row in rows if key in row]  # not every figure is taken at every step
        return Series(name=key, x=[row["step"] for row in found], y=[row[key] for row in found], style=style, dash=dash)

    more: dict[str, list[tuple[str, Markup]]] = {}
    constant = []
    groups = {key: group for group, figures in FIGURES.items() for key in figures}
    order = [key for key in (*named, *(key for key in present if key not in named)) if key in present and key not in (*main, *_COUNTS)]
    for key in order:
        meaning = named.get(key) or _by_environment(key)
        known = [row[key] for row in rows if row.get(key) is not None]
        title = meaning.title + (f", {meaning.unit}" if meaning.unit not in ("", "%") else "")
        if known and len(set(known)) == 1 and len(rows) > 1:
            constant.append((meaning.title, _value(known[0], meaning.unit)))
        elif known:
            chart = lines([series(key)], f"{title}, {name}", "iteration", size=(240, 120), shares=meaning.unit == "%")
            more.setdefault(groups.get(key, "By environment and others"), []).append((title, chart))
    shares = "reward" in main
    return {
        "rows": len(rows),
        "main": lines([series(k, n) for n, k in enumerate(main)], f"Training of {name}", "iteration", span=(0.0, 1.0) if shares else None,
                      shares=shares) if main else None,
        "more": more,
        "constant": constant,
        "table": _table(rows, named),
    }  # fmt: skip


def _by_environment(key: str) -> Figure:
    """`reward/desk_x`, and what we have no words for."""
    kind, _, environment = key.partition("/")
    if kind in ("reward", "success") and environment:
        return Figure(f"{kind} in {environment}", "%")
    return Figure(f"seconds of {environment}", "s") if kind == "seconds" else Figure(key.replace("_", " "))


def _table(rows: Sequence[Mapping[str, Any]], named: Mapping[str, Figure]) -> dict[str, Any]:
    """The main figures as text, every so many iterations."""
    keys = [key for key in _TABLE if any(row.get(key) is not None for row in rows)]
    shown = rows[:: max(1, -(-len(rows) // budgets.STEPS))]
    shown = [*shown, *([rows[-1]] if shown and shown[-1] is not rows[-1] else [])]
    heads = [named[key].title + (f", {named[key].unit}" if named[key].unit else "") for key in keys]
    body = [(row["step"], [_value(row.get(key), named[key].unit, bare=True) for key in keys]) for row in shown]
    return {"heads": heads, "rows": body}


def _value(value: float | None, unit: str, *, bare: bool = False) -> str:
    """A figure with its unit, or without where a heading has it."""
    if value is None:
        return "–"
    said = figure(100 * value, 1) if unit == "%" else number(value)
    return said if bare or not unit else f"{said} {unit}"
