"""The model's tool calls, read from its text into OpenAI's form.

Two forms, told apart by what follows the tag. Qwen3 writes JSON:

    <tool_call>
    {"name": "get_order", "arguments": {"order_id": "A1"}}
    </tool_call>

Qwen3-Coder and Qwen3.5 write tags, in which every value is bare text, so the tool's schema says what type it is:

    <tool_call>
    <function=get_order>
    <parameter=order_id>
    A1
    </parameter>
    </function>
    </tool_call>

The calls of a turn are read all or none. Whoever asks decides what one that cannot be read means: a rollout ends with an invalid action, a
server takes the whole turn for text. Arguments are always a JSON object, as strict as a client's parser may be: no NaN, no infinity, no
lone surrogate.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.base import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_END = re.compile(rf"\s*{CLOSE}")
_FUNCTION = re.compile(r"<function=([^>\n]+)>")
# up to the closing tag that another tag follows: a value may hold the text of a tag
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
_FUNCTION_END = re.compile(r"\s*</function>")


class Unreadable(ValueError):
    """A turn holds a call that cannot be read; the message says why."""


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls of a turn in order, and what it says around them: `before` the first as it stands, the rest joined by line ends."""

    calls: tuple[ToolCall, ...]
    before: str
    after: str


def parse_calls(text: str, tools: Sequence[Mapping[str, Any]]) -> Calls:
    """The calls in a text without thoughts.

    Args:
      tools: OpenAI schemas, for the types of what is written in tags.

    Raises:
      Unreadable: one of them cannot be read, or is cut.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls, said, place = [], [], 0
    while (start := text.find(OPEN, place)) >= 0:
        said.append(text[place:start])
        begin = _SPACE.match(text, start + len(OPEN)).end()
        call, end = _read_tags(text, begin, schemas) if text.startswith("<function=", begin) else _read_json(text, begin)
        if (closed := _END.match(text, end)) is None:
            raise Unreadable(f"the call of {call.name!r} is not followed by {CLOSE}")
        calls.append(call)
        place = closed.end()
    said.append(text[place:])
    if any(CLOSE in piece for piece in said):
        raise Unreadable(f"{CLOSE} without {OPEN}")
    return Calls(tuple(calls), said[0], "\n".join(piece.strip() for piece in said[1:] if piece.strip()))


def _refuse(constant: str):
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _read_json(text: str, begin: int) -> tuple[ToolCall, int]:
    """The call in JSON at `begin`, and where it ends."""
    try:
        found, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"a tool call is not JSON: {error}"[:200]) from None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise Unreadable("a tool call is not an object with a name")
    if not isinstance(found.get("arguments"), dict):
        raise Unreadable(f"the arguments of {found['name']!r} are not an object")
    return _call(found["name"], found["arguments"]), end


def _read_tags(text: str, begin: int, schemas: Mapping[str, Mapping[str, Any]]) -> tuple[ToolCall, int]:
    """The call in tags at `begin`, and where it ends."""
    if (head := _FUNCTION.match(text, begin)) is None:
        raise Unreadable("a tool call begins with <function=, which is not closed or names nothing")
    name, place, arguments = head[1].strip(), head.end(), {}
    schema = schemas.get(name, {})
    while found := _PARAMETER.match(text, place):
        key, value = found[1].strip(), found[2].removeprefix("\n").removesuffix("\n")
        properties = schema.get("properties")
        declared = properties.get(key) if isinstance(properties, dict) else None
        arguments[key] = read_value(value, json_types(declared, schema))
        place = found.end()
    if (end := _FUNCTION_END.match(text, place)) is None:
        raise Unreadable(f"the call of {name!r} is not parameters in tags up to </function>")
    return _call(name, arguments), end.end()


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    try:
        # infinite numbers and lone surrogates parse, but no worker, no shard and no client could hold them
        (name + json.dumps(arguments, ensure_ascii=False, allow_nan=False)).encode()
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the arguments of {name!r} are not JSON: {error}"[:200]) from None
    if not name:
        raise Unreadable("a tool call names no tool")
    return ToolCall(name, arguments)


def json_types(schema: Any, root: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> set[str]:
    """The JSON types that a schema admits, through `$ref` (within `root`), `anyOf`, `oneOf`, `allOf`, `enum`, `const`; empty: unknown."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    found = (
        {declared} if isinstance(declared, str) else {t for t in declared if isinstance(t, str)} if isinstance(declared, list) else set()
    )
    if found:
        return found
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in seen:
        found |= json_types(_resolve(reference, root), root, seen | {reference})
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name) if isinstance(schema.get(name), list) else ():
            found |= json_types(part, root, seen)
    values = [*(schema["enum"] if isinstance(schema.get("enum"), list) else ()), *([schema["const"]] if "const" in schema else ())]
    found |= {_type_of(value) for value in values}
    if not found and "properties" in schema:
        return {"object"}
    return {"array"} if not found and "items" in schema else found


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """What a JSON pointer of this document points to, None if nothing."""
    place: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place if reference.startswith("#/") else None


_NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _type_of(value: Any) -> str:
    return _NAMES[type(value)]


def read_value(text: str, types: set[str]) -> Any:
    """The value of a parameter in tags.

    Of several types the first that fits is taken, string last. A text that fits none stays a string: it is the tool that says what is
    wrong with it. Of an unknown type only objects and lists are read. Templates print Python's `True`, `False` and `None`.
    """
    word = text.strip()
    if "null" in types and word.lower() in ("null", "none"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    found = _type_of(value)
    if found == "integer" and "number" in types or found in types & {"integer", "number", "array", "object"}:
        return value
    if found == "number" and "integer" in types and value.is_integer():
        return int(value)
    return value if not types and found in ("array", "object") else text
