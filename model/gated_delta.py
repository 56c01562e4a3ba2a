"""The gated delta net mixer of Qwen3.5 / 3.6: a short convolution and a linear attention whose state is a fixed [Dk, Dv] matrix per head.

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - k_t^T exp(g_t) S_{t-1}))^T        out_t = q_t^T S_t          (arXiv 2412.06464)

Training and prefill take chunks, in which the T steps become matrix products (the WY form, arXiv 2406.06484); decode takes the steps
themselves. A token that begins a segment sees neither the state nor the convolution's inputs from before it, so a packed row computes what
its parts would compute alone. The state is float32 and so are all products with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Chunks whose inner products are taken together. The backward pass keeps one state per block and recomputes the rest, so that at most
# one block's [C, C] matrices and states are alive: 8 chunks of 64 tokens keep accelerators busy at a few megabytes a head.
BLOCK = 8
CHUNK = 64  # tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaState:
    """What a layer remembers of each lane: conv[B, W - 1, C], the convolution's last inputs, and state float32 [B, Hv, Dk, Dv]."""

    conv: jax.Array
    state: jax.Array


class DeltaDims(NamedTuple):
    """Head counts and widths of one mixer; eps is that of its output norm."""

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    eps: float


def _einsum(spec: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _normalised(x: jax.Array, scale: float = 1.0) -> jax.Array:
    """x / |x| * scale over the last axis in float32; 1e-6 under the root, as in transformers."""
    x = x.astype(jnp.float32)
    return x * (jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) * scale)


