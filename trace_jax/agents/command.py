"""Coding agents, and any other command: the prompt goes in, the answer comes out.

Each question gets a process of its own, in an empty folder that is removed afterwards. The whole process group is killed when the deadline
passes or the question is given up, and what it left running when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.agents.answers import format_note
from trace_jax.agents.protocol import MOST_TOKENS, Answer, Message, Schema, Unavailable, Usage
from trace_jax.agents.redaction import redact, shorten
from trace_jax.config import AgentsSection
from trace_jax.errors import InputError

_LONGEST_WORD = 100_000  # bytes of one word of a command line; Linux takes 128 KiB
_STRUCTURED_TURNS = 4  # Claude Code hands a structured answer in by a tool call, a turn more, and mends it in others
_GAVE_UP = ("error_max_turns", "error_max_structured_output_retries")  # it did answer, and was paid, but not as the schema wants it


@dataclasses.dataclass(frozen=True)
class Output:
    """What a process wrote, and its exit code, negative where a signal ended it."""

    text: str
    errors: str
    code: int


class _Program:
    """A backend over a program that reads the prompt and writes the answer.

    Raises:
      InputError: there is no such program, or it is told parameters, which it has no way to take.
    """

    name = ""
    _field = "agents.backend"  # which names it

    def __init__(self, settings: AgentsSection):
        self._settings = settings
        self._words = self._command()
        if settings.parameters:
            raise InputError(f"config field 'agents.parameters': agents.backend={self.name} takes none; use the command's own settings")
        program = shutil.which(self._words[0])
        if program is None:
            raise InputError(f"config field {self._field!r}: no command {self._words[0]!r} on this machine; install it, or name another")
        self._words[0] = str(pathlib.Path(program).absolute())  # the process runs in another folder
        self.model = settings.model

    def _command(self) -> list[str]:
        return [self.name]

    async def ask(self, messages: Sequence[Message], schema: Schema | None, sample: int) -> Answer:
        """One run of the program."""
        with tempfile.TemporaryDirectory(prefix="trace-jax-agent-", ignore_cleanup_errors=True) as name:
            folder = pathlib.Path(name)
            scratch = folder / "scratch"
            scratch.mkdir()
            words, prompt = self._line(one_text(messages), schema, folder)
            return self._read(await run(words, prompt, scratch, self._environment()), folder)

    async def close(self) -> None:
        """There is nothing to close: no process outlives its question."""

    def _line(self, prompt: str, schema: Schema | None, folder: pathlib.Path) -> tuple[list[str], str]:
        """The words of the command line, and its input; `folder` is for files that the command does not run beside."""
        return self._words, prompt + (format_note(schema) if schema else "")

    def _environment(self) -> Mapping[str, str]:
        return os.environ

    def _read(self, output: Output, folder: pathlib.Path) -> Answer:
        """Raises Unavailable where it is no answer, InputError where the program does not know our flags."""
        if output.code or not output.text.strip():
            raise self._failed(output)
        return Answer(output.text.strip())

    def _failed(self, output: Output, said: str = "") -> Unavailable | InputError:
        last = shorten(redact(said or output.errors or output.text)[-600:]) or "without a word"
        if any(words in output.errors for words in ("unknown option", "unexpected argument")):
            return InputError(f"agents.backend={self.name}: {last}; another version of it is needed")
        return Unavailable(f"agents.backend={self.name}: exit code {output.code}{'' if output.text else ', no output'}: {last}")


class Command(_Program):
    """`agents.command`. Its text may hold what is nobody's business: the record knows it by its digest."""

    name = "command"
    _field = "agents.command"

    def __init__(self, settings: AgentsSection):
        super().__init__(settings)
        digest = hashlib.sha256(settings.command.encode()).hexdigest()[:12]
        self.model = f"{settings.model or pathlib.Path(self._words[0]).name}#{digest}"

    def _command(self) -> list[str]:
        return shlex.split(self._settings.command)


