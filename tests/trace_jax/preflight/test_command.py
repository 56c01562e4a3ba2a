"""The programs that preflight compiles are those that a run executes, on a mesh, without a weight."""

import importlib.util
import json
import os
import signal
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
from trace_jax.runtime.mesh import make_mesh
from trace_jax.preflight.command import lower_all
from trace_jax.preflight.program import compile_program
from model import read_config

folder, *overrides = sys.argv[1:]
sizes = [("train.micro_rows", "8"), ("train.rank", "2"), ("rollout.lanes", "8")]
config = load_config("quickstart", [("model.path", folder), *sizes, *(o.split("=") for o in overrides)])
mesh = make_mesh(config.mesh, jax.devices())
for name, lowered, flops, beside in lower_all(config, read_config(folder), mesh):
    assert beside > 0
    program = compile_program(name, lowered)
    counted = program.dot_flops * mesh.size
    print(name, flops * mesh.size, counted, program.peak, sum(c.count for c in program.collectives.values()), sep="|")
"""


needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plugin is not installed: pip install 'trace-jax[gpu]'"
)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'trace-jax[tpu]'"
)


def command(config: str, topology: str | None, *overrides: str) -> list[str]:
    flags = [f"--config={config}", *([f"--topology={topology}"] if topology else []), *(f"--config.{text}" for text in overrides)]
    return [sys.executable, "-m", "trace_jax", "preflight", *flags]


def quick_environment() -> dict[str, str]:
    # the cache of compiled programs does not serve devices that are not there
    return os.environ | {"JAX_OPTIMIZATION_LEVEL": "O0", "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": "."}


def preflight(config: str, topology: str | None, *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(config, topology, *overrides), env=quick_environment(), capture_output=True, text=True, timeout=7200)


SLOW = pytest.param("qwen3_5_moe", ["mesh.expert=2", "mesh.data=2"], marks=pytest.mark.slow)


@pytest.mark.parametrize("kind, mesh", [("qwen3", ["mesh.tensor=2"]), SLOW])
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


@needs_libtpu
@pytest.mark.parametrize("topology, mesh", [("v5p:2x2x1", "mesh.expert=2")])
def test_the_command_compiles_for_a_tpu_that_is_not_there(topology, mesh, tmp_path):
    sizes = {"hidden_size": 128, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 128}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen3_moe", **tiny.BASES["qwen3_moe"], **sizes, "num_experts": 4, "num_hidden_layers": 5})
    )
    done = preflight("quickstart", topology, f"model.path={tmp_path}", "train.micro_rows=4", "rollout.lanes=4", "train.rank=4", mesh)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "All 4 programs fit." in done.stdout and "kernel gmm" in done.stdout and "kernel splash" in done.stdout
    assert "h x 4 devices = " in done.stdout and "TPU v5p in " in done.stdout
    told = [line for line in done.stderr.splitlines() if line.startswith("compiling ")]
    assert told[0].startswith("compiling 1 of 4, adapter gradient: 0 s") and told[-1].startswith("compiling 4 of 4, decode")
    assert len(told) == len(done.stderr.splitlines())  # and nothing else


def cudnn() -> bool:
    try:
        return importlib.util.find_spec("nvidia.cudnn") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@needs_cuda
def test_rows_of_one_trajectory_attend_with_cudnn_on_a_gpu_that_is_not_there():
    done = preflight("quickstart", "h100:1", "model.dtype=bfloat16", "train.packing=false")
    if not cudnn():
        assert done.returncode == 2 and "cuDNN not found" in done.stderr and "pip install 'trace-jax[gpu]'" in done.stderr
        return
    assert done.returncode == 0, done.stderr[-3000:]
    assert "All 4 programs fit." in done.stdout and "kernel __cudnn$fmhaSoftmaxBackward" in done.stdout
    assert "triton" not in done.stdout


@needs_libtpu
def test_ctrl_c_ends_a_compilation_at_once(tmp_path):
    words = command("quickstart", "v5e:2x2")
    process = subprocess.Popen(words, env=quick_environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr.readline().startswith("compiling 1 of 4")
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate(timeout=60)[1] and process.returncode == 130


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("name", ["tau2_qwen3_30b_a3b", "swebench_qwen3_6_27b"])
def test_a_shipped_config_fits_its_topology(name):
    done = preflight(name, None)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "All 4 programs fit." in done.stdout


@pytest.mark.slow
@needs_libtpu
def test_a_topology_that_is_too_small_is_told_what_to_change():
    done = preflight("tau2_qwen3_30b_a3b", "v6e:2x2")
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert "does not fit" in done.stdout and "more chips" in done.stdout


def test_a_missing_topology_is_one_line(capsys):
    assert cli.main(["preflight", "--config=quickstart"]) == 2
    error = capsys.readouterr().err
    assert "--topology is missing" in error and error.count("\n") == 1


def test_an_unknown_topology_lists_what_there_is(capsys):
    assert cli.main(["preflight", "--config=quickstart", "--topology=v99:2x2"]) == 2
    error = capsys.readouterr().err
    assert "v99:2x2" in error and "v5p" in error
