import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import Routing, init_gate, stack_banks
from rl.engines.jax import JaxEngine
from rl.engines.jax.sampler import cumulate, sample, session_key
from rl.engines.protocol import EngineError, Policy, Request
from tests.model import tiny as backbones
from tests.rl import tiny

VOCAB = tiny.CONFIG.vocab_size
CONTEXT = 48


@functools.cache
def bank():
    return stack_banks([tiny.bank(seed=1), tiny.bank(seed=2)])


@functools.cache
def gate():
    kernel = jax.random.normal(jax.random.key(3), init_gate(tiny.CONFIG, 3, 0.0, jax.random.key(0)).kernel.shape)
    return dataclasses.replace(init_gate(tiny.CONFIG, 3, 0.0, jax.random.key(0)), kernel=kernel)


def policies() -> dict[str, Policy]:
    return {
        "base": Policy("base", 1),
        "first": Policy("first", 2, bank(), np.array([0, 1, 0])),
        "second": Policy("second", 3, bank(), np.array([0, 0, 1])),
        "half": Policy("half", 4, bank(), np.array([0, 0.5, 0.5])),
        "gated": Policy("gated", 5, bank(), gate=gate()),
    }


def engine(lanes=4, **options) -> JaxEngine:
    options = {"context": CONTEXT, "steps": 5, "rows": 2, "chunk": 4} | options
    e = JaxEngine(tiny.model(), lanes=lanes, **options)
    for policy in policies().values():
        e.load(policy)
    return e


def request(session="a", policy="base", tokens=(1, 2, 3), max_tokens=6, temperature=1.0, key=(0, 1, 2), stop=()):
    return Request(session, policy, np.array(tokens, np.int32), max_tokens, temperature, key, stop)


