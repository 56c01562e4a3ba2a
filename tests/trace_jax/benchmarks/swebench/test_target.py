"""SWE-bench as a target: its splits, and its verdicts as checks."""

import hashlib
import json
import pathlib

import numpy as np
import pytest

from envs.harness import HarnessPool
from rl.engines.protocol import Completion
from rl.rollout import Task, roll_out
from tests.rl.chats import chat
from tests.trace_jax.benchmarks.swebench.test_live import DIFF, FIX, SUBMIT, dataset  # noqa: F401
from trace_jax.benchmarks.swebench.predictions import write_predictions
from trace_jax.benchmarks.swebench.target import SwebenchTarget, make_program

SPLITS = json.loads((pathlib.Path(__file__).parents[4] / "trace_jax" / "benchmarks" / "swebench" / "splits.json").read_text())


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
        tasks = [{"id": name, "split": split, "hash": digest, "patch": None} for name, split, digest in rows]
        tasks[1]["patch"] = "the solution's diff"
        return {"version": "swebench 5.0.2, mini-swe-agent 2.4.6", "tasks": tasks, "tools": [], "system": "You help."}


@pytest.fixture
def target(tmp_path):
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
    assert target.checks("django__django-1", None, messages) == empty  # ended by a full context, say: predictions need it too
    known = target.checks("sympy__sympy-1", {"patch": "diff", "exit_status": "Submitted", "report": report}, messages)
    assert known["patch"] == checks["patch"] | {"expected": "the solution's diff"}  # which SWE-RL compares it with


class Reciter:
    """An engine that says its turns in order, in every session."""

    lanes, context = 8, 1 << 16

    def __init__(self, chat, turns):
        self._chat, self._turns = chat, turns
        self._requests, self._next = [], {}

    def submit(self, request):
        self._requests.append(request)

    def poll(self):
        done, self._requests = self._requests, []
        return [self._say(request) for request in done]

    def _say(self, request):
        turn = self._next[request.session] = self._next.get(request.session, -1) + 1
        tokens = [*self._chat.tokenizer(self._turns[turn], add_special_tokens=False).input_ids, self._chat.end]
        return Completion(request.session, np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), "stop", 0)

    def release(self, session):
        pass


@pytest.mark.slow  # a worker imports swebench
def test_a_rollout_fixes_a_repository_with_calls_in_tags(dataset, tmp_path):  # noqa: F811
    c = chat("qwen3_6")
    turns = [f"Hm.\n</think>\n\n<tool_call>\n<function=bash>\n<parameter=command>\n{command}\n</parameter>\n</function>\n</tool_call>"
             for command in (FIX, DIFF, SUBMIT)]  # fmt: skip
    with HarnessPool(deadline_s=300.0) as pool:
        target = SwebenchTarget(pool, make_program(str(dataset), "local", max_steps=8, timeout=300.0))
        tasks = [
            Task(package=target, seed=info.number, rollout=0, group=info.id, task_id=info.id, split="train", trial=0)
            for info in target.all_tasks
        ]
        found = roll_out(Reciter(c, turns), pool, c, tasks, "base", temperature=1.0, run_seed=0, max_tokens=500)
    assert [(t.error, t.reward, t.success, t.stop_reason) for t in found] == [(None, 1.0, True, "done")] * 2
    t = found[0]
    assert t.messages[2]["content"] == "<think>\nHm.\n</think>" and t.messages[2]["tool_calls"][0]["arguments"] == {"command": FIX}
    assert t.checks["patch"]["message_index"] == 6 and t.checks["test:test_calc.py::test_add"]["passed"]
    assert write_predictions(found, tmp_path / "preds.json") == 2
