"""The dense Qwen3 decoder: one forward for training, scoring, prefill and decoding.

Layers are stacked [L, ...] and run by one scan. The hot loop is functional: split the module once, jit over the pytrees, merge inside.

    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state, factors, bank, tokens):             # frozen weights are arguments, never closures, never donated
        model = nnx.merge(graphdef, state)
        ...

Shape letters: B batch, T time, D model width, H query heads, K key-value heads, Dh head width, L layers, S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from model import sharding
from model.attention import attend, cache_mask, causal_mask, rotary, rotate, segment_positions
from model.cache import KVCache, write
from model.config import Config
from model.gate import Routing, gate_scores, slot_weights
from model.lora import AdapterBank, delta, rank_mask
from model.matmul import dense


class Spec(NamedTuple):
    """The shape of a parameter and what its axes mean (see `model.sharding`)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]


def parameter_specs(config: Config) -> dict[str, Spec]:
    """Every parameter by name; those of the layers, `layers.*`, are stacked [L, ...]. Linear weights are [in, out]."""
    d, v, dh, layers = config.hidden_size, config.vocab_size, config.head_dim, config.num_hidden_layers
    meaning = {
        "q": ("embed", "heads"),
        "k": ("embed", "kv_heads"),
        "v": ("embed", "kv_heads"),
        "o": ("heads", "embed"),
        "gate": ("embed", "mlp"),
        "up": ("embed", "mlp"),
        "down": ("mlp", "embed"),
    }
    per_layer = {name: Spec(width, meaning[name]) for name, width in config.widths().items()}
    if config.attention_bias:
        per_layer |= {f"{name}_bias": Spec(per_layer[name].shape[1:], meaning[name][1:]) for name in ("q", "k", "v", "o")}
    per_layer |= {name: Spec((dh,), ("norm",)) for name in ("q_norm", "k_norm")}
    per_layer |= {name: Spec((d,), ("norm",)) for name in ("input_norm", "post_norm")}
    specs = {"embed": Spec((v, d), ("vocab", "embed")), "norm": Spec((d,), ("norm",))}
    if not config.tie_word_embeddings:
        specs["head"] = Spec((d, v), ("embed", "vocab"))
    return specs | {f"layers.{name}": Spec((layers, *s.shape), ("layers", *s.axes)) for name, s in per_layer.items()}


