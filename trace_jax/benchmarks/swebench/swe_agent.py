"""Trajectories of SWE-agent, `<instance>.traj`: those with commands in text (before 1.0) and those with tool calls.

`history` is the conversation; messages marked `is_demo` show somebody else's work and are left out. The outcome is the harness's
(`reports`). A file with a history alone is a demonstration, not a run.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.benchmarks.swebench import conversation, reports
from trace_jax.errors import InputError

SUFFIX = ".traj"
# what ended the agent; after "submitted (...)" a patch was taken from it nevertheless
_STOP = {
    "submitted": StopReason.DONE,
    "exit_forfeit": StopReason.DONE,
    "exit_cost": StopReason.MAX_TURNS,
    "exit_total_execution_time": StopReason.MAX_TURNS,
    "exit_command_timeout": StopReason.MAX_TURNS,
    "exit_context": StopReason.CONTEXT,
    "exit_format": StopReason.INVALID_ACTION,
}


def recognises(path: pathlib.Path) -> bool:
    """A `.traj`, or a folder of them, directly or each in a folder of its own."""
    return path.suffix == SUFFIX if path.is_file() else next(_files(path), None) is not None


def read(path: pathlib.Path, report: pathlib.Path | None = None) -> Iterator[Trajectory]:
    """The trajectories of a run, one file in memory at a time.

    Args:
      report: the harness's report or log tree, where it is not to be looked for in the folder and beside it (`reports.find_report`).

    Raises:
      InputError: a damaged file, a demonstration, or one whose outcome no report tells.
    """
    files = [path] if path.is_file() else sorted(_files(path))
    run = path if path.is_dir() else path.parent.parent if path.parent.name == path.stem else path.parent
    found = reports.find_report(run, report)
    for file in files:
        yield _trajectory(file, reports.load_json(file), found)


def _files(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    yield from folder.glob(f"*{SUFFIX}")
    yield from folder.glob(f"*/*{SUFFIX}")


def _trajectory(file: pathlib.Path, data: Any, report: reports.Report | None) -> Trajectory:
    if isinstance(data, dict) and "info" not in data and "history" in data:
        raise InputError(f"{file}: a demonstration of SWE-agent, no run of an agent; give the .traj of a run")
    try:
        info = data["info"]
        status = str(info.get("exit_status") or "")
        ended = status.removeprefix("submitted (").removesuffix(")")
        fields = {"messages": _messages(data["history"]), "stop_reason": _STOP.get(ended, StopReason.ENVIRONMENT_ERROR)}
        fields["metrics"] = {"turns": float(sum(m["role"] == "assistant" for m in fields["messages"]))}
        patch = str(info.get("submission") or "")
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        why = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise InputError(f"{file}: not a trajectory of SWE-agent ({why}); copy it again") from error
    name = _instance(file.stem, report)
    if ended not in _STOP and not status.startswith("submitted"):
        fields["error"] = {"kind": status or "interrupted", "message": "SWE-agent ended the run"}
        return reports.judged(name, reports.Verdict("error", reason=status), report, patch=patch, **fields)
    return reports.joined(name, patch, report, file, **fields)


def _instance(stem: str, report: reports.Report | None) -> str:
    """The instance of a file; its name may have the run's before it."""
    ends = [name for name in (report.verdicts if report else ()) if stem.endswith(f"__{name}")]
    return stem if len(ends) != 1 else ends[0]


def _messages(history: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    waiting = False  # for the output of a command in text
    for m in history:
        if m.get("is_demo"):
            continue
        role = m["role"]
        if role == "assistant":
            messages.append(_assistant(m))
            waiting = not m.get("tool_calls") and bool(messages[-1].get("tool_calls"))
            continue
        message = {"role": "tool" if role == "user" and waiting else role, "content": conversation.text_of(m.get("content"))}
        waiting = False
        if message["role"] == "tool":
            message["tool_call_id"] = str((m.get("tool_call_ids") or [""])[0])
        messages.append(message)
    return messages


def _assistant(m: Mapping[str, Any]) -> dict[str, Any]:
    """A turn; a command in text becomes a call of bash, and what is said beside it the content."""
    action = str(m.get("action") or "").strip()
    if m.get("tool_calls") or not action:
        return conversation.assistant(m)
    said = conversation.text_of(m.get("thought") or "").strip()
    return {"role": "assistant", "content": said, "tool_calls": [conversation.call("bash", {"command": action})]}
