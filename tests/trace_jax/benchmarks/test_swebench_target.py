"""SWE-bench as a target: its splits, and its verdicts as checks."""

import hashlib
import json
import pathlib

import pytest

SPLITS = json.loads((pathlib.Path(__file__).parents[3] / "trace_jax" / "benchmarks" / "swebench" / "splits.json").read_text())


def test_the_shipped_split_follows_its_rule_and_shares_no_repository():
    sizes = SPLITS["train"] | SPLITS["heldout"]
    assert len(sizes) == 12 and sum(sizes.values()) == 500 and not SPLITS["train"].keys() & SPLITS["heldout"].keys()
    heldout = {}
    for repository in sorted(sizes, key=lambda name: hashlib.sha256(f"0:{name}".encode()).hexdigest()):
        if sum(heldout.values()) + sizes[repository] <= 150:
            heldout[repository] = sizes[repository]
    assert heldout == SPLITS["heldout"]


class Described:
    """A pool whose worker has described two instances."""

    def describe(self, program):
        rows = [("django__django-1", "train", "a" * 64), ("sympy__sympy-1", "test", "b" * 64)]
        tasks = [{"id": name, "split": split, "hash": digest, "repo": "r"} for name, split, digest in rows]
        return {"version": "swebench 5.0.2, mini-swe-agent 2.4.6", "tasks": tasks, "tools": [], "system": "You help."}


@pytest.fixture
def target(tmp_path):
    pytest.importorskip("envs.harness")
    from trace_jax.benchmarks.swebench.target import SwebenchTarget, make_program

    (tmp_path / "data.json").write_text("[]")
    return SwebenchTarget(Described(), make_program(str(tmp_path / "data.json"), "docker", max_steps=150, timeout=2400.0))


def test_tasks_and_grader_come_from_the_driver(target):
    assert [t.id for t in target.tasks("train")] == ["django__django-1"] and [t.id for t in target.tasks("heldout")] == ["sympy__sympy-1"]
    assert target.max_turns == 150 and target.grader == "swebench 5.0.2, mini-swe-agent 2.4.6" and target.name == "swebench"
    settings = target.program.settings
    assert settings["eval_timeout"] == 1920 and "sympy/sympy" in settings["heldout"] and "django/django" in settings["train"]


def test_verdicts_become_the_checks_of_result_files(target):
    status = {"FAIL_TO_PASS": {"success": ["t::a"], "failure": ["t::b"]}, "PASS_TO_PASS": {"success": ["t::c"], "failure": []}}
    report = {"resolved": False, "patch_exists": True, "patch_successfully_applied": True, "tests_status": status}
    messages = [{"role": "user", "content": "fix"}, {"role": "assistant", "content": "done"}, {"role": "user", "content": "x"}]
    checks = target.checks("django__django-1", {"patch": "diff", "exit_status": "Submitted", "report": report}, messages)
    assert checks["patch"] == {"passed": True, "expected": "a patch that applies", "actual": "diff", "message_index": 1}
    assert {name: c["passed"] for name, c in checks.items()} == {"patch": True, "test:t::a": True, "test:t::b": False, "test:t::c": True}
    empty = target.checks("django__django-1", {"patch": "", "exit_status": "LimitsExceeded", "report": None}, messages)
    assert list(empty) == ["patch"] and not empty["patch"]["passed"]
    assert target.checks("django__django-1", None, messages) == {}
