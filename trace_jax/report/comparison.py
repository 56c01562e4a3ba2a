"""The two curves of a comparison as SVG files: success against rollouts, and against the number of capabilities."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.workdir import Workdir

Curve = tuple[Sequence[float], Sequence[float]]


def write_charts(workdir: Workdir, result: Mapping[str, Any]) -> None:
    """Writes `evaluation/score_against_rollouts.svg`, and `..._capabilities.svg` where there are such points.

    Args:
      result: the content of `evaluation/comparison.json`.
    """
    rollouts = {name: (curve["rollouts"], curve["rate"]) for name, curve in result["against_rollouts"].items()}
    capabilities = {
        name: ([len(point["capabilities"]) for point in points], [point["rate"] for point in points])
        for name, points in result["against_capabilities"].items()
    }
    for name, curves in (("rollouts", rollouts), ("capabilities", capabilities)):
        if curves:
            workdir.write_bytes(f"evaluation/score_against_{name}.svg", _chart(curves, name, result["target"]))


def _chart(curves: Mapping[str, Curve], x_label: str, target: str) -> bytes:
    """One figure; the same curves give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    with matplotlib.rc_context({"svg.hashsalt": "trace-jax", "svg.fonttype": "none"}):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.add_subplot()
        for name, (x, y) in curves.items():
            axes.plot(x, y, marker="o", markersize=3.5, label=name, linewidth=2.4 if name == "composed" else 1.4)
        axes.set(xlabel=x_label, ylabel="success on held-out tasks", title=target, ylim=(0, None))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
