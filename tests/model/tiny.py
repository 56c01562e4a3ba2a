"""Tiny random Qwen3 checkpoints made by transformers, and adapters and gates that do something."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from model import AdapterBank, Config, Gate, Output, Qwen3
from model.qwen3 import parameter_specs

torch.set_num_threads(1)

# what differs from `BASE`; the layers of one and five are run by both kinds of loop, see unroll in `model.config`
BASE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": None,
    "eos_token_id": None,
}
VARIATIONS = {
    "untied": {"tie_word_embeddings": False},
    "tied, one key-value head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "all heads have keys, wide heads": {"num_key_value_heads": 4, "head_dim": 24},
    "biases, one layer": {"attention_bias": True, "num_hidden_layers": 1},
    "five layers, narrow heads": {"num_hidden_layers": 5, "head_dim": 6},
    "far rotary base": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True},
    "coarse norm, biases, two layers": {"rms_norm_eps": 1e-3, "attention_bias": True, "num_hidden_layers": 2},
}


def checkpoint(folder: Path, seed: int = 0, **changes) -> transformers.Qwen3ForCausalLM:
    """Saves a random model, no parameter of which is zero or one, in `folder` and returns it."""
    torch.manual_seed(seed)
    net = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**BASE | changes)).eval()
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn(p.shape) * 0.15 + (1.0 if "norm" in name else 0.0))
    net.save_pretrained(folder)
    return net


def tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, BASE["vocab_size"], shape)


def torch_logits(net, tokens, **inputs) -> np.ndarray:
    with torch.no_grad():
        return net(torch.tensor(np.asarray(tokens)), **{name: torch.tensor(x) for name, x in inputs.items()}).logits.numpy()


CONFIG = Config(97, 48, 80, 3, 4, 2, head_dim=16, tie_word_embeddings=True)


def model(seed: int = 0, **changes) -> Qwen3:
    """A random model of ours, its weights large enough that mistakes show."""
    config, random = dataclasses.replace(CONFIG, **changes), np.random.default_rng(seed)
    draw = {name: 0.15 * random.standard_normal(spec.shape, np.float32) for name, spec in parameter_specs(config).items()}
    return Qwen3(config, parameters={name: jnp.asarray(x + 1 if name.endswith("norm") else x) for name, x in draw.items()})


def bank(config: Config = CONFIG, adapters: int = 1, rank: int = 4, seed: int = 1, size: float = 0.2) -> AdapterBank:
    """Random adapters whose B is not zero."""
    random, layers = np.random.default_rng(seed), config.num_hidden_layers
    a, b = {}, {}
    for name, (width, out) in config.widths().items():
        a[name] = jnp.asarray(width**-0.5 * random.standard_normal((layers, adapters, width, rank), np.float32))
        b[name] = jnp.asarray(size * random.standard_normal((layers, adapters, rank, out), np.float32))
    return AdapterBank(a, b, jnp.linspace(1.0, 2.0, adapters))


def gate(slots: int, config: Config = CONFIG, seed: int = 2) -> Gate:
    """A gate that uses all its slots."""
    random, layers = np.random.default_rng(seed), config.num_hidden_layers
    kernel = 0.4 * random.standard_normal((layers, config.hidden_size, slots), np.float32)
    return Gate(jnp.asarray(kernel), jnp.broadcast_to(jnp.linspace(-0.2, 0.2, slots), (layers, slots)))


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _forward(graphdef, state, arguments, keywords, collect, inputs):
    out = nnx.merge(graphdef, state).forward(*arguments, **keywords, collect=collect, collect_inputs=inputs)
    return out, nnx.merge(graphdef, state).unembed(out.hidden)


def forward(model: Qwen3, *arguments, collect: bool = False, collect_inputs: bool = False, **keywords) -> Output:
    """`model.forward`, compiled once per shape instead of once per call."""
    return _forward(*nnx.split(model), arguments, keywords, collect, collect_inputs)[0]


def logits(model: Qwen3, *arguments, **keywords) -> jax.Array:
    """`model(...)`, compiled once per shape instead of once per call."""
    return _forward(*nnx.split(model), arguments, keywords, False, False)[1]
