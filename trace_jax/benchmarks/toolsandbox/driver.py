"""ToolSandbox plays its scenarios here, in a process with its own Python; the turns come from elsewhere.

This file imports ToolSandbox and the standard library only, in the Python of its environment (3.9 and later). The roles are the
benchmark's own: the agent and the user simulator are its OpenAI roles with the completion replaced, the execution environment and the
grader are as they are. Nothing is written to disk.

What a process shares is ToolSandbox's one global execution context. An episode therefore holds a lock while the benchmark computes. It
gives the lock up while it waits for a turn, and puts its own context back when it goes on, so that the episodes of one process wait for
their turns side by side; several processes compute side by side.

Scenarios carry times relative to the moment at which they were built ("an hour ago", "tomorrow"), so they are built again when they
are an hour old and on a new day. Once they are built nothing is drawn at random: `seed` has no effect.
"""

import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import pathlib
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

os.environ["TQDM_DISABLE"] = "1"

import openai  # noqa: E402
import tool_sandbox  # noqa: E402
from tool_sandbox.common.evaluation import EvaluationResult  # noqa: E402
from tool_sandbox.common.execution_context import DatabaseNamespace, RoleType, get_current_context, set_current_context  # noqa: E402
from tool_sandbox.common.message_conversion import serialize_to_conversation  # noqa: E402
from tool_sandbox.common.tool_discovery import ToolBackend  # noqa: E402
from tool_sandbox.roles.execution_environment import ExecutionEnvironment  # noqa: E402
from tool_sandbox.roles.openai_api_agent import OpenAIAPIAgent  # noqa: E402
from tool_sandbox.roles.openai_api_user import OpenAIAPIUser  # noqa: E402
from tool_sandbox.scenarios import named_scenarios  # noqa: E402

Message = dict[str, Any]
Speak = Callable[[str, str, list[Message], list[dict[str, Any]]], Message]

_SEED = 42  # ToolSandbox's own for the order of tools
_OLDEST = 3600.0  # seconds that scenarios are used
_PARALLEL_CALLS = 5  # ToolSandbox tries parallel calls in every order: 120 runs for five of them
_TIMEOUT = 120.0  # seconds for one answer of a user simulator's endpoint
_FAREWELL = "###STOP###"  # by which a scripted user ends a conversation, which takes a call
_LOCK = threading.Lock()
_built: tuple[dict[str, Any], float, datetime.date] = ({}, 0.0, datetime.date.min)


class Outage(Exception):
    """The episode ended for a reason that is not the agent's: user simulator, endpoint, or a turn that breaks the contract."""

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def describe(settings: dict[str, Any]) -> dict[str, Any]:
    """The version and the tasks: `{"id", "split", "hash", "categories", "tools", "milestones", "minefields"}`, of all variants.

    Splits are the host's business and left empty. A hash is over the sources of the benchmark and the scenario's own tools: the
    definitions are code, whose values change with the day.
    """
    with _LOCK:
        scenarios = _scenarios()
    sources = _sources()
    tasks = []
    for name, scenario in scenarios.items():
        context = scenario.starting_context
        tools, scrambled = sorted(context.tool_allow_list), sorted(str(x) for x in context.tool_augmentation_list)
        tasks.append(
            {
                "id": name,
                "split": "",
                "hash": hashlib.sha256(json.dumps([sources, name, tools, scrambled]).encode()).hexdigest(),
                "categories": [str(c) for c in scenario.categories],
                "tools": tools,
                "milestones": len(scenario.evaluation.milestone_matcher.milestones),
                "minefields": len(scenario.evaluation.minefield_matcher.milestones),
            }
        )
    return {"version": f"{importlib.metadata.version('tool_sandbox')}+{sources[:12]}", "tasks": tasks}


