"""A gate that grows: until its new slots are opened, every token goes where it went, to the last bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import Gate, Routing, grow, open_slots, slice_bank, stack_banks
from model.gate import gate_scores, slot_weights
from tests.model import tiny

X = jnp.asarray(tiny.tokens(3, 10))


def one_layer(gate: Gate, hidden: jax.Array, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """The logits and slot weights of a gate's first layer."""

    @jax.jit
    def run(gate, hidden):
        logits = gate_scores(Gate(gate.kernel[0], gate.bias[0]), hidden)
        return logits, slot_weights(Routing(gate=gate, mode=mode), logits)

    return tuple(map(np.asarray, run(gate, hidden)))


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("mode", ["top1", "soft"])
def test_closed_slots_change_no_bit_of_logits_and_weights(mode, slots):
    random = np.random.default_rng(slots)
    for old in (2, 3, 5):
        gate = Gate(*(jnp.asarray(random.normal(size=s) * 10.0 ** random.integers(-3, 4), jnp.float32) for s in ((1, 64, old), (1, old))))
        hidden = jnp.asarray(random.normal(size=(2, 50, 64)), jnp.float32)
        before, after = one_layer(gate, hidden, mode), one_layer(grow(gate, slots), hidden, mode)
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b[..., :old])
        assert not after[1][..., old:].any() and np.isfinite(after[0]).all()


def test_ties_go_to_the_old_slot():
    gate = grow(Gate(jnp.zeros((1, 8, 2)), jnp.full((1, 2), -1e30)), 2)  # logits as low as a closed slot's own
    assert one_layer(gate, jnp.ones((1, 3, 8)), "top1")[1][..., 0].all()


def test_a_grown_model_takes_the_old_slots_and_gives_the_old_outputs():
    """The real routed model: more adapters in the bank, a grown gate, the same slots in every layer."""
    model, bank, gate = tiny.model(), tiny.bank(adapters=4), tiny.gate(3)
    old = stack_banks([slice_bank(bank, k) for k in (0, 1)])
    before = tiny.forward(model, X, adapters=old, routing=Routing(gate=gate), collect=("gate_logits",))
    after = tiny.forward(model, X, adapters=bank, routing=Routing(gate=grow(gate, 2)), collect=("gate_logits",))
    assert len(np.unique(before.slots)) == 3
    np.testing.assert_array_equal(after.slots, before.slots)
    # the sums over ranks have more terms, all of them 0; the order of sums is XLA's, so this is not promised to the last bit
    np.testing.assert_allclose(after.hidden, before.hidden, atol=1e-5)
    np.testing.assert_allclose(after.gate_logits[..., :3], before.gate_logits, atol=1e-4)


def test_opened_slots_start_as_those_of_a_fresh_gate_and_leave_the_others():
    gate = tiny.gate(3)
    opened = open_slots(grow(gate, 2), 3, 5.0, jax.random.key(0))
    np.testing.assert_array_equal(opened.kernel[..., :3], gate.kernel)
    np.testing.assert_array_equal(opened.bias[:, :3], gate.bias)
    np.testing.assert_allclose(opened.bias[:, 3:], gate.bias[:, :1].repeat(2, 1) - 5.0)
    assert 0.01 < float(opened.kernel[..., 3:].std()) < 0.03
    assert float(jax.nn.softmax(opened.bias)[:, 3:].min()) > 1e-6  # a gradient reaches them
