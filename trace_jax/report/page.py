"""The page: sections into the template, with style and script inside, and nothing that is fetched.

Everything that a file or a model wrote is escaped, and a content security policy allows the page's own script alone, by its hash: text in a
trajectory stays text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import pathlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from markupsafe import Markup

from trace_jax.evaluate.hygiene import told
from trace_jax.report import budgets, changes, costs, environments, text, training, whole_run
from trace_jax.report import diagnosis as diagnose
from trace_jax.report import evaluation as evaluated
from trace_jax.report import gate as routed
from trace_jax.report import results as found
from trace_jax.report.reader import Reader
from trace_jax.report.summary import sentences
from trace_jax.report.trajectories import token_views

_FOLDER = pathlib.Path(__file__).parent
_FILTERS = (
    text.as_text, text.clip, text.duration, text.figure, text.marked, text.number, text.p_value, text.percent, text.percent_interval,
    text.points, text.roughly,
)  # fmt: skip
_SECTIONS = (
    ("summary", "Summary"),
    ("evaluation", "Evaluation"),
    ("baselines", "Baselines"),
    ("changes", "Fixed and broken"),
    ("rounds", "Rounds"),
    ("capabilities", "Capabilities"),
    ("environments", "Environments"),
    ("training", "Training"),
    ("gate", "Gate"),
    ("trajectories", "Trajectories"),
    ("costs", "Cost"),
    ("settings", "Config"),
)


def render(read: Reader) -> str:
    """The page of a run, finished or not; the same files give the same page.

    Raises:
      InputError: a file is damaged; the message names it.
    """
    stored = read.json("config.json") or {}
    config = stored.get("config", {})
    benchmark = config.get("benchmark", {}).get("name")
    target = benchmark or config.get("target", {}).get("package", "the target")
    if benchmark == "own":
        target = whole_run.played(read) or "your own benchmark"
    results, styles = found.load_results(read), whole_run.capability_styles(read)
    diagnosis, gate, spent = diagnose.diagnosis(read, styles), routed.gate(read, styles), read.json("spent.json")
    routing = gate and gate["routing"]
    slots = routing["slots"] if routing else ["base", *styles]
    changed, rounds = changes.changes(read, results), whole_run.rounds(read)
    trajectories, texts = list(read.shard("gate/examples.jsonl.zst")), read.json("gate/pieces.json")
    examples = token_views(trajectories, texts, slots)
    content = dict(
        name=config.get("name") or "run",
        target=target,
        stored=stored,
        sections=[section for section in _SECTIONS if rounds or section[0] != "rounds"],
        settings=whole_run.settings(stored),
        sandbox=whole_run.sandbox(read),
        bounds=config.get("synthesis", {}),
        progress=whole_run.progress(read),
        results=results,
        base=results.get(found.BASE),
        composed=results.get(found.COMPOSED),
        best=found.best_adapter(results),
        leaks=[told(leak) for leak in found.leaks(results)],
        free=found.free(results),
        sentences=sentences(results, target, diagnosis, routing, spent, planted=config.get("model", {}).get("path") == whole_run.SHIPPED),
        evaluation=evaluated.evaluation(results, styles),
        baselines=evaluated.baselines(read, results, styles),
        missing_policies=[p for p in whole_run.evaluated_policies(stored) if results and p != "adapters" and p not in results],
        changes=changed,
        diagnosis=diagnosis,
        rounds=rounds,
        environments=environments.environments(read, styles),
        training=training.training(read, styles),
        agreement=read.json("agreement.json"),
        gate=gate,
        usage=routed.usage(trajectories, texts, slots),
        slots=slots,
        examples=examples,
        costs=costs.costs(read, config.get("rollout", {}).get("engine", "")),
        check_words=defaultdict(str, environments.CHECKS),
        player_words=defaultdict(str, environments.PLAYERS),
    )
    return template_environment().get_template("report.html").render(content | _pieces(diagnosis, changed, examples))


def _pieces(
    diagnosis: Mapping[str, Any] | None, changed: Mapping[str, Any] | None, examples: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """What grows with a run, written within its budgets: evidence, fixed, broken, trajectories."""
    write = template_environment().get_template("parts/pieces.html").module

    def cases(kind: str) -> dict[str, Any]:
        pairs = changed[kind]["pairs"] if changed else []
        return _fitting((write.pair(pair, n == 0) for n, pair in enumerate(pairs)), budgets.CHANGES)

    rows = [row for row in (diagnosis["rows"] if diagnosis else []) if row.examples or row.description]
    views = examples["views"] if examples else []
    return {
        "evidence": _fitting((write.evidence(row) for row in rows), budgets.EVIDENCE),
        "fixed": cases("fixed"),
        "broken": cases("broken"),
        "trajectories": _fitting((write.trajectory(view, n == 0) for n, view in enumerate(views)), budgets.TRAJECTORIES),
    }


def _fitting(pieces: Iterable[Markup], most: int) -> dict[str, Any]:
    """Those of the pieces that take up to `most` bytes together, from the first on, and how many are left out."""
    shown, size, left_out = [], 0, 0
    for piece in pieces:
        length = len(piece.encode())
        if size + length > most:
            left_out += 1
        else:
            shown.append(piece)
            size += length
    return {"shown": shown, "left_out": left_out}


@functools.cache
def template_environment(*folders: pathlib.Path) -> jinja2.Environment:
    """What turns templates into pages: those of the report and of other folders, with our filters, everything escaped and made visible.

    Globals: `css` and `script` are the page's, `script_hash` is the SHA-256 that a content security policy allows the script by.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([_FOLDER, *folders]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    script = (_FOLDER / "report.js").read_text("utf-8")
    environment.globals |= {
        # Markup: they are ours, and quotes in them must stay quotes
        "css": Markup((_FOLDER / "report.css").read_text("utf-8")),
        "script": Markup(script),
        "budgets": budgets,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    return environment


def _shown(value: Any) -> Any:
    """What the template puts out: foreign text made visible; our own markup as it is."""
    return text.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
