import collections
import functools

import jax
import numpy as np
import pytest

from envs import Pool, parse_package
from model import CausalLM, Config
from model.parameters import parameter_specs
from rl.engines.jax import JaxEngine
from rl.engines.protocol import EngineError, Policy
from rl.packing import pack
from rl.rollout import Task, roll_out
from rl.trajectory import StopReason, decode_shard, encode_shard
from tests.rl import chats

# A user who talks back as often as the seed says; seeds that end in 7 crash.
SOURCE = """
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}}]

class Environment:
    def reset(self, seed, knobs):
        self.seed, self.heard = seed, []
        return {"system": "Be brief.", "messages": [{"role": "user", "content": "say " + "x" * (seed % 5)}]}

    def call(self, name, arguments):
        return "ok"

    def respond(self, text):
        self.heard.append(text)
        if self.seed % 10 == 7:
            raise RuntimeError("no seven")
        return "more" if len(self.heard) <= self.seed % 3 else None

    def done(self):
        return False

    def score(self):
        last = len(self.heard) - 1 if self.heard else None
        check = {"passed": bool(self.heard), "expected": None, "actual": self.heard, "call": last}
        return {"reward": len(self.heard) / 4, "checks": {"heard": check}}

def oracle(seed, knobs):
    return []

def hint(seed, knobs):
    return ""
"""
META = {"name": "talk", "capability": "", "target": "talk", "version": "1", "knobs": {}, "max_turns": 3, "rationale": ""}
PACKAGE = parse_package(META, SOURCE)
OPTIONS = {"temperature": 1.0, "run_seed": 5, "max_tokens": 20}


@functools.cache
def model(**sparse) -> CausalLM:
    """A random model that ends a turn after some ten tokens: dimension 0 is the same everywhere, and the end token's logit follows it."""
    size = len(chats.chat().tokenizer)
    config = Config(size, 32, 48, 2, 2, 1, head_dim=16, **sparse)
    keys = iter(jax.random.split(jax.random.key(0), 32))
    parameters = {
        name: jax.numpy.ones(spec.shape) if "norm" in name else 0.3 * jax.random.normal(next(keys), spec.shape)
        for name, spec in parameter_specs(config).items()
    }
    parameters["embed"] = parameters["embed"].at[:, 0].set(3.0)
    parameters["head"] = parameters["head"].at[0, chats.chat().end].set(2.0)
    return CausalLM(config, parameters=parameters)


def engine(lanes: int, **options) -> JaxEngine:
    e = JaxEngine(model(), lanes=lanes, context=128, **options)
    e.load(Policy("base", 1))
    return e


def tasks(seeds=(0, 1, 2, 4, 5), rollouts=3, **fields) -> list[Task]:
    return [
        Task(package=PACKAGE, seed=s, rollout=r, group=str(s), task_id=f"talk:{s}", split="train", trial=r, **fields)
        for s in seeds
        for r in range(rollouts)
    ]


@pytest.fixture(scope="module")
def pool():
    with Pool(workers=1) as p:
        yield p


@pytest.fixture(scope="module")
def reference(pool):
    return roll_out(engine(16), pool, chats.chat(), tasks(), "base", **OPTIONS)


def test_trajectories_come_in_the_order_of_their_tasks_and_are_scored(reference):
    assert [t.id for t in reference] == [f"talk:{s}#{r}" for s in (0, 1, 2, 4, 5) for r in range(3)]
    reasons = collections.Counter(t.stop_reason for t in reference)
    assert reasons[StopReason.DONE] >= 3 and reasons[StopReason.MAX_TOKENS] >= 1  # both ends occur, so the test sees something
    for t in reference:
        said = [m for m in t.messages if m["role"] == "assistant"]
        if t.stop_reason == StopReason.DONE:
            assert len(said) == t.seed % 3 + 1 and t.reward == len(said) / 4
            assert t.messages[t.checks["heard"]["message_index"]] is said[-1]
    assert len({tuple(t.tokens) for t in reference}) > 10
    assert [t.id for t in decode_shard(encode_shard(reference))] == [t.id for t in reference]


