"""What the analyst and the generator ask of an LLM, and what stands behind the question: one protocol, whoever answers.

`Agent.complete` is what the steps call; `trace_jax.agents.client` implements it over a `Backend`, which does one exchange and nothing else:
no cache, no retries, no budget. A backend says of a failure whether it is worth another try (`Unavailable`) or not (`InputError`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trace_jax.errors import InputError

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content"}
Schema = Mapping[str, Any]  # JSON schema of an answer, an object with all properties required
Check = Callable[[Any], Sequence[str]]  # what is wrong with an answer beyond its schema, in sentences that its author can act on
MOST_TOKENS = 10**9  # of one exchange: a larger count is none


@dataclasses.dataclass(frozen=True)
class Usage:
    """What answers have cost.

    Attributes:
      requests: exchanges with the backend.
      cost: US dollars; None where neither the backend nor the config's prices tell.
      earlier: of the requests, those that an earlier run, or an earlier question of this one, had paid.
    """

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None
    earlier: int = 0

    def told(self, unpriced: str = "of unknown price") -> str:
        """`1,640 answers for $4.10: 12,300,000 tokens in and 410,000 out`."""
        price = unpriced if self.cost is None else f"for ${self.cost:,.2f}"
        return f"{self.requests:,} answers {price}: {self.input_tokens:,} tokens in and {self.output_tokens:,} out"

    def __add__(self, other: Usage) -> Usage:
        costs = [x for x in (self.cost, other.cost) if x is not None]
        return Usage(
            self.requests + other.requests,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            sum(costs) if costs else None,
            self.earlier + other.earlier,
        )


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer of a backend.

    Attributes:
      text: may be empty: a refusal, or a filter.
      cut: the answer ended at its length limit.
      usage: None where the backend does not say.
    """

    text: str
    cut: bool = False
    usage: Usage | None = None


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a question came to.

    Attributes:
      text: of the last answer.
      parsed: the last answer that fits the schema; None where none did, or without a schema.
      faults: what is wrong with the last answer after all repairs: the reason of the gap. Empty for a good one.
      digest: of the first exchange, under which the record has it.
      usage: of all turns.
    """

    text: str
    parsed: Any
    faults: tuple[str, ...]
    digest: str
    usage: Usage


class Unavailable(Exception):
    """The backend could not answer now: too many requests, an outage, a time limit, an answer that is none. The text holds no secret.

    Attributes:
      retry_after: seconds after which the backend wants to be asked again, None where it does not say.
    """

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message)
        self.retry_after = retry_after


class TooLong(InputError):
    """The backend has no room for a question and its answer."""


class Backend(Protocol):
    """Who answers.

    Attributes:
      name: of the kind of backend, as `agents.backend` has it.
      model: what answers, as far as the backend knows.
    """

    name: str
    model: str

    async def ask(self, messages: Sequence[Message], schema: Schema | None, sample: int) -> Answer:
        """One exchange.

        Args:
          sample: the same question with another number is another question: independent runs ask it again.

        Raises:
          Unavailable: worth another try.
          InputError: not: a wrong key, an unknown model, a request that the backend refuses; `TooLong` where only its length is wrong.
        """
        ...

    async def close(self) -> None: ...


class Agent(Protocol):
    """An LLM with a memory: what was answered once is not asked again."""

    async def complete(
        self, messages: Sequence[Message], schema: Schema | None = None, sample: int = 0, *, check: Check | None = None
    ) -> Reply:
        """Asks, and shows the author up to two times what is wrong with its answer.

        Args:
          schema: of the answer; with it the text must hold one JSON value, `Reply.parsed`.
          check: gets the parsed value, or without a schema the text.

        Raises:
          Unavailable: all attempts failed.
          Unfinished: the budget is used up.
          InputError: the backend refuses for good.
        """
        ...
