"""The budget of a workdir: nothing is asked that could exceed it.

Before a question is sent, what it may cost at most is reserved: its prompt by a careful estimate, its answer at its limit. When the answer
is there, what it did cost takes the reservation's place. A question that does not fit waits while others are in flight, which mostly cost
less than was reserved for them; when nothing is in flight and it still does not fit, the run ends. With a limit the first question goes
alone: what it took beyond its estimate is added to those of all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterable, Sequence

from trace_jax.agents.protocol import Message
from trace_jax.agents.record import Exchange
from trace_jax.config import AgentsSection
from trace_jax.errors import Unfinished

_MILLION = 1_000_000


def estimate_tokens(text: str) -> int:
    """Tokens of a text, rather too many: three characters of ASCII each, one digit or any other character each."""
    ascii_length = len(text.encode("ascii", "ignore"))
    digits = sum(text.count(digit) for digit in "0123456789")
    return (ascii_length - digits) // 3 + 1 + digits + len(text) - ascii_length


def prompt_tokens(messages: Sequence[Message], schema: str = "") -> int:
    """An estimate, again rather too many; four tokens a message are its frame."""
    return estimate_tokens(schema) + sum(estimate_tokens(message["content"]) + 4 for message in messages)


class Budget:
    """What may be spent and what is.

    Args:
      exchanges: of the workdir so far; all of them count.
    """

    def __init__(self, settings: AgentsSection, exchanges: Iterable[Exchange] = ()):
        self._settings = settings
        self.tokens, self.dollars = 0, 0.0
        self._reserved_tokens, self._reserved_dollars, self._in_flight = 0, 0.0, 0
        self._dearest = 0.0  # US dollars of one answer
        self._excess, self._share = 0, 0.0  # of a question beyond what was reserved: tokens, and in proportion to the prompt
        self._grows = settings.backend in ("openai", "served")  # their tokens are shorter; a coding agent adds a prompt of its own
        self._tried = settings.max_tokens is None and settings.max_cost is None
        self._end: str | None = None  # why nothing is sent any more
        self._waiting: list[asyncio.Future[None]] = []
        for exchange in exchanges:
            self.spend(exchange)

    def price(self, input_tokens: int, output_tokens: int) -> float | None:
        """US dollars, None without prices."""
        prices = self._settings.price_input, self._settings.price_output
        return None if None in prices else (input_tokens * prices[0] + output_tokens * prices[1]) / _MILLION

    def spend(self, exchange: Exchange, reserved: tuple[int, int] | None = None) -> None:
        """Counts an answer; `reserved` are the tokens that were thought of question and answer."""
        tokens = exchange.input_tokens + exchange.output_tokens
        self.tokens += tokens
        dollars = exchange.cost if exchange.cost is not None else self.price(exchange.input_tokens, exchange.output_tokens) or 0.0
        self.dollars += dollars
        self._dearest = max(self._dearest, dollars)
        if reserved is not None:
            excess = tokens - sum(reserved) if not self._grows else exchange.input_tokens - reserved[0]
            self._excess, self._share = max(self._excess, excess), max(self._share, excess / reserved[0])

    @contextlib.asynccontextmanager
    async def reserve(self, input_tokens: int, output_tokens: int) -> AsyncIterator[None]:
        """Holds what a question may cost, for as long as the block runs.

        Raises:
          Unfinished: it does not fit, and nothing that is in flight can change that.
        """
        while True:
            question = input_tokens + (math.ceil(input_tokens * self._share) if self._grows else self._excess)
            tokens, dollars = question + output_tokens, self._dollars(question, output_tokens)
            fault = self._fault(tokens, dollars)
            self._end = self._end or (None if self._in_flight else fault)
            if self._end:  # for all: a smaller question, sent now, would be paid for and cancelled
                raise Unfinished(self._end)
            if not fault and (self._tried or not self._in_flight):
                break
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        self._hold(tokens, dollars, 1)
        try:
            yield
        finally:
            self._tried = True
            self._hold(-tokens, -dollars, -1)
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def _dollars(self, input_tokens: int, output_tokens: int) -> float:
        """What a question may cost. Where only the backend knows prices: twice the dearest answer so far; the first has all to itself."""
        price = self.price(input_tokens, output_tokens)
        if price is not None or self._settings.max_cost is None:
            return price or 0.0
        return 2 * self._dearest or self._settings.max_cost - self.dollars

    def _hold(self, tokens: int, dollars: float, count: int) -> None:
        self._in_flight += count
        self._reserved_tokens += tokens
        self._reserved_dollars = self._reserved_dollars + dollars if self._in_flight else 0.0  # no dust of rounding

    def _fault(self, tokens: int, dollars: float) -> str | None:
        limit = self._settings
        end = "raise it and run again: nothing is asked twice"
        if limit.max_tokens is not None and self.tokens + self._reserved_tokens + tokens > limit.max_tokens:
            spent = f"{self.tokens:,} of {limit.max_tokens:,} tokens are spent"
            return f"config field 'agents.max_tokens': {spent}, and the next question may take {tokens:,}; {end}"
        if limit.max_cost is not None and self.dollars + self._reserved_dollars + dollars > limit.max_cost:
            spent = f"${self.dollars:,.4f} of ${limit.max_cost:,.4f} are spent"
            return f"config field 'agents.max_cost': {spent}, and the next question may cost ${dollars:,.4f}; {end}"
        return None
