"""The causal language model: one forward for training, scoring, prefill and decoding.

Parameters are stacked over the layers that have them. Without a cache the layers run as scans over blocks of like layers (Qwen3.6: three
gated delta layers and one of attention), so that compile time does not grow with depth; with a cache they are unrolled, since a scan would
carry the whole cache through every layer. The hot loop is functional: split the module once, jit over the pytrees, merge inside.

    graphdef, state = nnx.split(model)

    @jax.jit
    def step(state, factors, bank, tokens):             # frozen weights are arguments, never closures, never donated
        model = nnx.merge(graphdef, state)
        ...

Shape letters: B batch, T time, D model width, H query heads, K key-value heads, Dh head width, L layers, S slots, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from model.attention import segment_positions, segment_starts
from model.cache import Cache
from model.config import Config, Kind, Part
from model.decoder_layer import Context, Weights, decoder_layer, rms_norm
from model.gate import Routing
from model.lora import AdapterBank
from model.matmul import dense
from model.parameters import draw_parameters, lay_out, parameter_specs
from model.rotary import rotary
from model.sharding import constrain

_COLLECTED = ("gate_logits", "inputs", "experts")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Output:
    """What a forward pass gives.

    Attributes:
      hidden: [B, T, D] after the last norm.
      slots: int8 [B, T, L], the slot each token took, where a gate chose.
      cache: the given cache with this call's tokens.
      gate_logits: [B, T, L, S]; inputs: [B, T, L, D], what each layer's gate reads; experts: int32 [B, T, L', k], the experts that each of
        the L' sparse layers took. Each where it was asked for.
    """

    hidden: jax.Array
    slots: jax.Array | None = None
    cache: Cache | None = None
    gate_logits: jax.Array | None = None
    inputs: jax.Array | None = None
    experts: jax.Array | None = None


class CausalLM(nnx.Module):
    """A causal language model: `CausalLM(config, nnx.Rngs(seed))` draws its weights, `load_pretrained` reads them from a folder.

    `parameters`, if given, are taken as they are instead of drawn; named and shaped as `parameter_specs(config)` says. `mesh` lays out
    drawn parameters and steers the sharding of activations.
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
            raise ValueError("CausalLM needs either rngs to draw its weights with, or parameters")
        if parameters is None:
            parameters = draw_parameters(config, rngs, dtype)
            parameters = parameters if mesh is None else lay_out(parameters, config, mesh)
        self.config, self.mesh = config, mesh
        self.embed = nnx.Param(parameters["embed"])
        self.norm = nnx.Param(parameters["norm"])
        self.head = None if config.tie_word_embeddings else nnx.Param(parameters["head"])
        self.layers = nnx.Dict({n.removeprefix("layers."): nnx.Param(x) for n, x in parameters.items() if n.startswith("layers.")})

    def parameters(self) -> dict[str, jax.Array]:
        """The arrays, named as in `parameter_specs`."""
        top = {name: getattr(self, name).get_value() for name in ("embed", "norm", "head") if getattr(self, name) is not None}
        return top | {f"layers.{name}": value.get_value() for name, value in self.layers.items()}

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
        """hidden[..., D] -> logits[..., V], summed and kept in float32."""
        return dense(hidden, self.unembedding(), True)

    def unembedding(self) -> jax.Array:
        """[D, V], the embedding's transpose where the two are tied."""
        return self.embed[...].T if self.head is None else self.head[...]

    def forward(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        adapters: AdapterBank | None = None,
        routing: Routing | None = None,
        cache: Cache | None = None,
        *,
        experts: jax.Array | None = None,
        collect: Collection[str] = (),
    ) -> Output:
        """Runs the layers over tokens[B, T].

        Args:
          segment_ids: [B, T]; 0 is padding. A token sees those before it in the row that have its id.
          positions: [B, T]; by default the index in the row, or in the segment.
          adapters, routing: without a routing a bank of one adapter is applied to every token.
          cache: goes with positions. Tokens with segment id 0 are not remembered and must come last in their row; the others stand at
            consecutive positions, from 0 or from where the row's lane stands, and see the lane's tokens up to their own.
          experts: [B, T, L', k] expert ids of the L' sparse layers, taken instead of the router's choice and weighted by the router; where
            they are negative the router chooses.
          collect: which of gate_logits, inputs and experts to return.
        """
        _check(adapters, routing, cache, positions, collect)
        config = self.config
        if positions is None:
            steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            positions = jnp.broadcast_to(steps, tokens.shape) if segment_ids is None else segment_positions(segment_ids)
        recurrent = config.count("delta") > 0
        starts = count = places = None
        if cache is not None:
            starts = positions == 0 if recurrent else None
            valid = jnp.ones_like(positions, bool) if segment_ids is None else segment_ids > 0
            count, places = jnp.sum(valid, axis=1, dtype=jnp.int32), jnp.where(valid, positions, cache.length)
        elif recurrent:
            starts = segment_starts(jnp.ones_like(positions) if segment_ids is None else segment_ids)
        context = Context(
            config,
            self.mesh,
            *rotary(positions, config.rope, config.head_dim, config.max_position_embeddings),
            positions,
            segment_ids,
            starts,
            count,
            places,
            routing,
            None if adapters is None else adapters.scale,
            0 if adapters is None else adapters.rank,
        )
        stacks = Weights(
            {name: value[...] for name, value in self.layers.items()},
            *(({}, {}) if adapters is None else adapters.factors),
            None if routing is None else routing.gate,
            None if experts is None else jnp.moveaxis(experts, 2, 0),
        )
        x = constrain(jnp.take(self.embed[...], tokens, axis=0), ("batch", None, None), self.mesh)
        keep = {"slots", *collect}
        if cache is None:
            x, extras = _scan_layers(context, x, stacks, keep)
        else:
            x, cache, extras = _unroll_layers(context, x, stacks, cache, keep)
        hidden = rms_norm(x, self.norm[...], config.rms_norm_eps, centred=config.gated)
        return Output(hidden, cache=cache, **{name: jnp.moveaxis(y, 0, 2) for name, y in extras.items()})


