"""Adapters against PEFT, both ways, for each type and each layout of experts; whatever does not fit is refused by name."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file

from model import CheckpointError, load_peft, load_pretrained, save_peft, slice_bank
from model.peft_files import peft_targets
from tests.model import tiny

KINDS = list(tiny.BASES)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DELTA = ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"]
FFN = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """The net and the model of each type, made once; nothing may change the net."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = tiny.checkpoint(folder, kind), load_pretrained(folder)
        net, model = made[kind]
        return copy.deepcopy(net), model

    return get


def peft_model(net, **settings):
    """A PEFT model on `net` whose A and B are random."""
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(net, peft.LoraConfig(**{"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM"} | settings)).eval()
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape) * 0.1)
    return wrapped


def assert_close(got, expected, model, x):
    """Equal, and not for want of an adapter."""
    np.testing.assert_allclose(got, expected, atol=2e-4 * np.abs(expected).max())
    assert np.abs(expected - np.asarray(tiny.logits(model, jnp.asarray(x)))).max() > 0.02


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {"target_modules": ATTENTION + FFN}),
        ("qwen3", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
        ("qwen3", {"target_modules": ATTENTION + FFN, "layers_to_transform": [1]}),
        (
            "qwen3",
            {
                "target_modules": ATTENTION + FFN,
                "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 7},
                "alpha_pattern": {"^model.layers.0.*_proj": 5, "down_proj": 20},
            },
        ),
        ("qwen3_moe", {"target_modules": ATTENTION + FFN}),  # PEFT makes them parameters, gate_up of twice the rank
        ("qwen3_moe", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[:1]}),
        ("qwen3_moe", {"target_modules": [], "target_parameters": EXPERTS[1:]}),
        ("qwen3_5", {"target_modules": ATTENTION + DELTA + FFN}),
        ("qwen3_5_moe", {"target_modules": ATTENTION + DELTA + FFN, "target_parameters": EXPERTS, "rank_pattern": {"down_proj": 3}}),
    ],
)
def test_an_adapter_made_by_peft_gives_its_logits(bases, tmp_path, kind, settings):
    net, model = bases(kind)
    wrapped, x = peft_model(net, **settings), tiny.tokens(2, 15)
    wrapped.save_pretrained(tmp_path)
    bank = load_peft(tmp_path, model.config)
    assert bank.a.keys() == model.config.projections().keys()
    assert_close(tiny.logits(model, jnp.asarray(x), adapters=bank), tiny.torch_logits(wrapped, x), model, x)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_adapter_gives_our_logits_in_peft(bases, tmp_path, kind):
    net, model = bases(kind)
    bank, x = slice_bank(tiny.bank(model.config, adapters=2), 1), tiny.tokens(2, 15)
    save_peft(bank, model.config, tmp_path, "some/base")
    wrapped = peft.PeftModel.from_pretrained(net, tmp_path).eval()
    assert_close(tiny.torch_logits(wrapped, x), np.asarray(tiny.logits(model, jnp.asarray(x), adapters=bank)), model, x)
    jax.tree.map(np.testing.assert_array_equal, load_peft(tmp_path, model.config), bank)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == "some/base"
    assert settings["lora_alpha"] / settings["r"] == float(bank.scale[0])
    with pytest.raises(ValueError, match="slice_bank"):
        save_peft(tiny.bank(model.config, adapters=2), model.config, tmp_path / "two")


def test_keys_are_one_pair_an_expert_and_projection(tmp_path):
    """As SGLang and vLLM take them."""
    config = tiny.CONFIGS["qwen3_5_moe"]
    save_peft(tiny.bank(config), config, tmp_path)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    shapes = {name: x.shape for name, x in tensors.items()}
    layer = "base_model.model.model.layers.2."
    assert shapes[f"{layer}mlp.experts.5.up_proj.lora_A.weight"] == (4, 48)
    assert shapes[f"{layer}mlp.experts.5.up_proj.lora_B.weight"] == (20, 4)
    assert shapes[f"{layer}mlp.experts.0.down_proj.lora_A.weight"] == (4, 20)
    assert shapes[f"{layer}mlp.shared_expert.down_proj.lora_B.weight"] == (48, 4)
    assert shapes[f"{layer}linear_attn.in_proj_qkv.lora_B.weight"] == (80, 4)
    assert shapes["base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"] == (128, 4)
    assert len(shapes) == 2 * len(peft_targets(config)) == 2 * (4 * 6 * 3 + 4 * 3 + 3 * 5 + 4)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == ATTENTION + DELTA + FFN


