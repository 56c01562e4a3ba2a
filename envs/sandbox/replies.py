"""Replies of a worker are untrusted: each is checked here before anybody builds on it.

The worker runs code that a language model may have written, so every value may be missing, huge, not a number or a lie about its type.
`EnvironmentFault` of kind `reply` concerns one episode; `MalformedMessage` means that the worker no longer speaks the protocol at all.
"""

from __future__ import annotations

import json
import math
from typing import Any

from envs.base import Check, EnvironmentFault, Reply, Score, Start

MAX_REPLY_BYTES = 1_000_000  # of one request; a message of n replies may have n times this
MAX_DEPTH = 32
ROLES = ("user", "assistant", "tool")
MESSAGE_KEYS = {"role", "content", "tool_calls", "tool_call_id"}


class MalformedMessage(Exception):
    """A worker's message that is not the list of replies that was asked for."""


def parse_message(payload: bytes, count: int) -> list[tuple[str | None, Any]]:
    """The replies of one message, `(None, value)` or `(fault, None)` each; the values are not checked yet.

    Raises:
      MalformedMessage: not JSON, not `count` pairs, or a number that is not finite.
    """
    try:
        text = payload.decode()
        replies, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"the worker's message is not JSON: {error}") from None
    if end != len(text) or not isinstance(replies, list) or len(replies) != count:
        raise MalformedMessage(f"the worker's message does not hold the {count} replies that were asked for")
    for reply in replies:
        if not (isinstance(reply, list) and len(reply) == 2 and (reply[0] is None or (isinstance(reply[0], str) and reply[1] is None))):
            raise MalformedMessage("a reply in the worker's message is not a pair of fault and value")
    return [(fault if fault is None else fault[-4000:], value) for fault, value in replies]


def parse_value(op: str, value: Any, log_length: int) -> Start | Reply | Score | Any:
    """The typed reply of one op: `reset` gives Start, `call` and `respond` give Reply, `score` gives Score, `function` plain JSON.

    Args:
      op: the request.
      value: what the worker sent.
      log_length: calls and texts of the episode so far; a check may point to no other.

    Raises:
      EnvironmentFault: kind `reply`, naming the field.
    """
    if op == "call" or op == "respond":
        text, done = value if isinstance(value, list) and len(value) == 2 else refuse(op, "must be a result and done()", value)
        if not isinstance(text, str) and (op == "call" or text is not None):
            refuse(op, "must return a string" + (" or None" if op == "respond" else ""), text)
        if not isinstance(done, bool):
            refuse("done", "must return true or false", done)
        if text is not None:
            _check_text(op, text)
        return Reply(text, done or text is None)
    check_json(op, value)
    if op == "reset":
        return _parse_start(value)
    if op == "score":
        return _parse_score(value, log_length)
    return value


def parse_function(name: str, value: Any) -> Any:
    """The checked result of a package's `tools`, `oracle` or `hint`.

    Raises:
      EnvironmentFault: kind `reply`, naming the field.
    """
    if name == "hint" and not isinstance(value, str):
        refuse("hint", "must return a string", value)
    if name == "oracle":
        if not isinstance(value, list):
            refuse("oracle", "must return a list of actions", value)
        for action in value:
            fits = isinstance(action, dict) and (
                (set(action) == {"name", "arguments"} and isinstance(action["name"], str) and isinstance(action["arguments"], dict))
                or (set(action) == {"text"} and isinstance(action["text"], str))
            )
            if not fits:
                refuse("oracle", 'must return actions {"name", "arguments"} or {"text"}', action)
    if name == "tools":
        functions = [_tool_function(tool) for tool in value] if isinstance(value, list) else refuse("TOOLS", "must be a list", value)
        if len({function["name"] for function in functions}) < len(functions):
            refuse("TOOLS", "must have distinct names", [function["name"] for function in functions])
    return value


