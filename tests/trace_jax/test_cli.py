import os
import pathlib
import resource
import signal
import subprocess
import sys
import time

import pytest

from trace_jax import __main__, cli, endings
from trace_jax.config import Config
from trace_jax.config.fields import fields
from trace_jax.config.sections import ROOT
from trace_jax.workdir import Workdir

PROBE = """
import errno, json, time

def main(arguments):
    what = arguments.policy[0]
    if what == "full":
        raise ValueError("background save failed") from OSError(errno.ENOSPC, "No space left on device")
    if what == "crash":
        raise ZeroDivisionError("three\\nlines\\nlong")
    if what == "wait":
        try:
            print("waiting", flush=True)
            time.sleep(60)
        finally:
            arguments.workdir.write_json("saved.json", True)
    print(json.dumps([arguments.command, arguments.config.seed, list(arguments.policy), arguments.split]))
"""
START = """
import sys
from trace_jax import cli
cli.COMMANDS["probe"] = cli.Command(module="probe", help="for tests", flags=("workdir!", "policy!", "split"))
sys.exit(cli.main(sys.argv[1:]))
"""
READER = "import sys; from trace_jax import cli; cli.overview = lambda: 'line\\n' * 100000; sys.exit(cli.main([]))"


@pytest.fixture
def probe(tmp_path, monkeypatch):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "probe.py").write_text(PROBE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "probe", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command(module="probe", help="for tests", flags=("workdir!", "policy!", "split")))
    return ["probe", "--config=quickstart", f"--workdir={tmp_path / 'run'}"]


def one_line(capsys) -> str:
    error = capsys.readouterr().err
    assert error.startswith("trace-jax: ") and error.count("\n") == 1, error
    return error


