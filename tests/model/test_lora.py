"""Adapters against PEFT, and the bank's own bookkeeping."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch

from model import count_adapter_parameters, init_bank, load_peft, load_pretrained, save_peft, slice_bank, stack_banks
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


@pytest.mark.parametrize("settings", [{}, {"target_modules": ["q_proj", "down_proj"]}, {"use_rslora": True}, {"layers_to_transform": [1]}])
def test_an_adapter_made_by_peft_gives_its_logits(loaded, tmp_path, settings):
    net, model = loaded
    wrapped, x = peft_model(net, **settings), tiny.tokens(2, 15)
    wrapped.save_pretrained(tmp_path / "adapter")
    reference = tiny.torch_logits(wrapped, x)
    ours = tiny.logits(model, jnp.asarray(x), adapters=load_peft(tmp_path / "adapter", model.config))
    np.testing.assert_allclose(ours, reference, atol=2e-4 * np.abs(reference).max())
    assert np.abs(reference - np.asarray(tiny.logits(model, jnp.asarray(x)))).max() > 0.05


def test_an_exported_adapter_gives_our_logits_in_peft(loaded, tmp_path):
    net, model = loaded
    bank, x = slice_bank(tiny.bank(model.config, adapters=2), 1), tiny.tokens(2, 15)
    save_peft(bank, model.config, tmp_path / "adapter")
    wrapped = peft.PeftModel.from_pretrained(net, tmp_path / "adapter")
    ours = np.asarray(tiny.logits(model, jnp.asarray(x), adapters=bank))
    np.testing.assert_allclose(tiny.torch_logits(wrapped, x), ours, atol=2e-4 * np.abs(ours).max())
    again = load_peft(tmp_path / "adapter", model.config)
    jax.tree.map(np.testing.assert_array_equal, again, bank)
    with pytest.raises(ValueError, match="slice_bank"):
        save_peft(tiny.bank(model.config, adapters=2), model.config, tmp_path / "two")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "unknown base_model.model.model.embed_tokens"),
        ({"use_dora": True}, "use_dora=True"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
    ],
)
def test_what_the_bank_cannot_hold_is_an_error(loaded, tmp_path, settings, message):
    net, model = loaded
    peft_model(net, **settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=message):
        load_peft(tmp_path / "adapter", model.config)


def test_an_adapter_of_another_model_is_an_error(loaded, tmp_path):
    _, model = loaded
    narrow = tiny.model(hidden_size=32, num_hidden_layers=4).config
    save_peft(tiny.bank(narrow), narrow, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"has shape \(4, 32\), the model and rank 4 imply \(4, 48\)"):
        load_peft(tmp_path / "adapter", model.config)
    with pytest.raises(ValueError, match="adapter_config.json does not exist"):
        load_peft(tmp_path, model.config)


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
