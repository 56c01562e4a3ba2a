"""The suggested micro-batch is what the compiler's own count allows."""

import dataclasses
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from model import CausalLM, init_bank, init_gate
from model.parameters import abstract_parameters
from rl.learner import Learner, LearnerConfig
from tests.devices import environment
from trace_jax.base_model import read_architecture
from trace_jax.config import Config, ModelSection, TrainSection, load_config, override
from trace_jax.errors import InputError
from trace_jax.runtime import fit as fitting
from trace_jax.runtime.fit import device_memory, fit, row_bytes

LENGTH, RANK = 512, 8


def config(**train) -> Config:
    section = TrainSection(**{"pack_length": LENGTH, "rank": RANK, **train})
    return dataclasses.replace(Config(), model=ModelSection(), train=section)


def suggested(memory: float, monkeypatch, **train) -> tuple[int, bool]:
    monkeypatch.setattr(fitting, "_CPU_TOKENS", 1 << 20)  # the memory is to decide, not the cache of a CPU
    found = fit(config(**train), jax.devices()[:1], memory).train
    return found.micro_rows, found.remat


def test_what_the_config_says_stays():
    asked = config(micro_rows=3, remat=True)
    assert fit(asked, jax.devices()) is asked
    assert fit(config(micro_rows=3), jax.devices()).train.micro_rows == 3
    assert fit(config(remat=True), jax.devices()).train.remat is True


def test_a_cpu_gets_as_many_tokens_as_its_cache_likes():
    found = fit(config(pack_length=256, micro_rows=None, remat=None), jax.devices()[:1]).train
    assert (found.micro_rows, found.remat) == (2, False)
    assert 1e8 < device_memory(jax.devices()[0]) < 1e14


def test_a_gpu_that_does_not_tell_its_memory_is_not_taken_for_the_machine():
    def gpu(stats):
        return types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: stats)

    assert device_memory(gpu({"bytes_limit": 63e9})) == 63e9
    for stats in (None, {"bytes_in_use": 1}):
        with pytest.raises(InputError, match="ALLOCATOR=platform keeps no count; set train.micro_rows and train.remat"):
            device_memory(gpu(stats))


def test_less_memory_gives_fewer_rows_and_then_rematerialisation(monkeypatch):
    needed = row_bytes(read_architecture(config()), jnp.dtype(jnp.float32), RANK, LENGTH, Mesh(np.array(jax.devices()[:1]), ("fsdp",)))
    sizes = [suggested(2 * share * needed[False] + 2e7, monkeypatch) for share in (16.5, 4.5, 1.5)]
    assert sizes == [(16, False), (4, False), (1, False)]
    between = needed[True] + needed[False] + 1e7
    assert needed[True] < 0.6 * needed[False] and suggested(between, monkeypatch) == (1, True)
    assert suggested(1.0, monkeypatch) == (1, True)  # the least that there is; the compiler has the last word
    assert suggested(1e8, monkeypatch, micro_rows=64) == (64, True) and suggested(1e11, monkeypatch, micro_rows=64) == (64, False)


@pytest.mark.parametrize("remat", [False, True])
def test_the_bytes_of_a_row_are_those_that_the_compiler_counts(remat):
    architecture = dataclasses.replace(read_architecture(config()), remat=remat)
    key, mesh = jax.random.key(0), Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    bank = jax.eval_shape(lambda: init_bank(architecture, 4, RANK, RANK, key))
    gate = jax.eval_shape(lambda: init_gate(architecture, 5, 0.0, key))

    def temporaries(rows: int) -> int:
        model = CausalLM(architecture, parameters=abstract_parameters(architecture, jnp.float32, mesh))
        lowered = Learner(model, LearnerConfig(micro_rows=rows), bank=bank).lower(gate, LENGTH)["gradient"]
        return lowered.compile().memory_analysis().temp_size_in_bytes

    compiled = (temporaries(16) - temporaries(8)) / 8
    estimate = row_bytes(architecture, jnp.dtype(jnp.float32), RANK, LENGTH, mesh)[remat]
    assert 0.6 * compiled < estimate < 1.7 * compiled


PROGRAM = """
import jax
from tests.trace_jax.runtime.test_fit import config
from trace_jax.config import MeshSection
from trace_jax.runtime.fit import fit
import dataclasses
for axes in ({}, {"data": 2, "fsdp": 2, "tensor": 2}):
    print(fit(dataclasses.replace(config(), mesh=MeshSection(**axes)), jax.devices(), 1e10).train.micro_rows)
"""


def test_a_mesh_gets_rows_for_each_device_that_has_rows_of_its_own():
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(8), capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["8", "4"], done.stderr[-2000:]


def test_the_largest_models_are_counted_without_weights():
    large = override(load_config("quickstart"), [("train.micro_rows", "none"), ("train.remat", "none")])
    folder = "configs/architectures/Qwen3-30B-A3B"
    large = override(large, [("model.path", folder), ("model.dtype", "bfloat16"), ("train.pack_length", "8192")])
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    found = row_bytes(read_architecture(large), jnp.dtype(jnp.bfloat16), 16, 8192, mesh)
    inputs, logits = 48 * 8192 * 2048 * 2, 3 * 4 * 512 * 151_936  # what 48 layers read in bfloat16; a chunk of float32 logits
    assert inputs + logits < found[True] < 10 * (inputs + logits) < found[False]
