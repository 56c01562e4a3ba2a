"""The table that a run prints at its end."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from trace_jax.evaluate.hygiene import told
from trace_jax.report import results as found
from trace_jax.report.reader import Reader
from trace_jax.report.results import Result
from trace_jax.report.text import duration, points, visible


@dataclasses.dataclass(frozen=True)
class Name:
    """A policy's name, which goes on in the next line behind `:` or `_` where it has no room."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._parts())), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = ""
        for part in self._parts():
            if line and len(line + part) > options.max_width:
                yield Text(line)
                line = ""
            line += part
        yield Text(line, overflow="fold")

    def _parts(self) -> list[str]:
        return re.findall(r"[^:_]*[:_]+|[^:_]+", self.text) or [""]


def summary_table(read: Reader) -> Table:
    """Policy, success, 95 % interval, difference to the base, and the rollouts that each policy took to make."""
    results = found.load_results(read)
    spent = read.json("spent.json")
    table = Table(title="Success on held-out tasks, per cent", title_justify="left", caption_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("policy")  # in eighty columns a long name takes two lines, and no figure is cut
    for heading in ("success", "95 % interval", "points to base", "rollouts"):
        table.add_column(heading, justify="right", no_wrap=True)
    best = found.best_adapter(results)
    for result in results.values():
        style = "bold" if result.policy in (found.COMPOSED, best and best.policy) else ""
        change = result.to_base
        table.add_row(
            Name(visible(result.policy)),
            f"{100 * result.rate:.1f}",
            f"{100 * result.interval[0]:.1f} to {100 * result.interval[1]:.1f}",
            f"{points(change.difference)} [{points(change.interval[0])}, {points(change.interval[1])}]" if change else "",
            "" if result.spent is None else f"{result.spent:,}",
            style=style,
        )
    table.caption = _caption(results, spent) if results else "Nothing has been evaluated yet: trace-jax evaluate --policy=base,composed"
    return table


def _caption(results: Mapping[str, Result], spent: Mapping[str, Any] | None) -> Text:
    """What a reader of the figures must know: leaks in red, the floor where it is not zero, and what it all took."""
    said = [Text(f"LEAK: {visible(told(leak))}; these are no unseen tasks.", style="bold red") for leak in found.leaks(results)]
    if free := found.free(results):
        others = ", ".join(f"{visible(r.policy)} {100 * r.above_floor['rate']:.1f}" for r in results.values() if r.policy != found.FLOOR)
        said.append(Text(f"Doing nothing solves {len(free)} tasks; on the others: {others}."))
    if spent:
        total = spent["total"]
        said.append(
            Text(
                f"Rollouts: what it took to make a policy. The whole run, evaluation included: {total['rollouts']:,.0f} rollouts, "
                f"{total['sampled_tokens']:,.0f} sampled tokens, {duration(total['seconds'])}."
            )
        )
    return Text("\n").join(said)
