"""Which slot a token takes: constant weights per row, or a linear gate per layer on the normalised layer input.

One decision per token and layer governs all projections of the layer. The gate reads its input behind a stop-gradient, so that
training the gate never bends the network towards being easy to route.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from model.config import Config

_NEVER = -1e30  # the bias of a slot that no token takes: finite, and beside any other logit its exponential is 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gate:
    """kernel[L, D, S], bias[L, S]; float32."""

    kernel: jax.Array
    bias: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """How tokens choose among S = K + 1 slots (slot 0 the base).

    weights[B, S]: constant per row, or None. gate: per token, or None. gated[B] bool: the rows that follow the gate, the others follow
    their weights; None: all rows follow the gate if there is one. mode: "top1" takes the best slot, "soft" mixes by the gate's softmax,
    "straight_through" takes the best slot forward and differentiates the softmax (arXiv 1308.3432).
    """

    weights: jax.Array | None = None
    gate: Gate | None = None
    gated: jax.Array | None = None
    mode: Literal["top1", "soft", "straight_through"] = dataclasses.field(default="top1", metadata={"static": True})

    def check(self, slots: int) -> None:
        """Raises `ValueError` if the fields do not fit together or a bank of `slots` - 1 adapters."""
        if self.mode not in ("top1", "soft", "straight_through"):
            raise ValueError(f"routing mode {self.mode!r} is not one of top1, soft, straight_through")
        if self.gate is None and self.weights is None:
            raise ValueError("routing has neither weights nor a gate")
        if self.gated is not None and (self.gate is None or self.weights is None):
            raise ValueError("routing.gated needs both a gate and weights")
        for name, array in (("weights", self.weights), ("gate.bias", self.gate and self.gate.bias)):
            if array is not None and array.shape[-1] != slots:
                raise ValueError(f"routing.{name} has {array.shape[-1]} slots, the bank has {slots} (base included)")


def init_gate(config: Config, slots: int, base_bias: float, rng: jax.Array) -> Gate:
    """A gate that starts out preferring the base slot by `base_bias` (published: 5.0); kernel normal with deviation 0.02."""
    layers, width = config.num_hidden_layers, config.hidden_size
    kernel = 0.02 * jax.random.normal(rng, (layers, width, slots), jnp.float32)
    return Gate(kernel, jnp.zeros((layers, slots), jnp.float32).at[:, 0].set(base_bias))


def constant_gate(config: Config, slots: int, slot: int) -> Gate:
    """A gate that always takes `slot`."""
    layers, width = config.num_hidden_layers, config.hidden_size
    return Gate(jnp.zeros((layers, width, slots), jnp.float32), jnp.zeros((layers, slots), jnp.float32).at[:, slot].set(1.0))


def grow(gate: Gate, slots: int) -> Gate:
    """The gate with `slots` more slots behind its own, which no token takes until `open_slots`.

    Every token goes where it went: the old columns are the old arrays, and a closed slot wins no comparison and adds 0 to the softmax.
    """
    kernel = jnp.pad(gate.kernel, ((0, 0), (0, 0), (0, slots)))
    return Gate(kernel, jnp.pad(gate.bias, ((0, 0), (0, slots)), constant_values=_NEVER))


def open_slots(gate: Gate, first: int, base_bias: float, rng: jax.Array) -> Gate:
    """The gate with its slots from `first` on as those of a fresh gate (`init_gate`): `base_bias` below the base's bias, kernel normal."""
    kernel = 0.02 * jax.random.normal(rng, gate.kernel.shape, jnp.float32)
    bias = jnp.broadcast_to(gate.bias[:, :1] - base_bias, gate.bias.shape)
    new = jnp.arange(gate.bias.shape[-1]) >= first
    return Gate(jnp.where(new, kernel, gate.kernel), jnp.where(new, bias, gate.bias))


def gate_scores(gate: Gate, hidden: jax.Array) -> jax.Array:
    """One layer's gate (kernel[D, S], bias[S]) on its normalised input hidden[B, T, D] -> float32 logits [B, T, S]."""
    hidden = jax.lax.stop_gradient(hidden).astype(jnp.float32)
    return jnp.matmul(hidden, gate.kernel, precision=jax.lax.Precision.HIGHEST) + gate.bias


def slot_weights(routing: Routing, logits: jax.Array | None) -> jax.Array:
    """The weights [B, T | 1, S] of one layer's slots, from its gate logits [B, T, S] or from the rows' own weights."""
    constant = None if routing.weights is None else routing.weights[:, None].astype(jnp.float32)
    if logits is None:
        return constant
    chosen = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    if routing.mode != "top1":
        soft = jax.nn.softmax(logits, axis=-1)
        chosen = soft if routing.mode == "soft" else chosen + (soft - jax.lax.stop_gradient(soft))
    return chosen if routing.gated is None else jnp.where(routing.gated[:, None, None], chosen, constant)


def count_gate_parameters(config: Config, slots: int) -> int:
    """Parameters of the gates of all layers, without making any."""
    return config.num_hidden_layers * (config.hidden_size + 1) * slots
