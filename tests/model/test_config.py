"""What a config.json says is honoured, harmless or refused by name; what we write says the same again."""

import json

import pytest
import transformers

from model import ConfigError, parse_config, read_config
from model.config import huggingface_config
from tests.model import tiny

HYBRID = tiny.BASES["qwen3_5"]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3", {"model_type": "llama"}, "model_type 'llama'"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types \['sliding_attention'\]"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, r"layer_types \['linear_attention'\] are not supported for qwen3"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantization_config="),
        ("qwen3", {"hidden_size": None}, "missing hidden_size"),
        ("qwen3", {"num_key_value_heads": 3}, "multiple of num_key_value_heads 3"),
        ("qwen3", {"head_dim": 15}, "head_dim 15 .* must be even"),
        ("qwen3", {"vocab_size": "many"}, "vocab_size must be a positive integer"),
        ("qwen3", {"num_experts": 8}, "num_experts: not known for model_type 'qwen3'"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 must be between 1 and num_experts 6"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid'"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate=False"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 must be a multiple of linear_num_key_heads 2"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "layer_types has no 'full_attention' layer"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 3}, "layer_types names 3 layers, num_hidden_layers is 4"),
    ],
)
def test_settings_that_are_not_honoured_are_refused_by_name(kind, change, message):
    with pytest.raises(ConfigError, match=f"here/config.json: .*{message}"):
        parse_config(tiny.BASES[kind] | {"model_type": kind} | change, "here/config.json")


@pytest.mark.parametrize("kind", tiny.BASES)
def test_what_we_write_is_what_we_and_transformers_read(tmp_path, kind):
    for name, change in tiny.VARIATIONS[kind].items():
        config = parse_config({"model_type": kind, "tie_word_embeddings": False} | tiny.BASES[kind] | change)
        (tmp_path / "config.json").write_text(json.dumps(huggingface_config(config, "float32")))
        assert read_config(tmp_path) == config, name
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        assert theirs.model_type.removesuffix("_text") == kind
        for field in ("hidden_size", "head_dim", "tie_word_embeddings", "attention_bias", "rms_norm_eps"):
            assert getattr(theirs, field) == getattr(config, field), (name, field)


def test_the_text_part_of_a_multimodal_config_is_read():
    text = HYBRID | {"model_type": "qwen3_5_text", "tie_word_embeddings": False}
    whole = {"model_type": "qwen3_5", "vision_config": {"depth": 2}, "image_token_id": 7, "text_config": text, "tie_word_embeddings": False}
    assert parse_config(whole) == parse_config(text)
    with pytest.raises(ConfigError, match="tie_word_embeddings is one thing at the top and another in text_config"):
        parse_config(whole | {"tie_word_embeddings": True})
    with pytest.raises(ConfigError, match="quantization_config="):
        parse_config(whole | {"quantization_config": {"bits": 4}})


def test_the_layers_of_a_hybrid_without_a_list_of_them():
    raw = HYBRID | {"model_type": "qwen3_5", "num_hidden_layers": 7}
    kinds = [kind.mixer for kind in parse_config(raw | {"full_attention_interval": 3}).kinds()]
    assert [i for i, mixer in enumerate(kinds) if mixer == "full_attention"] == [2, 5]
