"""A package as an OpenEnv server, for every trainer that speaks OpenEnv (and for verifiers, through its taskset `openenv`).

    uvicorn.run(make_app(load_builtin("desk"), pool), port=8000)

Each session is an episode of its own; all share the pool. `reset(seed=7, knobs={...})` begins one, the observation holds what the agent
sees first and the tools. A step takes `{"message": text}`, where the text is a call in JSON or something to say, or a call as it is, or
the steps `list_tools` and `call_tool` of OpenEnv. The reward comes with the last step; checks are in its metadata. There is no MCP endpoint
(`MCPToolClient`): it would go past the rewards.
"""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any, Literal

from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_types import CallToolObservation, ListToolsObservation, Tool
from pydantic import Field, model_validator

from envs.adapters.session import Session, Step, parse_action
from envs.package import Package
from envs.sandbox import Pool


class AgentAction(Action):
    """One turn of the agent."""

    message: str = Field(description='A tool call as JSON, {"name": ..., "arguments": {...}}, or a text for the user.')
    type: Literal["message", "list_tools", "call_tool"] = "message"

    @model_validator(mode="before")
    @classmethod
    def _in_other_words(cls, value: Any) -> Any:
        """`{"name", "arguments"}`, `{"text"}` and what OpenEnv's own clients send are taken as well."""
        if not isinstance(value, dict) or "message" in value:
            return value
        name = value.get("tool_name") or value.get("name")
        if name is not None:
            message = json.dumps({"name": name, "arguments": value.get("arguments", {})})
        else:
            message = value.get("text", "" if value.get("type") == "list_tools" else None)
        return {"message": message, "type": value.get("type", "message")}


class AgentObservation(Observation):
    """What the agent sees. `system`, `messages` and `available_tools` come with the reset, `text` with every step."""

    text: str = ""
    system: str = ""
    messages: list[dict[str, Any]] = Field(default_factory=list)
    available_tools: list[dict[str, Any]] = Field(default_factory=list)


class PackageEnvironment(Environment[AgentAction, Observation, State]):
    """A session of the server."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, package: Package, pool: Pool):
        super().__init__()
        self._session = Session(package, pool)
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, knobs: dict[str, Any] | None = None) -> AgentObservation:
        """Without a seed, one is drawn."""
        seed = random.SystemRandom().randrange(2**31) if seed is None else seed
        start = self._session.reset(seed, knobs)
        self._state = State(episode_id=episode_id or f"{self._session.package.name}-{seed}", step_count=0)
        return AgentObservation(system=start.system, messages=start.messages, available_tools=self._session.tools, metadata={"seed": seed})

    def step(self, action: AgentAction, timeout_s: float | None = None, **_: Any) -> Observation:
        """`timeout_s` is not used: the pool has a deadline of its own."""
        if action.type == "list_tools":
            functions = [tool["function"] for tool in self._session.tools]
            tools = [Tool(name=f["name"], description=f.get("description", ""), input_schema=f["parameters"]) for f in functions]
            return ListToolsObservation(tools=tools)
        asked = parse_action(action.message)
        step = self._session.step(asked)
        if action.type == "call_tool":
            return CallToolObservation(tool_name=asked["name"], result=step.text, **self._end(step))
        return AgentObservation(text=step.text, **self._end(step))

    def _end(self, step: Step) -> dict[str, Any]:
        self._state.step_count += 1
        over = step.done or step.truncated
        checks = {name: dataclasses.asdict(check) for name, check in step.checks.items()}
        metadata = {"checks": checks, "truncated": step.truncated} if over else {}
        return {"done": over, "reward": step.reward, "metadata": metadata}

    @property
    def state(self) -> State:
        return self._state


def make_app(package: Package, pool: Pool, sessions: int = 256) -> Any:
    """The ASGI application; it lives as long as the pool.

    Args:
      sessions: how many episodes may be played at the same time.

    Raises:
      EnvironmentFault: the package does not run.
    """
    # here, so that no worker belongs to the thread of a session, with which it would end
    pool.functions(package, "tools", [()] * pool.workers)
    return create_app(
        lambda: PackageEnvironment(package, pool), AgentAction, AgentObservation, env_name=package.name, max_concurrent_envs=sessions
    )
