"""Episodes on a toy repository with a scripted model, in every environment; docker is a script that records how it was called."""

import importlib.util
import json
import os
import pathlib
import shutil
import stat
import subprocess
import threading

import pytest

from trace_jax.benchmarks.swebench import driver, grading, reports
from trace_jax.errors import InputError

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("minisweagent", "swebench"))), reason="needs the extra swebench"
)  # not importorskip: the driver has to set the environment before it imports them

ROOT = pathlib.Path(__file__).parents[4]
SHARED = pathlib.Path(os.environ.get("TRACE_JAX_DATA", ROOT.parent / "shared" / "data")) / "swebench"
LOGS = ROOT / "tests" / "data" / "swebench" / "logs"
BWRAP = shutil.which("bwrap")
TESTS = """import calc
for name, passed in (("add", calc.add(2, 3) == 5), ("sub", calc.sub(5, 3) == 2)):
    print("PASSED" if passed else "FAILED", f"test_calc.py::test_{name}")
"""
EVAL = """#!/bin/bash
set -uxo pipefail
cd /testbed
: '>>>>> Start Test Output'
python3 test_calc.py
: '>>>>> End Test Output'
git checkout -- .
"""
FIX = "sed -i 's/a - b  # add/a + b/' calc.py"
BREAK = f"{FIX} && sed -i 's/a - b  # sub/a + b/' calc.py"
DIFF = "git diff -- calc.py > patch.txt && cat patch.txt"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"


def bwrap_works():
    if BWRAP is None:
        return False
    return subprocess.run([BWRAP, "--unshare-user-try", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "true"]).returncode == 0


