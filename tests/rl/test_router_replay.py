"""The experts that the engine took are taken again by the learner."""

import dataclasses

import jax
import numpy as np
import pytest

from model import Routing, token_logprobs
from rl.learner import Learner, LearnerConfig
from rl.packing import PackingError, pack
from rl.trajectory import TrajectoryError, decode_shard, encode_shard
from tests.model.tiny import CONFIGS, bank, forward, gate, model
from tests.rl import tiny

CONFIG = dataclasses.replace(CONFIGS["qwen3_moe"], mlp_only_layers=(1,))  # two sparse layers of three
LAYERS, K = 2, CONFIG.num_experts_per_tok
NET = model(config=CONFIG)
ADVANTAGES = np.random.default_rng(7).normal(size=8)


LENGTH = 32
score = jax.jit(lambda hidden, targets: token_logprobs(NET, hidden, targets)[0])


def padded(tokens):
    """[1, LENGTH], so that all trajectories share what is compiled; what comes last is seen by none before it."""
    return np.pad(tokens, (0, LENGTH - len(tokens)))[None]


def replayed(seed=3, some=True):
    """Trajectories with experts that the router would hardly choose; every other one without."""
    random = np.random.default_rng(seed)
    found = tiny.trajectories(8)
    for index, t in enumerate(found):
        if index % 2 or not some:
            experts = random.permuted(np.broadcast_to(np.arange(CONFIG.num_experts), (len(t.tokens), LAYERS, CONFIG.num_experts)), axis=-1)
            found[index] = dataclasses.replace(t, experts=experts[..., :K])
    return found


def batch_of(found):
    return pack(found, ADVANTAGES, lengths=(LENGTH,), micro_rows=2)


def test_log_probs_are_those_under_the_experts_of_the_trajectory():
    params, learner = bank(CONFIG), Learner(NET, LearnerConfig(micro_rows=2))
    found = replayed()
    batch = batch_of(found)
    logprobs = learner.logprobs(params, batch)
    for index, t in enumerate(found):
        experts = np.full((1, LENGTH, LAYERS, K), -1, np.int32)
        if t.experts is not None:
            experts[0, : len(t.tokens)] = t.experts
        hidden = forward(NET, padded(t.tokens), adapters=params, experts=experts).hidden
        expected = np.asarray(score(hidden, np.roll(padded(t.tokens), -1)))[0]
        np.testing.assert_allclose(logprobs[batch.trajectory == index], expected[: (batch.trajectory == index).sum()], atol=1e-5)
    free = learner.logprobs(params, dataclasses.replace(batch, experts=None))
    assert np.abs(free - logprobs)[np.isin(batch.trajectory, [1, 3])].max() > 1e-2
    np.testing.assert_array_equal(free[np.isin(batch.trajectory, [0, 2])], logprobs[np.isin(batch.trajectory, [0, 2])])


@pytest.mark.parametrize("routed", [False, True])
def test_replaying_the_routers_own_choice_changes_nothing(routed):
    found = tiny.trajectories(8)
    trained, frozen = (gate(4, CONFIG), bank(CONFIG, adapters=3)) if routed else (bank(CONFIG), None)
    adapters, routing = (frozen, Routing(gate=trained, mode="top1")) if routed else (trained, None)
    taken = (forward(NET, padded(t.tokens), adapters=adapters, routing=routing, collect=("experts",)).experts for t in found)
    own = [np.asarray(experts)[0, : len(t.tokens)] for experts, t in zip(taken, found, strict=True)]
    learner = Learner(NET, LearnerConfig(micro_rows=2), bank=frozen)
    expected, _ = learner.gradient(trained, batch_of(found))
    gradient, _ = learner.gradient(trained, batch_of([dataclasses.replace(t, experts=e) for t, e in zip(found, own, strict=True)]))
    assert tiny.relative(gradient, expected) < 1e-5


def test_the_base_chooses_its_own_experts():
    learner = Learner(NET, LearnerConfig(micro_rows=2))
    batch = batch_of(replayed(some=False))
    np.testing.assert_array_equal(learner.logprobs(None, batch), learner.logprobs(None, dataclasses.replace(batch, experts=None)))


def test_expert_ids_follow_their_tokens_through_shards_and_hints():
    (t,) = replayed(some=False)[:1]
    (back,) = decode_shard(encode_shard([t]))
    np.testing.assert_array_equal(back.experts, t.experts)
    t.loss_mask[:3], t.logprobs[:3] = 0, 0
    cut = pack([dataclasses.replace(t, hint={"text": "h", "token_span": [1, 3]})], [1.0], lengths=(32,))
    kept = np.delete(t.experts, [1, 2], axis=0)
    np.testing.assert_array_equal(cut.experts[0, : len(kept) - 1], kept[:-1])
    assert (cut.experts[cut.segment_ids == 0] == -1).all()


def test_expert_ids_of_another_model_are_refused():
    found = replayed(some=False)
    with pytest.raises(TrajectoryError, match=r"field 'experts': has shape \(3, 2\), expected \[\d+, sparse layers, k\]"):
        dataclasses.replace(found[0], experts=np.zeros((3, 2)))
    found[2] = dataclasses.replace(found[2], experts=found[2].experts[:, :1])
    with pytest.raises(PackingError, match="'t2', field 'experts': .*trajectory 't0'"):
        batch_of(found)
    other = Learner(model(config=CONFIGS["qwen3_moe"]), LearnerConfig(micro_rows=2))
    with pytest.raises(ValueError, match="2 layers and 2 experts a token, the model has 3 sparse layers"):
        other.gradient(bank(CONFIG), batch_of(replayed(some=False)))
