"""What the JAX engine does beyond the contract of all engines (`test_engine_contract`)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import Routing, init_gate, stack_banks
from rl.engines.jax import JaxEngine
from rl.engines.protocol import EngineError, Policy, Request
from tests.model import tiny as backbones
from tests.rl import tiny
from tests.rl.test_jax_sampler import limited

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


def request(session="a", policy="base", tokens=(1, 2, 3), max_tokens=6, temperature=1.0, key=(0, 1, 2), stop=(), **limits):
    return Request(session, policy, np.array(tokens, np.int32), max_tokens, temperature, key, stop, **limits)


def logprobs_of(policy: str, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """[T, V]: the oracle, one uncached forward of the whole context."""
    p = policies()[policy]
    weights = None if p.weights is None else jnp.asarray(p.weights, jnp.float32)[None]
    routing = None if p.adapters is None else Routing(weights=weights, gate=p.gate)
    return np.asarray(jax.nn.log_softmax(uncached(tokens, p.adapters, routing) / (temperature or 1.0), axis=-1))


def uncached(tokens: np.ndarray, adapters=None, routing=None) -> jax.Array:
    """[T, V]; filled up to one length, so that it is compiled once."""
    return backbones.logits(tiny.model(), padded(tokens), adapters=adapters, routing=routing)[0, : len(tokens)]


def padded(tokens: np.ndarray) -> jax.Array:
    return jnp.asarray(np.pad(tokens, (0, CONTEXT - len(tokens))))[None]


def draw(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def run(e: JaxEngine, count: int = 1) -> dict:
    found = {}
    while len(found) < count:
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
    e, prompt = engine(blocks=8), draw(1, 25)
    e.generate([request(str(i), "base", prompt, 3, key=(0, 0, i)) for i in range(4)])
    assert e.metrics["prefilled"] == 24 and e.metrics["restored"] == 3 * 24
    e = engine(blocks=8)
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
    oracle = np.asarray(jax.nn.log_softmax(uncached(np.concatenate([context, d.tokens]), other), axis=-1))[len(context) - 1 : -1]
    np.testing.assert_allclose(d.logprobs, oracle[np.arange(4), d.tokens], atol=2e-5)


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


def test_a_released_session_gives_up_its_lane():
    e = engine()
    for name in "abcde":
        e.submit(request(name, max_tokens=2 if name == "e" else 40))
    assert e.poll() == [] and e.gauges["waiting"] == 1
    e.release("a")
    assert set(run(e)) == {"e"}


def test_nothing_compiles_after_the_warm_up():
    e = engine()
    requests = [request(str(i), list(policies())[i % 5], draw(i, 3 + 2 * i), 3 + i, 0.5 * (i % 3)) for i in range(10)]
    e.warm_up(policies())
    compiles = e.metrics["compiles"]
    assert compiles <= 4 + 3 * 2  # store, restore of three lengths; extend and decode for the base, a bank, a bank with a gate
    e.generate(requests)
    e.generate(requests[::-1])
    assert e.metrics["compiles"] == compiles


def test_limits_that_are_none_are_refused():
    for bad in ({"top_k": -1}, {"top_p": 0.0}):
        with pytest.raises(EngineError, match="top_k"):
            engine().submit(request(**bad))


def test_gates_that_do_not_fit_are_refused():
    with pytest.raises(EngineError, match="the model has none"):
        JaxEngine(tiny.model(), experts=True)
    for bad, message in [(Policy("p", 1, bank(), np.ones(3), gate()), "both"), (Policy("p", 1, tiny.bank(), None, gate()), "slots")]:
        with pytest.raises(EngineError, match=message):
            engine().load(bad)


def test_a_request_with_limits_changes_nothing_for_its_neighbours():
    e, prompt = engine(), draw(3, 9)
    requests = [request(str(i), tokens=prompt, max_tokens=8, key=(3, 0, i)) for i in range(2)]
    alone = e.generate(requests)
    greedy = e.generate([request(tokens=prompt, max_tokens=8, temperature=0.0)])[0]
    found = e.generate(
        [*requests, request("k", tokens=prompt, max_tokens=8, top_k=1), request("p", tokens=prompt, max_tokens=8, top_p=0.5)]
    )
    for a, b in zip(alone, found, strict=False):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6)
    assert found[2].tokens.tolist() == greedy.tokens.tolist() and not found[2].logprobs.any()
    whole = np.concatenate([prompt, found[3].tokens])
    for token, logprob, logits in zip(found[3].tokens, found[3].logprobs, np.asarray(uncached(whole))[len(prompt) - 1 :], strict=False):
        np.testing.assert_allclose(logprob, np.log(limited(logits.astype(np.float64), 0, 0.5)[token]), atol=1e-4)


@pytest.mark.parametrize("kind", backbones.CONFIGS)
def test_every_backbone_gives_the_logprobs_of_an_uncached_forward(kind):
    """Shared prompts, second turns and reused lanes, where a recurrent state cannot be cut back; and the experts that were taken.

    Three sessions on two lanes: each has lost its lane before its second turn, which finds in the pool what the first has computed.
    """
    net = backbones.model(config=backbones.CONFIGS[kind])
    e = JaxEngine(net, lanes=2, context=CONTEXT, steps=5, rows=2, chunk=4, blocks=12, experts=net.config.num_experts > 0)
    e.load(Policy("base", 1))
    asked = 0
    for wave in range(2):
        contexts = {f"{wave}.{i}": np.concatenate([draw(9, 12), draw(wave, 3)]) for i in range(3)}
        asked += len(contexts["0.0" if wave == 0 else "1.0"]) - 1  # one prompt of the three
        for turn in range(2):
            for i, (name, context) in enumerate(contexts.items()):
                e.submit(request(name, "base", context, 5, key=(wave, i, turn)))
            found = run(e, 3)
            for i, (name, context) in enumerate(contexts.items()):
                whole, c = np.concatenate([context, found[name].tokens]), found[name]
                out = backbones.forward(net, padded(whole), collect=("experts",) if net.config.num_experts else ())
                oracle = jax.nn.log_softmax(net.unembed(out.hidden[0, len(context) - 1 : len(whole) - 1]), axis=-1)
                np.testing.assert_allclose(c.logprobs, np.asarray(oracle)[np.arange(5), c.tokens], atol=5e-5)
                if net.config.num_experts:
                    assert c.experts.dtype == np.int16 and (c.experts[-1] == -1).all()
                    same = np.sort(c.experts[:-1], -1) == np.sort(out.experts[0, : len(whole) - 1], -1)
                    assert len(c.experts) == len(whole) and same.mean() > 0.99
                else:
                    assert c.experts is None
                contexts[name] = np.concatenate([whole, draw(10 * wave + turn, 1 + i)])
                asked += 0 if turn else len(contexts[name]) - len(whole)  # the last sampled token, and the new ones but the last
        for name in contexts:
            e.release(name)
    assert e.metrics["prefilled"] == asked and e.metrics["evicted"] == 0


def turns(e: JaxEngine, prompts: dict[str, np.ndarray], count: int, new: int = 3, **options) -> dict[str, list]:
    """Each session's completions and the whole contexts that they ended. A session is away for one poll between two turns."""
    found, contexts = {name: [] for name in prompts}, dict(prompts)
    here, away = list(prompts), []
    while here or e.gauges["sessions"]:
        for name in here:
            e.submit(request(name, tokens=contexts[name], key=(1, int(name), 0), **options))
        here, away = away, []
        for c in e.poll():
            whole = np.concatenate([contexts[c.session], c.tokens])
            found[c.session].append((c, whole))
            contexts[c.session] = np.concatenate([whole, draw(len(whole), new)])
            if len(found[c.session]) == count:
                e.release(c.session)
            else:
                away.append(c.session)
    return found


