"""The programs that preflight compiles are those that a run executes, on a mesh, without a weight."""

import json
import subprocess
import sys

import pytest

from tests.devices import environment
from tests.model import tiny
from trace_jax import cli

PROGRAM = """
import sys
import jax
from trace_jax.config import load_config
from trace_jax.mesh import make_mesh
from trace_jax.preflight.command import lower_all
from trace_jax.preflight.program import compile_program
from model import read_config

folder, *overrides = sys.argv[1:]
sizes = [("train.micro_rows", "8"), ("train.rank", "2"), ("rollout.lanes", "8")]
config = load_config("quickstart", [("model.path", folder), *sizes, *(o.split("=") for o in overrides)])
mesh = make_mesh(config.mesh, jax.devices())
for name, lowered, flops in lower_all(config, read_config(folder), mesh):
    program = compile_program(name, lowered)
    counted = program.dot_flops * mesh.size
    print(name, flops, counted, program.peak, sum(c.count for c in program.collectives.values()), sep="|")
"""


@pytest.mark.parametrize("kind, mesh", [("qwen3", ["mesh.tensor=2"]), ("qwen3_5_moe", ["mesh.expert=2", "mesh.data=2"])])
def test_all_steps_compile_for_a_mesh_and_count_what_they_compute(kind, mesh, tmp_path):
    config = tiny._TORCH[kind][0](**tiny.BASES[kind] | ({"num_experts": 8} if "moe" in kind else {}))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    words = [sys.executable, "-c", PROGRAM, str(tmp_path), *mesh]
    done = subprocess.run(words, env=environment(8), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {line.split("|")[0]: [float(x) for x in line.split("|")[1:]] for line in done.stdout.splitlines() if "|" in line}
    assert list(found) == ["adapter gradient", "adapter update", "gate gradient", "decode, 16 tokens"]
    for name in ("adapter gradient", "gate gradient"):
        flops, counted, peak, collectives = found[name]
        assert 0.5 < counted / flops < 4, (name, flops, counted)  # tiny matrices: tiles, and replicated work where an axis does not divide
        assert peak > 0 and collectives > 0


def test_a_missing_topology_is_one_line(capsys):
    assert cli.main(["preflight", "--config=quickstart"]) == 2
    error = capsys.readouterr().err
    assert "--topology is missing" in error and error.count("\n") == 1


def test_an_unknown_topology_lists_what_there_is(capsys):
    assert cli.main(["preflight", "--config=quickstart", "--topology=v99:2x2"]) == 2
    error = capsys.readouterr().err
    assert "v99:2x2" in error and "v5p" in error
