"""Episodes of one package, one after the other, as steps of text: what the adapters share.

A step is one action of the agent: a tool call, written as JSON `{"name": ..., "arguments": {...}}`, or anything else, which is said to the
scripted user. The reward comes with the last step, which ends the episode or uses up the package's `max_turns`.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from envs.base import Check, Start
from envs.package import Package
from envs.sandbox import Episode, Pool


class Step(NamedTuple):
    """What one action led to. `reward` and `checks` are given when the episode ends, by itself (`done`) or by the limit (`truncated`)."""

    text: str
    done: bool
    truncated: bool
    reward: float | None
    checks: dict[str, Check]


def parse_action(text: str) -> dict[str, Any]:
    """`{"name", "arguments"}` if the text is such a call, else `{"text"}`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {"text": text}
    call = isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("arguments", {}), dict)
    return {"name": value["name"], "arguments": value.get("arguments", {})} if call else {"text": text}


class Session:
    """One agent's seat. Not for several threads at once; several sessions may share a pool."""

    def __init__(self, package: Package, pool: Pool, knobs: dict[str, Any] | None = None):
        self.package, self.pool, self.knobs = package, pool, knobs
        self.tools: list[dict[str, Any]] = pool.function(package, "tools")
        self.turns = 0
        self._episode: Episode | None = None

    def reset(self, seed: int, knobs: dict[str, Any] | None = None) -> Start:
        """Begins another episode.

        Raises:
          EnvironmentFault: the package failed.
          PackageError: a knob that it has not.
        """
        self.turns = 0
        self._episode = self.pool.open(self.package, seed, self.knobs if knobs is None else knobs)
        return self._episode.reset()

    def step(self, action: dict[str, Any]) -> Step:
        """Performs `{"name", "arguments"}` or `{"text"}`.

        Raises:
          EnvironmentFault: the package failed; the episode has no reward.
          ValueError: there is no episode, or it is over.
        """
        if self._episode is None or self._episode.done() or self.turns >= self.package.max_turns:
            raise ValueError(f"the episode of {self.package.name} is over or has not begun; call reset first")
        self.turns += 1
        if "text" in action:
            reply = self._episode.respond(action["text"])
        else:
            reply = self._episode.call(action["name"], action["arguments"])
        truncated = not reply.done and self.turns >= self.package.max_turns
        if not (reply.done or truncated):
            return Step(reply.text or "", False, False, None, {})
        score = self._episode.score()
        return Step(reply.text or "", reply.done, truncated, score.reward, score.checks)

    def score(self) -> float:
        """The reward of what was done so far."""
        if self._episode is None:
            raise ValueError(f"no episode of {self.package.name} has begun; call reset first")
        return self._episode.score().reward
