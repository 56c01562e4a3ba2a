"""The sparse feed-forward part of Qwen3-MoE and Qwen3.5-MoE: a frozen router, and experts with adapters.

Tokens are sorted by expert, multiplied (see `model.grouped`) and brought back. Both ways are gathers, and so are their gradients: each is
the other's. Scatters are slow on CPUs and TPUs.

On a mesh a device holds a slice of the experts, and of each expert's width. Devices along `expert` share their tokens, compute what their
experts add to all of them, and sum it up into the slices they came with. This sends more than the two all-to-all exchanges of only the
tokens needed, but its sizes do not depend on the router, so no token is ever dropped.

Every token of the group could choose the experts of one device, so there is a row for each choice of each. On an accelerator long batches
go through in pieces, which bounds those rows; nothing but a piece's inputs is kept for the backward pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from model.grouped import Plan, plan, products
from model.sharding import mesh_axes

Arrays = dict[str, jax.Array]
Implementation = Literal["auto", "ragged", "padded", "gmm", "triton"]
NAMES = ("expert_gate", "expert_up", "expert_down")


# --- the router ---


def route(x: jax.Array, router: jax.Array, k: int, normalise: bool, experts: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The k most probable experts of each token, all in float32 whatever the dtypes.

    Args:
      x: [..., D]. Gradients reach it through the weights; the router itself is frozen.
      router: [D, E].
      normalise: the weights of a token sum to one (`norm_topk_prob`).
      experts: int32 [..., k] to take instead of the router's choice, which stays where they are negative; their weights are the router's
        all the same.

    Returns:
      Expert ids int32 [..., k], the first of equals first, and their weights float32 [..., k].
    """
    logits = jnp.dot(x.astype(jnp.float32), lax.stop_gradient(router).astype(jnp.float32), precision=lax.Precision.HIGHEST)
    probabilities = jax.nn.softmax(logits, axis=-1)
    own = lax.top_k(lax.stop_gradient(probabilities), k)[1]
    experts = own if experts is None else jnp.where(experts < 0, own, experts)
    chosen = experts[..., None] == jnp.arange(router.shape[1])  # a comparison's gradient is no scatter
    weights = jnp.sum(jnp.where(chosen, probabilities[..., None, :], 0), axis=-1)
    return experts, weights / jnp.sum(weights, axis=-1, keepdims=True) if normalise else weights


# --- the way of the rows ---


class Order(NamedTuple):
    """Which choice [N, k] of a token goes to which row, and back. An index one too large means nothing and gives zeros.

    sizes: int32 [E], the rows of each expert; token, choice: int32 [rows], whose row it is; row: int32 [N, k], where a choice went.
    """

    sizes: jax.Array
    token: jax.Array
    choice: jax.Array
    row: jax.Array


