"""What an LLM reads to propose capabilities, and how proposals from several batches become one list.

Proposals that are alike in name are put together first, by rule. What is left is one question: which of them are the same skill. Where its
answer cannot be used, the list of the rule stands.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from rl.trajectory import Trajectory
from trace_jax.agents.budget import estimate_tokens
from trace_jax.agents.protocol import Schema
from trace_jax.diagnose.compaction import compact
from trace_jax.diagnose.evidence import RESERVED, Candidate, is_name
from trace_jax.diagnose.labelling import clipped, object_schema, shown
from trace_jax.errors import InputError

_LONGEST = 1500  # most characters of a definition: it is part of every question that labels
_STEM = 5  # characters: verify and verification, preconditions and precondition are one
_FILLERS = frozenset({"the", "a", "an", "of", "and", "in", "to", "for", "with", "skill", "skills", "ability", "capability"})


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A capability as one or more batches proposed it.

    Attributes:
      examples: trajectories that lack it, each with a note.
      batches: how many proposed it.
    """

    name: str
    description: str
    examples: tuple[tuple[str, str], ...] = ()
    batches: int = 1

    def joined(self, other: Proposal) -> Proposal:
        """This one, with what the other adds."""
        examples = tuple(dict((*other.examples, *self.examples)).items())
        return dataclasses.replace(self, examples=examples, batches=self.batches + other.batches)


# --- what is read ----------------------------------------


def draw_batches(trajectories: Sequence[Trajectory], size: int, number: int, seed: int) -> list[list[Trajectory]]:
    """At most `number` batches of at most `size`, failed and passed ones mixed alike: half of both where there are enough, and each task
    once before any twice."""
    rng = np.random.default_rng([seed, size, number])
    shuffled = [trajectories[i] for i in rng.permutation(len(trajectories))]
    turns: dict[tuple[str, bool], int] = {}
    order = []
    for t in shuffled:
        key = (t.id.rpartition("#")[0] or t.task_id, t.success)
        turns[key] = turns.get(key, 0) + 1
        order.append((turns[key], t))
    ordered = [t for _, t in sorted(order, key=lambda pair: pair[0])]
    failed, passed = [t for t in ordered if not t.success], [t for t in ordered if t.success]
    wanted = min(size * number, len(ordered))
    most = min(len(failed), max(math.ceil(wanted / 2), wanted - len(passed)))
    chosen = failed[:most] + passed[: wanted - most]
    count = math.ceil(wanted / size)
    return [chosen[k::count] for k in range(count)]


def fit_batch(batch: Sequence[Trajectory], tokens: int) -> list[tuple[Trajectory, str]]:
    """The conversations of a batch as texts that fit together; those that cannot be shortened to their share are left out.

    Raises:
      InputError: not even one fits.
    """
    batch = list(batch)
    whole = {}
    while True:
        share = tokens // len(batch)
        try:
            for t in batch:
                whole[t.id] = whole.get(t.id) or estimate_tokens(compact(t, tokens))
            share = _level([whole[t.id] for t in batch], tokens)
            return [(t, compact(t, tokens if whole[t.id] <= share else share)) for t in batch]
        except InputError:
            if len(batch) == 1:
                raise
            tight = [t for t in batch if not _fits(t, share)]
            batch.remove((tight or batch)[-1])


def _fits(trajectory: Trajectory, tokens: int) -> bool:
    try:
        compact(trajectory, tokens)
    except InputError:
        return False
    return True


def _level(sizes: Sequence[int], total: int) -> int:
    """The largest share that everyone can have when those that need less leave the rest to the others."""
    left = total
    for n, size in enumerate(sorted(sizes)):
        share = left // (len(sizes) - n)
        if size > share:
            return share
        left -= size
    return max(sizes)


# --- proposals ----------------------------------------

PROPOSAL_SCHEMA: Schema = object_schema(
    capabilities={
        "type": "array",
        "items": object_schema(
            name={"type": "string"},
            description={"type": "string"},
            examples={"type": "array", "items": object_schema(trajectory={"type": "string"}, note={"type": "string"})},
        ),
    }
)


def read_proposals(answer: Any, ids: Collection[str], most: int) -> tuple[list[Proposal], list[str]]:
    """The proposals of an answer that can be used, at most `most`, and what is wrong with it."""
    entries = answer.get("capabilities") if isinstance(answer, dict) else None
    if not isinstance(entries, list):
        return [], ["capabilities: must be a list"]
    proposals, faults = [], []
    for n, entry in enumerate(entries):
        where = f"capabilities[{n}]"
        wrong = _definition_faults(entry, where, {p.name for p in proposals})
        if not wrong:
            examples = entry.get("examples")
            examples = [e for e in examples if isinstance(e, dict)] if isinstance(examples, list) else []
            shows = [(e.get("trajectory"), clipped(str(e.get("note") or ""), 500)) for e in examples]
            known = [(t, note) for t, note in shows if isinstance(t, str) and t in ids]
            unknown = [t for t, note in shows if (t, note) not in known]
            wrong = [f"{where}.examples: there is no conversation {shown(unknown[0])}; give ids that were shown"] if unknown else []
            wrong += [] if known else [f"{where}.examples: needs at least one conversation that shows it lacking"]
            if known:
                proposals.append(Proposal(entry["name"], clipped(entry["description"], _LONGEST), tuple(known)))
        faults += wrong
    if len(entries) > most:
        faults.append(f"capabilities: {len(entries)} are too many; keep the {most} that explain most")
    return proposals[:most], faults if entries else ["capabilities: is empty; propose at least one"]


