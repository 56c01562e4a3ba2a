"""Arguments for the schema of a tool: random ones, plausible ones made of what an agent has read, and odd ones that no schema allows.

Schemas are of the kinds that tools have: scalars, `enum`, arrays, objects within objects, `anyOf`, and `$ref` into the `$defs` of the
parameters. All functions depend on their arguments alone. A schema of an untrusted package goes through `check_schema` first, on which the
others rely for the types of keywords and the size of arguments.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from envs.sandbox.replies import refuse

VALUES = 24  # of one kind, that are tried
ODD_VALUES = (
    *(None, True, -1, 10**30, 1e300, [{"a": 1}], {"a": [None]}),
    *("", " \n\t", "x" * 10_000, "\u00fcn\u00ef\u202e\x00\ud800 \U0001f4a5", "../../etc/passwd"),
)
DEPTH = 6  # of schemas within schemas; some refer to themselves
PLACES = 20_000  # of arguments in which all that may stand does, up to that depth
ITEMS = 100  # that an array may have to have, and how many more it is given


class Seen(NamedTuple):
    """What may be an argument in the texts that an agent has read.

    Attributes:
      words: best first.
      named: what stood behind a name.
      worked: by argument, the values that a tool has accepted; then no others are tried.
    """

    words: list[str]
    named: dict[str, list[str]]
    worked: dict[str, list[Any]]


def read(text: str) -> Seen:
    """Words that look like ids, numbers or addresses first, latest first; and the values of `name: value`, as in JSON."""
    words = list(dict.fromkeys(word.strip(".,:;!?'\"()[]{}") for word in reversed(text.split())))
    words += re.findall(r'"([^"\n]{1,60})"', text)
    ids = [word for word in words if re.search(r"[\d_@#]", word)]
    named: dict[str, list[str]] = {}
    # from the beginning of a word alone: a long one without a value costs its length then, and not the square of it
    for name, quoted, bare in re.findall(r'"?(?<!\w)(\w+)"?\s*[:=]\s*(?:"([^"\n]{1,60})"|([\w.@#-]{1,60}))', text):
        named.setdefault(name, []).append(quoted or bare)
    return Seen(list(dict.fromkeys(word for word in ids + words if word))[:VALUES], named, {})


def plausible_arguments(function: dict, seen: Seen, rng: random.Random, most: int) -> list[dict[str, Any]]:
    """All combinations of plausible values for the required arguments, or `most` random ones; and some with the optional ones."""
    root = function["parameters"]
    required = root.get("required", [])
    choices = {key: plausible_values(inner, seen, rng, root, key) for key, inner in root.get("properties", {}).items()}
    needed = [choices[key] for key in required]
    size = 1
    for choice in needed:
        size *= len(choice)
    if size <= most:
        found = [dict(zip(required, combination, strict=True)) for combination in itertools.product(*needed)]
    else:
        found = [{key: rng.choice(choices[key]) for key in required} for _ in range(most)]
    if len(choices) > len(required):
        found += [{key: rng.choice(choice) for key, choice in choices.items() if choice} for _ in range(8)]
    return found


def plausible_values(schema: dict, seen: Seen, rng: random.Random, root: dict, name: str = "", depth: int = 0) -> list[Any]:
    """Values that fit a schema and stand in what was seen, those behind a name like that of the argument first."""
    schema = follow(schema, root)
    if name in seen.worked:
        return seen.worked[name]
    if "const" in schema:
        return [schema["const"]]
    if "enum" in schema:
        return list(schema["enum"])
    if depth > DEPTH:
        return []

    def inner(other: dict, key: str = name) -> list[Any]:
        return plausible_values(other, seen, rng, root, key, depth + 1)

    variants = schema.get("anyOf") or schema.get("oneOf") or _by_type(schema)
    if variants:
        return [value for variant in variants for value in inner(variant)][: 2 * VALUES]
    kind = schema.get("type")
    if kind == "boolean":
        return [True, False]
    if kind == "null":
        return [None]
    if kind == "array":
        items = inner(schema.get("items", {}), name.removesuffix("s"))
        return [[item] for item in items] + [items[:2], items[:5]] * (len(items) > 1) or [[]]
    if kind == "object" or "properties" in schema:
        parts = {key: inner(other, key) for key, other in schema.get("properties", {}).items()}
        parts = {key: part for key, part in parts.items() if part}
        return [
            {key: part[0] for key, part in parts.items()},
            *({key: rng.choice(part) for key, part in parts.items()} for _ in list(parts)[:5]),
        ]
    words = [value for key, values in seen.named.items() if _alike(key, name) for value in reversed(values)]
    words = list(dict.fromkeys(words[:VALUES] + seen.words))
    if kind in ("integer", "number"):
        numbers = [float(word) for word in words if re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", word)]
        return ([int(number) for number in numbers if number == int(number)] if kind == "integer" else numbers) or [0, 1]
    return words[:VALUES] or [""]


def sample_value(schema: dict, rng: random.Random, root: dict | None = None, depth: int = 0) -> Any:
    """A random value that fits a schema; optional properties appear half of the time."""
    root = schema if root is None else root
    schema = follow(schema, root)
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    variants = schema.get("anyOf") or schema.get("oneOf")
    if variants and depth < 2 * DEPTH:
        return sample_value(rng.choice(variants), rng, root, depth + 1)
    if kind == "object":
        required = schema.get("required", [])
        optional = 0.5 if depth < DEPTH else 0.0
        return {
            key: sample_value(inner, rng, root, depth + 1)
            for key, inner in schema.get("properties", {}).items()
            if (key in required and depth < 2 * DEPTH) or rng.random() < optional
        }
    if kind == "array":
        low = schema.get("minItems", 0)
        size = rng.randint(low, max(low, min(schema.get("maxItems", low + 3), low + ITEMS))) if depth < DEPTH else low
        return [sample_value(schema.get("items", {}), rng, root, depth + 1) for _ in range(size)]
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "null":
        return None
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", 0), schema.get("maximum", 1000)
        return rng.randint(int(low), int(max(low, high))) if kind == "integer" else rng.uniform(low, max(low, high))
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=rng.randint(1, 8)))


def fill(schema: dict, text: str, root: dict | None = None, depth: int = 0, number: int = 1) -> Any:
    """A value of the schema's shape with `text` wherever a string may stand, `number` for numbers, and the first choice elsewhere."""
    root = schema if root is None else root
    schema = follow(schema, root)
    variants = schema.get("anyOf") or schema.get("oneOf") or _by_type(schema)
    if variants and depth <= DEPTH:
        return fill(variants[0], text, root, depth + 1, number)
    kind = schema.get("type")
    if (kind == "object" or "properties" in schema) and depth <= DEPTH:
        return {key: fill(inner, text, root, depth + 1, number) for key, inner in schema.get("properties", {}).items()}
    if kind == "array" and depth <= DEPTH:
        return [fill(schema.get("items", {}), text, root, depth + 1, number)]
    return {"boolean": True, "integer": number, "number": number, "null": None}.get(kind, text)


