import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import Gate, Routing, init_gate
from rl.gate_learner import GateData, GateWarmStart, WarmStartConfig, label_weights, routing_metrics
from rl.packing import pack
from tests.rl import tiny

SLOTS = np.array([1, 2, 3, 1, 2, 3, 3, 3, 1, 1, 2, 2])
BANK = functools.cache(lambda: tiny.bank(3))


@functools.cache
def warm_start():
    return GateWarmStart(tiny.model(), BANK(), lengths=(32,), micro_rows=2)


@functools.cache
def measured():
    return warm_start().measure(tiny.trajectories(), SLOTS)


def data(kl, slot, response):
    count = len(kl)
    return GateData(
        [], np.array(response, np.float32), np.array(slot), np.eye(4, dtype=np.float32)[slot], np.zeros(count, int) - 1,
        np.array(kl, np.float32), np.zeros((1, count, 2), np.float32), np.zeros((1, count, 2), np.float32),
    )  # fmt: skip


def test_the_divergence_is_that_of_whole_distributions_in_every_chunk():
    trajectories = tiny.trajectories()
    chunked = GateWarmStart(tiny.model(), BANK(), lengths=(32,), micro_rows=2, temperature=0.8, logprob_chunk=7).measure(
        trajectories, SLOTS
    )
    batch = chunked.batches[0]
    run = jax.jit(lambda weights: tiny.model()(batch.tokens, batch.positions, batch.segment_ids, BANK(), Routing(weights=weights)))
    own, base = (jax.nn.log_softmax(run(jax.nn.one_hot(jnp.full(2, slot), 4)) / 0.8) for slot in (1, 0))
    real = batch.segment_ids > 0
    np.testing.assert_allclose(chunked.kl[: real.sum()], jnp.sum(jnp.exp(own) * (own - base), -1)[real], rtol=1e-3, atol=1e-5)
    assert (chunked.slot[: real.sum()] == 1).all()


def test_measured_tokens_carry_their_labels_and_turns():
    d, trajectories = measured(), tiny.trajectories()
    assert d.response.sum() == sum(t.loss_mask[1:].sum() for t in trajectories)
    for slot in (1, 2, 3):
        assert d.response[d.slot == slot].sum() == sum(t.loss_mask[1:].sum() for t, s in zip(trajectories, SLOTS, strict=True) if s == slot)
    runs = sum((np.diff(np.pad(t.loss_mask[1:], (1, 0))) == 1).sum() for t in trajectories)
    assert d.turn.max() + 1 == runs == len(np.unique(d.turn[d.turn >= 0])) and ((d.turn >= 0) == (d.response > 0)).all()


def test_inputs_are_what_the_gates_read():
    """Under the base's stream a gate's logits are those of the model with everything routed to the base."""
    gate = init_gate(tiny.CONFIG, 4, 100.0, jax.random.key(0))
    d = measured()
    np.testing.assert_allclose(warm_start().routed_inputs(gate, d), d.base_inputs, atol=1e-5)
    batch = d.batches[0]
    out = tiny.model().forward(batch.tokens, batch.positions, batch.segment_ids, BANK(), Routing(gate=gate), collect=("gate_logits",))
    real = batch.segment_ids > 0
    logits = np.einsum("lmd,lds->mls", d.base_inputs[:, : real.sum()], gate.kernel) + np.asarray(gate.bias)
    np.testing.assert_allclose(np.asarray(out.gate_logits)[real], logits, atol=1e-3)


def test_plain_weights_are_equal_on_response_tokens():
    weight, base = label_weights(data([9, 0, 1, 1], [1, 1, 2, 2], [1, 1, 1, 0]), WarmStartConfig(loss="plain"))
    np.testing.assert_allclose(weight, [1 / 3, 1 / 3, 1 / 3, 0])
    assert not base.any()


def test_weights_are_the_clipped_divergence_with_every_capability_alike():
    weight, base = label_weights(data([9.0, 0.5, 0.01, 0.02, 3.0], [1, 1, 2, 2, 2], [1, 1, 1, 1, 0]), WarmStartConfig(base_weight=0.02))
    np.testing.assert_allclose(weight, [0.5 / 1.5, 0.25 / 1.5, 0.5 / 3, 1.0 / 3, 0], rtol=1e-5)
    # in the units of the rescaled divergence: the mean total is (1.5 + 0.03) / 2 nats
    np.testing.assert_allclose(base, 0.02 / 1.53, rtol=1e-5)


