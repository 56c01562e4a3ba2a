"""What is published: the sdist and the wheel, installed where nothing of the checkout is, and used from a folder that is in the way."""

import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGES = ("trace_jax", "rl", "model", "envs")


def call(*command: str | pathlib.Path, **options) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_runs_the_quickstart_from_a_folder_with_modules_of_our_names(tmp_path):
    python, checkout, dist = tmp_path / "env/bin/python", tmp_path / "checkout", tmp_path / "dist"
    call("git", "clone", "-q", ROOT, checkout)
    tracked = call("git", "-C", checkout, "ls-files").splitlines()
    call(sys.executable, "-m", "venv", tmp_path / "env")
    call(python, "-m", "pip", "install", "-q", "build")
    told = call(python, "-m", "build", "--outdir", dist, checkout)
    assert "absent from the `packages`" not in told
    (sdist,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")

    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not [name for name in tracked if not name.startswith(".") and name not in held]
    moved = [
        name if name.startswith(PACKAGES) else f"trace_jax/{name}"
        for name in tracked
        if name.startswith((*PACKAGES, "configs/", "prompts/"))
    ]
    with zipfile.ZipFile(wheel) as archive:
        assert not set(moved) - set(archive.namelist())

    call(python, "-m", "pip", "install", "-q", wheel)
    folder = tmp_path / "empty"
    (folder / "envs/desk").mkdir(parents=True)
    (folder / "model.py").write_text("raise SystemExit('the wrong model')\n")
    (folder / "envs/__init__.py").write_text("raise SystemExit('the wrong envs')\n")
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX_", "XLA_"))}
    for words in (["--help"], ["run", "--config=quickstart", "--workdir=trace-run"]):
        call(python.with_name("trace-jax"), *words, cwd=folder, env=outside)
    assert (folder / "trace-run/report.html").stat().st_size > 100_000
    call(python, "-m", "trace_jax", "report", "--workdir=trace-run", cwd=folder, env=outside)
