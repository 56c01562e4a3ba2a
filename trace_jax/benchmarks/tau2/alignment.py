"""Does a conversation belong to its task? Published result files exist whose messages were attached to the wrong task ids.

Every task names things of its own: identities of its user (ids, names, e-mail addresses) and records. A conversation is foreign when its
own user does not occur in it and another task of the same file is named more: by that task's user, or, if nothing of its own occurs at
all, by two of that task's things. A conversation in which nobody names anything is not accused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rl.trajectory import Trajectory
from trace_jax.diagnose.calls import leaves

Names = tuple[frozenset[str], frozenset[str]]  # (identities of a task's user, all of its things), lower case

# letters and digits in one word, as in EHGLP3, emma_kim_9957, #W2378156, HAT136, C39
_RECORD = re.compile(r"#?\b(?=\w*[A-Za-z])(?=\w*\d)\w{3,}\b")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.]+")
_USER_ID = re.compile(r"\b[a-z]+(?:_[a-z]+)+_\d+\b")
_NAME = re.compile(r"(?:[Yy]ou are|[Yy]our name is|[Nn]ame:) ([A-Z][a-z'’-]+ [A-Z][a-z'’-]+)")


def names_of(scenario: str, actions: Iterable[Mapping[str, Any]]) -> Names:
    """What a task names.

    Args:
      scenario: the text that the user simulator acts on.
      actions: expected actions, `{"name", "arguments"}`.
    """
    written = " ".join(str(value) for action in actions for _, value in leaves(action.get("arguments") or {}) if isinstance(value, str))
    identities = {m.lower() for text in (scenario, written) for pattern in (_USER_ID, _EMAIL) for m in pattern.findall(text)}
    identities |= {m.lower() for m in _NAME.findall(scenario)}
    things = {m.lower() for text in (scenario, written) for m in _RECORD.findall(text)}
    return frozenset(identities), frozenset(identities | things)


def foreign(conversation: str, task: str, names: Mapping[str, Names]) -> str | None:
    """The other task that a conversation belongs to, or None if it may be its own.

    Args:
      conversation: everything said, called and returned, in one text.
      task: the id it is filed under.
      names: `names_of` every task of the file, by id.
    """
    said = conversation.lower()

    def occurring(things: Iterable[str]) -> set[str]:
        return {t for t in things if t in said and (any(c in t for c in " @#") or re.search(rf"(?<![\w#]){re.escape(t)}(?!\w)", said))}

    own_identities, own = names[task]
    if not own or occurring(own_identities):
        return None
    here = len(occurring(own))
    best, score = None, max(1, here)
    for other, (identities, things) in names.items():
        known = occurring(identities - own_identities)
        found = 2 * len(known) + len(occurring(things - identities - own))
        if other != task and found > score and (known or not here):
            best, score = other, found
    return best


def stranger(t: Trajectory, names: Mapping[str, Names]) -> str | None:
    """`foreign` of a trajectory, whose system prompt is no part of the conversation."""
    return foreign(json.dumps([m for m in t.messages if m["role"] != "system"], ensure_ascii=False), t.task_id, names)
