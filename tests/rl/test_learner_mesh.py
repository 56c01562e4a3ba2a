"""The learner on meshes and in several processes: what one device computes, to 1e-5 of the gradient's norm."""

import socket
import subprocess
import sys

import pytest

from tests.devices import environment
from tests.model import tiny

# in processes of their own, since the number of devices is set before JAX starts
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

kind, folder, processes, index, port = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
if processes > 1:
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow a SIGTERM
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, index)
from model import Gate, load_pretrained
from rl.learner import Learner, LearnerConfig
from rl.packing import pack
from tests.model import tiny
from tests.rl import tiny as batches


def distance(found, reference):
    found, reference = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(y)]) for y in (found, reference))
    return np.linalg.norm(found - reference) / np.linalg.norm(reference)


def whole(tree):
    def gather(x):
        return np.asarray(jax.jit(lambda x: x, out_shardings=NamedSharding(x.sharding.mesh, PartitionSpec()))(x))

    return jax.tree.map(gather, tree)


config = LearnerConfig(micro_rows=8, learning_rate=1e-2)
found = batches.trajectories(40)
batch = pack(found, np.random.default_rng(1).normal(size=len(found)), lengths=(48,), micro_rows=8)
assert len(batch.tokens) >= 16
plain = load_pretrained(folder)
adapter, bank, gate = tiny.bank(plain.config), tiny.bank(plain.config, adapters=3), tiny.gate(4, plain.config)
size = len(jax.devices())
meshes = [{"fsdp": size}, {"data": size}]
if processes == 1:
    meshes = [{"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 4, "tensor": 2}]
for trained, frozen in ((adapter, None), (gate, bank)):
    one = Learner(plain, config, bank=frozen)
    expected, sums = one.gradient(one.init(trained).params, batch)
    after = one.step(one.init(trained), batch)[0].params
    for names in meshes:
        mesh = Mesh(np.array(jax.devices()).reshape(tuple(names.values())), tuple(names))
        learner = Learner(load_pretrained(folder, mesh), config, bank=frozen)
        state = learner.init(trained)
        gradient, found = learner.gradient(state.params, batch)
        assert np.isclose(found["loss"], sums["loss"], rtol=1e-5), (names, found["loss"], sums["loss"])
        error = distance(whole(gradient), expected)
        assert error < (5e-5 if kind == "qwen3_5" else 1e-5), (names, error)  # recurrent layers make more of the last bits
        if frozen is None and "fsdp" in names:
            held = sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(state.opt_state))
            assert held < sum(x.size for x in jax.tree.leaves(state.opt_state)) / 1.2, (names, held)
        state, metrics = learner.step(state, batch)
        moved = distance(whole(state.params), after)
        assert moved < 1e-4 and np.isfinite(metrics["loss"]), (names, moved)
        np.testing.assert_allclose(learner.logprobs(state.params, batch), one.logprobs(after, batch), atol=1e-3)
print(size, "devices agree", flush=True)
"""


def start(kind, folder, processes, index, devices, port):
    words = [sys.executable, "-c", PROGRAM, kind, str(folder), str(processes), str(index), str(port)]
    return subprocess.Popen(words, env=environment(devices), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in (("qwen3", 2), ("qwen3_moe", 1), ("qwen3_5", 1), ("qwen3_moe", 4))]


@pytest.mark.parametrize("kind, processes", [("qwen3", 1), *SLOW])
def test_loss_gradient_and_update_are_those_of_one_device(kind, processes, tmp_path):
    tiny.checkpoint(tmp_path, kind, **({"num_experts": 8} if "moe" in kind else {}))
    port = free_port()
    running = [start(kind, tmp_path, processes, index, 8 // processes if processes == 1 else 1, port) for index in range(processes)]
    for process in running:
        out, error = process.communicate(timeout=280)
        assert "devices agree" in out, error[-3000:]
