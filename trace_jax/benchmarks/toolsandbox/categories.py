"""ToolSandbox's table: similarity, perfect scores and turns by category of scenario."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

from rl.trajectory import Trajectory
from trace_jax.benchmarks.toolsandbox import splits

EVERY = "ALL_CATEGORIES"
_TOOLS = {  # what a variant offers, as categories
    "": ("NO_DISTRACTION_TOOLS",),
    "_3_distraction_tools": ("THREE_DISTRACTION_TOOLS",),
    "_10_distraction_tools": ("TEN_DISTRACTION_TOOLS",),
    "_all_tools": ("ALL_TOOLS_AVAILABLE",),
    # Built on three distraction tools, but not counted there: the category would not compare with ten distraction tools.
    "_3_distraction_tools_tool_description_scrambled": ("TOOL_DESCRIPTION_SCRAMBLED",),
    "_3_distraction_tools_arg_type_scrambled": ("ARG_TYPE_SCRAMBLED",),
    "_3_distraction_tools_arg_description_scrambled": ("ARG_DESCRIPTION_SCRAMBLED",),
    "_3_distraction_tools_tool_name_scrambled": ("TOOL_NAME_SCRAMBLED",),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One category; `turn_count` is None where the trajectories do not say."""

    scenarios: int
    similarity: float
    perfect: int
    turn_count: float | None


def counted_in(name: str) -> tuple[str, ...]:
    """The categories in whose means a scenario counts; of a scenario that is not listed, those of its variant."""
    base, variant = splits.parts(name)
    known = splits.scenarios().get(base)
    return (*(known.categories if known else ()), *_TOOLS[variant], EVERY)


def aggregate(trajectories: Iterable[Trajectory]) -> dict[str, Row]:
    """The means over the trajectories that were graded, by category; an outage counts nowhere, though ToolSandbox scores it 0."""
    members: dict[str, list[Trajectory]] = defaultdict(list)
    for t in trajectories:
        for category in counted_in(t.task_id) if t.error is None else ():
            members[category].append(t)
    return {category: _row(found) for category, found in members.items()}


def _row(graded: list[Trajectory]) -> Row:
    turns = [t.metrics["turn_count"] for t in graded if "turn_count" in t.metrics]
    return Row(
        scenarios=len(graded),
        similarity=sum(t.reward for t in graded) / len(graded),
        perfect=sum(t.reward == 1.0 for t in graded),
        turn_count=sum(turns) / len(turns) if turns else None,
    )
