"""What a checkpoint is, read from its config.json and checked before any weight loads.

Four types of Hugging Face checkpoints are one family of decoders here: `qwen3`, `qwen3_moe`, and the text part of `qwen3_5` and
`qwen3_5_moe` (Qwen3.5 and Qwen3.6). Field names are Hugging Face's. Whatever a config.json says is honoured, known to change nothing, or
refused by name: a checkpoint that loads with a silently ignored setting gives plausible, wrong log-probs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from model.errors import ConfigError
from model.files import read_text
from model.rotary import Rope, huggingface_rope, parse_rope

Mixer = Literal["full_attention", "linear_attention"]
Part = Literal["every", "attention", "delta", "dense", "sparse"]  # which layers have a parameter


class Kind(NamedTuple):
    """What a layer is made of."""

    mixer: Mixer
    sparse: bool

    def has(self, part: Part) -> bool:
        mixer = "attention" if self.mixer == "full_attention" else "delta"
        return part in ("every", mixer, "sparse" if self.sparse else "dense")


class Projection(NamedTuple):
    """A linear layer that carries adapters: [in, out] in each of the layers that have it, or in each of their experts."""

    part: Part
    width: int
    out: int
    axes: tuple[str, str]  # what they mean, see `model.sharding`
    experts: int | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """A Qwen decoder. `unroll` and what follows it say how the layers run, not what they compute."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    max_position_embeddings: int = 32_768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    model_type: Literal["qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"] = "qwen3"
    # experts
    num_experts: int = 0
    num_experts_per_tok: int = 8
    moe_intermediate_size: int = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = 0
    # gated delta layers
    layer_types: tuple[Mixer, ...] | None = None  # None: all full attention
    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    # how it runs
    unroll: int | None = None  # layers per loop iteration; None: all of up to 4 layers, else 1 (on a CPU a loop copies its parameters)
    remat: bool = False  # recompute a layer's activations in the backward pass
    attention: str = "auto"  # see `model.attention.attend`
    packed: bool = True  # rows may hold several segments; see there
    moe: str = "auto"  # see `model.moe.expert_ffn`

    def __post_init__(self) -> None:
        positive = ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"]
        kinds = self.kinds() if isinstance(self.num_hidden_layers, int) else ()
        if any(not kind.sparse for kind in kinds):
            positive += ["intermediate_size"]
        if any(kind.sparse for kind in kinds):
            positive += ["num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"]
        if any(kind.mixer == "linear_attention" for kind in kinds):
            positive += [f"linear_{x}" for x in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")]
        for field in positive:
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field} must be a positive integer, got {value!r}")
        if len(kinds) != self.num_hidden_layers:
            raise ConfigError(f"layer_types names {len(kinds)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if odd := {kind.mixer for kind in kinds} - {"full_attention", "linear_attention"}:
            raise ConfigError(f"layer_types {sorted(odd)} are not supported, only 'full_attention' and, in qwen3_5, 'linear_attention'")
        if not any(kind.mixer == "full_attention" for kind in kinds):
            raise ConfigError("layer_types has no 'full_attention' layer; a decoder without one is not supported")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} must be a multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(
                f"linear_num_value_heads {self.linear_num_value_heads} must be a multiple of "
                f"linear_num_key_heads {self.linear_num_key_heads}"
            )
        if self.head_dim % 2 or self.rotary_dim % 2 or self.rotary_dim < 2:
            raise ConfigError(f"head_dim {self.head_dim} and its rotary part {self.rotary_dim} must be even for rotary positions")
        if self.num_experts and not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ConfigError(f"num_experts_per_tok {self.num_experts_per_tok} must be between 1 and num_experts {self.num_experts}")

    @property
    def gated(self) -> bool:
        """Qwen3.5 and later: attention has an output gate and norms are centred on one."""
        return self.model_type.startswith("qwen3_5")

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that positions rotate."""
        return int(self.head_dim * self.rope.partial)

    @property
    def layers_per_step(self) -> int:
        """Layers that run in one iteration of the loop, see `unroll`."""
        return self.unroll or (self.num_hidden_layers if self.num_hidden_layers <= 4 else 1)

    def kinds(self) -> tuple[Kind, ...]:
        """What each layer is made of."""
        mixers = self.layer_types or ("full_attention",) * self.num_hidden_layers

        def sparse(index: int) -> bool:
            return self.num_experts > 0 and index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0

        return tuple(Kind(mixer, sparse(index)) for index, mixer in enumerate(mixers))

    def count(self, part: Part) -> int:
        """Layers that have this part."""
        return sum(kind.has(part) for kind in self.kinds())

    def projections(self) -> dict[str, Projection]:
        """The linear layers that carry adapters, those only that some layer has."""
        d, f, e = self.hidden_size, self.moe_intermediate_size, self.num_experts
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        keys, values = self.linear_num_key_heads * self.linear_key_head_dim, self.linear_num_value_heads * self.linear_value_head_dim
        table = {
            "q": Projection("attention", d, q * (2 if self.gated else 1), ("embed", "heads")),
            "k": Projection("attention", d, kv, ("embed", "kv_heads")),
            "v": Projection("attention", d, kv, ("embed", "kv_heads")),
            "o": Projection("attention", q, d, ("heads", "embed")),
            "qkv": Projection("delta", d, 2 * keys + values, ("embed", "heads")),
            "z": Projection("delta", d, values, ("embed", "heads")),
            "a": Projection("delta", d, self.linear_num_value_heads, ("embed", "heads")),
            "b": Projection("delta", d, self.linear_num_value_heads, ("embed", "heads")),
            "out": Projection("delta", values, d, ("heads", "embed")),
            "gate": Projection("dense", d, self.intermediate_size, ("embed", "mlp")),
            "up": Projection("dense", d, self.intermediate_size, ("embed", "mlp")),
            "down": Projection("dense", self.intermediate_size, d, ("mlp", "embed")),
            "expert_gate": Projection("sparse", d, f, ("embed", "mlp"), e),
            "expert_up": Projection("sparse", d, f, ("embed", "mlp"), e),
            "expert_down": Projection("sparse", f, d, ("mlp", "embed"), e),
        }
        if shared := self.shared_expert_intermediate_size:
            table |= {
                "shared_gate": Projection("sparse", d, shared, ("embed", "mlp")),
                "shared_up": Projection("sparse", d, shared, ("embed", "mlp")),
                "shared_down": Projection("sparse", shared, d, ("mlp", "embed")),
            }
        return {name: projection for name, projection in table.items() if self.count(projection.part)}


_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_COMMON = (
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "max_position_embeddings",
    "bos_token_id",
    "pad_token_id",
    "head_dim",
)
_MOE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_LINEAR = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_OPTIONAL = {
    "qwen3": _COMMON,
    "qwen3_moe": (*_COMMON, *_MOE, "norm_topk_prob", "decoder_sparse_step"),
    "qwen3_5": (*_COMMON, *_LINEAR),
    "qwen3_5_moe": (*_COMMON, *_MOE, *_LINEAR, "shared_expert_intermediate_size"),
}
# transformers' defaults where a config.json leaves a field out and ours is another
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 128},
    "qwen3_5": {"head_dim": 256},
    "qwen3_5_moe": {
        "head_dim": 256,
        "num_experts": 256,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
# settings with the one value that is honoured
_FIXED = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "use_sliding_window": False,
    "quantization_config": None,
    "attn_output_gate": True,
    "output_gate_type": "swish",  # of the gated delta layers' norm; Qwen3.6 says it
}
# read elsewhere in this file, or about training, generation, storage and other modalities: they change no logit of text
_READ_ELSEWHERE = {
    "model_type", "intermediate_size", "num_key_value_heads", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "layer_types", "full_attention_interval", "mlp_only_layers", "num_local_experts",
}  # fmt: skip
_HARMLESS = {
    "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef", "mamba_ssm_dtype",
    "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "return_dict", "output_hidden_states", "output_attentions", "is_decoder",
    "is_encoder_decoder", "problem_type", "id2label", "label2id", "chunk_size_feed_forward", "unsloth_version", "unsloth_fixed",
    "trace_jax", "language_model_only",
}  # fmt: skip


def parse_config(raw: Mapping[str, Any], source: str = "config.json") -> Config:
    """The `Config` of a Hugging Face configuration. `ConfigError` for types and settings that are not honoured."""

    def need(condition: Any, message: str) -> None:
        if not condition:
            raise ConfigError(f"{source}: {message}")

    if isinstance(text := raw.get("text_config"), Mapping):  # a checkpoint with a vision tower; its text part is one of ours
        tied = {part["tie_word_embeddings"] for part in (raw, text) if "tie_word_embeddings" in part}
        need(len(tied) < 2, "tie_word_embeddings is one thing at the top and another in text_config")
        outer = {name: raw[name] for name in ("quantization_config",) if name in raw}
        raw = outer | {"tie_word_embeddings": bool(tied and tied.pop())} | text
    kind = _TYPES.get(raw.get("model_type"), raw.get("model_type"))
    need(kind in _OPTIONAL, f"model_type {raw.get('model_type')!r} is not supported; supported: {', '.join(_OPTIONAL)}")
    hybrid = kind.startswith("qwen3_5")
    for field, only in _FIXED.items():
        value = raw.get(field, only)
        need(value == only or (not value and not only), f"{field}={value!r} is not supported, only {only!r}")
    known = {*_REQUIRED, *_OPTIONAL[kind], *_FIXED, *_READ_ELSEWHERE, *_HARMLESS}
    unknown = sorted(field for field, value in raw.items() if value and field not in known)
    need(not unknown, f"{', '.join(unknown)}: not known for model_type {kind!r}; remove what changes nothing")
    missing = [name for name in _REQUIRED if raw.get(name) is None]
    if kind != "qwen3_5_moe" and raw.get("intermediate_size") is None:
        missing.append("intermediate_size")
    need(not missing, f"missing {', '.join(missing)}")

    layer_types = raw.get("layer_types")
    if layer_types is None and hybrid:
        every = raw.get("full_attention_interval", 4)
        layer_types = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(raw["num_hidden_layers"])]
    odd = sorted(set(layer_types or ()) - {"full_attention", *(["linear_attention"] if hybrid else [])})
    need(not odd, f"layer_types {odd} are not supported for {kind}")
    optional = {name: raw[name] for name in _OPTIONAL[kind] if raw.get(name) is not None}
    if "num_experts" in _OPTIONAL[kind] and raw.get("num_local_experts") is not None:  # transformers 5 may write this name
        optional.setdefault("num_experts", raw["num_local_experts"])
    eos = raw.get("eos_token_id")
    rope = parse_rope({"partial_rotary_factor": 0.25} | dict(raw) if hybrid else raw, source)
    try:
        return Config(
            **{name: raw[name] for name in _REQUIRED},
            **_DEFAULTS[kind] | optional,
            model_type=kind,
            intermediate_size=raw.get("intermediate_size") or 0,
            num_key_value_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            rope=rope,
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
            layer_types=tuple(layer_types) if hybrid else None,
            mlp_only_layers=tuple(raw.get("mlp_only_layers") or ()) if kind == "qwen3_moe" else (),
            **({"norm_topk_prob": True} if kind == "qwen3_5_moe" else {}),
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def read_config(folder: str | Path) -> Config:
    """Reads `folder/config.json`, local or gs://. Raises `ConfigError`, naming the file, if it is absent, not JSON or not honoured."""
    path = f"{folder}/config.json"
    try:
        raw = json.loads(read_text(folder, "config.json"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; point to a Hugging Face model folder") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return parse_config(raw, path)


_ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM",
}


def huggingface_config(config: Config, dtype: str) -> dict[str, Any]:
    """The config.json of a checkpoint of ours, readable by transformers 4 and 5; `parse_config` is its inverse."""
    kind = config.model_type
    names = [*_REQUIRED, *_OPTIONAL[kind], "intermediate_size", "num_key_value_heads", "eos_token_id"]
    names += ["layer_types"] if config.gated else []
    names += ["mlp_only_layers"] if kind == "qwen3_moe" else []
    return (
        {name: getattr(config, name) for name in names}
        | huggingface_rope(config.rope)
        | {
            "architectures": [_ARCHITECTURES[kind]],
            "model_type": {value: name for name, value in _TYPES.items()}.get(kind, kind),
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_sliding_window": False,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
    )
