"""What each section shows, from the files of the workdir; None where the step that writes them has not run.

Numbers stay numbers and text stays text here: the template formats and escapes.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from trace_jax.config import Config, EvaluationSection
from trace_jax.diagnose.select import KNOWN
from trace_jax.report import results as found
from trace_jax.report.charts import Bar, Series, bars, histogram, lines, stacks, whisker
from trace_jax.report.reader import Reader, find_trajectories
from trace_jax.report.results import Result

_LABELS = (("LACKING", False, 3), ("LACKING", True, 1), ("PRESENT", True, 1))  # label, whether the trajectory passed, how many are shown
_CURVES = (
    "validation",
    "entropy",
    "engine_gap",
    "base_k3",
    "clip_share",
    "capped_share",
    "dropped_share",
    "constant_share",
    "effective_sample_share",
)
_CURVES += (
    "hinted_share",
    "hinted_success",
    "unhinted_success",
    "hinted_weight",
    "hinted_masked_share",
    "action_tokens",
    "turns",
    "tool_errors",
    "invalid_action",
    "truncated",
    "policy_lag",
    "grad_norm",
    "learning_rate",
    "loss",
)
_SECONDS = ("seconds/rollout", "seconds/sync", "seconds/pack", "seconds/transfer", "seconds/step")


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


def capability_styles(read: Reader) -> dict[str, str]:
    """Capability to the style that it has all over the page, that of its slot."""
    return {name: f"s{n}" for n, name in enumerate(found.capabilities(read), 1)}


def progress(read: Reader) -> list[tuple[str, str, bool]]:
    """(what, command, done) of each step."""
    retained = [e["skill"] for e in read.json("diagnosis/selected_capabilities.json") or []]
    calibrations = {c: read.json(f"environments/{c}/calibration.json") for c in retained}
    usable = [c for c, result in calibrations.items() if result and result.get("usable", result["verdict"] == "ok")]
    names = read.list("evaluation")
    return [
        ("base rollouts", "rollout --policy=base --split=train", any(n.endswith(".jsonl.zst") for n in read.list(_diagnosed(read)))),
        ("diagnosis", "diagnose", read.json("diagnosis/selected_capabilities.json") is not None),
        ("environments", "synthesize", bool(retained) and all(calibrations.values())),
        ("adapters", "train", bool(usable) and all(read.json(f"adapters/{c}/summary.json") for c in usable)),
        ("gate", "compose", read.json("gate/routing.json") is not None),
        ("evaluation", "evaluate --policy=base,composed", {"evaluation/base.json", "evaluation/composed.json"} <= set(names)),
    ]


def diagnosis(read: Reader, styles: Mapping[str, str]) -> dict[str, Any] | None:
    """All candidates with the figures and the evidence of step 1; of a selection without figures, the retained ones."""
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
    return {"rows": rows, "thresholds": thresholds, **rest}


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
    trajectories = find_trajectories(read, _diagnosed(read), {label["trajectory"] for rows in chosen.values() for label in rows})

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


def _diagnosed(read: Reader) -> str:
    """The folder of the rollouts that were diagnosed: of the base, in a later round of the agent of the round before."""
    return f"rollouts/{'base' if read.json(KNOWN) is None else 'previous'}/train"


def rounds(read: Reader) -> list[dict[str, Any]]:
    """The rounds, with what their agents are in words; none where there was one round only."""
    shown = []
    for entry in (read.json("rounds.json") or {"rounds": []})["rounds"]:
        told = "the agent stays as it was" if entry["round"] > 1 and (entry["composed"] == "previous" or not entry["new"]) else ""
        shown.append(entry | {"told": told})
    return shown


def environments(read: Reader, styles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The environment of each capability: package, certificate, calibration, each None where it is not there yet."""
    shown = []
    for name in _children(read, "environments", styles):
        calibration = read.json(f"environments/{name}/calibration.json")
        style = styles.get(name, "s0")
        seeds = (calibration or {}).get("per_seed", {})
        shown.append(
            {
                "name": name,
                "style": style,
                "package": read.json(f"environments/{name}/package.json"),
                "certificate": read.json(f"environments/{name}/certificate.json"),
                "calibration": calibration,
                "generation": read.json(f"environments/{name}/generation.json"),
                "histogram": histogram(seeds.values(), f"calibration of {name}", style) if seeds else None,
            }
        )
    return shown