class Run(NamedTuple):
    """Layers start .. start + period * repeats - 1: a block of `period` layers, `repeats` times."""

    start: int
    period: int
    repeats: int


def plan_runs(kinds: Sequence[Kind]) -> list[Run]:
    """The layers as runs of repeated blocks, each as long as can be, the shortest block first."""
    runs, start = [], 0
    while start < len(kinds):
        best = Run(start, 1, 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            repeats = 1
            while kinds[start + repeats * period :][:period] == kinds[start:][:period]:
                repeats += 1
            if repeats > 1 and period * repeats > best.period * best.repeats:
                best = Run(start, period, repeats)
        runs.append(best)
        start += best.period * best.repeats
    return runs


def _scan_layers(context: Context, x: jax.Array, stacks: Weights, keep: Collection[str]) -> tuple[jax.Array, dict[str, jax.Array]]:
    config, collected = context.config, []
    kinds = config.kinds()
    for start, period, repeats in plan_runs(kinds):
        block = kinds[start : start + period]

        def blocks(part: Part, stack: jax.Array, start=start, repeats=repeats, block=block) -> jax.Array | None:
            """[repeats, how many layers of a block have the part, ...]"""
            first, each = _count(kinds[:start], part), _count(block, part)
            # a slice of a parameter is a copy of it
            here = stack if each * repeats == stack.shape[0] else stack[first : first + each * repeats]
            return here.reshape(repeats, each, *stack.shape[1:]) if each else None

        def run(x: jax.Array, stacks: Weights, block=block) -> tuple[jax.Array, dict[str, jax.Array]]:
            extras = []
            for index, kind in enumerate(block):
                # takes the block's arrays and not the layer's: those would be new ones, kept for the backward pass, a copy of all weights
                def layer(x: jax.Array, stacks: Weights, index=index, kind=kind) -> tuple[jax.Array, dict[str, jax.Array]]:
                    x, _, found = decoder_layer(context, kind, x, _layer_weights(config, block, index, stacks), None)
                    return x, {name: found[name] for name in found if name in keep}

                x, found = (jax.checkpoint(layer, prevent_cse=False) if config.remat else layer)(x, stacks)
                extras.append(found)
            return x, _collect(extras, jnp.stack)

        x, extras = jax.lax.scan(run, x, _map_stacks(config, blocks, stacks), unroll=max(1, config.layers_per_step // period))
        collected.append({name: y.reshape(-1, *y.shape[2:]) for name, y in extras.items()})
    return x, _collect(collected, jnp.concatenate)


def _unroll_layers(
    context: Context, x: jax.Array, stacks: Weights, cache: Cache, keep: Collection[str]
) -> tuple[jax.Array, Cache, dict[str, jax.Array]]:
    kinds, entries, extras = context.config.kinds(), [], []
    for index, (kind, entry) in enumerate(zip(kinds, cache.layers, strict=True)):
        x, entry, found = decoder_layer(context, kind, x, _layer_weights(context.config, kinds, index, stacks), entry)
        entries.append(entry)
        extras.append({name: found[name] for name in found if name in keep})
    return x, Cache(tuple(entries)), _collect(extras, jnp.stack)


@functools.cache
def _parts(config: Config) -> dict[str, Part | None]:
    """The part that each parameter of the layers belongs to; asked for once a layer while a step is traced."""
    return {name.removeprefix("layers."): spec.part for name, spec in parameter_specs(config).items()}


def _map_stacks(config: Config, function: Callable[[Part, jax.Array], jax.Array | None], stacks: Weights) -> Weights:
    """`function` of each array and the part that it belongs to; where it gives None the array is left out."""
    parts = _parts(config)

    def named(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        mapped = {name: function(parts[name], x) for name, x in arrays.items()}
        return {name: x for name, x in mapped.items() if x is not None}

    gate = jax.tree.map(lambda x: function("every", x), stacks.gate)
    return Weights(*map(named, stacks[:3]), gate, None if stacks.experts is None else function("sparse", stacks.experts))


def _layer_weights(config: Config, kinds: Sequence[Kind], index: int, stacks: Weights) -> Weights:
    """The arrays of layer `index` of `kinds`, from stacks over these layers."""
    return _map_stacks(config, lambda part, x: x[_count(kinds[:index], part)] if kinds[index].has(part) else None, stacks)


def _count(kinds: Sequence[Kind], part: Part) -> int:
    return sum(kind.has(part) for kind in kinds)


def _collect(extras: Sequence[dict[str, jax.Array]], join: Callable) -> dict[str, jax.Array]:
    """One array of each name, joined over those that have it."""
    names = dict.fromkeys(name for found in extras for name in found)
    return {name: join([found[name] for found in extras if name in found]) for name in names}


def _check(
    adapters: AdapterBank | None, routing: Routing | None, cache: Cache | None, positions: jax.Array | None, collect: Collection[str]
) -> None:
    if cache is not None and positions is None:
        raise ValueError("forward with a cache needs the positions of the tokens")
    if adapters is None and routing is not None:
        raise ValueError("routing needs adapters to route to")
    if adapters is not None and routing is None and adapters.size != 1:
        raise ValueError(f"a bank of {adapters.size} adapters needs a routing")
    if routing is not None:
        routing.check(adapters.size + 1)
    if odd := set(collect) - set(_COLLECTED):
        raise ValueError(f"collect: {sorted(odd)} unknown; there are {', '.join(_COLLECTED)}")