def run_episode(settings: dict[str, Any], task_id: str, seed: int, speak: Speak) -> dict[str, Any]:
    """Plays and grades one scenario.

    An exception that the agent causes (a tool that does not exist, for one) ends the scenario with similarity 0, as ToolSandbox scores
    it. An outage gives reward None. `speak.Stopped` goes through to the caller.

    Args:
      settings: "user" is "base", for turns from `speak`, or "endpoint": then "user_model" at "user_temperature", its address and key in
        the environment variables OPENAI_BASE_URL and OPENAI_API_KEY.

    Returns:
      "graded": what ToolSandbox writes of a scenario to its `result_summary.json`, and its "conversation" without the databases.
    """
    with _LOCK:
        scenario = _scenarios().get(task_id)
        if scenario is None:
            raise KeyError(f"ToolSandbox has no scenario {task_id!r}")
        user = _EndpointUser(settings) if settings.get("user") == "endpoint" else _User(speak)
        roles = {RoleType.USER: user, RoleType.EXECUTION_ENVIRONMENT: ExecutionEnvironment(), RoleType.AGENT: _Agent(speak)}
        verdict: dict[str, Any] = {"name": task_id, "categories": [str(c) for c in scenario.categories]}
        try:
            context = scenario.play(roles=roles, scenario_name=task_id)
            graded = scenario.evaluation.evaluate(execution_context=context, max_turn_count=scenario.max_messages)
            exception = None
        except Outage as outage:
            return _result(verdict, None, "environment_error", {"kind": outage.kind, "message": str(outage)})
        except Exception as error:  # whatever the agent's turn made the benchmark raise is the agent's failure
            context, graded, exception = get_current_context(), _zero(scenario), error
        conversation = serialize_to_conversation(
            execution_context=context,
            evaluation_result=graded,
            milestones=scenario.evaluation.milestone_matcher.milestones,
            minefields=scenario.evaluation.minefield_matcher.milestones,
        )
        active = bool(context.get_database(DatabaseNamespace.SANDBOX)["conversation_active"][-1])
    verdict["exception_type"] = None if exception is None else type(exception).__name__
    verdict["exception"] = None if exception is None else str(exception)[:500]
    verdict["turn_count"] = graded.turn_count
    for kind in ("similarity", "milestone_similarity", "minefield_similarity"):
        verdict[kind] = float(getattr(graded, kind))
    for kind in ("milestone_mapping", "minefield_mapping"):
        verdict[kind] = {str(i): [int(snapshot), float(score)] for i, (snapshot, score) in getattr(graded, kind).items()}
    verdict["conversation"] = [_without_databases(m) for m in conversation]
    ended = "max_turns" if active else "done"
    return _result(verdict, verdict["similarity"], ended if exception is None else "invalid_action", None)


def _zero(scenario: Any) -> EvaluationResult:
    """The verdict over an exception: no milestone reached. All are put beside the last message, so that their definitions are known."""
    last = get_current_context().max_sandbox_message_index
    unmatched = {i: (last, 0.0) for i in range(len(scenario.evaluation.milestone_matcher.milestones))}
    return EvaluationResult(milestone_mapping=unmatched, turn_count=scenario.max_messages)


def _result(verdict: dict[str, Any], reward: Any, stop_reason: str, error: Any) -> dict[str, Any]:
    return {"reward": reward, "stop_reason": stop_reason, "graded": verdict, "error": error}


def _without_databases(message: Message) -> Message:
    return {k: {n: v for n, v in m.items() if n != "database_update"} if k.endswith("_details") else m for k, m in message.items()}


# --- the scenarios ----------------------------------------


def _scenarios() -> dict[str, Any]:
    """All scenarios by name; call it with the lock held."""
    global _built
    scenarios, built, day = _built
    if not scenarios or time.monotonic() - built > _OLDEST or day != datetime.date.today():
        state = random.getstate()
        random.seed(_SEED)
        _built = scenarios, _, _ = named_scenarios(preferred_tool_backend=ToolBackend.DEFAULT), time.monotonic(), datetime.date.today()
        random.setstate(state)
    return scenarios


def _sources() -> str:
    """The digest of the benchmark's own code."""
    folder = pathlib.Path(tool_sandbox.__file__).parent
    files = sorted(folder.rglob("*.py"))
    return hashlib.sha256(b"".join(f.relative_to(folder).as_posix().encode() + f.read_bytes() for f in files)).hexdigest()