def sort_by_expert(experts: jax.Array, count: int, rows: int) -> Order:
    """The order of rows in which the choices [N, k] of experts 0 .. count - 1 are sorted, with all others left out."""
    n, k = experts.shape
    flat = jnp.where((experts >= 0) & (experts < count), experts, count).reshape(-1)
    choice = jnp.argsort(flat, stable=True)
    row = jnp.argsort(choice)
    sizes = jnp.sum(flat[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    choice = jnp.pad(choice, (0, rows - n * k))
    choice = jnp.where(jnp.arange(rows) < jnp.sum(sizes), choice, n * k)
    return Order(sizes, choice // k, choice, jnp.where(flat < count, row, rows).reshape(n, k))


@jax.custom_vjp
def _take(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """x[N, D] -> [rows, D], row r being x[source[r]]; target[N, j] is where x went."""
    return x.at[source].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _give(rows: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """The transpose of `_take`, rows[rows, D] -> [N, D]: the sum of where each went, in float32."""
    return jnp.sum(rows.at[target].get(mode="fill", fill_value=0), axis=1, dtype=jnp.float32).astype(rows.dtype)


_take.defvjp(lambda x, *way: (_take(x, *way), way), lambda way, d: (_give(d, *way), None, None))
_give.defvjp(lambda x, *way: (_give(x, *way), way), lambda way, d: (_take(d, *way), None, None))


# --- the experts ---


def expert_ffn(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    w: Arrays,
    factors: tuple[Arrays, Arrays] | None = None,
    ranks: jax.Array | None = None,
    *,
    mesh: Mesh | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """sum_k weights_k down(silu(gate(x)) * up(x)) of the chosen experts, each with the bank's delta.

    The delta is `((x @ [A_1 .. A_K]) * ranks) @ [B_1; ..; B_K]` of the expert, as in `model.lora`: sorting by (expert, adapter) would gain
    nothing, for K*R is about as wide as a matrix unit.

    Args:
      x: [B, T, D].
      experts, weights: [B, T, k], see `route`.
      w: expert_gate and expert_up [E, D, F], expert_down [E, F, D]; other names are not looked at.
      factors: a[name] [K, E, in, R] and b[name] [K, E, R, out]; any of the three names may be absent, others are not looked at.
      ranks: [B | 1, T | 1, K * R], see `model.lora.rank_mask`; needed if there are factors.
      mesh: axes as in `model.sharding`; an axis that does not divide the batch, E or F leaves it whole.
      implementation: see `model.grouped`.

    Returns:
      [B, T, D] in the dtype of x, sharded over the batch like x.
    """
    a, b = ({name: f[name] for name in NAMES if name in f} for f in factors or ({}, {}))
    if a and ranks is None:
        raise ValueError(f"expert_ffn: factors of {sorted(a)} need ranks, the mask of the bank's inner dimension")
    operands = {"x": x, "experts": experts, "weights": weights, "w": {name: w[name] for name in NAMES}, "a": a, "b": b}
    if a:
        operands["ranks"] = ranks
    if mesh is None:
        platform = jax.default_backend()
        return _in_pieces(lambda own: _local_ffn(own, platform, implementation), operands, 1, platform)
    return _sharded_ffn(operands, mesh, implementation)


def _in_pieces(ffn: Callable[[dict], jax.Array], operands: dict, sharing: int, platform: str) -> jax.Array:
    """`ffn(operands)`, piece by piece of the time axis where that makes too many rows.

    Args:
      sharing: devices that bring as many tokens each.
    """
    batch, time, k = operands["experts"].shape
    pieces = 1
    while sharing * batch * time * k > pieces * _most_rows(platform) and time % (2 * pieces) == 0:
        pieces *= 2
    if pieces == 1:
        return ffn(operands)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], pieces, -1, *x.shape[2:]), 1, 0)

    moving = {
        name: split(operands[name]) for name in ("x", "experts", "weights", "ranks") if name in operands and operands[name].shape[1] > 1
    }
    step = jax.checkpoint(lambda piece: ffn(operands | piece), prevent_cse=False)
    _, y = lax.scan(lambda _, piece: (None, step(piece)), None, moving)
    return jnp.moveaxis(y, 0, 1).reshape(operands["x"].shape)


def _most_rows(platform: str) -> float:
    """Of one piece. 2^17 are 1024 for each of 128 experts, which keeps their products busy; a CPU has its blocks."""
    return math.inf if platform == "cpu" else 2**17


def _sharded_ffn(operands: dict, mesh: Mesh, implementation: Implementation) -> jax.Array:
    x, w = operands["x"], operands["w"]
    groups, _, width = w["expert_gate"].shape
    batch, expert, tensor = (mesh_axes((n,), (axis,), mesh)[0] for n, axis in ((x.shape[0], "batch"), (groups, "experts"), (width, "mlp")))
    tokens, e, f = PartitionSpec(batch or None), expert or None, tensor or None
    columns, lines = PartitionSpec(e, None, f), PartitionSpec(e, f, None)  # of gate and up, and of down
    spec = {
        "x": tokens,
        "experts": tokens,
        "weights": tokens,
        "w": {"expert_gate": columns, "expert_up": columns, "expert_down": lines},
        "a": {name: PartitionSpec(None, e, f if name == "expert_down" else None, None) for name in operands["a"]},
        "b": {name: PartitionSpec(None, e, None, None if name == "expert_down" else f) for name in operands["b"]},
    }
    if "ranks" in operands:
        spec["ranks"] = tokens if operands["ranks"].shape[0] == x.shape[0] else PartitionSpec()
    exchange = bool(expert) and expert[0] in batch  # devices with other experts have other tokens too

    platform = mesh.devices.flat[0].platform

    def ffn(own: dict) -> jax.Array:
        own = dict(own)
        if exchange:
            own |= {name: lax.all_gather(own[name], expert, axis=0, tiled=True) for name in own if spec[name] is tokens}
        if expert:
            own["experts"] -= lax.axis_index(expert) * own["w"]["expert_gate"].shape[0]
        y = _local_ffn(own, platform, implementation)
        if exchange:
            y = lax.psum_scatter(y, expert, scatter_dimension=0, tiled=True)
        elif expert:
            y = _sum(y, expert)
        return _sum(y, tensor) if tensor else y

    def body(own: dict) -> jax.Array:
        return _in_pieces(ffn, own, mesh.shape[expert[0]] if exchange else 1, platform)

    # check_vma off: the TPU's kernels do not declare over which axes their results vary
    return jax.shard_map(body, mesh=mesh, in_specs=(spec,), out_specs=tokens, check_vma=False)(operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum(x: jax.Array, axis: tuple[str, ...]) -> jax.Array:
    """psum of a result that the devices of `axis` share. Their cotangents are equal, so the sum of those needs no messages."""
    return lax.psum(x, axis)


_sum.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, d: (d * lax.axis_size(axis),))


def _local_ffn(operands: dict, platform: str, implementation: Implementation) -> jax.Array:
    """`expert_ffn` on one device; ids of experts that it does not have go nowhere."""
    x, experts, w, a, b = (operands[name] for name in ("x", "experts", "w", "a", "b"))
    shape, (groups, k) = x.shape, (w["expert_gate"].shape[0], experts.shape[-1])
    x, experts = x.reshape(-1, shape[-1]), experts.reshape(-1, k)
    how = plan(experts.size, groups, platform, implementation)
    order = sort_by_expert(experts, groups, how.rows)

    def rows_of_tokens(values: jax.Array) -> jax.Array:
        return _take(values, order.token, order.row)

    ranks = operands.get("ranks")
    if ranks is not None:
        ranks = ranks.astype(x.dtype)
        whole = jnp.broadcast_to(ranks, (*shape[:2], ranks.shape[-1])).reshape(-1, ranks.shape[-1])
        ranks = ranks[0] if ranks.shape[:2] == (1, 1) else rows_of_tokens(whole)
    project = functools.partial(_project, w=w, a=a, b=b, ranks=ranks, sizes=order.sizes, how=how)
    gate, up = project(("expert_gate", "expert_up"), rows_of_tokens(x))
    (y,) = project(("expert_down",), jax.nn.silu(gate) * up)
    share = _take(operands["weights"].reshape(-1, 1), order.choice, order.row.reshape(-1, 1))
    return _give((y * share).astype(x.dtype), order.token, order.row).reshape(shape)


def _project(
    names: tuple[str, ...], rows: jax.Array, w: Arrays, a: Arrays, b: Arrays, ranks: jax.Array | None, sizes: jax.Array, how: Plan
) -> list[jax.Array]:
    """The adapted projections `names` of the same rows[rows, in], sorted by expert."""
    adapted = [name for name in names if name in a]
    down = [jnp.moveaxis(a[name], 0, 2).reshape(*a[name].shape[1:3], -1) for name in adapted]  # [E, in, K * R]
    up = [jnp.moveaxis(b[name], 0, 1).reshape(b[name].shape[1], -1, b[name].shape[3]) for name in adapted]  # [E, K * R, out]
    ys = products(rows, (*(w[name] for name in names), *down), sizes, how)
    inner = ys[len(names) :]
    deltas = {name: products(h * ranks, (m,), sizes, how)[0] for name, h, m in zip(adapted, inner, up, strict=True)}
    return [y + deltas[name] if name in deltas else y for name, y in zip(names, ys, strict=False)]
