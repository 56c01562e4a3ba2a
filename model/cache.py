"""Keys and values of the tokens seen so far, one row a lane, written at each token's own position.

Rows are ragged: a call may bring few or no tokens for a row. An entry is visible to queries at or after its position, so a lane is
refilled by starting again at position 0; nothing needs clearing, provided that a row's tokens come at consecutive positions.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from model.config import Config


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """k, v: [L, B, T, K, Dh]."""

    k: jax.Array
    v: jax.Array


def init_cache(config: Config, batch: int, length: int, dtype: jnp.dtype = jnp.float32) -> KVCache:
    """An empty cache of `batch` lanes of `length` tokens."""
    shape = (config.num_hidden_layers, batch, length, config.num_key_value_heads, config.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: KVCache, layer: jax.Array | int, slots: jax.Array, k: jax.Array, v: jax.Array) -> KVCache:
    """Scatters k, v [B, t, K, Dh] of one layer to the positions slots[B, t]; a slot beyond the cache is dropped."""
    rows = jnp.arange(slots.shape[0])[:, None]
    where = (layer, rows, slots)
    return KVCache(
        cache.k.at[where].set(k.astype(cache.k.dtype), mode="drop"),
        cache.v.at[where].set(v.astype(cache.v.dtype), mode="drop"),
    )
