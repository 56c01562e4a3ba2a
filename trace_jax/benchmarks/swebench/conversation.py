"""Messages of coding agents in the house's form: text content, calls with their arguments as dictionaries, results under role "tool".

Agents whose model writes its command into a fenced block, and reads the output as a user's message, are turned into the same form, so that
one analyst reads all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_BLOCK = re.compile(r"```(?:mswea_bash_command|bash)\s*\n(.*?)\n```", re.DOTALL)


def text_of(content: Any) -> str:
    """The text of a content, which may be null or a list of parts; images are named, not kept."""
    if isinstance(content, list):
        return "".join(
            text_of(part.get("text", f"[{part.get('type', 'part')}]")) if isinstance(part, dict) else str(part) for part in content
        )
    return "" if content is None else str(content)


def call(name: str, arguments: Any, identity: str = "") -> dict[str, Any]:
    """One call; `arguments` that are text are parsed, and kept under "malformed" where they are no JSON object."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (json.JSONDecodeError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else {"malformed": arguments}
    return {"id": identity, "name": name, "arguments": arguments if isinstance(arguments, dict) else {"malformed": arguments}}


def assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant message of OpenAI's form; a thought that stands in a field of its own comes first, in its tags."""
    content, thought = text_of(message.get("content")), text_of(message.get("reasoning_content"))
    if thought:
        content = f"<think>\n{thought}\n</think>\n\n{content}"
    calls = [
        call(str(c["function"].get("name") or ""), c["function"].get("arguments"), str(c.get("id") or ""))
        for c in message.get("tool_calls") or []
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


def with_block(content: str) -> dict[str, Any]:
    """An assistant message whose one command stands in a fenced block; without such a block it is text."""
    blocks = list(_BLOCK.finditer(content))
    if len(blocks) != 1:
        return {"role": "assistant", "content": content}
    block = blocks[0]
    said = f"{content[: block.start()].rstrip()}\n{content[block.end() :].lstrip()}".strip()
    return {"role": "assistant", "content": said, "tool_calls": [call("bash", {"command": block[1]})]}
