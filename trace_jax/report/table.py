"""The table that a run prints at its end."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from trace_jax.report import results as found
from trace_jax.report.reader import Reader
from trace_jax.report.text import duration, points, visible


def summary_table(read: Reader) -> Table:
    """Policy, success, 95 % interval, difference to the base, and the rollouts that each policy took to make."""
    results = found.load_results(read)
    spent = read.json("spent.json")
    table = Table(title="Success on held-out tasks, per cent", title_justify="left", caption_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("policy", overflow="fold")  # in eighty columns a long name takes two lines, and no figure is cut
    for heading in ("success", "95 % interval", "points to base", "rollouts"):
        table.add_column(heading, justify="right", no_wrap=True)
    best = found.best_adapter(results)
    for result in results.values():
        style = "bold" if result.policy in (found.COMPOSED, best and best.policy) else ""
        change = result.to_base
        table.add_row(
            Text(visible(result.policy)),
            f"{100 * result.rate:.1f}",
            f"{100 * result.interval[0]:.1f} to {100 * result.interval[1]:.1f}",
            f"{points(change.mean)} [{points(change.low)}, {points(change.high)}]" if change else "",
            "" if result.spent is None else f"{result.spent:,}",
            style=style,
        )
    if not results:
        table.caption = "Nothing has been evaluated yet: trace-jax evaluate --policy=base,composed"
    elif spent:
        total = spent["total"]
        table.caption = (
            f"Rollouts: what it took to make a policy. The whole run, evaluation included: {total['rollouts']:,.0f} rollouts, "
            f"{total['sampled_tokens']:,.0f} sampled tokens, {duration(total['seconds'])}."
        )
    return table
