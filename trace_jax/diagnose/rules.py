"""The evidence analyst: capability labels from what the grader expected and what the agent did, without an LLM.

Each rule reads the process (calls, their order, where each value came from) and never the verdict, so labels are the same when the outcome
is hidden. A rule gives a label, the index of the message that shows it, and the reason.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rl.trajectory import Trajectory
from trace_jax.diagnose.calls import Call, fields, leaves
from trace_jax.diagnose.code_rules import CODE_RULES
from trace_jax.diagnose.evidence import LACKING, NA, PRESENT, Candidate, Evidence, Label, Verdict, is_value, record_keys, unknown_calls


def structured_data_reasoning(e: Evidence) -> Verdict:
    """A value that had to be looked up or derived: was it the right one?

    Applicable when an attempt was made at an action with such a value. LACKING when a write carries another one (the record is wrong, or a
    field of it), when a stray write goes to a record that the tools showed but nobody asked for, or when the record that had to be read was
    never read and another was read in its place. Also when corrected later.
    """
    right: tuple[int, str] | None = None
    wrong: list[tuple[int, str]] = []
    for action, attempts in zip(e.expected, e.attempts, strict=True):
        wanted = fields(action["arguments"])
        values = e.records(action["arguments"]) if action["kind"] == "read" else {(k, v) for k, v in wanted if is_value(v)}
        looked_up = {(k, v) for k, v in values if not e.dictated(v)}
        if not looked_up:
            continue
        for c in attempts:
            call = e.calls[c]
            given = fields(call.arguments)
            for key, value in sorted(looked_up):
                instead = sorted(v for k, v in given - wanted if k == key)
                if (key, value) in given:
                    right = right or (call.message_index, f"{call.name} carries the {key} {e.spell(value)}, which had to be looked up")
                elif action["kind"] == "read" and _read_elsewhere(e, action["name"], key, value, instead):
                    continue
                elif instead and (not call.error or all(e.before(v, call) for v in instead)):
                    wrong.append((call.message_index, f"{call.name} carries {key} {e.spell(*instead)} where {e.spell(value)} was right"))
    for c in e.strays:
        call = e.calls[c]
        for key, value in sorted(_wrong_records(e, call)):
            wrong.append((call.message_index, f"{call.name} goes to {key} {e.spell(value)}, a record that was shown but not meant"))
    if wrong:
        return LACKING, *min(wrong)
    return (PRESENT, *right) if right else (NA, None, "no attempt at an action with a value to look up")


def _read_elsewhere(e: Evidence, name: str, key: str, value: str, instead: Sequence[str]) -> bool:
    """Whether reading another record is no mistake: the right one was used in some call, or the other one was to be read as well."""
    used = any((key, value) in fields(call.arguments) for call in e.calls)
    meant = {v for a in e.expected if a["name"] == name for k, v in fields(a["arguments"]) if k == key}
    return used or not instead or any(v in meant for v in instead)


def _wrong_records(e: Evidence, call: Call) -> set[tuple[str, str]]:
    """Records of a call that no expected action names, though some expected action has a record of that key that had to be looked up."""
    meant = {record for a in e.expected for record in e.records(a["arguments"])}
    to_find = {k for k, v in meant if not e.dictated(v)}
    return {(k, v) for k, v in e.records(call.arguments) - meant if k in to_find and not e.dictated(v)}


def multi_step_task_completion(e: Evidence) -> Verdict:
    """Every one of several requests is attended to.

    A request is an expected write with the reads that it needs, or a read whose result has to be told. Applicable when there are two or
    more and the agent ended the episode itself. LACKING when nothing was done for one of them: no attempt, no stray write about its record
    or about a wrong one in its place, and no word in the last message about the record that was looked at for it.
    """
    told = " ".join(e.to_tell).lower()
    written = {record for a in e.expected if a["kind"] == "write" for record in e.records(a["arguments"])}
    requests = []
    for i, action in enumerate(e.expected):
        records = e.records(action["arguments"])
        if action["kind"] == "write" or (records and not records & written and any(v in told for _, v in records)):
            requests.append(i)
    if len(requests) < 2:
        return NA, None, "fewer than two requests"
    attended: list[int] = []
    missed: list[dict[str, Any]] = []
    strays = list(e.strays)
    for i in requests:
        action = e.expected[i]
        records = e.records(action["arguments"])
        substitutes = [c for c in strays if records & e.records(e.calls[c].arguments)]
        substitutes += [c for c in strays if {k for k, _ in records} & {k for k, _ in _wrong_records(e, e.calls[c])}]
        if e.attempts[i]:
            attended.append(e.calls[e.attempts[i][-1]].message_index)
        elif substitutes:
            strays.remove(substitutes[0])
            attended.append(e.calls[substitutes[0]].message_index)
        elif _refused(e, records):
            attended.append(e.last())
        else:
            missed.append(action)
    if not missed:
        return PRESENT, max(attended), f"all {len(requests)} requests were attended to"
    if not e.ended:
        return NA, None, "the episode was cut off before all requests could be attended to"
    names = ", ".join(_shown(a) for a in missed)
    return LACKING, e.last(), f"ended with {len(missed)} of {len(requests)} requests not attended to: {names}"


def _refused(e: Evidence, records: set[tuple[str, str]]) -> bool:
    """Whether the last message speaks of the record that was read for a request: it was looked at and turned down, rightly or wrongly."""
    reads = [
        c
        for a, attempts in zip(e.expected, e.attempts, strict=True)
        if a["kind"] == "read" and records & e.records(a["arguments"])
        for c in attempts
    ]
    closing = e.said[e.last()]
    return any(value in closing for c in reads for _, value in e.records(e.calls[c].arguments))


def precondition_verification(e: Evidence) -> Verdict:
    """What the policy wants known before a change is looked at first, and the change is made only where it is allowed.

    Applicable when a write was made for which an expected read looks at the same record, when a write was made beyond the expected ones, or
    when no write is expected. LACKING when the read does not come before the write, or when the write is one that nobody may make. A write
    to a wrong record is another capability's failure, as long as that record was checked.
    """
    guards = [(a, e.records(a["arguments"])) for a in e.expected if a["kind"] == "read" and e.records(a["arguments"])]
    writes = [c for c, call in enumerate(e.calls) if e.kind(call) == "write"]
    expected_of = {c: i for i, attempts in enumerate(e.attempts) for c in attempts}
    expected_names = {a["name"] for a in e.expected if a["kind"] == "write"}
    lacking: list[tuple[int, str]] = []
    present: list[tuple[int, str]] = []
    for c in writes:
        call = e.calls[c]
        own, stray = e.records(call.arguments), c in e.strays
        misplaced = _wrong_records(e, call)
        meant = e.records(e.expected[expected_of[c]]["arguments"]) if c in expected_of else own
        applicable = [(a, records) for a, records in guards if records & meant or (stray and misplaced and _keys(records) & _keys(own))]
        for action, records in applicable:
            keys = _keys(records) & _keys(own)
            looked = [r for r in e.calls[:c] if r.name == action["name"] and e.records(r.arguments) & {x for x in own if x[0] in keys}]
            if looked:
                present.append((looked[0].message_index, f"{looked[0].name} before {call.name}"))
            else:
                lacking.append((call.message_index, f"{_called(call)} without {action['name']} before it"))
        if stray and not misplaced and (call.name not in expected_names or not call.error):
            lacking.append((call.message_index, f"{_called(call)} is a change that should not be made"))
    if lacking:
        return LACKING, *min(lacking)
    if present:
        return PRESENT, *min(present)
    if not expected_names and not writes:
        wanted = {a["name"] for a, _ in guards}
        looked = [call for call in e.calls if call.name in wanted]
        if looked:
            return PRESENT, looked[-1].message_index, f"{looked[-1].name}, and no change where none is allowed"
        if not wanted:
            return PRESENT, e.last(), "no change where none is allowed"
    return NA, None, "no change that depends on a check"


def tool_calling_precision(e: Evidence) -> Verdict:
    """Calls are well formed and carry the values that were given.

    Applicable when a write with payload was tried (a value under a key that no read takes: there a slip cannot be caught by looking).
    LACKING when a dictated value arrives as one that nobody wrote before, when a call comes back as an error although it was the agent's to
    get right (a made-up value, a wrong form, or numbers that the agent worked out), or when the episode ended with an invalid call. A call
    refused although it only names records that came up, or copies what the user dictated, is not a slip.
    """
    lacking: list[tuple[int, str]] = []
    present: list[tuple[int, str]] = []
    if e.invalid:
        lacking.append((e.last(), "the episode ended with an invalid call"))
    for action, attempts in zip(e.expected, e.attempts, strict=True):
        wanted = fields(action["arguments"])
        for c in attempts:
            call = e.calls[c]
            given = fields(call.arguments)
            for key, value in sorted(wanted - given):
                invented = sorted(v for k, v in given - wanted if k == key and is_value(v) and e.made_up(v))
                if invented and is_value(value) and e.dictated(value):
                    lacking.append((call.message_index, f"{call.name} carries {key} {e.spell(*invented)}; the user gave {e.spell(value)}"))
    for call in e.calls:
        values = [(k, v) for k, v in fields(call.arguments) if is_value(v)]
        payload = e.kind(call) == "write" and any(k not in e.record_keys for k, _ in leaves(call.arguments))
        composed = payload and any(k not in e.record_keys and v.replace(".", "").isdigit() and not e.dictated(v) for k, v in values)
        if call.error and (composed or any(e.made_up(v) for _, v in values) or _MALFORMED.search(call.result or "")):
            lacking.append((call.message_index, f"{_called(call)} came back as: {(call.result or '')[:80]}"))
        elif payload and not call.error:
            present.append((call.message_index, f"{call.name} is well formed and its values are true copies"))
    if lacking:
        return LACKING, *min(lacking)
    return (PRESENT, *min(present)) if present else (NA, None, "no write with values of its own")


_MALFORMED = re.compile(r"argument|parameter|keyword|schema|json|no such tool|tool .*not found|invalid|malformed|missing|format|type", re.I)


def communicating_results(e: Evidence) -> Verdict:
    """What was found out is told.

    Applicable when the task asks for something to be told that one call and its result showed. LACKING when no message of the agent holds
    it.
    """
    first_told: list[int] = []
    for wanted in e.to_tell:
        words = wanted.lower().replace(",", "").split()
        told = [i for i, text in enumerate(e.said) if text and all(w in text for w in words)]
        shown = [c for c in e.calls if set(words) <= set(re.findall(r"[\w.-]+", f"{_called(c)} {c.result or ''}".lower().replace(",", "")))]
        if told:
            first_told.append(told[0])
        elif shown and e.ended:
            return LACKING, e.last(), f"ended without telling {wanted!r}, which {shown[0].name} had shown"
    if first_told:
        return PRESENT, first_told[0], "what was asked for is told"
    return NA, None, "nothing known that had to be told"


def _keys(records: Iterable[tuple[str, str]]) -> set[str]:
    return {k for k, _ in records}


def _shown(action: dict[str, Any]) -> str:
    inner = ", ".join(str(v) for _, v in list(leaves(action["arguments"]))[:3])
    return f"{action['name']}({inner})"


def _called(call: Call) -> str:
    return _shown({"name": call.name, "arguments": call.arguments})


RULES: dict[str, tuple[Candidate, Callable[[Evidence], Verdict]]] = {
    rule.__name__: (Candidate(rule.__name__, description, outcome_bound), rule)
    for rule, outcome_bound, description in [
        (
            structured_data_reasoning,
            False,
            "Picks the right record and the right values out of what tools return, and carries them into the next call. "
            "LACKING: a call acts on another record, or with another looked-up or derived value, than the request means. "
            "PRESENT: values that had to be looked up are the right ones.",
        ),
        (
            multi_step_task_completion,
            True,
            "Keeps track of several requests and finishes each of them before ending. "
            "LACKING: the agent ends although nothing was done for one of the requests. "
            "PRESENT: each request was acted on, rightly or wrongly.",
        ),
        (
            precondition_verification,
            False,
            "Looks at what a rule depends on before it changes anything, and makes no change that the rule forbids. "
            "LACKING: a change without the look that should come first, or one that is not allowed. "
            "PRESENT: the look comes first and decides.",
        ),
        (
            tool_calling_precision,
            False,
            "Writes tool calls that are well formed and copies given values without a slip. "
            "LACKING: a given value arrives changed, or a call with a made-up value or wrong form is refused. "
            "PRESENT: calls that carry values of their own are accepted with true copies.",
        ),
        (
            communicating_results,
            True,
            "Tells the user what was found out and asked for. "
            "LACKING: a required piece of information had come up but no message to the user holds it. "
            "PRESENT: it is said.",
        ),
    ]
} | CODE_RULES
_NO_CALLS_NEEDED = {communicating_results.__name__, *CODE_RULES}  # the other rules read which calls were expected


class EvidenceAnalyst:
    """Derives labels from checks and messages; deterministic, so runs differ only in the trajectories that they draw."""

    name = "evidence"
    deterministic = True
    record: dict[str, Any] = {}

    def discover(self, trajectories: Sequence[Trajectory]) -> list[Candidate]:
        """The capabilities of which at least one trajectory shows anything."""
        applicable = collections.Counter(
            label.capability for label in self.label({1: trajectories}, [c for c, _ in RULES.values()])[1] if label.value != NA
        )
        return [candidate for candidate, _ in RULES.values() if applicable[candidate.name]]

    def label(self, draws: Mapping[int, Sequence[Trajectory]], candidates: Sequence[Candidate]) -> dict[int, list[Label]]:
        """A label for every pair of every run, trajectories outer, candidates inner; a trajectory has the same labels in all runs."""
        known = [c for c in candidates if c.name in RULES]
        trajectories = {t.id: t for drawn in draws.values() for t in drawn}
        keys = record_keys(list(trajectories.values()))
        unknown = unknown_calls(trajectories.values())
        labels = {}
        for t in trajectories.values():
            evidence = Evidence(t, keys)
            labels[t.id] = [Label(t.id, c.name, *_label(evidence, c.name, t.environment in unknown)) for c in known]
        return {attempt: [label for t in drawn for label in labels[t.id]] for attempt, drawn in draws.items()}


def _label(evidence: Evidence, name: str, unknown: bool) -> Verdict:
    """Rules about records and calls do not apply to work on a repository, nor the other way round."""
    if evidence.code != (name in CODE_RULES) or not evidence.messages:
        return NA, None, "another kind of task" if evidence.messages else "no conversation"
    if unknown and name not in _NO_CALLS_NEEDED:
        return NA, None, "nothing says which calls were expected"
    return RULES[name][1](evidence)
