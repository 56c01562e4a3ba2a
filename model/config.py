"""What a checkpoint is, read from its config.json and checked before any weight loads.

Field names are Hugging Face's. What the network would not honour is refused by name: a checkpoint that loads with a silently ignored
setting gives plausible, wrong log-probs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")  # the linear layers of one block that carry adapters


class ConfigError(ValueError):
    """A model configuration that cannot be honoured; the message names the file, the field and the fix."""


@dataclasses.dataclass(frozen=True)
class Config:
    """A dense Qwen3 decoder. `unroll` and `remat` say how the layers run, not what they compute."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    max_position_embeddings: int = 32_768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    model_type: str = "qwen3"
    unroll: int | None = None  # layers per loop iteration; None: all of up to 4 layers, else 1 (on a CPU a loop copies its parameters)
    remat: bool = False  # recompute a layer's activations in the backward pass

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field} must be a positive integer, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def layers_per_step(self) -> int:
        return self.unroll or (self.num_hidden_layers if self.num_hidden_layers <= 4 else 1)

    def widths(self) -> dict[str, tuple[int, int]]:
        """(in, out) of each projection of one layer."""
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return dict(zip(PROJECTIONS, ((d, q), (d, kv), (d, kv), (q, d), (d, f), (d, f), (f, d)), strict=True))


def parse_config(raw: Mapping[str, Any], source: str = "config.json") -> Config:
    """The `Config` of a Hugging Face configuration. `ConfigError` for types and settings that are not honoured."""

    def need(condition: Any, message: str) -> None:
        if not condition:
            raise ConfigError(f"{source}: {message}")

    kind = raw.get("model_type")
    need(kind == "qwen3", f"model_type {kind!r} is not supported; supported: qwen3")
    need(raw.get("hidden_act", "silu") == "silu", f"hidden_act {raw.get('hidden_act')!r} is not supported, only 'silu'")
    need(not raw.get("use_sliding_window"), "use_sliding_window=true is not supported; only full attention is")
    odd = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    need(not odd, f"layer_types {odd} are not supported; only 'full_attention' is")
    need(not raw.get("attention_dropout"), f"attention_dropout {raw.get('attention_dropout')} is not supported; set it to 0")
    need(not raw.get("quantization_config"), "quantization_config: quantized checkpoints are not supported; export one in bfloat16")

    # transformers 5 writes rope_parameters, earlier versions rope_theta and rope_scaling
    rope: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        rope |= (found := raw.get(field) or {})
        scaling = found.get("rope_type", found.get("type", "default"))
        need(scaling == "default", f"{field} of type {scaling!r} is not supported, only 'default'")
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    need(partial in (None, 1.0), f"partial_rotary_factor {partial} is not supported for qwen3")

    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    missing = [name for name in required if raw.get(name) is None]
    need(not missing, f"missing {', '.join(missing)}")
    eos = raw.get("eos_token_id")
    optional = (
        "rms_norm_eps",
        "tie_word_embeddings",
        "attention_bias",
        "max_position_embeddings",
        "bos_token_id",
        "pad_token_id",
        "head_dim",
    )
    try:
        return Config(
            **{name: raw[name] for name in required},
            **{name: raw[name] for name in optional if raw.get(name) is not None},
            num_key_value_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def read_config(folder: str | Path) -> Config:
    """Reads `folder/config.json`. Raises `ConfigError`, naming the file, if it is absent, not JSON or not honoured."""
    path = Path(folder) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; point to a Hugging Face model folder") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return parse_config(raw, str(path))


def huggingface_config(config: Config, dtype: str) -> dict[str, Any]:
    """The config.json of a checkpoint of ours, readable by transformers 4 and 5; `parse_config` is its inverse."""
    layout = {"unroll", "remat", "model_type", "rope_theta"}
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in layout}
    return fields | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": config.model_type,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "dtype": dtype,
        "torch_dtype": dtype,
    }
