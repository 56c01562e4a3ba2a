"""Gradients of adapters against PEFT, and the bank's own bookkeeping. Its files are in test_peft_files.py."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from model import count_adapter_parameters, init_bank, load_peft, load_pretrained, slice_bank, stack_banks
from tests.model import tiny

MODULES = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def peft_model(net, **settings):
    """A PEFT model on `net` whose B is random."""
    torch.manual_seed(1)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "target_modules": MODULES, "task_type": "CAUSAL_LM"} | settings)
    wrapped = peft.get_peft_model(net, config).eval()
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape) * 0.1)
    return wrapped


@pytest.fixture
def loaded(tmp_path):
    net = tiny.checkpoint(tmp_path / "base", attention_bias=True)
    return net, load_pretrained(tmp_path / "base")


def test_gradients_equal_those_of_peft(loaded, tmp_path):
    net, model = loaded
    wrapped, x = peft_model(net), tiny.tokens(2, 15)
    wrapped.save_pretrained(tmp_path / "adapter")
    bank = load_peft(tmp_path / "adapter", model.config)
    logits = wrapped(torch.tensor(x)).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 97), torch.tensor(x[:, 1:]).reshape(-1)).backward()

    def loss(factors):
        logs = jax.nn.log_softmax(tiny.logits(model, jnp.asarray(x), adapters=bank.replace_factors(factors))[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logs, jnp.asarray(x)[:, 1:, None], -1))

    grads = jax.jit(jax.grad(loss))(bank.factors)
    reference = {n: p.grad.numpy() for n, p in wrapped.named_parameters() if p.grad is not None}
    assert len(reference) == 2 * 7 * 3
    for name, expected in reference.items():
        parts = name.split(".")
        half, layer, module = parts[-3][-1], int(parts[4]), parts[6].removesuffix("_proj")
        got = np.asarray(grads["AB".index(half)][module][layer, 0]).T
        assert np.linalg.norm(got - expected) <= 1e-3 * np.linalg.norm(expected), name


def test_stacked_banks_of_different_rank_come_apart_again():
    model, x = tiny.model(), jnp.asarray(tiny.tokens(2, 8))
    singles = [tiny.bank(rank=2, seed=3), tiny.bank(rank=5, seed=4)]
    both = stack_banks(singles)
    assert (both.size, both.rank) == (2, 5)
    for k, single in enumerate(singles):
        np.testing.assert_allclose(tiny.logits(model, x, adapters=slice_bank(both, k)), tiny.logits(model, x, adapters=single), atol=1e-4)
    with pytest.raises(IndexError, match="adapter 2 of a bank of 2"):
        slice_bank(both, 2)


def test_a_fresh_adapter_does_nothing_and_is_counted_without_making_it():
    model, x = tiny.model(), jnp.asarray(tiny.tokens(2, 8))
    fresh = init_bank(model.config, 1, 4, 8.0, jax.random.key(0))
    np.testing.assert_array_equal(tiny.logits(model, x, adapters=fresh), tiny.logits(model, x))
    assert sum(v.size for v in jax.tree.leaves(fresh.factors)) == count_adapter_parameters(model.config, 4)
    assert float(fresh.scale[0]) == 2.0


def test_the_scale_feels_no_gradient():
    model, bank, x = tiny.model(), tiny.bank(), jnp.asarray(tiny.tokens(1, 8))
    grads = jax.grad(lambda bank: tiny.logits(model, x, adapters=bank).sum())(bank)
    assert grads.scale[0] == 0 and np.asarray(grads.b["q"]).any()
