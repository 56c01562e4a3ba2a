"""Builds the environment of the SGLang server that tests marked `sglang` start, and prints its Python.

    python tests/sglang_server/install.py

SGLang wants a CUDA build of torch and a dozen packages of kernels. On a CPU it runs without: this script installs it alone beside what it
imports, and `shim/` stands in for the packages of kernels. The environment has 1.6 GB and lies in a cache folder named after its
requirements; a second call finds it there. TRACE_JAX_SGLANG_PYTHON names the Python of another environment instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS, ALONE = HERE / "requirements.txt", HERE / "requirements-alone.txt"
_MARKER = "complete"  # written last; a folder without it was interrupted


def environment_folder() -> Path:
    digest = hashlib.sha256(REQUIREMENTS.read_bytes() + ALONE.read_bytes()).hexdigest()[:12]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trace-jax" / f"sglang-{digest}"


def sglang_python() -> Path:
    """The Python of the environment, which is built if it is not there; of several callers one builds.

    Raises:
      RuntimeError: there is no Python 3.11, or pip failed; the message has the end of what it said.
    """
    if given := os.environ.get("TRACE_JAX_SGLANG_PYTHON"):
        if not os.access(given, os.X_OK):
            raise RuntimeError(f"TRACE_JAX_SGLANG_PYTHON={given} is no program; unset it to have an environment built")
        return Path(given)
    folder = environment_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system drops it with its process
        if not (folder / _MARKER).exists():
            _build(folder)
    return folder / "bin" / "python"


def _build(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([_python_3_11(), "-m", "venv", str(folder)])
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "-r", str(REQUIREMENTS)])
    _run([*pip, "--no-deps", "-r", str(ALONE)])
    (folder / _MARKER).touch()


def _python_3_11() -> str:
    """SGLang's wheel for a CPU machine is one of Python 3.11."""
    for program in _candidates():
        asked = subprocess.run([program, "-c", "import sys, venv, ensurepip; print(*sys.version_info[:2])"], capture_output=True, text=True)
        if asked.stdout.split() == ["3", "11"]:
            return program
    raise RuntimeError(
        "SGLang's environment needs Python 3.11 with venv, and no python3.11 on PATH has it; install it (Debian: python3.11-venv)"
    )


def _candidates() -> Iterator[str]:
    if sys.version_info[:2] == (3, 11):
        yield sys.executable
    for folder in os.get_exec_path():
        if found := shutil.which("python3.11", path=folder):
            yield found


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{done.stdout[-3000:]}")


if __name__ == "__main__":
    print(sglang_python())
