"""Causal attention within segments, in memory linear in the length, and attention of new tokens to a cache.

Segment ids are in the interface everywhere: equal ids see each other, so a packed row computes what its parts would compute alone. Padding
(id 0) is a segment like any other; what it computes is nobody's, but every query sees at least itself and no softmax is empty.

Implementations of one function, chosen by platform:

    xla     CPU and fallback: tiles of the lower triangle under two loops (FlashAttention-2, arXiv 2307.08691, in plain XLA)
    triton  GPU: the Pallas kernel that takes segment ids
    cudnn   GPU: cuDNN's flash attention, which takes lengths instead; for rows of one segment
    splash  TPU: the Pallas kernel, whose query heads share a key head without repeating it

Shape letters: B batch, T time, H query heads, K key-value heads, G = H / K, Dh head width, S cache entries, n tiles along T.
"""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from model.sharding import mesh_axes

IMPLEMENTATIONS = ("auto", "xla", "triton", "cudnn", "splash")
_MASKED = -1e30  # finite, so that a tile without a visible key makes no NaN; a later tile's maximum then wipes it out


def segment_starts(segment_ids: jax.Array) -> jax.Array:
    """segment_ids[B, T] -> bool [B, T]: the first token of each run of equal ids."""
    return jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def segment_positions(segment_ids: jax.Array) -> jax.Array:
    """segment_ids[B, T] -> int32 positions[B, T]: the index of each token within its run of equal ids."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(segment_starts(segment_ids), index, 0), axis=1)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    packed: bool = True,
    implementation: str = "auto",
    mesh: Mesh | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(Dh)) v for q[B, T, H, Dh], k and v [B, T, K, Dh] -> [B, T, H, Dh], the softmax in float32.

    Query t sees key s iff s <= t and segment_ids[B, T], if given, are equal at both. On a mesh each device attends for its own rows and
    heads, as far as `model.sharding` splits them.

    Args:
      packed: rows may hold several segments. If not, each is one segment from its start and then padding: its length says as much as its
        ids, and "auto" takes cuDNN where it can. What padding computes is zeros there.

    Raises:
      ValueError: an unknown implementation, or "cudnn" for packed rows with segments.
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    platform = device.platform
    if implementation == "auto":
        capability = getattr(device, "compute_capability", "")
        implementation = choose(platform, capability, q.dtype, q.shape[-1], packed and segment_ids is not None)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention {implementation!r} is unknown; choose one of {', '.join(IMPLEMENTATIONS)}")
    if implementation == "cudnn" and packed and segment_ids is not None:
        raise ValueError("attention 'cudnn' knows no segments; use 'triton', 'auto', or rows that are not packed")
    kernel = {
        "xla": _blockwise,
        "triton": functools.partial(_triton, interpret=platform == "cpu"),
        "cudnn": _cudnn,
        "splash": functools.partial(_splash, interpret=platform == "cpu"),
    }[implementation]
    if mesh is None or mesh.size == 1:
        return kernel(q, k, v, segment_ids)
    split = [axes or None for axes in mesh_axes(k.shape, ("batch", None, "kv_heads", None), mesh)]
    heads, rows = PartitionSpec(*split), PartitionSpec(*split[:2])
    # vma: the kernels' outputs do not say over which mesh axes they vary
    return jax.shard_map(kernel, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)(q, k, v, segment_ids)


def choose(platform: str, capability: str, dtype: jnp.dtype, width: int, segments: bool) -> str:
    """The implementation that "auto" takes.

    Args:
      capability: of an NVIDIA GPU, such as "9.0"; that of another maker's is no number.
      width: Dh.
      segments: rows hold several of them.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return "splash" if platform == "tpu" else "xla"
    generation = int(capability.partition(".")[0]) if re.fullmatch(r"\d+\.\d+", capability) else 0
    widest = 256 if generation >= 9 else 128 if generation == 8 else 0  # what `jax.nn.dot_product_attention` lets cuDNN do
    flash = dtype in (jnp.bfloat16, jnp.float16) and width % 8 == 0 and width <= widest
    return "cudnn" if flash and not segments else "triton"


