"""The folder of a ToolSandbox run as trajectories: `result_summary.json` and `trajectories/<scenario>/`.

A scenario that ended in an exception has no `conversation.json`. ToolSandbox scores it 0, and so do we where the agent caused it: a tool
that does not exist, arguments that are no JSON, an empty reply. Where the type of the exception says that an API was out of reach, or the
traceback goes through a user simulator, the agent is not to blame, and the trajectory is an error. What had been said is then read from
`execution_context.json`, if it is there. Tool schemas are in none of the files.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.agents.redaction import redact
from trace_jax.benchmarks import TOLERANCE
from trace_jax.benchmarks.toolsandbox import splits
from trace_jax.benchmarks.toolsandbox.milestones import checks
from trace_jax.errors import InputError

SUMMARY = "result_summary.json"
_LARGEST = 256 * 2**20  # bytes of a summary; 1,032 scenarios with tracebacks take 3 MB

# Exceptions of the clients of model APIs, of HTTP and of the machine, which no turn of an agent causes. A tool that raises one does not
# end its scenario: the agent reads it. All others are the agent's, also an API's refusal of a request (BadRequestError, a full context).
OUTAGES = frozenset(
    # OpenAI, Anthropic
    "APIError APIConnectionError APITimeoutError APIStatusError APIResponseValidationError RateLimitError InternalServerError "
    "AuthenticationError PermissionDeniedError NotFoundError "
    # Google, Cohere
    "GoogleAPICallError ServiceUnavailable ResourceExhausted DeadlineExceeded TooManyRequests Unauthenticated PermissionDenied Forbidden "
    "RetryError CohereAPIError CohereConnectionError "
    # requests, httpx, urllib3
    "HTTPError HTTPStatusError ConnectionError ConnectError ConnectTimeout ReadTimeout ReadError Timeout TimeoutError ProxyError SSLError "
    "RemoteProtocolError RemoteDisconnected MaxRetryError ChunkedEncodingError "
    # the machine
    "ConnectionRefusedError ConnectionResetError ConnectionAbortedError BrokenPipeError OSError FileNotFoundError PermissionError "
    "MemoryError KeyboardInterrupt".split()
)
_SIMULATOR = re.compile(r'File "[^"]*_user\.py"')  # openai_api_user.py, or a user's own
_TOOL_ERROR = re.compile(r"^[A-Za-z_.]*(Error|Exception)(:|$)")  # no Python literal begins so, and results are printed as such
_CALL = re.compile(r"^(?P<id>.+)_parameters = (?P<arguments>[^\n]+)\n(?P=id)_response = (?P<name>[^(]+)")


def recognises(path: pathlib.Path) -> bool:
    """Whether `path` is the folder of a run, or the summary in it."""
    return (path / SUMMARY).is_file() if path.is_dir() else path.name == SUMMARY


def read(path: pathlib.Path, success: float = 1.0) -> Iterator[Trajectory]:
    """The scenarios of a run, in the order of its summary; one conversation is held at a time.

    The reward is the similarity. A group is a base scenario with all its variants. `metrics` has `turn_count`, as ToolSandbox counts.

    Args:
      success: the similarity from which on a scenario, and each of its milestones, is passed.

    Raises:
      InputError: a file that is missing, damaged, or of another form.
    """
    folder = path if path.is_dir() else path.parent
    data = _load(folder / SUMMARY)
    rows = data.get("per_scenario_results") if isinstance(data, dict) else None
    if not isinstance(rows, list) or not rows:
        raise InputError(f"{folder / SUMMARY}: field 'per_scenario_results' is missing or empty; give the folder of a ToolSandbox run")
    agent = re.fullmatch(r"agent_(.+)_user_.*", folder.name)
    seen: set[str] = set()
    for i, row in enumerate(rows):
        where = f"{folder / SUMMARY}: per_scenario_results[{i}]"
        try:
            trajectory = _trajectory(row, folder, agent[1] if agent else "", success, where)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, SyntaxError) as error:
            # a field of another type or a part that is missing deep inside; what can be named better was named before
            why = f"{type(error).__name__}: {error}".replace("\n", " ")
            raise InputError(f"{where}: not in the form that ToolSandbox writes ({why}); run the scenario again") from error
        if trajectory.task_id in seen:
            raise InputError(f"{where}: scenario {trajectory.task_id!r} is in the file twice; a run plays each scenario once")
        seen.add(trajectory.task_id)
        yield trajectory


def outage(exception_type: str, traceback: str) -> bool:
    """Whether an exception that ended a scenario is of the infrastructure or of the user simulator, not the agent's failure."""
    return exception_type in OUTAGES or _SIMULATOR.search(traceback) is not None


