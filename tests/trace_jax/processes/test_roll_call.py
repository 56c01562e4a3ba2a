"""Processes of other code, packages or settings are named, with their hosts, before anything is loaded."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.devices import environment
from tests.rl.test_learner_mesh import free_port
from trace_jax.config import ROOT, Config, override
from trace_jax.processes import roll_call
from trace_jax.processes.membership import Member
from trace_jax.processes.roll_call import difference, facts


def members(*told):
    return [Member(index, len(told), f"host-{index}", 1, its) for index, its in enumerate(told)]


@pytest.fixture(scope="module")
def told():
    return facts("run", {"config": "quickstart", "workdir": "w", "profile_steps": ()}, Config())


def test_processes_of_one_checkout_and_one_command_are_alike(told):
    assert difference(members(told, told, dict(told))) is None
    assert {"package jax", "package python", "accelerators", "command", "--workdir", "config field 'train.rank'"} <= told.keys()
    assert {"file rl/loss.py", "file configs/quickstart.py", "file trace_jax/report/page.css"} & told.keys() >= {"file rl/loss.py"}
    assert "--config" not in told  # a name and a path may say the same


@pytest.mark.parametrize(
    "other, said, fix",
    [
        ({"source revision": "b" * 40}, f"source revision is {'b' * 40} there, {'a' * 40} here", "Push the same revision"),
        ({"file rl/loss.py": "0"}, "file rl/loss.py is 0 there, ", "Push the same revision"),
        ({"package jax": "0.4"}, "package jax is 0.4 there, ", "Push the same revision"),
        ({"package libtpu": "0.0.42"}, "package libtpu is 0.0.42 there, not there here", "Push the same revision"),
        ({"--workdir": "v"}, "--workdir is v there, w here", "Start all with the same command"),
        ({"accelerators": "4 x 0x1ae0:0x0063"}, "accelerators is 4 x 0x1ae0:0x0063 there", "Start all with the same command"),
        ({f"config field 'x.{i}'": "1" for i in range(5)}, "; and 2 more", "Start all with the same command"),
    ],
)
def test_who_differs_in_what_is_said_with_the_fix(told, other, said, fix):
    told = {name: value for name, value in told.items() if name != "package libtpu"} | {"source revision": "a" * 40}
    line = difference(members(told, told, told | other, told | other))
    assert "\n" not in line and said in line and fix in line
    assert "as seen from process 0 on host host-0: process 2 on host host-2 and process 3 on host host-3: " in line


def test_a_config_field_is_named(told):
    other = facts("run", {"config": "x.py", "workdir": "w", "profile_steps": ()}, override(Config(), [("train.rank", "7")]))
    assert "config field 'train.rank' is 7 there, 16 here. Start" in difference(members(told, other))


def test_a_revision_that_is_not_known_is_left_to_the_files(told, monkeypatch):
    monkeypatch.setattr(roll_call, "source_revision", lambda: None)
    other = facts("run", {"workdir": "w", "profile_steps": ()}, Config())
    assert other["source revision"] is None and difference(members(told | {"source revision": "a"}, other)) is None


def test_two_processes_of_which_one_has_other_code_both_end_with_2_and_name_the_file(tmp_path):
    other = tmp_path / "other"
    for folder in ("trace_jax", "rl", "model", "envs", "configs", "prompts"):
        shutil.copytree(ROOT / folder, other / folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (other / "rl" / "loss.py").open("a") as file:
        file.write("# changed\n")
    flags = [f"--coordinator=127.0.0.1:{free_port()}", "--num_processes=2"]
    words = [sys.executable, "-m", "trace_jax", "run", "--config=quickstart", f"--workdir={tmp_path / 'w'}", *flags]
    running = [
        subprocess.Popen(
            [*words, f"--process_id={index}"], cwd=root, env=environment(1) | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE, text=True
        )
        for index, root in enumerate((ROOT, other))
    ]
    lines = [process.communicate(timeout=100)[1].strip().splitlines()[-1] for process in running]
    assert [process.returncode for process in running] == [2, 2], lines
    assert lines[0] == lines[1] and re.search(r"process 1 on host .*: file rl/loss.py is \w+ there, \w+ here. Push", lines[0])
    assert not (tmp_path / "w").exists()
