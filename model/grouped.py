"""Products of rows sorted by group, each group with its own matrix: what experts are made of.

One custom derivative stands in front of four ways to do the same thing:

- `gmm`, TPU: the megablox kernels. XLA's own ragged product is as good there, but its weight gradient is dense with older compilers.
- `triton`, GPU: kernels of our own (`model.grouped_triton`), since XLA's ragged product is dense there.
- `ragged`, others: `jax.lax.ragged_dot_general`.
- `padded`, CPU: where a ragged product costs as much as all groups on all rows. Each group is padded to whole blocks of a fixed number of
  rows, and a loop makes one library product for each block. Nothing is dropped however uneven the groups are; an empty group costs nothing,
  not even the reading of its matrix; on average half a block is wasted on a group. One batched product [groups, capacity, in] is no faster,
  and its capacity either drops rows or pays for the worst case.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Kind = Literal["gmm", "triton", "ragged", "padded"]
Matrices = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How rows are multiplied. `rows`: their number with padding at the end. `block`: what they are processed in multiples of."""

    kind: Kind
    rows: int
    block: int
    interpret: bool = False  # run the accelerators' kernels in Python


def plan(rows: int, groups: int, platform: str, kind: Kind | Literal["auto"] = "auto") -> Plan:
    """The plan for up to `rows` rows in `groups` groups. Raises ValueError for an unknown kind."""
    if kind == "auto":
        kind = {"cpu": "padded", "tpu": "gmm", "gpu": "triton"}.get(platform, "ragged")
    if kind == "ragged":
        return Plan(kind, rows, 1)
    if kind == "gmm":  # 128: a matrix unit's width; 512 keeps it busy and tiles in fast memory
        block = min(512, _round_up(rows, 128))
        return Plan(kind, _round_up(rows, block), block, interpret=platform == "cpu")
    if kind == "triton":  # about a mean group, of which more is computed for nothing the larger the tile
        block = 1 << max(16, min(128, rows // groups)).bit_length() - 1
        return Plan(kind, _round_up(rows, block), block, interpret=platform == "cpu")
    if kind == "padded":  # half a mean group, but no products too small (8) or uselessly large (128) for the library's kernel
        block = 1 << max(8, min(128, rows // (2 * groups))).bit_length() - 1
        return Plan(kind, rows + block, block)
    raise ValueError(f"implementation {kind!r} must be one of 'auto', 'gmm', 'triton', 'ragged', 'padded'")


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


# --- the product ---


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def products(rows: jax.Array, matrices: Matrices, sizes: jax.Array, plan: Plan) -> Matrices:
    """Rows sorted by group times each of their group's matrices.

    Args:
      rows: [plan.rows, in]; the first sizes[0] belong to group 0 and so on. Those left over at the end must be zeros, and give zeros.
      matrices: of shapes [groups, in, out_i]. Several that share their rows also share the way there and back.
      sizes: int32 [groups].

    Returns:
      [plan.rows, out_i] in the dtype of `rows`, accumulated in float32. The gradient of a frozen matrix costs nothing when compiled.
    """
    return _products(rows, matrices, sizes, plan)[0]


def _products(rows: jax.Array, matrices: Matrices, sizes: jax.Array, plan: Plan) -> tuple[Matrices, tuple[jax.Array, Matrices, jax.Array]]:
    cast = tuple(w.astype(rows.dtype) for w in matrices)
    if plan.kind == "padded":
        ys = _map_blocks(lambda x, w: tuple(_dot(x[0], w_i, 1, 0) for w_i in w), (rows,), cast, sizes, plan)
    else:
        ys = tuple(_ragged(rows, w, sizes, plan, transposed=False) for w in cast)
    return ys, (rows, matrices, sizes)


def _products_bwd(plan: Plan, residual: tuple[jax.Array, Matrices, jax.Array], dys: Matrices) -> tuple[jax.Array, Matrices, None]:
    rows, matrices, sizes = residual
    cast = tuple(w.astype(rows.dtype) for w in matrices)
    if plan.kind == "padded":

        def back(dy: Matrices, w: Matrices) -> Matrices:
            return (sum(_dot(dy_i, w_i, 1, 1) for dy_i, w_i in zip(dy, w, strict=True)),)

        (drows,) = _map_blocks(back, dys, cast, sizes, plan)
        outer = _outer_blocks
    else:
        drows = sum(_ragged(dy, w, sizes, plan, transposed=True).astype(jnp.float32) for dy, w in zip(dys, cast, strict=True))
        outer = _outer_ragged
    return drows.astype(rows.dtype), tuple(outer(rows, dy, sizes, plan).astype(w.dtype) for dy, w in zip(dys, matrices, strict=True)), None


products.defvjp(_products, _products_bwd)


def _dot(x: jax.Array, w: jax.Array, i: int, j: int) -> jax.Array:
    return lax.dot_general(x, w, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


# --- blocks in a loop ---


def _blocks(sizes: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The number of blocks, and for each its group, its first row and the end of its group; in the order of the rows."""
    ends = jnp.cumsum(sizes)
    last = jnp.cumsum(-(-sizes // plan.block))  # the blocks of a group end before this one
    block = jnp.arange(plan.rows // plan.block + sizes.shape[0])
    group = jnp.minimum(jnp.sum(block[:, None] >= last, axis=1), sizes.shape[0] - 1)
    start = ends[group] - sizes[group] + (block - last[group] + -(-sizes[group] // plan.block)) * plan.block
    return last[-1], group, start, ends[group]


def _map_blocks(f: Callable[[Matrices, Matrices], Matrices], rows: Matrices, matrices: Matrices, sizes: jax.Array, plan: Plan) -> Matrices:
    """f(a block of each of `rows`, its group's matrices) -> blocks, for all blocks.

    The padding of a group's last block is the beginning of the next group: what f makes of it is written over by that group's first block.
    """
    count, group, start, _ = _blocks(sizes, plan)

    def body(i: jax.Array, ys: Matrices) -> Matrices:
        block = tuple(lax.dynamic_slice_in_dim(x, start[i], plan.block) for x in rows)
        new = f(block, tuple(_pick(w, group[i]) for w in matrices))
        return tuple(lax.dynamic_update_slice_in_dim(y, n.astype(y.dtype), start[i], 0) for y, n in zip(ys, new, strict=True))

    shapes = jax.eval_shape(f, tuple(x[: plan.block] for x in rows), tuple(w[0] for w in matrices))
    return lax.fori_loop(0, count, body, tuple(jnp.zeros((plan.rows, s.shape[1]), rows[0].dtype) for s in shapes))


def _outer_blocks(x: jax.Array, dy: jax.Array, sizes: jax.Array, plan: Plan) -> jax.Array:
    """The sum over each group of x^T dy: [groups, in, out] float32."""
    # a CPU transposes the left operand by hand, so that one is the narrower
    narrow, wide, swap = (dy, x, True) if x.shape[1] > dy.shape[1] else (x, dy, False)
    count, group, start, end = _blocks(sizes, plan)

    def body(i: jax.Array, total: jax.Array) -> jax.Array:
        left, right = (lax.dynamic_slice_in_dim(z, start[i], plan.block) for z in (narrow, wide))
        left = jnp.where(jnp.arange(plan.block)[:, None] < end[i] - start[i], left, 0)
        return lax.dynamic_update_index_in_dim(total, _pick(total, group[i]) + _dot(left, right, 0, 0), group[i], 0)

    total = lax.fori_loop(0, count, body, jnp.zeros((sizes.shape[0], narrow.shape[1], wide.shape[1]), jnp.float32))
    return jnp.swapaxes(total, 1, 2) if swap else total


def _pick(w: jax.Array, group: jax.Array) -> jax.Array:
    """w[group], as bits if it is bfloat16: else a CPU that computes in float32 converts all groups ahead of the loop."""
    if w.dtype != jnp.bfloat16:
        return lax.dynamic_index_in_dim(w, group, keepdims=False)
    bits = lax.dynamic_index_in_dim(lax.bitcast_convert_type(w, jnp.uint16), group, keepdims=False)
    return lax.bitcast_convert_type(lax.optimization_barrier(bits), w.dtype)


# --- kernels of accelerators ---


def _ragged(rows: jax.Array, w: jax.Array, sizes: jax.Array, plan: Plan, transposed: bool) -> jax.Array:
    """rows times their group's w[groups, in, out], or with `transposed` its transpose."""
    if plan.kind == "gmm":
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm  # here: it loads the TPU's kernel language

        tiling = _tiling(plan, rows.shape[1], w.shape[1 if transposed else 2])
        y = gmm(rows, w, sizes, rows.dtype, tiling, transpose_rhs=transposed, interpret=plan.interpret)
    elif plan.kind == "triton":
        from model.grouped_triton import grouped_product

        y = grouped_product(rows, w, sizes, plan.block, transposed=transposed, interpret=plan.interpret)
    else:
        dims = lax.RaggedDotDimensionNumbers((((1,), (2 if transposed else 1,)), ((), ())), [0], [0])
        y = lax.ragged_dot_general(rows, w, sizes, dims, preferred_element_type=jnp.float32).astype(rows.dtype)
    return jnp.where(jnp.arange(plan.rows)[:, None] < jnp.sum(sizes), y, 0)  # kernels leave there what they found


def _outer_ragged(x: jax.Array, dy: jax.Array, sizes: jax.Array, plan: Plan) -> jax.Array:
    """The sum over each group of x^T dy: [groups, in, out] float32."""
    if plan.kind == "gmm":
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        return tgmm(x.T, dy, sizes, jnp.float32, _tiling(plan, x.shape[1], dy.shape[1]), interpret=plan.interpret)
    if plan.kind == "triton":
        from model.grouped_triton import grouped_outer

        return grouped_outer(x, dy, sizes, plan.block, interpret=plan.interpret)
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    return lax.ragged_dot_general(x, dy, sizes, dims, preferred_element_type=jnp.float32)


def _tiling(plan: Plan, inner: int, out: int) -> tuple[int, int, int]:
    return plan.block, min(inner, 1024), min(out, 1024)
