"""The benchmark for GPUs, on a CPU."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.devices import environment

SCRIPT = pathlib.Path(__file__).with_name("gpu_speed.py")


@pytest.mark.slow
@pytest.mark.parametrize("devices, words", [(1, ["--unpacked"]), (8, ["--fsdp=8", "--remat"])])
def test_the_small_size_runs_on_a_cpu(devices, words):
    command = [sys.executable, str(SCRIPT), "--tiny", "--peak=1e12", *words]
    done = subprocess.run(command, env=environment(devices), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == devices and 0 < found["mfu"] < 1 and found["mfu"] == pytest.approx(found["flops"] / 1e12)
    assert all(rate > 0 for rate in found["decode"].values()) and set(found["decode"]) == {"1", "8"}


def test_without_an_accelerator_it_says_what_to_do():
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment(1) | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True)
    assert done.returncode == 1 and "--tiny tries the script on a CPU" in done.stderr
