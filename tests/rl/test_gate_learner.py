import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import Routing, init_gate
from rl.gate_learner import GateData, GateWarmStart, WarmStartConfig, label_weights, routing_metrics, thin
from rl.packing import pack
from tests.devices import environment
from tests.rl import tiny

SLOTS = np.array([1, 2, 3, 1, 2, 3, 3, 3, 1, 1, 2, 2])
BANK = functools.cache(lambda: tiny.bank(3))


@functools.cache
def warm_start():
    return GateWarmStart(tiny.model(), BANK(), lengths=(32,), micro_rows=2)


@functools.cache
def measured():
    return warm_start().measure(tiny.trajectories(), SLOTS)


@functools.cache
def thinned():
    """A warm start with room for 60 of the tokens, and its data."""
    warm = GateWarmStart(tiny.model(), BANK(), lengths=(32,), micro_rows=2, feature_bytes=60 * 2 * 32 * 4 + 100)
    return warm, warm.measure(tiny.trajectories(), SLOTS)


def data(kl, slot, response, count=None):
    return GateData(
        batches=[],
        micro=np.zeros(len(kl), int),
        position=np.arange(len(kl)),
        count=np.ones(len(kl)) if count is None else np.array(count, float),
        response=np.array(response, np.float32),
        slot=np.array(slot),
        target=np.eye(4, dtype=np.float32)[slot],
        turn=np.full(len(kl), -1),
        kl=np.array(kl, np.float32),
    )


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
    on_base, mixed = init_gate(tiny.CONFIG, 4, 100.0, jax.random.key(0)), init_gate(tiny.CONFIG, 4, 0.02, jax.random.key(1))
    d = measured()
    base = warm_start().inputs(None, d)
    assert base.shape == (2, 4096, 32) and not np.asarray(base[:, len(d.kl) :]).any()
    np.testing.assert_allclose(warm_start().inputs(on_base, d), base, atol=1e-5)
    run = jax.jit(functools.partial(tiny.model().forward, collect=("gate_logits",)))
    for gate in (on_base, mixed):
        outs = [run(b.tokens, b.positions, b.segment_ids, BANK(), Routing(gate=gate)) for b in d.batches]
        expected = np.concatenate([np.asarray(out.gate_logits)[b.segment_ids > 0] for out, b in zip(outs, d.batches, strict=True)])
        np.testing.assert_allclose(warm_start().gate_logits(gate, d), np.moveaxis(expected, 0, 1), atol=1e-3)


def test_a_thinned_token_stands_for_those_of_its_stratum():
    strata = np.array([0] * 500 + [1] * 40 + [2] * 3)
    kept, count = thin(strata, 63)
    assert (np.diff(kept) > 0).all()
    assert [(strata[kept] == s).sum() for s in range(3)] == [30, 30, 3]
    np.testing.assert_allclose([count[strata[kept] == s].sum() for s in range(3)], [500, 40, 3])
    np.testing.assert_array_equal(kept, thin(strata, 63)[0])
    kept, count = thin(strata, 543)
    assert len(kept) == 543 and (count == 1).all()


def test_sums_over_thinned_tokens_are_unbiased():
    values, strata = np.random.default_rng(0).gamma(1.0, size=300), np.arange(300) ** 2 // 30_000
    sums = [count @ values[kept] for kept, count in (thin(strata, 60, seed) for seed in range(400))]
    assert abs(np.mean(sums) - values.sum()) < 4 * np.std(sums) / 20


def test_no_more_inputs_are_held_than_there_is_room_for():
    warm, d = thinned()
    whole = measured()
    assert len(d.kl) == 60 < len(whole.kl)
    inputs = warm.inputs(None, d)
    assert inputs.shape == (2, 60, 32)
    index = {token: m for m, token in enumerate(zip(whole.micro, whole.position, strict=True))}
    kept = [index[token] for token in zip(d.micro, d.position, strict=True)]
    np.testing.assert_array_equal(inputs, warm_start().inputs(None, whole)[:, kept])
    for name in ("response", "slot", "target", "turn", "kl"):
        np.testing.assert_array_equal(getattr(d, name), getattr(whole, name)[kept])
    for slot in (1, 2, 3):
        for response in (0, 1):
            found, every = ((x.slot == slot) & (x.response == response) for x in (d, whole))
            assert d.count[found].sum() == pytest.approx(every.sum()) and found.sum() >= min(every.sum(), 10)
    _, metrics = warm.fit(d, WarmStartConfig(learning_rate=0.05, base_bias=1.0))
    assert metrics["loss"][-1] < 0.5 * metrics["loss"][0]


