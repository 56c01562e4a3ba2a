"""Trajectories as a results file of tau2-bench: `Results.load` of every tau2 reads it, and `tau2 evaluate-trajs` grades it again.

What tau2 grades is its own record of a simulation, which has the user's calls too. A trajectory carries it in `record`, as
tau2's `SimulationRun` with the definition of its task under "task", when the target played it or when it was read with `records=True`. A
trajectory without one is written from its messages and checks, for which its task must be in a given results file; that cannot be done
where the user's side has tools of its own (telecom), since its calls are not among the agent's messages.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.agents.redaction import redact
from trace_jax.benchmarks.json_files import value
from trace_jax.benchmarks.tau2.results import called_by_agent, policy_of
from trace_jax.errors import InputError

# what every version of tau2 knows; the reader's table the other way round
_REASON = {StopReason.DONE: "user_stop", StopReason.MAX_TURNS: "max_steps", StopReason.INVALID_ACTION: "too_many_errors"}
_OTHERWISE = "agent_error"


@dataclasses.dataclass(frozen=True)
class Written:
    """Counts of what a file holds: simulations, and outages that were left out, for which tau2 has no grade."""

    simulations: int
    outages: int


def write_results(
    trajectories: Iterable[Trajectory],
    path: str | pathlib.Path,
    template: str | pathlib.Path | None = None,
    info: Mapping[str, Any] | None = None,
) -> Written:
    """Writes the trajectories of one domain, in order; the file appears as a whole.

    Args:
      template: a results file of tau2 whose tasks and info are taken; left out, they come from the records.
      info: fields of tau2's `Info` that are known otherwise, such as `max_steps`.

    Raises:
      InputError: trajectories of several domains or of another benchmark, a task that is not known, nothing to write.
    """
    path, given = pathlib.Path(path), list(trajectories)
    # where tau2 itself kept an episode that broke, it stays; our own outages have no record
    kept = [t for t in given if t.error is None or t.record is not None]
    if not kept:
        raise InputError(f"{path}: no trajectories to write, and {len(given)} outages")
    environments = sorted({t.environment for t in kept})
    if len(environments) > 1 or not environments[0].startswith("tau2/"):
        raise InputError(f"{path}: trajectories of {', '.join(environments)}; a results file of tau2-bench has one domain of it")
    tasks = _tasks(kept, template, path)
    for t in kept:
        if t.record is None and _of_kind(t, "user_action"):
            raise InputError(f"{path}: trajectory {t.id} lacks the calls that its user made; read its file with records, or roll out again")
    simulations = [_simulation(t, tasks[_task_id(t)]) for t in kept]
    described = (value(pathlib.Path(template), "info") or {}) if template else {}
    data = {
        "timestamp": _now(),
        "info": _info(kept, described) | dict(info or {}),
        "tasks": list(tasks.values()),
        "simulations": simulations,
    }
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
    return Written(len(kept), len(given) - len(kept))


def _tasks(kept: list[Trajectory], template: str | pathlib.Path | None, path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The definitions of the tasks that occur, by id, in the order of the template or of their first trajectories."""
    used = {_task_id(t) for t in kept}
    listed = (value(pathlib.Path(template), "tasks") or []) if template else []
    tasks = {str(task["id"]): task for task in listed if str(task["id"]) in used}
    for t in kept:
        if (task_id := _task_id(t)) not in tasks:
            if not (t.record or {}).get("task"):
                raise InputError(f"{path}: task {task_id!r} is not known; give a results file of tau2 that has it, or roll out again")
            tasks[task_id] = t.record["task"]
    return tasks


def _task_id(t: Trajectory) -> str:
    """tau2's own name of the task; a target calls it "airline:2"."""
    return (t.record or {}).get("task_id", t.task_id)