def messages_of(conversation: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a `conversation.json` in the form of a trajectory; a result that is an exception is marked `error`."""
    messages = []
    for m in conversation:
        message = {"role": m["role"], "content": m.get("content") or ""}
        if m.get("tool_calls"):
            calls = [(c["id"], c["function"]) for c in m["tool_calls"]]
            message["tool_calls"] = [{"id": i, "name": f["name"], "arguments": json.loads(f["arguments"])} for i, f in calls]
        if m["role"] == "tool":
            message["tool_call_id"] = m["tool_call_id"]
            message |= {"error": True} if _TOOL_ERROR.match(message["content"].rpartition("\n")[2]) else {}
        messages.append(message)
    return messages


def _trajectory(row: Mapping[str, Any], folder: pathlib.Path, agent: str, success: float, where: str) -> Trajectory:
    name, exception = row["name"], row["exception_type"]
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name:
        raise InputError(f"{where}.name: {name!r} is no name of a scenario")
    files = folder / "trajectories" / name
    common = dict(
        id=f"{name}#0",
        environment="toolsandbox",
        task_id=name,
        split=splits.split_of(name),
        group=splits.parts(name)[0],
        policy={"name": agent, "version": 0},
        metrics={"turn_count": float(row["turn_count"])},
    )
    if exception:
        traceback = str(row.get("traceback") or "")
        said = redact(traceback.strip().rpartition("\n")[2])[:500]
        context = files / "execution_context.json"
        messages = _messages_of_context(_load(context)["_dbs"]["SANDBOX"]) if context.is_file() else []
        if outage(exception, traceback):
            error = {"kind": exception, "message": said or "ToolSandbox recorded no traceback"}
            return Trajectory(**common, messages=messages, stop_reason=StopReason.ENVIRONMENT_ERROR, error=error)
        row = {**row, "exception": said.removeprefix(f"{exception}: ")}
        conversation, stop = [], StopReason.INVALID_ACTION
    else:
        conversation = _load(files / "conversation.json")
        messages = messages_of(conversation)
        # the user ends a conversation after words of the agent; anything else was cut off
        stop = StopReason.DONE if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1] else StopReason.MAX_TURNS
    reward = _similarity(row["similarity"], where)
    return Trajectory(
        **common,
        messages=messages,
        reward=reward,
        success=reward >= success - TOLERANCE,
        stop_reason=stop,
        checks=checks(row, conversation, messages, success - TOLERANCE),
    )


def _messages_of_context(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the agent had seen and said, from the database of messages; examples for the user simulator are not the agent's."""
    messages: list[dict[str, Any]] = []
    for row in rows:
        if "AGENT" not in (row["sender"], row["recipient"]) or row.get("visible_to") == ["USER"]:
            continue
        if (row["sender"], row["recipient"]) == ("AGENT", "EXECUTION_ENVIRONMENT"):
            call = _CALL.match(row["content"])
            name = row.get("openai_function_name") or call["name"]
            if "tool_calls" not in messages[-1]:
                messages.append({"role": "assistant", "content": "", "tool_calls": []})
            arguments = ast.literal_eval(call["arguments"])
            messages[-1]["tool_calls"].append({"id": call["id"], "name": name, "arguments": arguments})
        elif row["sender"] == "EXECUTION_ENVIRONMENT":
            flag = {"error": True} if row.get("tool_call_exception") else {}
            messages.append({"role": "tool", "content": row["content"], "tool_call_id": row["openai_tool_call_id"], **flag})
        else:
            role = {"SYSTEM": "system", "USER": "user", "AGENT": "assistant"}[row["sender"]]
            messages.append({"role": role, "content": row["content"]})
    return messages


def _similarity(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -TOLERANCE <= value <= 1 + TOLERANCE:
        raise InputError(f"{where}.similarity: {value!r} is not a number in [0, 1]")
    return min(max(float(value), 0.0), 1.0)


def _load(file: pathlib.Path) -> Any:
    try:
        if file.stat().st_size > _LARGEST:
            raise InputError(
                f"{file}: has more than {_LARGEST >> 20} MiB, which no file of a ToolSandbox run has; give the run's own folder"
            )
        return json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}: not valid JSON at line {error.lineno}, column {error.colno}; the file is cut short or damaged, copy it again"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text at byte {error.start}; copy it again") from None
    except FileNotFoundError:
        raise InputError(f"{file}: no such file; copy the whole folder of the run, trajectories included") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
