"""What every engine has to do, as tests: a class that a module of tests inherits, with fixtures `net` and `engine` of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import slice_bank, stack_banks
from rl.engines.protocol import Completion, EngineError, Policy, Request
from tests.model.tiny import bank as random_bank
from tests.model.tiny import logits

CONTEXT = 48


def draw(vocabulary: int, seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def request(session="a", policy="base", tokens=(1, 2, 3), max_tokens=6, temperature=1.0, key=(0, 1, 2), stop=(), **more):
    return Request(session, policy, np.array(tokens, np.int32), max_tokens, temperature, key, stop, **more)


@functools.cache
def policies(config) -> dict[str, Policy]:
    bank = stack_banks([random_bank(config, seed=1), random_bank(config, seed=2)])
    return {
        "base": Policy("base", 1),
        "first": Policy("first", 2, bank, np.array([0, 1, 0])),
        "second": Policy("second", 3, random_bank(config, seed=2)),
    }


def bank_of(policy: Policy):
    """The one adapter of a policy, or None."""
    if policy.adapters is None or policy.weights is None:
        return policy.adapters
    return slice_bank(policy.adapters, int(np.argmax(policy.weights)) - 1)


def table(net, policy: Policy, context: np.ndarray, temperature: float) -> np.ndarray:
    """[T, V]: log-probs of an uncached forward, always of one length, so that it compiles once."""
    padded = np.zeros(CONTEXT, np.int32)
    padded[: len(context)] = context
    found = logits(net, jnp.asarray(padded)[None], adapters=bank_of(policy))[0, : len(context)]
    return np.asarray(jax.nn.log_softmax(found / (temperature or 1.0), axis=-1))


def check(net, policy: Policy, asked: Request, c: Completion, atol: float) -> None:
    """The completion's log-probs are those of a forward of its whole context under the policy."""
    assert isinstance(c, Completion), c
    assert c.version == policy.version and c.tokens.dtype == np.int32 and c.logprobs.dtype == np.float32
    whole, n = np.concatenate([asked.tokens, c.tokens]), len(c.tokens)
    oracle = table(net, policy, whole, asked.temperature)[len(asked.tokens) - 1 : -1]
    np.testing.assert_allclose(c.logprobs, oracle[np.arange(n), c.tokens], atol=atol)
    if asked.temperature == 0:
        assert c.tokens.tolist() == oracle.argmax(-1).tolist()


def finish(engine, count: int = 1) -> dict[str, Completion]:
    found = {}
    while len(found) < count:
        found |= {c.session: c for c in engine.poll()}
    return found


