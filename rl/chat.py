"""Messages to token deltas and back, with the tokenizer and the chat template of a Hugging Face folder.

A trajectory's tokens are append-only. `start` gives the prompt, the model samples a turn, `extend` gives what the template puts between
that turn and the next. Text that the model wrote is decoded and never encoded again.

The template is rendered with a mark in place of every content, so what belongs to the template is known apart from what somebody said.
Control tokens are looked for in the template's part only: a tool that returns `<|im_start|>` starts no turn. Between two control tokens all
text is encoded at once, so that the tokens are those of the whole rendering. A rendering depends on the structure of the messages alone and
is kept.

Thinking is kept: `<think>` text is part of a turn's content, also in turns long past, where some templates would drop it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from envs.base import ToolCall
from rl.tool_calls import OPEN, Unreadable, parse_calls

# Private-use characters around a message's index; no template and no schema has a reason to hold them.
_OPEN, _CLOSE = "\ue000", "\ue001"
_HINT = "\n<expert_guidance>\n{}\n</expert_guidance>"
_KEPT = 4096  # renderings; a server meets ever new ones


class _Part(NamedTuple):
    """A piece of a rendering: the template's own text, or the content of message `index`."""

    text: str
    index: int | None


class Chat:
    """The tokenizer and template of a model folder.

    Attributes:
      tokenizer: the folder's `transformers` tokenizer.
      end: id of the token that ends a turn; the only stop token.
      control: ids of the special tokens by their text.
      opening: what the generation prompt has written of a turn already; Qwen3.6's opens a thought, "<think>\\n".

    Raises:
      ValueError: the folder has no chat template, or one that ends a turn with no special token.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        if not self.tokenizer.chat_template:
            raise ValueError(f"{folder}: no chat template; add chat_template.jinja or the field chat_template of tokenizer_config.json")
        self._plain = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        self._plain.encode_special_tokens = True  # their text is text; ids are given out below, for the template alone
        added = self.tokenizer.added_tokens_decoder
        self.control = {token.content: number for number, token in added.items() if token.special}
        self._control = re.compile("(" + "|".join(sorted(map(re.escape, self.control), key=len, reverse=True)) + ")")
        self._renderings: dict[str, list[_Part]] = {}
        probe = [{"role": "user", "content": "x"}]
        asked = self._apply(probe, None, generate=True)
        thought = asked[asked.rindex("<think>") :] if "<think>" in asked else ""
        self.opening = "" if "</think>" in thought else thought
        self._trims = " x " not in self._apply([{"role": "user", "content": " x "}], None, generate=True)
        self.end = self._encode(self._between(probe), probe)[0][0]
        if self.end not in self.control.values():
            raise ValueError(f"{folder}: the chat template ends a turn with {self.decode([self.end])!r}, which is no special token")

    @property
    def stop(self) -> tuple[int, ...]:
        """What ends a turn of the model."""
        return (self.end,)

    def start(self, system: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """The prompt [T] int32 of an episode, up to and with the generation prompt. An empty `system` is left out."""
        return self.start_with_hint(system, messages, tools, None)[0]

    def start_with_hint(
        self, system: str, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], hint: str | None
    ) -> tuple[np.ndarray, tuple[int, int] | None]:
        """The prompt with `hint` in an `<expert_guidance>` block behind the system text, and the token span of the block.

        Without the span the tokens are exactly those of `start`: the block is spliced in between two tokens.

        Raises:
          ValueError: a hint without a system text to follow.
        """
        conversation = self._as_printed([{"role": "system", "content": system}, *messages] if system else messages)
        if hint is not None and not (system and conversation[0]["content"]):
            raise ValueError("a hint needs a system message to stand in")
        parts = self._render(conversation, tools, generate=True)
        tokens, ends = self._encode(parts, conversation)
        if hint is None:
            return np.array(tokens, np.int32), None
        block = self._text(_HINT.format(hint))
        start = ends[0]
        return np.array(tokens[:start] + block + tokens[start:], np.int32), (start, start + len(block))

    def extend(self, messages: Sequence[dict[str, Any]], *, ended: bool = True) -> np.ndarray:
        """What follows a turn of the model: the rest of its end, `messages` (tool results, the user), the next generation prompt.

        `ended` says that the model sampled the end of its turn; a turn that was cut gets it from the template.
        """
        messages = self._as_printed(messages)
        tokens, _ = self._encode(self._between(messages), messages)
        return np.array(tokens[1:] if ended else tokens, np.int32)

    def encode_reply(self, message: dict[str, Any]) -> np.ndarray:
        """The tokens [T] int32 of an assistant turn that somebody else wrote, its end included, as the template writes it.

        Raises:
          ValueError: the template puts something else before an assistant turn than its own generation prompt.
        """
        asked = [{"role": "user", "content": "x"}]
        before = self._apply(asked, None, generate=True)
        whole = self._apply([*asked, {**message, "role": "assistant"}], None, generate=False)
        end = self.tokenizer.convert_ids_to_tokens(self.end)
        if not whole.startswith(before) or end not in whole[len(before) :]:
            raise ValueError("the chat template does not begin an assistant turn with its generation prompt; use a training variant of it")
        return np.array([*self._text(whole[len(before) : whole.rindex(end)]), self.end], np.int32)

    def decode(self, tokens: Sequence[int] | np.ndarray) -> str:
        """The text of `tokens`, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._plain.decode([int(t) for t in tokens], skip_special_tokens=False)

    def _as_printed(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages without the blanks that the template would trim off their contents: it is rendered with marks, which have none."""
        return [{**m, "content": (m.get("content") or "").strip()} for m in messages] if self._trims else list(messages)

    def _text(self, text: str) -> list[int]:
        return self._plain.encode(text, add_special_tokens=False).ids

    def _between(self, messages: Sequence[dict[str, Any]]) -> list[_Part]:
        """The rendering of what follows an assistant turn; message indices are those of `messages`."""
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
        parts = self._render([*turn, *messages], (), generate=True)
        after = next(i for i, part in enumerate(parts) if part.index == 1) + 1
        return [part if part.index is None else _Part("", part.index - len(turn)) for part in parts[after:]]

    def _render(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, generate: bool) -> list[_Part]:
        """The template's rendering, with marks for contents; an empty content stays empty, for templates that ask."""
        marked = [
            {"role": m["role"], "content": f"{_OPEN}{i}{_CLOSE}" if m.get("content") else "", "tool_calls": m.get("tool_calls")}
            for i, m in enumerate(messages)
        ]
        key = json.dumps([marked, list(tools), generate], ensure_ascii=False)
        if key not in self._renderings:
            said = json.dumps([[m.get("tool_calls") for m in messages], list(tools)], ensure_ascii=False)
            if self._control.search(said) or _OPEN in said:
                raise ValueError("a tool schema or a tool call of the prompt holds the text of a control token; rename it")
            pieces = re.split(f"{_OPEN}(\\d+){_CLOSE}", self._apply(marked, list(tools) or None, generate=generate))
            parts = [_Part(piece, None) if i % 2 == 0 else _Part("", int(piece)) for i, piece in enumerate(pieces)]
            if sorted(p.index for p in parts if p.index is not None) != [i for i, m in enumerate(marked) if m["content"]]:
                raise ValueError("the chat template does not print the content of every message once")
            if len(self._renderings) >= _KEPT:
                self._renderings.clear()
            self._renderings[key] = parts
        return self._renderings[key]

    def _apply(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None, *, generate: bool) -> str:
        return self.tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=generate)

    def _encode(self, parts: list[_Part], messages: Sequence[dict[str, Any]]) -> tuple[list[int], dict[int, int]]:
        """The tokens, and for every message the number of tokens that begin before its content ends."""
        tokens: list[int] = []
        ends: dict[int, int] = {}
        run, marks = "", {}  # text since the last control token; where in it contents end

        def flush():
            nonlocal run, marks
            encoding = self._plain.encode(run, add_special_tokens=False)
            for index, end in marks.items():
                ends[index] = len(tokens) + sum(start < end for start, _ in encoding.offsets)
            tokens.extend(encoding.ids)
            run, marks = "", {}

        for part in parts:
            if part.index is not None:
                run += messages[part.index]["content"]
                marks[part.index] = len(run)
                continue
            for piece in self._control.split(part.text):
                if piece in self.control:
                    flush()
                    tokens.append(self.control[piece])
                else:
                    run += piece
        flush()
        return tokens, ends


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn of the model, read: its text without the calls, its calls in order, and why it is no valid action, if it is not."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None

    @property
    def spoken(self) -> str:
        """The content without its thoughts, what a user gets to see; a thought that was never closed hides all of it."""
        thought, closed, spoken = self.content.rpartition("</think>")
        return (spoken if closed or "<think>" not in spoken else "").strip()


def parse_turn(text: str, tools: Sequence[dict[str, Any]] = ()) -> Turn:
    """Reads the calls of a turn (`rl.tool_calls`, which has the two forms). What stands in a thought is no call.

    A malformed call makes the whole turn an invalid action: `error` says why, `content` is the text as it was.

    Args:
      tools: OpenAI schemas of what may be called, for the types of arguments in tags.
    """
    thought, closed, spoken = text.rpartition("</think>")
    if not closed and "<think>" in text:
        return Turn(text)
    try:
        found = parse_calls(spoken, tools)
    except Unreadable as error:
        return Turn(text, error=str(error))
    if not found.calls:
        return Turn(text)
    # the line ends before a call belong to the template: one before JSON, two before tags
    before = found.before.removesuffix("\n").removesuffix("\n" if f"{OPEN}\n<function=" in spoken else "")
    return Turn(thought + closed + before + (f"\n{found.after}" if found.after else ""), found.calls)