def test_a_kept_token_weighs_as_much_as_those_that_it_stands_for():
    every = data([0.5, 0.5, 0.25, 0.1, 0.1, 9.0], [1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 0])
    some = data([0.5, 0.25, 0.1, 9.0], [1, 1, 2, 2], [1, 1, 1, 0], [2, 1, 2, 1])
    for config in (WarmStartConfig(), WarmStartConfig(loss="plain")):
        (weight, base), (kept, kept_base) = (label_weights(d, config) for d in (every, some))
        np.testing.assert_allclose(kept, [weight[:2].sum(), weight[2], weight[3:5].sum(), 0], rtol=1e-6)
        np.testing.assert_allclose(kept_base.sum(), base.sum(), rtol=1e-6)
    logits = np.random.default_rng(0).normal(size=(2, 6, 4))
    logits[:, 1], logits[:, 4] = logits[:, 0], logits[:, 3]
    turn = np.array([0, 0, 0, 1, 1, -1])
    found = routing_metrics(dataclasses.replace(some, turn=turn[[0, 2, 3, 5]]), logits[:, [0, 2, 3, 5]])
    assert found == pytest.approx(routing_metrics(dataclasses.replace(every, turn=turn), logits))


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


def test_fitting_lowers_the_loss_and_routes_what_matters_to_its_slot():
    config = WarmStartConfig(learning_rate=0.05, base_bias=1.0)
    gate, metrics = warm_start().fit(measured(), config)
    assert len(metrics["loss"]) == 120 and metrics["loss"][-1] < 0.5 * metrics["loss"][0]
    assert metrics["accuracy_weighted"] > 0.6 and sum(metrics[f"share/{s}"] for s in range(4)) == pytest.approx(1)
    assert gate.kernel.shape == (2, 32, 4)
    again, _ = warm_start().fit(measured(), config)
    assert tiny.relative(gate, again) == 0


def test_a_gate_that_grows_learns_its_new_slots_and_keeps_every_bit_of_the_old():
    config = WarmStartConfig(learning_rate=0.05, base_bias=1.0)
    old, _ = warm_start().fit(measured(), config)
    old = jax.tree.map(lambda x: x[..., :3], old)  # as if the third adapter were new
    gate, metrics = warm_start().fit(measured(), config, old=old)
    assert all(np.array_equal(a[..., :3], b) for a, b in zip(jax.tree.leaves(gate), jax.tree.leaves(old), strict=True))
    assert metrics["loss"][-1] < 0.8 * metrics["loss"][0]
    d, logits = measured(), warm_start().gate_logits(gate, measured())
    new = (logits.argmax(-1) == 3)[:, d.response > 0]
    assert new[:, d.slot[d.response > 0] == 3].mean() > 0.5 > 0.2 > new[:, d.slot[d.response > 0] != 3].mean()


def test_prompt_tokens_go_to_the_base():
    gate, _ = warm_start().fit(measured(), WarmStartConfig(learning_rate=0.05, base_bias=0.0, base_weight=1.0, kl_clip=1e-3))
    d = measured()
    logits = warm_start().gate_logits(gate, d)
    assert (logits.argmax(-1)[:, d.response == 0] == 0).mean() > 0.9


def test_a_soft_target_shares_a_token_among_slots():
    targets = np.zeros((12, 4), np.float32)
    targets[:, 1:3] = 0.5
    d = warm_start().measure(tiny.trajectories(), SLOTS, targets)
    config = WarmStartConfig(loss="plain", learning_rate=0.05, base_bias=0.0)
    gate, _ = warm_start().fit(d, config)
    logits = warm_start().gate_logits(gate, d)
    probs = np.asarray(jax.nn.softmax(logits))[:, d.response > 0].mean((0, 1))
    np.testing.assert_allclose(probs, [0, 0.5, 0.5, 0], atol=0.1)