def attend_cached(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """q[B, t, H, Dh] at positions[B, t] on a cache k, v [B, K, S, Dh] -> [B, t, H, Dh]: a query sees the entries 0 to its own position.

    Made for few queries and no backward pass. The G query heads of a key head are further rows of one product, so that no key is repeated
    or moved. Many queries go in blocks, none with more than about 2^25 scores (128 MiB in float32).
    """
    batch, time, heads, _ = q.shape
    entries = k.shape[2]
    size = max(8, 2**25 // (batch * heads * entries))
    if time <= size:
        return _attend_cached(q, k, v, positions)
    count = -(-time // size)
    blocks = [jnp.pad(x, ((0, 0), (0, count * size - time)) + ((0, 0),) * (x.ndim - 2)) for x in (q, positions)]
    blocks = [jnp.moveaxis(x.reshape(batch, count, size, *x.shape[2:]), 1, 0) for x in blocks]
    out = jax.lax.map(lambda block: _attend_cached(block[0], k, v, block[1]), tuple(blocks))
    return jnp.moveaxis(out, 0, 1).reshape(batch, -1, *q.shape[2:])[:, :time]


def _attend_cached(q, k, v, positions):
    rows = _by_key_head(q, k.shape[1])
    scores = _product(rows, k, 3, 3) * q.shape[-1] ** -0.5
    seen = jnp.arange(k.shape[2], dtype=positions.dtype) <= positions[..., None]
    weights = jax.nn.softmax(_where_seen(seen, scores), axis=-1)
    return _by_token(_product(weights.astype(v.dtype), v, 3, 2).astype(q.dtype), q.shape)


def _by_key_head(q: jax.Array, kv_heads: int) -> jax.Array:
    """[B, T, H, Dh] -> [B, K, T G, Dh]: the query heads of one key head lie beside each other, token by token."""
    batch, time, heads, width = q.shape
    return jnp.swapaxes(q.reshape(batch, time, kv_heads, -1, width), 1, 2).reshape(batch, kv_heads, -1, width)


def _by_token(rows: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_by_key_head`."""
    batch, time, heads, width = shape
    return jnp.swapaxes(rows.reshape(batch, rows.shape[1], time, -1, width), 1, 2).reshape(shape)


def _product(x: jax.Array, y: jax.Array, i: int, j: int) -> jax.Array:
    """The product over axis i of x[B, K, ., .] and axis j of y[B, K, ., .], accumulated in float32."""
    return jax.lax.dot_general(x, y, (((i,), (j,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)


def _where_seen(seen: jax.Array, scores: jax.Array) -> jax.Array:
    """scores[B, K, T G, S] where seen[B | 1, T, S]."""
    batch, heads, rows, keys = scores.shape
    by_token = scores.reshape(batch, heads, seen.shape[1], -1, keys)
    return jnp.where(seen[:, None, :, None], by_token, _MASKED).reshape(scores.shape)


# --- xla: tiles of the lower triangle


def _tile_size(instances: int, length: int) -> tuple[int, int]:
    """(tiles along the row, tokens in each) for `instances` = B H attentions.

    Measured on a CPU with 2 MiB of second-level cache per core: tiles of all instances together should take about 2 MiB, and the upper
    halves of the diagonal tiles, which are computed for nothing, at most an eighth of the whole.
    """
    size = max(64, min(256, length // 4, math.isqrt(2**19 // instances)))
    count = -(-length // size)
    return count, length if count == 1 else -(-length // count // 8) * 8


def _blockwise(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    batch, length, heads, _ = q.shape
    count, size = _tile_size(batch * heads, length)
    if segment_ids is None:
        segment_ids = jnp.zeros((1, length), jnp.int32)
    if extra := count * size - length:  # at the end, where no token sees it
        q, k, v, segment_ids = (jnp.pad(x, ((0, 0), (0, extra)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, segment_ids))
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    out = _causal(_by_key_head(q, k.shape[1]), k, v, segment_ids, size)
    return _by_token(out, q.shape)[:, :length]


def _at(x: jax.Array, index: jax.Array, size: int, axis: int = 2) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _join(tiles: jax.Array) -> jax.Array:
    """[n, B, K, rows, ...] -> [B, K, n rows, ...]."""
    tiles = jnp.moveaxis(tiles, 0, 2)
    return tiles.reshape(*tiles.shape[:2], -1, tiles.shape[-1])


def _scores(q: jax.Array, k: jax.Array, segment_ids: jax.Array, i: jax.Array, j: jax.Array) -> jax.Array:
    """q[B, K, size G, Dh] of tile i on k[B, K, size, Dh] of tile j -> [B, K, size G, size]."""
    size = k.shape[2]
    index = jnp.arange(size)
    seen = _at(segment_ids, i, size, 1)[:, :, None] == _at(segment_ids, j, size, 1)[:, None]
    seen &= (i * size + index)[:, None] >= j * size + index
    return _where_seen(seen, _product(q, k, 3, 3) * q.shape[-1] ** -0.5)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _causal(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, size: int) -> jax.Array:
    """q[B, K, T G, Dh], k and v [B, K, T, Dh], segment_ids[B | 1, T], T a multiple of size -> [B, K, T G, Dh].

    The backward pass computes the weights again, from the saved log-sum-exp.
    """
    return _causal_fwd(q, k, v, segment_ids, size)[0]


def _causal_fwd(q, k, v, segment_ids, size):
    rows = q.shape[2] // k.shape[2] * size

    def query_tile(_, i):
        q_i = _at(q, i, rows)

        def key_tile(j, carry):
            top, total, out = carry
            scores = _scores(q_i, _at(k, j, size), segment_ids, i, j)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
            weights, kept = jnp.exp(scores - new_top), jnp.exp(top - new_top)
            total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
            return new_top, total, out * kept + _product(weights.astype(v.dtype), _at(v, j, size), 3, 2)

        zero = jnp.zeros((*q_i.shape[:3], 1), jnp.float32)
        top, total, out = jax.lax.fori_loop(0, i + 1, key_tile, (zero + _MASKED, zero, jnp.zeros(q_i.shape, jnp.float32)))
        return None, ((out / total).astype(q.dtype), top + jnp.log(total))

    out, lse = (_join(x) for x in jax.lax.scan(query_tile, None, jnp.arange(k.shape[2] // size))[1])
    return out, (q, k, v, segment_ids, out, lse)


def _causal_bwd(size, residual, dout):
    q, k, v, segment_ids, out, lse = residual
    rows, scale = q.shape[2] // k.shape[2] * size, q.shape[-1] ** -0.5
    along = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)

    def query_tile(carry, i):
        q_i, dout_i, lse_i, along_i = (_at(x, i, rows) for x in (q, dout, lse, along))

        def key_tile(j, carry):
            dq_i, dk, dv = carry
            k_j, v_j = _at(k, j, size), _at(v, j, size)
            weights = jnp.exp(_scores(q_i, k_j, segment_ids, i, j) - lse_i)
            dscores = (weights * (_product(dout_i, v_j, 3, 3) - along_i) * scale).astype(q.dtype)
            weights, dscores = jax.lax.optimization_barrier((weights.astype(v.dtype), dscores))  # as in model.matmul

            def add(total, part):
                return jax.lax.dynamic_update_slice_in_dim(total, _at(total, j, size) + part, j * size, 2)

            return dq_i + _product(dscores, k_j, 3, 2), add(dk, _product(dscores, q_i, 2, 2)), add(dv, _product(weights, dout_i, 2, 2))

        dq_i, *carry = jax.lax.fori_loop(0, i + 1, key_tile, (jnp.zeros(q_i.shape, jnp.float32), *carry))
        return tuple(carry), dq_i.astype(q.dtype)

    zero = jnp.zeros(k.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(query_tile, (zero, zero), jnp.arange(k.shape[2] // size))
    return _join(dq), dk.astype(k.dtype), dv.astype(v.dtype), None


_causal.defvjp(_causal_fwd, _causal_bwd)


# --- kernels of accelerators; imported where they run, since Pallas takes half a second to import


def _padded(multiple: int, *arrays: jax.Array | None) -> list[jax.Array | None]:
    """The arrays [B, T, ...] with T filled up to a multiple; causality hides the end from every token."""
    return [x if x is None else jnp.pad(x, ((0, 0), (0, -x.shape[1] % multiple)) + ((0, 0),) * (x.ndim - 2)) for x in arrays]


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, implementation: str = "cudnn") -> jax.Array:
    """Rows of one segment; of another `implementation` of `jax.nn.dot_product_attention`, what the kernel is to give."""
    if segment_ids is None:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    real = (segment_ids > 0)[..., None, None]
    lengths = jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32)
    lengths = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    # nothing is known of what a kernel leaves beyond the lengths, in its result or in its gradients
    q, k, v = (jnp.where(real, x, 0) for x in (q, k, v))
    return jnp.where(real, jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation, **lengths), 0)


def _triton(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, *, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    length, width = q.shape[1], q.shape[-1]
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    q, k, v, segment_ids = _padded(128, q, k, v, segment_ids)
    row = width * q.dtype.itemsize
    # the largest tiles that compile within the shared memory of an A100 and the registers of a multiprocessor
    tile_q, tile_k, backward = (128, 64, 64) if row <= 256 else (128, 64, 32) if row <= 512 else (64, 32, 16)
    sizes = BlockSizes(tile_q, tile_k, *(backward,) * 4)
    return mha(q, k, v, segment_ids, width**-0.5, causal=True, block_sizes=sizes, interpret=interpret)[:, :length]


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, *, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    length, width = q.shape[1], q.shape[-1]
    multiple = 128 if length <= 512 else 512  # 128 lanes, and blocks of 512 for long rows
    q = q * width**-0.5  # the kernel does not scale
    q, k, v, segment_ids = _padded(multiple, q, k, v, segment_ids)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -width % 128))) for x in (q, k, v))
    q = jnp.moveaxis(q.reshape(*k.shape[:3], -1, q.shape[-1]), 1, 3)  # [B, K, G, T, Dh]
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    size = min(512, q.shape[3])
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    mask = splash.MultiHeadMask([splash.CausalMask((q.shape[3],) * 2)] * q.shape[2])
    kernel = splash.make_splash_mqa_single_device(
        mask, block_sizes=splash.BlockSizes(**{f"block_{name}": size for name in names}), interpret=interpret
    )
    segments = None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
    by_head = jax.vmap(kernel, in_axes=(0, 0, 0, None))
    out = jax.vmap(by_head)(q, k, v, segments)
    return jnp.moveaxis(out, 3, 1)[..., :width].reshape(out.shape[0], out.shape[3], -1, width)[:, :length]
