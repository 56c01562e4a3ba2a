"""The JSON value in an answer's text, and what is wrong with it, in sentences that its author can act on.

Models write JSON bare, in a fence, or with prose around it; all three are read. Nothing is guessed: two values, a value that is cut off, a
number that JSON does not have, or a key that occurs twice are faults.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trace_jax.agents.protocol import Schema
from trace_jax.agents.redaction import shorten

_THOUGHTS = re.compile(r"\A\s*(?:<think>|(?![{\[\"`])).*?</think>", re.DOTALL)  # templates that open them leave the first tag out
_FENCE = re.compile(r"\A```\w*\n(.*)\n```\Z", re.DOTALL)
_MOST_FAULTS = 8  # the first ones; whoever mends them meets the rest next time
_MOST_FOUND = 200  # an answer of millions of values has millions of faults
_KINDS = {"object": dict, "array": list}


class AnswerError(ValueError):
    """There is no JSON value in a text, or not one alone. The message is a fault to show its author."""


def find_json(text: str, kind: type | tuple[type, ...] = (dict, list)) -> Any:
    """The JSON value of a text: the whole text, the inside of its fence, or the one outermost object or array in its prose.

    Args:
      kind: what counts in prose.

    Raises:
      AnswerError: there is none, or more than one.
    """
    text = _THOUGHTS.sub("", text, count=1).strip()
    if fence := _FENCE.match(text):
        text = fence[1].strip()
    if not text:
        raise AnswerError("it is empty")
    try:
        return _decode(text)
    except ValueError as error:
        whole = error
    found, broken = [], None
    for region in _regions(text):
        try:
            value = _decode(region)
        except ValueError as error:
            broken = broken or (error if '"' in region else None)  # `{x}` and `[sic]` are prose
        else:
            found += [value] if isinstance(value, kind) else []
    if len(found) > 1:
        raise AnswerError(f"it holds {len(found)} JSON values; give one alone")
    if found:
        return found[0]
    if broken or text[0] in '{["':
        raise AnswerError(f"it is not valid JSON: {broken or whole}")
    raise AnswerError("there is no JSON in it")


def read_answer(text: str, schema: Schema) -> tuple[Any, list[str]]:
    """The value of an answer and its faults; with faults the value is None."""
    try:
        value = find_json(text, _KINDS.get(schema.get("type"), (dict, list)))
    except AnswerError as error:
        return None, [str(error)]
    faults = schema_faults(value, schema)
    return (None, faults) if faults else (value, [])


def schema_faults(value: Any, schema: Schema) -> list[str]:
    """Where a value does not fit a JSON schema (Draft 2020-12), each with the path of the field."""
    from jsonschema.exceptions import best_match

    found = itertools.islice(_validator(json.dumps(schema)).iter_errors(value), _MOST_FOUND)
    errors = sorted(found, key=lambda error: [str(part).zfill(8) for part in error.absolute_path])
    faults = []
    for error in errors[:_MOST_FAULTS]:
        error = best_match(iter([error])) or error  # of alternatives, the one that comes nearest
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path).lstrip(".")
        faults.append(f"{path or 'the answer'}: {shorten(error.message)}")
    if len(errors) > _MOST_FAULTS:
        faults.append(f"and {len(errors) - _MOST_FAULTS} more" + " at least" * (len(errors) == _MOST_FOUND))
    return faults


def format_note(schema: Schema) -> str:
    """What an author is told whose backend cannot be given the schema itself."""
    return (
        f"\nAnswer with one JSON value and nothing around it. It must fit this JSON schema:\n\n{json.dumps(schema, ensure_ascii=False)}\n"
    )


@functools.lru_cache(maxsize=64)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator

    return Draft202012Validator(json.loads(schema))


def _decode(text: str) -> Any:
    """Raises ValueError on what is no JSON, and on what other readers of it would not take or would take otherwise."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair is no text") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _object(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shorten(key)!r} occurs twice in one object")
        found[key] = value
    return found


def _regions(text: str) -> Iterator[str]:
    """The outermost stretches from a bracket to the one that closes it, or to the end where none does."""
    depth, start, quoted, skip = 0, 0, False, False
    for index, letter in enumerate(text):
        if skip:
            skip = False
        elif quoted:
            skip, quoted = letter == "\\", letter != '"'
        elif letter in "{[":
            start = index if depth == 0 else start
            depth += 1
        elif depth and letter in "}]":
            depth -= 1
            if depth == 0:
                yield text[start : index + 1]
        elif depth and letter == '"':
            quoted = True
    if depth:
        yield text[start:]
