"""Result files of tau2-bench and tau-bench as trajectories.

Four formats are told apart by their keys, since none carries a version: tau2 0.x and 1.0 (one JSON file, or a folder with `results.json`
and `simulations/`), and the list that the first tau-bench wrote. What the user's side did with tools of its own is invisible to the agent
and is left out of its messages. Model settings (`llm_args`) may hold keys and are never read.

Message indices count the messages of the trajectory: the system prompt is number 0.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.benchmarks.alignment import foreign, names_of
from trace_jax.diagnose.calls import agent_calls, answers, pair, read_or_write
from trace_jax.errors import InputError

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

_STOP = {
    "user_stop": StopReason.DONE,
    "agent_stop": StopReason.DONE,
    "max_steps": StopReason.MAX_TURNS,
    "timeout": StopReason.MAX_TURNS,
    "too_many_errors": StopReason.INVALID_ACTION,
    "agent_error": StopReason.INVALID_ACTION,
    "context_window_exceeded": StopReason.CONTEXT,
    "user_error": StopReason.ENVIRONMENT_ERROR,
    "infrastructure_error": StopReason.ENVIRONMENT_ERROR,
    "unexpected_error": StopReason.ENVIRONMENT_ERROR,
}
_SUCCESS_TOLERANCE = 1e-6  # tau2's own: success is |reward - 1| within this


def read_results(paths: Sequence[str | pathlib.Path]) -> list[Trajectory]:
    """The trajectories of one or more result files, pooled.

    With one path an id is `task#trial`; with several it is `domain:task#trial`, and trials of a task that occurs in more than one file
    are numbered on, in the order of the files.

    Raises:
      InputError: a file that is missing, damaged, of another format, given twice, or whose conversations belong to other tasks.
    """
    pooled: list[Trajectory] = []
    following: dict[tuple[str, str], int] = {}
    seen: dict[str, int] = {}
    for number, path in enumerate(paths):
        trajectories = read_result_file(path)
        offset = dict(following)
        for t in trajectories:
            run = json.dumps([t.environment, t.task_id, t.reward, t.messages], sort_keys=True, default=str)
            if t.error is None and seen.setdefault(run, number) != number:
                raise InputError(f"{path}: simulation {t.id} is also in {paths[seen[run]]}; give each result file once")
            key = (t.environment, t.task_id)
            t.trial += offset.get(key, 0)
            following[key] = max(following.get(key, 0), t.trial + 1)
            if len(paths) > 1:
                t.id = f"{t.environment.rpartition('/')[2]}:{t.task_id}#{t.trial}"
                t.group = t.id.rpartition("#")[0]
        pooled += trajectories
    return pooled


def read_result_file(path: str | pathlib.Path) -> list[Trajectory]:
    """The trajectories of one result file or folder, ids `task#trial`; raises as `read_results`."""
    path = pathlib.Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file; --results takes result files or folders of tau2-bench or tau-bench")
    file = path / "results.json" if path.is_dir() else path
    if not file.exists():
        raise InputError(f"{path}: the folder has no results.json; give the folder that tau2 wrote, or a result file")
    data = _load(file)
    try:
        return _trajectories(data, file)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        # a field of another type or a part that is missing deep inside; what can be named better was named before
        why = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise InputError(f"{file}: not in the form that tau2-bench or tau-bench writes ({why}); export it again") from error


def _trajectories(data: Any, file: pathlib.Path) -> list[Trajectory]:
    if isinstance(data, list) and data and all(isinstance(x, dict) and {"task_id", "reward", "traj"} <= x.keys() for x in data):
        trajectories = [_tau_bench(entry, f"{file}: entry {i}") for i, entry in enumerate(data)]
        scenarios = {str(e["task_id"]): _tau_bench_names(e) for e in data}
    elif isinstance(data, dict) and isinstance(data.get("info"), dict) and isinstance(data.get("tasks"), list):
        simulations = data.get("simulations") or _simulations(file, data)
        tasks = {str(_need(t, "id", f"{file}: tasks[{i}]")): t for i, t in enumerate(data["tasks"])}
        trajectories = [_tau2(s, tasks, data["info"], f"{file}: simulations[{i}]") for i, s in enumerate(simulations)]
        scenarios = {k: _tau2_names(t) for k, t in tasks.items()}
    else:
        raise InputError(
            f"{file}: not a result file of tau2-bench (info, tasks, simulations) or tau-bench (a list of task_id, reward, traj)"
        )
    _number_trials(trajectories, file)
    _refuse_foreign(trajectories, scenarios, file)
    if isinstance(data, dict):
        _refuse_contradictions(simulations, file)
    return trajectories


# --- reading JSON ----------------------------------------


def _load(file: pathlib.Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file}: not valid JSON at line {error.lineno}, column {error.colno}; the file is cut short or damaged, copy it again"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text at byte {error.start}; --results takes JSON files") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None


def _need(mapping: Any, key: str, where: str) -> Any:
    if not isinstance(mapping, Mapping) or key not in mapping:
        raise InputError(f"{where}: field {key!r} is missing; the file is not a complete result file")
    return mapping[key]


def _simulations(file: pathlib.Path, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The simulations that a 1.0 folder keeps beside `results.json`, in the order of its index."""
    folder = file.parent / "simulations"
    if not folder.is_dir():
        raise InputError(
            f"{file}: field 'simulations' is missing or empty and there is no folder {folder}; give a complete result file or folder"
        )
    index = data.get("simulation_index") or []
    names = [f"{_need(entry, 'id', f'{file}: simulation_index[{i}]')}.json" for i, entry in enumerate(index)]
    names = names or sorted(p.name for p in folder.glob("*.json"))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise InputError(f"{file}: simulation_index lists {missing[0]}, which is not in {folder}; copy the whole folder")
    return [_load(folder / name) for name in names]