# --- the roles ----------------------------------------


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Lets other episodes of this process compute while this one waits for a turn."""
    context = get_current_context()
    _LOCK.release()
    try:
        yield
    finally:
        _LOCK.acquire()
        set_current_context(context)


class _Spoken:
    """What both roles have in common: their completion is a turn that the host samples."""

    def __init__(self, speak: Speak):
        self._speak = speak
        self._known = 0  # messages that the speaker has seen or said
        self._call = ""  # its last tool call

    def model_inference(self, openai_messages: list[Message], openai_tools: Any) -> Any:
        """One turn, in the form of OpenAI's client.

        The user simulator has two system messages: an example comes before its task. The second becomes a user message, where it stands;
        chat templates take one system message.
        """
        messages = [_plain(m) for m in openai_messages]
        system = openai_messages[0]["content"] if openai_messages[0]["role"] == "system" else ""
        new = messages[self._known or (1 if system else 0) :]
        if not new:  # the user's own call failed, which its conversation does not show
            new = [{"role": "tool", "content": self.get_messages()[-1].content, "tool_call_id": self._call}]
        self._known = len(messages) + 1
        with _elsewhere():
            turn = self._speak(self.speaker, system, new, openai_tools or [])
        calls = turn.get("tool_calls") or []
        if self.speaker == "user" and turn.get("content") == _FAREWELL:
            calls = [{"id": "call_farewell", "name": "end_conversation", "arguments": {}}]
        for call in calls:
            if not call["id"].isidentifier():  # it becomes part of a Python name
                raise Outage("protocol", f"the id of a tool call is no identifier: {call['id']!r}")
            self._call = call["id"]
        if len(calls) > _PARALLEL_CALLS:
            raise ValueError(f"{len(calls)} parallel calls; ToolSandbox runs them in every order, so {_PARALLEL_CALLS} at most")
        spoken = [
            types.SimpleNamespace(
                id=call["id"], function=types.SimpleNamespace(name=call["name"], arguments=json.dumps(call["arguments"], allow_nan=False))
            )
            for call in calls
        ]
        message = types.SimpleNamespace(content=turn.get("content") or "", tool_calls=spoken or None)
        return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)])


def _plain(message: Message) -> Message:
    """An OpenAI message with `tool_calls` as `{"id", "name", "arguments": dict}`, and a tool's result without the tool's name."""
    plain = {k: message[k] for k in ("role", "content", "tool_call_id") if k in message}
    plain["role"] = "user" if plain["role"] == "system" else plain["role"]
    if message.get("tool_calls"):
        calls = [(c["id"], c["function"]) for c in message["tool_calls"]]
        plain["tool_calls"] = [{"id": i, "name": f["name"], "arguments": json.loads(f["arguments"])} for i, f in calls]
    return plain


class _Agent(_Spoken, OpenAIAPIAgent):
    speaker = "agent"


class _FaultlessUser(OpenAIAPIUser):
    """A user simulator whose own faults are not the agent's."""

    def respond(self, ending_index: Any = None) -> None:
        try:
            super().respond(ending_index)
        except Outage:
            raise
        except Exception as error:  # of its endpoint, or a turn that ToolSandbox does not take
            status = getattr(error, "status_code", None)  # the text of an endpoint's error may hold a key
            raise Outage("user_simulator", type(error).__name__ + (f" (HTTP {status})" if status else "")) from None


class _User(_Spoken, _FaultlessUser):
    speaker = "user"


class _EndpointUser(_FaultlessUser):
    """The user simulator behind an OpenAI-compatible endpoint, asked while other episodes of this process go on."""

    def __init__(self, settings: dict[str, Any]):
        self.model_name, self._temperature = settings["user_model"], settings["user_temperature"]
        address, key = os.environ.get("OPENAI_BASE_URL"), os.environ.get("OPENAI_API_KEY", "none")
        self.openai_client = openai.OpenAI(base_url=address, api_key=key, timeout=_TIMEOUT)

    def model_inference(self, openai_messages: list[Message], openai_tools: Any) -> Any:
        with _elsewhere():
            return self.openai_client.chat.completions.create(
                model=self.model_name, messages=openai_messages, tools=openai_tools, temperature=self._temperature
            )
