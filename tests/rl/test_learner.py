import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import model.decoder_layer
from model import CausalLM, Gate, Routing, init_bank, init_gate
from model.parameters import abstract_parameters
from rl.advantages import group_advantages
from rl.checkpoint import Checkpoints
from rl.learner import Learner, LearnerConfig
from rl.loss import LossConfig
from rl.packing import pack
from rl.trajectory import Trajectory
from tests.rl import tiny

ADVANTAGES = np.random.default_rng(7).normal(size=12)


ALL_OPTIONS = LossConfig(kl=0.5, ratio="sequence", icepop=(0.5, 5.0))


def fresh_learner(rows=2, loss=None, bank=None, **settings):
    settings = {"learning_rate": 1e-2, "warmup_steps": 3, "max_grad_norm": 0.1} | settings
    return Learner(tiny.model(), LearnerConfig(micro_rows=rows, **settings), loss, bank=bank)


learner = functools.cache(fresh_learner)  # tests share what is compiled


def packed(lengths=(32,), rows=2, order=None):
    order = np.arange(12) if order is None else order
    trajectories = tiny.trajectories()
    return pack([trajectories[i] for i in order], ADVANTAGES[order], lengths=lengths, micro_rows=rows)


@jax.jit
def oracle_loss(params):
    """The default loss with one trajectory a row and whole logits."""
    trajectories = tiny.trajectories()
    tokens, mask, engine = (
        np.stack([np.pad(getattr(t, name), (0, 30 - len(t.tokens))) for t in trajectories]) for name in ("tokens", "loss_mask", "logprobs")
    )
    logp = jax.nn.log_softmax(tiny.model()(tokens, adapters=params)[:, :-1])
    logp = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1)[..., 0]
    weight = jnp.exp(jax.lax.stop_gradient(logp) - engine[:, 1:])
    keep = (weight >= 1e-4) & (weight <= 1e2)
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
    return -jnp.sum(mask[:, 1:] * keep * jnp.minimum(weight, 2) * ratio * ADVANTAGES[:, None]) / mask[:, 1:].sum()


def test_packed_gradient_is_that_of_the_trajectories_one_by_one():
    params = tiny.bank()
    loss, expected = jax.jit(jax.value_and_grad(oracle_loss))(params)
    gradient, sums = learner().gradient(params, packed())
    assert float(sums["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert tiny.relative(gradient, expected) < 1e-5


@pytest.mark.parametrize("variant", [{"order": np.random.default_rng(3).permutation(12)}, {"rows": 8, "lengths": (64,)}])
def test_gradient_does_not_depend_on_order_micro_batches_or_row_length(variant):
    params, rows = tiny.bank(), variant.get("rows", 2)
    reference, _ = learner().gradient(params, packed())
    gradient, _ = learner(rows).gradient(params, packed(**variant))
    assert tiny.relative(gradient, reference) < 1e-5


def test_what_the_padding_holds_does_not_matter():
    params, batch = tiny.bank(), packed()
    noise = np.where(batch.segment_ids == 0, 13, batch.tokens).astype(np.int32)
    assert (noise != batch.tokens).any()
    a, b = (learner().gradient(params, x)[0] for x in (batch, dataclasses.replace(batch, tokens=noise)))
    assert tiny.relative(a, b) == 0


def test_the_loss_with_all_options_is_invariant_too():
    params = tiny.bank()
    a, _ = learner(2, ALL_OPTIONS).gradient(params, packed())
    b, _ = learner(8, ALL_OPTIONS).gradient(params, packed(rows=8, lengths=(64,)))
    assert tiny.relative(a, b) < 1e-5


def test_finite_differences_confirm_the_adapter_gradient():
    """Of the divergence term: with l_old = l the policy term's value is constant, and its gradient is the oracle's above."""
    params, batch, learn = tiny.bank(size=0.1), packed(), learner(2, ALL_OPTIONS)
    batch = dataclasses.replace(batch, advantages=0 * batch.advantages)
    gradient, _ = learn.gradient(params, batch)
    norm = float(optax.tree.norm(gradient))
    step = 1e-2 / norm
    values = [
        float(learn.gradient(jax.tree.map(lambda p, g, s=s: p + s * step * g / norm, params, gradient), batch)[1]["loss"]) for s in (1, -1)
    ]
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(norm, rel=1e-2)


def test_log_probs_are_taken_at_the_sampling_temperature():
    batch, params = packed(), tiny.bank()
    logits = tiny.model()(batch.tokens, batch.positions, batch.segment_ids, params)
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits / 0.7), batch.targets[..., None], axis=-1)[..., 0]
    real = batch.segment_ids > 0
    np.testing.assert_allclose(learner(temperature=0.7).logprobs(params, batch)[real], expected[real], atol=1e-4)


