"""`selected_capabilities.json`: the retained capabilities, in the published form, from their selection to their finished environment.

Keys that we do not know are kept: other tools add their own. In a later round of a run the agent that is diagnosed has adapters already;
the entries of their capabilities stand in `known_capabilities.json`, and first in the selection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.agents.redaction import shorten
from trace_jax.diagnose.aggregate import Figures
from trace_jax.diagnose.evidence import RESERVED, is_name
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir

KNOWN = "diagnosis/known_capabilities.json"
PENDING, DONE = "PENDING", "DONE"
_EXAMPLES = 8
_NUMBERS = ("mean_cov", "std_cov", "mean_delta", "std_delta")
_KNOWN = ("skill", "description", *_NUMBERS, "n_runs_passed", "n_runs_total", "passes_consistency", "example_failed_cases", "status")
# What the synthesis adds to a finished entry.
_FINISHED = ("environment_path", "environment_module", "reward_distribution")


def read_known(workdir: Workdir) -> list[dict[str, Any]] | None:
    """The entries of the capabilities for which the diagnosed agent has adapters; None in round 1, where it is the base."""
    return decode_selection(workdir.read_json(KNOWN), KNOWN) if workdir.exists(KNOWN) else None


def diagnosed_policy(workdir: Workdir) -> str:
    """The policy whose train rollouts are diagnosed: the base, in a later round the composed agent of the round before."""
    return "previous" if workdir.exists(KNOWN) else "base"


def select(
    figures: Sequence[Figures],
    descriptions: Mapping[str, str],
    previous: Sequence[Mapping[str, Any]] = (),
    *,
    known: Sequence[Mapping[str, Any]] = (),
    most: int | None = None,
) -> list[dict[str, Any]]:
    """The entries of the retained capabilities, in the order of `figures`.

    Args:
      descriptions: capability to its definition.
      previous: entries of an earlier selection; status, environment and unknown keys of a capability that is retained again are kept.
      known: entries of capabilities that have an adapter; they come first, as they are.
      most: of the others at most so many.
    """
    earlier = {entry["skill"]: entry for entry in previous}
    names = {entry["skill"] for entry in known}
    entries: list[dict[str, Any]] = []
    for f in figures:
        if f.passes_consistency and f.capability not in names and (most is None or len(entries) < most):
            kept = {k: v for k, v in earlier.get(f.capability, {}).items() if k not in _KNOWN}
            entries.append(
                {
                    "skill": f.capability,
                    "description": descriptions.get(f.capability, ""),
                    **{key: getattr(f, key) for key in _NUMBERS},
                    "n_runs_passed": f.n_runs_passed,
                    "n_runs_total": f.n_runs_total,
                    "passes_consistency": True,
                    "example_failed_cases": list(f.lacking[:_EXAMPLES]),
                    "status": earlier.get(f.capability, {}).get("status", PENDING),
                    **kept,
                }
            )
    return [*map(dict, known), *entries]


def finished(
    entry: Mapping[str, Any], environment_path: str, environment_module: str, reward_distribution: Mapping[str, Any]
) -> dict[str, Any]:
    """The entry with its environment: status DONE."""
    return {
        **entry,
        "status": DONE,
        "environment_path": environment_path,
        "environment_module": environment_module,
        "reward_distribution": dict(reward_distribution),
    }


def decode_selection(data: Any, file: str) -> list[dict[str, Any]]:
    """Checks a selection that was read from JSON and gives its entries, unknown keys included.

    Raises:
      InputError: not such a list; the message names file, entry and field.
    """
    if not isinstance(data, list):
        raise InputError(f"{file}: a selection is a list of capabilities, found {type(data).__name__}")
    seen = set()
    for i, entry in enumerate(data):
        if not isinstance(entry, dict):
            raise InputError(f"{file}: entry {i} is not an object")
        where = f"{file}: entry {i} ({entry.get('skill')!r})"
        for key in _KNOWN:
            if key not in entry:
                raise InputError(f"{where}: field {key!r} is missing")
        if not is_name(entry["skill"]) or entry["skill"] in seen:
            raise InputError(f"{where}: field 'skill' must be a name in snake_case that occurs once")
        seen.add(entry["skill"])
        for key in _NUMBERS:
            if isinstance(entry[key], bool) or not isinstance(entry[key], (int, float)):
                raise InputError(f"{where}: field {key!r} is {entry[key]!r}, not a number")
        if entry["status"] not in (PENDING, DONE):
            raise InputError(f"{where}: field 'status' is {entry['status']!r}, not {PENDING} or {DONE}")
        for key in _FINISHED if entry["status"] == DONE else ():
            if key not in entry:
                raise InputError(f"{where}: field {key!r} is missing from an entry that is {DONE}")
    return data


def decode_candidates(data: Any, file: str) -> dict[str, str]:
    """Name to description of the candidates in a `candidates.json`.

    Raises:
      InputError: not such a file, or a name that occurs twice.
    """
    if not isinstance(data, dict) or not isinstance(data.get("candidates"), list):
        raise InputError(f"{file}: field 'candidates' must be a list")
    found: dict[str, str] = {}
    for i, candidate in enumerate(data["candidates"]):
        name = candidate.get("name") if isinstance(candidate, dict) else None
        if not is_name(name) or name in found or name in RESERVED:
            raise InputError(
                f"{file}: candidates[{i}]: field 'name' must be a name in snake_case that occurs once, found {shorten(repr(name))}"
            )
        found[name] = str(candidate.get("description", "")).encode(errors="replace").decode()  # half a surrogate pair is no text
    return found
