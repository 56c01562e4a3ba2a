"""Hugging Face folders in and out, of each type and in each layout; every file that does not fit is refused by name."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from model import (
    CheckpointError,
    ConfigError,
    count_adapter_parameters,
    count_gate_parameters,
    count_parameters,
    load_gate,
    load_pretrained,
    merge,
    parse_config,
    read_config,
    save_gate,
    save_pretrained,
    slice_bank,
)
from model.huggingface_names import huggingface_sources
from model.parameters import parameter_specs
from tests.devices import environment
from tests.model import tiny

KINDS = list(tiny.BASES)
SPARSE = ["qwen3_moe", "qwen3_5_moe"]
CONFIGS = Path(__file__).parents[2] / "configs" / "architectures"


def assert_same(first, second):
    assert first.config == second.config
    jax.tree.map(np.testing.assert_array_equal, first.parameters(), second.parameters())


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, {}) for kind in KINDS),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True, "num_hidden_layers": 1}),
        ("qwen3_moe", {"mlp_only_layers": [1], "num_experts": 1, "num_experts_per_tok": 1}),
    ],
)
def test_a_saved_model_is_what_transformers_and_we_load(tmp_path, kind, change):
    net = tiny.checkpoint(tmp_path / "made", kind, **change)
    model = load_pretrained(tmp_path / "made")
    assert count_parameters(model.config) == sum(p.numel() for p in net.parameters())
    save_pretrained(model, tmp_path / "saved")
    assert_same(load_pretrained(tmp_path / "saved"), model)
    reread = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(reread) is type(net)
    expected, got = net.state_dict(), reread.state_dict()
    assert expected.keys() == got.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(got[name].numpy(), x.numpy(), err_msg=name)
    x = tiny.tokens(2, 9)
    reference = tiny.torch_logits(net, x)
    np.testing.assert_allclose(tiny.logits(model, jnp.asarray(x)), reference, atol=2e-4 * np.abs(reference).max())


@pytest.mark.parametrize("kind", SPARSE)
def test_experts_stored_as_one_tensor_load_the_same(tmp_path, kind):
    net = tiny.checkpoint(tmp_path / "apart", kind)
    (tmp_path / "fused").mkdir()
    fused = {name: x.numpy() for name, x in net.state_dict().items()}
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (6, 40, 48)
    save_file(fused, tmp_path / "fused" / "model.safetensors")
    (tmp_path / "fused" / "config.json").write_bytes((tmp_path / "apart" / "config.json").read_bytes())
    assert_same(load_pretrained(tmp_path / "fused"), load_pretrained(tmp_path / "apart"))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_decoder_of_a_checkpoint_with_a_vision_tower_loads_alone_and_says_so(tmp_path, caplog, kind):
    tiny.checkpoint(tmp_path / "text", kind)
    text = load_pretrained(tmp_path / "text")
    tensors = load_file(tmp_path / "text" / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model."): x for name, x in tensors.items()}
    tensors |= {f"model.visual.blocks.{i}.attn.qkv.weight": np.ones((6, 2), np.float32) for i in range(3)}
    tensors |= {"mtp.fc.weight": np.ones((2, 2), np.float32), "mtp.layers.0.mlp.gate_proj.weight": np.ones((2, 2), np.float32)}
    (tmp_path / "whole").mkdir()
    save_file(tensors, tmp_path / "whole" / "model.safetensors")
    raw = json.loads((tmp_path / "text" / "config.json").read_text())
    whole = {"model_type": kind, "vision_config": {"depth": 3}, "image_token_id": 5, "text_config": raw}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert_same(load_pretrained(tmp_path / "whole"), text)
    (message,) = caplog.messages
    assert "3 of the vision tower" in message and "2 of multi-token prediction" in message


def test_constants_and_the_head_of_a_tied_checkpoint_are_left_out(tmp_path, caplog):
    tiny.checkpoint(tmp_path, tie_word_embeddings=True)
    plain, tensors = load_pretrained(tmp_path), load_file(tmp_path / "model.safetensors")
    assert not caplog.messages
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(load_pretrained(tmp_path), plain)
    assert "1 of rotary constants" in caplog.messages[0] and "1 of a head that is the embedding" in caplog.messages[0]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_moe"])
def test_sharded_files_and_bfloat16(tmp_path, kind):
    tiny.checkpoint(tmp_path / "one", kind)
    model = load_pretrained(tmp_path / "one")
    save_pretrained(model, tmp_path / "many", shard_bytes=60_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    assert_same(load_pretrained(tmp_path / "many"), model)
    half = load_pretrained(tmp_path / "one", dtype=jnp.bfloat16)
    wide = {name for name, x in half.parameters().items() if x.dtype == jnp.float32}
    assert wide == ({"layers.A_log", "layers.dt_bias"} if kind == "qwen3_5_moe" else set())
    jax.tree.map(lambda h, w: np.testing.assert_array_equal(h, w.astype(h.dtype)), half.parameters(), model.parameters())
    save_pretrained(half, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert_same(load_pretrained(tmp_path / "half", dtype=jnp.bfloat16), half)
    next((tmp_path / "many").glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.*safetensors does not exist"):
        load_pretrained(tmp_path / "many")


SHARDED = """
import sys
import jax, numpy as np
from jax.sharding import Mesh
from model import load_pretrained
from model.tensor_files import TensorFiles

