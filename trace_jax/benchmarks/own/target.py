"""A benchmark of the user's own as a target: a driver that the user wrote, and what it may get wrong, said before any weight loads.

The driver's two functions are those of every driver (`envs.harness.worker`). `describe` says what here is checked field by field, and then
an agent that does nothing plays one task, and one that calls each tool, so that what only an episode shows is seen in seconds too.
"""

from __future__ import annotations

import copy
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from envs import EnvironmentFault
from envs.arguments import check_schema
from envs.harness import HarnessPool, Program, Target
from envs.harness.players import call_each_tool, play
from envs.sandbox.replies import parse_function
from rl.trajectory import ENDS
from trace_jax.benchmarks.own.checks import Misshapen, parse_checks
from trace_jax.config import Config
from trace_jax.config.fields import nearest
from trace_jax.errors import InputError

SPLITS = ("train", "heldout")
_OPTIONAL = {"tools": list, "system": str, "max_turns": int, "user": bool, "farewell": str}
_FIELDS = {"name": str, "version": str, "tasks": list} | _OPTIONAL
_WORDS = {str: "a text", list: "a list", int: "a whole number", bool: "true or false", dict: "an object"}
_NOT_ITS_OWN = ("reply", "exception", "crash", "deadline")  # faults of a driver; what it calls by another kind let it down


