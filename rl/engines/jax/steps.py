"""The device side of the engine: three jitted functions of fixed shapes, compiled once per kind of policy.

The cache holds every known token of a lane but the last, which is the next input. So `extend` needs no logits and `decode` no prefill.

Shape letters: N lanes of the cache, G rows of an extension, C tokens of a row, T context, S slots, W stop ids.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model import AdapterBank, Cache, CausalLM, Config, Gate, Routing
from rl.engines.jax.sampler import sample

RUNNING, STOP, LENGTH, CONTEXT = range(4)


class Slots(NamedTuple):
    """How the rows of a call are routed: weights [rows, S], None without adapters, and gated [rows], None without a gate."""

    weights: jax.Array | None
    gated: jax.Array | None

    def routing(self, gate: Gate | None) -> Routing | None:
        return None if self.weights is None else Routing(weights=self.weights, gate=gate, gated=self.gated)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Turn:
    """What is sampled in each lane.

    Attributes:
      token, position: [N] the last known token, which is not in the cache yet, and where it stands.
      running: bool [N].
      remaining: [N] tokens that may still be sampled.
      keys: uint32 [N, 2].
      temperature: float32 [N].
      stop: int32 [N, W], padded with -1.
    """

    token: jax.Array
    position: jax.Array
    running: jax.Array
    remaining: jax.Array
    keys: jax.Array
    temperature: jax.Array
    stop: jax.Array


class Sampled(NamedTuple):
    """tokens, logprobs [N, steps], of which each lane's first count[N] are there; finish[N], RUNNING for lanes that go on."""

    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    finish: jax.Array


@functools.partial(jax.jit, donate_argnames="cache")
def copy_lanes(cache: Cache, source: jax.Array, target: jax.Array) -> Cache:
    """Copies whole lanes, source[G] to target[G], all read before any is written; a target of N is dropped."""
    return cache.copy(source, target)


@functools.partial(jax.jit, static_argnames=("config", "mesh", "length"), donate_argnames="cache")
def extend(
    config: Config,
    mesh: Mesh | None,
    parameters: dict[str, jax.Array],
    cache: Cache,
    bank: AdapterBank | None,
    gate: Gate | None,
    slots: Slots,
    lanes: jax.Array,
    tokens: jax.Array,
    offset: jax.Array,
    count: jax.Array,
    *,
    length: int,
) -> Cache:
    """Writes the first count[G] of tokens[G, C] to lanes[G] from position offset[G] on; a lane of N is dropped.

    `length`: no position is this high; what lies beyond is not attended to.
    """
    model = CausalLM(config, mesh=mesh, parameters=parameters)
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    inside = steps < count[:, None]
    positions = offset[:, None] + steps
    routing, rows = slots.routing(gate), cache.take(lanes, length)
    rows = model.forward(tokens, positions, inside.astype(jnp.int32), bank, routing, rows).cache
    return cache.put(lanes, jnp.where(inside, positions, cache.length), rows)


@functools.partial(jax.jit, static_argnames=("config", "mesh", "steps", "length"), donate_argnames="cache")
def decode(
    config: Config,
    mesh: Mesh | None,
    parameters: dict[str, jax.Array],
    cache: Cache,
    bank: AdapterBank | None,
    gate: Gate | None,
    slots: Slots,
    turn: Turn,
    enough: jax.Array,
    *,
    steps: int,
    length: int,
) -> tuple[Cache, Sampled]:
    """Samples a token a step in every running lane, until `enough` lanes have finished or `steps` are done.

    `length`: no lane gets this far within the call, unless it is the context.
    """
    context = cache.length
    model = CausalLM(config, mesh=mesh, parameters=parameters)
    started = jnp.sum(turn.running)
    routing = slots.routing(gate)

    def going(carry):
        step, _, turn, out = carry
        running = jnp.sum(turn.running)
        return (step < steps) & (running > 0) & (started - running < enough)

    def body(carry):
        step, cache, turn, out = carry
        result = model.forward(turn.token[:, None], turn.position[:, None], turn.running[:, None].astype(jnp.int32), bank, routing, cache)
        place = turn.position + 1
        tokens, logprobs = sample(model.unembed(result.hidden[:, 0]), turn.keys, place, turn.temperature)
        left = turn.remaining - 1
        full = jnp.where(place + 1 >= context, CONTEXT, RUNNING)
        finish = jnp.where(jnp.any(turn.stop == tokens[:, None], axis=-1), STOP, jnp.where(left <= 0, LENGTH, full))
        running = turn.running & (finish == RUNNING)
        out = Sampled(
            jax.lax.dynamic_update_slice(out.tokens, tokens[:, None], (0, step)),
            jax.lax.dynamic_update_slice(out.logprobs, logprobs[:, None], (0, step)),
            out.count + turn.running,
            jnp.where(turn.running, finish, out.finish),
        )
        turn = dataclasses.replace(
            turn, token=tokens, position=jnp.where(turn.running, place, turn.position), running=running, remaining=left
        )
        return step + 1, result.cache, turn, out

    lanes = turn.token.shape[0]
    out = Sampled(
        jnp.zeros((lanes, steps), jnp.int32), jnp.zeros((lanes, steps)), jnp.zeros(lanes, jnp.int32), jnp.full(lanes, RUNNING, jnp.int32)
    )
    _, head, _, out = jax.lax.while_loop(going, body, (0, cache.head(length), turn, out))
    return cache.with_head(head), out


def count_compiles() -> int:
    """Programs compiled for these functions so far, in this process."""
    return sum(function._cache_size() for function in (copy_lanes, extend, decode))
