"""From the tokens of one turn to what a client reads, bit by bit: text, thoughts, calls.

One machine serves both kinds of answer: a stream sends each delta, an answer in one piece joins them, so the two are equal. It gives text
out as soon as nothing that follows can change it: not half a character, not what may be the beginning of a stop string or of a tag. A
turn's calls come out together at its end, since one that cannot be read makes text of all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from envs.base import ToolCall
from rl.tool_calls import OPEN, Unreadable, parse_calls

# Benchmarks such as tau2 take an empty message for a broken server and drop the episode; blanks count as empty there.
EMPTY = "(empty reply)"
_THINK, _THOUGHT = "<think>", "</think>"

Finish = Literal["stop", "length", "tool_calls"]


@dataclasses.dataclass
class Delta:
    """What is new in a turn; `finish` ends it. The tokens are those sampled since the last delta, the closing control token included."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    finish: Finish | None = None

    def add(self, other: Delta) -> None:
        """Makes one delta of this and the next."""
        self.content += other.content
        self.reasoning += other.reasoning
        self.calls += other.calls
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.finish = other.finish


class Text:
    """Whole characters from tokens, up to the first of the stop strings.

    Args:
      decode: the text of tokens, U+FFFD where their bytes are not whole characters.
      hidden: ids without a text, control tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: frozenset[int], stop: Sequence[str]):
        self._decode, self._hidden, self._stop = decode, hidden, stop
        self._pending: list[int] = []  # tokens whose last character is not whole
        self._held = ""  # may be the beginning of a stop string
        self._stopped = False

    def feed(self, tokens: Sequence[int], last: bool) -> tuple[str, int, bool]:
        """The text that is now certain, how many of the tokens were read, and whether a stop string ended it."""
        out = ""
        for used, token in enumerate(tokens, 1):
            if token not in self._hidden:
                self._pending.append(token)
                out += self._settle(force=False)
                if self._stopped:
                    return out, used, True
        if last:
            out += self._settle(force=True)
            if not self._stopped:
                out, self._held = out + self._held, ""
        return out, len(tokens), self._stopped

    def _settle(self, force: bool) -> str:
        text = self._decode(self._pending) if self._pending else ""
        if text.endswith("\ufffd") and not force:
            return ""
        self._pending = []
        self._held += text
        ends = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if ends:
            self._stopped, text, self._held = True, self._held[: min(ends)], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that `mark` begins with, the whole of it excepted."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


class Splitter:
    """The text of a chat turn, told apart: a thought, what is said, the calls.

    Args:
      tools: the schemas of what may be called; without any, a call is text.
      thinking: whether the template knows thoughts; else their tags are text.
      inside: the prompt has opened a thought already.
      parallel: False keeps the first call alone.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]], *, thinking: bool, inside: bool = False, parallel: bool = True):
        self._tools, self._parallel = tools, parallel
        self._place = "thought" if inside else "start" if thinking else "said"
        self._held, self._fresh = "", inside  # fresh: line ends are dropped
        self._spoken = False  # something that is not blank was said

    def feed(self, text: str) -> Delta:
        """What is now certain of all text so far."""
        self._held += text
        delta = Delta()
        if self._place == "start":
            begun = self._held.lstrip()
            if begun.startswith(_THINK):
                self._place, self._held, self._fresh = "thought", begun[len(_THINK) :], True
            elif not _THINK.startswith(begun):
                self._place = "said"
        if self._place == "thought":
            self._strip()
            before, closed, after = self._held.partition(_THOUGHT)
            whole = len(before) if closed else len(before) - _overlap(before, _THOUGHT)
            delta.reasoning = before[:whole].rstrip("\n")
            self._held = before[len(delta.reasoning) :]
            if closed:
                self._place, self._held, self._fresh = "said", after, True
        if self._place == "said":
            self._strip()
            self._say(delta)
        return delta

    def finish(self) -> Delta:
        """The rest of a turn that has ended; its `finish` is set if there are calls."""
        delta, held, self._held = Delta(), self._held, ""
        if self._place == "thought":
            delta.reasoning = held.rstrip("\n")
        elif self._place == "calls":
            try:
                found = parse_calls(held, self._tools)
            except Unreadable:  # then the text is what the model said
                delta.content = held
            else:
                delta.calls, delta.finish = list(found.calls if self._parallel else found.calls[:1]), "tool_calls"
                delta.content = f"\n{found.after}" if found.after and self._spoken else found.after
        else:
            delta.content = held
        if not delta.calls and not self._spoken and not delta.content.strip():
            delta.content += EMPTY
        return delta

    def _strip(self) -> None:
        if self._fresh:
            self._held = self._held.lstrip("\n")
            self._fresh = not self._held

    def _say(self, delta: Delta) -> None:
        whole = len(self._held)
        if self._tools:
            start = self._held.find(OPEN)
            if start >= 0:
                self._place, whole = "calls", start
            else:
                whole -= max(_overlap(self._held, OPEN), _overlap(self._held, f"\n{OPEN}"))
            # the line end before a call belongs to the template
            if start > 0 and self._held[start - 1] == "\n":
                whole -= 1
        delta.content, self._held = self._held[:whole], self._held[whole:]
        self._spoken |= bool(delta.content.strip())


class Turn:
    """One sampled turn; `splitter` None leaves its text whole.

    Attributes:
      count: tokens sampled.
      finished: it takes no more.
    """

    def __init__(self, text: Text, splitter: Splitter | None):
        self._text, self._splitter, self.count, self.finished = text, splitter, 0, False

    def feed(self, tokens: Sequence[int], logprobs: Sequence[float], finish: str | None) -> Delta:
        """The next tokens; `finish` as the engine says it. A stop string ends the turn too."""
        text, used, stopped = self._text.feed(tokens, finish is not None)
        self.count += used
        self.finished = stopped or finish is not None
        delta = Delta(content=text)
        if self._splitter is not None:
            delta = self._splitter.feed(text)
            if self.finished:
                delta.add(self._splitter.finish())
        delta.tokens, delta.logprobs = list(tokens[:used]), list(logprobs[:used])
        if self.finished:
            delta.finish = delta.finish or ("stop" if stopped or finish == "stop" else "length")
        return delta
