"""A dataset in SWE-bench's form of four instances in one small git repository, which needs no image.

    python -m trace_jax.benchmarks.swebench.toy toy-dataset

writes `toy-dataset/data.jsonl` and the repository beside it. Each instance is a commit in which another function is wrong; its test fails
there, and passes with the function's right line. Two instances are for training and two held out. They are for trying the machinery out
(`--config=swebench_smoke`), with the environments `local` and `bubblewrap`; what an agent can do they do not measure.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from trace_jax.errors import InputError

# name of the function: (its right line, a wrong one, what somebody reports)
FUNCTIONS = {
    "total": ("return sum(item.price * item.count for item in items)", "return sum(item.price for item in items)", "ignores the count"),
    "cheapest": ("return min(items, key=lambda item: item.price)", "return max(items, key=lambda item: item.price)", "finds the dearest"),
    "names": ("return sorted(item.name for item in items)", "return [item.name for item in items]", "are in no order"),
    "in_stock": (
        "return [item for item in items if item.count > 0]",
        "return [item for item in items if item.count > 1]",
        "lacks the last",
    ),
}
_HEAD = '''"""A shop's list of items."""

import collections

Item = collections.namedtuple("Item", "name price count")
'''
_TESTS = """import shop

ITEMS = [shop.Item("pear", 3, 1), shop.Item("fig", 1, 5), shop.Item("apple", 2, 0)]
FOUND = {
    "total": lambda: shop.total(ITEMS) == 8,
    "cheapest": lambda: shop.cheapest(ITEMS).name == "fig",
    "names": lambda: shop.names(ITEMS) == ["apple", "fig", "pear"],
    "in_stock": lambda: [item.name for item in shop.in_stock(ITEMS)] == ["pear", "fig"],
}
for name, passes in FOUND.items():
    try:
        verdict = "PASSED" if passes() else "FAILED"
    except Exception:
        verdict = "FAILED"
    print(verdict, f"test_shop.py::test_{name}")
"""
_EVAL = """#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout {commit} -- test_shop.py
: '>>>>> Start Test Output'
python3 test_shop.py
: '>>>>> End Test Output'
"""
_PERSON = {
    f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "toy"), ("EMAIL", "toy@example.com"))
}
_DATE = {f"GIT_{role}_DATE": "2026-01-01T00:00:00Z" for role in ("AUTHOR", "COMMITTER")}  # so that the commits are always the same


def source(wrong: str | None = None) -> str:
    """The module, in which the named function is wrong."""
    functions = [f"def {name}(items):\n    {lines[name == wrong]}\n" for name, lines in FUNCTIONS.items()]
    return "\n\n".join([_HEAD, *functions])


def write_toy_dataset(folder: pathlib.Path) -> pathlib.Path:
    """The path of the dataset, in a new folder.

    Raises:
      InputError: there is such a folder already, or no git.
    """
    repository = folder / "repository"
    try:
        repository.mkdir(parents=True)
    except FileExistsError:
        raise InputError(f"{repository}: exists already; give a folder that does not") from None

    def git(*words: str) -> str:
        try:
            done = subprocess.run(
                ["git", *words], cwd=repository, check=True, capture_output=True, text=True, env=os.environ | _PERSON | _DATE
            )
        except FileNotFoundError:
            raise InputError("git is not installed; the toy dataset is a git repository") from None
        return done.stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    (repository / "shop.py").write_text(source())
    (repository / "test_shop.py").write_text(_TESTS)
    git("add", "-A")
    git("commit", "--quiet", "-m", "A shop")
    rows = []
    for number, (name, (_, _, report)) in enumerate(FUNCTIONS.items()):
        git("checkout", "--quiet", "-b", name, "main")
        (repository / "shop.py").write_text(source(wrong=name))
        git("commit", "--quiet", "-am", f"Rewrite {name}")
        commit = git("rev-parse", "HEAD")
        rows.append(
            {
                "instance_id": f"toy__shop-{number + 1}",
                "repo": "toy/shop",
                "repo_path": str(repository.absolute()),
                "base_commit": commit,
                "problem_statement": f"`shop.{name}` {report}",
                "patch": git("diff", commit, "main") + "\n",
                "FAIL_TO_PASS": json.dumps([f"test_shop.py::test_{name}"]),
                "PASS_TO_PASS": json.dumps([f"test_shop.py::test_{other}" for other in FUNCTIONS if other != name]),
                "log_parser": "parse_log_pytest",
                "eval_type": "pass_and_fail",
                "eval_script": _EVAL.format(commit=commit),
                "split": ("train", "test")[number % 2],
            }
        )
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return data


if __name__ == "__main__":
    try:
        if len(sys.argv) != 2:
            raise InputError("usage: python -m trace_jax.benchmarks.swebench.toy FOLDER")
        print(f"wrote {write_toy_dataset(pathlib.Path(sys.argv[1]))}")
    except InputError as error:
        sys.exit(f"toy: {error}")
