"""Deltas into OpenAI's JSON: whole answers and the chunks of a stream, for both endpoints.

Beyond OpenAI's fields: `reasoning_content` holds a turn's thought, and with `return_token_ids` there are `token_ids` for every choice and
`prompt_token_ids`, so that a trainer need not encode text again.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from envs.base import ToolCall
from rl.chat import Chat
from trace_jax.serve.reply import Delta
from trace_jax.serve.schema import Asked, ChatAsked

_LOWEST = -9999.0  # JSON has no infinity


@dataclasses.dataclass
class Answer:
    """The frame of one HTTP answer.

    Attributes:
      prompts: token ids, one list for every prompt; choice `i` belongs to prompt `i // asked.n`.
      fingerprint: which weights answered.
    """

    asked: Asked
    chat: Chat
    prompts: Sequence[Sequence[int]]
    fingerprint: str
    id: str = ""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = self.id or f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._offsets: dict[int, int] = {}  # characters of each choice that are sent, for text_offset
        self._begun: set[int] = set()  # choices of a completion's stream

    @property
    def is_chat(self) -> bool:
        return isinstance(self.asked, ChatAsked)

    def whole(self, deltas: Sequence[Delta], completion_tokens: int) -> dict[str, Any]:
        """The answer in one piece, of one whole delta for every choice."""
        choices = []
        for index, delta in enumerate(deltas):
            if self.is_chat:
                message = {"role": "assistant", "content": delta.content or None}
                message |= {"reasoning_content": delta.reasoning} if delta.reasoning else {}
                message |= {"tool_calls": [_call(call) for call in delta.calls]} if delta.calls else {}
                choice = {"index": index, "message": message}
            else:
                choice = {"index": index, "text": delta.content}
            choices.append(choice | self._rest(index, delta))
        frame = self._frame("chat.completion" if self.is_chat else "text_completion")
        if self.is_chat and self.asked.return_token_ids:
            frame["prompt_token_ids"] = list(self.prompts[0])
        elif self.asked.return_token_ids:
            for choice in choices:
                choice["prompt_token_ids"] = list(self.prompts[choice["index"] // self.asked.n])
        return frame | {"choices": choices, "usage": self.usage(completion_tokens)}

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice in a chat's stream: who speaks."""
        chunk = self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})
        return chunk | ({"prompt_token_ids": list(self.prompts[0])} if self.asked.return_token_ids else {})

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """The chunk of a delta."""
        if not self.is_chat:
            choice = {"index": index, "text": delta.content} | self._rest(index, delta)
            if self.asked.return_token_ids and index not in self._begun:
                choice["prompt_token_ids"] = list(self.prompts[index // self.asked.n])
            self._begun.add(index)
            return self._chunk(choice)
        said: dict[str, Any] = {"content": delta.content} if delta.content else {}
        said |= {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.calls:
            said["tool_calls"] = [{"index": i} | _call(call) for i, call in enumerate(delta.calls)]
        return self._chunk({"index": index, "delta": said} | self._rest(index, delta))

    def closing(self, completion_tokens: int) -> dict[str, Any]:
        """The chunk with the usage, without choices."""
        return self._chunk() | {"usage": self.usage(completion_tokens)}

    def usage(self, completion_tokens: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": prompt + completion_tokens}

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
            "system_fingerprint": self.fingerprint,
        }

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        chunk = self._frame("chat.completion.chunk" if self.is_chat else "text_completion") | {"choices": list(choices)}
        return chunk | ({"usage": None} if self.asked.include_usage else {})

    def _rest(self, index: int, delta: Delta) -> dict[str, Any]:
        """What every choice ends with."""
        rest = {"logprobs": self._logprobs(index, delta) if self.asked.logprobs else None, "finish_reason": delta.finish}
        return rest | ({"token_ids": delta.tokens} if self.asked.return_token_ids else {})

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        texts = [self.chat.decode([token]) for token in delta.tokens]
        values = [max(x, _LOWEST) for x in delta.logprobs]
        if self.is_chat:
            content = [
                # a token may be a part of a character; then it has no text of its own
                {"token": text, "logprob": x, "bytes": None if "\ufffd" in text else list(text.encode()), "top_logprobs": []}
                for text, x in zip(texts, values, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets, place = [], self._offsets.get(index, 0)
        for text in texts:
            offsets.append(place)
            place += len(text)
        self._offsets[index] = place
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": {"name": call.name, "arguments": arguments}}
