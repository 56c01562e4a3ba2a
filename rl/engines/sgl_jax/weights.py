"""A policy's adapters in the arrays of a running SGL-JAX model: as the factors of its static LoRA, or merged into its weights.

SGL-JAX keeps a linear weight [in, out] as we do, one module a layer, and the factors of its one static adapter as A [1, r, in] and
B [1, out, r]. A step reads the flat list `model_state_leaves`; what is written to the modules is seen when that list is made anew.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from model import Config
from model.config import Projection
from model.huggingface_names import MODULES, layers_with
from rl.engines.checks import check_policy
from rl.engines.protocol import EngineError, Policy

_EXPERTS = {"expert_gate": "mlp.wi_0", "expert_up": "mlp.wi_1", "expert_down": "mlp.wo"}


@dataclasses.dataclass(frozen=True, eq=False)
class Factors:
    """What a policy adds to the weights, a @ b, on the host in float32: {projection: a [n, in, R], b [n, R, out]}, of experts
    [n, E, in, R] and [n, E, R, out]. Scales and the weights of a mixture are in b."""

    a: dict[str, np.ndarray]
    b: dict[str, np.ndarray]


def fold(policy: Policy) -> Factors | None:
    """A policy's factors, copied from the device; None if it is the base. A constant mixture is one adapter of the ranks' sum.

    Raises:
      EngineError: a token gate, or weights that do not fit the bank.
    """
    bank, weights = policy.adapters, check_policy(policy)
    if policy.gate is not None:
        raise EngineError(
            f"policy {policy.name!r}: has a token gate, and SGL-JAX serves one set of weights for all tokens; sample it with the JAX engine"
        )
    if bank is None:
        return None
    factor = weights[1:] * np.asarray(bank.scale, np.float32)
    used = np.flatnonzero(factor)
    if not len(used):
        return None

    def join(arrays: dict[str, jax.Array], axis: int, scale: np.ndarray) -> dict[str, np.ndarray]:
        host = {name: np.asarray(x, np.float32) for name, x in arrays.items()}
        return {name: np.concatenate([x[:, k] * scale[k] for k in used], axis) for name, x in host.items()}

    return Factors(join(bank.a, -1, np.ones_like(factor)), join(bank.b, -2, factor))


class Weights:
    """The arrays of an engine's model that carry adapters.

    Args:
      runner: SGL-JAX's model runner. It must not run while `write` does.
      scaling: what its static LoRA multiplies an adapter with; None without static LoRA, to merge into the weights instead. Merging starts
        from copies of the weights as they are now, kept on the host, so that nothing of one version is left in the next.

    Raises:
      EngineError: the model is not laid out as `config` says, or does not take an adapter somewhere.
    """

    def __init__(self, runner: Any, config: Config, scaling: float | None):
        if config.model_type not in ("qwen3", "qwen3_moe"):
            raise EngineError(f"model_type {config.model_type!r}: how SGL-JAX lays out its weights is known for qwen3 and qwen3_moe alone")
        self._runner, self._config, self._scaling = runner, config, scaling
        self._modules = {
            name: [self._find(name, p, layer) for layer in layers_with(config, p.part)] for name, p in config.projections().items()
        }
        self._base = {}
        if scaling is None:
            self._base = {name: [np.asarray(weight.get_value()) for weight in places] for name, places in self._modules.items()}

    @property
    def rank(self) -> int | None:
        """The largest rank that fits; None if any does."""
        return None if self._scaling is None else self._modules["q"][0].A_buffer.shape[1]

    def check(self, factors: Factors | None) -> None:
        """Raises an EngineError for factors that cannot be written."""
        if factors is None:
            return
        if set(factors.a) != set(self._modules):
            raise EngineError(f"the adapters are of {sorted(factors.a)}, the model's projections are {sorted(self._modules)}")
        for name, p in self._config.projections().items():
            a, b = factors.a[name], factors.b[name]
            lead = (len(self._modules[name]), *([p.experts] if p.experts else []))
            if a.shape[:-1] != (*lead, p.width) or b.shape != (*lead, a.shape[-1], p.out):
                raise EngineError(f"the adapters' factors of {name} are {a.shape} and {b.shape}, which does not fit the model")
            if self.rank is not None and a.shape[-1] > self.rank:
                raise EngineError(
                    f"adapters of rank {a.shape[-1]} together do not fit the engine's {self.rank}; launch it with rank={a.shape[-1]}"
                )

    def write(self, factors: Factors | None) -> None:
        """Makes the model the base, changed by `factors`. Shapes, dtypes and shardings stay, so nothing compiles again."""
        self._runner.model_state_leaves = []  # holds the old arrays; each is to go as its successor comes
        try:
            for name, p in self._config.projections().items():
                for i, module in enumerate(self._modules[name]):
                    a, b = (None, None) if factors is None else (factors.a[name][i], self._replicate(name, p, factors.b[name][i], module))
                    if self._scaling is None:
                        _put_merged(module, self._base[name][i], a, b)
                    else:
                        _put_factors(module, a, b if b is None else b / self._scaling)
        finally:
            self._runner.model_state_leaves = jax.tree.leaves(nnx.split(self._runner.model)[1])

    def _find(self, name: str, p: Projection, layer: int) -> Any:
        """The module with the factors of a projection, or its weight where they are merged."""
        path = _EXPERTS.get(name) or MODULES[name]
        if name == "o" and self._config.model_type == "qwen3_moe":
            path = "self_attn.c_proj"
        where = f"model.layers.{layer}.{path}"
        place = self._runner.model.model.layers[layer]
        for part in path.split("."):
            place = getattr(place, part, None)
        if place is None:
            raise EngineError(f"SGL-JAX's model has no {where}; is the folder's model that of the configuration?")
        if self._scaling is not None:
            if not hasattr(place, "A_buffer"):
                raise EngineError(f"SGL-JAX puts no adapter on {where}; launch it without static LoRA, then weights are merged")
            shape = (place.B_buffer.shape[1], place.A_buffer.shape[2])[::-1]
        else:
            place = place if name in _EXPERTS else getattr(place, "base_layer", place).weight
            shape = place.shape
        wanted = (*([p.experts] if p.experts else []), p.width, p.out)
        replicas = shape[-1] // p.out if name in "kv" else 1
        if tuple(shape) != (*wanted[:-1], p.out * replicas):
            raise EngineError(f"SGL-JAX's {where} is {tuple(shape)}, the configuration says {wanted}")
        return place

    def _replicate(self, name: str, p: Projection, b: np.ndarray, module: Any) -> np.ndarray:
        """b [R, out] for each of the devices that share a key-value head: SGL-JAX then holds every head several times, side by side."""
        out = module.shape[-1] if self._scaling is None else module.B_buffer.shape[1]
        if out == p.out:
            return b
        heads = b.reshape(len(b), self._config.num_key_value_heads, -1)
        return np.repeat(heads, out // p.out, axis=1).reshape(len(b), out)


def _put_factors(module: Any, a: np.ndarray | None, b: np.ndarray | None) -> None:
    """Writes a [in, R], b [R, out], ranks beyond R zero."""
    for variable, x in ((module.A_buffer, None if a is None else a.T), (module.B_buffer, None if b is None else b.T)):
        old = variable.get_value()
        new = np.zeros(old.shape, np.float32)
        if x is not None:
            new[0, : x.shape[0], : x.shape[1]] = x
        variable.set_value(jax.device_put(new.astype(old.dtype), old.sharding))


def _put_merged(weight: Any, base: np.ndarray, a: np.ndarray | None, b: np.ndarray | None) -> None:
    sharding = weight.get_value().sharding
    new = jax.device_put(base, sharding)
    if a is not None:
        left, right = _factor_shardings(sharding, base.ndim)
        new = jax.device_put(_add(new, jax.device_put(a, left), jax.device_put(b, right)), sharding)
    weight.set_value(new)


@jax.jit
def _add(base: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return (base.astype(jnp.float32) + jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)).astype(base.dtype)


def _factor_shardings(sharding: Sharding, ndim: int) -> tuple[Sharding, Sharding]:
    """Those of a [.., in, R] and b [.., R, out] with which a @ b lies as the weight does, every device making its own part."""
    if not isinstance(sharding, NamedSharding):
        return sharding, sharding
    spec = (*sharding.spec, *[None] * (ndim - len(sharding.spec)))
    halves = ((*spec[:-1], None), (*spec[:-2], None, spec[-1]))
    return tuple(NamedSharding(sharding.mesh, PartitionSpec(*half)) for half in halves)
