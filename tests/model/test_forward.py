"""What must not change a token's logits: packing, padding, the kind of loop, recomputation, the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import CausalLM, Config, Routing, init_cache, token_logprobs
from model.causal_lm import plan_runs
from tests.model import tiny

KINDS = pytest.mark.parametrize("kind", tiny.CONFIGS)


@KINDS
def test_packed_rows_equal_their_parts(kind):
    model = tiny.model(config=tiny.CONFIGS[kind])
    parts = [tiny.tokens(1, n, seed=n) for n in (9, 1, 14)]
    row = np.concatenate([*parts, np.zeros((1, 4), int)], axis=1)
    segments = np.repeat([1, 2, 3, 0], [9, 1, 14, 4])[None]
    packed = tiny.logits(model, jnp.asarray(row), segment_ids=jnp.asarray(segments))
    rows = np.concatenate([np.pad(part, ((0, 0), (0, 14 - part.shape[1]))) for part in parts])
    real = np.arange(14) < [[part.shape[1]] for part in parts]
    alone = tiny.logits(model, jnp.asarray(rows), segment_ids=jnp.asarray(real, jnp.int32))[real]
    np.testing.assert_allclose(packed[0, :24], alone, atol=1e-5 * float(jnp.abs(alone).max()))


@KINDS
def test_padding_tokens_do_not_change_log_probs(kind):
    model, x = tiny.model(config=tiny.CONFIGS[kind]), tiny.tokens(2, 16)
    segments = jnp.asarray([[1] * 10 + [0] * 6, [0] * 3 + [1] * 13])
    other = np.where(np.asarray(segments) > 0, x, tiny.tokens(2, 16, seed=5))
    one, two = (
        token_logprobs(model, tiny.forward(model, jnp.asarray(y), segment_ids=segments).hidden[:, :-1], jnp.asarray(x[:, 1:]))[0]
        for y in (x, other)
    )
    real = np.asarray((segments[:, :-1] > 0) & (segments[:, 1:] > 0))
    np.testing.assert_array_equal(np.asarray(one)[real], np.asarray(two)[real])
    assert (x != other).any()


LOOPS = {
    "qwen3": [{"unroll": 1}, {"unroll": 3}, {"remat": True}, {"unroll": 1, "remat": True}],
    "qwen3_moe": [{"unroll": 1, "remat": True}],
    "qwen3_5": [{"unroll": 4, "num_hidden_layers": 8, "layer_types": 2 * tiny.CONFIGS["qwen3_5"].layer_types, "remat": True}],
    "qwen3_5_moe": [{"remat": True}],
}


def marks(kind: str) -> list:
    return [pytest.mark.slow] if kind.startswith("qwen3_5") else []  # each compiles for more than half a minute


@pytest.mark.parametrize("kind, change", [pytest.param(k, c, marks=marks(k)) for k, changes in LOOPS.items() for c in changes])
def test_the_kind_of_loop_changes_neither_logits_nor_gradients(kind, change):
    x = jnp.asarray(tiny.tokens(2, 12))
    size = {name: value for name, value in change.items() if name in ("num_hidden_layers", "layer_types")}
    _, state = nnx.split(tiny.model(config=tiny.CONFIGS[kind], **size))

    def run(**change):
        graphdef, _ = nnx.split(tiny.model(config=tiny.CONFIGS[kind], **size | change))
        return jax.jit(jax.value_and_grad(lambda state: jnp.mean(nnx.merge(graphdef, state)(x) ** 2)))(state)

    (value, grads), (expected, expected_grads) = run(**change), run(unroll=8)
    assert np.isclose(value, expected, rtol=1e-6)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected_grads))
    limit = scale * (5e-5 if kind.startswith("qwen3_5") else 1e-5)  # eight recurrent layers make more of the last bits
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=limit), grads, expected_grads)


@pytest.mark.parametrize("kind, routed", [("qwen3", False), *((kind, True) for kind in tiny.CONFIGS)])
def test_ragged_chunks_through_the_cache_equal_one_pass(kind, routed):
    """Each call brings another number of tokens per row, none for some; pads carry positions of every kind."""
    model = tiny.model(config=tiny.CONFIGS[kind])
    rows = Routing(jnp.asarray([[0.0, 1, 0], [0, 0, 1], [0.2, 0.5, 0.3]])) if routed else None
    bank = tiny.bank(model.config, adapters=2) if routed else None
    x = tiny.tokens(3, 20)
    expected = tiny.logits(model, jnp.asarray(x), adapters=bank, routing=rows)
    cache, done, got = init_cache(model.config, 3, 24), np.zeros(3, int), np.zeros_like(expected)
    step = jax.jit(lambda x, p, s, c: model.forward(x, p, s, bank, rows, c))
    random = np.random.default_rng(0)
    while (done < 20).any():
        counts = np.minimum(random.integers(0, 6, 3), 20 - done)
        chunk, positions, segments = tiny.tokens(3, 5, seed=9), random.integers(0, 24, (3, 5)), np.zeros((3, 5), int)
        for row, count in enumerate(counts):
            # left padding in row 0, where no layer is recurrent; right padding in the others
            at = slice(5 - count, 5) if row == 0 and not cache.recurrent else slice(0, count)
            chunk[row, at], positions[row, at], segments[row, at] = x[row, done[row] :][:count], done[row] + np.arange(count), 1
        out = step(*map(jnp.asarray, (chunk, positions, segments)), cache)
        cache, logits = out.cache, np.asarray(model.unembed(out.hidden))
        for row, count in enumerate(counts):
            got[row, done[row] :][:count] = logits[row][segments[row] > 0]
        done += counts
    np.testing.assert_allclose(got, expected, atol=2e-5 * float(jnp.abs(expected).max()))
    assert not any(np.asarray(entry.k)[:, :, 20:].any() for entry in cache.layers if hasattr(entry, "k"))


@KINDS
def test_a_lane_is_refilled_by_starting_at_position_zero(kind):
    model, x = tiny.model(config=tiny.CONFIGS[kind]), jnp.asarray(tiny.tokens(1, 6))
    empty = init_cache(model.config, 1, 10)
    stale = jax.tree.map(lambda c: c + 3.0, empty)
    hidden, again = (tiny.forward(model, x, jnp.arange(6)[None], cache=cache).hidden for cache in (empty, stale))
    np.testing.assert_allclose(again, hidden, atol=1e-6 * float(jnp.abs(hidden).max()))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_bfloat16_follows_float32(kind):
    net, x = tiny.model(config=tiny.CONFIGS[kind]), jnp.asarray(tiny.tokens(2, 16))
    graphdef, state = nnx.split(net)
    half = nnx.merge(graphdef, jax.tree.map(lambda w: w.astype(jnp.bfloat16), state))
    logits = tiny.logits(half, x)
    assert logits.dtype == jnp.float32
    assert tiny.forward(half, x).hidden.dtype == jnp.bfloat16
    assert np.corrcoef(np.ravel(logits), np.ravel(tiny.logits(net, x)))[0, 1] > 0.98


@pytest.mark.parametrize("kind", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def test_given_experts_are_taken_instead_of_the_routers(kind):
    model, x = tiny.model(config=tiny.CONFIGS[kind]), jnp.asarray(tiny.tokens(2, 9))
    out = tiny.forward(model, x, collect=("experts",))
    layers, k = model.config.count("sparse"), model.config.num_experts_per_tok
    assert out.experts.shape == (2, 9, layers, k)
    again = tiny.forward(model, x, experts=out.experts, collect=("experts",))
    np.testing.assert_array_equal(again.experts, out.experts)
    np.testing.assert_allclose(again.hidden, out.hidden, atol=1e-6)
    other = tiny.forward(model, x, experts=(out.experts + 1) % model.config.num_experts, collect=("experts",))
    assert float(jnp.abs(other.hidden - out.hidden).max()) > 0.1


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ("aaaa", [(0, 1, 4)]),
        ("dddadddaddda", [(0, 4, 3)]),
        ("adddddd", [(0, 1, 1), (1, 1, 6)]),
        ("ababc", [(0, 2, 2), (4, 1, 1)]),
        ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ],
)
def test_layers_run_in_the_longest_repeated_blocks(kinds, expected):
    assert plan_runs(kinds) == expected


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
    parameters = CausalLM(config, nnx.Rngs(0)).parameters()
    assert parameters["layers.gate"].shape == (2, 16, 24)
    assert parameters["layers.q_bias"].shape == (2, 16)
    assert abs(float(parameters["embed"].std()) - 0.02) < 2e-3
    with pytest.raises(ValueError, match="rngs"):
        CausalLM(config)
