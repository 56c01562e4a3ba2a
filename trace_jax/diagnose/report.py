"""What `trace-jax diagnose` prints: the table of capabilities, the notes, and some labels with the message that shows each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trace_jax.agents.protocol import Usage
from trace_jax.diagnose.aggregate import Figures
from trace_jax.diagnose.agreement import Agreement
from trace_jax.diagnose.diagnosis import Diagnosis
from trace_jax.diagnose.evidence import LACKING, PRESENT, Label
from trace_jax.evaluate.statistics import wilson


def print_diagnosis(d: Diagnosis, console: Console | None = None, explain: int | None = 3, where: str = "") -> None:
    """Prints a diagnosis.

    Args:
      explain: how many LACKING labels to explain for each capability, those of failed trajectories first, beside one PRESENT label; None
        is all of both. Messages are counted from the system prompt, which is number 0.
      where: where all labels are.
    """
    console = console or Console()
    passed, total = sum(d.outcome.values()), len(d.outcome)
    low, high = wilson(passed, total)
    errors = ", ".join(f"{n} {kind}" for kind, n in d.errors.items())
    console.print(
        f"{total} trajectories: {passed} passed, {total - passed} failed (success {passed / total:.1%}, 95 % {low:.1%} to {high:.1%})"
        + (f"; besides {errors}, counted apart" if errors else "")
    )
    console.print(_table(d))
    t = d.thresholds
    console.print(
        f"A run passes at coverage >= {t['coverage']:g} and gap >= {t['gap']:g}; retained: {t['min_runs']} of {t['runs']} runs. "
        "Intervals: 95 % bootstrap. ER-, ER+: LACKING among the applicable failed, passed trajectories. "
        "α: agreement between runs. *: see the notes.",
        style="dim",
    )
    for note in d.notes:
        console.print("Note: " + escape(note))
    if d.do_nothing:
        count = len({i.rpartition("#")[0] or i for i in d.outcome})
        console.print(
            f"\nDoing nothing is rewarded in {len(d.do_nothing)} of {count} tasks; "
            f"{d.passed_do_nothing} of the {passed} passed trajectories are there: " + escape(", ".join(d.do_nothing))
        )
    if d.agreement:
        print_agreement(d.agreement, "the second labeller", console)
    if any([_explain(d, f, console, explain) for f in d.figures]) and where:
        console.print(f"\nAll labels: {where}", soft_wrap=True, highlight=False, markup=False)


def print_agreement(rows: Sequence[Agreement], other: str, console: Console) -> None:
    """The agreement with another labeller, a line a capability."""
    console.print(f"\nAgreement with {other}, by the label of most runs:")
    for row in rows:
        if not row.pairs:
            console.print(f"  {row.capability}: no trajectory that both labelled")
            continue
        differ = f"; differ on {', '.join(row.differ[:5])}{' ...' if len(row.differ) > 5 else ''}" if row.differ else ""
        alpha = "undefined" if row.alpha != row.alpha else f"{row.alpha:.2f}"
        console.print(escape(f"  {row.capability}: {row.same:.0%} of {row.pairs}, alpha {alpha}{differ}"), soft_wrap=True, highlight=False)


def print_usage(usage: Usage, console: Console) -> None:
    """What an LLM's labels have cost."""
    unpriced = "of unknown price (give agents.price_input and agents.price_output)"
    console.print(f"\nLLM: {usage.told(unpriced)}.", highlight=False)


def _table(d: Diagnosis) -> Table:
    """Eighty columns wide: an interval stands under its figure, Krippendorff's alpha under the runs."""
    bound = {c.name for c in d.candidates if c.outcome_bound}
    table = Table(title="Capabilities", title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("capability", "coverage", "ER-", "ER+", "gap", "runs", "kept"):
        table.add_column(heading, justify="left" if heading == "capability" else "right", no_wrap=True)
    for f in d.figures:
        mark = "*" if not f.supported or f.capability in bound else ""
        table.add_row(
            f.capability,
            _figure(f.mean_cov, f.cov_interval),
            f"{f.er_minus:.2f}\nof {f.applicable_failed:.1f}",
            f"{f.er_plus:.2f}\nof {f.applicable_passed:.1f}",
            _figure(f.mean_delta, f.gap_interval, mark),
            f"{f.n_runs_passed}/{f.n_runs_total}\nα " + ("-" if f.alpha != f.alpha else f"{f.alpha:.2f}"),
            "[green]yes[/]" if f.passes_consistency else "no",
        )
    return table


def _quoted(label: Label) -> str:
    return f' "{label.quote}"' if label.quote else ""


def _figure(value: float, interval: tuple[float, float], mark: str = "") -> str:
    return f"{mark}{value:.2f}\n{interval[0]:.2f}..{interval[1]:.2f}"


def _explain(d: Diagnosis, f: Figures, console: Console, limit: int | None) -> bool:
    """Prints labels of a capability; whether some are left out."""
    found = {value: [x for x in d.labels if x.capability == f.capability and x.value == value] for value in (LACKING, PRESENT)}
    if not any(found.values()):
        return False
    console.print(f"\n[bold]{f.capability}[/]")
    rest = []
    for value, most in ((LACKING, limit), (PRESENT, None if limit is None else 1)):
        labels = sorted(found[value], key=lambda label: d.outcome[label.trajectory]) if value == LACKING else found[value]
        for label in labels[:most]:
            outcome = "passed" if d.outcome[label.trajectory] else "failed"
            line = f"  {value} {label.trajectory} ({outcome}), message {label.message_index}: {label.reason}{_quoted(label)}"
            console.print(escape(line), soft_wrap=True, highlight=False)
        rest += [f"{len(labels[most:])} more {value}"] if most is not None and labels[most:] else []
    if rest:
        console.print(f"  and {', '.join(rest)}", style="dim")
    return bool(rest)
