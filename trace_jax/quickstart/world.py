"""The desk's world as names in this process, for the tokenizer and the teacher.

The packages are our own text, so they may run here; an environment that anybody else wrote runs in a worker of the sandbox only.
"""

from __future__ import annotations

from typing import Any

from envs.builtin import library, load_builtin


def execute(name: str) -> dict[str, Any]:
    """The module of a built-in package as a dictionary of its names."""
    names: dict[str, Any] = {}
    exec(compile(load_builtin(name).source, f"<{name}>", "exec"), names)  # our own source, see above
    return names


WORLD = execute("desk")
NOUNS = sorted({*WORLD["NOUNS"], *(noun for capability in library("desk") for noun in execute(capability)["NOUNS"])})
