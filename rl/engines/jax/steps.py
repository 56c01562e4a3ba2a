"""The device side of the engine: four jitted functions of fixed shapes, compiled once per kind of policy.

The cache holds every known token of a lane but the last, which is the next input. So `extend` needs no logits and `decode` no prefill.
`store` and `restore` copy between lanes and the pool. Caches and pools are donated; on a mesh they keep their layout, whatever the compiler
would choose.

Shape letters: N lanes of the cache, G rows of a call, C tokens of a row, M blocks of a row, T context, S slots, W stop ids.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model import AdapterBank, Cache, CausalLM, Config, Gate, Pool, Routing
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
      top_k, top_p: int32 and float32 [N]; read only where a call limits the law.
    """

    token: jax.Array
    position: jax.Array
    running: jax.Array
    remaining: jax.Array
    keys: jax.Array
    temperature: jax.Array
    stop: jax.Array
    top_k: jax.Array
    top_p: jax.Array


class Sampled(NamedTuple):
    """tokens, logprobs [N, steps], of which each lane's first count[N] are there; finish[N], RUNNING for lanes that go on.

    experts: int16 [N, steps, L', k], what the input of each step took, where it was asked for.
    """

    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    finish: jax.Array
    experts: jax.Array | None


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="pool")
def store(
    mesh: Mesh | None,
    pool: Pool,
    cache: Cache,
    lanes: jax.Array,
    places: jax.Array,
    blocks: jax.Array,
    standing: jax.Array,
    states: jax.Array,
) -> Pool:
    """Copies the places[G]-th block of lanes[G] to blocks[G], and where lanes standing[H] stand to states[H]; see `Pool.store`."""
    return laid_out(pool.store(cache, lanes, places, blocks, standing, states), mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnames="cache")
def restore(mesh: Mesh | None, cache: Cache, pool: Pool, lanes: jax.Array, blocks: jax.Array, states: jax.Array) -> Cache:
    """Copies blocks[G, M] to the beginning of lanes[G], and states[G] to where they stand; see `Cache.restore`."""
    return laid_out(cache.restore(pool, lanes, blocks, states), mesh)


@functools.partial(jax.jit, static_argnames=("config", "mesh", "length", "experts"), donate_argnames="cache")
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
    experts: bool = False,
) -> tuple[Cache, jax.Array | None]:
    """Writes the first count[G] of tokens[G, C] to lanes[G] from position offset[G] on; a lane of N is dropped.

    Args:
      length: no position is this high; what lies beyond is not attended to.
      experts: whether the expert ids int16 [G, C, L', k] are returned.
    """
    model = CausalLM(config, mesh=mesh, parameters=parameters)
    steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    inside = steps < count[:, None]
    positions = offset[:, None] + steps
    routing, rows = slots.routing(gate), cache.take(lanes, length)
    out = model.forward(tokens, positions, inside.astype(jnp.int32), bank, routing, rows, collect=_collected(experts))
    cache = cache.put(lanes, jnp.where(inside, positions, cache.length), out.cache)
    return laid_out(cache, mesh), out.experts.astype(jnp.int16) if experts else None


@functools.partial(jax.jit, static_argnames=("config", "mesh", "steps", "length", "limited", "experts"), donate_argnames="cache")
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
    limited: bool = False,
    experts: bool = False,
) -> tuple[Cache, Sampled]:
    """Samples a token a step in every running lane, until `enough` lanes have finished or `steps` are done.

    Args:
      length: no lane gets this far within the call, unless it is the context.
      limited: whether the law has its top_k and top_p; a lane that has none gets the same bits either way.
      experts: whether expert ids are returned.
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
        token, position, valid = turn.token[:, None], turn.position[:, None], turn.running[:, None].astype(jnp.int32)
        result = model.forward(token, position, valid, bank, routing, cache, collect=_collected(experts))
        place = turn.position + 1
        limits = (turn.top_k, turn.top_p) if limited else ()
        tokens, logprobs = sample(model.unembed(result.hidden[:, 0]), turn.keys, place, turn.temperature, *limits)
        left = turn.remaining - 1
        full = jnp.where(place + 1 >= context, CONTEXT, RUNNING)
        finish = jnp.where(jnp.any(turn.stop == tokens[:, None], axis=-1), STOP, jnp.where(left <= 0, LENGTH, full))
        running = turn.running & (finish == RUNNING)
        out = Sampled(
            jax.lax.dynamic_update_slice(out.tokens, tokens[:, None], (0, step)),
            jax.lax.dynamic_update_slice(out.logprobs, logprobs[:, None], (0, step)),
            out.count + turn.running,
            jnp.where(turn.running, finish, out.finish),
            jax.lax.dynamic_update_slice_in_dim(out.experts, result.experts.astype(jnp.int16), step, 1) if experts else None,
        )
        turn = dataclasses.replace(
            turn, token=tokens, position=jnp.where(turn.running, place, turn.position), running=running, remaining=left
        )
        return step + 1, result.cache, turn, out

    lanes = turn.token.shape[0]
    chosen = jnp.zeros((lanes, steps, config.count("sparse"), config.num_experts_per_tok), jnp.int16) if experts else None
    none = jnp.zeros(lanes, jnp.int32)
    out = Sampled(jnp.zeros((lanes, steps), jnp.int32), jnp.zeros((lanes, steps)), none, none + RUNNING, chosen)
    _, head, _, out = jax.lax.while_loop(going, body, (0, cache.head(length), turn, out))
    return laid_out(cache.with_head(head), mesh), out


def cache_lengths(context: int, lengths: Sequence[int] | None = None) -> list[int]:
    """The given lengths and the context, in order; by default an eighth, a quarter and a half of a context of 1024 tokens or more.

    A call that decodes a part of the context works on a copy of it, which the whole context does not need.
    """
    if lengths is None:
        lengths = [context // 8, context // 4, context // 2] if context >= 1024 else []
    return sorted({min(length, context) for length in lengths} | {context})


def count_compiles() -> int:
    """Programs compiled for these functions so far, in this process."""
    return sum(function._cache_size() for function in (store, restore, extend, decode))


def _collected(experts: bool) -> tuple[str, ...]:
    return ("experts",) if experts else ()


def laid_out(held: Cache | Pool, mesh: Mesh | None) -> Cache | Pool:
    """`held` as every step gives it back, so that no later call finds another layout than the first and is compiled again."""
    return held if mesh is None else jax.lax.with_sharding_constraint(held, held.shardings(mesh))
