"""One decision per token and layer for all projections: what each kind of routing must equal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model import AdapterBank, Gate, Routing, count_gate_parameters, init_gate, slice_bank
from tests.model import tiny

X = jnp.asarray(tiny.tokens(3, 10))


def same(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, atol=tolerance * float(jnp.abs(b).max()))


def test_one_hot_weights_are_the_single_adapter_and_the_base():
    model, bank = tiny.model(), tiny.bank(adapters=2)
    got = tiny.logits(model, X, adapters=bank, routing=Routing(jnp.eye(3)))
    alone = [tiny.logits(model, X), *(tiny.logits(model, X, adapters=slice_bank(bank, k)) for k in (0, 1))]
    for row in range(3):
        same(got[row], alone[row][row])
    assert float(jnp.abs(alone[0] - alone[1]).max()) > 0.1


def test_a_uniform_mixture_adds_the_mean_of_the_deltas():
    """With B of all adapters, each times its scale, stacked into one adapter of rank K R, scaled by 1 / S."""
    model, bank = tiny.model(), tiny.bank(adapters=2)
    got = tiny.logits(model, X, adapters=bank, routing=Routing(jnp.full((3, 3), 1 / 3)))
    a = {n: jnp.concatenate([x[:, k] for k in (0, 1)], axis=-1)[:, None] for n, x in bank.a.items()}
    b = {n: jnp.concatenate([bank.scale[k] * x[:, k] for k in (0, 1)], axis=-2)[:, None] for n, x in bank.b.items()}
    same(got, tiny.logits(model, X, adapters=AdapterBank(a, b, jnp.ones(1) / 3)))


def test_the_gate_takes_the_best_slot_of_each_token_and_layer():
    """Oracle: a gate over the bank, replayed token by token with the slots it reports."""
    model, bank, gate = tiny.model(), tiny.bank(adapters=3), tiny.gate(4)
    out = tiny.forward(model, X, adapters=bank, routing=Routing(gate=gate), collect=("gate_logits", "inputs"))
    assert out.slots.shape == (3, 10, 3) and out.slots.dtype == jnp.int8
    assert out.gate_logits.shape == (3, 10, 3, 4)
    logits = jnp.einsum("btld,lds->btls", out.inputs, gate.kernel) + gate.bias
    same(out.gate_logits, logits)
    np.testing.assert_array_equal(out.slots, jnp.argmax(logits, -1))
    assert len(np.unique(out.slots)) == 4

    # the same slots chosen by hand: every layer's bank holds, per token, only the chosen adapter
    cheap = tiny.forward(model, X, adapters=bank, routing=Routing(gate=gate))
    assert cheap.gate_logits is None and cheap.inputs is None
    np.testing.assert_array_equal(cheap.hidden, out.hidden)
    token = (1, 4)
    for slot in range(4):
        forced = Gate(gate.kernel * 0, jnp.zeros_like(gate.bias).at[:, slot].set(1.0))
        expected = tiny.logits(model, X) if slot == 0 else tiny.logits(model, X, adapters=slice_bank(bank, slot - 1))
        same(tiny.logits(model, X, adapters=bank, routing=Routing(gate=forced))[token], expected[token])


def test_a_layers_choice_governs_its_own_projections_only():
    """Layers forced to different slots equal one adapter put together from those layers."""
    model, bank = tiny.model(), tiny.bank(adapters=2)
    bias = jnp.zeros((3, 3)).at[jnp.arange(3), jnp.asarray([2, 0, 1])].set(1.0)
    got = tiny.logits(model, X, adapters=bank, routing=Routing(gate=Gate(jnp.zeros((3, 48, 3)), bias)))
    a = {n: jnp.stack([x[0, 1], x[1, 0], x[2, 0]])[:, None] for n, x in bank.a.items()}
    b = {n: jnp.stack([bank.scale[1] * x[0, 1], 0 * x[1, 0], bank.scale[0] * x[2, 0]])[:, None] for n, x in bank.b.items()}
    same(got, tiny.logits(model, X, adapters=AdapterBank(a, b, jnp.ones(1))))


def test_rows_follow_the_gate_or_their_weights():
    model, bank, gate = tiny.model(), tiny.bank(adapters=2), tiny.gate(3)
    weights = jnp.eye(3)
    mixed = tiny.forward(model, X, adapters=bank, routing=Routing(weights, gate, jnp.asarray([False, True, False])))
    gated = tiny.forward(model, X, adapters=bank, routing=Routing(gate=gate))
    fixed = tiny.forward(model, X, adapters=bank, routing=Routing(weights))
    same(mixed.hidden[1], gated.hidden[1])
    same(mixed.hidden[::2], fixed.hidden[::2])
    np.testing.assert_array_equal(mixed.slots[2], 2)
    np.testing.assert_array_equal(mixed.slots[1], gated.slots[1])
    assert fixed.slots is None


def test_straight_through_is_top1_forward_and_softmax_backward():
    """The gradient of the last layer's gate is J_softmax^T applied to the gradient with respect to that layer's slot weights."""
    model, bank, gate = tiny.model(num_hidden_layers=1), tiny.bank(adapters=2), tiny.gate(3)
    bank = jax.tree.map(lambda x: x[:1] if x.ndim == 4 else x, bank)
    gate = jax.tree.map(lambda x: x[:1], gate)
    x = X[:, :1]  # one token a row: its slot weights are the row's weights, which have a gradient of their own

    def loss(routing):
        return jnp.sum(jnp.sin(tiny.logits(model, x, adapters=bank, routing=routing)))

    def through(gate, mode="straight_through"):
        return Routing(gate=gate, mode=mode)

    same(tiny.logits(model, x, adapters=bank, routing=through(gate)), tiny.logits(model, x, adapters=bank, routing=through(gate, "top1")))
    top1 = jax.grad(lambda gate: loss(through(gate, "top1")))(gate)
    assert not np.asarray(top1.kernel).any()

    out = tiny.forward(model, x, adapters=bank, routing=through(gate), collect=("gate_logits", "inputs"))
    one_hot = jax.nn.one_hot(out.slots[:, 0, 0], 3)
    slot_gradient = jax.grad(lambda weights: loss(Routing(weights)))(one_hot)
    soft = jax.nn.softmax(out.gate_logits[:, 0, 0])
    expected = soft * (slot_gradient - jnp.sum(soft * slot_gradient, -1, keepdims=True))
    got = jax.grad(lambda gate: loss(through(gate)))(gate)
    same(got.bias[0], expected.sum(0), 1e-4)
    same(got.kernel[0], jnp.einsum("bd,bs->ds", out.inputs[:, 0, 0], expected), 1e-4)


def test_the_gate_does_not_bend_the_network():
    """Its input is behind a stop-gradient: embeddings feel no gradient through the gate's logits."""
    model, bank, gate = tiny.model(), tiny.bank(adapters=2), tiny.gate(3)

    graphdef, state = nnx.split(model)

    def total(state):
        out = tiny.forward(nnx.merge(graphdef, state), X, adapters=bank, routing=Routing(gate=gate), collect=("gate_logits",))
        return out.gate_logits.sum()

    assert not any(np.asarray(x).any() for x in jax.tree.leaves(jax.grad(total)(state)))