def short_convolution(
    x: jax.Array, weight: jax.Array, starts: jax.Array, count: jax.Array | None = None, state: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Depthwise causal convolution and SiLU: x[B, T, C], weight[C, W], starts bool [B, T] -> (y[B, T, C], new window | None).

    With the window `state`[B, W - 1, C] of earlier inputs, the first count[B] tokens of each row (all without `count`) move it on. Inputs
    from before a segment's start are dropped from the new window too, for later calls cannot tell them apart.
    """
    (batch, length, channels), width = x.shape, weight.shape[1]
    window = jnp.zeros((batch, width - 1, channels), x.dtype) if state is None else state.astype(x.dtype)
    inputs = jnp.concatenate([window, x], axis=1)
    segment = jnp.pad(jnp.cumsum(starts, axis=1, dtype=jnp.int32), ((0, 0), (width - 1, 0)))
    taps = weight.astype(jnp.float32)
    y = jnp.zeros(x.shape, jnp.float32)
    for w in range(width):
        seen = segment[:, w : w + length] == segment[:, width - 1 :]
        y += jnp.where(seen[..., None], inputs[:, w : w + length].astype(jnp.float32), 0.0) * taps[:, w]
    if state is not None:
        count = jnp.full(batch, length, jnp.int32) if count is None else count
        kept = count[:, None] + jnp.arange(width - 1, dtype=count.dtype)
        segment = jnp.take_along_axis(segment, kept, axis=1)
        last = jnp.take_along_axis(inputs, kept[..., None], axis=1)
        state = jnp.where((segment == segment[:, -1:])[..., None], last, 0).astype(state.dtype)
    return jax.nn.silu(y).astype(x.dtype), state


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 of strictly lower triangular a[..., C, C], C a power of two, by halves: only products, which accelerators like.

    The product of all (I + (-a)^(2^i)) is the other way to do so. But those powers exceed float32's digits (entries of 1e14 at C = 64) when
    keys repeat, as they do on a run of equal tokens; the inverses of the halves stay small.
    """
    size, half = a.shape[-1], a.shape[-1] // 2
    if size <= 2:
        return jnp.eye(size, dtype=a.dtype) - a
    first, last = unit_lower_inverse(jnp.stack([a[..., :half, :half], a[..., half:, half:]]))
    between = -_einsum("...ij,...jk,...kl->...il", last, a[..., half:, :half], first)
    return jnp.block([[first, jnp.zeros_like(between)], [between, last]])


def _unit_lower_inverse_fwd(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _unit_lower_inverse_bwd(inverse: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    return (-jnp.tril(_einsum("...ji,...jk,...lk->...il", inverse, d, inverse), -1),)


unit_lower_inverse.defvjp(_unit_lower_inverse_fwd, _unit_lower_inverse_bwd)


def chunked_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    starts: jax.Array,
    state: jax.Array | None = None,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule by chunks: q, k [B, T, Hk, Dk], v[B, T, Hv, Dv], log_decay <= 0 and beta [B, T, Hv], starts bool [B, T].

    Returns out[B, T, Hv, Dv] in the dtype of `v` and the state float32 [B, Hv, Dk, Dv] after the last token. q and k are L2-normalised here
    and q scaled by Dk^-0.5; value head h reads key head h // (Hv / Hk). Nothing kept for the backward pass is quadratic in T.
    """
    batch, length, key_heads, key_width = k.shape
    value_heads, value_width = v.shape[2:]
    groups = value_heads // key_heads
    if chunk & (chunk - 1):
        raise ValueError(f"chunk is {chunk}, but the inverse of a chunk is built by halves: take a power of two, such as 32 or 64")
    chunk = min(chunk, 1 << (length - 1).bit_length())
    chunks = -(-length // chunk)
    blocks = -(-chunks // BLOCK)
    per_block = -(-chunks // blocks)
    padded = blocks * per_block * chunk

    def blocked(x: jax.Array, *heads: int) -> jax.Array:  # [B, T, H, ..] -> [blocks, n, B, *heads, chunk, ..]
        x = jnp.pad(x, ((0, 0), (0, padded - length)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(batch, blocks, per_block, chunk, *heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 0, 2), 3, 3 + len(heads))

    # what pads the last chunk has beta 0, decay 1 and no start: it leaves the state alone
    value_shape = (key_heads, groups)
    inputs = (blocked(q, key_heads), blocked(k, key_heads), *(blocked(x, *value_shape) for x in (v, log_decay, beta)), blocked(starts))
    if state is None:
        state = jnp.zeros((batch, value_heads, key_width, value_width), jnp.float32)
    state = state.astype(jnp.float32).reshape(batch, key_heads, groups, key_width, value_width)
    state, out = jax.lax.scan(jax.checkpoint(_block), state, inputs)
    out = jnp.moveaxis(jnp.moveaxis(out, -2, 3), 2, 0).reshape(batch, padded, value_heads, value_width)[:, :length]
    return out, state.reshape(batch, value_heads, key_width, value_width)


def _block(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """n chunks: q, k [n, B, K, C, Dk], v[n, B, K, G, C, Dv], log_decay, beta [n, B, K, G, C], starts[n, B, C]; state[B, K, G, Dk, Dv]."""
    q, k, v, log_decay, beta, starts = inputs
    dtype, size = v.dtype, starts.shape[-1]
    q, k = _normalised(q, q.shape[-1] ** -0.5), _normalised(k)
    v, log_decay, beta = (x.astype(jnp.float32) for x in (v, log_decay, beta))
    lower = jnp.tril(jnp.ones((size, size), bool))
    segment = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
    same = ((segment[..., :, None] == segment[..., None, :]) & lower)[:, :, None, None]
    entered = (segment == 0)[:, :, None, None]

    # decay[i, j] = exp(g_{j+1} + .. + g_i). Each sum is taken by itself: differences of running sums lose the digits of weak decays that
    # follow strong ones. All sums are <= 0, so that no exp overflows, and other segments are masked after it.
    strict = jnp.tril(lower, -1)
    sums = _einsum("ik,nbhgkj->nbhgij", lower.astype(jnp.float32), jnp.where(strict, log_decay[..., None], 0.0))
    decay = jnp.where(same, jnp.exp(sums), 0.0)
    from_entry = jnp.where(entered, jnp.exp(jnp.cumsum(log_decay, axis=-1)), 0.0)

    keys = _einsum("nbhid,nbhjd->nbhij", k, k)[:, :, :, None]
    inverse = unit_lower_inverse(jnp.where(strict, beta[..., None] * keys * decay, 0.0)) * beta[..., None, :]
    scores = _einsum("nbhid,nbhjd->nbhij", q, k)[:, :, :, None] * decay

    def step(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, inverse, scores, from_entry, to_exit = chunk
        written = _einsum("bhgij,bhgje->bhgie", inverse, v - from_entry[..., None] * _einsum("bhid,bhgde->bhgie", k, state))
        out = from_entry[..., None] * _einsum("bhid,bhgde->bhgie", q, state) + _einsum("bhgij,bhgje->bhgie", scores, written)
        state = from_entry[..., -1:, None] * state + _einsum("bhid,bhgie->bhgde", k, to_exit[..., None] * written)
        return state, out.astype(dtype)

    return jax.lax.scan(step, state, (q, k, v, inverse, scores, from_entry, decay[..., -1, :]))


def recurrent_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    starts: jax.Array,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`chunked_delta_rule` token by token: the form for decode, and the definition that the chunks are held to."""
    groups = v.shape[2] // k.shape[2]
    dtype = v.dtype
    q, k = (jnp.repeat(x, groups, axis=2) for x in (_normalised(q, q.shape[-1] ** -0.5), _normalised(k)))
    decay = jnp.where(starts[..., None], 0.0, jnp.exp(log_decay.astype(jnp.float32)))
    if state is None:
        state = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)

    def step(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, decay, beta = token
        state = state * decay[..., None, None]
        written = (v - _einsum("bhd,bhde->bhe", k, state)) * beta[..., None]
        state = state + k[..., :, None] * written[..., None, :]
        return state, _einsum("bhd,bhde->bhe", q, state).astype(dtype)

    tokens = (jnp.moveaxis(x.astype(jnp.float32), 1, 0) for x in (q, k, v, decay, beta))
    state, out = jax.lax.scan(step, state.astype(jnp.float32), tuple(tokens))
    return jnp.moveaxis(out, 0, 1), state


def mix(
    h: jax.Array,
    w: Mapping[str, jax.Array],
    project: Callable[[str, jax.Array], jax.Array],
    dims: DeltaDims,
    starts: jax.Array,
    count: jax.Array | None = None,
    state: DeltaState | None = None,
) -> tuple[jax.Array, DeltaState | None]:
    """The whole mixer: h[B, T, D], starts bool [B, T] -> (y[B, T, D], new state, None without one).

    `project(name, x)` gives the projections qkv, z, a, b and out; `w` holds conv[C, W], dt_bias[Hv], A_log[Hv] and delta_norm[Dv]. With a
    state, the first count[B] tokens of a row (all without `count`) are real and only they move the state on; a start among them resets it.
    """
    batch, length = h.shape[:2]
    if count is not None:
        real = jnp.arange(length) < count[:, None]
        starts = starts & real
    qkv, window = short_convolution(project("qkv", h), w["conv"], starts, count, state and state.conv)
    key_size = dims.key_heads * dims.key_width
    q, k, v = jnp.split(qkv, [key_size, 2 * key_size], axis=-1)
    q, k = (x.reshape(batch, length, dims.key_heads, dims.key_width) for x in (q, k))
    v = v.reshape(batch, length, dims.value_heads, dims.value_width)
    beta = jax.nn.sigmoid(project("b", h).astype(jnp.float32))
    step = jax.nn.softplus(project("a", h).astype(jnp.float32) + w["dt_bias"].astype(jnp.float32))
    log_decay = -jnp.exp(w["A_log"].astype(jnp.float32)) * step
    if count is not None:
        beta, log_decay = (jnp.where(real[..., None], x, 0.0) for x in (beta, log_decay))
    inputs = q, k, v, log_decay, beta, starts, state and state.state
    out, new = recurrent_delta_rule(*inputs) if state is not None and length == 1 else chunked_delta_rule(*inputs)
    out = gated_norm(out, project("z", h).reshape(v.shape), w["delta_norm"], dims.eps)
    y = project("out", out.reshape(batch, length, -1))
    return y, None if state is None else DeltaState(window, new)


def gated_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis times silu(gate), in float32 and back to the dtype of `x`; `weight` is the plain factor, not 1 + it."""
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (normal * weight.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)