def _info(kept: list[Trajectory], described: Mapping[str, Any]) -> dict[str, Any]:
    """tau2's `Info`. Of a given one only what is named here is taken: models' and other settings may hold keys."""
    first = kept[0]
    user, agent, environment = (described.get(f"{part}_info") or {} for part in ("user", "agent", "environment"))
    return {
        "git_commit": described.get("git_commit") or "unknown",
        "num_trials": len({t.trial for t in kept}),
        "max_steps": described.get("max_steps") or 0,  # 0: not known
        "max_errors": described.get("max_errors") or 0,
        "user_info": {
            "implementation": user.get("implementation") or "user_simulator",
            "llm": redact(str(user.get("llm") or "")) or None,
            "llm_args": None,
            "global_simulation_guidelines": user.get("global_simulation_guidelines"),
        },
        "agent_info": {
            "implementation": agent.get("implementation") or "trace-jax",  # tau2 grades its solo agents in another way
            "llm": first.policy["name"],
            "llm_args": None,
        },
        "environment_info": {
            "domain_name": first.environment.removeprefix("tau2/"),
            "policy": environment.get("policy") or policy_of(first.messages),
            "tool_defs": None,
        },
        "seed": described.get("seed"),
    }


def _simulation(t: Trajectory, task: Mapping[str, Any]) -> dict[str, Any]:
    """tau2's `SimulationRun`."""
    if t.record is not None:
        return {key: field for key, field in t.record.items() if key != "task"} | {"trial": t.trial}
    messages = [_message(m, turn) for turn, m in enumerate(m for m in t.messages if m["role"] != "system")]
    name = json.dumps([t.environment, t.policy, t.id])
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
        "task_id": t.task_id,
        "timestamp": _now(),
        "start_time": _now(),
        "end_time": _now(),
        "duration": 0.0,  # not known
        "termination_reason": _REASON.get(t.stop_reason, _OTHERWISE),
        "agent_cost": None,
        "user_cost": None,
        "reward_info": _reward_info(t, task.get("evaluation_criteria") or {}),
        "messages": messages,
        "trial": t.trial,
        "seed": t.seed,
    }


def _message(m: Mapping[str, Any], turn: int) -> dict[str, Any]:
    message = {"role": m["role"], "content": m.get("content") or None, "turn_idx": turn, "timestamp": None}
    if m["role"] == "tool":
        return message | {
            "id": m.get("tool_call_id") or "",
            "content": m.get("content") or "",
            "requestor": "assistant",
            "error": bool(m.get("error")),
        }
    calls = [{"id": c["id"], "name": c["name"], "arguments": c["arguments"], "requestor": "assistant"} for c in m.get("tool_calls") or []]
    return message | {"tool_calls": calls or None}


def _reward_info(t: Trajectory, criteria: Mapping[str, Any]) -> dict[str, Any]:
    """tau2's `RewardInfo` of the checks."""
    checks = {by_agent: iter(_of_kind(t, kind)) for by_agent, kind in ((True, "action"), (False, "user_action"))}
    actions = [(action, next(checks[called_by_agent(action)], None)) for action in criteria.get("actions") or []]
    graded = t.stop_reason is StopReason.DONE
    return {
        "reward": t.reward,
        "reward_basis": criteria.get("reward_basis") if graded else None,
        "db_check": {"db_match": (db := t.checks["db"]["passed"]), "db_reward": float(db)} if "db" in t.checks else None,
        "action_checks": [
            {
                "action": action,
                "action_match": check["passed"],
                "action_reward": float(check["passed"]),
                "tool_type": check["expected"]["kind"],
            }
            for action, check in actions
            if check is not None
        ],
        "communicate_checks": [
            {"info": check["expected"], "met": check["passed"], "justification": ""} for check in _of_kind(t, "communicate")
        ],
        "env_assertions": [
            {"env_assertion": check["expected"], "met": check["passed"], "reward": float(check["passed"])}
            for check in _of_kind(t, "assertion")
        ],
        "nl_assertions": [
            {"nl_assertion": check["expected"], "met": check["passed"], "justification": check["actual"] or ""}
            for check in _of_kind(t, "nl")
        ],
    }


def _of_kind(t: Trajectory, kind: str) -> list[dict[str, Any]]:
    return [check for name, check in t.checks.items() if name.partition(":")[0] == kind]


def _now() -> str:
    return datetime.datetime.now().isoformat()
