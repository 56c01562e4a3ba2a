"""A request's way through the servers until it is sampled or given up.

Requests wait for a lane, go to the server that has their session's context, else to the one that their group prefers, and after a fault to
another or to the same when it is well again. A request has one deadline for all of it. Everything here runs on the loop of the `Fleet`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import time
import typing
import uuid
from collections.abc import Callable

import numpy as np

from rl.engines.protocol import Completion, EngineFault, FaultKind, Request
from rl.engines.sglang.fleet import Fleet, Weights, end_all
from rl.engines.sglang.replica import Replica
from rl.engines.sglang.wire import Failure, Reply, generate_body, read_generated

_UNEVEN = 1.25  # a server may have this much more than its share of the requests before one that prefers it goes elsewhere


@dataclasses.dataclass(eq=False)
class Session:
    """A context and its last request. `request`, `weights`, `busy` and `known` (the tokens it has) are the engine's, the rest the loop's.

    Attributes:
      home: the server that has its context.
      task: what serves the request.
    """

    weights: Weights
    request: Request | None = None
    busy: bool = False
    known: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    home: Replica | None = None
    task: asyncio.Task | None = None


class Dispatcher:
    """Serves at most `lanes` requests at once.

    Attributes:
      counts: tokens sampled, of prompts, and of these found in a server's cache; attempts beyond the first; faults by kind.
    """

    def __init__(self, fleet: Fleet, lanes: int):
        self._fleet, self._limits = fleet, fleet.limits
        self._lanes = asyncio.Semaphore(lanes)
        self._requests: set[asyncio.Task] = set()
        self.counts = dict.fromkeys(
            ("sampled", "prompt", "cached", "retries", *(f"faults_{kind}" for kind in typing.get_args(FaultKind))), 0
        )

    def begin(self, session: Session, finished: Callable[[Session, Completion | EngineFault], None]) -> None:
        """Starts a session's request; `finished` gets what becomes of it, unless it is cancelled."""
        weights = session.weights

        async def work() -> None:
            finished(session, await self._serve(session))

        def ended(task: asyncio.Task[None]) -> None:
            self._requests.discard(task)
            weights.uses -= 1
            if weights.retired:
                self._fleet.retire(weights)

        weights.uses += 1
        session.task = self._fleet.spawn(work())
        self._requests.add(session.task)
        session.task.add_done_callback(ended)

    def cancel(self, session: Session) -> None:
        if session.task is not None:
            session.task.cancel()

    async def close(self) -> None:
        await end_all(self._requests)

    async def _serve(self, session: Session) -> Completion | EngineFault:
        """The completion of a session's request; faults of servers are tried elsewhere until the request's deadline or last attempt."""
        request, failures = session.request, 0
        prompt, done, logprobs, experts = np.asarray(request.tokens).tolist(), [], [], None
        limit = min(request.max_tokens, self._fleet.context - len(prompt))
        async with self._lanes:
            deadline = time.monotonic() + self._limits.request
            while True:
                try:
                    replica = session.home = await self._choose(session, deadline)
                    reply = await self._attempt(replica, session, prompt + done, limit - len(done), deadline)
                except Failure as failure:
                    failures += 1
                    pause = min(self._limits.backoff * 2 ** (failures - 1), 10.0)
                    if not failure.again or failures > self._limits.retries or time.monotonic() + pause >= deadline:
                        where = f"{session.home.name}: " if session.home else ""
                        self.counts[f"faults_{failure.kind}"] += 1
                        return EngineFault(request.session, failure.kind, f"after {failures} attempts: {where}{failure}")
                    self.counts["retries"] += 1
                    await asyncio.sleep(pause)
                    continue
                done += reply.tokens
                logprobs += reply.logprobs
                experts = reply.experts
                if reply.stopped and done[-1] in request.stop:
                    finish = "stop"
                elif len(done) == limit:
                    finish = "length" if limit == request.max_tokens else "context"
                else:  # the model's own end token, which is none of this request's
                    continue
                self.counts["sampled"] += len(done)
                return Completion(
                    session=request.session,
                    tokens=np.array(done, np.int32),
                    logprobs=np.array(logprobs, np.float32),
                    finish=finish,
                    version=session.weights.version,
                    experts=experts,
                )

    async def _choose(self, session: Session, deadline: float) -> Replica:
        """The session's server, or the one that its group prefers (the rollouts of a task share their prompt), unless that has too much."""
        end = min(deadline, time.monotonic() + self._limits.outage)
        while not (ready := [r for r in self._fleet.replicas if r.ready and session.weights.name in {None, *r.loaded}]):
            try:
                if not any(r.ready or r.failure.again for r in self._fleet.replicas):
                    raise TimeoutError
                async with asyncio.timeout(end - time.monotonic()):
                    await self._fleet.changed.wait()
            except TimeoutError:
                kind = self._fleet.replicas[0].failure.kind
                raise Failure(kind, f"no server was up in time: {self._fleet.why(self._fleet.replicas)}", again=False) from None
        if session.home in ready:
            return session.home
        group = session.request.key[:2]
        fair = _UNEVEN * (sum(r.running for r in ready) + 1) / len(ready)
        order = sorted(ready, key=lambda r: hashlib.sha256(f"{group} {r.name}".encode()).digest())
        return next((r for r in order if r.running + 1 <= fair), min(order, key=lambda r: r.running))

    async def _attempt(self, replica: Replica, session: Session, tokens: list[int], count: int, deadline: float) -> Reply:
        """One attempt at one server. A server that fails is out; one that may still be at work is told to stop."""
        rid = uuid.uuid4().hex  # of one length: a server aborts all requests whose ids begin with the one named
        name, down = session.weights.name, replica.down
        body = generate_body(session.request, tokens, count, name, rid, seeded=replica.info.seeded, experts=self._fleet.experts)
        asked = asyncio.create_task(replica.ask("POST", "/generate", body, timeout=deadline - time.monotonic()))
        replica.running += 1
        stop = True
        try:
            await asyncio.wait({asked, down}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Failure("timeout" if replica.failure.kind == "timeout" else "lost", f"given up: {replica.failure}")
            reply = read_generated(asked.result(), len(tokens), count, self._fleet.config)
            if reply.weights is not None and replica.weights is not None and reply.weights != replica.weights:
                raise Failure("version", f"its weights are {reply.weights!r} and were {replica.weights!r}")
            stop = False
        except Failure as failure:
            stop = failure.kind in ("timeout", "garbage")
            if failure.status == 400 and name is not None and "never been loaded" in str(failure):  # it was started anew
                failure = Failure("lost", str(failure))
            if failure.again and failure.kind != "aborted":
                self._fleet.lose(replica, failure)
            raise failure from None
        finally:
            replica.running -= 1
            if not asked.done():
                asked.cancel()
            if stop:
                self._fleet.spawn(self._abort(replica, rid))
        self.counts["prompt"] += len(tokens)
        self.counts["cached"] += reply.cached
        return reply

    async def _abort(self, replica: Replica, rid: str) -> None:
        with contextlib.suppress(Failure):  # the closed connection says the same, some seconds later
            await replica.ask("POST", "/abort_request", {"rid": rid}, timeout=5.0)
