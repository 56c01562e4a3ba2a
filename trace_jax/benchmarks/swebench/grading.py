"""Test logs graded again by the `swebench` library, without containers.

A log tree's verdicts are those of the version of swebench that wrote it. Graded again they are those of the one that is installed: a check
of both, and the way to grade logs whose report was lost. The rows say which tests count; `driver` builds swebench's specification from rows
of either schema, here and in live episodes alike.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from trace_jax.benchmarks.swebench import driver
from trace_jax.benchmarks.swebench.reports import Verdict, load_tree, verdict_of
from trace_jax.errors import InputError

LOG, PATCH = "test_output.txt", "patch.diff"


def load_dataset(path: str | pathlib.Path) -> dict[str, dict[str, Any]]:
    """The rows of a dataset by instance id: a `.json`, `.jsonl` or `.parquet` file, or a folder of them.

    Raises:
      InputError: no dataset of SWE-bench.
    """
    try:
        return driver.load_dataset(path)
    except ValueError as error:
        raise InputError(str(error)) from None


def regrade(tree: str | pathlib.Path, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Verdict]:
    """What swebench says of every test log in a log tree, by instance id; instances without a log are left out.

    Raises:
      InputError: swebench is not installed, the tree has no logs, or a row is missing or cannot be graded by.
    """
    tree = pathlib.Path(tree)
    logs = sorted(tree.rglob(LOG))
    if not logs:
        raise InputError(f"{tree}: no {LOG} in it; give the folder logs/run_evaluation/<run id> that the harness wrote")
    found = {}
    for log in logs:
        name = log.parent.name
        if name not in rows:
            raise InputError(f"{log}: the dataset has no row {name}; give the dataset that the run was graded by")
        patch = log.parent / PATCH
        try:
            found[name] = verdict_of(driver.grade(dict(rows[name]), patch.read_text(errors="replace") if patch.exists() else "", log))
        except ImportError as error:
            raise InputError(
                f"grading needs the swebench library ({error}); install the extra: pip install 'trace-jax[swebench]'"
            ) from None
        except (ValueError, KeyError) as error:
            raise InputError(f"{log}: cannot be graded: {error}") from None
    return found


def disagreements(tree: str | pathlib.Path, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """(recorded outcome, outcome now) of the instances of a log tree that swebench now sees otherwise."""
    recorded, now = load_tree(pathlib.Path(tree)).verdicts, regrade(tree, rows)
    both = {name: (recorded[name].outcome, verdict.outcome) for name, verdict in now.items() if name in recorded}
    return {name: (before, after) for name, (before, after) in both.items() if (before == "resolved") != (after == "resolved")}
