"""Positions, rotary embedding and causal attention within segments.

Segment ids are in the interface everywhere: 0 is padding, equal ids see each other, so a packed row computes what its parts would compute
alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """segment_ids[B, T] -> int32 positions[B, T]: the index of each token within its run of equal ids."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    previous = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts = jnp.where(segment_ids != previous, index, 0)
    return index - jax.lax.cummax(starts, axis=1)


def rotary(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """positions[B, T] -> float32 cos, sin [B, T, 1, head_dim / 2] (RoPE, arXiv 2104.09864)."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x[B, T, H, Dh] turned by the angles of its positions; Qwen pairs dimension i with i + Dh / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def causal_mask(segment_ids: jax.Array | None, length: int) -> jax.Array:
    """bool [B | 1, T, T]: query t sees key s iff s <= t and both have one segment id."""
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    return mask


def cache_mask(positions: jax.Array, length: int) -> jax.Array:
    """bool [B, t, length]: query at position p sees the cache entries of positions 0..p."""
    return jnp.arange(length, dtype=positions.dtype) <= positions[..., None]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention, q[B, T, H, Dh], k and v [B, S, K, Dh], mask[B | 1, T, S] -> [B, T, H, Dh]; float32 softmax.

    Keys and values are repeated to all query heads and laid out [B, H, ., Dh]: on a CPU the grouped products cost 2.5 times as much in
    the backward pass. Every query must see at least one key.
    """
    groups = q.shape[2] // k.shape[2]
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    if groups > 1:
        k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    scores = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    out = jnp.einsum("bhts,bhsd->bhtd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return jnp.swapaxes(out, 1, 2).astype(q.dtype)
