"""The calls an agent made beside the calls that its task expected.

Importers use this to find the call that answers an expected action, the evidence analyst to say what went wrong with it. Both
therefore agree on what "nearest" means.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# A tool whose name begins so changes no record. Handing over to a human changes none either.
_READ_NAME = re.compile(r"^(get|find|search|list|check|calculate|think|read|lookup|look_up|query|transfer_to_human)(_|$)")


@dataclasses.dataclass(frozen=True)
class Call:
    """One tool call of the agent, with the result that it saw (None if the episode ended first)."""

    name: str
    arguments: dict[str, Any]
    message_index: int
    result: str | None
    error: bool


def read_or_write(name: str) -> str:
    """The kind of a tool as its name tells it: "read" or "write"."""
    return "read" if _READ_NAME.match(name) else "write"


def agent_calls(messages: Sequence[Mapping[str, Any]]) -> list[Call]:
    """The agent's calls in order; a result belongs to a call by its id, or by position where a file has no ids.

    A result is an error if its message says so or if its text begins with "Error", as tau2 and the desk write them.
    """
    calls = []
    for index, message in enumerate(messages):
        requested = message.get("tool_calls") or [] if message["role"] == "assistant" else []
        results = []
        for following in messages[index + 1 :] if requested else []:
            if following["role"] != "tool":
                break
            results.append(following)
        by_id = {r["tool_call_id"]: r for r in results if r.get("tool_call_id")}
        for position, call in enumerate(requested):
            result = by_id.get(call.get("id")) or (results[position] if position < len(results) else None)
            text = None if result is None else str(result.get("content") or "")
            error = result is not None and bool(result.get("error") or text.startswith("Error"))
            arguments = call.get("arguments")
            calls.append(Call(call["name"], arguments if isinstance(arguments, dict) else {}, index, text, error))
    return calls


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The scalar values inside arguments, each with its dotted key; positions in lists are left out, so `flights.date` may occur twice."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from leaves(inner, key)
    elif value is not None:
        yield key, value


def text_of(value: Any) -> str:
    """A scalar as it would be written in a conversation: 50.0 and 50 are one value, letters are compared without case."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip().lower()


def fields(arguments: Mapping[str, Any]) -> collections.Counter[tuple[str, str]]:
    """The multiset of (key, text) of the arguments: order in lists does not matter, neither does 50 against 50.0."""
    return collections.Counter((key, text_of(value)) for key, value in leaves(arguments))


def answers(expected: Mapping[str, Any], name: str, arguments: Mapping[str, Any], compare: Sequence[str] | None = None) -> bool:
    """Whether a call is the expected action, by tau2's rule: the arguments that the call gives (or those named in `compare`) are equal."""
    if name != expected["name"]:
        return False
    keys = arguments.keys() if compare is None else compare
    wanted = expected.get("arguments") or {}
    return {k: arguments[k] for k in keys if k in arguments} == {k: wanted[k] for k in keys if k in wanted}


def pair(expected: Sequence[Mapping[str, Any]], calls: Sequence[Call]) -> list[int | None]:
    """For every expected action the index of the call that answers it or comes nearest; None if none of that name is left.

    A call answers one expected write only, but any number of expected reads: looking once is looking. Exact answers are taken first (those
    without an error before those with one), then calls of the same name by the number of equal fields, in order.
    """
    paired: list[int | None] = [None] * len(expected)
    used: set[int] = set()
    for i, action in enumerate(expected):
        exact = [c for c, call in enumerate(calls) if answers(action, call.name, call.arguments)]
        free = [c for c in exact if c not in used] or (exact if action.get("kind") == "read" else [])
        if free:
            paired[i] = min(free, key=lambda c: (calls[c].error, c))
            used.add(paired[i])
    overlaps = sorted(
        (-sum((fields(action.get("arguments") or {}) & fields(call.arguments)).values()), call.error, i, c)
        for i, action in enumerate(expected)
        for c, call in enumerate(calls)
        if paired[i] is None and c not in used and call.name == action["name"]
    )
    for _, _, i, c in overlaps:
        if paired[i] is None and c not in used:
            paired[i] = c
            used.add(c)
    return paired
