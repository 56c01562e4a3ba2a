"""One rollout as its page shows it: everything complete, what is long folded away, and what is long beyond that on a page of its own.

Whoever speaks of a message (a check of the grader, a label of the diagnosis) is told beside it, and the words that a label quotes are
marked in it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from rl.trajectory import Trajectory
from trace_jax.diagnose.evidence import Label
from trace_jax.report.text import as_text, visible

_SHOWN = 2_500  # characters of a text that is too long: its beginning
_FOLDED = 60_000  # and what can be unfolded
_LINE = 80  # characters of JSON that stay in one line
_BREAK = re.compile(r"(?<!\\)((?:\\\\)*)\\n")  # of a string in JSON
_THOUGHT = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_KNOWN = ("role", "content", "tool_calls", "tool_call_id")


@dataclasses.dataclass(frozen=True)
class Text:
    """A text as it is shown.

    Attributes:
      begin, fold: its beginning, and what is folded away.
      more: how many characters these two leave out.
      size: how many it has.
      open: what is folded away has a mark.
    """

    begin: Markup
    fold: Markup
    more: int
    size: int
    open: bool

    @classmethod
    def of(cls, text: str, marks: Sequence[str] = (), shown: int = _SHOWN) -> Text:
        """A text, with words in it marked, of which about `shown` characters are not folded away."""
        cut = len(text) if len(text) <= shown * 1.2 else shown
        begin, fold = (_marked(part, marks) for part in (text[:cut], text[cut:_FOLDED]))
        return cls(begin, fold, max(len(text) - max(cut, _FOLDED), 0), len(text), "<mark>" in fold)


@dataclasses.dataclass(frozen=True)
class Part:
    """Of a message: what is said, thought, called, or answered by a tool. `title` is the tool's name, `text` all of it."""

    kind: str
    title: str
    text: str
    shown: Text


@dataclasses.dataclass(frozen=True)
class Message:
    """A message, and who speaks of it: (`check` or the label's value, the name, what is said)."""

    number: int
    role: str
    parts: Sequence[Part]
    notes: Sequence[tuple[str, str, str]]


def messages(trajectory: Trajectory, labels: Mapping[str, Label]) -> list[Message]:
    """The conversation, in order."""
    found, tools = [], {}
    hint = (trajectory.hint or {}).get("text")
    for number, message in enumerate(trajectory.messages):
        quotes = [label.quote for label in labels.values() if label.message_index == number and label.quote]
        parts = [Part(*part, Text.of(part[2], [*quotes, *([hint] if hint else ())])) for part in texts(message, tools)]
        notes = [(label.value, name, label.reason) for name, label in labels.items() if label.message_index == number]
        notes += [
            ("check", name, "passed" if check.get("passed") else "failed")
            for name, check in trajectory.checks.items()
            if check.get("message_index") == number
        ]
        found.append(Message(number, as_text(message.get("role")), parts, notes))
    return found


def texts(message: Mapping[str, Any], tools: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """(kind, title, text) of the parts of a message.

    Args:
      tools: names of the tools by the calls so far; gets those of this message.
    """
    content = message.get("content")
    content = "" if content is None else content if isinstance(content, str) else pretty(content)
    answered = message.get("role") == "tool"
    if answered:
        yield "result", tools.get(as_text(message.get("tool_call_id")), ""), content
    else:
        end = 0
        for thought in _THOUGHT.finditer(content):
            yield from _said(content[end : thought.start()])
            yield "thought", "", thought[1].strip("\n")
            end = thought.end()
        yield from _said(content[end:])
    for call in message.get("tool_calls") or ():
        call = call if isinstance(call, dict) else {"arguments": call}
        name = as_text(call.get("name", ""))
        tools[as_text(call.get("id"))] = name
        yield "call", name, pretty(call.get("arguments"))
    for key, value in message.items():
        if key not in _KNOWN and value not in (None, "", [], {}):
            yield "other", key, pretty(value)


def pretty(value: Any) -> str:
    """A text as it is, anything else as JSON, in lines where one is too short; a script in it keeps its own lines."""
    if isinstance(value, str):
        return value
    try:
        line = json.dumps(value, ensure_ascii=False)
        return line if len(line) <= _LINE else _BREAK.sub(r"\1\n", json.dumps(value, indent=2, ensure_ascii=False))
    except RecursionError:
        return "nested too deeply to be shown; the raw JSON has it"


def _said(text: str) -> Iterator[tuple[str, str, str]]:
    if text.strip():
        yield "text", "", text.strip("\n")


def _marked(text: str, quotes: Sequence[str]) -> Markup:
    """With each quote marked where its words stand, whatever lies between them."""
    words = [r"\s+".join(map(re.escape, quote.split())) for quote in quotes if quote.split()]
    if not words:
        return escape(visible(text))
    found, end = [], 0
    for match in re.finditer("|".join(words), text, re.IGNORECASE):
        found += [escape(visible(text[end : match.start()])), Markup("<mark>"), escape(visible(match[0])), Markup("</mark>")]
        end = match.end()
    return Markup("").join([*found, escape(visible(text[end:]))])