needs_bwrap = pytest.mark.skipif(not bwrap_works(), reason="bubblewrap is not installed or may not make namespaces")
SANDBOXES = ["local", pytest.param("bubblewrap", marks=needs_bwrap)]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two instances of one repository, the second at a commit before the last."""
    folder = tmp_path_factory.mktemp("toy")
    repository = folder / "repository"
    repository.mkdir()

    def git(*words):
        person = {
            "GIT_AUTHOR_NAME": "t",
            "GIT_AUTHOR_EMAIL": "t@example.com",
            "GIT_COMMITTER_NAME": "t",
            "GIT_COMMITTER_EMAIL": "t@example.com",
        }
        return subprocess.run(
            ["git", "-C", repository, *words], check=True, capture_output=True, text=True, env=os.environ | person
        ).stdout.strip()

    git("init", "-q")
    (repository / "calc.py").write_text("def add(a, b):\n    return a - b  # add\n\n\ndef sub(a, b):\n    return a - b  # sub\n")
    (repository / "test_calc.py").write_text(TESTS)
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    first = git("rev-parse", "HEAD")
    (repository / "secret.txt").write_text("the fix\n")
    git("add", "-A")
    git("commit", "-q", "-m", "the fix comes later")
    common = {
        "repo": "toy/calc",
        "repo_path": str(repository),
        "problem_statement": "add() subtracts",
        "FAIL_TO_PASS": '["test_calc.py::test_add"]',
        "PASS_TO_PASS": '["test_calc.py::test_sub"]',
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": EVAL,
    }
    rows = [
        {**common, "instance_id": "toy__calc-1", "base_commit": first, "split": "train"},
        {**common, "instance_id": "toy__calc-2", "base_commit": git("rev-parse", "HEAD"), "image": "toy/calc:2", "split": "test"},
    ]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Stopped(BaseException):
    pass


class Script:
    """A model that runs commands one after the other and keeps what it was asked; None is a turn without a call."""

    Stopped = Stopped

    def __init__(self, *commands):
        self.commands, self.asked = list(commands), []

    def __call__(self, speaker, system, messages, tools):
        self.asked.append((speaker, system, messages, tools))
        command = self.commands.pop(0)
        if command is Stopped:
            raise Stopped
        calls = [] if command is None else [{"id": f"call_{len(self.asked)}", "name": "bash", "arguments": {"command": command}}]
        return {"role": "assistant", "content": "Now.", "tool_calls": calls}


def settings(dataset, environment, **more):
    return {"data": str(dataset), "environment": environment, "step_limit": 8} | more


def run(dataset, environment, *commands, task="toy__calc-1", **more):
    speak = Script(*commands)
    return driver.run_episode(settings(dataset, environment, **more), task, 0, speak), speak


def test_tasks_have_the_hash_of_their_row_and_a_split(dataset, tmp_path):
    described = driver.describe(settings(dataset, "local"))
    assert [(t["id"], t["split"], t["patch"]) for t in described["tasks"]] == [
        ("toy__calc-1", "train", None),
        ("toy__calc-2", "test", None),
    ]
    assert "swebench 5" in described["version"] and "mini-swe-agent 2" in described["version"]
    assert described["tools"][0]["function"]["name"] == "bash" and described["system"].startswith("You are a helpful assistant")
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    rows[0]["problem_statement"] += "!"
    del rows[0]["split"], rows[1]["split"]
    (tmp_path / "again.json").write_text(json.dumps(rows))
    again = driver.describe(settings(tmp_path / "again.json", "local", train=["toy/calc"]))["tasks"]
    assert again[0]["hash"] != described["tasks"][0]["hash"] and again[0]["split"] == again[1]["split"] == "train"
    assert driver.describe(settings(tmp_path / "again.json", "local", heldout=["toy/calc"]))["tasks"][0]["split"] == "test"
    del rows[1]["repo_path"]
    (tmp_path / "less.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match="toy__calc-2 has no 'repo_path', which the environment local needs"):
        driver.describe(settings(tmp_path / "less.json", "local"))


@pytest.mark.parametrize("environment", SANDBOXES)
def test_a_fix_is_resolved(dataset, environment):
    found, speak = run(dataset, environment, "cat calc.py; ls; git log --oneline; pwd", FIX, DIFF, SUBMIT)
    assert found["error"] is None and found["reward"] == 1.0 and found["stop_reason"] == "done"
    assert found["graded"]["patch"].startswith("diff --git") and "+    return a + b" in found["graded"]["patch"]
    assert found["graded"]["report"]["tests_status"]["FAIL_TO_PASS"] == {"success": ["test_calc.py::test_add"], "failure": []}
    json.dumps(found, allow_nan=False)
    assert [len(messages) for _, _, messages, _ in speak.asked] == [1, 1, 1, 1]
    speaker, system, (first,), (tool,) = speak.asked[0]
    assert speaker == "agent" and system.startswith("You are a helpful assistant") and tool["function"]["name"] == "bash"
    assert first["role"] == "user" and "add() subtracts" in first["content"]
    (seen,) = speak.asked[1][2]
    assert seen["role"] == "tool" and seen["tool_call_id"] == "call_1" and "return a - b  # add" in seen["content"]
    assert "secret.txt" not in seen["content"] and "later" not in seen["content"]  # what came after the base commit
    place = seen["content"].split()[-2]
    assert place.endswith("/testbed") and (environment == "local" or place == "/testbed")


@pytest.mark.parametrize("environment", SANDBOXES)
def test_a_patch_that_breaks_something_else_is_not(dataset, environment):
    found, _ = run(dataset, environment, BREAK, DIFF, SUBMIT)
    assert found["reward"] == 0.0 and found["error"] is None
    status = found["graded"]["report"]["tests_status"]
    assert status["FAIL_TO_PASS"]["success"] and status["PASS_TO_PASS"]["failure"]
    assert reports.fractions(reports.verdict_of(found["graded"]["report"])) == {"fail_to_pass": 1.0, "pass_to_pass": 0.0}


@pytest.mark.parametrize(
    ("commands", "stop", "status"),
    [
        ((None, None, None), "invalid_action", "RepeatedFormatError"),
        (["true"] * 8, "max_turns", "LimitsExceeded"),
        ((SUBMIT.replace("cat patch.txt", "true"),), "done", "Submitted"),
    ],
)
def test_no_patch_is_a_failure_and_is_not_graded(dataset, commands, stop, status):
    found, speak = run(dataset, "local", *commands)
    assert (found["reward"], found["stop_reason"], found["error"]) == (0.0, stop, None)
    assert found["graded"] == {"patch": "", "exit_status": status, "report": None}
    if status == "RepeatedFormatError":
        assert "No tool calls found" in speak.asked[1][2][0]["content"] and speak.asked[1][2][0]["role"] == "user"


def test_a_patch_that_does_not_apply_and_tests_without_end_fail(dataset, monkeypatch):
    found, _ = run(dataset, "local", "echo rubbish > patch.txt", SUBMIT)
    assert found["reward"] == 0.0 and not found["graded"]["report"]["patch_successfully_applied"]
    assert reports.verdict_of(found["graded"]["report"]).outcome == "error"
    monkeypatch.setattr(driver, "LONGEST_PATCH", 3)
    found, _ = run(dataset, "local", "echo rubbish > patch.txt", SUBMIT)
    assert found["reward"] == 0.0 and found["graded"]["patch"] == "rub" and "more than 3" in found["graded"]["report"]["reason"]
    monkeypatch.undo()
    found, _ = run(dataset, "local", "printf 'import time\\ntime.sleep(60)\\n' > calc.py", DIFF, SUBMIT, eval_timeout=1)
    assert found["reward"] == 0.0 and found["error"] is None and "not done after 1 s" in found["graded"]["report"]["reason"]


def test_a_host_that_ends_the_episode_gets_through_and_nothing_stays_behind(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(driver.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(Stopped):
        run(dataset, "local", "true", Stopped)
    assert list(tmp_path.iterdir()) == []


@needs_bwrap
def test_the_sandbox_has_no_network_no_home_no_variables_and_ends_what_outlives_its_time(dataset, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "geheim")
    probe = f"ls {ROOT} || echo hidden; tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' \\n'; echo :interfaces; env"
    found, speak = run(dataset, "bubblewrap", probe, "sleep 30 & sleep 30", FIX, DIFF, SUBMIT, command_timeout=2)
    seen = speak.asked[1][2][0]["content"]
    assert "hidden\nlo:interfaces" in seen and "PAGER=cat" in seen and "geheim" not in seen
    assert "timed out" in speak.asked[2][2][0]["content"] and found["reward"] == 1.0


def test_episodes_run_side_by_side(dataset):
    found = {}

    def one(number):
        fix = FIX if number % 2 else "true"
        found[number] = run(dataset, "local", fix, DIFF + " || true", SUBMIT, task=f"toy__calc-{1 + number % 2}")[0]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number]["reward"] for number in range(2)] == [0.0, 1.0]


DOCKER = r"""#!/bin/bash
home=$(dirname "$(readlink -f "$0")")
(IFS=$'\x1f'; printf '%s\x1e' "$*") >> "$home/calls"
gone() { echo "Cannot connect to the Docker daemon at unix:///var/run/docker.sock." >&2; exit 1; }
[ -e "$home/gone" ] && gone
case $1 in
run) git clone -q "$home/image" "$home/$4" && echo "$home/$4" ;;
exec)
    while [[ $1 != "$home"/* ]]; do shift; done
    box=$1; command=${@: -1}; command=${command//\/testbed/$box}
    [[ $command == *daemon-dies* ]] && { touch "$home/gone"; gone; }
    [[ $command == *"bash .git/eval.sh"* ]] && sed -i "s#/testbed#$box#g" "$box/.git/eval.sh"
    cd "$box" && exec bash -c "$command" ;;
inspect) echo true ;;
esac
"""


@pytest.fixture
def docker(dataset, tmp_path):
    """A `docker` whose containers are clones of the repository."""
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    subprocess.run(["git", "clone", "-q", dataset.parent / "repository", tmp_path / "image"], check=True)
    return program


def calls(docker, verb):
    made = (docker.parent / "calls").read_text().split("\x1e")[:-1]
    return [words for words in (line.split("\x1f") for line in made) if words[0] == verb]


def test_docker_runs_the_image_and_grades_in_a_fresh_container(dataset, docker):
    found, speak = run(dataset, "docker", "pwd", FIX, DIFF, SUBMIT, task="toy__calc-2", docker=str(docker))
    assert found["error"] is None and found["reward"] == 1.0
    agents, graders = calls(docker, "run")
    assert agents[:3] == ["run", "-d", "--name"] and agents[4:6] == ["-w", "/testbed"] and "toy/calc:2" in agents
    assert ["--network", "none"] == agents[agents.index("--rm") + 1 :][:2] and "--network" not in graders
    first = calls(docker, "exec")[1]
    assert first[:3] == ["exec", "-w", "/testbed"] and "BASH_ENV=/root/.bashrc" in first and first[-3:-1] == ["bash", "-c"]
    assert "/testbed" in speak.asked[0][2][0]["content"]


@needs_bwrap
def test_an_output_without_end_is_cut_and_an_exit_status_is_kept(dataset, monkeypatch):
    monkeypatch.setattr(driver, "MOST_OUTPUT", 1000)
    heredoc = "cat > x.txt <<'END'\n(\nEND\ncat x.txt  # a comment"
    _, speak = run(dataset, "bubblewrap", "yes", "echo no >&2; exit 3", heredoc, *[None] * 3)
    endless, failed, written = (speak.asked[turn][2][0]["content"] for turn in (1, 2, 3))
    assert "<returncode>141</returncode>" in endless and endless.count("y\n") == 500
    assert "<returncode>3</returncode>\n<output>\nno\n</output>" in failed
    assert "<returncode>0</returncode>\n<output>\n(\n</output>" in written


def test_a_long_patch_is_written_in_pieces(dataset, monkeypatch):
    monkeypatch.setattr(driver, "CHUNK", 64)
    found, _ = run(dataset, "local", FIX, DIFF, SUBMIT)
    assert found["reward"] == 1.0


def test_an_image_follows_from_the_instance_where_the_row_names_none(dataset, docker):
    run(dataset, "docker", *[None] * 3, task="toy__calc-1", docker=str(docker))
    assert "docker.io/swebench/sweb.eval.x86_64.toy_1776_calc-1:latest" in calls(docker, "run")[0]


def test_a_daemon_that_is_gone_is_an_outage_and_a_command_that_says_so_is_not(dataset, docker, tmp_path):
    found, _ = run(dataset, "docker", "true", "daemon-dies", task="toy__calc-2", docker=str(docker))
    assert found["reward"] is None and found["error"]["kind"] == "outage" and "Docker daemon" in found["error"]["message"]
    found, _ = run(dataset, "docker", "true", task="toy__calc-2", docker=str(docker))
    assert found["error"]["kind"] == "outage" and "cannot start the environment of toy__calc-2" in found["error"]["message"]
    (tmp_path / "gone").unlink()
    lie = "echo 'Cannot connect to the Docker daemon'; false"
    found, speak = run(dataset, "docker", lie, *[None] * 3, task="toy__calc-2", docker=str(docker))
    assert found["error"] is None and found["reward"] == 0.0 and "Cannot connect" in speak.asked[1][2][0]["content"]
    found, _ = run(dataset, "docker", "true", docker="/nowhere/docker")
    assert found["error"]["kind"] == "outage"


@pytest.mark.parametrize("ending", [".json", ".jsonl", ".parquet"])
def test_datasets_are_read_in_every_form(dataset, tmp_path, ending):
    rows = [json.loads(line) for line in dataset.read_text().splitlines()]
    path = tmp_path / f"data{ending}"
    if ending == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows) if ending == ".json" else "".join(json.dumps(row) + "\n" for row in rows))
    for source in (path, tmp_path):
        found = grading.load_dataset(source)
        assert found["toy__calc-1"]["FAIL_TO_PASS"] == ["test_calc.py::test_add"] and len(found) == 2


def test_what_is_no_dataset_is_named(tmp_path):
    with pytest.raises(InputError, match="no dataset"):
        grading.load_dataset(tmp_path)
    (tmp_path / "a.json").write_text('[{"instance_id": "x"}]')
    with pytest.raises(InputError, match="row 0 has no field 'repo'"):
        grading.load_dataset(tmp_path)
    (tmp_path / "a.json").write_text('[{"instance_id"')
    with pytest.raises(InputError, match="cannot be read as a dataset"):
        grading.load_dataset(tmp_path)


def rows_of(tree):
    """Rows of the older schema for the instances of a log tree, from what its reports say of the tests."""
    rows = {}
    for name, verdict in reports.load_tree(tree).verdicts.items():
        tests = {kind: [t for names in found.values() for t in names] for kind, found in verdict.tests.items()}
        rows[name] = {"instance_id": name, "repo": name.rpartition("-")[0].replace("__", "/"), "version": "1", **tests}
    return rows


@pytest.mark.parametrize(
    ("tree", "logs"),
    [(LOGS, 2), pytest.param(SHARED / "logs", 21, marks=pytest.mark.skipif(not SHARED.is_dir(), reason=f"no folder {SHARED}"))],
)
def test_logs_are_graded_again_to_their_recorded_verdicts(tree, logs):
    rows = rows_of(tree)
    assert len(grading.regrade(tree, rows)) == logs and grading.disagreements(tree, rows) == {}


def test_logs_that_cannot_be_graded_are_named(tmp_path):
    rows = rows_of(LOGS)
    name = "sqlfluff__sqlfluff-2419"
    with pytest.raises(InputError, match=f"no row {name}"):
        grading.regrade(LOGS, {key: row for key, row in rows.items() if key != name})
    with pytest.raises(InputError, match="swebench knows no log parser"):
        grading.regrade(LOGS, {**rows, name: {**rows[name], "repo": "toy/calc"}})
    with pytest.raises(InputError, match=r"no test_output\.txt"):
        grading.regrade(tmp_path, rows)