def test_functions_compile_once_whatever_the_number_of_rows():
    learn = fresh_learner()
    state = learn.init(tiny.bank())
    for count in (12, 3, 7):
        batch = pack(tiny.trajectories()[:count], ADVANTAGES[:count], lengths=(32,), micro_rows=2)
        state, metrics = learn.step(state, batch)
    assert metrics["compiles"] == 3 and int(state.step) == 3


def test_a_step_is_adamw_on_the_clipped_gradient_and_leaves_the_base_alone():
    before = jax.tree.map(np.array, tiny.model().parameters())
    learn, params = learner(), tiny.bank()
    gradient, _ = learn.gradient(params, packed())
    state, metrics = learn.step(learn.init(params), packed())
    assert metrics["grad_norm"] > 0.1 and metrics["learning_rate"] == pytest.approx(1e-2 / 4)
    # Adam's first step is the sign of the gradient, whatever its size
    moved = params.a["q"] - state.params.a["q"]
    np.testing.assert_allclose(moved, 1e-2 / 4 * np.sign(gradient.a["q"]), rtol=1e-2, atol=1e-5)
    np.testing.assert_array_equal(state.params.scale, params.scale)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), tiny.model().parameters(), before))


def test_a_batch_without_action_tokens_changes_nothing():
    learn = learner()
    state = learn.init(tiny.bank())
    after, metrics = learn.step(state, pack([], [], lengths=(32,), micro_rows=2))
    assert after is state and metrics == {"action_tokens": 0.0, "skipped": 1.0}


def test_a_gradient_that_is_not_finite_is_skipped():
    learn, params = learner(), tiny.bank()
    batch = packed()
    state, metrics = learn.step(learn.init(params), dataclasses.replace(batch, advantages=np.full_like(batch.advantages, np.nan)))
    assert metrics["skipped"] == 1 and tiny.relative(state.params, params) == 0


def test_metrics_say_how_far_engine_base_and_version_are(monkeypatch):
    learn, params = learner(), tiny.bank()
    monkeypatch.setattr(learn, "config", dataclasses.replace(learn.config, base_kl_every=1))
    batch = packed()
    batch = dataclasses.replace(batch, logprobs=np.where(batch.mask > 0, learn.logprobs(params, batch), 0).astype(np.float32))
    base = np.where(batch.mask > 0, learn.logprobs(None, batch), 0)
    first = slice(0, 2)
    gap = (batch.logprobs - base)[first][batch.mask[first] > 0]
    state, metrics = learn.step(learn.init(params), batch)
    assert metrics["engine_gap"] < 1e-6 and metrics["effective_sample_share"] == pytest.approx(1)
    assert metrics["base_k3"] == pytest.approx(np.mean(np.exp(-gap) - 1 + gap), rel=1e-3)
    assert metrics["policy_lag"] == 0 and learn.step(state, batch)[1]["policy_lag"] == 1


def test_resuming_gives_the_undisturbed_run_bit_for_bit(tmp_path):
    learn, checkpoints = learner(), Checkpoints(tmp_path)
    state = learn.step(learn.init(tiny.bank()), packed())[0]
    checkpoints.save(int(state.step), state, {"version": 1})
    undisturbed, first = learn.step(state, packed())
    restored = checkpoints.restore(learn.init(init_bank(tiny.CONFIG, 1, 4, 8.0, jax.random.key(9))))
    resumed, second = learn.step(restored.state, packed())
    assert tiny.relative(resumed.params, undisturbed.params) == 0 and first["loss"] == second["loss"]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), (resumed.opt_state, resumed.step), (undisturbed.opt_state, undisturbed.step))
    assert jax.tree.all(same) and (jax.random.key_data(resumed.rng) == jax.random.key_data(undisturbed.rng)).all()