def test_load_balance_evens_the_shares():
    gates = [warm_start().fit(measured(), WarmStartConfig(loss="plain", load_balance=b, learning_rate=0.05))[1] for b in (0.0, 5.0)]
    spread = [max(m[f"share/{s}"] for s in range(4)) for m in gates]
    assert spread[1] < spread[0]


def test_routing_metrics_of_a_known_gate():
    d = dataclasses.replace(data([0.5, 2.0, 0.5, 0.1], [1, 1, 2, 2], [1, 1, 1, 0]), turn=np.array([0, 0, 1, -1]))
    metrics = routing_metrics(d, 50 * np.eye(4)[[[1, 2, 1, 2]]])  # one layer
    assert metrics["accuracy"] == pytest.approx(1 / 3) and metrics["accuracy_weighted"] == pytest.approx(0.5 / 2)
    assert metrics["turn_agreement"] == pytest.approx(2 / 3) and metrics["share/1"] == pytest.approx(2 / 3)
    assert metrics["entropy"] < 1e-3


@pytest.mark.parametrize("slots", [[0] * 12, [4] * 12, [1] * 11])
def test_labels_must_name_an_adapter_of_the_bank(slots):
    with pytest.raises(ValueError, match="slots"):
        warm_start().measure(tiny.trajectories(), slots)


@pytest.mark.parametrize("bad", [{"loss": "other"}, {"steps": 2}, {"kl_clip": 0.0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match="gate."):
        WarmStartConfig(**bad)


def test_rows_hold_one_slot_each():
    for batch in measured().batches:
        assert batch.tokens.shape == (2, 32)
    assert sum(b.action_tokens for b in measured().batches) == pack(tiny.trajectories(), np.zeros(12), lengths=(32,)).action_tokens


# in a process of its own, since the number of devices is set before JAX starts
PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh
from model import CausalLM
from rl.gate_learner import GateWarmStart, WarmStartConfig
from tests.rl import tiny

plain, bank, found = tiny.model(), tiny.bank(3), tiny.trajectories(40)
slots, config = np.arange(40) % 3 + 1, WarmStartConfig(steps=20, refreshes=1, learning_rate=0.05, base_bias=1.0)
token = 2 * 32 * 4
for names, shards, room in (({"fsdp": 8}, 8, 10_000), ({"data": 2, "fsdp": 2, "tensor": 2}, 4, 25)):  # room for all tokens, and for some
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(names.values())), tuple(names))
    net = CausalLM(tiny.CONFIG, mesh=mesh, parameters=plain.parameters())
    one = GateWarmStart(plain, bank, lengths=(48,), micro_rows=shards, feature_bytes=shards * room * token)
    many = GateWarmStart(net, bank, lengths=(48,), micro_rows=shards, feature_bytes=room * token)
    expected, data = one.measure(found, slots), many.measure(found, slots)
    assert (len(data.kl) == 4 * 25) == (room == 25)
    np.testing.assert_array_equal(data.position, expected.position)
    np.testing.assert_allclose(data.kl, expected.kl, rtol=1e-3, atol=1e-5)
    inputs, want = many.inputs(None, data), one.inputs(None, expected)
    assert inputs.addressable_shards[0].data.shape[1] * shards == inputs.shape[1]
    places = [warm.layout(d).place for warm, d in ((many, data), (one, expected))]
    np.testing.assert_allclose(np.asarray(inputs)[:, places[0]], np.asarray(want)[:, places[1]], atol=1e-4)
    (a, first), (b, second) = many.fit(data, config), one.fit(expected, config)
    assert a.kernel.sharding.is_fully_replicated
    assert tiny.relative(a, b) < 1e-4, (names, tiny.relative(a, b))
    assert all(np.allclose(first[name], second[name], atol=1e-2) for name in second), (first, second)
    print(names, tiny.relative(a, b))
print("devices agree")
"""


def test_the_gate_fitted_on_a_mesh_is_that_of_one_device():
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(8), capture_output=True, text=True, timeout=280)
    assert "devices agree" in done.stdout, done.stderr[-3000:]
