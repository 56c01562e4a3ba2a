"""Players that need no model, for harnesses: what doing nothing earns, and whether a benchmark's own solutions earn everything."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from envs.arguments import sample_value
from envs.base import Ask, EnvironmentFault, Verdict
from envs.harness.host import HarnessPool
from envs.harness.target import Target, TaskInfo


def play(
    pool: HarnessPool,
    target: Target,
    tasks: Sequence[TaskInfo],
    agent: Callable[[TaskInfo, Ask], dict[str, Any]],
    *,
    greeting: str = "Hello.",
    at_once: int = 32,
) -> list[Verdict | EnvironmentFault]:
    """The verdicts of tasks that a scripted agent plays; the user says `greeting`, and farewell in its next turn.

    An episode ends where the target's `max_turns` are used up, as it does for any agent.

    Args:
      agent: the turn for a task and what it is asked.
    """
    target, verdicts = target.scripted(), []
    for start in range(0, len(tasks), at_once):
        chunk = tasks[start : start + at_once]
        episodes = [pool.open(target, task.number) for task in chunk]
        greeted: set[int] = set()
        turns: collections.Counter[int] = collections.Counter()
        acts: dict[int, tuple[str, tuple]] = dict.fromkeys(range(len(chunk)), ("reset", ()))
        found: dict[int, Verdict | EnvironmentFault] = {}
        while acts:
            answers = pool.batch([(episodes[index], *act) for index, act in acts.items()])
            following: dict[int, tuple[str, tuple]] = {}
            for index, answer in zip(acts, answers, strict=True):
                if not isinstance(answer, Ask):
                    found[index] = answer
                elif answer.done or turns[index] == target.max_turns:
                    following[index] = "score", ()
                elif answer.speaker == "agent":
                    turns[index] += 1
                    following[index] = "turn", (agent(chunk[index], answer),)
                else:
                    text = target.farewell if index in greeted else greeting
                    greeted.add(index)
                    following[index] = "turn", ({"role": "assistant", "content": text, "tool_calls": []},)
            acts = following
        verdicts += [found[index] for index in range(len(chunk))]
    return verdicts


def call_each_tool(target: Target) -> Callable[[TaskInfo, Ask], dict[str, Any]]:
    """An agent for one episode: its first turn calls every tool of the target with values of the right types, its next ones give up.

    What it is asked after the calls has to hold one answer to each; else it raises EnvironmentFault, kind `reply`.
    """
    calls = []
    for place, function in enumerate(tool["function"] for tool in target.tools):
        arguments = sample_value({"type": "object", **function["parameters"]}, random.Random(place))
        calls.append({"id": f"call_{place}", "name": function["name"], "arguments": arguments})
    turns, unanswered = iter([calls]), iter([calls])

    def agent(_: TaskInfo, ask: Ask) -> dict[str, Any]:
        for made in turns:
            return {"role": "assistant", "content": "", "tool_calls": made}
        answered = [message.get("tool_call_id") for message in ask.messages if message["role"] == "tool"]
        for call in next(unanswered, []):
            if (count := answered.count(call["id"])) != 1:
                called = f"{call['name']}({json.dumps(call['arguments'])}), whose id was {call['id']!r}"
                told = f"speak was given {count} answers to the call {called}; the ids of its tool messages are {answered}"
                raise EnvironmentFault("reply", f'{told}; give one {{"role": "tool", "content", "tool_call_id"}} for each call of a turn')
        return target.do_nothing(ask)

    return agent