# --- tau2 ----------------------------------------


def _tau2(simulation: Mapping[str, Any], tasks: Mapping[str, Any], info: Mapping[str, Any], where: str) -> Trajectory:
    task_id = str(_need(simulation, "task_id", where))
    if task_id not in tasks:
        raise InputError(
            f"{where}: task_id {task_id!r} is not among the tasks of the file; its tasks and simulations belong to different runs"
        )
    environment = info.get("environment_info") or {}
    domain = environment.get("domain_name") or "unknown"
    agent = info.get("agent_info") or {}
    policy = simulation.get("policy") or environment.get("policy")
    system = [{"role": "system", "content": _SYSTEM.format(policy=policy)}] if policy else []
    messages = system + _agent_messages(_need(simulation, "messages", where) or [], where)
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
        policy={"name": str(agent.get("llm") or agent.get("implementation") or ""), "version": 0},
        messages=messages,
        stop_reason=_STOP[reason],
    )
    if graded is None or _STOP[reason] is StopReason.ENVIRONMENT_ERROR:
        common["stop_reason"] = StopReason.ENVIRONMENT_ERROR
        return Trajectory(**common, error={"kind": reason, "message": "tau2 ended the simulation without a grade"})
    reward, success = _reward(_need(graded, "reward", f"{where}.reward_info"), where)
    checks = _tau2_checks(graded, tasks[task_id].get("evaluation_criteria") or {}, messages)
    return Trajectory(**common, reward=reward, success=success, checks=checks)