def rollouts(logits, good, seed, groups=4, size=16):
    """One sampled token after a fixed prompt; reward 1 for a good one."""
    random, logp, out = np.random.default_rng(seed), np.asarray(jax.nn.log_softmax(logits)), []
    probabilities = np.exp(logp.astype(np.float64))
    for index in range(groups * size):
        token = random.choice(len(logp), p=probabilities / probabilities.sum())
        arrays = {
            "tokens": [3, 5, 7, token],
            "loss_mask": [0, 0, 0, 1],
            "logprobs": [0, 0, 0, logp[token]],
            "turns": [0] * 4,
            "versions": [0] * 4,
        }
        out.append(Trajectory(id=f"t{index}", environment="e", task_id="t", group=f"g{index // size}", reward=float(good[token]), **arrays))
    return out


@pytest.mark.parametrize("what", ["adapter", "gate"])
def test_updates_raise_the_reward_of_a_bandit(what):
    bank, kept = (None, None) if what == "adapter" else (tiny.bank(3), jax.tree.map(np.array, tiny.bank(3)))
    learn = Learner(tiny.model(), LearnerConfig(learning_rate=1e-2 if bank is None else 0.05, micro_rows=8), bank=bank)

    @jax.jit
    def logits(params, weights=None):
        adapters, routing = (params, None) if bank is None else (bank, Routing(weights, params if weights is None else None))
        return tiny.model()(jnp.array([[3, 5, 7]]), adapters=adapters, routing=routing)[0, -1]

    if bank is None:
        start, good = init_bank(tiny.CONFIG, 1, 4, 8.0, jax.random.key(1)), np.arange(50) % 2 == 0
    else:  # good is what adapter 1 makes likelier
        start = init_gate(tiny.CONFIG, 4, 1.0, jax.random.key(1))
        base, second = (logits(start, jax.nn.one_hot(jnp.array([slot]), 4)) for slot in (0, 2))
        good = jax.nn.softmax(second) > jax.nn.softmax(base)
    state, rewards = learn.init(start), []
    for iteration in range(20):
        sampled = rollouts(logits(state.params), good, iteration)
        rewards.append(np.mean([t.reward for t in sampled]))
        state, metrics = learn.step(state, pack(sampled, group_advantages(sampled).values, lengths=(24,), micro_rows=8))
        assert metrics["engine_gap"] < 1e-3
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.2, rewards
    assert bank is None or tiny.relative(bank, kept) == 0  # the gate moves alone


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Surrogate(Gate):
    """A gate that reads inputs[L, N, T, D], whatever the stream is, with the logits[L, N, T, S] that chose the slots."""

    inputs: jax.Array
    logits: jax.Array


