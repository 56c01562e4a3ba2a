"""ToolSandbox's verdict as checks: what its milestones and minefields say in the terms of the house.

A milestone is a state of a database, a traced tool call, or words to the user, and how far a run came to it (0 to 1). The first two say
which call was expected: `action:i`, with the kind and the arguments that the milestone fixes, beside the call that came nearest. Words that
must occur literally are `communicate:i`; all other milestones, which compare words by their overlap, are `milestone:i`. A minefield,
which must not be touched, is `minefield:i`. An exception that ended the scenario is `exception`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trace_jax.benchmarks.toolsandbox import splits
from trace_jax.diagnose.calls import agent_calls, pair

# Which call brings a database into the state of a milestone, by database and constraint, and its parameters by the database's columns.
_CONTACT = {c: c for c in ("person_id", "name", "phone_number", "relationship")}
_REMINDER = {c: c for c in ("reminder_id", "content", "reminder_timestamp", "latitude", "longitude")}
_CALLS = {
    ("CONTACT", "addition_similarity"): ("add_contact", _CONTACT),
    ("CONTACT", "update_similarity"): ("modify_contact", _CONTACT),
    ("CONTACT", "removal_similarity"): ("remove_contact", {"person_id": "person_id"}),
    ("REMINDER", "addition_similarity"): ("add_reminder", _REMINDER),
    ("REMINDER", "update_similarity"): ("modify_reminder", _REMINDER),
    ("REMINDER", "removal_similarity"): ("remove_reminder", {"reminder_id": "reminder_id"}),
    (
        "MESSAGING",
        "addition_similarity",
    ): ("send_message_with_phone_number", {"recipient_phone_number": "phone_number", "content": "content"}),
}
_SETTINGS = {
    "cellular": "set_cellular_service_status",
    "wifi": "set_wifi_status",
    "location_service": "set_location_service_status",
    "low_battery_mode": "set_low_battery_mode_status",
}
_WRITES = ("add_", "modify_", "remove_", "send_", "set_")


class _Match(NamedTuple):
    """A milestone or minefield and where it matched best.

    Attributes:
      at: index of a message; None where the file does not say.
      constraints: those on the state, without the guards of other databases.
    """

    index: int
    similarity: float
    at: int | None
    constraints: list[Mapping[str, Any]]


def checks(
    verdict: Mapping[str, Any], conversation: Sequence[Mapping[str, Any]], messages: list[dict[str, Any]], threshold: float = 1.0
) -> dict[str, dict[str, Any]]:
    """The checks of one scenario, `{name: {"passed", "expected", "actual", "message_index"}}`.

    Args:
      verdict: the scenario's entry in `result_summary.json`.
      conversation: its `conversation.json`, whose messages carry the milestones; empty where an exception left none.
      messages: of the trajectory.
      threshold: the similarity from which on a milestone is passed.
    """
    renamed = splits.tool_names() if splits.parts(verdict["name"])[1] == splits.RENAMED else {}
    actions: list[tuple[dict[str, Any], float]] = []
    told: list[dict[str, Any]] = []
    found: dict[str, dict[str, Any]] = {}
    for match in _matches("milestone", verdict, conversation):
        at = match.at if match.similarity > 0 and match.at is not None and match.at < len(messages) else None
        said = None if at is None else messages[at]["content"]
        expected = [action for constraint in match.constraints for action in _actions(constraint, renamed)]
        words = [c for c in match.constraints if c["database_namespace"] == "SANDBOX" and not expected]
        actions += [(action, match.similarity) for action in expected]
        literal = [c for c in words if c["column_similarity_measure"].get("content") == "column_contains_similarity"]
        entry = {"passed": match.similarity >= threshold, "expected": None, "actual": said, "message_index": at}
        told += [{**entry, "expected": row["content"]} for c in literal for row in c["target_dataframe"] or [] if row.get("content")]
        if not expected and not literal:
            target = [row.get("content") if c in words else row for c in match.constraints for row in c["target_dataframe"] or []]
            found[f"milestone:{match.index}"] = {**entry, "expected": target[0] if len(target) == 1 else target or None}
    found |= {f"communicate:{i}": entry for i, entry in enumerate(told)}
    calls = agent_calls(messages)
    for i, ((action, similarity), nearest) in enumerate(zip(actions, pair([a for a, _ in actions], calls), strict=True)):
        call = None if nearest is None else calls[nearest]
        found[f"action:{i}"] = {
            "passed": similarity >= threshold,
            "expected": action,
            "actual": None if call is None else {"name": call.name, "arguments": call.arguments},
            "message_index": None if call is None else call.message_index,
        }
    for match in _matches("minefield", verdict, conversation):
        at = match.at if match.similarity > 0 and match.at is not None and match.at < len(messages) else None
        target = [row for c in match.constraints for row in c["target_dataframe"] or []]
        found[f"minefield:{match.index}"] = {
            "passed": match.similarity == 0,
            "expected": {"never": target},
            "actual": None if at is None else messages[at].get("tool_calls") or messages[at]["content"],
            "message_index": at,
        }
    if verdict.get("exception_type"):
        text = ": ".join(filter(None, [verdict["exception_type"], verdict.get("exception")]))
        found["exception"] = {"passed": False, "expected": None, "actual": text, "message_index": None}
    return found


def _matches(kind: str, verdict: Mapping[str, Any], conversation: Sequence[Mapping[str, Any]]) -> list[_Match]:
    """All milestones or minefields in order: those that the conversation describes, and those of which only the verdict knows."""
    known = {int(i): _Match(int(i), float(score), None, []) for i, (_, score) in (verdict.get(f"{kind}_mapping") or {}).items()}
    for at, message in enumerate(conversation):
        for match in (message.get(f"{message['role']}_details") or {}).get(f"{kind}_matches") or []:
            index, constraints = int(match[f"{kind}_index"]), match[kind]["snapshot_constraints"]
            kept = [c for c in constraints if c["snapshot_constraint"] != "guardrail_similarity"]
            known[index] = _Match(index, float(match[f"{kind}_similarity"]), at, kept)
    return [known[i] for i in sorted(known)]


def _actions(constraint: Mapping[str, Any], renamed: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The calls that a constraint expects, under the names that the agent sees."""
    database, rows = constraint["database_namespace"], constraint["target_dataframe"] or []
    tool, parameters = _CALLS.get((database, constraint["snapshot_constraint"]), ("", {}))
    for row in rows:
        if database == "SANDBOX" and row.get("tool_trace"):
            trace = json.loads(row["tool_trace"])
            trace = trace[0] if isinstance(trace, list) else trace  # of several calls that would do, the first
            calls = [(trace["tool_name"], trace.get("arguments") or {})]
        elif database == "SETTING":
            calls = [(_SETTINGS[column], {"on": value}) for column, value in row.items() if column in _SETTINGS and value is not None]
        elif tool:
            calls = [(tool, {parameters[column]: value for column, value in row.items() if column in parameters and value is not None})]
        else:
            calls = []
        for name, arguments in calls:
            kind = "write" if name.startswith(_WRITES) else "read"
            yield {"name": renamed.get(name, name), "arguments": arguments, "kind": kind}
