"""Answers of another run's record, for `agents.backend=replay`: the same prompts get the same answers, without an endpoint."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from trace_jax.agents.protocol import Answer, Message, Schema, Usage
from trace_jax.agents.record import parse_exchanges, request_digest
from trace_jax.config import AgentsSection
from trace_jax.errors import InputError


class Replay:
    """A backend that knows what was asked before.

    Raises:
      InputError: `agents.recorded` cannot be read, or has the answers of several models and `agents.model` does not say whose.
    """

    name = "replay"

    def __init__(self, settings: AgentsSection, stage: str):
        self._path = pathlib.Path(settings.recorded).expanduser()
        self._parameters, self._stage = settings.parameters, stage
        exchanges = parse_exchanges(_read_lines(self._path), self._path)
        if not exchanges:
            raise InputError(f"config field 'agents.recorded': {self._path} holds no answers; give the agents/exchanges.jsonl of a run")
        models = sorted({exchange.model for exchange in exchanges})
        if settings.model and settings.model not in models:
            raise InputError(f"config field 'agents.model': {self._path} has no answers of {settings.model!r}, but of {', '.join(models)}")
        if len(models) > 1 and not settings.model:
            raise InputError(f"config field 'agents.model': {self._path} has answers of {', '.join(models)}; say whose to replay")
        self.model = settings.model or "".join(models)
        self._answers = {exchange.request: exchange for exchange in exchanges if exchange.model == self.model}

    async def ask(self, messages: Sequence[Message], schema: Schema | None, sample: int) -> Answer:
        """Raises InputError where the recording does not have the question."""
        found = self._answers.get(request_digest(messages, schema, self._parameters, sample))
        if found is None:
            raise InputError(
                f"{self._path}: no answer to a question of stage {self._stage!r}, sample {sample}; it was recorded with other prompts, "
                "trajectories or agents.parameters, or its run did not get so far"
            )
        return Answer(found.text, found.cut, Usage(1, 0, 0, 0.0))  # which cost nothing this time

    async def close(self) -> None:
        """There is nothing to close."""


def _read_lines(path: pathlib.Path) -> list[dict]:
    """The lines of a record; a torn last one is left out."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise InputError(f"config field 'agents.recorded': {path} cannot be read ({error.strerror})") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number}: not JSON ({error}); give the agents/exchanges.jsonl of a run") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: not an object; give the agents/exchanges.jsonl of a run")
        records.append(record)
    return records
