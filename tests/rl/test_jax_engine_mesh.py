"""The engine on a mesh samples what it samples on one device, with cache and adapters split over the devices."""

import subprocess
import sys

from tests.devices import environment
from tests.model import tiny

# in a process of its own, since the number of devices is set before JAX starts
PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import Mesh
from model import load_pretrained
from rl.engines.jax import JaxEngine
from rl.engines.protocol import Policy, Request
from tests.model import tiny

mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 2, 1), ("data", "fsdp", "expert", "tensor"))
plain = load_pretrained(sys.argv[1])
bank, gate = tiny.bank(plain.config, adapters=3), tiny.gate(4, plain.config)


def sampled(model):
    # two turns of six sessions on four lanes, so that contexts go to the pool and back
    engine = JaxEngine(model, lanes=4, context=48, steps=4, blocks=16, experts=True)
    engine.load(Policy("gated", 1, bank, gate=gate))
    engine.warm_up(["gated"])
    compiled, found = engine.metrics["compiles"], []
    contexts = {str(i): np.append(np.arange(1, 19), i) for i in range(6)}
    for turn in range(2):
        for i, (name, context) in enumerate(contexts.items()):
            engine.submit(Request(name, "gated", context, 6, 1.0, (0, 1, i)))
        turns = {}
        while len(turns) < 6:
            turns |= {c.session: c for c in engine.poll()}
        found += [turns[name] for name in contexts]
        contexts = {name: np.concatenate([context, turns[name].tokens, [5]]) for name, context in contexts.items()}
    assert engine.metrics["compiles"] == compiled and engine.metrics["restored"] > 6 * 16
    assert engine.metrics["prefilled"] < 6 * 25
    return engine, found


_, expected = sampled(plain)
engine, found = sampled(load_pretrained(sys.argv[1], mesh))
for one, other in zip(expected, found, strict=True):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert (np.sort(one.experts, -1) == np.sort(other.experts, -1)).mean() > 0.99
held = engine._policies["gated"].adapters
for name, x in (("cache", engine._cache.layers[0].k), ("pool", engine._pool.layers[0].k), ("adapters", held.a["expert_up"])):
    assert x.addressable_shards[0].data.size < x.size, (name, x.sharding)
bank.a["expert_up"].delete()  # a learner donates its arrays to the next step
assert np.isfinite(np.asarray(held.a["expert_up"])).all()
print("agree")
"""


def test_a_mesh_samples_the_tokens_of_one_device(tmp_path):
    tiny.checkpoint(tmp_path, "qwen3_moe", num_experts=4)
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment(4), capture_output=True, text=True, timeout=400)
    assert "agree" in done.stdout, done.stderr[-3000:]
