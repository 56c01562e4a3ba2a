"""What changes from the base to the composed agent, task by task: those that it fixes, those that it breaks, and conversations of both.

A task is solved in more than half of its trials, as in `trace_jax.evaluate.comparison`. Shown beside each other are two trials of one task,
one that failed and one that did not; they begin alike, so what they share is shown once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl.trajectory import Trajectory
from trace_jax.evaluate.task_names import by_number
from trace_jax.report import budgets
from trace_jax.report import results as found
from trace_jax.report.reader import Reader, find_trajectories
from trace_jax.report.results import Result

_CALLS = ("tool_calls", "tool_call_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What is kept of every held-out trial: conversations may hold megabytes, and few are shown."""

    id: str
    trial: int
    success: bool
    messages: int
    failing: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A task that one agent solves and the other does not, by a trial of each.

    Attributes:
      failing: kinds of the checks that fail for the agent that fails; how it ended where none does.
    """

    task: str
    base: Trial
    composed: Trial
    failing: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """A case with its conversations, which have the first `shared` messages in common."""

    case: Case
    base: Trajectory
    composed: Trajectory
    shared: int


def changes(read: Reader, results: Mapping[str, Result]) -> dict[str, Any] | None:
    """Fixed and broken tasks; None before both agents are evaluated.

    Returns:
      fixed, broken: {tasks, cases, pairs}; `cases` lacks the tasks whose rollouts are not in the workdir, `pairs` are the first of them.
      checks: (kind of check, in how many fixed tasks the base fails it, in how many broken ones the composed agent does).
    """
    composed = results.get(found.COMPOSED)
    if composed is None or composed.to_base is None:
        return None
    fixed, broken = (sorted(tasks, key=by_number) for tasks in (composed.to_base.fixed, composed.to_base.broken))
    trials = {policy: _trials(read, policy, {*fixed, *broken}) for policy in (found.BASE, found.COMPOSED)}
    cases = {"fixed": spread(_cases(fixed, trials, found.BASE)), "broken": spread(_cases(broken, trials, found.COMPOSED))}
    kinds = {name: Counter(kind for case in of for kind in case.failing) for name, of in cases.items()}
    order = sorted(kinds["fixed"] | kinds["broken"], key=lambda kind: (-kinds["fixed"][kind] - kinds["broken"][kind], kind))
    shown = {name: of[: budgets.CASES] for name, of in cases.items()}
    told = {
        policy: find_trajectories(read, f"rollouts/{policy}/heldout", [getattr(case, policy).id for of in shown.values() for case in of])
        for policy in (found.BASE, found.COMPOSED)
    }
    return {
        name: {"tasks": tasks, "cases": cases[name], "pairs": [_pair(case, told) for case in shown[name]]}
        for name, tasks in (("fixed", fixed), ("broken", broken))
    } | {"checks": [(kind, kinds["fixed"][kind], kinds["broken"][kind]) for kind in order]}


def spread(cases: Iterable[Case]) -> list[Case]:
    """Cases in turn of every combination of failing checks, the most frequent first; of each the shortest conversations first."""
    groups: dict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in sorted(cases, key=lambda case: (case.base.messages + case.composed.messages, by_number(case.task))):
        groups[case.failing].append(case)
    turns = itertools.zip_longest(*sorted(groups.values(), key=lambda group: (-len(group), group[0].failing)))
    return [case for turn in turns for case in turn if case is not None]


def common_beginning(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> int:
    """How many messages two conversations have in common before they part; ids of calls, and what is empty, do not count."""
    return sum(1 for _ in itertools.takewhile(lambda pair: _content(pair[0]) == _content(pair[1]), zip(one, other, strict=False)))


def failing(trajectory: Trajectory) -> tuple[str, ...]:
    """The kinds of the checks that fail, `action` of `action:0`; how the episode ended where none does."""
    kinds = {name.partition(":")[0] for name, check in trajectory.checks.items() if not check["passed"]}
    return tuple(sorted(kinds)) or (f"ended with {trajectory.stop_reason.value.replace('_', ' ')}",)


def _trials(read: Reader, policy: str, tasks: set[str]) -> dict[str, list[Trial]]:
    """The scored held-out trials of a policy on some tasks."""
    trials: dict[str, list[Trial]] = defaultdict(list)
    for name in read.list(f"rollouts/{policy}/heldout"):
        if tasks and name.endswith(".jsonl.zst"):
            for t in read.shard(name):
                if t.task_id in tasks and t.error is None:
                    one = Trial(id=t.id, trial=t.trial, success=t.success, messages=len(t.messages), failing=failing(t))
                    trials[t.task_id].append(one)
    return trials


def _cases(tasks: Sequence[str], trials: Mapping[str, Mapping[str, list[Trial]]], loser: str) -> Iterator[Case]:
    """One of each task where the loser has a failed trial and the other a successful one; of the same number where there is such a pair."""
    winner = found.BASE if loser == found.COMPOSED else found.COMPOSED
    for task in tasks:
        lost = [t for t in trials[loser].get(task, []) if not t.success]
        won = [t for t in trials[winner].get(task, []) if t.success]
        pairs = itertools.product(lost, won)
        if pair := min(pairs, key=lambda pair: (pair[0].trial != pair[1].trial, pair[0].trial, pair[1].trial), default=None):
            yield Case(task=task, failing=pair[0].failing, **dict(zip((loser, winner), pair, strict=True)))


def _pair(case: Case, told: Mapping[str, Mapping[str, Trajectory]]) -> Pair:
    base, composed = told[found.BASE][case.base.id], told[found.COMPOSED][case.composed.id]
    return Pair(case=case, base=base, composed=composed, shared=common_beginning(base.messages, composed.messages))


def _content(message: Mapping[str, Any]) -> tuple[Any, ...]:
    calls = [(call.get("name"), call.get("arguments")) for call in message.get("tool_calls") or []]
    return {name: value for name, value in message.items() if name not in _CALLS and value not in (None, "", [], {})}, calls
