"""The products of `model.grouped` on a GPU: Pallas kernels (Triton) that compute a group's rows with its own matrix and nothing else.

XLA makes a ragged product dense there: every group's matrix on every row, 16 times the work for 16 experts on a device, and on rows that
hold nothing. Here the rows are cut into tiles; a tile that several groups share is done once for each of them, which writes its own rows. A
list of (tile, group), made from the groups' sizes, is the grid; what of it is not needed ends at once.

Shape letters: N rows, a multiple of the tile; G groups.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def grouped_product(rows: jax.Array, w: jax.Array, sizes: jax.Array, tile: int, *, transposed: bool, interpret: bool) -> jax.Array:
    """rows[N, in], sorted by group, times their group's w[G, in, out], or with `transposed` w[G, out, in] -> [N, out] in the dtype of rows.

    Sums in float32. Rows behind those of the last group are not written.
    """
    inner, out = rows.shape[1], w.shape[1 if transposed else 2]
    columns, step = _tile(out, 128), _tile(inner, 128 // rows.dtype.itemsize)
    items = _items(sizes, rows.shape[0] // tile, tile)
    body = functools.partial(_product_kernel, tile=tile, columns=columns, step=step, transposed=transposed)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct((rows.shape[0], out), rows.dtype),
        grid=(len(items[0]), pl.cdiv(out, columns)),  # the tiles of a group one after the other: its matrix stays in the cache
        compiler_params=_parameters(tile, columns),
        interpret=interpret,
        name="grouped_product",
    )(*items, rows, w)


def grouped_outer(x: jax.Array, dy: jax.Array, sizes: jax.Array, tile: int, *, interpret: bool) -> jax.Array:
    """x[N, in] and dy[N, out], sorted by group -> float32 [G, in, out], x^T dy over the rows of each."""
    inner, out = x.shape[1], dy.shape[1]
    lines, columns, step = _tile(inner, 128), _tile(out, 128), min(tile, 128 // x.dtype.itemsize)
    ends = jnp.cumsum(sizes)
    return pl.pallas_call(
        functools.partial(_outer_kernel, lines=lines, columns=columns, step=step),
        out_shape=jax.ShapeDtypeStruct((sizes.shape[0], inner, out), jnp.float32),
        grid=(pl.cdiv(inner, lines), pl.cdiv(out, columns), sizes.shape[0]),
        compiler_params=_parameters(lines, columns),
        interpret=interpret,
        name="grouped_outer",
    )(ends - sizes, ends, x, dy)


def _tile(size: int, most: int) -> int:
    """A power of two, since Triton knows no other, and at least the 16 of its products."""
    return max(16, min(most, 1 << (size - 1).bit_length()))


def _parameters(lines: int, columns: int) -> triton.CompilerParams:
    return triton.CompilerParams(num_warps=8 if lines * columns >= 128 * 128 else 4, num_stages=3)


def _items(sizes: jax.Array, tiles: int, tile: int) -> tuple[jax.Array, ...]:
    """(tile, group, start and end of the group's rows), each int32 [tiles + G - 1]; start = end where there is nothing to do."""
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // tile
    count = jnp.where(sizes > 0, (ends - 1) // tile + 1 - first, 0)
    last = jnp.cumsum(count)  # the items of a group end before this one
    item = jnp.arange(tiles + sizes.shape[0] - 1, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(item[:, None] >= last, axis=1, dtype=jnp.int32), sizes.shape[0] - 1)
    used = item < last[-1]
    where = jnp.where(used, first[group] + item - (last[group] - count[group]), 0)
    return where, group, jnp.where(used, starts[group], 0), jnp.where(used, ends[group], 0)


def _load(ref, *parts: jax.Array | tuple[jax.Array, int, int]) -> jax.Array:
    """A tile of `ref`; a part is an index, or (first, how many, where the axis ends). What is beyond the end is 0."""
    index = tuple(pl.ds(part[0], part[1]) if isinstance(part, tuple) else part for part in parts)
    return triton.load(ref.at[index], mask=_inside(*(part for part in parts if isinstance(part, tuple))), other=0)


def _inside(lines: tuple[jax.Array, int, int], columns: tuple[jax.Array, int, int]) -> jax.Array:
    line, column = (first + jnp.arange(count) < end for first, count, end in (lines, columns))
    return line[:, None] & column[None]


def _dot(x: jax.Array, y: jax.Array, i: int, j: int) -> jax.Array:
    return lax.dot_general(x, y, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


def _product_kernel(tile_ref, group_ref, start_ref, end_ref, x_ref, w_ref, y_ref, *, tile, columns, step, transposed):
    item = pl.program_id(0)
    group, start, end, first = group_ref[item], start_ref[item], end_ref[item], tile_ref[item] * tile
    inner, out = x_ref.shape[1], y_ref.shape[1]
    column = (pl.program_id(1) * columns, columns, out)

    @pl.when(end > start)
    def _():
        def add(k, total):
            depth = (k * step, step, inner)
            x = _load(x_ref, (first, tile, x_ref.shape[0]), depth)
            if transposed:
                return total + _dot(x, _load(w_ref, group, column, depth), 1, 1)
            return total + _dot(x, _load(w_ref, group, depth, column), 1, 0)

        y = lax.fori_loop(0, pl.cdiv(inner, step), add, jnp.zeros((tile, columns), jnp.float32))
        mine = _inside((first, tile, end), column) & (first + jnp.arange(tile) >= start)[:, None]
        triton.store(y_ref.at[pl.ds(first, tile), pl.ds(column[0], columns)], y.astype(y_ref.dtype), mask=mine)


def _outer_kernel(start_ref, end_ref, x_ref, dy_ref, y_ref, *, lines, columns, step):
    group = pl.program_id(2)
    start, end = start_ref[group], end_ref[group]
    line, column = (pl.program_id(0) * lines, lines, x_ref.shape[1]), (pl.program_id(1) * columns, columns, dy_ref.shape[1])

    def add(k, total):
        rows = (k * step, step, end)
        mine = (k * step + jnp.arange(step) >= start)[:, None]
        x, dy = (jnp.where(mine, _load(ref, rows, part), 0) for ref, part in ((x_ref, line), (dy_ref, column)))
        return total + _dot(x, dy, 0, 0)

    y = lax.fori_loop(start // step, pl.cdiv(end, step), add, jnp.zeros((lines, columns), jnp.float32))
    triton.store(y_ref.at[group, pl.ds(line[0], lines), pl.ds(column[0], columns)], y, mask=_inside(line, column))
