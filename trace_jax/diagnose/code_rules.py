"""Rules of the evidence analyst for agents that edit a repository through commands and hand in a patch.

A result file of SWE-bench tells which tests passed, which is a verdict, and not what the patch should have been. So these rules read
habits: what was run after the last edit, what the patch holds beside the fix, whether there is one. Deeper capabilities need an LLM's
labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from trace_jax.diagnose.calls import Call
from trace_jax.diagnose.evidence import LACKING, NA, PRESENT, Candidate, Evidence, Verdict

_CHANGED = re.compile(r"^\+\+\+ (?:b/)?(\S+)|^--- a/(\S+)", re.MULTILINE)
_ADDED = re.compile(r"^--- /dev/null\n\+\+\+ (?:b/)?(\S+)", re.MULTILINE)
_IN_PLACE = re.compile(r"\bsed\b[^|;&]*\s-\w*i|\bperl\b[^|;&]*\s-\w*i|\btee\b|\bwrite(_text)?\(|\bmv\b|\bcp\b")
_SCRIPT = re.compile(r"\bpython[\d.]*\s*-?\s*<<.*", re.DOTALL)  # given to Python as it stands, often to edit a file
_EDITORS = re.compile(r"edit|insert|replace|create|write|patch")  # tools that are no shell
_RUNS = re.compile(r"(?:^|[\s;&|(])(?:python[\d.]*|pytest|tox|nox|nosetests|make|\S*(?:manage|runtests|setup)\.py)(?:\s|$)", re.MULTILINE)
_SCRATCH = re.compile(
    r"(^|/)(tests?|testing)/|(^|/)(test|repro|debug|verify|check|demo|example)\w*\.\w+$|_tests?\.\w+$|\.(orig|rej|log|diff|patch)$"
)


def verification_after_edit(e: Evidence) -> Verdict:
    """The code is run again after the last edit of a file that the patch changes.

    Applicable where such an edit can be told from the commands.
    """
    names = {(new or old).rpartition("/")[2] for new, old in _CHANGED.findall(e.patch)}
    edits = [i for i, call in enumerate(e.calls) if _edits(call, names)]
    if not edits:
        return NA, None, "no command is known as an edit of what the patch changes"
    last = e.calls[edits[-1]]
    later = [(last, _SCRIPT.sub("", _command(last))), *((call, _command(call)) for call in e.calls[edits[-1] + 1 :])]
    after = next((call for call, command in later if _RUNS.search(command)), None)
    if after is None:
        return LACKING, last.message_index, "nothing is run after this edit, the last of what the patch changes"
    return PRESENT, after.message_index, "the code is run after the last edit of what the patch changes"


def patch_hygiene(e: Evidence) -> Verdict:
    """The patch holds the fix alone: no tests, no scripts to reproduce or debug, no left-overs. Applicable where there is a patch."""
    added = _ADDED.findall(e.patch)
    changed = [new or old for new, old in _CHANGED.findall(e.patch)]
    if not changed:
        return NA, None, "no patch"
    strays = sorted({path for path in changed if _SCRATCH.search(path)} | {path for path in added if "/" not in path})
    if strays:
        return LACKING, e.last(), f"the patch holds {', '.join(strays[:3])}"
    return PRESENT, e.last(), "the patch changes sources alone"


def delivering_a_patch(e: Evidence) -> Verdict:
    """The work ends with a patch, whatever it is worth."""
    if e.patch.strip():
        return PRESENT, e.last(), "a patch is handed in"
    return LACKING, e.last(), "the episode ends without a patch"


def _command(call: Call) -> str:
    return str(call.arguments.get("command") or "")


def _edits(call: Call, names: set[str]) -> bool:
    """Whether a call changes one of the files of these names."""
    command, said = _command(call), " ".join(map(str, call.arguments.values()))
    editor = _IN_PLACE.search(command) or _EDITORS.search(call.name)
    return any(name in said and (editor or re.search(rf">\s*['\"]?\S*{re.escape(name)}", command)) for name in names)


CODE_RULES: dict[str, tuple[Candidate, Callable[[Evidence], Verdict]]] = {
    rule.__name__: (Candidate(rule.__name__, description, outcome_bound), rule)
    for rule, outcome_bound, description in [
        (
            verification_after_edit,
            False,
            "Runs the code after changing it. LACKING: nothing is run after the last edit. PRESENT: tests or a script are run after it.",
        ),
        (
            patch_hygiene,
            False,
            "Hands in the fix alone. LACKING: the patch holds tests, scripts or left-overs. PRESENT: it changes sources alone.",
        ),
        (
            delivering_a_patch,
            True,
            "Ends the work with a patch. LACKING: limits or broken calls end it before. PRESENT: a patch is handed in.",
        ),
    ]
}
