"""The form of what a benchmark of the user's own hands over: messages, and the grader's evidence.

A check is `{"passed", "expected", "actual", "message_index"}`, of which only `passed` must be there. Its name says its kind, and the
evidence analyst reads these: `action:0`, `action:1`, ... the expected calls in their order, `communicate:0`, ... what has to be said.
"""

from __future__ import annotations

from typing import Any

_ROLES = ("system", "user", "assistant", "tool")
_CHECK = ("passed", "expected", "actual", "message_index")


class Misshapen(ValueError):
    """A value of another form; the message begins with its place and ends with the fix."""


def parse_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages of a trajectory, a missing content as empty text.

    Raises:
      Misshapen: they are not of the form of `rl.trajectory.Trajectory`.
    """
    if not isinstance(messages, list):
        raise Misshapen(f"'messages': {type(messages).__name__} must be a list")
    return [_message(message, f"'messages[{index}]'") for index, message in enumerate(messages)]


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Misshapen(f'{place}: must be {{"role", "content"}}, the role one of {", ".join(_ROLES)}')
    content, calls = message.get("content"), message.get("tool_calls") or []
    if not isinstance(content, str | None):
        raise Misshapen(f"{place}: content is of type {type(content).__name__}, it must be a text; join its parts to one")
    for call in calls if isinstance(calls, list) else [None]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
            fix = 'of an OpenAI message take call["function"]["name"] and json.loads(call["function"]["arguments"])'
            raise Misshapen(f'{place}: tool_calls must be [{{"id", "name", "arguments"}}], arguments an object; {fix}')
    for name, value in [("tool_call_id", message.get("tool_call_id")), *(("tool_calls: id", call.get("id")) for call in calls)]:
        if not isinstance(value, str | None):
            raise Misshapen(f"{place}: {name} is of type {type(value).__name__}, it must be a text")
    return {**message, "content": content or ""}


def parse_checks(checks: Any) -> dict[str, dict[str, Any]]:
    """The checks, what is left out as null.

    Raises:
      Misshapen: one is of another form.
    """
    if not isinstance(checks, dict):
        raise Misshapen(f"'checks': {type(checks).__name__} must be an object, name to check")
    return {name: _check(name, check, f"'checks[{name!r}]'") for name, check in checks.items()}


def _check(name: str, check: Any, place: str) -> dict[str, Any]:
    if not isinstance(check, dict) or not isinstance(check.get("passed"), bool):
        raise Misshapen(f'{place}: must be {{"passed": true or false, "expected", "actual", "message_index"}}')
    if odd := sorted(check.keys() - {*_CHECK, "judge"}):  # "judge": "llm" marks what an LLM decided
        raise Misshapen(f"{place}: unknown field {odd[0]!r}; the fields are {', '.join(_CHECK)}")
    index, expected = check.get("message_index"), check.get("expected")
    if not isinstance(index, int | None) or isinstance(index, bool):
        raise Misshapen(f"{place}: message_index is {index!r}, it must be the place of a message in the list, from 0, or null")
    if name.startswith("action:") and not (
        isinstance(expected, dict)
        and isinstance(expected.get("name"), str)
        and isinstance(expected.get("arguments"), dict)
        and expected.get("kind", "read") in ("read", "write")
    ):
        raise Misshapen(f'{place}: expected must be the call {{"name": text, "arguments": object, "kind": "read" or "write"}}')
    if name.startswith("communicate:") and not isinstance(expected, str):
        raise Misshapen(f"{place}: expected must be the text that has to be said")
    return dict.fromkeys(_CHECK) | check
