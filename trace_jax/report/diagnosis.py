"""Step 1 as the page shows it: every candidate capability with its figures, and a few labels with the messages that they cite."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from trace_jax.diagnose.select import KNOWN
from trace_jax.evaluate.hygiene import MINED
from trace_jax.report.charts import whisker
from trace_jax.report.reader import Reader, find_trajectories

_LABELS = (("LACKING", False, 3), ("LACKING", True, 1), ("PRESENT", True, 1))  # label, whether the trajectory passed, how many are shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A label and the message that shows it; `message` is None where the conversation is not in the workdir."""

    trajectory: str
    value: str
    passed: bool | None
    message_index: int | None
    reason: str
    quote: str
    message: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A candidate capability. Figures that another tool's selection does not have are None."""

    name: str
    description: str
    retained: bool
    style: str
    coverage: float
    coverage_interval: Sequence[float] | None
    er_minus: float | None
    er_plus: float | None
    applicable: tuple[float, float] | None
    gap: float
    gap_interval: Sequence[float] | None
    gap_chart: Markup
    alpha: float | None
    runs_passed: int
    runs: int
    marks: list[str]
    examples: list[Example]


def diagnosis(read: Reader, styles: Mapping[str, str]) -> dict[str, Any] | None:
    """All candidates with the figures and the evidence of step 1; of a selection without figures, the retained ones. `files` are the result
    files that were diagnosed, none where it was the run's own rollouts."""
    figures, selection = read.json("diagnosis/figures.json"), read.json("diagnosis/selected_capabilities.json")
    if figures is None and selection is None:
        return None
    described = {c["name"]: c["description"] for c in (read.json("diagnosis/candidates.json") or {"candidates": []})["candidates"]}
    described |= {entry["skill"]: entry["description"] for entry in selection or []}
    thresholds = (figures or {}).get("thresholds", {})
    examples = _examples(read)
    rows = []
    for data in figures["capabilities"] if figures else selection:
        name = data["capability"] if figures else data["skill"]
        style = styles.get(name, "s0")
        marks = list(data.get("marks", []))
        if not data.get("supported", True):
            marks.append(f"little support: {data['applicable_passed']:.1f} applicable passed trajectories a run")
        if data.get("gap_share"):
            marks.append(f"{data['gap_share']:.1%} of its pairs have no valid label")
        if data.get("outcome_bound"):
            marks.append("a passed trajectory cannot be LACKING here: ER+ is 0 by construction and the gap is ER-")
        rows.append(
            Row(
                name=name,
                description=described.get(name, ""),
                retained=data["passes_consistency"],
                style=style,
                coverage=data["mean_cov"],
                coverage_interval=data.get("cov_interval"),
                er_minus=data.get("er_minus"),
                er_plus=data.get("er_plus"),
                applicable=(data["applicable_failed"], data["applicable_passed"]) if "applicable_failed" in data else None,
                gap=data["mean_delta"],
                gap_interval=data.get("gap_interval"),
                gap_chart=whisker(data["mean_delta"], data.get("gap_interval"), thresholds.get("gap"), f"gap of {name}", style),
                alpha=data.get("alpha"),
                runs_passed=data["n_runs_passed"],
                runs=data["n_runs_total"],
                marks=marks,
                examples=examples.get(name, []),
            )
        )
    rest = {key: (figures or {}).get(key) for key in ("passed", "failed", "do_nothing", "notes", "agreement")}
    files = (read.json(MINED) or {"results": []})["results"]
    return {"rows": rows, "thresholds": thresholds, "files": files, **rest}


def _examples(read: Reader) -> dict[str, list[Example]]:
    """A few labels of each capability, LACKING in failed trajectories first, with the messages that they cite."""
    chosen: dict[str, list[dict[str, Any]]] = defaultdict(list)
    labels = read.jsonl("diagnosis/evidence.jsonl")
    for value, passed, count in _LABELS:
        taken: dict[str, int] = defaultdict(int)
        for label in labels:
            if label["value"] == value and label.get("passed", passed) == passed and taken[label["capability"]] < count:
                taken[label["capability"]] += 1
                chosen[label["capability"]].append(label)
    trajectories = find_trajectories(read, diagnosed(read), {label["trajectory"] for rows in chosen.values() for label in rows})

    def message(label: Mapping[str, Any]) -> dict[str, Any] | None:
        messages = trajectories[label["trajectory"]].messages if label["trajectory"] in trajectories else []
        index = label["message_index"]
        return messages[index] if index is not None and 0 <= index < len(messages) else None

    keys = ("trajectory", "value", "message_index", "reason")
    return {
        name: [
            Example(**{k: label[k] for k in keys}, quote=label.get("quote", ""), passed=label.get("passed"), message=message(label))
            for label in rows
        ]
        for name, rows in chosen.items()
    }


def diagnosed(read: Reader) -> str:
    """The folder of the rollouts that were diagnosed: of the base, in a later round of the agent of the round before."""
    return f"rollouts/{'base' if read.json(KNOWN) is None else 'previous'}/train"