def odd_arguments(function: dict) -> Iterable[dict[str, Any]]:
    """What a model may send by mistake: nothing, names that do not exist, values of other kinds, of other sizes."""
    properties = function["parameters"].get("properties", {})
    yield {}
    yield {"no_such_argument": 1}
    for value in ODD_VALUES:
        yield dict.fromkeys(properties, value)
    yield dict.fromkeys([*properties, ""], "%s{0}\\")


def check_schema(parameters: dict) -> None:
    """
    Raises:
      EnvironmentFault: kind `reply`. A keyword that is read here has a value that JSON Schema does not give it, or arguments would have too
        many places, as those of a schema that refers to itself from many properties.
    """
    places = [(parameters, 0)]
    for schema, depth in places:  # which grow meanwhile
        schema = follow(schema, parameters) if isinstance(schema, dict) else refuse("TOOLS", "must have objects as schemas", schema)
        for key, fits in _FITS.items():
            if key in schema and not fits(schema[key]):
                refuse("TOOLS", f"must have schemas with another {key}", schema[key])
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if depth <= 2 * DEPTH:
            inner = [part for key, part in properties.items() if depth <= DEPTH or key in required]
            inner += [*schema.get("anyOf", []), *schema.get("oneOf", []), *([schema["items"]] if "items" in schema else [])]
            places += [(part, depth + 1) for part in inner]
        if len(places) > PLACES:
            refuse("TOOLS", f"must have schemas of at most {PLACES} places, written out {DEPTH} deep", len(places))


_FITS = {
    "type": lambda x: isinstance(x, str) or (isinstance(x, list) and bool(x) and all(isinstance(kind, str) for kind in x)),
    "enum": lambda x: isinstance(x, list) and bool(x),
    "properties": lambda x: isinstance(x, dict),
    "required": lambda x: isinstance(x, list),
    **dict.fromkeys(("anyOf", "oneOf"), lambda x: isinstance(x, list)),
    "minItems": lambda x: type(x) is int and 0 <= x <= ITEMS,
    "maxItems": lambda x: type(x) is int and x >= 0,
    **dict.fromkeys(("minimum", "maximum"), lambda x: type(x) in (int, float) and abs(x) < 1e15),
}


def follow(schema: dict, root: dict) -> dict:
    """What a schema refers to within `root`, or it itself; empty where it refers to nothing."""
    for _ in range(DEPTH):
        place = schema.get("$ref")
        if not isinstance(place, str) or not place.startswith("#/"):
            break
        found: Any = root
        for key in place[2:].split("/"):
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            return {}
        schema = found
    return schema


def _by_type(schema: dict) -> list[dict]:
    """One schema for each of several types."""
    kinds = schema.get("type")
    return [{**schema, "type": kind} for kind in kinds] if isinstance(kinds, list) else []


def _alike(key: str, name: str) -> bool:
    """Whether a field of a result may be what an argument asks for: `order_id` of `order_id`, `item_id` of `new_item_id`."""
    return bool(name) and (key == name or name.endswith("_" + key) or key.endswith("_" + name))
