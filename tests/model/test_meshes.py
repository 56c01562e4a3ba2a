"""The same model on every mesh: eight virtual devices give the logits and the adapter gradients of one."""

import subprocess
import sys

import pytest

from tests.devices import environment

# in a process of its own, since the number of devices is set before JAX starts
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import Mesh
from model import CausalLM, Routing, load_pretrained, save_pretrained
from model.lora import bank_axes
from model.sharding import partition
from tests.model import tiny

kind, folder = sys.argv[1:]
change = {"num_attention_heads": 8, "remat": True} | ({"num_experts": 8} if "moe" in kind else {})
plain = tiny.model(config=tiny.CONFIGS[kind], **change)
save_pretrained(plain, folder)
x = jnp.asarray(tiny.tokens(8, 12))
segments = jnp.asarray(np.repeat([[1] * 5 + [2] * 6 + [0]], 8, 0))
bank, gate = tiny.bank(plain.config, adapters=3), tiny.gate(4, plain.config)


def run(net, bank):
    graphdef, state = nnx.split(net)

    def loss(factors, state):
        logits = nnx.merge(graphdef, state)(x, None, segments, bank.replace_factors(factors), Routing(gate=gate))
        return jnp.mean(jnp.where(segments[..., None] > 0, logits, 0) ** 2), logits

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(bank.factors, state)


(_, logits), gradients = run(plain, bank)
for names in ({"fsdp": 8}, {"data": 2, "fsdp": 2, "expert": 2}, {"fsdp": 4, "tensor": 2}):
    size = int(np.prod(list(names.values())))
    mesh = Mesh(np.array(jax.devices()[:size]).reshape(tuple(names.values())), tuple(names))
    net = load_pretrained(folder, mesh)
    split = {n for n, w in net.parameters().items() if any(w.sharding.spec)}
    assert {"embed", "layers.q", "layers.o"} <= split, split
    assert ("layers.expert_up" in split) == ("moe" in kind), split
    placed = [
        {n: jax.device_put(y, partition(y.shape, axes[n], mesh)) for n, y in half.items()}
        for half, axes in zip(bank.factors, bank_axes(plain.config), strict=True)
    ]
    (_, got), found = run(net, bank.replace_factors(tuple(placed)))
    for ours, reference in ((got, logits), (found, gradients)):
        ours, reference = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(y)]) for y in (ours, reference))
        error = np.linalg.norm(ours - reference) / np.linalg.norm(reference)
        # float32 sums in another order; recurrent layers make more of them
        assert error < (5e-5 if kind.startswith("qwen3_5") else 1e-5), (names, error)
print(len(jax.devices()), "devices agree")
"""


HYBRIDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5", "qwen3_5_moe")]  # they take minutes


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", *HYBRIDS])
def test_eight_devices_give_the_same_logits_and_gradients(kind, tmp_path):
    env = environment(8)
    run = subprocess.run([sys.executable, "-c", PROGRAM, kind, str(tmp_path)], env=env, capture_output=True, text=True, timeout=280)
    assert "8 devices agree" in run.stdout, run.stderr[-3000:]