plain = load_pretrained(sys.argv[1]).parameters()
whole = sum(x.nbytes for x in plain.values())
largest, read_all = 0, TensorFiles.read_all
def watched(self, requests):
    global largest
    result = read_all(self, requests)
    largest = max(largest, sum(x.nbytes for x in result))
    return result
TensorFiles.read_all = watched
for names in ({"fsdp": 4, "expert": 2}, {"fsdp": 4, "tensor": 2}):
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(names.values())), tuple(names))
    placed = load_pretrained(sys.argv[1], mesh).parameters()
    jax.tree.map(np.testing.assert_array_equal, placed, plain)
    held = sum(x.addressable_shards[0].data.nbytes for x in placed.values())
    assert held < whole / 3, (held, whole)
    assert largest <= max(x.nbytes // (x.shape[0] if n.startswith("layers.") else 1) for n, x in plain.items())
print(len(jax.devices()), "devices agree")
"""


@pytest.mark.parametrize("fused", [False, True])
def test_eight_devices_hold_their_slices(tmp_path, fused):
    net = tiny.checkpoint(tmp_path, "qwen3_5_moe", num_experts=8)
    if fused:
        save_file({name: x.numpy() for name, x in net.state_dict().items()}, tmp_path / "model.safetensors")
    env = environment(8)
    run = subprocess.run([sys.executable, "-c", SHARDED, str(tmp_path)], env=env, capture_output=True, text=True, timeout=240)
    assert "8 devices agree" in run.stdout, run.stderr[-2000:]


@pytest.mark.parametrize("kind", KINDS)
def test_merging_adds_the_scaled_product_of_the_factors(kind):
    config = tiny.CONFIGS[kind]
    model, bank = tiny.model(config=config), tiny.bank(config, adapters=2)
    got, base = merge(model, bank, 2).parameters(), model.parameters()
    for name, weight in base.items():
        expected, short = np.asarray(weight, np.float64), name.removeprefix("layers.")
        if short in bank.a:
            a, b = (np.asarray(half[short][:, 1], np.float64) for half in bank.factors)
            expected = expected + 2.0 * a @ b
            assert np.abs(a @ b).max() > 0.1
        np.testing.assert_allclose(got[name], expected, atol=1e-5, err_msg=name)
    assert_same(merge(model, bank, 0), model)
    with pytest.raises(IndexError, match="slot 3 of a bank of 2"):
        merge(model, bank, 3)


def test_a_merged_model_gives_the_adapters_logits_in_transformers(tmp_path):
    config = tiny.CONFIGS["qwen3_moe"]
    model, bank, x = tiny.model(config=config), tiny.bank(config, adapters=2), tiny.tokens(2, 9)
    save_pretrained(merge(model, bank, 2), tmp_path)
    got = tiny.torch_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), x)
    expected = tiny.logits(model, jnp.asarray(x), adapters=slice_bank(bank, 1))
    np.testing.assert_allclose(got, expected, atol=2e-4 * float(jnp.abs(expected).max()))


def test_missing_surplus_and_wrongly_shaped_tensors_are_named(tmp_path):
    tiny.checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.3.mlp.gate.weight"] = tensors["model.layers.0.mlp.gate.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:40]
    tensors["model.layers.2.mlp.gate.weight"] = tensors["model.layers.2.mlp.gate.weight"].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_pretrained(tmp_path)
    for part in (
        "missing model.layers.1.mlp.experts.3.up_proj.weight",
        "surplus model.layers.3.mlp.gate.weight",
        "model.norm.weight has shape (40,), config.json implies (48,)",
        "model.layers.2.mlp.gate.weight is int8, quantized weights are not supported",
    ):
        assert part in str(error.value)


def test_broken_files_are_named(tmp_path):
    tiny.checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors is not a whole safetensors file"):
        load_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match="model.safetensors does not exist"):
        load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is not JSON"):
        load_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="config.json does not exist"):
        load_pretrained(tmp_path / "nowhere")


def test_a_model_loads_from_a_bucket(tmp_path, bucket):
    model = tiny.model(config=tiny.CONFIGS["qwen3_moe"])
    save_pretrained(model, tmp_path)
    assert_same(load_pretrained(bucket.upload(tmp_path)), model)


def test_published_figures_of_real_configurations():
    dense = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    dense |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False, "rope_theta": 1_000_000}
    assert count_parameters(parse_config(dense)) == 8_190_735_360
    moe, hybrid = read_config(CONFIGS / "Qwen3-30B-A3B"), read_config(CONFIGS / "Qwen3.6-27B")
    assert count_parameters(moe) == 30_532_122_624
    assert [count_adapter_parameters(moe, rank) for rank in (16, 32)] == [843_841_536, 1_687_683_072]
    assert count_gate_parameters(moe, 5) == 491_760
    assert (hybrid.count("delta"), hybrid.count("attention"), hybrid.rotary_dim, hybrid.tie_word_embeddings) == (48, 16, 64, False)
    assert count_gate_parameters(hybrid, 5) == 1_638_720
    assert [round(count_adapter_parameters(hybrid, rank) / 1e6, 1) for rank in (16, 32)] == [116.7, 233.5]


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen3.6-27B"])
def test_the_names_of_real_checkpoints_are_those_of_transformers(name):
    """transformers makes the model without memory and names its parameters; experts are fused there."""
    import torch

    config = read_config(CONFIGS / name)
    theirs = transformers.AutoConfig.from_pretrained(CONFIGS / name)
    with torch.device("meta"):
        net = transformers.AutoModelForCausalLM.from_config(getattr(theirs, "text_config", theirs))
    expected = {name: tuple(x.shape) for name, x in net.state_dict().items()}
    sources = huggingface_sources(config, fused=True)
    assert {tensor: source.shape for layers in sources.values() for source in layers for tensor in source.tensors} == expected
    assert all(len(layers) == (specs.shape[0] if specs.part else 1) for layers, specs in pairs(sources, parameter_specs(config)))


def pairs(first, second):
    assert first.keys() == second.keys()
    return [(first[name], second[name]) for name in first]


def test_gates_come_back_bit_for_bit(tmp_path):
    gate = tiny.gate(5)
    save_gate(gate, tmp_path / "gate.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_gate(tmp_path / "gate.safetensors"), gate)
    save_file({"kernel": np.zeros((2, 3), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="other.safetensors is not a gate"):
        load_gate(tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="absent.safetensors does not exist"):
        load_gate(tmp_path / "absent.safetensors")


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    model = tiny.model()
    save_pretrained(model, tmp_path)

    def fail(path, tensors):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("model.tensor_files._write_file", fail)
    with pytest.raises(OSError, match="No space"):
        save_pretrained(merge(model, tiny.bank(), 1), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(load_pretrained(tmp_path), model)
