"""Rotary positions against transformers, and every way a config can name them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from model.errors import ConfigError
from model.rotary import Rope, huggingface_rope, inverse_frequencies, parse_rope, rotary, rotate

LLAMA = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
KINDS = {
    "linear": Rope(1e4, "linear", factor=3.0),
    "linear, partial": Rope(1e6, "linear", 0.25, factor=2.5),
    "yarn": Rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=512),
    "yarn, factor inferred": Rope(1e6, "yarn", original_max_position_embeddings=512),
    "yarn, original inferred": Rope(1e4, "yarn", factor=2.0),
    "yarn, attention factor": Rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=512, attention_factor=1.7),
    "yarn, mscale": Rope(1e6, "yarn", factor=40.0, original_max_position_embeddings=512, mscale=0.707, mscale_all_dim=1.2),
    "yarn, one mscale": Rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=512, mscale=0.707),
    "yarn, betas": Rope(1e5, "yarn", factor=4.0, original_max_position_embeddings=4096, beta_fast=16.0, beta_slow=2.0),
    "yarn, not truncated": Rope(1e5, "yarn", factor=4.0, original_max_position_embeddings=4096, truncate=False),
    "yarn, range of one": Rope(1e6, "yarn", factor=4.0, original_max_position_embeddings=6, beta_fast=1.0),
    "yarn, partial": Rope(1e6, "yarn", 0.5, factor=4.0, original_max_position_embeddings=512),
    "llama3": Rope(5e5, "llama3", **LLAMA),
    "llama3, partial": Rope(1e4, "llama3", 0.5, **LLAMA | {"original_max_position_embeddings": 300}),
}
PLAIN = {"default": Rope(), "partial": Rope(1e7, partial=0.25), "mrope": Rope(1e7, partial=0.25, mrope_section=(11, 11, 10))}


def transformers_config(rope: Rope, head_dim: int = 64, length: int = 2048) -> transformers.Qwen3Config:
    parameters = dict(huggingface_rope(rope)["rope_parameters"])
    if rope.kind == "yarn":
        parameters.setdefault("factor", None)
    return transformers.Qwen3Config(head_dim=head_dim, max_position_embeddings=length, rope_parameters=parameters)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("head_dim", [64, 28])
def test_frequencies_are_those_of_transformers(name, head_dim):
    rope = KINDS[name]
    expected, scale = ROPE_INIT_FUNCTIONS[rope.kind](transformers_config(rope, head_dim), "cpu")
    ours, factor = inverse_frequencies(rope, head_dim, 2048)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, expected.numpy(), rtol=1e-6, atol=1e-9)
    assert factor == pytest.approx(scale, rel=1e-6)


# Qwen3 of transformers turns whole heads
@pytest.mark.parametrize("name", [name for name, rope in (KINDS | PLAIN).items() if rope.partial == 1])
def test_turned_heads_are_those_of_transformers(name):
    rope = (KINDS | PLAIN)[name]
    random = np.random.default_rng(0)
    x, positions = random.standard_normal((2, 5, 3, 64), np.float32), random.integers(0, 1500, (2, 5))
    cos, sin = Qwen3RotaryEmbedding(transformers_config(rope))(torch.tensor(x), torch.tensor(positions))
    expected = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2)[0].numpy()
    ours = rotate(jnp.asarray(x), *rotary(jnp.asarray(positions), rope, 64, 2048))
    np.testing.assert_allclose(ours, expected, atol=2e-4)  # float32 angles of up to 1500 radians


@pytest.mark.parametrize("partial", [0.25, 0.5])
def test_partial_rotary_turns_the_first_dimensions_and_keeps_the_others(partial):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 3, 32)), jnp.bfloat16)
    width = int(32 * partial)
    positions = jnp.arange(14).reshape(2, 7)
    turned = rotate(x, *rotary(positions, Rope(partial=partial), 32, 64))
    assert turned.dtype == x.dtype
    np.testing.assert_array_equal(turned[..., width:], x[..., width:])
    np.testing.assert_array_equal(turned[..., :width], rotate(x[..., :width], *rotary(positions, Rope(), width, 64)))


@pytest.mark.parametrize("name", KINDS | PLAIN)
def test_a_config_says_the_rope_that_was_written_to_it(name):
    rope = (KINDS | PLAIN)[name]
    raw = huggingface_rope(rope)
    assert parse_rope(raw) == rope
    assert hash(rope) == hash(parse_rope(raw))
    assert parse_rope({name: raw[name] for name in raw if name != "rope_parameters"}) == rope  # what transformers 4 reads
    assert parse_rope({"rope_parameters": raw["rope_parameters"]}) == rope  # 5


@pytest.mark.parametrize(
    "raw, expected",
    [
        ({}, Rope()),
        ({"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.25}, Rope(1e6, partial=0.25)),
        ({"rope_theta": 5, "rope_scaling": {"type": "linear", "factor": 2}}, Rope(5, "linear", factor=2)),
        ({"rope_scaling": {"rope_type": "linear", "type": "default", "factor": 2}}, Rope(kind="linear", factor=2)),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, Rope(9.0)),
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5}}, Rope(partial=0.5)),
        (
            {"rope_parameters": {"mrope_section": [3, 3, 2], "mrope_interleaved": True}},
            Rope(mrope_section=(3, 3, 2), mrope_interleaved=True),
        ),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": None}}, Rope(kind="yarn", factor=4.0)),
    ],
)
def test_all_spellings_are_read(raw, expected):
    assert parse_rope(raw) == expected


@pytest.mark.parametrize(
    "parameters, named",
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "'longrope'"),
        ({"type": "su"}, "'su'"),
        ({"rope_type": "default", "gamma": 1.0}, "gamma"),
        ({"rope_type": "default", "factor": 2.0}, "'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "'beta_fast'"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0.5}, "factor=0.5"),
        ({"rope_type": "linear", "factor": "2"}, "factor='2'"),
        ({"rope_type": "llama3", **LLAMA, "low_freq_factor": 5.0}, "low_freq_factor 5.0"),
        ({"rope_type": "yarn", "truncate": 1}, "truncate=1"),
        ({"mrope_section": [4, 4]}, "mrope_section"),
        ({"rope_theta": -1.0}, "rope_theta -1.0"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ("yarn", "must be an object"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(parameters, named):
    with pytest.raises(ConfigError, match="tiny/config.json: .*" + named):
        parse_rope({"rope_parameters": parameters}, "tiny/config.json")


def test_a_rope_is_a_static_argument():
    rope = Rope(kind="linear", factor=2.0)
    assert {rope: 1}[dataclasses.replace(rope)] == 1