def logprobs_of(policy: str, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """[T, V]: the oracle, one uncached forward of the whole context."""
    p = policies()[policy]
    routing = None
    if p.adapters is not None:
        weights = None if p.weights is None else jnp.asarray(p.weights, jnp.float32)[None]
        routing = Routing(weights=weights, gate=p.gate)
    logits = tiny.model()(jnp.asarray(tokens)[None], adapters=p.adapters, routing=routing)[0]
    return np.asarray(jax.nn.log_softmax(logits / (temperature or 1.0), axis=-1))


def draw(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def run(e: JaxEngine) -> dict:
    found = {}
    while not found:
        found |= {c.session: c for c in e.poll()}
    return found


def test_logprobs_equal_an_uncached_forward_for_all_policies_side_by_side():
    e = engine(lanes=4)
    requests = [
        request(f"{name}", name, draw(i, 5 + 4 * i), 9, temperature, (0, i, 0))
        for i, (name, temperature) in enumerate([("base", 1.0), ("first", 0.7), ("second", 1.0), ("half", 1.3), ("gated", 1.0)])
    ]
    for r, c in zip(requests, e.generate(requests), strict=True):
        assert c.finish == "length" and len(c.tokens) == 9 and c.version == policies()[r.policy].version
        whole = np.concatenate([r.tokens, c.tokens])
        oracle = logprobs_of(r.policy, whole, r.temperature)[len(r.tokens) - 1 : -1]
        np.testing.assert_allclose(c.logprobs, oracle[np.arange(9), c.tokens], atol=2e-5)
    logprobs = {name: logprobs_of(name, draw(0, 9), 1.0) for name in policies()}
    assert all(np.abs(logprobs["base"] - logprobs[name]).max() > 0.05 for name in logprobs if name != "base")


def test_greedy_takes_the_likeliest_token_and_gives_its_logprob_at_temperature_one():
    e = engine()
    r = request(tokens=draw(3, 7), temperature=0.0, max_tokens=8)
    (c,) = e.generate([r])
    oracle = logprobs_of("base", np.concatenate([r.tokens, c.tokens]), 0.0)[6:-1]
    assert c.tokens.tolist() == oracle.argmax(-1).tolist()
    np.testing.assert_allclose(c.logprobs, oracle.max(-1), atol=2e-5)


def test_a_second_turn_computes_only_what_is_new():
    e = engine()
    first = request(tokens=draw(4, 12), max_tokens=5)
    e.submit(first)
    c = run(e)["a"]
    computed = e.metrics["prefilled"]
    assert computed == 11
    context = np.concatenate([first.tokens, c.tokens, draw(5, 4)])
    e.submit(request(tokens=context, max_tokens=5))
    d = run(e)["a"]
    assert e.metrics["prefilled"] - computed == 4  # the last sampled token and three of the four new ones
    oracle = logprobs_of("base", np.concatenate([context, d.tokens]), 1.0)[len(context) - 1 : -1]
    np.testing.assert_allclose(d.logprobs, oracle[np.arange(5), d.tokens], atol=2e-5)
    once = engine().generate([request(tokens=context, max_tokens=5)])[0]
    assert once.tokens.tolist() == d.tokens.tolist()


def test_results_do_not_depend_on_lanes_chunks_steps_or_neighbours():
    names = ["first", "second"]
    requests = [
        request(str(i), names[i % 2], np.concatenate([draw(9, 10), draw(i // 2, 3 + i)]), 4 + i, 1.0, (7, i // 2, i % 2)) for i in range(12)
    ]
    reference = engine(lanes=16, steps=16, rows=8, chunk=16).generate(requests)
    for options in ({"patience": 1.0}, {"lanes": 1, "steps": 2, "lengths": (20, 32)}):
        for a, b in zip(reference, engine(**options).generate(requests), strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_the_same_requests_give_the_same_bits_whatever_was_sampled_before():
    e = engine()
    requests = [request(str(i), "first", np.concatenate([draw(9, 10), draw(i, 3)]), 6, key=(0, i, 0)) for i in range(7)]
    first = e.generate(requests)
    e.generate([request(str(i), "first", draw(i + 50, 17), 6) for i in range(5)])
    for a, b in zip(first, e.generate(requests), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_a_shared_prefix_is_computed_once_per_policy():
    e = engine(lanes=4, chunk=8, blocks=8)
    prompt = draw(1, 25)
    e.generate([request(str(i), "base", prompt, 3, key=(0, 0, i)) for i in range(4)])
    assert e.metrics["prefilled"] == 24 and e.metrics["restored"] == 3 * 24
    e = engine(lanes=4, chunk=8, blocks=8)
    e.generate([request(str(i), name, np.concatenate([prompt[:24], [i]]), 3) for i, name in enumerate(["base", "first", "base", "first"])])
    assert e.metrics["prefilled"] == 2 * 24 and e.metrics["restored"] == 2 * 24


def test_nothing_survives_an_update_of_the_weights():
    e = engine()
    e.submit(request(tokens=draw(2, 20), policy="first", max_tokens=4))
    c = run(e)["a"]
    other = tiny.bank(seed=8)
    e.load(Policy("first", 9, other))
    context = np.concatenate([draw(2, 20), c.tokens, [1]])
    e.submit(request(tokens=context, policy="first", max_tokens=4))
    d = run(e)["a"]
    assert d.version == 9
    logits = tiny.model()(jnp.asarray(np.concatenate([context, d.tokens]))[None], adapters=other)[0]
    oracle = np.asarray(jax.nn.log_softmax(logits, axis=-1))[len(context) - 1 : -1]
    np.testing.assert_allclose(d.logprobs, oracle[np.arange(4), d.tokens], atol=2e-5)


def test_a_running_request_finishes_under_the_weights_it_began_with():
    e = engine(steps=2)
    e.submit(request(policy="first", max_tokens=10))
    assert e.poll() == []
    e.load(Policy("first", 9, tiny.bank(seed=8)))
    e.submit(request("b", policy="first", max_tokens=3))
    found = {}
    while len(found) < 2:
        found |= {c.session: c for c in e.poll()}
    assert (found["a"].version, found["b"].version) == (2, 9)
    assert found["a"].tokens.tolist() == engine().generate([request(policy="first", max_tokens=10)])[0].tokens.tolist()


def test_the_engine_keeps_its_own_copy_of_the_adapters():
    e = engine()
    mine = tiny.bank(seed=1)
    e.load(Policy("own", 1, mine))
    for leaf in jax.tree.leaves(mine):
        leaf.delete()  # what a learner that donates its state does
    assert len(e.generate([request(policy="own")])[0].tokens) == 6


def test_a_finished_sessions_lane_is_refilled_and_waiting_sessions_keep_their_order():
    e = engine(lanes=2)
    for i in range(6):
        e.submit(request(str(i), tokens=draw(i, 5), max_tokens=3 + i))
    order = []
    while len(order) < 6:
        for c in e.poll():
            order.append(c.session)
            e.release(c.session)
    assert order[0] == "0" and sorted(order) == [str(i) for i in range(6)] and order[-1] == "5"
    assert (e.gauges["running"], e.gauges["sessions"], e.gauges["blocks_used"]) == (0, 0, 0)


def test_released_sessions_stop():
    e = engine(lanes=1, steps=1)
    e.submit(request("a", max_tokens=20))
    e.submit(request("b", max_tokens=2))
    e.poll()
    e.release("a")
    e.release("nobody")
    assert set(run(e)) == {"b"}


def test_turns_end_at_stop_ids_max_tokens_and_the_end_of_the_context():
    e = engine()
    free = e.generate([request(max_tokens=12)])[0].tokens
    stop = int(free[4])
    first = free.tolist().index(stop)
    stopped = e.generate([request(max_tokens=12, stop=(49, stop))])[0]
    assert stopped.finish == "stop" and stopped.tokens.tolist() == free[: first + 1].tolist()
    full = e.generate([request(tokens=draw(1, CONTEXT - 3), max_tokens=12)])[0]
    assert full.finish == "context" and len(full.tokens) == 3
    over = e.generate([request(tokens=draw(1, CONTEXT), max_tokens=12)])[0]
    assert over.finish == "context" and len(over.tokens) == len(over.logprobs) == 0


def test_nothing_compiles_after_the_warm_up():
    e = engine()
    requests = [request(str(i), list(policies())[i % 5], draw(i, 3 + 2 * i), 3 + i, 0.5 * (i % 3)) for i in range(10)]
    e.generate([request(str(i), "base", np.concatenate([draw(0, 10), [i]])) for i in range(3)])
    for name in ("first", "gated"):
        e.generate([request(policy=name)])
    compiles = e.metrics["compiles"]
    assert compiles <= 2 + 3 * 2  # store, restore; extend and decode for the base, a bank, a bank with a gate
    e.generate(requests)
    e.generate(requests[::-1])
    assert e.metrics["compiles"] == compiles


def test_requests_that_cannot_be_served_are_refused():
    e = engine()
    e.submit(request("busy"))
    for bad, message in [
        (request(policy=""), "no policy named"),
        (request(policy="who"), "'who' is not loaded"),
        (request(tokens=[]), "non-empty"),
        (request(tokens=[VOCAB]), "tokens must be in"),
        (request(max_tokens=0), "max_tokens"),
        (request(temperature=-1.0), "temperature"),
        (request("busy"), "has not finished"),
    ]:
        with pytest.raises(EngineError, match=message):
            e.submit(bad)
    run(e)
    with pytest.raises(EngineError, match="do not extend"):
        e.submit(request("busy", tokens=(1, 2, 3, 4)))
    with pytest.raises(EngineError, match="one session"):
        e.generate([request("x"), request("x")])


def test_policies_whose_fields_do_not_fit_are_refused():
    e = JaxEngine(tiny.model(), lanes=1, context=8)
    for bad, message in [
        (Policy(""), "no name"),
        (Policy("p", 1, None, np.array([1.0])), "no adapters"),
        (Policy("p", 1, bank()), "needs weights or a gate"),
        (Policy("p", 1, bank(), np.array([1.0, 0.0])), "3 finite numbers"),
        (Policy("p", 1, bank(), np.array([1, 0, np.nan])), "3 finite numbers"),
        (Policy("p", 1, bank(), np.ones(3), gate()), "both"),
        (Policy("p", 1, tiny.bank(), None, gate()), "slots"),
    ]:
        with pytest.raises(EngineError, match=message):
            e.load(bad)


def test_the_sampler_draws_the_softmax():
    logits = jnp.array([[2.0, -1.0, 0.5, -30.0, 1.0, 0.0, -2.0]])
    n, temperature = 20_000, 0.8
    keys = np.stack([session_key((0, i, 0)) for i in range(n)])
    tokens, logprobs = jax.jit(sample)(jnp.tile(logits, (n, 1)), jnp.asarray(keys), jnp.arange(n), jnp.full(n, temperature))
    p = np.asarray(jax.nn.softmax(logits[0] / temperature))
    counts = np.bincount(tokens, minlength=7)
    assert np.all(np.abs(counts / n - p) < 4 * np.sqrt(p * (1 - p) / n) + 1e-9)
    np.testing.assert_allclose(logprobs, np.log(p)[np.asarray(tokens)], atol=1e-5)


def test_random_bits_depend_on_key_and_position_alone():
    logits = jnp.zeros((6, 1000))
    keys = jnp.asarray(np.stack([session_key(k) for k in [(0, 1, 2), (0, 1, 2), (0, 1, 3), (0, 2, 2), (1, 1, 2), (-1, 2**70, 2)]]))
    tokens, _ = jax.jit(sample)(logits, keys, jnp.array([5, 5, 5, 5, 5, 5]), jnp.ones(6))
    assert tokens[0] == tokens[1] and len(set(tokens.tolist())) == 5
    moved, _ = sample(logits[:1], keys[:1], jnp.array([6]), jnp.ones(1))
    assert moved[0] != tokens[0]


@pytest.mark.parametrize("size", [1, 2, 7, 50, 501, 4099])
def test_the_blockwise_cumulative_sum_is_one(size):
    x = np.random.default_rng(size).random((3, size)).astype(np.float32)
    np.testing.assert_allclose(cumulate(jnp.asarray(x)), np.cumsum(x, axis=-1, dtype=np.float64), rtol=2e-6)


@pytest.mark.parametrize("kind", backbones.CONFIGS)
def test_every_backbone_gives_the_logprobs_of_an_uncached_forward(kind):
    """Shared prompts, second turns and reused lanes, where a recurrent state cannot be cut back."""
    net = backbones.model(config=backbones.CONFIGS[kind])
    e = JaxEngine(net, lanes=3, context=CONTEXT, steps=5, rows=2, chunk=4)
    e.load(Policy("base", 1))
    for wave in range(3):  # three sessions of one prompt, two turns each; the next wave gets their lanes
        contexts = {f"{wave}.{i}": np.concatenate([draw(9, 12), draw(wave, 3)]) for i in range(3)}
        for turn in range(2):
            for i, (name, context) in enumerate(contexts.items()):
                e.submit(request(name, "base", context, 5, key=(wave, i, turn)))
            found = {}
            while len(found) < 3:
                found |= {c.session: c for c in e.poll()}
            for i, (name, context) in enumerate(contexts.items()):
                whole = np.concatenate([context, found[name].tokens])
                oracle = jax.nn.log_softmax(backbones.logits(net, jnp.asarray(whole)[None])[0, len(context) - 1 : -1], axis=-1)
                np.testing.assert_allclose(found[name].logprobs, np.asarray(oracle)[np.arange(5), found[name].tokens], atol=5e-5)
                contexts[name] = np.concatenate([whole, draw(10 * wave + turn, 1 + i)])
        for name in contexts:
            e.release(name)
    assert e.metrics["restored"] > 0