def training(read: Reader, styles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The curves of each adapter, and its success on unseen seeds before and after."""
    shown = []
    for name in _children(read, "adapters", styles):
        rows = read.jsonl(f"adapters/{name}/metrics.jsonl")
        curves = _curves(rows, name, styles.get(name, "s1"))
        shown.append({"name": name, "style": styles.get(name, "s1"), "summary": read.json(f"adapters/{name}/summary.json"), **curves})
    return [one for one in shown if one["rows"]]


def gate(read: Reader, styles: Mapping[str, str]) -> dict[str, Any] | None:
    """Curves of the gate's training and what its validation found; the latter only when the step has finished."""
    routing, rows = read.json("gate/routing.json"), read.jsonl("gate/metrics.jsonl")
    if routing is None and not rows:
        return None
    stages: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        stages[row.get("stage", "grpo")].append(row)
    shown: dict[str, Any] = {"routing": routing, "curves": {stage: _curves(found, "the gate", "s0") for stage, found in stages.items()}}
    if routing:
        names = routing["slots"]
        validation = routing["validation"].items()
        rates = [Bar(label=name, value=r["rate"], interval=r["interval"], style=_style(name, styles)) for name, r in validation]
        shown["validation"] = bars(rates, "Success on unseen seeds of the capability environments")
        share = [(name, routing["share"].get(name, 0.0), f"s{n}") for n, name in enumerate(names)]
        shown["share"] = stacks({"tokens": share}, "Share of the slots")
        forms = routing.get("label_form", {}).values()
        measures = dict.fromkeys(key for form in forms for key, value in form.items() if isinstance(value, (int, float)))
        shown["measures"] = {_measure(key, names): [form.get(key) for form in forms] for key in measures}
    return shown


def evaluation(read: Reader, results: Mapping[str, Result], styles: Mapping[str, str]) -> dict[str, Any] | None:
    """The bars, and the baseline's curve against rollouts."""
    if not results:
        return None
    floor = results.get(found.FLOOR)
    rows = [Bar(label=r.policy, value=r.rate, interval=r.interval, style=_style(r.policy, styles)) for r in results.values() if r != floor]
    line = Bar(label=f"doing nothing: {100 * floor.rate:.1f} %", value=floor.rate) if floor else None
    shown = {
        "bars": bars(rows, "Success on held-out tasks, 95 % intervals", line),
        "stressors": sorted({n for r in results.values() for n in r.by_stressors}),
        "once": all(r.to_base is None or r.to_base.test == "mcnemar" for r in results.values()),
        "curve": None,
    }
    curve, base = read.json(f"evaluation/{found.BASELINE}_curve.json"), results.get(found.BASE)
    if curve:
        start = ([0], [base.rate]) if base else ([], [])  # before its first rollout it is the base agent
        compared = (results.get(policy) for policy in (found.BASE, found.COMPOSED))
        shown["curve"] = lines(
            [Series(name="GRPO on the target", x=start[0] + curve["rollouts"], y=start[1] + curve["rate"], style="k-baseline")],
            "The baseline on held-out tasks",
            "training rollouts",
            span=(0.0, min(1.0, max([*curve["rate"], *(r.rate for r in results.values())]) + 0.1)),
            size=(760, 260),
            shares=True,
            levels=[
                Bar(label=f"{r.policy}{f', {r.spent:,} rollouts' if r.spent else ''}", value=r.rate, style=_style(r.policy, styles))
                for r in compared
                if r
            ],
        )
    return shown


def costs(read: Reader) -> dict[str, Any] | None:
    """The stages in the order of a run, their share of the time, and the totals of the four steps and of everything."""
    spent = read.json("spent.json")
    if spent is None:
        return None
    order = [*found.STEPS, "evaluate", "baseline"]
    names = sorted(spent["stages"], key=lambda name: order.index(name) if name in order else len(order))
    steps = [spent["stages"][name] for name in names if name in found.STEPS]
    seconds = max(spent["total"]["seconds"], 1e-9)
    return {
        "stages": {name: spent["stages"][name] | {"share": spent["stages"][name]["seconds"] / seconds} for name in names},
        "steps": {key: sum(stage[key] for stage in steps) for key in ("seconds", "rollouts", "sampled_tokens")},
        "total": spent["total"],
    }


def settings(stored: Mapping[str, Any]) -> list[tuple[str, Any, bool]]:
    """(field, value, whether it differs from the default) of the config of config.json."""
    defaults = dict(_flat(Config().to_json()))
    return [(name, value, name in defaults and value != defaults[name]) for name, value in _flat(stored.get("config", {}))]


def evaluated_policies(stored: Mapping[str, Any]) -> Sequence[str]:
    """What the config wants evaluated."""
    return stored.get("config", {}).get("evaluation", {}).get("policies", EvaluationSection().policies)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _children(read: Reader, folder: str, first: Iterable[str]) -> list[str]:
    """The folders of a folder, those in `first` before the others."""
    names = {pathlib.PurePosixPath(name).parts[1] for name in read.list(folder)}
    return [name for name in first if name in names] + sorted(names - set(first))


def _curves(rows: Sequence[Mapping[str, Any]], name: str, style: str) -> dict[str, Any]:
    """`main`: reward and success, or the loss where there is no reward; `more`: title to chart of every other figure."""

    def series(key: str, dashed: bool = False) -> Series:
        found = [row for row in rows if key in row]  # not every figure is taken at every step
        return Series(name=key, x=[row["step"] for row in found], y=[row[key] for row in found], style=style, dashed=dashed)

    present = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (int, float)) and key != "step")
    main = [key for key in ("reward", "success") if key in present] or [key for key in ("loss",) if key in present]
    span = (0.0, 1.0) if "reward" in main else None
    order = [key for key in (*_CURVES, *_SECONDS) if key in present]
    rest = [*order, *(key for key in present if key not in order)]
    return {
        "rows": len(rows),
        "main": lines([series(k, k == "success") for k in main], f"Training of {name}", "iteration", span=span, shares=span is not None)
        if main
        else None,
        "more": {
            key: lines([series(key)], f"{key} of {name}", "iteration", size=(240, 120))
            for key in rest
            if key not in main and any(row.get(key) is not None for row in rows)
        },
    }


def _measure(key: str, slots: Sequence[str]) -> str:
    """The name of a routing metric; `share/2` is that of a slot."""
    kind, _, slot = key.partition("/")
    return f"share of {slots[int(slot)]}" if kind == "share" and slot.isdigit() and int(slot) < len(slots) else key.replace("_", " ")


def _style(policy: str, styles: Mapping[str, str]) -> str:
    if policy == found.BASE:
        return "s0"
    if policy.startswith("adapter:"):
        return styles.get(policy.removeprefix("adapter:"), "k-mixture")
    return {found.COMPOSED: "k-composed", "gate": "k-composed", found.BASELINE: "k-baseline"}.get(policy, "k-mixture")