def test_soft_mode_mixes_by_the_softmax():
    model, bank = tiny.model(), tiny.bank(adapters=2)
    bias = jnp.log(jnp.asarray([0.5, 0.2, 0.3]))
    gate = Gate(jnp.zeros((3, 48, 3)), jnp.broadcast_to(bias, (3, 3)))
    same(
        tiny.logits(model, X, adapters=bank, routing=Routing(gate=gate, mode="soft")),
        tiny.logits(model, X, adapters=bank, routing=Routing(jnp.broadcast_to(jnp.exp(bias), (3, 3)))),
    )


def test_gates_are_counted_without_making_any():
    gate = init_gate(tiny.CONFIG, 5, 5.0, jax.random.key(0))
    assert sum(x.size for x in jax.tree.leaves(gate)) == count_gate_parameters(tiny.CONFIG, 5)
    np.testing.assert_array_equal(gate.bias[:, 0], 5.0)
    np.testing.assert_array_equal(gate.bias[:, 1:], 0.0)


@pytest.mark.parametrize("mode", ["top1", "soft", "straight_through"])
def test_routing_passes_through_jit_as_an_argument(mode):
    model, bank = tiny.model(), tiny.bank(adapters=2)
    routing = Routing(jnp.eye(3), tiny.gate(3), jnp.ones(3, bool), mode)
    jitted = jax.jit(lambda routing, bank: tiny.logits(model, X, adapters=bank, routing=routing))
    same(jitted(routing, bank), tiny.logits(model, X, adapters=bank, routing=routing))
