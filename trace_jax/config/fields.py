"""Typed fields of frozen dataclasses: declared with their help and range, read from text and from JSON, checked.

The machinery of `trace_jax.config`, which says what fields there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import types
import typing
from collections.abc import Iterator
from typing import Any

from trace_jax.errors import InputError


def field(default: Any, help: str, allowed: str | tuple = "", *, changes: bool = False):
    """A config field.

    Args:
      help: one sentence, shown by `trace-jax <command> --help`.
      allowed: an interval of numbers such as `"(0, 1]"` or `"[1, inf)"`, or a tuple of choices; for a tuple field, of its items.
      changes: a run may go on with another value, since what is already in the workdir stays right.
    """
    metadata = {"help": help, "allowed": allowed, "changes": changes}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


section = functools.partial(dataclasses.dataclass, frozen=True, kw_only=True)


def fields(config: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Each leaf as (dotted name, field, value), in the order of declaration."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if dataclasses.is_dataclass(spec.type):
            yield from fields(value, f"{prefix}{spec.name}.")
        else:
            yield prefix + spec.name, spec, value


def type_name(hint: Any) -> str:
    """`int`, `float or none`, `list of str`: how a type is called in help and errors."""
    if isinstance(hint, types.UnionType):
        return " or ".join("none" if part is types.NoneType else type_name(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return f"list of {type_name(typing.get_args(hint)[0])}"
    return {dict: "JSON object"}.get(typing.get_origin(hint), getattr(hint, "__name__", str(hint)))


def nearest(word: str, known: list[str]) -> str:
    """`", did you mean 'rank'?"`, or nothing when no known word is near."""
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {match[0]!r}?" if match else ""


def parse(name: str, text: str, hint: Any) -> Any:
    """The value of a field's text, by its annotation. Raises InputError with an example when it is of another type."""

    def wrong(example: str):
        raise InputError(f"--config.{name}={text}: expected {type_name(hint)}, such as {example}")

    if isinstance(hint, types.UnionType):
        if text.lower() == "none":
            return None
        return parse(name, text, next(part for part in typing.get_args(hint) if part is not types.NoneType))
    if typing.get_origin(hint) is tuple:
        return tuple(parse(name, part.strip(), typing.get_args(hint)[0]) for part in text.strip("()[],").split(",") if part.strip())
    if typing.get_origin(hint) is dict:
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = None
        return value if isinstance(value, dict) else wrong("'{\"knob\": 1}'")
    if hint is bool:
        value = {"true": True, "1": True, "false": False, "0": False}.get(text.lower())
        return wrong("true") if value is None else value
    if hint is str:
        return text
    try:
        return hint(text)
    except ValueError:
        wrong("3" if hint is int else "0.5")


def read(kind: type, data: Any, prefix: str = "") -> Any:
    """An instance of a section from JSON; fields left out keep their defaults. Raises InputError on an unknown key."""
    if not isinstance(data, dict):
        raise InputError(f"config key {prefix[:-1]!r}: expected a JSON object, found {data!r}")
    specs = {spec.name: spec for spec in dataclasses.fields(kind)}
    values = {}
    for key, value in data.items():
        if key not in specs:
            raise InputError(f"unknown config key {prefix + key!r}{nearest(key, list(specs))}")
        hint = specs[key].type
        if dataclasses.is_dataclass(hint):
            value = read(hint, value, f"{prefix}{key}.")
        # JSON has no tuples
        values[key] = tuple(value) if isinstance(value, list) and typing.get_origin(hint) is tuple else value
    return kind(**values)


def check(name: str, spec: dataclasses.Field, value: Any) -> None:
    """Raises InputError when a value is not of its field's type, choices or range."""
    hint, allowed = spec.type, spec.metadata["allowed"]
    if isinstance(hint, types.UnionType):
        if value is None:
            return
        hint = next(part for part in typing.get_args(hint) if part is not types.NoneType)
    items = value if typing.get_origin(hint) is tuple and isinstance(value, tuple) else (value,)
    kind = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else typing.get_origin(hint) or hint
    for item in items:
        # bool is an int to Python, not to a config; an int is a float to both
        if not isinstance(item, (int, float) if kind is float else kind) or (isinstance(item, bool) and kind is not bool):
            raise InputError(f"config field {name!r}: expected {type_name(spec.type)}, found {value!r}")
        if isinstance(allowed, tuple) and item not in allowed:
            raise InputError(f"config field {name!r}: {item!r} is not one of {', '.join(allowed)}{nearest(str(item), list(allowed))}")
        if isinstance(allowed, str) and allowed and not _inside(item, allowed):
            raise InputError(f"config field {name!r}: {item} is outside {allowed}")


def _inside(value: float, interval: str) -> bool:
    low, high = (float(part) for part in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return math.isfinite(value) and above and below