def _definition_faults(entry: Any, where: str, taken: Collection[str]) -> list[str]:
    if not isinstance(entry, dict):
        return [f"{where}: must be an object"]
    faults = []
    name, description = entry.get("name"), entry.get("description")
    if not is_name(name):
        faults.append(f"{where}.name: {shown(name)} is not in snake_case; write two to four words like precondition_verification")
    elif name in RESERVED:
        faults.append(f"{where}.name: {name!r} has another meaning here; choose another name")
    elif name in taken:
        faults.append(f"{where}.name: {name!r} occurs twice; put the two together, or tell them apart")
    if not isinstance(description, str) or not description.strip():
        faults.append(f"{where}.description: must be 2 to 3 sentences")
    elif len(description) > _LONGEST:
        faults.append(f"{where}.description: has {len(description):,} characters; write 2 to 3 sentences")
    return faults


# --- merging ----------------------------------------

MERGING_SCHEMA: Schema = object_schema(
    capabilities={
        "type": "array",
        "items": object_schema(
            name={"type": "string"}, description={"type": "string"}, proposals={"type": "array", "items": {"type": "integer"}}
        ),
    },
    dropped={"type": "array", "items": object_schema(proposal={"type": "integer"}, reason={"type": "string"})},
)


def join_alike(proposals: Sequence[Proposal], known: Sequence[Candidate]) -> list[Proposal]:
    """The proposals, one where names say the same, none where a known one does; those first that most batches made."""
    groups: dict[frozenset[str], Proposal] = {}
    settled = {_stems(c.name) for c in known}
    for p in proposals:
        key = _stems(p.name)
        if key not in settled:
            groups[key] = groups[key].joined(p) if key in groups else p
    return sorted(groups.values(), key=lambda p: -p.batches)


def read_merging(
    answer: Any, proposals: Sequence[Proposal], known: Sequence[Candidate], most: int
) -> tuple[list[Proposal], list[dict[str, str]], list[str]]:
    """The new capabilities of an answer, what it dropped and why, and what is wrong with it."""
    entries, dropped = (answer.get(k) if isinstance(answer, dict) else None for k in ("capabilities", "dropped"))
    if not isinstance(entries, list) or not isinstance(dropped, list):
        return [], [], ["capabilities and dropped: must be lists"]
    settled = {c.name for c in known}
    merged, gone, faults, used, names = [], [], [], [], set()
    for n, entry in enumerate(entries):
        where = f"capabilities[{n}]"
        wrong = _definition_faults(entry, where, names)
        numbers = entry.get("proposals") if isinstance(entry, dict) else None
        if not isinstance(numbers, list) or not numbers:
            wrong.append(f"{where}.proposals: needs at least one number")
        elif strange := [x for x in numbers if not _is_number(x, proposals)]:
            wrong.append(f"{where}.proposals: there is no proposal {shown(strange[0])}; the numbers are 1 to {len(proposals)}")
        else:
            used += numbers
        if not wrong:
            names.add(entry["name"])
            if entry["name"] not in settled:
                first, *others = (proposals[x - 1] for x in numbers)
                for other in others:
                    first = first.joined(other)
                merged.append(dataclasses.replace(first, name=entry["name"], description=clipped(entry["description"], _LONGEST)))
        faults += wrong
    for n, entry in enumerate(dropped):
        number, reason = (entry.get(k) if isinstance(entry, dict) else None for k in ("proposal", "reason"))
        if not _is_number(number, proposals):
            faults.append(f"dropped[{n}].proposal: there is no proposal {shown(number)}; the numbers are 1 to {len(proposals)}")
        elif not isinstance(reason, str) or not reason.strip():
            faults.append(f"dropped[{n}].reason: say in one sentence why proposal {number} is dropped")
        else:
            used.append(number)
            gone.append({"name": proposals[number - 1].name, "reason": clipped(reason, 500)})
    if not entries and not known:
        faults.append("capabilities: is empty; keep at least one proposal")
    for number, p in enumerate(proposals, start=1):
        if (times := used.count(number)) != 1:
            told = "is used nowhere" if times == 0 else f"is used {times} times"
            faults.append(f"proposal {number} ({p.name}) {told}; use each exactly once, or drop it with a reason")
    if len(merged) > most:
        faults.append(f"capabilities: {len(merged)} new ones are too many; at most {most}")
    return merged, gone, faults


def _is_number(value: Any, proposals: Sequence[Proposal]) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= len(proposals)


def _stems(name: str) -> frozenset[str]:
    return frozenset(word[:_STEM] for word in name.split("_") if word not in _FILLERS)