def test_adapters_that_do_nothing_cannot_be_routed_to():
    with pytest.raises(ValueError, match="nothing to learn from"):
        label_weights(data([0.0, 0.0], [1, 2], [1, 1]), WarmStartConfig())


@pytest.mark.parametrize("stream", ["routed", "label"])
def test_fitting_lowers_the_loss_and_routes_what_matters_to_its_slot(stream):
    config = WarmStartConfig(stream=stream, learning_rate=0.05, base_bias=1.0)
    gate, metrics = warm_start().fit(measured(), config)
    assert len(metrics["loss"]) == 120 and metrics["loss"][-1] < 0.5 * metrics["loss"][0]
    assert metrics["accuracy_weighted"] > 0.6 and sum(metrics[f"share/{s}"] for s in range(4)) == pytest.approx(1)
    assert gate.kernel.shape == (2, 32, 4)
    again, _ = warm_start().fit(measured(), config)
    assert tiny.relative(gate, again) == 0


def test_prompt_tokens_go_to_the_base():
    gate, _ = warm_start().fit(measured(), WarmStartConfig(learning_rate=0.05, base_bias=0.0, base_weight=1.0, kl_clip=1e-3))
    d = measured()
    logits = np.einsum("lmd,lds->lms", warm_start().routed_inputs(gate, d), gate.kernel) + np.asarray(gate.bias)[:, None]
    assert (logits.argmax(-1)[:, d.response == 0] == 0).mean() > 0.9


def test_a_soft_target_shares_a_token_among_slots():
    targets = np.zeros((12, 4), np.float32)
    targets[:, 1:3] = 0.5
    d = warm_start().measure(tiny.trajectories(), SLOTS, targets)
    config = WarmStartConfig(loss="plain", learning_rate=0.05, base_bias=0.0)
    gate, _ = warm_start().fit(d, config)
    logits = np.einsum("lmd,lds->lms", warm_start().routed_inputs(gate, d), gate.kernel) + np.asarray(gate.bias)[:, None]
    probs = np.asarray(jax.nn.softmax(logits))[:, d.response > 0].mean((0, 1))
    np.testing.assert_allclose(probs, [0, 0.5, 0.5, 0], atol=0.1)


def test_load_balance_evens_the_shares():
    gates = [warm_start().fit(measured(), WarmStartConfig(loss="plain", load_balance=b, learning_rate=0.05))[1] for b in (0.0, 5.0)]
    spread = [max(m[f"share/{s}"] for s in range(4)) for m in gates]
    assert spread[1] < spread[0]


def test_routing_metrics_of_a_known_gate():
    d = dataclasses.replace(
        data([0.5, 2.0, 0.5, 0.1], [1, 1, 2, 2], [1, 1, 1, 0]), turn=np.array([0, 0, 1, -1]),
        base_inputs=np.array([[[1.0, 0], [0, 1], [1, 0], [0, 1]]], np.float32),
    )  # fmt: skip
    kernel = jnp.zeros((1, 2, 4)).at[0, 0, 1].set(50.0).at[0, 1, 2].set(50.0)  # first feature: slot 1, second: slot 2
    metrics = routing_metrics(Gate(kernel, jnp.zeros((1, 4))), d, d.base_inputs)
    assert metrics["accuracy"] == pytest.approx(1 / 3) and metrics["accuracy_weighted"] == pytest.approx(0.5 / 2)
    assert metrics["turn_agreement"] == pytest.approx(2 / 3) and metrics["share/1"] == pytest.approx(2 / 3)
    assert metrics["entropy"] < 1e-3


@pytest.mark.parametrize("slots", [[0] * 12, [4] * 12, [1] * 11])
def test_labels_must_name_an_adapter_of_the_bank(slots):
    with pytest.raises(ValueError, match="slots"):
        warm_start().measure(tiny.trajectories(), slots)


@pytest.mark.parametrize("bad", [{"loss": "other"}, {"stream": "other"}, {"steps": 2}, {"kl_clip": 0.0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match="gate."):
        WarmStartConfig(**bad)


def test_rows_hold_one_slot_each():
    for batch in measured().batches:
        assert batch.tokens.shape == (2, 32)
    assert sum(b.action_tokens for b in measured().batches) == pack(tiny.trajectories(), np.zeros(12), lengths=(32,)).action_tokens
