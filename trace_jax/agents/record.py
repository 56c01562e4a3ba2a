"""The record of a workdir's exchanges, `agents/exchanges.jsonl`: the memory, the bill, and what `replay` plays.

One line an exchange, added when its answer arrives and never changed. It holds the answer and the digest of the question: no prompt, no
address, no header, no key. A question whose key is in it is not asked again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trace_jax.agents.protocol import Message, Schema, Usage
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir

_TYPES = {"str": (str,), "int": (int,), "bool": (bool,), "float | None": (float, int, type(None))}  # annotation to what JSON has for it
EXCHANGES = "agents/exchanges.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """One line.

    Attributes:
      key: digest of the question and of whom it was put to.
      request: digest of the question alone.
      stage: of the run, for the bill.
      limit: tokens that the answer could have; with a larger limit, one that was cut is asked for again.
      cost: US dollars, None where nothing tells.
      estimated: the backend did not say how many tokens, they are from the lengths of the texts.
      when: UTC, ISO 8601.
    """

    key: str
    request: str
    backend: str
    model: str
    sample: int
    stage: str
    text: str
    cut: bool
    limit: int
    input_tokens: int
    output_tokens: int
    cost: float | None
    estimated: bool
    when: str

    @property
    def usage(self) -> Usage:
        return Usage(1, self.input_tokens, self.output_tokens, self.cost)


def request_digest(messages: Sequence[Message], schema: Schema | None, parameters: Mapping[str, Any], sample: int) -> str:
    """The sha256 of a question."""
    return _digest({"messages": messages, "schema": schema, "parameters": parameters, "sample": sample})


def exchange_key(
    backend: str, model: str, messages: Sequence[Message], schema: Schema | None, parameters: Mapping[str, Any], sample: int
) -> str:
    """The sha256 of a question and of whom it is put to."""
    question = {"messages": messages, "schema": schema, "parameters": parameters, "sample": sample}
    return _digest({"backend": backend, "model": model, **question})


class Record:
    """The exchanges of a workdir.

    Raises:
      InputError: the file is damaged.
    """

    def __init__(self, workdir: Workdir):
        self._workdir = workdir
        self.exchanges = parse_exchanges(workdir.read_jsonl(EXCHANGES), workdir.place(EXCHANGES))
        self._by_key = {exchange.key: exchange for exchange in self.exchanges}

    def find(self, key: str, limit: int) -> Exchange | None:
        """What was answered; nothing where that was cut off at less than `limit`."""
        found = self._by_key.get(key)
        return None if found is None or (found.cut and found.limit < limit) else found

    def add(self, exchange: Exchange) -> None:
        """Writes the line; it is in the file when this returns."""
        self._workdir.append_jsonl(EXCHANGES, dataclasses.asdict(exchange))
        self.exchanges.append(exchange)
        self._by_key[exchange.key] = exchange


def parse_exchanges(lines: Iterable[Mapping[str, Any]], path: str) -> list[Exchange]:
    """Raises InputError on a line that is no exchange."""
    exchanges = []
    for number, line in enumerate(lines, 1):
        try:
            exchange = Exchange(**line)
        except TypeError as error:
            raise InputError(f"{path}, line {number}: no exchange of an LLM ({error}); remove the line") from error
        for field in dataclasses.fields(Exchange):
            value = getattr(exchange, field.name)
            if type(value) not in _TYPES[field.type] or (field.type != "str" and value is not None and not 0 <= value < float("inf")):
                raise InputError(f"{path}, line {number}: {field.name!r} cannot be {str(value)[:40]!r}; remove the line")
        exchanges.append(exchange)
    return exchanges


def usage_of(workdir: Workdir) -> dict[str, Usage]:
    """What the workdir's answers have cost: {stage: usage, "total": usage}."""
    usages: dict[str, Usage] = {}
    for exchange in Record(workdir).exchanges:
        usages[exchange.stage] = usages.get(exchange.stage, Usage()) + exchange.usage
    return usages | {"total": sum(usages.values(), Usage())}


def bill(workdir: Workdir) -> dict[str, Any] | None:
    """{requests, input_tokens, output_tokens, cost, estimated} of all stages, `estimated` the requests whose tokens nobody told; None where
    no LLM was asked."""
    exchanges = Record(workdir).exchanges
    if not exchanges:
        return None
    usage = sum((exchange.usage for exchange in exchanges), Usage())
    return {
        "requests": usage.requests,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cost": usage.cost,
        "estimated": sum(exchange.estimated for exchange in exchanges),
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()
