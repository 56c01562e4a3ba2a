"""One answer of an LLM about one conversation, as labels: what its form is, what can be wrong with it, and what of it counts.

A label is taken only with evidence that holds: the message exists and the quoted words are in it. Whatever else an answer says is a gap
with a reason; no label is ever guessed from it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl.trajectory import Trajectory
from trace_jax.agents.answers import AnswerError, find_json
from trace_jax.agents.protocol import Reply, Schema
from trace_jax.diagnose.compaction import content, escape, spoken
from trace_jax.diagnose.evidence import GAP, LABELS, NA, Candidate, Label

_LEAST_WORDS, _MOST_WORDS = 3, 40
_REASON = 500  # most characters of a reason that are kept
_SHOWN = 80  # most characters of an answer's text in a fault
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|\w+")  # signs of scripts without spaces count as words
_PLAIN = str.maketrans(dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'") | dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"')
                       | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-") | {"\u2026": "..."})  # fmt: skip
_MARK = re.compile(r"(?m)^[|>] ?")


def label_schema(candidates: Sequence[Candidate]) -> Schema:
    """An entry for each capability, evidence before the label, so that it is found before it is judged."""
    entry = object_schema(
        message_index={"type": ["integer", "null"]},
        quote={"type": "string"},
        reason={"type": "string"},
        label={"type": "string", "enum": list(LABELS)},
    )
    return object_schema(**{c.name: entry for c in candidates})


class Reading:
    """What answers about one conversation are held against."""

    def __init__(self, trajectory: Trajectory, candidates: Sequence[Candidate]):
        self._id = trajectory.id
        self._messages = trajectory.messages
        self._names = [c.name for c in candidates]
        self._said = functools.cache(lambda index: _variants(*_texts(self._messages[index])))

    def faults(self, answer: Any) -> list[str]:
        """What is wrong with an answer, each with its capability and field."""
        if not isinstance(answer, dict):
            return ["the answer must be an object with one entry for each capability"]
        unknown = [f"{shown(name)}: no such capability; leave it out" for name in answer if name not in self._names]
        return [fault for name in self._names for fault in self._entry_faults(name, answer.get(name))] + unknown

    def labels(self, reply: Reply) -> list[Label]:
        """A label for each capability: those of the answer that hold, and for the others a gap that says why."""
        answer = answer_of(reply)
        answer = answer if isinstance(answer, dict) else {}
        useless = reply.faults if not any(name in answer for name in self._names) else ()
        labels = []
        for name in self._names:
            entry = answer.get(name)
            if faults := list(self._entry_faults(name, entry)):
                why = useless or faults
                labels.append(Label(self._id, name, GAP, None, clipped("; ".join(why), _REASON)))
            elif entry["label"] == NA:
                labels.append(Label(self._id, name, NA, None, clipped(entry["reason"], _REASON)))
            else:
                quote = " ".join(escape(entry["quote"]).split()[:_MOST_WORDS])
                labels.append(Label(self._id, name, entry["label"], int(entry["message_index"]), clipped(entry["reason"], _REASON), quote))
        return labels

    def _entry_faults(self, name: str, entry: Any) -> Iterator[str]:
        if entry is None:
            yield f"{name}: missing; every capability needs an entry"
            return
        if not isinstance(entry, dict):
            yield f"{name}: must be an object with message_index, quote, reason and label"
            return
        label = entry.get("label")
        if label not in LABELS:
            yield f"{name}.label: {shown(label)} is not one of {', '.join(LABELS)}"
        if not isinstance(entry.get("reason"), str) or not entry["reason"].strip():
            yield f"{name}.reason: must be one sentence"
        if label == NA:
            return
        index, last = entry.get("message_index"), len(self._messages) - 1
        if isinstance(index, bool) or not (isinstance(index, int) or (isinstance(index, float) and index.is_integer())):
            yield f"{name}.message_index: must be the number of the message that shows it, found {shown(index)}"
        elif not 0 <= index <= last:
            yield f"{name}.message_index: there is no message {int(index)}; the conversation has the messages 0 to {last}"
        elif self._messages[int(index)]["role"] == "system":
            yield f"{name}.message_index: message {int(index)} is the system prompt, which shows nothing of the agent; name another message"
        else:
            yield from (f"{name}.quote: {fault}" for fault in self._quote_faults(entry.get("quote"), int(index)))

    def _quote_faults(self, quote: Any, index: int) -> Iterator[str]:
        if not isinstance(quote, str):
            yield f"must be text copied from message {index}"
            return
        said, quoted = self._said(index), _variants(quote)
        if quote.strip() and quoted & said:
            return  # the whole message, however short
        if len(_WORD.findall(quote)) < _LEAST_WORDS:
            words = f"{_LEAST_WORDS} to {_MOST_WORDS} words"
            yield f"{shown(quote)} is too short; copy {words} from message {index}, or all of it if it is shorter"
        elif not self._occurs(quoted, index):
            other = next((i for i, m in enumerate(self._messages) if m["role"] != "system" and self._occurs(quoted, i)), None)
            where = "" if other is None else f"; they are in message {other}"
            yield f"the words {shown(quote)} are not in message {index}{where}; copy words of the message that is named, exactly"

    def _occurs(self, quoted: frozenset[str], index: int) -> bool:
        return any(q in text for q in quoted for text in self._said(index))


def answer_of(reply: Reply) -> Any:
    """The value of an answer, or of one that does not fit its schema: the parts that do can still count. None where there is no JSON."""
    try:
        return reply.parsed if reply.parsed is not None else find_json(reply.text, dict)
    except AnswerError:
        return None


def object_schema(**properties: Any) -> dict[str, Any]:
    """The JSON schema of an object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _texts(message: Mapping[str, Any]) -> list[str]:
    """A message as it was written for the prompt, and as it is."""
    calls = (
        f"{c['name']}({json.dumps(c.get('arguments') or {}, ensure_ascii=False, default=str)})" for c in message.get("tool_calls") or []
    )
    return [spoken(message), "\n".join([content(message), *calls])]


def _variants(*texts: str) -> frozenset[str]:
    """Texts without regard to case, spaces and the form of quotation marks and dashes, which models write their own way; a second time
    without the marks that lines may begin with."""
    texts = tuple(text.translate(_PLAIN) for text in texts)
    return frozenset(" ".join(t.split()).casefold() for text in texts for t in (text, _MARK.sub("", text)))


def shown(value: Any) -> str:
    """A value of an answer, for the sentence that refuses it."""
    return repr(clipped(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), _SHOWN))


def clipped(text: str, most: int) -> str:
    """A text from outside as one line of at most `most` characters."""
    text = escape(" ".join(text.split()))
    return text if len(text) <= most else text[: most - 3] + "..."
