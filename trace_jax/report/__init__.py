"""`report.html`, one self-contained file, and the table at the end of a run: what a person reads of what a workdir holds.

Both are written from files alone, so they can be made again at any time, also of a run that is not finished: a section whose files are not
there says which command writes them.
"""

from __future__ import annotations

import rich.console
from rich.table import Table

from trace_jax.cli import Arguments
from trace_jax.report import table
from trace_jax.report.page import render
from trace_jax.report.reader import Reader, WorkdirReader
from trace_jax.workdir import Workdir

__all__ = ["Reader", "WorkdirReader", "main", "render", "summary_table", "write_report"]


def write_report(workdir: Workdir) -> str:
    """Writes `report.html`, or leaves the old one whole.

    Raises:
      InputError: a file of the workdir is damaged; the message names it.
    """
    workdir.write_bytes("report.html", render(WorkdirReader(workdir)).encode())
    return workdir.place("report.html")


def summary_table(workdir: Workdir) -> Table:
    """The policies that were evaluated, side by side, for the terminal."""
    return table.summary_table(WorkdirReader(workdir))


def main(arguments: Arguments) -> None:
    """`trace-jax report`."""
    path = write_report(arguments.workdir)
    rich.console.Console().print(summary_table(arguments.workdir))
    print(f"report: {path}")
