"""What a trajectory shows, prepared for the rules of the evidence analyst: expected actions, attempts, strays, and where values came from.

The notions are the same for tau2 files and for the desk:

* origin of a value: who wrote it first. A value that the user said first is dictated; any other has to be looked up or derived.
* record key: an argument that read tools take somewhere in the analysed set (order_id, reservation_id). A key that only writes take holds
  payload (zip, amount).
* attempt: a call paired with an expected action, or another call of that name about the same record.
* stray: a write that is no attempt at any expected action.

Nothing here reads `reward`, `success` or the `passed` flag of a check.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from rl.trajectory import StopReason, Trajectory
from trace_jax.diagnose.calls import Call, agent_calls, fields, leaves, pair, read_or_write, text_of

NA, PRESENT, LACKING = "NA", "PRESENT", "LACKING"
Verdict = tuple[str, int | None, str]  # a label, the message that shows it, the reason
LABELS = (NA, PRESENT, LACKING)
GAP = "GAP"  # the labeller gave no valid label: a missing value, never taken for one of the three
RESERVED = frozenset({"base", "uniform", "constant", "router", "composed", "all", "na", "present", "lacking", "gap"})  # policies, labels
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST_NAME = 64


def is_name(name: Any) -> bool:
    """Whether it can name a capability, whose files are in folders of that name."""
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and _NAME.fullmatch(name) is not None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A capability that the agent may lack.

    Attributes:
      outcome_bound: the labeller cannot find it LACKING in a passed trajectory, so that its gap equals ER- by construction.
    """

    name: str
    description: str
    outcome_bound: bool = False


@dataclasses.dataclass(frozen=True)
class Label:
    """What one trajectory shows of one capability.

    Attributes:
      value: one of LABELS, or GAP.
      message_index: the message that shows it; None only for NA and GAP.
      reason: of a gap, why there is no label.
      quote: words of that message, where the labeller was asked for them.
    """

    trajectory: str
    capability: str
    value: str
    message_index: int | None
    reason: str
    quote: str = ""


class Evidence:
    """Expected actions, calls and the conversation of one trajectory, prepared for the rules.

    Attributes:
      expected: expected actions of the agent, `{"name", "arguments", "kind"}`, in order.
      calls: the agent's calls.
      paired: for each expected action the index of the call that comes nearest, or None.
      attempts: for each expected action the indices of the calls that tried it, in order.
      strays: indices of the writes that tried no expected action.
      to_tell: what the task wants told.
      said: what the agent says in each message, lower case and without commas; empty where the message is not the agent's.
      code: whether the task is to change a repository; then `patch` is what the agent handed in.
    """

    def __init__(self, trajectory: Trajectory, record_keys: frozenset[str]):
        self.messages = trajectory.messages
        self.ended = trajectory.stop_reason == StopReason.DONE
        self.invalid = trajectory.stop_reason == StopReason.INVALID_ACTION
        self.record_keys = record_keys
        self.expected = expected_actions(trajectory)
        self.to_tell = [str(c["expected"]) for name, c in trajectory.checks.items() if name.startswith("communicate:")]
        self.code = "patch" in trajectory.checks
        self.patch = str(trajectory.checks["patch"]["actual"] or "") if self.code else ""
        self.calls = agent_calls(trajectory.messages)
        self.kinds = {a["name"]: a["kind"] for a in self.expected}
        self.paired = pair(self.expected, self.calls)
        self.attempts = [self._attempts(i) for i in range(len(self.expected))]
        tried = {c for attempts in self.attempts for c in attempts}
        self.strays = [c for c, call in enumerate(self.calls) if self.kind(call) == "write" and c not in tried]
        self.said = [str(m.get("content") or "").lower().replace(",", "") if m["role"] == "assistant" else "" for m in self.messages]
        self._texts = [_message_text(m) for m in self.messages]
        self._origins: dict[str, tuple[str, int]] = {}
        every = [a["arguments"] for a in self.expected] + [c.arguments for c in self.calls]
        self._spelling = {text_of(v): str(v) for arguments in every for _, v in leaves(arguments)}

    def kind(self, call: Call) -> str:
        return self.kinds.get(call.name) or read_or_write(call.name)

    def records(self, arguments: dict[str, Any]) -> set[tuple[str, str]]:
        """(key, text) of the arguments that name a record: a record key, holding letters (or #) and digits, so no date and no amount."""
        return {(k, v) for k, v in fields(arguments) if k in self.record_keys and _IDENTIFIER.fullmatch(v)}

    def _attempts(self, i: int) -> list[int]:
        action, paired = self.expected[i], self.paired[i]
        if paired is None:
            return []
        others = {c for j, c in enumerate(self.paired) if j != i and c is not None}
        records = self.records(action["arguments"]) | self.records(self.calls[paired].arguments)
        same = [
            c
            for c, call in enumerate(self.calls)
            if call.name == action["name"] and c not in others and records & self.records(call.arguments)
        ]
        return sorted({paired, *same})

    def origin(self, value: str) -> tuple[str, int]:
        """(role, message index) of the first message in which a value occurs, ("", len) if none does; the system prompt does not count."""
        if value not in self._origins:
            whole = re.compile(rf"(?<![a-z0-9]){re.escape(value)}(?![a-z0-9])")
            found = (
                i for i, m in enumerate(self.messages) if m["role"] != "system" and value in self._texts[i] and whole.search(self._texts[i])
            )
            index = next(found, len(self.messages))
            self._origins[value] = (self.messages[index]["role"] if index < len(self.messages) else "", index)
        return self._origins[value]

    def dictated(self, value: str) -> bool:
        """The user said it before anybody else."""
        return self.origin(value)[0] == "user"

    def made_up(self, value: str) -> bool:
        """The agent wrote it before anybody else: derived, or a slip. A date is not made up: "May 20" becomes 2024-05-20."""
        return self.origin(value)[0] == "assistant" and not _DATE.fullmatch(value)

    def before(self, value: str, call: Call) -> bool:
        """The value occurs in the conversation before the call."""
        return self.origin(value)[1] < call.message_index

    def spell(self, *values: str) -> str:
        """Values as the arguments spell them, for reasons."""
        return ", ".join(self._spelling.get(v, v) for v in values)

    def last(self) -> int:
        """The agent's last message."""
        return max((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), default=len(self.messages) - 1)