@pytest.mark.parametrize(
    ("kind", "kept", "written"),
    [
        ("qwen3", ["q"], ATTENTION[:3]),
        ("qwen3", ["o", "down"], ["o_proj", *FFN]),
        ("qwen3_moe", ["v", "expert_up"], [*ATTENTION[:3], *FFN]),
        ("qwen3_5_moe", ["z", "a", "shared_gate"], [*DELTA[:4], *FFN]),
    ],
)
def test_projections_that_servers_fuse_are_written_together(tmp_path, kind, kept, written):
    config = tiny.CONFIGS[kind]
    whole = tiny.bank(config)
    part = whole.replace_factors(tuple({name: half[name] for name in kept} for half in whole.factors))
    save_peft(part, config, tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == written
    modules = {name.split(".")[-3] for name in load_file(tmp_path / "adapter_model.safetensors")}
    assert modules == set(written)
    again = load_peft(tmp_path, config)
    for name in config.projections():
        for half, expected in zip(again.factors, whole.factors, strict=True):
            np.testing.assert_array_equal(half[name], expected[name] if name in kept else np.zeros_like(expected[name]))


def test_adapters_of_a_decoder_inside_of_another_model(tmp_path):
    config = tiny.CONFIGS["qwen3_5"]
    bank = tiny.bank(config)
    save_peft(bank, config, tmp_path, root="model.language_model")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in tensors)
    jax.tree.map(np.testing.assert_array_equal, load_peft(tmp_path, config), bank)
    name = next(iter(tensors))
    tensors[name.replace("model.language_model", "model")] = tensors[name]
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="modules under model and model.language_model"):
        load_peft(tmp_path, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "unknown base_model.model.model.embed_tokens"),
        ({"target_modules": "all-linear"}, "unknown base_model.model.model.layers.0.mlp.gate.lora"),  # the router
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora=True"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save="),
    ],
)
def test_what_the_bank_cannot_hold_is_an_error(bases, tmp_path, settings, message):
    net, model = bases("qwen3_moe")
    peft_model(net, **settings).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        load_peft(tmp_path, model.config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"r": None}, "r must be a positive integer, got None"),
        ({"lora_alpha": 0}, "lora_alpha must be a positive number, got 0"),
        ({"rank_pattern": {"q_proj": 2}}, r"has shape \(4, 48\), the model and rank 2 imply \(2, 48\)"),
        ({"alpha_pattern": {"(": 2}}, "no regular expression"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4'"),
    ],
)
def test_settings_that_are_not_honoured_are_named(tmp_path, change, message):
    save_peft(tiny.bank(), tiny.CONFIG, tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        load_peft(tmp_path, tiny.CONFIG)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    config = tiny.CONFIGS["qwen3_moe"]
    save_peft(tiny.bank(config), config, tmp_path)
    path, prefix = tmp_path / "adapter_model.safetensors", "base_model.model.model.layers.0."
    whole = load_file(path)

    def refused(message, change):
        tensors = dict(whole)
        change(tensors)
        save_file(tensors, path)
        with pytest.raises(CheckpointError, match=message):
            load_peft(tmp_path, config)

    refused("only one of lora_A and lora_B of layers.0.self_attn.q_proj", lambda t: t.pop(f"{prefix}self_attn.q_proj.lora_B.weight"))
    refused("unknown .*experts.6.up_proj", lambda t: t.update({f"{prefix}mlp.experts.6.up_proj.lora_A.weight": np.ones((4, 48))}))
    fused = {f"{prefix}mlp.experts.lora_A.weight": np.ones((24, 20)), f"{prefix}mlp.experts.lora_B.weight": np.ones((48, 24))}
    refused("the experts of a layer are adapted twice", lambda t: t.update(fused))
    wide = {f"{prefix}mlp.experts.lora_A.weight": np.ones((24, 21)), f"{prefix}mlp.experts.lora_B.weight": np.ones((48, 24))}
    refused(r"lora_A.weight has shape \(24, 21\), the model and rank 4 imply \(24, 48\)", lambda t: t.update(wide))
    refused("no adapter weights", lambda t: [t.pop(name) for name in whole])
    with pytest.raises(CheckpointError, match="adapter_config.json does not exist; point to a PEFT adapter folder"):
        load_peft(tmp_path / "nowhere", config)


def test_an_adapter_loads_from_a_bucket(tmp_path, bucket):
    bank = tiny.bank()
    save_peft(bank, tiny.CONFIG, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load_peft(bucket.upload(tmp_path), tiny.CONFIG), bank)
