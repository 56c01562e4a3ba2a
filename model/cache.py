"""What a layer remembers of the tokens seen so far, one row a lane: keys and values, or a gated delta layer's state.

Rows are ragged: a call may bring few or no tokens for a row. A row's tokens come at consecutive positions. Keys and values stand at their
token's position and are visible to queries at or after it; a recurrent state stands where the row stands. A lane is refilled by starting
again at position 0; nothing needs clearing.

One array a layer and the heads outside, since a CPU copies a slice of a stacked array, or a transposed one, before every product: twice
the time of a decoding step.

Beside the lanes stands a pool of blocks of tokens, for contexts that several lanes share or that wait for one. Numbers are copied from
lanes to blocks and back, bit by bit what was computed.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from model.config import Config
from model.gated_delta import DeltaState
from model.sharding import partition


class KeyValues(NamedTuple):
    """Keys and values [B, K, T, Dh] of one attention layer."""

    k: jax.Array
    v: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """One entry a layer."""

    layers: tuple[KeyValues | DeltaState, ...]

    @property
    def length(self) -> int:
        """Tokens that a lane can hold."""
        return next(entry for entry in self.layers if isinstance(entry, KeyValues)).k.shape[2]

    @property
    def recurrent(self) -> bool:
        """Whether a lane can only go on from where it stands, since a recurrent state cannot be cut back."""
        return any(isinstance(entry, DeltaState) for entry in self.layers)

    def head(self, length: int) -> Cache:
        """The first `length` tokens of every lane."""
        return self._map(lambda x: x[:, :, :length], lambda x: x)

    def with_head(self, head: Cache) -> Cache:
        """This cache with its first tokens, and its states, taken from `head`."""
        return self._map(lambda x, y: x.at[:, :, : y.shape[2]].set(y), lambda x, y: y, head)

    def take(self, lanes: jax.Array, length: int) -> Cache:
        """The first `length` tokens of lanes[G]."""
        return self._map(lambda x: x[lanes, :, :length], lambda x: x[lanes])

    def put(self, lanes: jax.Array, positions: jax.Array, rows: Cache) -> Cache:
        """This cache with the entries at positions[G, C] of `rows` written to lanes[G], and their states.

        A lane, or a position, beyond the end is dropped.
        """
        inside = jnp.minimum(positions, rows.length - 1)
        where = lanes[:, None], slice(None), positions

        def entries(x, y):
            picked = jnp.take_along_axis(y, inside[:, None, :, None], axis=2)
            return x.at[where].set(jnp.swapaxes(picked, 1, 2), mode="drop")

        return self._map(entries, lambda x, y: x.at[lanes].set(y, mode="drop"), rows)

    def restore(self, pool: Pool, lanes: jax.Array, blocks: jax.Array, states: jax.Array) -> Cache:
        """This cache with blocks[G, M] of the pool in the first tokens of lanes[G], and states[G]; a lane beyond the end is dropped."""

        def entries(x, y):  # [G, M, block, K, Dh] -> [G, K, tokens, Dh]
            found = y[blocks].reshape(len(blocks), -1, *y.shape[2:])[:, : self.length]
            return x.at[lanes, :, : found.shape[1]].set(jnp.swapaxes(found, 1, 2), mode="drop")

        return self._map(entries, lambda x, y: x.at[lanes].set(y[states], mode="drop"), pool)

    def shardings(self, mesh: Mesh) -> Cache:
        """The sharding of every array, over lanes and heads."""
        return self._map(
            lambda x: partition(x.shape, ("batch", "kv_heads", None, None), mesh),
            lambda x: partition(x.shape, ("batch", "heads", None, None)[: x.ndim - 2] + (None, None), mesh),
        )

    def _map(self, entries, state, *others: Cache | Pool) -> Cache:
        return Cache(_map_layers(entries, state, self, *others))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """One entry a layer: KeyValues k and v [blocks, block, K, Dh], or a DeltaState of some rows."""

    layers: tuple[KeyValues | DeltaState, ...]

    def store(self, cache: Cache, lanes: jax.Array, places: jax.Array, blocks: jax.Array, standing: jax.Array, states: jax.Array) -> Pool:
        """This pool with the places[G]-th block of lanes[G] in blocks[G], and the states of lanes standing[H] in states[H].

        A block, or a state, beyond the end is dropped.
        """

        def entries(y, x):
            size = y.shape[1]
            positions = jnp.minimum(places[:, None] * size + jnp.arange(size), x.shape[2] - 1)
            return y.at[blocks].set(x[lanes[:, None], :, positions], mode="drop")

        return Pool(_map_layers(entries, lambda y, x: y.at[states].set(x[standing], mode="drop"), self, cache))

    def shardings(self, mesh: Mesh) -> Pool:
        """The sharding of every array: blocks split as the lanes are, heads as theirs."""
        return Pool(
            _map_layers(
                lambda y: partition(y.shape, ("batch", None, "kv_heads", None), mesh),
                lambda y: partition(y.shape, ("batch", "heads", None, None)[: y.ndim - 2] + (None, None), mesh),
                self,
            )
        )


def _map_layers(entries, state, *caches: Cache | Pool) -> tuple[KeyValues | DeltaState, ...]:
    """`entries` over keys and values, `state` over the recurrent states."""
    layers = zip(*(cache.layers for cache in caches), strict=True)
    return tuple(jax.tree.map(entries if isinstance(layer[0], KeyValues) else state, *layer) for layer in layers)


def init_cache(config: Config, batch: int, length: int, dtype: jnp.dtype = jnp.float32) -> Cache:
    """An empty cache of `batch` lanes of `length` tokens. Recurrent states are float32."""
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    return Cache(_empty_layers(config, shape, batch, dtype))


def init_pool(config: Config, blocks: int, block: int, states: int, dtype: jnp.dtype = jnp.float32) -> Pool:
    """An empty pool of `blocks` blocks of `block` tokens, and of `states` recurrent states."""
    return Pool(_empty_layers(config, (blocks, block, config.num_key_value_heads, config.head_dim), states, dtype))


def _empty_layers(config: Config, shape: tuple[int, ...], states: int, dtype: jnp.dtype) -> tuple[KeyValues | DeltaState, ...]:
    heads, width, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * width + heads * value

    def layer(mixer: str) -> KeyValues | DeltaState:
        if mixer == "full_attention":
            return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
        conv = jnp.zeros((states, config.linear_conv_kernel_dim - 1, channels), dtype)
        return DeltaState(conv, jnp.zeros((states, heads, width, value), jnp.float32))

    return tuple(layer(kind.mixer) for kind in config.kinds())


def write(entries: jax.Array, places: jax.Array, new: jax.Array) -> jax.Array:
    """Scatters new[B, t, K, Dh] to the positions places[B, t] of entries[B, K, T, Dh]; a place beyond T is dropped."""
    rows = jnp.arange(places.shape[0])[:, None]
    return entries.at[rows, :, places].set(new.astype(entries.dtype), mode="drop")
