"""What a config of one machine of eight GPUs computes, on eight virtual devices: the step of one device."""

import subprocess
import sys

import pytest

from tests.devices import environment
from tests.model import tiny

# in a process of its own, since the number of devices is set before JAX starts
PROGRAM = """
import sys
import jax, numpy as np
from model import load_pretrained
from rl.learner import Learner, LearnerConfig
from rl.packing import pack
from tests.model import tiny
from tests.rl import tiny as batches
from trace_jax.config import load_config
from trace_jax.runtime.mesh import make_mesh

name, folder, packed = sys.argv[1], sys.argv[2], sys.argv[3] == "packed"
config = load_config(name)
mesh = make_mesh(config.mesh, jax.devices())
print(dict(mesh.shape))
found = batches.trajectories(16)
batch = pack(found, np.random.default_rng(1).normal(size=16), lengths=(48,), micro_rows=8, packed=packed)
after = []
for devices in (None, mesh):
    model = load_pretrained(folder, devices, remat=bool(config.train.remat), packed=packed)
    learner = Learner(model, LearnerConfig(micro_rows=8, learning_rate=1e-2))
    state, metrics = learner.step(learner.init(tiny.bank(model.config)), batch)
    after.append((np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)]), metrics["loss"], metrics["grad_norm"]))
one, eight = after
np.testing.assert_allclose(eight[1:], one[1:], rtol=2e-5)
assert np.linalg.norm(eight[0] - one[0]) < 1e-4 * np.linalg.norm(one[0])
print("eight devices agree")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, kind, rows, mesh",
    [
        ("quickstart", "qwen3", "not packed", "'fsdp': 8"),
        ("tau2_qwen3_30b_a3b_h100x8", "qwen3_moe", "packed", "'expert': 8"),
        ("swebench_qwen3_6_27b_h100x8", "qwen3_5", "packed", "'tensor': 4"),
    ],
)
def test_a_step_is_that_of_one_device(config, kind, rows, mesh, tmp_path):
    tiny.checkpoint(tmp_path, kind, **({"num_experts": 8} if "moe" in kind else {}))
    words = [sys.executable, "-c", PROGRAM, config, str(tmp_path), rows]
    done = subprocess.run(words, env=environment(8), capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "eight devices agree" in done.stdout, done.stderr[-3000:]
    assert mesh in done.stdout
