"""A conversation as text for the prompt of an LLM, within a budget of tokens.

What a label depends on is kept: the user's first message, calls that change state, their results, errors with their calls, the last
messages, the stop reason. The rest gives way in order: results of reads are shortened in their middle, then everything else that may be;
next they become stubs of one line, the longest read first; at last what is kept is shortened too, but never removed.

A conversation is written by strangers. Each of its lines therefore begins with a mark that no text of theirs can put there:

    [7] tool result (error): a message of the trajectory, by its index; the system prompt is number 0
    | another line of its text
    > update_record({"id": "A1"})    a call, its arguments as JSON
    ... 1,234 characters left out ...
    [end] stop reason: done
    [check] db failed: what the grader compared

A prompt that frames conversations with lines of another form cannot be broken out of.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl.trajectory import Trajectory
from trace_jax.diagnose.calls import Call, agent_calls, read_or_write
from trace_jax.diagnose.evidence import expected_actions
from trace_jax.errors import InputError

_LAST = 4  # messages at the end that are kept: usually the last call, its result, what the agent says of it and the answer
_SHORT = 300  # thirds of a token: to this a text that is not kept is shortened before it becomes a stub
_SHORTEST = 120  # to this one that is kept
_BREAKS = 4  # of the lines around what says how much was left out
_CHECK = 600  # most of what a grader compared
_TESTS = 20  # failed tests of a repository that are named; the others, and those that passed, are counted
_NAME = 100  # most characters of a tool's name, a role's, a check's

_ROLES = {"system": "system prompt", "user": "user", "assistant": "agent", "tool": "tool result"}

# Control characters, and those that hide, turn or break text: soft hyphen, directions, zero widths, separators, lone surrogates, tags.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    "|<(?=[|\uff5c])"  # the special tokens of chat templates, which a server may take for its own
)

# A tool for commands is a write by its name. Commands that only look are told from the others, in doubt they are none of them.
_LOOKS = re.compile(
    r"\s*(cd|echo|ls|cat|head|tail|[ef]?grep|rg|find|sed -n|nl|wc|sort|uniq|cut|tree|pwd|file|stat|which"
    r"|git (log|show|diff|status|grep|blame))\b(?!.*\s-(delete|exec|execdir|ok|i|-output)\b)|\s*$"
)
_BETWEEN_COMMANDS = re.compile(r"&&|\|\||[;|\n]")
_TO_NOWHERE = re.compile(r"2>\s*(&1|/dev/null)")


class _Tier(enum.Enum):
    """What gives way first."""

    READ = enum.auto()
    REST = enum.auto()
    KEPT = enum.auto()


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A text of the conversation between marks that always stay.

    Attributes:
      text: escaped, its lines not yet marked.
      cut: characters that are missing in its middle already, since no budget has room for them.
      most: thirds of a token that are shown at most, whatever the budget.
    """

    before: str
    text: str
    after: str
    tier: _Tier
    cut: int = 0
    most: int | None = None

    @property
    def full(self) -> int:
        """Thirds of a token that the whole text takes."""
        return _thirds(self.text) + self.cut

    @property
    def stub(self) -> int:
        """Thirds of a token that are left of a text that is not shown."""
        return _thirds(_left_out(len(self.text) + self.cut))

    def show(self, limit: int) -> str:
        """The piece with at most `limit` thirds of a token of text, or as a stub."""
        if self.full <= max(limit, self.stub):
            return self.before + self.text.replace("\n", "\n| ") + self.after
        room = limit - self.stub - _BREAKS if limit >= _SHORTEST else 0
        head = self.text[: _fitting(self.text, room * 3 // 5)]
        tail = self.text[len(self.text) - _fitting(self.text[::-1], room * 2 // 5) :] if room else ""
        left = _left_out(len(self.text) - len(head) - len(tail) + self.cut)
        middle = f"\n{left}\n| " if room else left
        return self.before + head.replace("\n", "\n| ") + middle + tail.replace("\n", "\n| ") + self.after


def escape(text: str) -> str:
    """The text with its control characters and invisible ones written out, and without special tokens of chat templates."""
    return _HIDDEN.sub(_written_out, text.replace("\r\n", "\n"))


def spoken(message: Mapping[str, Any]) -> str:
    """All that a message says as `compact` writes it, unmarked: its text, and its calls one a line. Quotes are looked up here."""
    calls = [f"{_name(call.get('name'))}({_arguments(call)})" for call in message.get("tool_calls") or []]
    return "\n".join([escape(content(message)), *calls])


def content(message: Mapping[str, Any]) -> str:
    """The text of a message as it is."""
    text = message.get("content")
    return text if isinstance(text, str) else "" if text is None else json.dumps(text, ensure_ascii=False, default=str)


def compact(trajectory: Trajectory, tokens: int, *, outcome: bool = True) -> str:
    """The conversation as numbered messages.

    Args:
      tokens: the budget, as `agents.budget.estimate_tokens` counts.
      outcome: adds the reward and the grader's checks at the end; without it nothing tells whether the trajectory passed.

    Raises:
      InputError: what must be kept does not fit.
    """
    budget = max(3 * tokens - 1, 1)  # in thirds; the estimate of the whole text rounds up
    pieces = _pieces(trajectory, budget) + _ending(trajectory, outcome, budget)
    full, stub = [p.full for p in pieces], [p.stub for p in pieces]
    limits = [budget if p.most is None else min(budget, p.most) for p in pieces]
    room = budget - sum(_thirds(p.before) + _thirds(p.after) + 1 for p in pieces)

    def total(tier: _Tier | None = None, level: int = 0) -> int:
        """Upper bound of what the texts take when those of `tier` are shortened to `level`."""
        shown = (min(limit, level) if p.tier is tier else limit for p, limit in zip(pieces, limits, strict=True))
        return sum(min(f, max(limit, s)) for f, limit, s in zip(full, shown, stub, strict=True))

    def shorten(tier: _Tier, least: int) -> None:
        level = least + max(0, bisect.bisect_right(range(least, budget + 1), room, key=lambda x: total(tier, x)) - 1)
        for n, p in enumerate(pieces):
            limits[n] = min(limits[n], level) if p.tier is tier else limits[n]

    def drop(tier: _Tier) -> None:
        excess = total() - room
        for n in sorted((n for n, p in enumerate(pieces) if p.tier is tier), key=lambda n: (-full[n], abs(2 * n - len(pieces)), n)):
            if excess > 0:
                excess -= max(0, min(full[n], limits[n]) - stub[n])
                limits[n] = 0

    for step in (
        lambda: shorten(_Tier.READ, _SHORT),
        lambda: shorten(_Tier.REST, _SHORT),
        lambda: drop(_Tier.READ),
        lambda: drop(_Tier.REST),
        lambda: shorten(_Tier.KEPT, _SHORTEST),
    ):
        if total() > room:
            step()
    if total() > room:
        least = -(-(budget - room + total()) // 3)
        raise InputError(
            f"trajectory {trajectory.id}: its {len(trajectory.messages)} messages need {least:,} tokens even when shortened, and "
            f"{tokens:,} of a prompt are left for them; raise agents.prompt_tokens"
        )
    return "\n".join(p.show(limit) for p, limit in zip(pieces, limits, strict=True))


# --- pieces ----------------------------------------


def _pieces(trajectory: Trajectory, budget: int) -> list[_Piece]:
    messages = trajectory.messages
    kinds = {action["name"]: action["kind"] for action in expected_actions(trajectory)}
    calls = {index: list(group) for index, group in itertools.groupby(agent_calls(messages), lambda call: call.message_index)}
    answered = _answered(messages, calls)
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)

    def keeps(call: Call) -> bool:
        kind = kinds.get(call.name) or read_or_write(call.name)
        return call.error or (kind == "write" and not _only_looks(call.arguments.get("command")))

    pieces = []
    for index, message in enumerate(messages):
        text, cut = _escaped(content(message), budget)
        role, call = str(message["role"]), answered.get(index)
        error = role == "tool" and bool(message.get("error") or text.startswith("Error"))
        kept = index == first or index >= len(messages) - _LAST or error or (call is not None and keeps(call))
        tier = _Tier.KEPT if kept else _Tier.READ if role == "tool" else _Tier.REST
        who = (_ROLES.get(role) or _name(role)) + (" (error)" if error else "")
        pieces.append(_Piece(f"[{index}] {who}:" + " " * bool(text), text, "", tier, cut))
        for request, made in zip(message.get("tool_calls") or [], calls.get(index, []), strict=False):
            tier = _Tier.KEPT if index >= len(messages) - _LAST or keeps(made) else _Tier.REST
            text, cut = _escaped(_json(request.get("arguments")), budget)
            pieces.append(_Piece(f"> {_name(request['name'])}(", text, ")", tier, cut))
    return pieces


def _answered(messages: Sequence[Mapping[str, Any]], calls: Mapping[int, Sequence[Call]]) -> dict[int, Call]:
    """The call that each result answers, by the index of the result: by id, or by position, as `agent_calls` has it."""
    found = {}
    for index, mine in calls.items():
        position = {request.get("id"): n for n, request in enumerate(messages[index]["tool_calls"]) if request.get("id")}
        results = itertools.takewhile(lambda i: messages[i]["role"] == "tool", range(index + 1, len(messages)))
        for n, result in enumerate(results):
            which = position.get(messages[result].get("tool_call_id"), n)
            if which < len(mine):
                found[result] = mine[which]
    return found


def _only_looks(command: Any) -> bool:
    """Whether a command of a shell, or of an editor that is told what to do, changes no file."""
    if not isinstance(command, str):
        return False
    parts = _BETWEEN_COMMANDS.split(_TO_NOWHERE.sub("", command))
    return command == "view" or (not set(">`$&") & set("".join(parts)) and all(_LOOKS.match(part) for part in parts))


def _ending(trajectory: Trajectory, outcome: bool, budget: int) -> list[_Piece]:
    pieces = [_Piece(f"[end] stop reason: {trajectory.stop_reason.value}", "", "", _Tier.KEPT)]
    if not outcome:
        return pieces
    if trajectory.reward is not None:
        verdict = "passed" if trajectory.success else "failed"
        pieces.append(_Piece(f"[end] reward: {trajectory.reward:g}, {verdict}", "", "", _Tier.KEPT))
    tests = [name for name in trajectory.checks if name.startswith("test:")]
    failed = [name for name in tests if not trajectory.checks[name].get("passed")]
    counted = set(tests) - set(failed[:_TESTS])
    for name, check in trajectory.checks.items():
        if name in counted:
            continue
        verdict = {True: "passed", False: "failed"}.get(check.get("passed"), "not judged")
        at = "" if check.get("message_index") is None else f" at message {check['message_index']}"
        compared = [f"{key} {_json(check[key])}" for key in ("expected", "actual") if check.get(key) is not None]
        text, cut = _escaped("; ".join(compared), budget)
        before = f"[check] {_name(name)} {verdict}{at}" + ": " * bool(text)
        pieces.append(_Piece(before, text, "", _Tier.REST, cut, _CHECK))
    for number, which in ((len(tests) - len(failed), "tests passed"), (len(failed[_TESTS:]), "more tests failed")):
        pieces += [_Piece(f"[check] {number} {which}", "", "", _Tier.REST)] if number else []
    return pieces


# --- text ----------------------------------------


def _thirds(text: str) -> int:
    """Thirds of a token that a text takes with its lines marked; a digit or another character than ASCII has three."""
    beyond_ascii = 0 if text.isascii() else len(text) - len(text.encode("ascii", "ignore"))
    return len(text) + 2 * (beyond_ascii + sum(map(text.count, "0123456789")) + text.count("\n"))


def _left_out(characters: int) -> str:
    return f"... {characters:,} characters left out ..."


def _fitting(text: str, limit: int) -> int:
    """How many first characters fit."""
    text = text[:limit]
    return bisect.bisect_right(range(1, len(text) + 1), limit, key=lambda n: _thirds(text[:n]))


def _escaped(raw: str, budget: int) -> tuple[str, int]:
    """The text escaped, and how many characters of its middle were left out, since neither half could ever be shown beyond the budget."""
    cut = max(0, len(raw) - 2 * budget)
    return (escape(raw[:budget]) + escape(raw[-budget:]), cut) if cut else (escape(raw), 0)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "<\\" if match[0] == "<" else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _name(name: Any) -> str:
    return escape(str(name))[:_NAME].replace("\n", "\\n")


def _arguments(call: Mapping[str, Any]) -> str:
    return escape(_json(call.get("arguments")))


def _json(value: Any) -> str:
    return json.dumps({} if value is None else value, ensure_ascii=False, default=str)
