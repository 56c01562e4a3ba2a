"""What must not change a token's logits: packing, padding, the kind of loop, recomputation, the cache, the mesh."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import Config, Qwen3, Routing, init_cache, token_logprobs
from tests.model import tiny


def test_packed_rows_equal_their_parts():
    model = tiny.model()
    parts = [tiny.tokens(1, n, seed=n) for n in (9, 1, 14)]
    row = np.concatenate([*parts, np.zeros((1, 4), int)], axis=1)
    segments = np.repeat([1, 2, 3, 0], [9, 1, 14, 4])[None]
    packed = tiny.logits(model, jnp.asarray(row), segment_ids=jnp.asarray(segments))
    alone = jnp.concatenate([tiny.logits(model, jnp.asarray(part)) for part in parts], axis=1)
    np.testing.assert_allclose(packed[:, :24], alone, atol=1e-5 * float(jnp.abs(alone).max()))


def test_padding_tokens_do_not_change_log_probs():
    model, x = tiny.model(), tiny.tokens(2, 16)
    segments = jnp.asarray([[1] * 10 + [0] * 6, [0] * 3 + [1] * 13])
    other = np.where(np.asarray(segments) > 0, x, tiny.tokens(2, 16, seed=5))
    one, two = (
        token_logprobs(model, tiny.forward(model, jnp.asarray(y), segment_ids=segments).hidden[:, :-1], jnp.asarray(x[:, 1:]))[0]
        for y in (x, other)
    )
    real = np.asarray((segments[:, :-1] > 0) & (segments[:, 1:] > 0))
    np.testing.assert_array_equal(np.asarray(one)[real], np.asarray(two)[real])
    assert (x != other).any()


@pytest.mark.parametrize("change", [{"unroll": 1}, {"unroll": 3}, {"remat": True}, {"unroll": 1, "remat": True}])
def test_the_kind_of_loop_changes_neither_logits_nor_gradients(change):
    x = jnp.asarray(tiny.tokens(2, 12))
    _, state = nnx.split(tiny.model())

    def run(**change):
        graphdef, _ = nnx.split(tiny.model(**change))
        return jax.value_and_grad(lambda state: jnp.mean(nnx.merge(graphdef, state)(x) ** 2))(state)

    (value, grads), (expected, expected_grads) = run(**change), run()
    assert np.isclose(value, expected, rtol=1e-6)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected_grads))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale), grads, expected_grads)


@pytest.mark.parametrize("routed", [False, True])
def test_ragged_chunks_through_the_cache_equal_one_pass(routed):
    """Each call brings another number of tokens per row, none for some; pads carry positions of every kind."""
    model = tiny.model()
    rows = Routing(jnp.asarray([[0.0, 1, 0], [0, 0, 1], [0.2, 0.5, 0.3]])) if routed else None
    bank = tiny.bank(adapters=2) if routed else None
    x = tiny.tokens(3, 20)
    expected = tiny.logits(model, jnp.asarray(x), adapters=bank, routing=rows)
    cache, done, got = init_cache(model.config, 3, 24), np.zeros(3, int), np.zeros_like(expected)
    step = jax.jit(lambda x, p, s, c: model.forward(x, p, s, bank, rows, c))
    random = np.random.default_rng(0)
    while (done < 20).any():
        counts = np.minimum(random.integers(0, 6, 3), 20 - done)
        chunk, positions, segments = tiny.tokens(3, 5, seed=9), random.integers(0, 24, (3, 5)), np.zeros((3, 5), int)
        for row, count in enumerate(counts):
            at = slice(5 - count, 5) if row == 0 else slice(0, count)  # left padding in row 0, right padding in the others
            chunk[row, at], positions[row, at], segments[row, at] = x[row, done[row] :][:count], done[row] + np.arange(count), 1
        out = step(*map(jnp.asarray, (chunk, positions, segments)), cache)
        cache, logits = out.cache, np.asarray(model.unembed(out.hidden))
        for row, count in enumerate(counts):
            got[row, done[row] :][:count] = logits[row][segments[row] > 0]
        done += counts
    np.testing.assert_allclose(got, expected, atol=2e-5 * float(jnp.abs(expected).max()))
    untouched = np.asarray(cache.k)[:, :, 20:]
    assert not untouched.any()


def test_a_lane_is_refilled_by_starting_at_position_zero():
    model, x = tiny.model(), jnp.asarray(tiny.tokens(1, 6))
    stale = jax.tree.map(lambda c: c + 3.0, init_cache(model.config, 1, 10))
    hidden = tiny.forward(model, x, jnp.arange(6)[None], cache=stale).hidden
    np.testing.assert_allclose(model.unembed(hidden), tiny.logits(model, x), atol=2e-5 * float(jnp.abs(tiny.logits(model, x)).max()))


def test_bfloat16_follows_float32():
    net, x = tiny.model(), jnp.asarray(tiny.tokens(2, 16))
    graphdef, state = nnx.split(net)
    half = nnx.merge(graphdef, jax.tree.map(lambda w: w.astype(jnp.bfloat16), state))
    logits = half(x)
    assert logits.dtype == jnp.float32
    assert half.forward(x).hidden.dtype == jnp.bfloat16
    assert np.corrcoef(np.ravel(logits), np.ravel(net(x)))[0, 1] > 0.99


def test_wrong_calls_say_what_is_missing():
    model, x = tiny.model(), jnp.asarray(tiny.tokens(1, 4))
    for message, arguments in {
        "positions": {"cache": init_cache(model.config, 1, 8)},
        "needs a routing": {"adapters": tiny.bank(adapters=2)},
        "needs adapters": {"routing": Routing(jnp.ones((1, 3)))},
        "3 slots, the bank has 2": {"adapters": tiny.bank(), "routing": Routing(jnp.ones((1, 3)))},
        "neither weights nor a gate": {"adapters": tiny.bank(), "routing": Routing()},
        "both a gate and weights": {"adapters": tiny.bank(), "routing": Routing(jnp.ones((1, 2)), gated=jnp.ones(1, bool))},
        "mode 'best'": {"adapters": tiny.bank(), "routing": Routing(jnp.ones((1, 2)), mode="best")},
    }.items():
        with pytest.raises(ValueError, match=message):
            model.forward(x, **arguments)


def test_random_initialisation_has_the_shapes_of_the_specification():
    config = Config(31, 16, 24, 2, 2, 1, head_dim=8, attention_bias=True)
    parameters = Qwen3(config, nnx.Rngs(0)).parameters()
    assert parameters["layers.gate"].shape == (2, 16, 24)
    assert parameters["layers.q_bias"].shape == (2, 16)
    assert abs(float(parameters["embed"].std()) - 0.02) < 2e-3
    with pytest.raises(ValueError, match="rngs"):
        Qwen3(config)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from flax import nnx
from model import Qwen3, load_pretrained, save_pretrained
from tests.model import tiny
import sys
plain = tiny.model(num_attention_heads=8)
save_pretrained(plain, sys.argv[1])
x = jnp.asarray(tiny.tokens(2, 12))
for shape, names in (((8,), ("fsdp",)), ((2, 2, 2), ("data", "fsdp", "tensor"))):
    net = load_pretrained(sys.argv[1], Mesh(np.array(jax.devices()).reshape(shape), names))
    split = {n: w.sharding.spec for n, w in net.parameters().items() if any(w.sharding.spec)}
    assert "layers.down" in split and "embed" in split, split
    graphdef, state = nnx.split(net)
    np.testing.assert_allclose(jax.jit(lambda s: nnx.merge(graphdef, s)(x))(state), plain(x), atol=1e-4)
print(len(jax.devices()), "devices agree")
"""


def test_eight_devices_give_the_same_logits(tmp_path):
    import os

    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "16", "PYTHONPATH": "."}
    run = subprocess.run([sys.executable, "-c", SHARDED, str(tmp_path)], env=env, capture_output=True, text=True, timeout=240)
    assert "8 devices agree" in run.stdout, run.stderr[-2000:]