def test_the_gate_gradient_is_that_of_the_straight_through_surrogate(monkeypatch):
    """The surrogate around a gate g_0: in every layer slot weights one_hot(argmax g_0) + softmax(g) - softmax(g_0), where g reads what g_0
    read. Finite differences in g."""
    bank, batch = tiny.bank(2, size=0.5), packed(lengths=(64,), rows=8)
    gate = jax.tree.map(lambda x: 10 * x, init_gate(tiny.CONFIG, 3, 0.02, jax.random.key(0)))
    batch = dataclasses.replace(batch, advantages=0 * batch.advantages)  # leaves the divergence term
    config, loss = LearnerConfig(learning_rate=1e-2, micro_rows=8), LossConfig(kl=1.0)
    gradient, sums = Learner(tiny.model(), config, loss, bank=bank).gradient(gate, batch)
    run = jax.jit(functools.partial(tiny.model().forward, collect=("inputs", "gate_logits")))
    out = run(batch.tokens, batch.positions, batch.segment_ids, bank, Routing(gate=gate))
    assert len(np.unique(out.slots[batch.segment_ids > 0])) == 3
    frozen = [jnp.moveaxis(x, 2, 0) for x in (out.inputs, out.gate_logits)]

    def scores(gate, hidden):
        return jnp.concatenate([gate.inputs @ gate.kernel + gate.bias, gate.logits], axis=-1)

    def weights(routing, scores):
        logits, start = jnp.split(scores, 2, axis=-1)
        return jax.nn.one_hot(jnp.argmax(start, -1), 3) + jax.nn.softmax(logits) - jax.nn.softmax(start)

    monkeypatch.setattr(model.decoder_layer, "gate_scores", scores)
    monkeypatch.setattr(model.decoder_layer, "slot_weights", weights)
    differenced = Learner(tiny.model(), config, loss, bank=bank)
    base, norm, values = differenced.logprobs(None, batch), float(optax.tree.norm(gradient)), []
    for sign in (0, 1, -1):
        shifted = jax.tree.map(lambda x, g, s=sign: x + s * 0.003 * g / norm, gate, gradient)
        surrogate = Surrogate(shifted.kernel, shifted.bias, *frozen)
        gap = (differenced.logprobs(surrogate, batch) - base) * batch.mask
        values.append(float((gap.astype(np.float64) ** 2).sum() / 2 / batch.mask.sum()))
    assert values[0] == pytest.approx(float(sums["loss"]), rel=1e-4)
    assert (values[1] - values[2]) / 0.006 == pytest.approx(norm, rel=1e-2)


@pytest.mark.parametrize("bad", [{"learning_rate": 0.0}, {"schedule": "cosine"}, {"schedule": "step"}, {"micro_rows": 0}])
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError, match="learner."):
        LearnerConfig(**bad)


def test_a_learner_refuses_what_it_does_not_train():
    with pytest.raises(ValueError, match="one adapter"):
        learner().init(tiny.bank(2))
    with pytest.raises(ValueError, match="Gate of 3 slots"):
        fresh_learner(bank=tiny.bank(2)).init(init_gate(tiny.CONFIG, 4, 0.0, jax.random.key(0)))


def test_a_model_of_rows_that_are_not_packed_refuses_packed_ones():
    net = CausalLM(dataclasses.replace(tiny.CONFIG, packed=False), parameters=tiny.model().parameters())
    with pytest.raises(ValueError, match="several trajectories in a row.*pack with packed=False"):
        Learner(net, LearnerConfig(micro_rows=2)).gradient(tiny.bank(), packed())


def test_a_step_is_lowered_from_shapes_alone():
    """Model, bank and parameters are shapes, as for an accelerator that is not there."""
    real = tiny.model()
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("fsdp",))
    net = CausalLM(real.config, mesh=mesh, parameters=abstract_parameters(real.config, jnp.float32, mesh))
    bank = jax.eval_shape(lambda: init_bank(real.config, 2, 4, 4.0, jax.random.key(0)))
    gate = jax.eval_shape(lambda: init_gate(real.config, 3, 0.0, jax.random.key(0)))
    lowered = Learner(net, LearnerConfig(micro_rows=2), bank=bank).lower(gate, 32)
    gradient = lowered["gradient"].compile()
    batch = next(pack(tiny.trajectories(), np.ones(12), lengths=(32,), micro_rows=2).micro_batches(2))
    real_bank, real_gate = tiny.bank(2), init_gate(real.config, 3, 0.0, jax.random.key(0))
    learner = Learner(CausalLM(real.config, mesh=mesh, parameters=real.parameters()), LearnerConfig(micro_rows=2), bank=real_bank)
    state = learner.init(real_gate)
    found, _ = gradient(learner._frozen, learner.bank, state.params, learner._on_mesh(batch), np.float32(batch.action_tokens))
    expected, _ = learner.gradient(state.params, batch)
    assert tiny.relative(found, expected) < 1e-6
    assert lowered["update"].compile() is not None
