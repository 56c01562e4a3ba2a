"""Success on the held-out tasks, and beside it the baselines of `trace-jax compare`: score against rollouts and against capabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from trace_jax.report import results as found
from trace_jax.report.charts import Bar, Series, bars, lines
from trace_jax.report.reader import Reader
from trace_jax.report.results import Result

_SIZE = (520, 260)


def evaluation(results: Mapping[str, Result], styles: Mapping[str, str]) -> dict[str, Any] | None:
    """The bars, and whether every policy met every task once."""
    if not results:
        return None
    floor = results.get(found.FLOOR)
    rows = [
        Bar(label=r.policy, value=r.rate, interval=r.interval, style=style_of(r.policy, styles)) for r in results.values() if r != floor
    ]
    line = Bar(label=f"doing nothing: {100 * floor.rate:.1f} %", value=floor.rate) if floor else None
    return {
        "bars": bars(rows, "Success on held-out tasks, 95 % intervals", line),
        "once": all(r.to_base is None or r.to_base.test == "mcnemar" for r in results.values()),
    }


def baselines(read: Reader, results: Mapping[str, Result], styles: Mapping[str, str]) -> dict[str, Any] | None:
    """What `trace-jax compare` found; where it has not run but GRPO on the target has, its curve alone."""
    compared = read.json("evaluation/comparison.json")
    if compared is None:
        curve = _grpo_curve(read, results, styles)
        return curve and {"compared": None, "curve": curve, "capabilities": None, "points": []}
    routing = read.json("gate/routing.json") or {}
    rows = [row | {"meaning": found.meaning(row["policy"], routing)} for row in compared["policies"]]
    curves = {name: (curve["rollouts"], curve["rate"]) for name, curve in compared["against_rollouts"].items()}
    by_count = {
        name: ([len(point["capabilities"]) for point in points], [point["rate"] for point in points])
        for name, points in compared["against_capabilities"].items()
    }
    base = next((Bar(label="base", value=row["rate"], style="s0") for row in rows if row["policy"] == found.BASE), None)
    return {
        "compared": compared | {"policies": rows},
        "curve": _score(curves, "rollouts", "rollouts", styles, base),
        "capabilities": _score(by_count, "capabilities", "capabilities", styles, None) if by_count else None,
        "points": [
            (name, len(point["capabilities"]), point) for name, points in compared["against_capabilities"].items() for point in points
        ],
    }


def style_of(policy: str, styles: Mapping[str, str]) -> str:
    """The colour of a policy, the same all over the page."""
    kind, _, capability = policy.partition(":")
    if kind in ("adapter", "single") and capability:
        return styles.get(capability, "k-mixture")
    known = {found.BASE: "s0", found.COMPOSED: "k-composed", "gate": "k-composed", found.BASELINE: "k-baseline"}
    return known.get(policy, "k-mixture")


def _score(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]], of: str, x_label: str, styles: Mapping[str, str], base: Bar | None
) -> Markup:
    """Success against something; the composed agent's line is whole, those of others are broken."""
    names = sorted(curves, key=lambda name: name != found.COMPOSED)
    series = [
        Series(name=name, x=curves[name][0], y=curves[name][1], style=style_of(name, styles), dash=min(n, 3))
        for n, name in enumerate(names)
    ]
    span = 0.0, _above([y for one in series for y in one.y])
    title = f"Success on held-out tasks against {of}"
    return lines(series, title, x_label, span=span, size=_SIZE, shares=True, levels=[base] if base else [], dots=True)


def _grpo_curve(read: Reader, results: Mapping[str, Result], styles: Mapping[str, str]) -> Markup | None:
    """The baseline's score as it was trained, with the agents that it is compared with as levels."""
    curve, base = read.json(f"evaluation/{found.BASELINE}_curve.json"), results.get(found.BASE)
    if curve is None:
        return None
    start = ([0], [base.rate]) if base else ([], [])  # before its first rollout it is the base agent
    compared = [r for policy in (found.BASE, found.COMPOSED) if (r := results.get(policy))]
    return lines(
        [Series(name="GRPO on the target", x=start[0] + curve["rollouts"], y=start[1] + curve["rate"], style="k-baseline")],
        "GRPO on the target's own train tasks, success on held-out tasks",
        "training rollouts",
        span=(0.0, _above([*curve["rate"], *(r.rate for r in results.values())])),
        size=_SIZE,
        shares=True,
        levels=[
            Bar(label=f"{r.policy}{f', {r.spent:,} rollouts' if r.spent else ''}", value=r.rate, style=style_of(r.policy, styles))
            for r in compared
        ],
    )


def _above(rates: Sequence[float]) -> float:
    return min(1.0, max(rates, default=0.0) + 0.1)
