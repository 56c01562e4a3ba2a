"""What one layer computes: a token mixer (attention or the gated delta rule), then a feed-forward part (dense or experts), both adapted.

One routing decision a token, from the normalised input of the layer, governs every adapted projection of the layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model import gated_delta
from model.attention import attend, attend_cached
from model.cache import KeyValues, write
from model.config import Config, Kind
from model.gate import Gate, Routing, gate_scores, slot_weights
from model.gated_delta import DeltaState
from model.lora import delta, rank_mask
from model.matmul import dense
from model.moe import expert_ffn, route
from model.rotary import rotate
from model.sharding import constrain

Project = Callable[[str, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Context:
    """What all layers of one call share.

    Attributes:
      cos, sin: of the positions, see `model.rotary`.
      positions: [B, T]; segment_ids: [B, T] or None, for calls without a cache.
      starts: bool [B, T], tokens before which a recurrent layer remembers nothing; None if no layer is recurrent.
      count: [B], the tokens of each row that a cached call brings; None without a cache.
      places: [B, T], where a cached call writes keys and values; None without a cache.
      routing: how the bank is used; scale [K] and rank of the bank, None and 0 without one.
    """

    config: Config
    mesh: Mesh | None
    cos: jax.Array
    sin: jax.Array
    positions: jax.Array
    segment_ids: jax.Array | None
    starts: jax.Array | None
    count: jax.Array | None
    places: jax.Array | None
    routing: Routing | None
    scale: jax.Array | None
    rank: int

    def norm(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, self.config.rms_norm_eps, centred=self.config.gated)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        return constrain(x, ("batch", None, *axes), self.mesh)


class Weights(NamedTuple):
    """One layer's arrays, names without `layers.`: parameters, the bank's factors, the gate, and expert ids [B, T, k] to be taken instead
    of the router's."""

    w: dict[str, jax.Array]
    a: dict[str, jax.Array]
    b: dict[str, jax.Array]
    gate: Gate | None
    experts: jax.Array | None


def decoder_layer(
    context: Context, kind: Kind, x: jax.Array, layer: Weights, entry: KeyValues | DeltaState | None
) -> tuple[jax.Array, KeyValues | DeltaState | None, dict[str, jax.Array]]:
    """x[B, T, D] -> x[B, T, D], the cache entry with this call's tokens if one was given, and what else the layer can tell.

    That is its inputs [B, T, D], with a gate the gate_logits [B, T, S] and slots int8 [B, T], and of a sparse layer the experts
    int32 [B, T, k].
    """
    routing, (w, a, b, gate, replay) = context.routing, layer
    x = context.constrain(x, None)
    h = inputs = context.norm(x, w["input_norm"])
    logits = None if gate is None else gate_scores(gate, h)
    chosen = None if routing is None else slot_weights(routing, logits)
    ranks = None
    if context.scale is not None:
        ranks = rank_mask(jnp.ones((1, 1, 2), jnp.float32) if chosen is None else chosen, context.scale, context.rank)

    def project(name: str, x: jax.Array) -> jax.Array:
        y = dense(x, w[name])
        if f"{name}_bias" in w:
            y += w[f"{name}_bias"]
        if name in a:
            y += delta(x, a[name], b[name], ranks)
        return y

    if kind.mixer == "full_attention":
        mixed, entry = _attention(context, project, w, h, entry)
    else:
        mixed, entry = gated_delta.mix(h, w, project, _delta_dims(context.config), context.starts, context.count, entry)
    x += mixed
    h = context.norm(x, w["post_norm"])
    extras = {"inputs": inputs}
    if logits is not None:
        extras |= {"gate_logits": logits, "slots": jnp.argmax(chosen, axis=-1).astype(jnp.int8)}
    if kind.sparse:
        mixed, extras["experts"] = _sparse(context, project, layer, h, ranks, replay)
        x += mixed
    else:
        x += project("down", jax.nn.silu(project("gate", h)) * project("up", h))
    return x, entry, extras


def _attention(
    context: Context, project: Project, w: dict[str, jax.Array], h: jax.Array, entry: KeyValues | None
) -> tuple[jax.Array, KeyValues | None]:
    config, lead = context.config, h.shape[:2]
    q = context.constrain(project("q", h).reshape(*lead, config.num_attention_heads, -1), "heads", None)
    k, v = (context.constrain(project(name, h).reshape(*lead, config.num_key_value_heads, -1), "kv_heads", None) for name in "kv")
    q, gate = jnp.split(q, 2, axis=-1) if config.gated else (q, None)
    q = rotate(context.norm(q, w["q_norm"]), context.cos, context.sin)
    k = rotate(context.norm(k, w["k_norm"]), context.cos, context.sin)
    if entry is None:
        mixed = attend(q, k, v, context.segment_ids, packed=config.packed, implementation=config.attention, mesh=context.mesh)
    else:
        entry = KeyValues(write(entry.k, context.places, k), write(entry.v, context.places, v))
        mixed = attend_cached(q, entry.k, entry.v, context.positions)
    if gate is not None:
        mixed *= jax.nn.sigmoid(gate)
    return project("o", mixed.reshape(*lead, -1)), entry


def _delta_dims(config: Config) -> gated_delta.DeltaDims:
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    return gated_delta.DeltaDims(*heads, config.linear_key_head_dim, config.linear_value_head_dim, config.rms_norm_eps)


def _sparse(
    context: Context, project: Project, layer: Weights, h: jax.Array, ranks: jax.Array | None, replay: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The experts' part, and the expert ids [B, T, k]. `replay` says which experts to take; their weights are the router's all the same."""
    config, w = context.config, layer.w
    experts, weights = route(h, w["router"], config.num_experts_per_tok, config.norm_topk_prob, replay)
    y = expert_ffn(h, experts, weights, w, (layer.a, layer.b), ranks, mesh=context.mesh, implementation=config.moe)
    if "shared_router" in w:
        shared = project("shared_down", jax.nn.silu(project("shared_gate", h)) * project("shared_up", h))
        y += jax.nn.sigmoid(dense(h, w["shared_router"])) * shared
    return y, experts


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, centred: bool = False) -> jax.Array:
    """x / rms(x) * weight over the last axis (arXiv 1910.07467), the mean in float32; `centred` weights are stored less one."""
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if centred:
        return (scaled * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * scaled.astype(x.dtype)
