"""Habits of agents that edit a repository, and that rules of one kind of task leave the other kind alone."""

import pathlib

import pytest

from rl.trajectory import Trajectory
from trace_jax.benchmarks.swebench import mini
from trace_jax.diagnose.code_rules import CODE_RULES
from trace_jax.diagnose.compaction import compact
from trace_jax.diagnose.evidence import LACKING, NA, PRESENT
from trace_jax.diagnose.rules import RULES, EvidenceAnalyst

RUN = pathlib.Path(__file__).parents[2] / "data" / "swebench" / "excerpt"
DIFF = "diff --git a/src/calc.py b/src/calc.py\n--- a/src/calc.py\n+++ b/src/calc.py\n@@ -1 +1 @@\n-a\n+b\n"
NEW = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"
SED, RUNS, SUBMIT = "sed -i 's/a/b/' src/calc.py", "python -m pytest tests", "git diff -- src/calc.py > patch.txt"


def episode(*commands, patch=DIFF, **checks):
    messages = [{"role": "user", "content": "fix it"}]
    for command in commands:
        messages += [{"role": "assistant", "content": "", "tool_calls": [{"id": "", "name": "bash", "arguments": {"command": command}}]}]
        messages += [{"role": "tool", "content": "", "tool_call_id": ""}]
    judged = {"patch": {"passed": bool(patch), "expected": None, "actual": patch, "message_index": None}} | checks
    return Trajectory(id="t#0", environment="swebench", task_id="t", messages=messages, reward=0.0, checks=judged)


def label(trajectory, *capabilities):
    known = [RULES[name][0] for name in capabilities or RULES]
    return {x.capability: (x.value, x.message_index) for x in EvidenceAnalyst().label({1: [trajectory]}, known)[1]}


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ((SED, RUNS, SUBMIT), (PRESENT, 3)),
        ((RUNS, SED, SUBMIT), (LACKING, 3)),
        ((f"{SED} && {RUNS}", SUBMIT), (PRESENT, 1)),
        (("python3 - <<'E'\nopen('src/calc.py', 'w').write('b')\nE", SUBMIT), (LACKING, 1)),
        (("cat > src/calc.py <<'E'\nb\nE", "cat src/calc.py", SUBMIT), (LACKING, 1)),
        ((SED, "cat > repro.py <<'E'\nimport calc\nE\npython repro.py", SUBMIT), (PRESENT, 3)),
        (("cat src/calc.py", SUBMIT), (NA, None)),
    ],
)
def test_what_is_run_after_the_last_edit(commands, expected):
    assert label(episode(*commands), "verification_after_edit")["verification_after_edit"] == expected


@pytest.mark.parametrize(
    ("patch", "value"),
    [
        (DIFF, PRESENT),
        (DIFF + NEW.format("src/helper.py"), PRESENT),
        (DIFF + NEW.format("tests/test_calc.py"), LACKING),
        (DIFF + NEW.format("reproduce_bug.py"), LACKING),
        (DIFF + NEW.format("src/calc.py.orig"), LACKING),
        ("", NA),
    ],
)
def test_what_a_patch_holds(patch, value):
    assert label(episode(SED, patch=patch), "patch_hygiene")["patch_hygiene"][0] == value
    assert label(episode(SED, patch=patch), "delivering_a_patch")["delivering_a_patch"][0] == (PRESENT if patch else LACKING)


def test_rules_leave_other_tasks_alone():
    code = label(episode(SED, RUNS, SUBMIT))
    assert {name for name, (value, _) in code.items() if value != NA} == set(CODE_RULES)
    other = episode(SED)
    other.checks = {"db": {"passed": False, "expected": None, "actual": None, "message_index": None}}
    assert all(label(other)[name] == (NA, None) for name in CODE_RULES)
    alone = episode()
    alone.messages = []
    assert set(label(alone).values()) == {(NA, None)}


def test_real_trajectories_are_labelled_with_their_messages():
    for trajectory in mini.read(RUN):
        for name, (value, index) in label(trajectory).items():
            assert (value == NA) == (index is None) and (index is None or trajectory.messages[index]["role"] == "assistant"), name


def test_hundreds_of_tests_take_a_few_lines_of_a_prompt():
    def test(passed):
        return {"passed": passed, "expected": "PASS_TO_PASS", "actual": "x", "message_index": None}

    checks = {f"test:t.py::test_{i}": test(i >= 50) for i in range(900)}
    lines = [line for line in compact(episode(SED, **checks), 3000).splitlines() if line.startswith("[check]")]
    assert len(lines) == 1 + 20 + 2
    assert "[check] 850 tests passed" in lines and "[check] 30 more tests failed" in lines
