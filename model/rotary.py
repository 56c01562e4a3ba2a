"""Rotary positions (RoPE, arXiv 2104.09864) with the long-context scalings that Qwen checkpoints name.

The angles equal transformers' `ROPE_INIT_FUNCTIONS` for `default`, `linear`, `yarn` (arXiv 2309.00071) and `llama3`. The other scalings
depend on the length of the input, so that a token's key would change while the text grows: they are refused by name.

Multimodal RoPE splits the frequencies between three position grids (time, height, width). A text token stands at one place in all three,
so the sections change nothing; they are checked and handed back on export.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.errors import ConfigError

_NEEDED = {"default": (), "linear": ("factor",), "yarn": (), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
_OPTIONAL = {
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("original_max_position_embeddings",),
}
_SHARED = ("mrope_section", "mrope_interleaved")


@dataclasses.dataclass(frozen=True)
class Rope:
    """The fields of a Hugging Face `rope_parameters`; None is not set. `partial` is the fraction of a head's width that turns.

    Raises `ConfigError` for a kind that is not computed, a field that the kind does not have or lacks, and a value out of range.
    """

    theta: float = 10_000.0
    kind: str = "default"
    partial: float = 1.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    mrope_section: tuple[int, ...] | None = None
    mrope_interleaved: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in _NEEDED:
            raise ConfigError(f"rope type {self.kind!r} is not supported; supported: {', '.join(_NEEDED)}")
        for name, value in self.fields().items():
            if name not in (*_NEEDED[self.kind], *_OPTIONAL.get(self.kind, ()), *_SHARED):
                raise ConfigError(f"rope type {self.kind!r} has no field {name!r}; remove it, or set rope_type to the type that has it")
            if name in ("truncate", "mrope_interleaved"):
                good = isinstance(value, bool)
            elif name == "mrope_section":
                good = isinstance(value, tuple) and len(value) == 3 and all(isinstance(n, int) and n >= 0 for n in value)
            else:
                good = _positive(value) and (name != "factor" or value >= 1)
            if not good:
                raise ConfigError(f"rope field {name}={value!r} is out of range")
        if missing := [name for name in _NEEDED[self.kind] if getattr(self, name) is None]:
            raise ConfigError(f"rope type {self.kind!r} needs {', '.join(missing)}")
        if not _positive(self.theta) or not _positive(self.partial) or self.partial > 1:
            raise ConfigError(f"rope_theta {self.theta!r} must be positive and partial_rotary_factor {self.partial!r} in (0, 1]")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(f"low_freq_factor {self.low_freq_factor} must be less than high_freq_factor {self.high_freq_factor}")

    def fields(self) -> dict[str, Any]:
        """What is set beside theta, kind and partial."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[3:]}
        return {name: value for name, value in values.items() if value is not None}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def parse_rope(raw: Mapping[str, Any], source: str = "config.json") -> Rope:
    """The `Rope` of a Hugging Face configuration: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (4).

    As in transformers, `rope_scaling` replaces `rope_parameters`, and what stands inside goes before what stands at the top. Raises
    `ConfigError`, naming `source`, for what `Rope` refuses and for unknown fields.
    """
    inner = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{source}: rope_parameters must be an object, got {inner!r}")
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in inner.items() if value is not None}
    old = given.pop("type", None)
    kind = given.pop("rope_type", old) or "default"
    theta, partial = (
        given.pop(name, raw.get(name) if raw.get(name) is not None else default)
        for name, default in (("rope_theta", Rope.theta), ("partial_rotary_factor", Rope.partial))
    )
    known = {field.name for field in dataclasses.fields(Rope)[3:]}
    if kind in _NEEDED and (unknown := sorted(set(given) - known)):
        raise ConfigError(f"{source}: rope_parameters has unknown fields {', '.join(unknown)}")
    try:
        return Rope(theta, kind, partial, **{name: value for name, value in given.items() if name in known})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def huggingface_rope(rope: Rope) -> dict[str, Any]:
    """The fields of a config.json that say `rope` to transformers 4 and 5; `parse_rope` is its inverse."""
    top = {"rope_theta": rope.theta, "partial_rotary_factor": rope.partial}
    kind = {"rope_type": rope.kind} | {name: list(x) if isinstance(x, tuple) else x for name, x in rope.fields().items()}
    return top | {"rope_scaling": kind if len(kind) > 1 else None, "rope_parameters": kind | top}


def inverse_frequencies(rope: Rope, head_dim: int, max_position: int) -> tuple[np.ndarray, float]:
    """float32 [ceil(rotary / 2)], radians per position, and the factor on cos and sin; rotary = int(head_dim * partial).

    `max_position` is the model's longest context, from which yarn and llama3 infer what is not set.
    """
    width = int(head_dim * rope.partial)
    index = np.arange(0, width, 2, dtype=np.float64)
    frequency, scale = rope.theta ** (-index / width), 1.0
    original = rope.original_max_position_embeddings or max_position
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "yarn":
        factor = rope.factor or max_position / original
        kept = 1 - _yarn_ramp(rope, width, original)
        frequency = frequency * (kept + (1 - kept) / factor)
        scale = _yarn_scale(rope, factor)
    elif rope.kind == "llama3":
        # turns within the original context: many are kept, few are slowed down by the factor, and between the two goes a ramp
        turns = original * frequency / (2 * math.pi)
        kept = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        frequency = frequency * (kept + (1 - kept) / rope.factor)
    return frequency.astype(np.float32), scale


def _yarn_ramp(rope: Rope, width: int, original: int) -> np.ndarray:
    """[ceil(width / 2)]: 0 where a dimension turns more than beta_fast times in the original context, 1 below beta_slow turns."""
    low, high = (
        width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast or 32, rope.beta_slow or 1)
    )
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    return np.clip((np.arange(-(-width // 2)) - low) / ((high - low) or 0.001), 0, 1)


def _yarn_scale(rope: Rope, factor: float) -> float:
    """The softmax temperature of yarn as a factor on cos and sin."""

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    return scale(rope.mscale) / scale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else scale(1.0)


def rotary(positions: jax.Array, rope: Rope, head_dim: int, max_position: int) -> tuple[jax.Array, jax.Array]:
    """positions[B, T] -> float32 cos, sin [B, T, 1, rotary / 2] for `rotate`."""
    frequency, scale = inverse_frequencies(rope, head_dim, max_position)
    angle = positions.astype(jnp.float32)[..., None, None] * frequency
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x[B, T, H, Dh] with its first `rotary` dimensions turned, computed in float32; Qwen pairs dimension i with i + rotary / 2."""
    half = cos.shape[-1]
    first, second = (x[..., i : i + half].astype(jnp.float32) for i in (0, half))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if x.shape[-1] == 2 * half else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