def check(found: dict[str, list]) -> None:
    for name in found:
        for c, whole in found[name]:
            n = len(c.tokens)
            oracle = logprobs_of("base", whole, 1.0)[len(whole) - n - 1 : -1]
            np.testing.assert_allclose(c.logprobs, oracle[np.arange(n), c.tokens], atol=2e-5)


def test_more_sessions_than_lanes_take_turns():
    """Whatever the pool has room for is not computed again; without room it is, with the same result."""
    prompts = {str(i): np.concatenate([draw(6, 10), draw(i, 3 + i % 3)]) for i in range(8)}
    new = sum(2 * 3 + len(prompt) - 1 for prompt in prompts.values()) - 6 * 10
    # two more turns; prompts that have ten tokens in common, which the first two, a block not being whole, compute side by side
    computed = {}
    for blocks in (0, 6, 40):
        e = engine(lanes=2, blocks=blocks)
        found = turns(e, prompts, 3, max_tokens=4)
        check(found)
        assert e.gauges["sessions"] == e.gauges["blocks_used"] == 0
        computed[blocks] = e.metrics["prefilled"]
        again = engine(lanes=2, blocks=blocks)
        for name, other in turns(again, prompts, 3, max_tokens=4).items():
            for (a, _), (b, _) in zip(found[name], other, strict=True):
                np.testing.assert_array_equal(a.tokens, b.tokens)
                np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert again.metrics["prefilled"] == computed[blocks] and again.metrics["evicted"] == e.metrics["evicted"]
    assert computed[40] == new < computed[6] < computed[0]


