"""Every layer holds something, the necessary ones hold everything, and programs that harm what they reach reach nothing outside a cage."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.envs import ablation, cage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
ROOT = pathlib.Path(__file__).parents[2]


def python(*arguments):
    """Output of an interpreter that may make a cage, which pytest's own with its threads may not."""
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=ablation.TIMEOUT_S + 30)
    if done.returncode == cage.UNMADE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    return done.stdout


CAGED = """
import os, sys
from tests.envs import cage

def inside():
    victim = os.fork()
    if not victim:
        import time; time.sleep(60)
    killer = os.fork()
    if not killer:
        os.kill(-1, 9)
        os._exit(0)
    try:
        open(sys.argv[1] + "/written", "w")
    except OSError as error:
        print(error.strerror, os.waitpid(killer, 0)[1], os.waitpid(victim, 0)[1], os.path.exists(f"/proc/{sys.argv[2]}"), flush=True)
    return 0

sys.exit(cage.run(inside, 30))
"""


def test_nothing_gets_out_of_the_cage(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as outside:
        found = python("-c", CAGED, str(tmp_path), str(outside.pid))
        assert found == "Read-only file system 0 9 False\n" and outside.poll() is None
        outside.kill()
    assert not os.listdir(tmp_path)


def test_nothing_runs_outside_a_cage():
    with pytest.raises(RuntimeError, match="run in a cage only"):
        ablation.measure(["all"])


@pytest.mark.slow
def test_what_each_layer_lets_through():
    found = json.loads(python("-m", "tests.envs.ablation", "--json", "none", "landlock", "seccomp", "required", "all"))
    through = {name: {program for program, outcome in outcomes.items() if outcome == "THROUGH"} for name, outcomes in found.items()}
    assert len(through["none"]) > 60
    assert {"tcp", "read a secret", "fork", "end the host", "stop the host", "attach to the host", "end the zygote"} <= through["none"]
    if "landlock" in found:  # some kernels have none
        assert {"tcp", "fork"} <= through["landlock"] < through["none"]
        assert not {"read a secret", "write a file"} & through["landlock"]
    assert not through["seccomp"] | through["required"] | through["all"]
    for name in ("required", "all"):
        assert {ablation.cell(program, outcome) for program, outcome in found[name].items()} == {"."}
