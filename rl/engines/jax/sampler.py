"""From logits to a token and its log-prob, with random bits that depend on the session and the position alone.

One uniform number a token and the inverse of the cumulative distribution sample the softmax exactly. The usual Gumbel trick needs a random
number for every entry of the vocabulary, which on a CPU costs more than a small model's whole layer stack.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def session_key(key: tuple[int, ...]) -> np.ndarray:
    """The raw threefry key, uint32 [2], of (run seed, task seed, rollout); integers of any size and sign."""
    return np.random.SeedSequence([part % 2**64 for part in key]).generate_state(2)


def sample(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """logits[B, V] float32, keys[B, 2] uint32, positions[B] of the tokens to sample, temperature[B] -> tokens[B] int32, logprobs[B].

    The log-prob is that of softmax(logits / temperature), with top_k[B] and top_p[B] that of what `likeliest` leaves of it, renormalised.
    Temperature 0 takes the first of the likeliest tokens, its log-prob is that of softmax(logits).
    """

    def uniform(key, position):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    greedy = temperature <= 0
    logits = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    top = jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(logits == top, ids, logits.shape[-1]), axis=-1)
    weights = jnp.exp(logits - top)
    if top_k is not None:
        kept = greedy[:, None] | likeliest(logits, top_k, top_p)
        weights = jnp.where(kept, weights, 0.0)
    cumulative = cumulate(weights)
    total = cumulative[:, -1]
    # below the total even after rounding, so that the count stays inside the vocabulary
    threshold = jnp.minimum(jax.vmap(uniform)(keys, positions) * total, total * (1 - 2**-23))
    drawn = jnp.sum(cumulative <= threshold[:, None], axis=-1, dtype=jnp.int32)
    if top_k is not None:  # rounding of the sums may point at a neighbour of weight 0
        drawn = jnp.where(jnp.take_along_axis(kept, drawn[:, None], axis=1)[:, 0], drawn, first)
    tokens = jnp.where(greedy, first, drawn)
    taken = jnp.sum(jnp.where(ids == tokens[:, None], logits - top, 0.0), axis=-1)
    return tokens, taken - jnp.log(jnp.sum(weights, axis=-1))


def likeliest(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """bool [B, V]: the top_k[B] largest of logits[B, V] (0: all), of these as many as it takes to reach top_p[B] of their probability.

    Among equals the first come first. At least one is left, and all at 0 and 1 whatever the rounding.
    """
    size = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ordered = jnp.take_along_axis(logits, order, axis=-1)
    some = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    weights = jnp.where(jnp.arange(size) < some[:, None], jnp.exp(ordered - ordered[:, :1]), 0.0)
    sums = jnp.cumsum(weights, axis=-1)
    reached = jnp.sum(sums < top_p[:, None] * sums[:, -1:], axis=-1) + 1
    count = jnp.where(top_p < 1, jnp.minimum(reached, some), some)
    # no scatter back to the vocabulary: all above the last one taken, and of its equals those up to it
    last = jnp.take_along_axis(order, count[:, None] - 1, axis=-1)
    bar = jnp.take_along_axis(logits, last, axis=-1)
    return (logits > bar) | ((logits == bar) & (jnp.arange(size) <= last))


def cumulate(x: jax.Array) -> jax.Array:
    """Cumulative sum over the last axis, blockwise: sums within blocks of about sqrt(V), then of the blocks, as small matrix products."""
    size = x.shape[-1]
    block = max(int(np.ceil(np.sqrt(size))), 1)
    blocks = jnp.pad(x, ((0, 0), (0, -size % block))).reshape(x.shape[0], -1, block)
    upper = jnp.triu(jnp.ones((block, block), x.dtype))
    within = jnp.einsum("bnk,kj->bnj", blocks, upper, precision=jax.lax.Precision.HIGHEST)
    before = jnp.pad(jnp.cumsum(within[:, :-1, -1], axis=-1), ((0, 0), (1, 0)))
    return (within + before[..., None]).reshape(x.shape[0], -1)[:, :size]
