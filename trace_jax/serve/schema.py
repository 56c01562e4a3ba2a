"""What a client may ask for: JSON in, checked and typed, or an error in OpenAI's form that names the field.

Every field is in a table. A field that the engine can only serve at its neutral value (no penalties, `min_p` 0) is accepted at that value
and refused at others, so that nobody measures with a setting that was silently dropped; an unknown field is refused too. Null means left
out. Inside messages unknown keys are allowed: clients send back what they were given, with remarks of their own.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_ROLES = ("system", "developer", "user", "assistant", "tool")
_STOPS = 4  # as many as OpenAI allows
_CHOICES = 128  # answers to one request
_LEAST = 1e-6  # a smaller top_p leaves the likeliest token alone, and so does this one


class ApiError(Exception):
    """What the client is told: an HTTP status, and OpenAI's error object."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What both endpoints know.

    Attributes:
      max_tokens: None as many as the context holds.
      top_k, top_p: as in `rl.engines.protocol.Request`.
      seed: None another one every time.
      logprobs, return_token_ids: whether the log-prob and the id of every token are wanted.
    """

    model: str
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatAsked(Asked):
    """`messages` as the chat template reads them; `tools` as the client wrote them, empty when none may be called, `forced` when one must
    be."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    forced: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompletionAsked(Asked):
    """`prompts`: texts, or token ids."""

    prompts: tuple[str | tuple[int, ...], ...]


def read_json(body: bytes) -> dict[str, Any]:
    """The object of a request's body.

    Raises:
      ApiError: no JSON object.
    """

    def refuse(constant: str):
        raise ValueError(f"{constant} is no number of JSON")

    try:
        found = json.loads(body.decode(), parse_constant=refuse)
        if b"\\ud" in body.lower():  # half of a surrogate pair is no text; no tokenizer and no reply could hold it
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}"[:300]) from error
    if not isinstance(found, dict):
        raise ApiError("the body is not a JSON object")
    return found


def read_chat(body: Mapping[str, Any]) -> ChatAsked:
    """The body of `/v1/chat/completions`.

    Raises:
      ApiError: names the field.
    """
    found = _read(body, _CHAT)
    if "messages" not in found:
        raise ApiError("messages: missing", "messages")
    tools = found.pop("tools", ())
    choice = found.pop("tool_choice", "auto")
    if choice == "none":
        tools = ()
    if choice == "required" and not tools:
        raise ApiError('tool_choice: "required", but there are no tools', "tool_choice")
    limits = [found.pop(name) for name in ("max_completion_tokens", "max_tokens") if name in found]
    return ChatAsked(
        **_common(found), messages=found.pop("messages"), tools=tools, max_tokens=min(limits, default=None),
        logprobs=found.pop("logprobs", False), parallel=found.pop("parallel_tool_calls", True), forced=choice == "required",
    )  # fmt: skip


def read_completion(body: Mapping[str, Any]) -> CompletionAsked:
    """The body of `/v1/completions`; `max_tokens` is 16 when left out, as OpenAI's.

    Raises:
      ApiError: names the field.
    """
    found = _read(body, _COMPLETION)
    if "prompt" not in found:
        raise ApiError("prompt: missing", "prompt")
    if len(found["prompt"]) * found.get("n", 1) > _CHOICES:
        raise ApiError(f"prompt: {len(found['prompt'])} prompts, n = {found.get('n', 1)}; at most {_CHOICES} answers at once", "prompt")
    return CompletionAsked(
        **_common(found), prompts=found["prompt"], max_tokens=found.get("max_tokens", 16), logprobs=found.get("logprobs") is not None
    )


# --- readers of single values: (value, name) -> value, or ApiError

_Reader = Callable[[Any, str], Any]


def _fail(name: str, expected: str, value: Any):
    raise ApiError(f"{name}: must be {expected}, found {json.dumps(value)[:80]}", name.split("[")[0].split(".")[0])


def _integer(low: int, high: int) -> _Reader:
    def read(value: Any, name: str) -> int:
        return value if type(value) is int and low <= value <= high else _fail(name, f"an integer in [{low}, {high}]", value)

    return read


def _number(low: float, high: float) -> _Reader:
    def read(value: Any, name: str) -> float:
        fits = type(value) in (int, float) and low <= value <= high and math.isfinite(value)
        return float(value) if fits else _fail(name, f"a number in [{low}, {high}]", value)

    return read


def _top_k(value: Any, name: str) -> int:
    return max(_integer(-1, 2**31 - 1)(value, name), 0)  # -1, as 0, is no limit


def _boolean(value: Any, name: str) -> bool:
    return value if type(value) is bool else _fail(name, "true or false", value)


def _string(value: Any, name: str) -> str:
    return value if isinstance(value, str) and value else _fail(name, "a string that is not empty", value)


def _ignored(value: Any, name: str) -> None:
    """A remark of the client that changes no token."""


def _only(*neutral: Any) -> _Reader:
    """A setting that the engine does not have."""

    def read(value: Any, name: str) -> Any:
        return value if value in neutral else _fail(name, f"{json.dumps(neutral[0])}, since nothing else is supported here", value)

    return read


def _stop(value: Any, name: str) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > _STOPS or any(not isinstance(s, str) or not s for s in found):
        _fail(name, f"a string or a list of at most {_STOPS}, none of them empty", value)
    return tuple(found)


