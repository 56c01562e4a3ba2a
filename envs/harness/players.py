"""Players that need no model, for harnesses: what doing nothing earns, and whether a benchmark's own solutions earn everything."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

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
