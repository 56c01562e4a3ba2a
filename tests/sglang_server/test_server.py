"""The helper itself: what it says when no server comes up, and that none is left behind."""

import os
import time
from pathlib import Path

import pytest

from tests.sglang_server import install
from tests.sglang_server.server import serve


def program(folder: Path, script: str) -> Path:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def runs(pid: int) -> bool:
    """Whether there is a process that is more than a zombie, which it is until the system's first process reaps it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_server_that_ends_gives_its_last_words(tmp_path):
    python = program(tmp_path, "echo no such model; exit 3")
    with pytest.raises(RuntimeError, match=r"ended with 3 before it was healthy:\nno such model"), serve(tmp_path, python=python):
        pass


def test_a_server_that_hangs_is_killed_with_its_children(tmp_path):
    python = program(tmp_path, f"sleep 100 & echo $! > {tmp_path}/child; wait")
    with pytest.raises(RuntimeError, match="not healthy within 2 s"), serve(tmp_path, python=python, deadline=2):
        pass
    deadline = time.monotonic() + 60  # a signal reaches a process when it is next scheduled
    while runs(int((tmp_path / "child").read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_environment_s_variable_comes_first_and_is_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACE_JAX_SGLANG_PYTHON", str(tmp_path / "absent"))
    with pytest.raises(RuntimeError, match="absent is no program; unset it"):
        install.sglang_python()
    monkeypatch.setenv("TRACE_JAX_SGLANG_PYTHON", str(python := program(tmp_path, "")))
    assert install.sglang_python() == python


def test_an_interrupted_environment_is_built_again(tmp_path, monkeypatch):
    monkeypatch.delenv("TRACE_JAX_SGLANG_PYTHON", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls = []
    monkeypatch.setattr(install, "_run", lambda command: (calls.append(command), os.makedirs(install.environment_folder(), exist_ok=True)))
    monkeypatch.setattr(install, "_python_3_11", lambda: "python3.11")
    folder = install.environment_folder()
    (folder / "lib").mkdir(parents=True)
    for _ in range(2):
        assert install.sglang_python() == folder / "bin" / "python"
    assert len(calls) == 3 and not (folder / "lib").exists()
