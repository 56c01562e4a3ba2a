"""Trajectories of mini-swe-agent: 1.1 (`info` and `messages`, one `<id>.traj.json` an instance) and the bare list of messages before it.

A turn that mini could not read is not among its messages: it stands in `extra.response` of the message that complains, and is put back
before it. How the run ended decides the stop reason; what is no end of the agent's own making (`Timeout`, `InternalServerError`, any
exception) is an error of the infrastructure. Settings of the model may hold keys and are never read, but for its name.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.agents.redaction import redact, shorten
from trace_jax.benchmarks.swebench import conversation, reports
from trace_jax.errors import InputError

SUFFIX = ".traj.json"
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
STOP = {
    "Submitted": StopReason.DONE,
    "LimitsExceeded": StopReason.MAX_TURNS,
    "TimeExceeded": StopReason.MAX_TURNS,
    "RepeatedFormatError": StopReason.INVALID_ACTION,
    "ContextWindowExceededError": StopReason.CONTEXT,
}


def recognises(path: pathlib.Path) -> bool:
    """A `.traj.json`, or a folder of them, directly or each in a folder of its own."""
    return path.name.endswith(SUFFIX) if path.is_file() else next(_files(path), None) is not None


def read(path: pathlib.Path, report: pathlib.Path | None = None) -> Iterator[Trajectory]:
    """The trajectories of a run, one file in memory at a time.

    Args:
      report: the harness's report or log tree, where it is not to be looked for in the folder and beside it (`reports.find_report`).

    Raises:
      InputError: a damaged file, or one whose outcome no report tells.
    """
    files = [path] if path.is_file() else sorted(_files(path))
    found = reports.find_report(_run_of(path) if path.is_file() else path, report)
    for file in files:
        yield _trajectory(file, reports.load_json(file), found)


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    yield from folder.glob(f"*{SUFFIX}")
    yield from folder.glob(f"*/*{SUFFIX}")


def _run_of(file: pathlib.Path) -> pathlib.Path:
    """The folder of the run that a single file belongs to."""
    alone = file.parent.name == file.name.removesuffix(SUFFIX)
    return file.parent.parent if alone else file.parent


def _trajectory(file: pathlib.Path, data: Any, report: reports.Report | None) -> Trajectory:
    try:
        if isinstance(data, list):
            info, raw = _old_info(data), data
        else:
            info, raw = dict(data["info"]), data["messages"]
        config = info.get("config") or {}
        name = (data.get("instance_id") if isinstance(data, dict) else None) or file.name.removesuffix(SUFFIX)
        status = info.get("exit_status") or ""
        fields = {"messages": _messages(raw, info), "stop_reason": STOP.get(status, StopReason.ENVIRONMENT_ERROR)}
        fields["metrics"] = {"turns": float(sum(m["role"] == "assistant" for m in fields["messages"]))}
        if status not in STOP:
            said = str(info.get("exception_str") or _exception(raw) or "the run ended without a patch")
            fields["error"] = {"kind": status or "interrupted", "message": shorten(redact(said))}
        model = str((config.get("model") or {}).get("model_name") or "")
        patch = str(info.get("submission") or "")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise InputError(f"{file}: not a trajectory of mini-swe-agent ({why}); copy it again") from error
    if "error" in fields:  # what the harness made of it is beside the point
        return reports.judged(name, reports.Verdict("error", reason=status), report, patch=patch, model=model, **fields)
    return reports.joined(name, patch, report, file, model, **fields)


def _messages(raw: list[Mapping[str, Any]], info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation as the model saw it, with the turns that could not be read."""
    messages: list[dict[str, Any]] = []
    answers = 0  # results that the last command in a block still waits for
    for m in raw:
        role, extra = m["role"], m.get("extra") or {}
        if role == "exit":
            continue
        if role == "assistant":
            messages.append(_assistant(m, extra))
            answers = 0 if m.get("tool_calls") else len(messages[-1].get("tool_calls", ()))
            continue
        if extra.get("interrupt_type") == "FormatError":
            messages.append(_unreadable(extra.get("response")))
            answers = 0
        message = {"role": "tool" if role == "user" and answers else role, "content": conversation.text_of(m.get("content"))}
        answers -= message["role"] != role
        if message["role"] == "tool":
            message |= {"tool_call_id": m.get("tool_call_id") or ""}
            message |= {"error": True} if extra.get("exception_info") else {}  # it did not end by itself
        messages.append(message)
    if "last" in info:  # the list before 1.1 ends with the patch, or with why it ended, for no model to see
        messages.pop()
    return messages


def _assistant(m: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A turn; one with its command in a block says in `extra` what the command was, or, in a file before 1.1, in its text alone."""
    message = conversation.assistant(m)
    if message.get("tool_calls"):
        return message
    blocked = conversation.with_block(message["content"])
    commands = [action["command"] for action in extra.get("actions") or [] if isinstance(action, dict) and "command" in action]
    if commands and not blocked.get("tool_calls"):
        blocked["tool_calls"] = [conversation.call("bash", {"command": command}) for command in commands]
    return blocked


def _unreadable(response: Any) -> dict[str, Any]:
    """The turn of a response that held no action."""
    choices = response.get("choices") if isinstance(response, dict) else None
    if choices:
        return conversation.assistant(choices[0].get("message") or {})
    return {"role": "assistant", "content": response if isinstance(response, str) else ""}


def _exception(raw: list[Mapping[str, Any]]) -> str:
    return str((raw[-1].get("extra") or {}).get("exception_str") or "") if raw else ""


def _old_info(raw: list[Mapping[str, Any]]) -> dict[str, Any]:
    """What a bare list tells of its end: the message after the command that submits is the patch, else it names the limit."""
    last = conversation.text_of(raw[-1]["content"])
    if len(raw) > 2 and raw[-1]["role"] == "user":
        if SUBMIT in conversation.text_of(raw[-2].get("content")):
            return {"exit_status": "Submitted", "submission": last, "last": True}
        if last.strip() in STOP:
            return {"exit_status": last.strip(), "last": True}
    return {}