_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_IDENTIFIER = re.compile(r"#?(?=.*[a-z#])(?=.*\d)[\w#@.-]+")


def _message_text(message: dict[str, Any]) -> str:
    written = [str(v) for call in message.get("tool_calls") or [] for _, v in leaves(call.get("arguments") or {})]
    text = " ".join([str(message.get("content") or ""), *written]).lower()
    return re.sub(r"(?<=\d),(?=\d{3})", "", text)  # 1,234 and 1234 are one number


def is_value(value: str) -> bool:
    """An id, number or date: something with a digit in one word, so neither prose nor a name nor a choice like "economy"."""
    return any(ch.isdigit() for ch in value) and not any(ch.isspace() for ch in value)


def expected_actions(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The `expected` of the checks `action:0`, `action:1`, ..., in order."""
    found = [c["expected"] for name, c in trajectory.checks.items() if name.startswith("action:")]
    return [{**a, "arguments": a.get("arguments") or {}, "kind": a.get("kind") or read_or_write(a["name"])} for a in found]


def unknown_calls(trajectories: Iterable[Trajectory]) -> frozenset[str]:
    """The environments of which nothing says which calls were expected: no check `action:0`, ... in any trajectory, nor a patch.

    Where another trajectory of the environment has such a check, one without expects no call.
    """
    known: dict[str, bool] = {}
    for t in trajectories:
        told = any(name.startswith("action:") or name == "patch" for name in t.checks)
        known[t.environment] = known.get(t.environment, False) or told
    return frozenset(environment for environment, told in known.items() if not told)


def record_keys(trajectories: Iterable[Trajectory]) -> frozenset[str]:
    """The argument keys that read tools take anywhere in a set of trajectories."""
    keys = set()
    for t in trajectories:
        actions = [(a["name"], a["kind"], a["arguments"]) for a in expected_actions(t)]
        kinds = {name: kind for name, kind, _ in actions}
        actions += [(c.name, kinds.get(c.name) or read_or_write(c.name), c.arguments) for c in agent_calls(t.messages)]
        keys |= {key for _, kind, arguments in actions if kind == "read" for key, _ in leaves(arguments)}
    return frozenset(keys)