def _tool_function(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(function.get("parameters"), dict):
        refuse("TOOLS", 'must hold {"type": "function", "function": {"name", "description", "parameters"}}', tool)
    parameters = function["parameters"]
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(schema, dict) for schema in properties.values()):
        refuse("TOOLS", "must give every parameter a schema", function["name"])
    if not isinstance(required, list) or not all(isinstance(key, str) and key in properties for key in required):
        refuse("TOOLS", "must list required parameters that exist", function["name"])
    return function


def _parse_start(value: Any) -> Start:
    if not isinstance(value, dict) or set(value) != {"system", "messages"} or not isinstance(value["system"], str):
        refuse("reset", 'must return {"system": string, "messages": list}', value)
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        refuse("reset", "must return at least one message", messages)
    for message in messages:
        if not isinstance(message, dict) or not set(message) <= MESSAGE_KEYS or message.get("role") not in ROLES:
            refuse("reset", f'must return messages {{"role": one of {", ".join(ROLES)}, "content"}}', message)
        if not isinstance(message.get("content"), str):
            refuse("reset", "must return messages whose content is a string", message)
        check_tool_calls("reset", message)
    return Start(value["system"], messages)


def check_tool_calls(op: str, message: dict[str, Any]) -> None:
    """The calls that a message makes, and the id of the call that it answers.

    Raises:
      EnvironmentFault: kind `reply`.
    """
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [calls]:
        named = isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("id", ""), str)
        if not named or not isinstance(call.get("arguments"), dict):
            refuse(op, 'must give tool calls as a list of {"id", "name", "arguments"}', call)
    if not isinstance(message.get("tool_call_id") or "", str):
        refuse(op, "must give a tool_call_id as a string", message)


def _parse_score(value: Any, log_length: int) -> Score:
    if not isinstance(value, dict) or set(value) != {"reward", "checks"}:
        refuse("score", 'must return {"reward", "checks"}', value)
    reward, checks = value["reward"], value["checks"]
    if not isinstance(reward, int | float) or isinstance(reward, bool) or not 0 <= reward <= 1:
        refuse("score", "must return a reward from 0 to 1", reward)
    if not isinstance(checks, dict):
        refuse("score", "must return checks by name", checks)
    parsed = {}
    for name, check in checks.items():
        if not isinstance(check, dict) or set(check) != {"passed", "expected", "actual", "call"} or not isinstance(check["passed"], bool):
            refuse("score", f'must give check {name!r} as {{"passed": true or false, "expected", "actual", "call"}}', check)
        call = check["call"]
        if call is not None and (not isinstance(call, int) or isinstance(call, bool) or not 0 <= call < log_length):
            refuse("score", f"check {name!r} must point to one of the {log_length} calls and texts, or to null", call)
        parsed[name] = Check(check["passed"], check["expected"], check["actual"], call)
    return Score(float(reward), parsed)


def check_json(op: str, value: Any, max_depth: int = MAX_DEPTH) -> None:
    """Finite numbers (1e999 is infinite), no lone surrogates, no absurd nesting: what a shard or a tokenizer would choke on later.

    Raises:
      EnvironmentFault: kind `reply`.
    """
    stack = [(value, 0)]
    while stack:
        item, depth = stack.pop()
        if depth > max_depth:
            refuse(op, f"must not nest deeper than {max_depth}", "...")
        if isinstance(item, str):
            _check_text(op, item)
        elif isinstance(item, float):
            if not math.isfinite(item):
                refuse(op, "must hold finite numbers only", item)
        elif isinstance(item, dict):
            stack.extend((key, depth + 1) for key in item)
            stack.extend((inner, depth + 1) for inner in item.values())
        elif isinstance(item, list):
            stack.extend((inner, depth + 1) for inner in item)


def _check_text(op: str, text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            refuse(op, "must hold text without lone surrogates", text[:100])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def refuse(what: str, rule: str, value: Any) -> Any:
    """Raises the fault; annotated as returning so that it can stand in an expression."""
    raise EnvironmentFault("reply", f"{what} {rule}; got {repr(value)[:200]}")
