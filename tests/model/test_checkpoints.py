"""Hugging Face folders in and out; every file that does not fit is refused by name."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from model import (
    CheckpointError,
    ConfigError,
    count_parameters,
    load_gate,
    load_pretrained,
    merge,
    parse_config,
    read_config,
    save_gate,
    save_pretrained,
)
from tests.model import tiny


@pytest.mark.parametrize("variation", ["untied", "tied, one key-value head", "biases, one layer"])
def test_a_saved_model_is_what_transformers_and_we_load(tmp_path, variation):
    net = tiny.checkpoint(tmp_path / "made", **tiny.VARIATIONS[variation])
    model = load_pretrained(tmp_path / "made")
    save_pretrained(model, tmp_path / "saved")
    again = load_pretrained(tmp_path / "saved")
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, again.parameters(), model.parameters())
    x = tiny.tokens(2, 9)
    reread = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "saved").eval()
    np.testing.assert_array_equal(tiny.torch_logits(reread, x), tiny.torch_logits(net, x))
    assert count_parameters(model.config) == sum(p.numel() for p in net.parameters())


def test_a_merged_model_gives_the_adapters_logits(tmp_path):
    model, bank, x = tiny.model(), tiny.bank(adapters=2), tiny.tokens(2, 9)
    expected = tiny.logits(model, jnp.asarray(x), adapters=jax.tree.map(lambda v: v[:, 1:] if v.ndim == 4 else v[1:], bank))
    save_pretrained(merge(model, bank, 2), tmp_path)
    got = tiny.torch_logits(transformers.Qwen3ForCausalLM.from_pretrained(tmp_path).eval(), x)
    np.testing.assert_allclose(got, expected, atol=2e-4 * float(jnp.abs(expected).max()))
    jax.tree.map(np.testing.assert_array_equal, merge(model, bank, 0).parameters(), model.parameters())
    with pytest.raises(IndexError, match="slot 3 of a bank of 2"):
        merge(model, bank, 3)


def test_sharded_files_and_bfloat16(tmp_path):
    net = tiny.checkpoint(tmp_path / "one")
    net.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = load_pretrained(tmp_path / "one"), load_pretrained(tmp_path / "many")
    jax.tree.map(np.testing.assert_array_equal, one.parameters(), many.parameters())
    half = load_pretrained(tmp_path / "one", dtype=jnp.bfloat16)
    assert {x.dtype for x in half.parameters().values()} == {jnp.dtype(jnp.bfloat16)}
    save_pretrained(half, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path / "half", dtype=jnp.bfloat16).parameters(), half.parameters())
    next((tmp_path / "many").glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-.*safetensors does not exist"):
        load_pretrained(tmp_path / "many")


def test_missing_surplus_and_wrongly_shaped_tensors_are_named(tmp_path):
    tiny.checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.3.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:40]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_pretrained(tmp_path)
    for part in (
        "missing model.layers.1.mlp.up_proj.weight",
        "surplus model.layers.3.mlp.up_proj.weight",
        "model.norm.weight has shape (40,), config.json implies (48,)",
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types \['sliding_attention'\]"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling of type 'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}}, "rope_parameters of type 'linear'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": None}, "missing hidden_size"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer"),
    ],
)
def test_settings_that_are_not_honoured_are_refused_by_name(change, message):
    raw = tiny.BASE | {"model_type": "qwen3"} | change
    with pytest.raises(ConfigError, match=message):
        parse_config(raw, "here/config.json")


def test_rotary_settings_of_both_generations_of_transformers():
    raw = {name: value for name, value in tiny.BASE.items() if name != "rope_parameters"} | {"model_type": "qwen3"}
    for rope in ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}):
        assert parse_config(raw | rope).rope_theta == 5e5
    assert parse_config(raw).rope_theta == 10_000.0


def test_published_figures_of_real_configurations():
    """Qwen3-8B: 8,190,735,360 parameters."""
    raw = {"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    raw |= {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False, "rope_theta": 1_000_000}
    assert count_parameters(parse_config(raw)) == 8_190_735_360


def test_gates_come_back_bit_for_bit(tmp_path):
    gate = tiny.gate(5)
    save_gate(gate, tmp_path / "gate.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load_gate(tmp_path / "gate.safetensors"), gate)
    save_file({"kernel": np.zeros((2, 3), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="other.safetensors is not a gate"):
        load_gate(tmp_path / "other.safetensors")


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    model = tiny.model()
    save_pretrained(model, tmp_path)

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("model.export_hf.save_file", fail)
    with pytest.raises(OSError, match="No space"):
        save_pretrained(merge(model, tiny.bank(), 1), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert read_config(tmp_path) == model.config
    jax.tree.map(np.testing.assert_array_equal, load_pretrained(tmp_path).parameters(), model.parameters())