class OwnTarget(Target):
    """What a driver describes: {"name", "version", "tasks"} and what else `_FIELDS` has. A task is {"id", "split", "hash", ...}."""

    splits = SPLITS

    def __init__(self, program: Program, description: Mapping[str, Any], max_turns: int):
        """
        Args:
          max_turns: turns of the agent, where the driver does not say fewer.

        Raises:
          Misshapen: the description is of another form; the message begins with the field.
        """
        _check(description)
        version = description["version"]
        tasks = [_completed(task, version) for task in description["tasks"]]
        most = min(max_turns, description.get("max_turns", max_turns))
        super().__init__(description["name"], program, {**description, "tasks": tasks}, most)
        self.target, self.grader = self.name, f"{self.name} {version}"
        self.speaks_user = description.get("user", False)
        self.farewell = description.get("farewell", Target.farewell)

    def scripted(self) -> Target:
        """Its user asks the host anyway, if there is one."""
        return copy.copy(self)

    def checks(self, task_id: str, graded: Any, messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """`graded["checks"]`; none of an episode that was ended before it was judged.

        Raises:
          EnvironmentFault: they are of another form.
        """
        if graded is None:
            return {}
        try:
            if not isinstance(graded, dict):
                raise Misshapen(f'{graded!r} must be {{"checks": object}} or null')
            return parse_checks(graded.get("checks", {}))
        except Misshapen as why:
            raise EnvironmentFault("reply", f"{self.program.driver}: run_episode of task {task_id!r}: graded: {why}") from None


def make_targets(config: Config, pool: HarnessPool) -> tuple[Target, ...]:
    """The target of `benchmark.driver`.

    Raises:
      InputError: there is no such file, or what it does is not what a driver does.
    """
    section = config.benchmark
    driver = pathlib.Path(section.driver).expanduser().absolute()
    if not driver.is_file():
        raise InputError(f"config field 'benchmark.driver': {driver}: no such file; give a Python file with describe and run_episode")
    program = Program(driver, dict(section.settings), section.python, section.variables)
    doing = "describe"
    try:
        target = OwnTarget(program, pool.describe(program), section.max_steps)
        task = target.tasks("train")[0]
        agents = {"does nothing": lambda _, ask: target.do_nothing(ask)}
        if target.tools:
            agents["calls each tool once"] = call_each_tool(target)
        for does, agent in agents.items():
            doing = f"run_episode of task {task.id!r}, tried with an agent that {does}"
            (verdict,) = play(pool, target, [task], agent)
            if isinstance(verdict, EnvironmentFault):
                if verdict.kind in _NOT_ITS_OWN:
                    raise verdict
            else:
                target.checks(task.id, verdict.graded, [])
                if verdict.stop_reason not in ("", *ENDS):  # "": it was stopped, and gave no verdict
                    raise EnvironmentFault("reply", f"stop_reason = {verdict.stop_reason!r} must be one of {', '.join(ENDS)}")
    except Misshapen as why:
        raise InputError(f"{driver}: describe: {why}") from None
    except EnvironmentFault as fault:
        raise InputError(f"{driver}: {doing}: {fault}{_fix(fault, section.timeout)}") from fault
    if target.speaks_user and config.rollout.engine == "sgl_jax":
        raise InputError(f"{driver}: describe: user: true needs base and adapter side by side: rollout.engine = 'jax' or 'sglang'")
    return (target,)


def _fix(fault: EnvironmentFault, timeout: float) -> str:
    if "ModuleNotFoundError" in str(fault):
        return "; install it, put it beside the driver, or name the Python that has it in benchmark.python"
    if fault.kind == "deadline":
        return f"; see where it hangs, or allow more than benchmark.timeout = {timeout:g}"
    return ""


def _check(description: Mapping[str, Any]) -> None:
    """Raises Misshapen at the first field that is wrong."""
    for field in sorted(description.keys() - _FIELDS.keys()):
        raise Misshapen(f"unknown field {field!r}{nearest(field, list(_FIELDS))}; the fields are {', '.join(_FIELDS)}")
    for field, kind in _FIELDS.items():
        if field not in description:
            if field not in _OPTIONAL:
                raise Misshapen(f"field {field!r} is missing; it is {_WORDS[kind]}")
        elif not isinstance(value := description[field], kind) or isinstance(value, bool) != (kind is bool):
            raise Misshapen(f"{field} = {value!r} must be {_WORDS[kind]}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", description["name"]):
        raise Misshapen(f"name = {description['name']!r} must be snake_case, since packages name it as their target")
    if description.get("max_turns", 1) < 1:
        raise Misshapen(f"max_turns = {description['max_turns']} must be at least 1")
    try:
        for tool in parse_function("tools", description.get("tools", [])):
            check_schema(tool["function"]["parameters"])
    except EnvironmentFault as fault:
        raise Misshapen(f"tools: {fault}") from None
    _check_tasks(description["tasks"])


def _check_tasks(tasks: list[Any]) -> None:
    ids: set[str] = set()
    for place, task in enumerate(tasks):
        if not isinstance(task, dict) or not isinstance(task.get("id"), str) or not task["id"]:
            raise Misshapen(f'tasks[{place}]: must be {{"id": text}}, and may have "split", "hash" and what else the driver needs')
        if task["id"] in ids:
            raise Misshapen(f"tasks[{place}]: id {task['id']!r} is there twice; every task needs its own")
        ids.add(task["id"])
        if ("split" in task) != ("split" in tasks[0]):
            raise Misshapen(f"tasks[{place}]: give all tasks a split, or none")
        if task.get("split", "train") not in SPLITS:
            raise Misshapen(f"tasks[{place}]: split = {task['split']!r} must be 'train' or 'heldout'")
    for split in SPLITS:
        if not any(_split_of(task) == split for task in tasks):
            fix = '"split": "train" or "heldout"' if any("split" in task for task in tasks) else "a split, or give more tasks"
            raise Misshapen(f"tasks: none of {len(tasks)} is of the split {split}; give some {fix}")


def _split_of(task: Mapping[str, Any]) -> str:
    """The task's own, or by the hash of its id: half of them each, and no task moves when others are added."""
    return task.get("split") or SPLITS[hashlib.sha256(task["id"].encode()).digest()[0] % 2]


def _completed(task: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The task with its split, and with a hash of what is said of it where the driver gives none."""
    said = json.dumps([version, dict(task)], sort_keys=True)
    return {"split": _split_of(task), "hash": hashlib.sha256(said.encode()).hexdigest(), **task}
