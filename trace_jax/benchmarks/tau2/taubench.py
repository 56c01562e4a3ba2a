"""Result files of the first tau-bench as trajectories: a list of `{"task_id", "reward", "info", "traj", "trial"}`."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.agents.redaction import redact, shorten
from trace_jax.benchmarks.json_files import arguments_of, field, in_form, need, opening, stream
from trace_jax.benchmarks.tau2.alignment import Names, names_of
from trace_jax.benchmarks.tau2.grades import action_checks, communicate_check, in_their_place, reward_of
from trace_jax.diagnose.calls import agent_calls, read_or_write


def recognises(path: pathlib.Path) -> bool:
    """Whether a file begins with a list of such entries."""
    return path.is_file() and "item.task_id" in (places := opening(path)) and bool(places & {"item.reward", "item.traj"})


def read(path: pathlib.Path) -> Iterator[Trajectory]:
    """The trajectories of a file.

    Raises:
      InputError: the file is damaged or incomplete; after the last trajectory, where conversations belong to other tasks.
    """
    names: dict[str, Names] = {}
    for where, entry in _entries(path):
        with in_form(where, "tau-bench"):
            names[str(entry["task_id"])] = _names(entry)

    def trajectories() -> Iterator[Trajectory]:
        for where, entry in _entries(path):
            with in_form(where, "tau-bench"):
                t = _trajectory(entry, where)
            yield t

    yield from in_their_place(trajectories(), names, path)


def _entries(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for i, entry in enumerate(stream(path, "item")):
        where = f"{path}: entry {i}"
        for key in ("task_id", "reward", "traj"):
            need(entry, key, where)
        yield where, entry


def _trajectory(entry: Mapping[str, Any], where: str) -> Trajectory:
    task_id, info = str(entry["task_id"]), field(entry, "info", dict)
    messages = [_openai_message(m, f"{where}.traj[{i}]") for i, m in enumerate(entry["traj"])]
    header = re.match(r"\s*#\s*(\w+)", messages[0]["content"]) if messages else None
    common = dict(
        id=f"{task_id}#{entry.get('trial')}",
        environment=f"taubench/{header.group(1).lower() if header else 'unknown'}",
        task_id=task_id,
        group=task_id,
        trial=-1 if entry.get("trial") is None else int(entry["trial"]),
        messages=messages,
    )
    if "task" not in info or not messages:  # tau-bench writes the exception in the place of the task
        kind = {"kind": "infrastructure_error", "message": redact(shorten(str(info.get("error") or "no task in info, or no conversation")))}
        return Trajectory(**common, stop_reason=StopReason.ENVIRONMENT_ERROR, error=kind)
    task = info["task"]
    actions = [_expected(action) for action in field(task, "actions", list)]
    checks = action_checks([(action | {"kind": read_or_write(action["name"])}, None, None) for action in actions], messages)
    reward, success = reward_of(entry["reward"], where)
    found = field(field(info, "reward_info", dict), "info", dict)
    # the grader keeps the verdict on the database or the one on the outputs, whichever it came to last
    database = found.get("r_actions", 1.0 if success else 0.0 if found.get("r_outputs") == 1.0 else None)
    if database is not None:
        checks["db"] = {"passed": bool(database), "expected": None, "actual": None, "message_index": None}
    for i, output in enumerate(field(task, "outputs", list)):
        check = communicate_check(output, False, messages)
        checks[f"communicate:{i}"] = {
            **check,
            "passed": bool(field(found, "outputs", dict).get(output, check["message_index"] is not None)),
        }
    last = messages[-1] if messages else {"role": "", "content": ""}
    calls = agent_calls(messages)
    over = "###STOP###" in last["content"] or bool(calls and calls[-1].name == "transfer_to_human_agents")
    return Trajectory(
        **common, reward=reward, success=success, checks=checks, stop_reason=StopReason.DONE if over else StopReason.MAX_TURNS
    )


def _openai_message(m: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An OpenAI message with the arguments of its calls parsed; arguments that are not JSON are kept as text under "malformed"."""
    message = {"role": need(m, "role", where), "content": field(m, "content", str)}
    if m.get("tool_call_id"):
        message["tool_call_id"] = field(m, "tool_call_id", str)
    calls = []
    for call in field(m, "tool_calls", list):
        function = need(call, "function", where)
        arguments = arguments_of(field(function, "arguments", str))
        calls.append({"id": field(call, "id", str), "name": field(function, "name", str, needed=True), "arguments": arguments})
    return {**message, "tool_calls": calls} if calls else message


def _expected(action: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": field(action, "name", str, needed=True), "arguments": field(action, "kwargs", dict)}


def _names(entry: Mapping[str, Any]) -> Names:
    task = field(field(entry, "info", dict), "task", dict)
    scenario = f"{task.get('user_id', '')} {task.get('instruction', '')}"
    return names_of(scenario, [_expected(action) for action in field(task, "actions", list)])