def _agent_messages(raw: Iterable[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """The conversation as the agent saw it: without the calls that the user's side made and without their results."""
    messages: list[dict[str, Any]] = []
    for i, m in enumerate(raw):
        role = _need(m, "role", f"{where}.messages[{i}]")
        content = m.get("content") or ""
        calls = [c for c in m.get("tool_calls") or [] if c.get("requestor", "assistant") == "assistant"] if role == "assistant" else []
        if role == "tool":
            if m.get("requestor", "assistant") == "assistant":
                flag = {"error": True} if m.get("error") else {}
                messages.append({"role": "tool", "content": content, "tool_call_id": m.get("id") or "", **flag})
        elif calls:
            kept = [{"id": c.get("id") or "", "name": c["name"], "arguments": c.get("arguments") or {}} for c in calls]
            messages.append({"role": role, "content": content, "tool_calls": kept})
        elif content or not m.get("tool_calls"):
            messages.append({"role": role, "content": content})
    return messages


def _tau2_checks(graded: Mapping[str, Any], criteria: Mapping[str, Any], messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The grader's evidence under the names of the house; where tau2 stopped before grading, the task's own criteria.

    Checks that the reward does not rest on are left out, but for the actions: those are evidence of what the task means. They are marked
    `required` where the reward does rest on them.
    """
    basis = set(graded.get("reward_basis") or criteria.get("reward_basis") or ["DB", "COMMUNICATE"])
    recorded = graded.get("action_checks")
    if recorded is None:
        recorded = [{"action": action} for action in criteria.get("actions") or []]
    mine, theirs = [], []
    for check in recorded:
        action = check["action"]
        kind = check.get("tool_type") or read_or_write(action["name"])
        expected = {"name": action["name"], "arguments": action.get("arguments") or {}, "kind": "write" if kind == "write" else "read"}
        expected |= {"required": True} if "ACTION" in basis else {}
        entry = (expected, check.get("action_match"), action.get("compare_args"))
        (mine if (action.get("requestor") or "assistant") == "assistant" else theirs).append(entry)
    checks = _action_checks(mine, messages)
    for i, (expected, match, _) in enumerate(theirs):
        checks[f"user_action:{i}"] = {"passed": bool(match), "expected": expected, "actual": None, "message_index": None}
    if "DB" in basis and graded.get("db_check"):
        checks["db"] = {"passed": bool(graded["db_check"]["db_match"]), "expected": None, "actual": None, "message_index": None}
    said = graded.get("communicate_checks")
    if said is None:
        said = [{"info": info, "met": False} for info in criteria.get("communicate_info") or []]
    for i, check in enumerate(said if "COMMUNICATE" in basis else []):
        checks[f"communicate:{i}"] = _communicate_check(check["info"], bool(check["met"]), messages)
    for kind, counted, key, text in (
        ("assertion", "ENV_ASSERTION", "env_assertions", "env_assertion"),
        ("nl", "NL_ASSERTION", "nl_assertions", "nl_assertion"),
    ):
        for i, check in enumerate(graded.get(key) or [] if counted in basis else []):
            checks[f"{kind}:{i}"] = {
                "passed": bool(check["met"]),
                "expected": check[text],
                "actual": check.get("justification"),
                "message_index": None,
            }
    return checks


def _action_checks(expected: list[tuple[dict[str, Any], bool | None, Any]], messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """`action:i` for (action, recorded match or None, names of the compared arguments), each beside the call that came nearest."""
    calls = agent_calls(messages)
    checks = {}
    for i, ((action, match, compare), nearest) in enumerate(zip(expected, pair([e[0] for e in expected], calls), strict=True)):
        exact = next((c for c in calls if answers(action, c.name, c.arguments, compare)), None)
        call = exact or (None if nearest is None else calls[nearest])
        checks[f"action:{i}"] = {
            "passed": exact is not None if match is None else bool(match),
            "expected": action,
            "actual": None if call is None else {"name": call.name, "arguments": call.arguments},
            "message_index": None if call is None else call.message_index,
        }
    return checks


def _communicate_check(info: str, met: bool, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """`communicate:i`; the message is the first of the agent's that holds the text, by tau2's rule (no case, no commas)."""
    index = next(
        (i for i, m in enumerate(messages) if m["role"] == "assistant" and info.lower() in m["content"].lower().replace(",", "")), None
    )
    return {"passed": met, "expected": info, "actual": None if index is None else messages[index]["content"], "message_index": index}


def _tau2_names(task: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    scenario = json.dumps([task.get("user_scenario"), task.get("ticket")], ensure_ascii=False).replace("\\n", " ")
    return names_of(scenario, (task.get("evaluation_criteria") or {}).get("actions") or [])


# --- tau-bench ----------------------------------------


def _tau_bench(entry: Mapping[str, Any], where: str) -> Trajectory:
    task_id, info = str(entry["task_id"]), entry.get("info") or {}
    messages = [_openai_message(m, f"{where}.traj[{i}]") for i, m in enumerate(entry["traj"])]
    header = re.match(r"\s*#\s*(\w+)", messages[0]["content"]) if messages else None
    common = dict(
        id=f"{task_id}#{entry.get('trial')}",
        environment=f"taubench/{header.group(1).lower() if header else 'unknown'}",
        task_id=task_id,
        group=task_id,
        trial=-1 if entry.get("trial") is None else int(entry["trial"]),
        messages=messages,
    )
    if "task" not in info:  # tau-bench writes the exception in the place of the task
        kind = {"kind": "infrastructure_error", "message": str(info.get("error") or "no task in info")[:300]}
        return Trajectory(**common, stop_reason=StopReason.ENVIRONMENT_ERROR, error=kind)
    task = info["task"]
    actions = [{"name": a["name"], "arguments": a.get("kwargs") or {}, "kind": read_or_write(a["name"])} for a in task.get("actions") or []]
    checks = _action_checks([(action, None, None) for action in actions], messages)
    reward, success = _reward(entry["reward"], where)
    found = (info.get("reward_info") or {}).get("info") or {}
    # the grader keeps the verdict on the database or the one on the outputs, whichever it came to last
    database = found.get("r_actions", 1.0 if success else 0.0 if found.get("r_outputs") == 1.0 else None)
    if database is not None:
        checks["db"] = {"passed": bool(database), "expected": None, "actual": None, "message_index": None}
    for i, output in enumerate(task.get("outputs") or []):
        check = _communicate_check(output, False, messages)
        checks[f"communicate:{i}"] = {**check, "passed": bool((found.get("outputs") or {}).get(output, check["message_index"] is not None))}
    last = messages[-1] if messages else {"role": "", "content": ""}
    calls = agent_calls(messages)
    over = "###STOP###" in last["content"] or bool(calls and calls[-1].name == "transfer_to_human_agents")
    return Trajectory(
        **common, reward=reward, success=success, checks=checks, stop_reason=StopReason.DONE if over else StopReason.MAX_TURNS
    )


def _openai_message(m: Mapping[str, Any], where: str) -> dict[str, Any]:
    """An OpenAI message with the arguments of its calls parsed; arguments that are not JSON are kept as text under "malformed"."""
    message = {"role": _need(m, "role", where), "content": m.get("content") or ""}
    if m.get("tool_call_id"):
        message["tool_call_id"] = m["tool_call_id"]
    calls = []
    for call in m.get("tool_calls") or []:
        function = _need(call, "function", where)
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except json.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict):
            arguments = {"malformed": function.get("arguments")}
        calls.append({"id": call.get("id") or "", "name": _need(function, "name", where), "arguments": arguments})
    return {**message, "tool_calls": calls} if calls else message


def _tau_bench_names(entry: Mapping[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    task = (entry.get("info") or {}).get("task") or {}
    actions = [{"arguments": a.get("kwargs")} for a in task.get("actions") or []]
    return names_of(f"{task.get('user_id', '')} {task.get('instruction', '')}", actions)


# --- shared ----------------------------------------


def _reward(value: Any, where: str) -> tuple[float, bool]:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_SUCCESS_TOLERANCE <= value <= 1 + _SUCCESS_TOLERANCE:
        raise InputError(f"{where}: reward {value!r} is not a number in [0, 1]")
    return min(max(float(value), 0.0), 1.0), abs(value - 1.0) <= _SUCCESS_TOLERANCE


def _number_trials(trajectories: list[Trajectory], file: pathlib.Path) -> None:
    """Numbers the trials of files that have no numbers; two trials of one number are refused."""
    taken: set[tuple[str, int]] = set()
    for t in trajectories:
        if t.trial < 0:
            t.trial = next(n for n in range(len(trajectories)) if (t.task_id, n) not in taken)
        if (t.task_id, t.trial) in taken:
            raise InputError(f"{file}: task {t.task_id!r} has two simulations with trial {t.trial}; give files of several runs one by one")
        taken.add((t.task_id, t.trial))
        t.id = f"{t.task_id}#{t.trial}"


def _refuse_foreign(trajectories: list[Trajectory], names: Mapping[str, Any], file: pathlib.Path) -> None:
    strangers = []
    for t in trajectories:
        conversation = json.dumps([m for m in t.messages if m["role"] != "system"], ensure_ascii=False)
        other = foreign(conversation, t.task_id, names)
        if other is not None:
            strangers.append(f"{t.id} (is about task {other})")
    if strangers:
        raise InputError(
            f"{file}: conversations belong to other tasks: {_some(strangers)}; the file was put together wrongly, export it again"
        )


def _refuse_contradictions(simulations: Sequence[Mapping[str, Any]], file: pathlib.Path) -> None:
    """A grade that saw an action which the conversation does not hold was made for another conversation."""
    strangers = []
    for simulation in simulations:
        calls = [c for m in simulation.get("messages") or [] for c in m.get("tool_calls") or []]
        for check in (simulation.get("reward_info") or {}).get("action_checks") or []:
            action = check["action"]
            held = any(answers(action, c["name"], c.get("arguments") or {}, action.get("compare_args")) for c in calls)
            if check.get("action_match") and not held:
                strangers.append(f"{simulation.get('task_id')}#{simulation.get('trial')} (graded as having called {action['name']})")
                break
    if strangers:
        raise InputError(
            f"{file}: conversations do not hold what was graded: {_some(strangers)}; "
            "messages and grades belong to different tasks, export it again"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