def test_trace_jax_alone_lists_what_exists(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for name, command in cli.COMMANDS.items():
        assert (f"  {name}" in listed) == command.exists
    assert "quickstart" in listed


def test_the_help_of_a_command_lists_flags_and_config_fields(probe, capsys):
    assert cli.main(["probe", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--workdir" in text and "(required)" in text and "--out" not in text
    assert "train.clip_high=0.28" in text and "evaluation.policies=base,adapters" in text


@pytest.mark.parametrize("command", [name for name, command in cli.COMMANDS.items() if command.fields != ("",)])
def test_help_is_short_where_few_fields_concern_a_command(command, capsys):
    assert cli.main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "  synthesis.certify_seeds=" in text and "train." not in text and "docs/config.md has the others" in text
    names = [name for name, _, _ in fields(Config())]
    assert all(any(name.startswith(beginning) for name in names) for beginning in cli.COMMANDS[command].fields)


def test_help_is_fast_and_starts_no_jax():
    command = [sys.executable, "-c", "import sys; from trace_jax.cli import main; main(['--help']); sys.exit('jax' in sys.modules)"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.8  # CPU seconds, which a busy machine does not change much


def test_a_command_gets_typed_arguments(probe, capsys):
    assert cli.main([*probe, "--config.seed=3", "--policy=base,composed", "--split=heldout"]) == 0
    assert capsys.readouterr().out == '["probe", 3, ["base", "composed"], "heldout"]\n'


def test_the_config_may_be_left_out_once_the_workdir_has_one(probe, capsys):
    assert cli.main([*probe, "--config.seed=3", "--policy=base"]) == 0
    without = [word for word in probe if not word.startswith("--config")]
    assert cli.main([*without, "--policy=base"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == '["probe", 3, ["base"], null]'
    workdir = next(word for word in probe if word.startswith("--workdir=")).removeprefix("--workdir=")
    (pathlib.Path(workdir) / "rollouts").mkdir()
    assert cli.main([*without, "--policy=base", "--config.seed=4"]) == 2
    assert "'seed' = 3, asked for is 4" in one_line(capsys)


@pytest.mark.parametrize(
    "words, expected",
    [
        (["prob"], "did you mean 'probe'"),
        (["trian"], "no command 'trian'"),
        (["probe", "--workdir=x", "--policy=base"], "--config is missing"),
        (["probe", "--config=quickstart", "--policy=base"], "--workdir is missing"),
        (["probe", "--config=quickstart", "--workdir=x"], "--policy is missing"),
        (["probe", "--config=quickstrt", "--workdir=x", "--policy=base"], "did you mean 'quickstart'"),
        (["probe", "--config=quickstart", "--workdir=x", "--polcy=base"], "policy"),
        (["probe", "--config=quickstart", "--workdir=x", "--policy=base", "--split=test"], "train|heldout"),
        (["probe", "--config=quickstart", "--workdir=x", "--policy=base", "extra"], "takes flags only, found extra"),
        (["probe", "--config=quickstart", "--workdir=x", "--policy=base", "--config.train.rnk=3"], "did you mean 'train.rank'"),
        (["probe", "--config=quickstart", "--workdir=x", "--policy=base", "--config.seed"], "write --config.seed=VALUE"),
        (["probe", "--config=quickstart", "--workdir=gs://b/x", "--policy=base"], "give gs://BUCKET/PREFIX"),
        (["probe", "--config=quickstart", "--workdir=/dev/null/x", "--policy=base"], "/dev/null/x"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(probe, capsys, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert expected in one_line(capsys)
    assert not (tmp_path / "x").exists()


def test_a_workdir_in_use_is_exit_code_2(probe, capsys, tmp_path):
    with Workdir.open(tmp_path / "run"):
        assert cli.main([*probe, "--policy=base"]) == 2
    assert f"in use by pid {os.getpid()}" in one_line(capsys)


def test_a_crash_is_one_line_and_the_traceback_is_in_the_workdir(probe, capsys, tmp_path):
    assert cli.main([*probe, "--policy=crash"]) == 1
    assert "ZeroDivisionError: three lines long" in one_line(capsys)
    log = (tmp_path / "run" / "error.log").read_text()
    assert "Traceback" in log and "--policy=crash" in log
    with Workdir.open(tmp_path / "run"):
        pass  # the lock was given back


def test_neither_the_traceback_nor_what_is_said_of_it_holds_a_key(probe, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "opensesame")
    assert cli.main([*probe, "--policy=crash", "--config.name=opensesame", "--config.target.package=http://me:pw@host"]) == 1
    log = (tmp_path / "run" / "error.log").read_text()
    assert "ZeroDivisionError" in log and "opensesame" not in log and "pw" not in log
    endings.crash(RuntimeError("{'Authorization': 'Bearer opensesame'}"), None, [])
    assert "opensesame" not in capsys.readouterr().err


def test_a_full_disk_is_said_in_one_line(probe, capsys, tmp_path):
    assert cli.main([*probe, "--policy=full"]) == 1
    assert f"the disk is full ({tmp_path / 'run'}); free some space" in one_line(capsys)


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_lets_the_command_save_and_has_its_exit_code(probe, tmp_path, number, code):
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path / 'modules'}"}
    command = [sys.executable, "-c", START, *probe, "--policy=wait"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=20)
    assert process.returncode == code
    assert error.count("\n") == 1 and "the same command goes on from there" in error
    assert (tmp_path / "run" / "saved.json").exists()


FORGETS = """
import gc, signal, time

def callback(phase, info):
    gc.callbacks.remove(callback)
    signal.raise_signal({number})

def main(arguments):
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(20)
"""


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_a_callback_of_the_garbage_collector_is_not_forgotten(probe, tmp_path, capsys, number, code):
    (tmp_path / "modules" / "probe.py").write_text(FORGETS.format(number=int(number)))
    began = time.monotonic()
    assert cli.main([*probe, "--policy=x"]) == code
    assert time.monotonic() - began < 15 and "the same command goes on from there" in one_line(capsys)


def test_a_reader_that_leaves_is_no_crash():
    for program, pipe in ((READER, "|"), (READER.replace("sys.exit(", "sys.stdout = sys.stderr; sys.exit("), "2>&1 >/dev/null |")):
        command = f'set -o pipefail; {sys.executable} -c "{program}" {pipe} head -1'
        run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert (run.returncode, run.stderr) == (1, "") and run.stdout == "line\n"


def test_files_of_the_current_folder_do_not_shadow_our_packages(tmp_path):
    (tmp_path / "model.py").write_text("raise SystemExit('the wrong model')")
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "__init__.py").write_text("")
    # as `python -m trace_jax` starts with an editable installation: the current folder first, then ours
    start = "import sys; sys.path.append(sys.argv.pop(1)); import runpy; runpy.run_module('trace_jax', run_name='__main__')"
    run = subprocess.run([sys.executable, "-c", start, str(ROOT)], cwd=tmp_path, capture_output=True, text=True, env=_without_pythonpath())
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("trace-jax COMMAND")


def test_a_package_that_shadows_ours_is_named(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "model.py").write_text("")
    environment = {**_without_pythonpath(), "PYTHONPATH": f"{tmp_path / 'lib'}{os.pathsep}{ROOT}"}
    run = subprocess.run([sys.executable, "-m", "trace_jax"], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert run.returncode == 2
    assert run.stderr.startswith(f"trace-jax: {tmp_path / 'lib' / 'model.py'} hides the package 'model'") and run.stderr.count("\n") == 1


def test_a_checkout_as_the_current_folder_stays_importable(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", ["", str(ROOT), "/elsewhere"])
    __main__.drop_current_folder()
    assert sys.path == ["", str(ROOT), "/elsewhere"]
    monkeypatch.chdir(ROOT / "tests")
    __main__.drop_current_folder()
    assert sys.path == [str(ROOT), "/elsewhere"]


def _without_pythonpath() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_wheel_holds_every_package_and_data_file_of_the_rooms(tmp_path):
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    source = tmp_path / "source"
    tracked = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "trace_jax", "rl", "model", "envs", "configs", "prompts"]
    source.mkdir()
    for name in tracked:
        if (ROOT / name).exists():
            (source / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True)
    names = _wheel_names(next(tmp_path.glob("*.whl")))
    for room in ("trace_jax", "rl", "model", "envs"):
        for path in (ROOT / room).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in names, f"{path} is not in the wheel: add its suffix to package-data"
    assert "trace_jax/configs/quickstart.py" in names


def _wheel_names(wheel: pathlib.Path) -> set[str]:
    import zipfile

    return set(zipfile.ZipFile(wheel).namelist())


def test_what_a_terminal_obeys_is_made_visible(tmp_path, capsys):
    assert cli.main(["view", f"{tmp_path}/\x1b[31m\u202e\ud800é"]) == 2
    assert f"{tmp_path}/\\x1b[31m\\u202e\\ud800é: no such folder" in capsys.readouterr().err


def test_the_viewer_and_the_server_of_one_workdir_listen_side_by_side():
    ports = {name: cli.define_flags(cli.COMMANDS[name])["port"].default for name in ("serve", "view")}
    assert ports == {"serve": 8000, "view": 8001}
    assert "--port  port to listen on; 0: any that is free (default 8001)" in cli.usage("view", cli.COMMANDS["view"])
