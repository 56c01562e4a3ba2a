"""The command: how it begins, what it refuses, how it ends; and a bucket."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from tests import gcs
from tests.trace_jax.view import made
from trace_jax import cli
from trace_jax.config import Config
from trace_jax.view.rollouts import Rollouts
from trace_jax.workdir import Workdir


@pytest.fixture
def workdir(tmp_path):
    with Workdir.open(tmp_path / "run", Config()) as workdir:
        workdir.write_shard("base", "train", 0, [made.light(n) for n in range(3)])
    return tmp_path / "run"


def test_a_fresh_process_serves_without_jax_beside_a_run_and_ends_quietly(workdir):
    program = "import sys; from trace_jax.__main__ import main; code = main(); "
    program += "print(sorted({'jax', 'torch', 'transformers'} & set(sys.modules))); sys.exit(code)"
    with Workdir.open(workdir) as held:
        command = [sys.executable, "-c", program, "view", str(workdir), "--port=0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=os.getcwd())
        said = process.stdout.readline()
        url = said.split(" at ")[1].split(",")[0]
        page = urllib.request.urlopen(url, timeout=30).read().decode()
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=30)
        assert held.place() in said and url.startswith("http://127.0.0.1:")
    assert "<strong>3</strong> rollouts" in page
    assert (process.returncode, out.strip(), errors) == (0, "[]", "")


@pytest.mark.parametrize("words", [["WORKDIR"], ["--workdir=WORKDIR"]])
def test_the_workdir_is_an_argument_or_a_flag(workdir, words):
    words = [word.replace("WORKDIR", str(workdir)) for word in words]
    values, _, argument = cli.parse("view", cli.COMMANDS["view"], words)
    assert argument == str(workdir) and values["workdir"] is None
    assert cli.parse("view", cli.COMMANDS["view"], ["--results=a,b"])[2] is None


def test_what_cannot_be_shown_is_refused_in_one_line(workdir, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for words, said in (
            ([], "give the folder or gs:// address of a workdir, or --results=FILE"),
            ([str(workdir), "--results=x"], "give the folder or gs://"),
            ([str(workdir), f"--workdir={workdir}"], "expected one argument, WORKDIR"),
            ([str(tmp_path / "none")], "no such folder; give one that a run has written"),
            ([str(tmp_path / "other")], "holds no run, neither config.json nor rollouts"),
            ([str(workdir), f"--port={port}"], "give another --port, or 0 for any that is free"),
            ([str(workdir), "--host=no.such.host.invalid"], "give an address of this machine"),
        ):
            assert cli.main(["view", *words]) == 2
            errors = capsys.readouterr().err
            assert said in errors and errors.count("\n") == 1
    assert not (tmp_path / "none").exists()


def test_rollouts_in_a_bucket_are_listed_and_followed(monkeypatch):
    with gcs.server() as url:
        for name, value in gcs.SETTINGS.items():
            monkeypatch.setenv(name, value.format(url))
        bucket = gcs.Bucket()
        with Workdir.open(f"{bucket.url}/run", Config()) as run:
            for shard in range(12):
                run.write_shard("base", "train", shard, [made.light(shard * 2 + n) for n in range(2)])
            run.remove("rollouts/base/train/00003.index.json")
            with made.opened(f"{bucket.url}/run") as client:
                assert "<strong>24</strong> rollouts" in client.get("/").text
                assert "desk:1#2" in client.get("/rollout/rollouts/base/train/00003/0").text
                client.rollouts._fresh = 0
                run.write_shard("base", "train", 12, [made.light(30)])
                assert "<strong>25</strong> rollouts" in client.get("/").text
        with pytest.raises(Exception, match="holds no run"):
            Workdir.look(f"{bucket.url}/elsewhere")


def test_a_store_that_does_not_answer_is_a_notice(workdir, monkeypatch):
    rollouts = Rollouts(Workdir.look(workdir))
    rollouts._fresh = 0
    assert len(rollouts.now(20).rows) == 3

    def away():
        raise OSError("the network is gone")

    monkeypatch.setattr(rollouts._workdir, "marks", away)
    found = rollouts.now(20)
    assert len(found.rows) == 3 and "the network is gone" in found.notices[0]
    monkeypatch.undo()
    assert not rollouts.now(20).notices
    rollouts.close()
