"""A package as a `gymnasium.Env`: observations and actions are texts.

    from envs import Pool, load_package
    from envs.adapters import TextEnv
    from envs.builtin import load_builtin

    with Pool(sandbox="require") as pool:
        env = TextEnv(load_builtin("desk"), pool)  # load_package(DIR) for one of your own
        text, info = env.reset(seed=7)             # info: system, messages, tools, seed
        text, reward, terminated, truncated, info = env.step('{"name": "list_orders", "arguments": {}}')

An action is a tool call in JSON or a text for the scripted user, see `envs.adapters.session`. The reward is 0 until the episode ends.
"""

from __future__ import annotations

import dataclasses
import json
import string
from typing import Any

import gymnasium

from envs.adapters.session import Session, parse_action
from envs.base import Start
from envs.package import Package
from envs.sandbox import Pool
from envs.sandbox.replies import MAX_REPLY_BYTES

MAX_ACTION = 4096  # characters of a sampled action; longer ones are taken too


class Text(gymnasium.spaces.Text):
    """Texts of any characters: the space of gymnasium knows a fixed set of them only."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class TextEnv(gymnasium.Env[str, str]):
    """One seat at a package.

    Args:
      knobs: of all episodes; `reset(options={"knobs": {...}})` overrides them.
    """

    metadata = {"render_modes": []}

    def __init__(self, package: Package, pool: Pool, knobs: dict[str, Any] | None = None):
        self._session = Session(package, pool, knobs)
        self.observation_space = Text(MAX_REPLY_BYTES, min_length=0, charset=string.printable)
        self.action_space = Text(MAX_ACTION, min_length=0, charset=string.printable)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """`seed` is the task's; without one it is drawn. Raises EnvironmentFault and PackageError."""
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(2**31))
        start = self._session.reset(seed, (options or {}).get("knobs"))
        return describe(start, self._session.tools), {**dataclasses.asdict(start), "tools": self._session.tools, "seed": seed}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Raises EnvironmentFault, and ValueError after the end."""
        step = self._session.step(parse_action(action))
        checks = {name: dataclasses.asdict(check) for name, check in step.checks.items()}
        return step.text, step.reward or 0.0, step.done, step.truncated, {"checks": checks} if step.reward is not None else {}


def describe(start: Start, tools: list[dict[str, Any]]) -> str:
    """The first observation: policy, tools, conversation."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    spoken = "\n".join(f"{message['role']}: {message['content']}" for message in start.messages)
    return f"{start.system}\n\nTools:\n{functions}\n\n{spoken}"
