"""What tau2-bench and tau-bench have in common: rewards, trials, and the checks that set what was expected beside what was done."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl.trajectory import Trajectory
from trace_jax.benchmarks.tau2.alignment import Names, stranger
from trace_jax.diagnose.calls import agent_calls, answers, pair
from trace_jax.errors import InputError
from trace_jax.evaluate.task_names import some

_SUCCESS_TOLERANCE = 1e-6  # tau2's own: success is |reward - 1| within this


def reward_of(value: Any, where: str) -> tuple[float, bool]:
    """(reward in [0, 1], success); raises InputError for what is no reward."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_SUCCESS_TOLERANCE <= value <= 1 + _SUCCESS_TOLERANCE:
        raise InputError(f"{where}: reward {value!r} is not a number in [0, 1]")
    return min(max(float(value), 0.0), 1.0), abs(value - 1.0) <= _SUCCESS_TOLERANCE


def numbered(trajectories: Iterable[Trajectory], file: Any) -> Iterator[Trajectory]:
    """The trajectories with ids `task#trial`; a negative trial is one that the file does not number, and takes the next that is free.

    Raises:
      InputError: two trials of a task have one number.
    """
    taken: set[tuple[str, int]] = set()
    for t in trajectories:
        if t.trial < 0:
            t.trial = next(n for n in itertools.count() if (t.task_id, n) not in taken)
        if (t.task_id, t.trial) in taken:
            raise InputError(f"{file}: task {t.task_id!r} has two simulations with trial {t.trial}; give files of several runs one by one")
        taken.add((t.task_id, t.trial))
        t.id = f"{t.task_id}#{t.trial}"
        yield t


def in_their_place(trajectories: Iterable[Trajectory], names: Mapping[str, Names], file: Any) -> Iterator[Trajectory]:
    """`numbered`; when all have been given out, those whose conversations belong to other tasks are named.

    Raises:
      InputError: there are some, or `numbered` does.
    """
    foreign = []
    for t in numbered(trajectories, file):
        if other := stranger(t, names):
            foreign.append(f"{t.id} (is about task {other})")
        yield t
    if foreign:
        raise InputError(
            f"{file}: conversations belong to other tasks: {some(foreign)}; the file was put together wrongly, export it again"
        )


def action_checks(expected: list[tuple[dict[str, Any], bool | None, Any]], messages: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
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


def communicate_check(info: str, met: bool, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """`communicate:i`; the message is the first of the agent's that holds the text, by tau2's rule (no case, no commas)."""
    index = next(
        (i for i, m in enumerate(messages) if m["role"] == "assistant" and info.lower() in m["content"].lower().replace(",", "")), None
    )
    return {"passed": met, "expected": info, "actual": None if index is None else messages[index]["content"], "message_index": index}
