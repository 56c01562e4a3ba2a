"""Every parameter of a backbone by name: shape, meaning of its axes, and how it is drawn. No array is needed to ask."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from model.config import Config, Part
from model.sharding import distribute, partition


class Spec(NamedTuple):
    """The shape of a parameter, what its axes mean (see `model.sharding`) and which layers have it (None: it belongs to no layer)."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    part: Part | None = None


def parameter_specs(config: Config) -> dict[str, Spec]:
    """Every parameter by name. Linear weights are [in, out]; the layers' own, `layers.*`, are stacked over the layers that have them."""
    d, v, dh = config.hidden_size, config.vocab_size, config.head_dim
    heads, channels = config.linear_num_value_heads, 0
    layers: dict[str, Spec] = {}
    for name, p in config.projections().items():
        if p.experts:
            layers[name] = Spec((p.experts, p.width, p.out), ("experts", *p.axes), p.part)
        else:
            layers[name] = Spec((p.width, p.out), p.axes, p.part)
        if config.attention_bias and name in ("q", "k", "v", "o"):
            layers[f"{name}_bias"] = Spec((p.out,), p.axes[1:], p.part)
        channels = p.out if name == "qkv" else channels
    layers |= {name: Spec((dh,), (None,), "attention") for name in ("q_norm", "k_norm")}
    if channels:
        layers["conv"] = Spec((channels, config.linear_conv_kernel_dim), ("heads", None), "delta")
        layers |= {name: Spec((heads,), (None,), "delta") for name in ("dt_bias", "A_log")}
        layers["delta_norm"] = Spec((config.linear_value_head_dim,), (None,), "delta")
    if config.count("sparse"):
        layers["router"] = Spec((d, config.num_experts), ("embed", None), "sparse")
    if config.shared_expert_intermediate_size and config.count("sparse"):
        layers["shared_router"] = Spec((d, 1), ("embed", None), "sparse")
    layers |= {name: Spec((d,), (None,), "every") for name in ("input_norm", "post_norm")}
    specs = {"embed": Spec((v, d), ("vocab", "embed")), "norm": Spec((d,), (None,))}
    if not config.tie_word_embeddings:
        specs["head"] = Spec((d, v), ("embed", "vocab"))
    for name, spec in layers.items():
        specs[f"layers.{name}"] = Spec((config.count(spec.part), *spec.shape), ("layers", *spec.axes), spec.part)
    return specs


def parameter_dtype(name: str, dtype: jnp.dtype) -> jnp.dtype:
    """The type of a parameter of a model of `dtype`: the decay of gated delta layers is computed in float32, and published so too."""
    return jnp.dtype(jnp.float32) if name.endswith(("A_log", "dt_bias")) else jnp.dtype(dtype)


def abstract_parameters(config: Config, dtype: jnp.dtype, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, types and shardings of the parameters, as `load_pretrained` would make them."""
    return {
        name: jax.ShapeDtypeStruct(spec.shape, parameter_dtype(name, dtype), sharding=partition(spec.shape, spec.axes, mesh))
        for name, spec in parameter_specs(config).items()
    }


def count_parameters(config: Config) -> int:
    """Parameters of the backbone, without making any."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(config).values())


def draw_parameters(config: Config, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> dict[str, jax.Array]:
    """Fresh weights as transformers draws them: normal with deviation 0.02, norms one (the centred ones zero), biases zero, the gated delta
    layers' A uniform in (0.01, 16)."""

    def draw(name: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        if name.endswith("norm"):
            return jnp.full(shape, 0.0 if config.gated and not name.endswith("delta_norm") else 1.0, dtype)
        if name.endswith("dt_bias"):
            return jnp.ones(shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        if name.endswith("A_log"):
            return jnp.log(jax.random.uniform(rngs.params(), shape, minval=0.01, maxval=16.0)).astype(dtype)
        return (0.02 * jax.random.normal(rngs.params(), shape)).astype(dtype)

    return {name: draw(name, spec.shape, parameter_dtype(name, dtype)) for name, spec in parameter_specs(config).items()}


def lay_out(parameters: dict[str, jax.Array | np.ndarray], config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """The parameters laid out over the mesh as the rules table says."""
    specs = parameter_specs(config)
    return distribute(parameters, {name: partition(specs[name].shape, specs[name].axes, mesh) for name in parameters})