@pytest.mark.parametrize("lanes, options", [(4, {}), (3, {"steps": 3, "chunk": 8})])
def test_tokens_do_not_depend_on_the_number_of_lanes(reference, pool, lanes, options):
    found = roll_out(engine(lanes, **options), pool, chats.chat(), tasks(), "base", **OPTIONS)
    for a, b in zip(reference, found, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.messages == b.messages and a.reward == b.reward
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_the_same_batch_gives_the_same_bits(reference, pool):
    e = engine(16)
    roll_out(e, pool, chats.chat(), tasks(seeds=(9, 3)), "base", **OPTIONS)
    found = roll_out(e, pool, chats.chat(), tasks(), "base", **OPTIONS)
    assert encode_shard(found) == encode_shard(reference)


def test_sampling_logprobs_are_those_of_the_whole_context(reference):
    t = max(reference, key=lambda t: t.loss_mask.sum())
    logprobs = jax.nn.log_softmax(model()(jax.numpy.asarray(t.tokens)[None])[0], axis=-1)
    oracle = np.asarray(logprobs)[np.arange(len(t.tokens) - 1), t.tokens[1:]]
    np.testing.assert_allclose(t.logprobs[1:], np.where(t.loss_mask[1:] == 1, oracle, 0.0), atol=2e-5)


def test_progress_counts_every_episode_and_faults_are_errors(pool):
    seen = []
    found = roll_out(engine(4), pool, chats.chat(), tasks(seeds=(7, 1)), "base", on_progress=seen.append, **OPTIONS)
    assert sum(seen) == 6
    assert {t.error["kind"] for t in found[:3] if t.error} == {"exception"}
    assert all((t.reward is None) == (t.error is not None) for t in found)
    assert all(t.error is None for t in found[3:])


def test_tasks_may_name_their_own_policies(pool):
    e = engine(4)
    e.load(Policy("newer", 2))
    found = roll_out(e, pool, chats.chat(), tasks((1,)) + tasks((1,), policy="newer"), "base", **OPTIONS)
    assert [t.policy["name"] for t in found] == ["base"] * 3 + ["newer"] * 3
    assert [t.policy["version"] for t in found] == [1] * 3 + [2] * 3
    assert [t.tokens.tolist() for t in found[:3]] == [t.tokens.tolist() for t in found[3:]]


def test_an_unknown_policy_leaves_the_engine_clean(pool):
    e = engine(4)
    with pytest.raises(EngineError, match="'typo'"):
        roll_out(e, pool, chats.chat(), tasks(), "typo", **OPTIONS)
    assert len(roll_out(e, pool, chats.chat(), tasks((1,)), "base", **OPTIONS)) == 3


def test_the_experts_of_a_rollout_are_those_that_the_engine_took_and_the_learner_takes_them_again(pool):
    net = model(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24)
    e = JaxEngine(net, lanes=4, context=128, experts=True)
    e.load(Policy("base", 1))
    found = roll_out(e, pool, chats.chat(), tasks(seeds=(1, 2, 4)), "base", **OPTIONS | {"max_tokens": 40})
    assert max(t.metrics["turns"] for t in found) > 1 and e.metrics["restored"] > 0
    batch = pack(found, np.ones(len(found)), lengths=(128,))
    forward = jax.jit(
        lambda tokens, positions, segments, experts: net.forward(tokens, positions, segments, experts=experts, collect=("experts",))
    )
    free = forward(batch.tokens, batch.positions, batch.segment_ids, np.full_like(batch.experts, -1))
    taken = forward(batch.tokens, batch.positions, batch.segment_ids, batch.experts)
    for index, t in enumerate(found):
        said = int(np.flatnonzero(t.loss_mask)[-1])  # the last sampled token has not been through the model
        assert t.experts.shape == (len(t.tokens), 2, 2) and (t.experts[:said] >= 0).all() and (t.experts[said:] == -1).all()
        mine = batch.trajectory == index
        np.testing.assert_array_equal(taken.experts[mine], t.experts[: mine.sum()])
        assert (np.sort(free.experts[mine], -1) == np.sort(t.experts[: mine.sum()], -1)).mean() > 0.99  # the router's own choice