class EngineContract:
    """Fixtures of the class that inherits: `net`, the model; `engine`, with a context of CONTEXT and `policies(net.config)` loaded."""

    atol = 5e-5

    @pytest.fixture
    def known(self, net):
        return policies(net.config)

    @pytest.fixture(autouse=True)
    def sessions_end(self, engine):
        yield
        for name in "abcdefgh":
            engine.release(name)

    def test_logprobs_are_those_of_the_policy_at_the_temperature(self, net, engine, known):
        vocabulary = net.config.vocab_size
        asked = [
            request(name, policy, draw(vocabulary, i, 4 + 3 * i), 7, temperature, (0, i, 0))
            for i, (name, policy, temperature) in enumerate(
                [("a", "base", 1.0), ("b", "first", 0.7), ("c", "second", 1.0), ("d", "base", 0.0), ("e", "first", 0.0)]
            )
        ]
        for r, c in zip(asked, engine.generate(asked), strict=True):
            assert c.finish == "length" and len(c.tokens) == 7
            check(net, known[r.policy], r, c, self.atol)
        tables = [table(net, policy, draw(vocabulary, 0, 9), 1.0) for policy in known.values()]
        assert min(np.abs(tables[0] - tables[1]).max(), np.abs(tables[1] - tables[2]).max()) > 0.05

    def test_a_session_goes_on_where_it_was(self, net, engine, known):
        context = draw(net.config.vocab_size, 4, 12)
        for turn in range(3):
            asked = request("a", "first", context, 4)
            engine.submit(asked)
            c = finish(engine)["a"]
            check(net, known["first"], asked, c, self.atol)
            context = np.concatenate([context, c.tokens, draw(net.config.vocab_size, 10 + turn, 3)])
        with pytest.raises(EngineError, match="do not extend"):
            engine.submit(request("a", "first", draw(net.config.vocab_size, 5, 40), 4))
        engine.release("a")
        engine.submit(request("a", "first", draw(net.config.vocab_size, 5, 4), 1))
        assert len(finish(engine)["a"].tokens) == 1

    def test_turns_end_at_stop_ids_max_tokens_and_the_end_of_the_context(self, net, engine):
        vocabulary = net.config.vocab_size
        (free,) = engine.generate([request(max_tokens=12, temperature=0.0)])
        stop = int(free.tokens[4])
        first = free.tokens.tolist().index(stop)
        (stopped,) = engine.generate([request(max_tokens=12, temperature=0.0, stop=(stop, (stop + 1) % vocabulary))])
        assert stopped.finish == "stop" and stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
        (full,) = engine.generate([request(tokens=draw(vocabulary, 1, CONTEXT - 3), max_tokens=12)])
        assert full.finish == "context" and len(full.tokens) == 3
        (fits,) = engine.generate([request(tokens=draw(vocabulary, 1, CONTEXT - 3), max_tokens=3)])
        assert fits.finish == "length" and len(fits.tokens) == 3
        (over,) = engine.generate([request(tokens=draw(vocabulary, 1, CONTEXT), max_tokens=12)])
        assert over.finish == "context" and len(over.tokens) == len(over.logprobs) == 0

    def test_a_running_request_finishes_under_the_weights_it_began_with(self, net, engine):
        old, new = Policy("moving", 7, random_bank(net.config, seed=5)), Policy("moving", 8, random_bank(net.config, seed=6))
        engine.load(old)
        before = request("a", "moving", draw(net.config.vocab_size, 1, 5), 30)
        engine.submit(before)
        found = {c.session: c for c in engine.poll()}
        engine.load(new)
        after = request("b", "moving", before.tokens, 5)
        engine.submit(after)
        while len(found) < 2:
            found |= {c.session: c for c in engine.poll()}
        check(net, old, before, found["a"], self.atol)
        check(net, new, after, found["b"], self.atol)

    def test_the_engine_keeps_its_own_copy_of_the_adapters(self, net, engine):
        mine = random_bank(net.config, seed=1)
        engine.load(Policy("own", 1, mine))
        for leaf in jax.tree.leaves(mine):
            leaf.delete()  # what a learner that donates its state does
        asked = request("a", "own")
        (c,) = engine.generate([asked])
        check(net, Policy("own", 1, random_bank(net.config, seed=1)), asked, c, self.atol)

    def test_more_requests_than_lanes_are_all_answered_in_order(self, net, engine, known):
        count = 2 * engine.lanes + 1
        asked = [request(f"many{i}", ["base", "second"][i % 2], draw(net.config.vocab_size, i, 3 + i % 5), 1 + i % 4) for i in range(count)]
        for r, c in zip(asked, engine.generate(asked), strict=True):
            assert c.session == r.session and len(c.tokens) == r.max_tokens

    def test_released_sessions_give_nothing(self, engine):
        engine.submit(request("a", max_tokens=40))
        engine.release("a")
        engine.release("nobody")
        engine.submit(request("b", max_tokens=2))
        assert set(finish(engine)) == {"b"}
        assert engine.poll() == []

    def test_requests_that_cannot_be_served_are_refused(self, net, engine):
        engine.submit(request("b", max_tokens=40))
        for bad, message in [
            (request(policy=""), "no policy named"),
            (request(policy="who"), "'who' is not loaded"),
            (request(tokens=[]), "non-empty"),
            (request(tokens=[net.config.vocab_size]), "tokens must be in"),
            (request(max_tokens=0), "max_tokens"),
            (request(temperature=-1.0), "temperature"),
            (request("b"), "has not finished"),
        ]:
            with pytest.raises(EngineError, match=message):
                engine.submit(bad)
        with pytest.raises(EngineError, match="one session"):
            engine.generate([request("x"), request("x")])

    def test_policies_whose_fields_do_not_fit_are_refused(self, net, engine):
        two = stack_banks([random_bank(net.config, seed=1)] * 2)
        for bad, message in [
            (Policy(""), "no name"),
            (Policy("p", 1, None, np.array([1.0])), "no adapters"),
            (Policy("p", 1, two), "needs weights"),
            (Policy("p", 1, two, np.array([1.0, 0.0])), "3 finite numbers"),
        ]:
            with pytest.raises(EngineError, match=message):
                engine.load(bad)
