"""Tiny random checkpoints of each type made by transformers, and adapters and gates that do something."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from model import AdapterBank, CausalLM, Config, Gate, Output, parse_config
from model.lora import bank_shapes
from model.parameters import parameter_specs

torch.set_num_threads(1)

_PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
_HYBRID = {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": _PLAIN,
    "bos_token_id": None,
    "eos_token_id": None,
}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LINEAR = {
    "num_hidden_layers": 4,
    "rope_parameters": _HYBRID,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
# each type's configuration, and what differs from it; one and five layers are run by both kinds of loop, see unroll in `model.config`
BASES = {
    "qwen3": _COMMON | {"intermediate_size": 80},
    "qwen3_moe": _COMMON | _EXPERTS | {"intermediate_size": 40, "norm_topk_prob": True},
    "qwen3_5": _COMMON | _LINEAR | {"intermediate_size": 80},
    "qwen3_5_moe": _COMMON | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 28},
}
VARIATIONS = {
    "qwen3": {
        "untied": {"tie_word_embeddings": False},
        "tied, one key-value head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
        "all heads have keys, wide heads": {"num_key_value_heads": 4, "head_dim": 24},
        "biases, one layer": {"attention_bias": True, "num_hidden_layers": 1},
        "five layers, narrow heads": {"num_hidden_layers": 5, "head_dim": 6},
        "far rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True},
        "coarse norm, biases, two layers": {"rms_norm_eps": 1e-3, "attention_bias": True, "num_hidden_layers": 2},
        "yarn": {
            "rope_parameters": _PLAIN | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
        "linear rope": {"rope_parameters": _PLAIN | {"rope_type": "linear", "factor": 3.0}},
    },
    "qwen3_moe": {
        "plain": {},
        "weights as they are": {"norm_topk_prob": False, "tie_word_embeddings": True},
        "one expert a token": {"num_experts_per_tok": 1},
        "all experts": {"num_experts_per_tok": 6, "num_hidden_layers": 2},
        "every second layer dense": {"decoder_sparse_step": 2, "num_hidden_layers": 5},
        "some layers dense, biases": {"mlp_only_layers": [0, 3], "num_hidden_layers": 7, "attention_bias": True},
    },
    "qwen3_5": {
        "plain": {},
        "tied, more key heads": {"tie_word_embeddings": True, "linear_num_key_heads": 4},
        "two blocks, one key-value head": {"num_hidden_layers": 8, "num_key_value_heads": 1},
        "wide convolution, biases": {"linear_conv_kernel_dim": 6, "attention_bias": True},
        "narrow convolution, whole rotary": {
            "linear_conv_kernel_dim": 2,
            "rope_parameters": _HYBRID | {"partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]},
        },
        "an order of its own, coarse norm": {
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 5,
            "rms_norm_eps": 1e-3,
        },
    },
    "qwen3_5_moe": {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "one expert a token": {"num_experts_per_tok": 1},
        "many small experts": {"num_experts": 16, "num_experts_per_tok": 5, "moe_intermediate_size": 8},
        "two blocks": {"num_hidden_layers": 8, "shared_expert_intermediate_size": 12},
        "more key heads, biases": {"linear_num_key_heads": 4, "attention_bias": True},
    },
}
_TORCH = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
}


def checkpoint(folder: Path, kind: str = "qwen3", seed: int = 0, **changes) -> transformers.PreTrainedModel:
    """Saves a random model, no parameter of which is zero or one, in `folder` and returns it.

    Hybrids get smaller weights: at 0.15 eight layers make 1e-4 of either implementation's own rounding.
    """
    torch.manual_seed(seed)
    config, net = _TORCH[kind]
    net = net(config(**BASES[kind] | changes)).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            centre = 1.0 if "norm" in name and (not kind.startswith("qwen3_5") or "linear_attn" in name) else 0.0
            p.copy_(torch.randn(p.shape) * (0.1 if kind.startswith("qwen3_5") else 0.15) + centre)
    net.save_pretrained(folder)
    return net


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, _COMMON["vocab_size"], shape)


def torch_logits(net, tokens, **inputs) -> np.ndarray:
    with torch.no_grad():
        return net(torch.tensor(np.asarray(tokens)), **{name: torch.tensor(x) for name, x in inputs.items()}).logits.numpy()


CONFIG = Config(97, 48, 80, 3, 4, 2, head_dim=16, tie_word_embeddings=True)
# of ours, one of each type
CONFIGS = {kind: parse_config({"model_type": kind, "tie_word_embeddings": True} | base) for kind, base in BASES.items()}


def model(seed: int = 0, config: Config = CONFIG, **changes) -> CausalLM:
    """A random model of ours, its weights large enough that mistakes show."""
    config, random = dataclasses.replace(config, **changes), np.random.default_rng(seed)

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        centre = 1.0 if name.endswith("norm") and (not config.gated or name.endswith("delta_norm")) else 0.0
        return jnp.asarray(centre + 0.15 * random.standard_normal(shape, np.float32))

    return CausalLM(config, parameters={name: draw(name, spec.shape) for name, spec in parameter_specs(config).items()})


def bank(config: Config = CONFIG, adapters: int = 1, rank: int = 4, seed: int = 1, size: float = 0.2) -> AdapterBank:
    """Random adapters whose B is not zero."""
    random, a, b = np.random.default_rng(seed), {}, {}
    for name, (shape_a, shape_b) in bank_shapes(config, adapters, rank).items():
        a[name] = jnp.asarray(shape_a[-2] ** -0.5 * random.standard_normal(shape_a, np.float32))
        b[name] = jnp.asarray(size * random.standard_normal(shape_b, np.float32))
    return AdapterBank(a, b, jnp.linspace(1.0, 2.0, adapters))


def gate(slots: int, config: Config = CONFIG, seed: int = 2) -> Gate:
    """A gate that uses all its slots."""
    random, layers = np.random.default_rng(seed), config.num_hidden_layers
    kernel = 0.4 * random.standard_normal((layers, config.hidden_size, slots), np.float32)
    return Gate(jnp.asarray(kernel), jnp.broadcast_to(jnp.linspace(-0.2, 0.2, slots), (layers, slots)))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _forward(graphdef, state, arguments, keywords, collect):
    out = nnx.merge(graphdef, state).forward(*arguments, **keywords, collect=collect)
    return out, nnx.merge(graphdef, state).unembed(out.hidden)


def forward(model: CausalLM, *arguments, collect: tuple[str, ...] = (), **keywords) -> Output:
    """`model.forward`, compiled once per shape instead of once per call."""
    return _forward(*nnx.split(model), arguments, keywords, collect)[0]


def logits(model: CausalLM, *arguments, **keywords) -> jax.Array:
    """`model(...)`, compiled once per shape instead of once per call."""
    return _forward(*nnx.split(model), arguments, keywords, ())[1]