class Claude(_Program):
    """Claude Code in print mode, without tools, servers or memory of its own."""

    name = "claude"

    def _line(self, prompt: str, schema: Schema | None, folder: pathlib.Path) -> tuple[list[str], str]:
        words = [*self._words, "-p", "--output-format", "json", "--tools", "", "--strict-mcp-config", "--no-session-persistence"]
        words += ["--model", self.model] if self.model else []
        text = json.dumps(schema, ensure_ascii=False) if schema else ""
        if schema and len(text.encode()) < _LONGEST_WORD:
            return [*words, "--json-schema", text, "--max-turns", str(_STRUCTURED_TURNS)], prompt
        return [*words, "--max-turns", "1"], prompt + (format_note(schema) if schema else "")

    def _environment(self) -> Mapping[str, str]:
        return os.environ | {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(self._settings.answer_tokens)}

    def _read(self, output: Output, folder: pathlib.Path) -> Answer:
        try:
            found = json.loads(output.text)
        except ValueError:
            raise self._failed(output) from None
        if isinstance(found, list):  # with `verbose` in its settings: all messages
            found = next((item for item in reversed(found) if isinstance(item, dict) and item.get("type") == "result"), None)
        if not isinstance(found, dict):
            raise self._failed(output)
        said, value, kind = found.get("result"), found.get("structured_output"), found.get("subtype")
        if kind not in _GAVE_UP and (output.code or found.get("is_error")):
            raise self._failed(output, said if isinstance(said, str) and said else str(kind))
        text = json.dumps(value, ensure_ascii=False) if value is not None else said if isinstance(said, str) else ""
        return Answer(text, found.get("stop_reason") == "max_tokens", _claude_usage(found))


class Codex(_Program):
    """Codex, reading only, its session not kept."""

    name = "codex"

    def _line(self, prompt: str, schema: Schema | None, folder: pathlib.Path) -> tuple[list[str], str]:
        words = [*self._words, "exec", "--json", "--sandbox", "read-only", "--skip-git-repo-check", "--ephemeral"]
        words += ["--model", self.model] if self.model else []
        words += ["-o", str(folder / "answer.txt")]
        if schema:
            (folder / "schema.json").write_text(json.dumps(schema, ensure_ascii=False), encoding="utf-8")
            words += ["--output-schema", str(folder / "schema.json")]
        return [*words, "-"], prompt

    def _read(self, output: Output, folder: pathlib.Path) -> Answer:
        events = [event for event in map(_event, output.text.splitlines()) if event]
        failures = [event for event in events if event.get("type") in ("turn.failed", "error")]
        answer = folder / "answer.txt"
        text = answer.read_text(encoding="utf-8", errors="replace").strip() if answer.is_file() else ""
        if output.code or not text:
            error = failures[-1].get("error", failures[-1]) if failures else {}
            raise self._failed(output, str(error.get("message", "")) if isinstance(error, dict) else str(error))
        usages = [event["usage"] for event in events if event.get("type") == "turn.completed" and isinstance(event.get("usage"), dict)]
        counts = [(_count(usage, "input_tokens"), _count(usage, "output_tokens")) for usage in usages]
        return Answer(text, usage=Usage(1, sum(c[0] for c in counts), sum(c[1] for c in counts)) if counts else None)


async def run(words: Sequence[str], prompt: str, folder: pathlib.Path, environment: Mapping[str, str]) -> Output:
    """Runs a command to its end.

    Raises:
      InputError: it cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            cwd=folder,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # a group of its own, so that all of it can be killed
        )
    except OSError as error:
        raise InputError(f"{words[0]}: cannot be run ({error.strerror})") from error
    try:
        text, errors = await process.communicate(prompt.encode())
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # there is nobody left in the group
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return Output(text.decode(errors="replace"), errors.decode(errors="replace"), process.returncode or 0)


def one_text(messages: Sequence[Message]) -> str:
    """The messages as one text, under headings where there are several."""
    if len(messages) == 1:
        return messages[0]["content"]
    headings = {"system": "Instructions", "user": "User", "assistant": "Your earlier answer"}
    return "\n".join(f"===== {headings[message['role']]} =====\n\n{message['content'].rstrip()}\n" for message in messages)


def _claude_usage(found: Mapping[str, Any]) -> Usage | None:
    usage, cost = found.get("usage"), found.get("total_cost_usd")
    if not isinstance(usage, Mapping):
        return None
    asked = sum(_count(usage, name) for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"))
    paid = float(cost) if isinstance(cost, int | float) and not isinstance(cost, bool) and 0 <= cost < float("inf") else None
    return Usage(1, asked, _count(usage, "output_tokens"), paid)


def _count(usage: Mapping[str, Any], name: str) -> int:
    found = usage.get(name)
    return found if type(found) is int and 0 <= found < MOST_TOKENS else 0


def _event(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