def _stream_options(value: Any, name: str) -> bool:
    if not isinstance(value, dict):
        _fail(name, "an object", value)
    if unknown := set(value) - {"include_usage", "include_obfuscation"}:
        raise ApiError(f"{name}.{min(unknown)}: unknown field", name)
    return _boolean(value.get("include_usage") or False, f"{name}.include_usage")


def _prompts(value: Any, name: str) -> tuple[str | tuple[int, ...], ...]:
    def ids(x: Any) -> bool:
        return isinstance(x, list) and bool(x) and all(type(token) is int for token in x)

    prompts = [value] if isinstance(value, str) or ids(value) else value
    if not isinstance(prompts, list) or not prompts or not all((isinstance(p, str) and p) or ids(p) for p in prompts):
        _fail(name, "a text, a list of texts, a list of token ids or a list of such lists, none of them empty", value)
    return tuple(tuple(p) if isinstance(p, list) else p for p in prompts)


def _messages(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        _fail(name, "a list of messages that is not empty", value)
    return tuple(_message(message, f"{name}[{i}]") for i, message in enumerate(value))


def _message(message: Any, name: str) -> dict[str, Any]:
    """A message as the chat template reads it: its content a string, the arguments of its calls objects."""
    if not isinstance(message, dict):
        _fail(name, "an object", message)
    role = message.get("role")
    if role not in _ROLES:
        _fail(f"{name}.role", f"one of {', '.join(_ROLES)}", role)
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{name}.content", optional=role == "assistant"),
    }
    if role == "assistant":
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            _fail(f"{name}.tool_calls", "a list", calls)
        if calls:
            out["tool_calls"] = [_past_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
        thought = message.get("reasoning_content")
        if isinstance(thought, str) and thought:
            out["content"] = f"<think>\n{thought}\n</think>\n\n{out['content']}"  # as the model wrote it, see rl.chat
    return out


def _content(value: Any, name: str, *, optional: bool) -> str:
    if value is None and optional:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _fail(name, "a string, or a list of text parts", value)
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            _fail(f"{name}[{i}]", 'a part {"type": "text", "text": string}; the model reads text alone', part)
    return "".join(part["text"] for part in value)


def _past_call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        _fail(name, 'an object {"id", "type": "function", "function": {"name", "arguments"}}', call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            pass  # a string is no object, as is said below
    if not isinstance(arguments, dict):
        _fail(f"{name}.function.arguments", "a JSON object, written as a string", arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(value: Any, name: str) -> tuple[dict[str, Any], ...]:
    """The schemas as they are, `$ref`, `anyOf` and defaults included; a function without parameters gets an empty object of them."""
    if not isinstance(value, list):
        _fail(name, "a list", value)
    out = []
    for i, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            _fail(f"{name}[{i}]", 'an object {"type": "function", "function": {"name", "parameters"}}', tool)
        if not isinstance(function.get("parameters") or {}, dict):
            _fail(f"{name}[{i}].function.parameters", "a JSON schema", function["parameters"])
        if not function.get("parameters"):
            tool = tool | {"function": function | {"parameters": {"type": "object", "properties": {}}}}
        out.append(tool)
    return tuple(out)


def _tool_choice(value: Any, name: str) -> str:
    wanted = ("auto", "none", "required")
    return value if value in wanted else _fail(name, '"auto", "none" or "required"; the engine cannot force a call of one tool', value)


_BOTH: dict[str, _Reader] = {
    "model": _string,
    "n": _integer(1, _CHOICES),
    "max_tokens": _integer(1, 2**31),
    "temperature": _number(0, 2),
    "seed": _integer(-(2**63), 2**63 - 1),
    "stop": _stop,
    "stream": _boolean,
    "stream_options": _stream_options,
    "return_token_ids": _boolean,
    "user": _ignored,
    "metadata": _ignored,
    "store": _ignored,
    "service_tier": _ignored,
    "safety_identifier": _ignored,
    "prompt_cache_key": _ignored,
    "top_p": _number(_LEAST, 1),
    "top_k": _top_k,
    "min_p": _only(0),
    "presence_penalty": _only(0),
    "frequency_penalty": _only(0),
    "repetition_penalty": _only(1),
    "logit_bias": _only({}),
}
_CHAT = _BOTH | {
    "messages": _messages,
    "max_completion_tokens": _integer(1, 2**31),
    "tools": _tools,
    "tool_choice": _tool_choice,
    "parallel_tool_calls": _boolean,
    "logprobs": _boolean,
    "top_logprobs": _only(0),
    "response_format": _only({"type": "text"}),
    "modalities": _only(["text"]),
}
_COMPLETION = _BOTH | {
    "prompt": _prompts,
    "logprobs": _only(0),
    "best_of": _only(1),
    "echo": _only(False),
    "suffix": _only(""),
}


def _read(body: Mapping[str, Any], table: Mapping[str, _Reader]) -> dict[str, Any]:
    for name in body:
        if name not in table:
            raise ApiError(f"{name}: unknown field; there are: {', '.join(sorted(table))}"[:900], name)
    found = {name: table[name](value, name) for name, value in body.items() if value is not None}
    if "model" not in found:
        raise ApiError("model: missing; GET /v1/models lists what there is", "model")
    if "stream_options" in found and not found.get("stream"):
        raise ApiError("stream_options: only with stream", "stream_options")
    return found


def _common(found: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "n", "temperature", "top_k", "top_p", "seed", "stop", "stream", "return_token_ids")
    return {name: found[name] for name in names if name in found} | {"include_usage": found.get("stream_options", False)}