def count_parameters(config: Config) -> int:
    """Parameters of the backbone, without making any."""
    return sum(math.prod(spec.shape) for spec in parameter_specs(config).values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """hidden[B, T, D] after the last norm; slots int8 [B, T, L], the slot each token took, where a gate chose; gate_logits[B, T, L, S] if
    they were asked for; the cache with this call's keys and values, if one was given; inputs[B, T, L, D], what each layer's gate reads, if
    they were asked for."""

    hidden: jax.Array
    slots: jax.Array | None = None
    gate_logits: jax.Array | None = None
    cache: KVCache | None = None
    inputs: jax.Array | None = None


class Qwen3(nnx.Module):
    """A causal language model: `Qwen3(config, nnx.Rngs(seed))` draws its weights, `load_pretrained` reads them from a folder.

    `parameters`, if given, are taken instead of drawn; named and shaped as `parameter_specs(config)` says.
    """

    def __init__(
        self,
        config: Config,
        rngs: nnx.Rngs | None = None,
        dtype: jnp.dtype = jnp.float32,
        mesh: Mesh | None = None,
        parameters: dict[str, jax.Array] | None = None,
    ):
        if (rngs is None) == (parameters is None):
            raise ValueError("Qwen3 needs either rngs to draw its weights with, or parameters")
        values = draw_parameters(config, rngs, dtype) if parameters is None else parameters
        values = values if mesh is None else place(values, config, mesh)
        self.config = config
        self.embed = nnx.Param(values["embed"])
        self.norm = nnx.Param(values["norm"])
        self.head = None if config.tie_word_embeddings else nnx.Param(values["head"])
        self.layers = nnx.Dict({n.removeprefix("layers."): nnx.Param(x) for n, x in values.items() if n.startswith("layers.")})

    def parameters(self) -> dict[str, jax.Array]:
        """The arrays, named as in `parameter_specs`."""
        top = {name: getattr(self, name)[...] for name in ("embed", "norm", "head") if getattr(self, name) is not None}
        return top | {f"layers.{name}": value[...] for name, value in self.layers.items()}

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        adapters: AdapterBank | None = None,
        routing: Routing | None = None,
    ) -> jax.Array:
        """tokens[B, T] -> logits[B, T, V] float32. Arguments as in `forward`."""
        return self.unembed(self.forward(tokens, positions, segment_ids, adapters, routing).hidden)

    def unembed(self, hidden: jax.Array) -> jax.Array:
        """hidden[..., D] -> logits[..., V] float32."""
        weight = self.embed[...].T if self.head is None else self.head[...]
        return dense(hidden, weight).astype(jnp.float32)

    def forward(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        adapters: AdapterBank | None = None,
        routing: Routing | None = None,
        cache: KVCache | None = None,
        *,
        collect: bool = False,
        collect_inputs: bool = False,
    ) -> Output:
        """Runs the layers over tokens[B, T].

        segment_ids[B, T]: 0 is padding; attention is causal within equal ids. positions[B, T] default to the index in the row, or in the
        segment. Without `routing` a bank of one adapter is applied to every token. With a cache, `positions` must be given: a token with
        segment id 0 is not written, the others are written at their positions (consecutive from 0 in each row) and see the row's entries
        up to their own. `collect` also returns the gate's logits, `collect_inputs` the normalised layer inputs that a gate reads.
        """
        if cache is not None and positions is None:
            raise ValueError("forward with a cache needs the positions of the tokens")
        if adapters is None and routing is not None:
            raise ValueError("routing needs adapters to route to")
        if adapters is not None and routing is None and adapters.size != 1:
            raise ValueError(f"a bank of {adapters.size} adapters needs a routing")
        if routing is not None:
            routing.check(adapters.size + 1)
        config = self.config
        if positions is None:
            steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            positions = jnp.broadcast_to(steps, tokens.shape) if segment_ids is None else segment_positions(segment_ids)

        cos, sin = rotary(positions, config.head_dim, config.rope_theta)
        places = None
        if cache is None:
            mask = causal_mask(segment_ids, tokens.shape[1])
        else:
            length = cache.k.shape[2]
            mask = cache_mask(positions, length)
            places = positions if segment_ids is None else jnp.where(segment_ids > 0, positions, length)
        gate = None if routing is None else routing.gate
        factors = None if adapters is None else adapters.factors

        def attention(x, k, v, cache, index):
            if cache is None:
                return attend(x, k, v, mask), None
            cache = write(cache, index, places, k, v)
            return attend(x, cache.k[index], cache.v[index], mask), cache

        def layer(carry, xs):
            x, cache = carry
            index, w, factors, gate = xs
            h = inputs = rms_norm(x, w["input_norm"], config.rms_norm_eps)
            logits = None if gate is None else gate_scores(gate, h)
            chosen = None if routing is None else slot_weights(routing, logits)
            if adapters is not None:
                ones = jnp.ones((1, 1, 2), jnp.float32)
                ranks = rank_mask(ones if chosen is None else chosen, adapters.scale, adapters.rank)

            def project(name, x):
                y = dense(x, w[name])
                if f"{name}_bias" in w:
                    y += w[f"{name}_bias"]
                if factors is not None and name in factors[0]:
                    y += delta(x, factors[0][name], factors[1][name], ranks)
                return y

            def heads(name):
                return project(name, h).reshape(*h.shape[:2], -1, config.head_dim)

            q = rotate(rms_norm(heads("q"), w["q_norm"], config.rms_norm_eps), cos, sin)
            k = rotate(rms_norm(heads("k"), w["k_norm"], config.rms_norm_eps), cos, sin)
            mixed, cache = attention(q, k, heads("v"), cache, index)
            x += project("o", mixed.reshape(*h.shape[:2], -1))
            h = rms_norm(x, w["post_norm"], config.rms_norm_eps)
            x += project("down", jax.nn.silu(project("gate", h)) * project("up", h))
            slots = None if logits is None else jnp.argmax(chosen, axis=-1).astype(jnp.int8)
            return (x, cache), (slots, logits if collect else None, inputs if collect_inputs else None)

        if config.remat:
            layer = jax.checkpoint(layer, prevent_cse=False)
        indices = jnp.arange(config.num_hidden_layers)
        weights = {name: value[...] for name, value in self.layers.items()}
        x = jnp.take(self.embed[...], tokens, axis=0)
        xs = (indices, weights, factors, gate)
        (x, cache), collected = jax.lax.scan(layer, (x, cache), xs, unroll=config.layers_per_step)
        hidden = rms_norm(x, self.norm[...], config.rms_norm_eps)
        slots, logits, inputs = (None if y is None else jnp.moveaxis(y, 0, 2) for y in collected)
        return Output(hidden, slots, logits, cache, inputs)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, in float32 (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * scaled.astype(x.dtype)


def draw_parameters(config: Config, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> dict[str, jax.Array]:
    """Fresh weights: normal with deviation 0.02, norms one, biases zero (transformers' initialisation)."""

    def draw(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name.endswith("norm"):
            return jnp.ones(shape, dtype)
        if name.endswith("bias"):
            return jnp.zeros(shape, dtype)
        return (0.02 * jax.random.normal(rngs.params(), shape)).astype(dtype)

    return {name: draw(name, spec.shape) for name, spec in parameter_specs(config).items()}


def place(parameters: dict[str, jax.Array], config: Config, mesh: Mesh) -> dict[str, jax.Array]:
    """The parameters laid out over the mesh as the rules table says."""
    specs = parameter_specs(config)
    return {
        name: jax.device_put(value, sharding.partition(specs[name].shape, specs[name].axes, mesh)) for name, value in parameters.items()
    }
