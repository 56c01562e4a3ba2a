"""The toy dataset: each instance fails its own test alone, and the right line repairs it."""

import json
import subprocess
import sys

import pytest

from trace_jax.benchmarks.swebench.toy import FUNCTIONS, source, write_toy_dataset
from trace_jax.errors import InputError


def verdicts(repository):
    said = subprocess.run([sys.executable, "test_shop.py"], cwd=repository, capture_output=True, text=True, check=True).stdout
    return {name: verdict for verdict, name in map(str.split, said.splitlines())}


def test_each_instance_fails_its_own_test_until_its_function_is_right(tmp_path):
    rows = [json.loads(line) for line in write_toy_dataset(tmp_path / "toy").read_text().splitlines()]
    assert [row["split"] for row in rows] == ["train", "test"] * 2 and len(rows) == len(FUNCTIONS)
    for row in rows:
        subprocess.run(["git", "checkout", "--quiet", row["base_commit"]], cwd=row["repo_path"], check=True)
        failing, passing = json.loads(row["FAIL_TO_PASS"]), json.loads(row["PASS_TO_PASS"])
        assert verdicts(row["repo_path"]) == dict.fromkeys(failing, "FAILED") | dict.fromkeys(passing, "PASSED")
        subprocess.run(["git", "apply"], cwd=row["repo_path"], input=row["patch"], text=True, check=True)
        assert (tmp_path / "toy" / "repository" / "shop.py").read_text() == source()
        assert set(verdicts(row["repo_path"]).values()) == {"PASSED"}
        subprocess.run(["git", "checkout", "--quiet", "--force", "main"], cwd=row["repo_path"], check=True)


def test_a_dataset_is_not_written_over(tmp_path):
    first = write_toy_dataset(tmp_path / "toy").read_text()
    with pytest.raises(InputError, match="exists already"):
        write_toy_dataset(tmp_path / "toy")
    assert (tmp_path / "toy" / "data.jsonl").read_text() == first
