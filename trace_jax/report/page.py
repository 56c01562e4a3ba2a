"""The page: sections into the template, with style and script inside, and nothing that is fetched.

Everything that a file or a model wrote is escaped, and a content security policy allows the page's own script alone, by its hash: text in a
trajectory stays text.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import pathlib
from typing import Any

import jinja2
from markupsafe import Markup

from trace_jax.evaluate.hygiene import told
from trace_jax.report import results as found
from trace_jax.report import sections, text
from trace_jax.report.reader import Reader
from trace_jax.report.summary import sentences
from trace_jax.report.trajectories import examples

_FOLDER = pathlib.Path(__file__).parent
_FILTERS = (text.as_text, text.clip, text.percent, text.percent_interval, text.points, text.p_value, text.figure, text.duration)


def render(read: Reader) -> str:
    """The page of a run, finished or not; the same files give the same page.

    Raises:
      InputError: a file is damaged; the message names it.
    """
    stored = read.json("config.json") or {}
    config = stored.get("config", {})
    target = config.get("target", {}).get("package", "the target")
    results, styles = found.load_results(read), sections.capability_styles(read)
    diagnosis, gate, spent = sections.diagnosis(read, styles), sections.gate(read, styles), read.json("spent.json")
    routing = gate and gate["routing"]
    slots = routing["slots"] if routing else ["base", *styles]
    return (
        template_environment()
        .get_template("report.html")
        .render(
            name=config.get("name") or "run",
            target=target,
            stored=stored,
            settings=sections.settings(stored),
            bounds=config.get("synthesis", {}),
            progress=sections.progress(read),
            results=results,
            base=results.get(found.BASE),
            composed=results.get(found.COMPOSED),
            best=found.best_adapter(results),
            leaks=[told(leak) for leak in found.leaks(results)],
            free=found.free(results),
            sentences=[said.replace(" %", "\u00a0%") for said in sentences(results, target, diagnosis, routing, spent)],
            evaluation=sections.evaluation(read, results, styles),
            missing_policies=[p for p in sections.evaluated_policies(stored) if results and p != "adapters" and p not in results],
            diagnosis=diagnosis,
            rounds=sections.rounds(read),
            environments=sections.environments(read, styles),
            training=sections.training(read, styles),
            gate=gate,
            slots=slots,
            examples=examples(read, slots),
            costs=sections.costs(read),
        )
    )


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
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }
    return environment


def _shown(value: Any) -> Any:
    """What the template puts out: foreign text made visible; our own markup as it is."""
    return text.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value