def test_an_engine_that_does_not_forget_finds_the_last_conversation():
    e, first = engine(forget=False, blocks=8), draw(4, 12)
    c = e.generate([request("a", tokens=first, max_tokens=5)])[0]
    before = e.metrics["prefilled"]
    context = np.concatenate([first, c.tokens, draw(5, 4)])
    d = e.generate([request("b", tokens=context, max_tokens=5, key=(0, 1, 2))])[0]
    assert e.metrics["prefilled"] - before == 4 and e.metrics["restored"] == 16
    check({"b": [(d, np.concatenate([context, d.tokens]))]})
    e.load(Policy("base", 2))
    before = e.metrics["prefilled"]
    e.generate([request("c", tokens=context)])
    assert e.metrics["prefilled"] - before == len(context) - 1  # other weights


def test_a_long_prompt_does_not_hold_up_those_that_decode():
    e = engine(prefill_budget=8)
    e.submit(request("short", max_tokens=30))
    e.poll()
    e.submit(request("long", tokens=draw(1, 40), max_tokens=2))
    sampled = []
    while e.gauges["running"] == 2 or not sampled:
        before = e.metrics["prefilled"]
        sampled.append(len(e.partial("short")[0]))
        done = {c.session for c in e.poll()}
        assert e.metrics["prefilled"] - before <= 8
        if "long" in done:
            break
    assert len(sampled) >= 5 and all(b > a for a, b in zip(sampled, sampled[1:], strict=False))
    e.release("short")
    e.release("long")
    e.submit(request("long", tokens=draw(1, 40), max_tokens=2))
    before = e.metrics["prefilled"]
    e.poll()
    assert e.metrics["prefilled"] - before == 39  # nobody is held up


def test_the_work_of_a_released_session_goes_on_with_those_that_wait_for_it():
    e, prompt = engine(prefill_budget=4, blocks=8), draw(8, 30)
    e.submit(request("decodes", max_tokens=40))
    e.poll()
    for name in ("maker", "x", "y"):
        e.submit(request(name, tokens=prompt, max_tokens=3, key=(0, 0, 7)))
    e.poll()
    assert e.metrics["prefilled"] == 2 + 4
    e.release("maker")
    found = {}
    while not {"x", "y"} <= set(found):
        found |= {c.session: c for c in e.poll()}
    assert e.metrics["prefilled"] == 2 + 4 + 29 and e.metrics["restored"] == 29
    check({name: [(found[name], np.concatenate([prompt, found[name].tokens]))] for name in ("x", "y")})


def test_a_full_queue_is_said():
    e = engine(max_waiting=2)
    for i in range(2):
        e.submit(request(str(i)))
    assert e.room == 0
    with pytest.raises(EngineError, match="2 others wait already"):
        e.submit(request("2"))
    e.release("1")
    assert e.room == 1
    e.release("0")
    assert len(e.generate([request(str(i)) for i in range(5)])) == 5  # which waits for room


def test_hundreds_of_sessions_on_32_lanes_compile_nothing_and_hold_no_more_than_the_pool():
    e = engine(lanes=32, rows=8, chunk=8, steps=8, blocks=64, lengths=(24,))
    e.warm_up(["base"])
    compiles, random = e.metrics["compiles"], np.random.default_rng(0)
    prompts = {str(i): np.concatenate([draw(i % 50, 6), draw(i, int(random.integers(1, 12)))]) for i in range(400)}
    pool = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(e._pool)]
    found = turns(e, prompts, 2, new=2, max_tokens=6)
    assert all(len(found[name]) == 2 for name in prompts)
    assert e.metrics["compiles"] == compiles
    assert e.metrics["restored"] > 0 and e.metrics["evicted"] > 0 and e.gauges["blocks_used"] == 0
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(e._pool)] == pool and len(e._done) == 0
    check({name: found[name] for name in list(prompts)[::47]})
