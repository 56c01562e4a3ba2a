"""The adapter bank: K LoRA adapters (arXiv 2106.09685) as one set of arrays, chosen by a mask.

`((x @ [A_1 .. A_K]) * mask) @ [B_1; ..; B_K]` serves training with one adapter, mixtures and one choice per token alike: no weights are
gathered per token, and K*R stays a small multiple of a matrix unit. Slot 0 of a routing decision is the base, slot k + 1 is adapter k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from model.config import Config
from model.matmul import dense
from model.sharding import partition


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterBank:
    """a: {projection: [n, K, in, R]}, b: {projection: [n, K, R, out]}, scale[K] = alpha / rank, which no gradient reaches.

    n counts the layers that have the projection; those of experts are [n, K, E, in, R] and [n, K, E, R, out].

    A step trains the factors: `jax.grad(lambda factors: loss(bank.replace_factors(factors)))(bank.factors)`.
    """

    a: dict[str, jax.Array]
    b: dict[str, jax.Array]
    scale: jax.Array

    @property
    def factors(self) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        return self.a, self.b

    def replace_factors(self, factors: tuple[dict[str, jax.Array], dict[str, jax.Array]]) -> AdapterBank:
        return AdapterBank(*factors, self.scale)

    @property
    def size(self) -> int:
        """K, the number of adapters."""
        return self.scale.shape[0]

    @property
    def rank(self) -> int:
        return next(iter(self.a.values())).shape[-1]


def bank_shapes(config: Config, k: int, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{projection: the shapes of its A and B} in a bank of `k` adapters."""
    shapes = {}
    for name, p in config.projections().items():
        lead = (config.count(p.part), k, *([p.experts] if p.experts else []))
        shapes[name] = (*lead, p.width, rank), (*lead, rank, p.out)
    return shapes


def init_bank(config: Config, k: int, rank: int, alpha: float, rng: jax.Array, dtype: jnp.dtype = jnp.float32) -> AdapterBank:
    """K adapters that do nothing yet: A normal with variance 1 / in, B zero."""
    shapes, a, b = bank_shapes(config, k, rank), {}, {}
    for key, (name, (shape_a, shape_b)) in zip(jax.random.split(rng, len(shapes)), shapes.items(), strict=True):
        a[name] = jax.random.normal(key, shape_a, dtype) * shape_a[-2] ** -0.5
        b[name] = jnp.zeros(shape_b, dtype)
    return AdapterBank(a, b, jnp.full((k,), alpha / rank, jnp.float32))


def stack_banks(banks: Sequence[AdapterBank]) -> AdapterBank:
    """One bank of all adapters in order; smaller ranks are padded with zeros, which changes no product."""
    rank = max(bank.rank for bank in banks)

    def pad(x: jax.Array, axis: int) -> jax.Array:
        return jnp.pad(x, [(0, rank - x.shape[axis] if i == x.ndim + axis else 0) for i in range(x.ndim)])

    names = banks[0].a
    if any(bank.a.keys() != names.keys() for bank in banks):
        raise ValueError(f"banks adapt different projections: {[sorted(bank.a) for bank in banks]}")
    return AdapterBank(
        {name: jnp.concatenate([pad(bank.a[name], -1) for bank in banks], axis=1) for name in names},
        {name: jnp.concatenate([pad(bank.b[name], -2) for bank in banks], axis=1) for name in names},
        jnp.concatenate([bank.scale for bank in banks]),
    )


def slice_bank(bank: AdapterBank, k: int) -> AdapterBank:
    """The bank of adapter `k` alone."""
    if not 0 <= k < bank.size:
        raise IndexError(f"adapter {k} of a bank of {bank.size}")
    a, b = ({name: x[:, k : k + 1] for name, x in factors.items()} for factors in bank.factors)
    return AdapterBank(a, b, bank.scale[k : k + 1])


def rank_mask(weights: jax.Array, bank_scale: jax.Array, rank: int) -> jax.Array:
    """Slot weights [..., S] -> [..., K * R]: what each rank dimension of the bank is multiplied by."""
    return jnp.repeat(weights[..., 1:] * jax.lax.stop_gradient(bank_scale), rank, axis=-1)


def delta(x: jax.Array, a: jax.Array, b: jax.Array, mask: jax.Array) -> jax.Array:
    """What the bank adds to one projection: x[B, T, in], a[K, in, R], b[K, R, out], mask[B | 1, T | 1, K * R] -> [B, T, out]."""
    k, width, rank = a.shape
    inner = dense(x, jnp.swapaxes(a, 0, 1).reshape(width, k * rank))
    return dense(inner * mask.astype(inner.dtype), b.reshape(k * rank, -1))


def bank_axes(config: Config) -> tuple[dict[str, tuple[str | None, ...]], dict[str, tuple[str | None, ...]]]:
    """What the axes of a bank's factors mean, see `model.sharding`; ranks and slots stay whole."""
    a, b = {}, {}
    for name, p in config.projections().items():
        lead = ("layers", None, *(["experts"] if p.experts else []))
        a[name], b[name] = (*lead, p.axes[0], None), (*lead, None, p.axes[1])
    return a, b


def bank_shardings(bank: AdapterBank, config: Config, mesh: Mesh) -> AdapterBank:
    """The sharding of each array of a bank, which may be shapes."""

    def half(arrays: dict[str, jax.Array], axes: dict[str, tuple[str | None, ...]]) -> dict[str, NamedSharding]:
        return {name: partition(x.shape, axes[name], mesh) for name, x in arrays.items()}

    return AdapterBank(*map(half, bank.factors, bank_axes(config)), partition(bank.scale.shape, (None,), mesh))


def count_adapter_parameters(config: Config, rank: int) -> int:
    """Parameters of one adapter on all projections, without making any."""
    return rank * sum(config.count(p.part) * (p.experts or 1) * (p.width + p.out) for p in config.projections().values())
