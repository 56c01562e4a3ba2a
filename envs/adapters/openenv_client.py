"""An OpenEnv server's environment as ours: a pool with the methods of `envs.Pool`, whose episodes are sessions of the server.

    pool = OpenEnvPool("http://localhost:8000")
    package = pool.package("echo", max_turns=8)
    rl.rollout.Rollout(engine, pool, chat, [Task(package, seed, ...)], policy)

A call becomes OpenEnv's `call_tool`, a text the one field that the server's action requires. What OpenEnv pays on the way is added up, and
`scale` makes a reward in [0, 1] of the sum. A server has neither an oracle nor hints, and its code runs where the server runs.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openenv.core.generic_client import GenericEnvClient

from envs.base import Check, EnvironmentFault, Reply, Score, Start
from envs.package import Package

TOLD = ("text", "message", "content", "result", "prompt", "observation")  # fields of an observation that are for the agent to read


class OpenEnvEpisode:
    """One session. Its methods raise EnvironmentFault, and the same one ever after, as those of `envs.Episode`."""

    def __init__(self, pool: OpenEnvPool, package: Package, seed: int, knobs: dict[str, Any]):
        self.package, self.seed, self.knobs, self.worker = package, seed, knobs, 0
        self.fault: EnvironmentFault | None = None
        self._pool, self._client = pool, GenericEnvClient(base_url=pool.base_url).sync()
        self._over, self._total, self._closed = False, 0.0, False

    def reset(self) -> Start:
        self._over, self._total = False, 0.0
        observation = self._ask(lambda: self._client.reset(seed=self.seed, **({"knobs": self.knobs} if self.knobs else {})))
        if observation.get("messages"):
            return Start(observation.get("system", ""), observation["messages"])
        return Start("", [{"role": "user", "content": told(observation)}])

    def call(self, name: str, arguments: dict[str, Any]) -> Reply:
        return self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})

    def respond(self, text: str) -> Reply:
        reply = self._step({self._pool.text_field: text})
        return reply._replace(text=reply.text or None) if reply.done else reply

    def done(self) -> bool:
        return self._over

    def score(self) -> Score:
        """The verdict, with which the session ends."""
        self.close()
        reward = self._pool.scale(self._total)
        if not 0 <= reward <= 1:
            why = f"score must give a reward from 0 to 1; got {reward!r}: give OpenEnvPool a scale for the rewards of this server"
            self.fault = self.fault or EnvironmentFault("reply", why)
        if self.fault is not None:
            raise self.fault
        return Score(float(reward), {"assertion:0": Check(reward == 1, 1.0, reward)})

    def close(self) -> None:
        if not self._closed:  # a server has so many sessions only
            self._closed = True
            self._client.close()

    def _step(self, action: dict[str, Any]) -> Reply:
        observation = self._ask(lambda: self._client.step(action))
        return Reply(told(observation), self._over)

    def _ask(self, request: Callable[[], Any]) -> dict[str, Any]:
        if self.fault is None:
            try:
                result = request()
            except (OSError, RuntimeError, TimeoutError) as error:  # what the client makes of lost connections and of errors of the server
                self.fault = EnvironmentFault("exception", f"OpenEnv at {self._pool.base_url}, seed {self.seed}: {error}")
        if self.fault is not None:
            raise self.fault
        self._over = bool(result.done)
        self._total += float(result.reward or 0.0)
        return result.observation


def told(observation: dict[str, Any]) -> str:
    """The text of an observation: its one field for reading, or all of it as JSON."""
    texts = [observation[key] for key in TOLD if isinstance(observation.get(key), str)]
    shown = {key: value for key, value in observation.items() if key not in ("metadata", "tool_name") and value not in ("", [], None)}
    return texts[0] if texts and len(shown) <= 1 else json.dumps(shown, ensure_ascii=False)


class OpenEnvPool(contextlib.AbstractContextManager):
    """Sessions of one OpenEnv server.

    Args:
      text_field: the field of the server's action that takes a text.
      scale: from the sum of an episode's rewards to [0, 1].
      threads: sessions that are asked at the same time.
    """

    workers = 1

    def __init__(self, base_url: str, text_field: str = "message", scale: Callable[[float], float] = float, threads: int = 16):
        self.base_url, self.text_field, self.scale = base_url, text_field, scale
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="openenv")
        self._episodes: weakref.WeakSet[OpenEnvEpisode] = weakref.WeakSet()

    def package(self, name: str, max_turns: int) -> Package:
        """What stands for the server's environment in tasks; it has no code of ours."""
        return Package(name, "", name, "openenv", {}, max_turns, f"served at {self.base_url}", source=self.base_url)

    def open(self, package: Package, seed: int, knobs: dict[str, Any] | None = None) -> OpenEnvEpisode:
        episode = OpenEnvEpisode(self, package, seed, dict(knobs or {}))
        self._episodes.add(episode)
        return episode

    def batch(self, requests: Sequence[tuple[OpenEnvEpisode, str, tuple]]) -> list[Start | Reply | Score | EnvironmentFault]:
        """As `envs.Pool.batch`; the requests of one episode follow each other."""
        answers: list[Any] = [None] * len(requests)

        def ask(asked: OpenEnvEpisode) -> None:
            for index, (episode, op, arguments) in enumerate(requests):
                if episode is asked:
                    try:
                        answers[index] = getattr(episode, op)(*arguments)
                    except EnvironmentFault as fault:
                        answers[index] = fault

        list(self._threads.map(ask, {id(episode): episode for episode, _, _ in requests}.values()))
        return answers

    def function(self, package: Package, name: str, *_: Any) -> Any:
        """The tools that the server lists. Raises EnvironmentFault for anything else: a server has no oracle."""
        if name != "tools":
            raise EnvironmentFault("exception", f"OpenEnv at {self.base_url} has no function {name}")
        episode = self.open(package, 0)
        listed = episode._ask(lambda: episode._client.step({"type": "list_tools"})).get("tools", [])
        episode.close()
        tools = [{"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]} for tool in listed]
        return [{"type": "function", "function": tool} for tool in tools]

    def close(self) -> None:
        for episode in list(self._episodes):
            episode.close()
        self._threads.shutdown()

    def __exit__(self, *_: Any) -> None:
        self.close()
