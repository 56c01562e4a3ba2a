"""An LLM with a memory, patience, and a limit: `Agent` over a `Backend`.

A question goes this way: what the record has is not asked again; questions that are in flight are asked once; at most
`agents.concurrency` are sent at a time, each within the budget, up to `agents.attempts` times with growing waits; the answer is in the
record before anything is made of it. An answer that cannot be used is shown to its author with its faults, twice at most. What then still
cannot be used is a gap that says why; no value is ever made up for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trace_jax.agents.answers import read_answer
from trace_jax.agents.budget import Budget, estimate_tokens, prompt_tokens
from trace_jax.agents.protocol import Answer, Backend, Check, Message, Reply, Schema, TooLong, Unavailable, Usage
from trace_jax.agents.record import Exchange, Record, exchange_key, request_digest
from trace_jax.agents.redaction import without_keys
from trace_jax.config import AgentsSection

if TYPE_CHECKING:
    from trace_jax.agents.templates import Templates
    from trace_jax.workdir import Workdir

REPAIRS = 2  # turns in which an author may mend its answer
BACKOFF = 1.0  # seconds before the second attempt; each further wait is twice as long
_CHARACTERS = 5  # of a token, rather too many
_LONGEST_TOKEN = 32  # characters, on average: what is longer than so many tokens came from no model, and is not kept
_LONGEST_WAIT = 60.0  # seconds between two attempts, unless the backend asks for more
_LONGEST_OBEYED = 600.0  # seconds that a backend may ask for
_PATIENCE = 8, 3  # failures in a row, at least, and times the concurrency, after which nothing is sent any more


@dataclasses.dataclass
class _Session:
    """What belongs to one event loop, and ends with it.

    Attributes:
      record, budget: as the workdir has them when the session begins; no other client may ask in the same workdir meanwhile.
      flying: the exchanges that are under way, by key.
      failures: questions that had no answer, and attempts that hit the deadline, since the last answer; the last of them for `reason`.
    """

    loop: asyncio.AbstractEventLoop
    record: Record
    budget: Budget
    semaphore: asyncio.Semaphore
    flying: dict[str, asyncio.Task[Exchange]] = dataclasses.field(default_factory=dict)
    failures: int = 0
    reason: str = ""


class Client:
    """An `Agent`.

    Args:
      stage: of the run, under which the record has what is asked here.

    Attributes:
      usage: of what was asked here, an exchange once however often it was needed; `earlier` are those that the record had.
    """

    def __init__(self, backend: Backend, workdir: Workdir, templates: Templates, settings: AgentsSection, stage: str):
        self.backend, self.settings, self.stage = backend, settings, stage
        self.usage = Usage()
        self._workdir, self._templates = workdir, templates
        self._counted: set[tuple[str, int]] = set()
        self._last_session: _Session | None = None

    async def complete(
        self, messages: Sequence[Message], schema: Schema | None = None, sample: int = 0, *, check: Check | None = None
    ) -> Reply:
        """Asks, and shows the author up to two times what is wrong with its answer; see `Agent.complete`."""
        talk = [{"role": message["role"], "content": _encodable(message["content"])} for message in messages]
        digest, parsed, usage = "", None, Usage()
        for turn in range(REPAIRS + 1):
            try:
                exchange, earlier = await self._exchange(talk, schema, sample)
            except TooLong:
                if not turn:
                    raise
                break  # there is no room to show it what is wrong: the gap that it leaves is no other question's fault
            digest, usage = digest or exchange.key, usage + dataclasses.replace(exchange.usage, earlier=int(earlier))
            value, faults = _judge(exchange, schema, check)
            parsed = parsed if value is None else value
            if not faults or turn == REPAIRS:
                break
            shown = json.dumps(schema, indent=1, ensure_ascii=False) if schema else ""
            repair = self._templates.render("answer_repair", faults=faults, schema=shown)
            talk = [*talk, {"role": "assistant", "content": _echo(exchange)}, {"role": "user", "content": repair}]
        return Reply(exchange.text, parsed, tuple(faults), digest, usage)

    async def close(self) -> None:
        """Ends what is under way in this event loop, and the backend's connections."""
        session = self._session()
        tasks = list(session.flying.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.backend.close()

    def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        if self._last_session is None or self._last_session.loop is not loop:
            record = Record(self._workdir)
            budget, semaphore = Budget(self.settings, record.exchanges), asyncio.Semaphore(self.settings.concurrency)
            self._last_session = _Session(loop, record, budget, semaphore)
        return self._last_session

    async def _exchange(self, messages: list[Message], schema: Schema | None, sample: int) -> tuple[Exchange, bool]:
        """The answer to a question as it is, and whether somebody had asked it before."""
        key = exchange_key(self.backend.name, self.backend.model, messages, schema, self.settings.parameters, sample)
        session = self._session()
        if found := session.record.find(key, self.settings.answer_tokens):
            self._count(found, earlier=True)
            return found, True
        flying, earlier = session.flying, key in session.flying
        if not earlier:
            flying[key] = asyncio.create_task(self._answered(key, messages, schema, sample))
            flying[key].add_done_callback(lambda task: _landed(flying, key, task))
        return await asyncio.shield(flying[key]), earlier  # one who waits may go, others wait too

    async def _answered(self, key: str, messages: list[Message], schema: Schema | None, sample: int) -> Exchange:
        """Asks the backend, and records the answer."""
        settings, session = self.settings, self._session()
        prompt = prompt_tokens(messages, json.dumps(schema) if schema else "")
        async with session.semaphore, session.budget.reserve(prompt, settings.answer_tokens):
            answer = await self._attempts(session, messages, schema, sample)
            most = _LONGEST_TOKEN * settings.answer_tokens
            text = without_keys(_encodable(answer.text[:most]))
            usage = answer.usage or Usage(1, prompt, estimate_tokens(text) if text else 0)
            exchange = Exchange(
                key=key,
                request=request_digest(messages, schema, settings.parameters, sample),
                backend=self.backend.name,
                model=self.backend.model,
                sample=sample,
                stage=self.stage,
                text=text,
                cut=answer.cut or len(answer.text) > most,
                limit=settings.answer_tokens,
                input_tokens=usage.input_tokens,
                output_tokens=usage.output_tokens,
                cost=session.budget.price(usage.input_tokens, usage.output_tokens) if usage.cost is None else usage.cost,
                estimated=answer.usage is None,
                when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            )
            session.record.add(exchange)
            session.budget.spend(exchange, (prompt, settings.answer_tokens))
            self._count(exchange, earlier=False)
            return exchange

    async def _attempts(self, session: _Session, messages: list[Message], schema: Schema | None, sample: int) -> Answer:
        """Asks until there is an answer, and holds this question's place meanwhile: who is asked too much is asked less.

        Raises:
          Unavailable: there is none, or so many before had none that this one is not sent.
        """
        failure = None
        for attempt in range(self.settings.attempts):
            if attempt:
                await asyncio.sleep(_wait(attempt, failure.retry_after))
            if session.failures >= max(_PATIENCE[0], _PATIENCE[1] * self.settings.concurrency):
                raise failure or Unavailable(f"not asked: no answer {session.failures} times in a row, the last: {session.reason}")
            try:
                async with asyncio.timeout(self.settings.deadline):
                    answer = await self.backend.ask(messages, schema, sample)
            except TimeoutError:
                failure = Unavailable(f"no answer within {self.settings.deadline:g} s (config field 'agents.deadline')")
                session.failures, session.reason = session.failures + 1, str(failure)
            except Unavailable as error:
                failure = error
            else:
                session.failures = 0
                return answer
        session.failures, session.reason = session.failures + 1, str(failure)
        raise failure

    def _count(self, exchange: Exchange, *, earlier: bool) -> None:
        if (exchange.key, exchange.limit) not in self._counted:
            self._counted.add((exchange.key, exchange.limit))
            self.usage += dataclasses.replace(exchange.usage, earlier=int(earlier))


def _judge(exchange: Exchange, schema: Schema | None, check: Check | None) -> tuple[object, list[str]]:
    """The value of an answer, None without a schema or where it does not fit, and the answer's faults."""
    if exchange.cut:
        return None, [f"it was cut off at {exchange.output_tokens} tokens: be shorter"]
    if schema is None:
        faults = list(check(exchange.text)) if check and exchange.text.strip() else []
        return None, faults if exchange.text.strip() else ["it is empty"]
    value, faults = read_answer(exchange.text, schema)
    return value, faults or (list(check(value)) if check else [])


def _echo(exchange: Exchange) -> str:
    """An answer as its author sees it again: some endpoints refuse a turn without text, none has room for one without end."""
    half = _CHARACTERS * exchange.limit // (8 if exchange.cut else 2)
    left = len(exchange.text) - 2 * half
    if left <= 0:
        return exchange.text or "(no answer)"
    return f"{exchange.text[:half]}\n... {left:,} characters left out ...\n{exchange.text[-half:]}"


def _wait(attempt: int, retry_after: float | None) -> float:
    """Seconds before an attempt, 1 the second one; their random part keeps those apart who failed together."""
    if retry_after is not None:
        return min(max(retry_after, 0.0), _LONGEST_OBEYED) + random.uniform(0, BACKOFF)
    return min(BACKOFF * 2 ** (attempt - 1), _LONGEST_WAIT) * random.uniform(0.5, 1.0)


def _landed(flying: dict[str, asyncio.Task[Exchange]], key: str, task: asyncio.Task[Exchange]) -> None:
    del flying[key]
    if not task.cancelled():
        task.exception()  # those who wait get it; where nobody does any more, it is not asyncio's to complain


def _encodable(text: str) -> str:
    """Half of a surrogate pair, which JSON can spell and no file or endpoint takes, becomes a question mark."""
    return text.encode(errors="replace").decode()
