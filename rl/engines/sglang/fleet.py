"""All servers together: which is up and has which adapters, and a request's way through them until it is sampled or given up.

Everything here runs on one event loop. A server that fails is out at once; a watch of its own asks it again, with growing pauses, checks
that it still is what it was, and gives it the adapters that are in use before any request goes there. An adapter that was replaced is
unloaded when its last request has ended, never before: unloading waits for the requests that run, and a later one would load the old files
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import numpy as np

from model import Config
from rl.engines.protocol import Completion, EngineError, EngineFault, Request
from rl.engines.sglang.adapters import Adapter
from rl.engines.sglang.replica import Replica
from rl.engines.sglang.wire import Failure, Reply, generate_body, read_generated, read_scores, scoring_body

FAULTS = ("timeout", "lost", "server", "garbage", "aborted", "version")
_UNEVEN = 1.25  # a server may have this much more than its share of the requests before one that prefers it goes elsewhere


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long what may take, in seconds, and how often it is tried.

    Attributes:
      request: a request with all its attempts, from when it has a lane.
      retries: further attempts at a request.
      backoff: pause before the second attempt; doubled with every further one, up to ten seconds.
      liveness: a server that does not answer `/health` for so long is out, and its requests go elsewhere.
      outage: as long as no server is up, requests wait; after so long they are faults.
      load: to load an adapter and ask for its first tokens.
    """

    request: float = 600.0
    retries: int = 4
    backoff: float = 0.25
    liveness: float = 30.0
    outage: float = 300.0
    load: float = 120.0


@dataclasses.dataclass(eq=False)
class Weights:
    """What requests run under: the base, or an adapter.

    Attributes:
      expected: [T - 1], the probe's log-probs by our own model, if there is one to ask.
      uses: requests that have not ended.
      retired: no new request will come.
      deaths: servers that ended when they were to run it for the first time.
    """

    version: int
    adapter: Adapter | None
    expected: np.ndarray | None = None
    uses: int = 0
    retired: bool = False
    deaths: int = 0

    @property
    def name(self) -> str | None:
        return self.adapter and self.adapter.name


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


class Fleet:
    """See the module.

    Args:
      probe: [T] tokens whose log-probs tell weights apart; `base` [T - 1] are those of our own model, if there is one to ask, and
        `tolerance` their largest mean difference.
      broken: told of an exception that is none of a server's doing.
    """

    def __init__(
        self,
        urls: Sequence[str],
        headers: dict[str, str],
        config: Config,
        lanes: int,
        context: int,
        limits: Limits,
        experts: bool,
        probe: list[int],
        base: np.ndarray | None,
        tolerance: float,
        broken: Callable[[BaseException], None],
    ):
        self._config, self._context, self._limits, self._experts = config, context, limits, experts
        self._probe, self._base, self._tolerance, self._broken = probe, base, tolerance, broken
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
        )
        self.replicas = [Replica(url, self._http) for url in urls]
        self._lanes = asyncio.Semaphore(lanes)
        self._in_use: dict[str, Weights] = {}  # by the adapter's name
        self._changed = asyncio.Event()
        self._background: set[asyncio.Task] = set()
        self.counts = dict.fromkeys(("sampled", "prompt", "cached", "retries", "outages", *(f"faults_{kind}" for kind in FAULTS)), 0)

    async def start(self) -> None:
        """Waits for the first server; a server that is not what the engine needs is an error.

        Raises:
          EngineError: none answers, or one that does cannot be used.
        """
        for replica in self.replicas:
            self._spawn(self._watch(replica))
        await self._some_ready(self._limits.outage)
        # the others may be as quick
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while any(r.failure.again and not r.ready for r in self.replicas):
                    await self._changed.wait()
        if unusable := [r for r in self.replicas if not r.ready and not r.failure.again]:
            raise EngineError(self._why(unusable))

    async def close(self, patience: float) -> None:
        """Ends all requests, and unloads the adapters where servers answer in time."""
        while self._background:  # a request that is cancelled leaves a message to its server behind
            tasks = set(self._background)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        have = [(r, name) for r in self.replicas if r.ready for name in r.loaded]
        await asyncio.gather(*(self._unload_from(r, name, patience) for r, name in have))
        for weights in self._in_use.values():
            weights.adapter.remove()
        await self._http.close()

    # --- adapters

    async def install(self, weights: Weights) -> None:
        """Brings an adapter to all servers that are up, and asks each of them for its log-probs.

        Raises:
          EngineError: one refuses it, or none took it.
        """
        self._in_use[weights.name] = weights
        try:
            while not any(r.ready and weights.name in r.loaded for r in self.replicas):  # one that failed comes back with it
                await self._some_ready(self._limits.outage)
                found = await asyncio.gather(*(self._try_install(r, weights) for r in self.replicas if r.ready), return_exceptions=True)
                for error in filter(None, found):
                    raise error
        except EngineError:
            self.retire(weights)
            raise

    def retire(self, weights: Weights) -> None:
        weights.retired = True
        if weights.adapter and not weights.uses:
            self._spawn(self._unload(weights))

    async def _try_install(self, replica: Replica, weights: Weights) -> None:
        try:
            await self._install(replica, weights)
        except Failure as failure:
            if not failure.again:
                raise EngineError(f"{replica.name}: {failure}") from None
            self._lose(replica, failure)

    async def _install(self, replica: Replica, weights: Weights) -> None:
        """Loads an adapter and shows that requests run under it; failures of the second kind are not worth another attempt."""
        adapter = weights.adapter
        if problems := replica.info.adapter_problems(adapter):
            raise Failure("server", "; ".join(problems), again=False)
        async with replica.lock:
            if adapter.name in replica.loaded:
                return
            body = {"lora_name": adapter.name, "lora_path": str(adapter.folder), "pinned": False}
            try:
                reply = await replica.ask("POST", "/load_lora_adapter", body, timeout=self._limits.load)
            except Failure as failure:
                if failure.status in (404, 405):
                    raise Failure("server", "it loads no adapters while it serves; it can only sample the base", again=False) from None
                if failure.status != 400 or "already loaded" not in str(failure):
                    raise
            else:
                there = reply.get("loaded_adapters") if isinstance(reply, dict) and reply.get("success") is True else None
                if not isinstance(there, dict) or adapter.name not in there:
                    raise Failure("garbage", f"/load_lora_adapter did not load {adapter.name}: {str(reply)[:300]}")
            try:
                scores = await self._score(replica, adapter.name)
            except Failure as failure:
                weights.deaths += failure.kind == "lost"
                if weights.deaths > len(self.replicas):
                    message = f"servers end at their first request under adapter {adapter.name}: {failure}"
                    raise Failure("lost", message, again=False) from None
                raise
            if not adapter.idle and np.array_equal(scores, replica.base):
                message = f"adapter {adapter.name} changes no log-prob: the server samples the base and says nothing"
                raise Failure("version", message, again=False)
            self._compare(scores, weights.expected, f"adapter {adapter.name}")
            replica.loaded.add(adapter.name)

    async def _score(self, replica: Replica, name: str | None) -> np.ndarray:
        body = scoring_body(self._probe, name, uuid.uuid4().hex)
        reply = await replica.ask("POST", "/generate", body, timeout=self._limits.load)
        return read_scores(reply, self._probe, self._config.vocab_size)

    def _compare(self, scores: np.ndarray, expected: np.ndarray | None, what: str) -> None:
        if expected is not None and not (distance := float(np.abs(scores - expected).mean())) <= self._tolerance:
            message = f"log-probs of {what} differ from our model's by {distance:.3g} on average, more than {self._tolerance:.3g}"
            raise Failure("version", message, again=False)

    async def _unload(self, weights: Weights) -> None:
        del self._in_use[weights.name]
        have = [r for r in self.replicas if weights.name in r.loaded]
        await asyncio.gather(*(self._unload_from(r, weights.name, self._limits.load) for r in have))
        weights.adapter.remove()

    async def _unload_from(self, replica: Replica, name: str, timeout: float) -> None:
        with contextlib.suppress(Failure):  # a server that is gone has no adapters; one that comes back is asked again
            await replica.ask("POST", "/unload_lora_adapter", {"lora_name": name}, timeout=timeout)
            replica.loaded.discard(name)

    # --- servers

    def _lose(self, replica: Replica, failure: Failure) -> None:
        replica.failure = failure
        if replica.ready:
            replica.ready = False
            self.counts["outages"] += 1
            replica.wake.set()
            self._notify()

    async def _watch(self, replica: Replica) -> None:
        """Asks a server that is up whether it still is, and one that is out whether it can be used again."""
        pause = self._limits.backoff
        while True:
            if replica.ready:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limits.liveness / 3):
                        await replica.wake.wait()
                if not replica.ready:
                    continue
                try:
                    await replica.ask("GET", "/health", timeout=self._limits.liveness)
                except Failure as failure:
                    self._lose(replica, failure)
                    replica.give_up()
                continue
            try:
                await self._revive(replica)
                pause = self._limits.backoff
            except Failure as failure:
                replica.failure = failure
                replica.give_up()
                self._notify()
                await asyncio.sleep(pause)
                pause = min(2 * pause, 10.0)

    async def _revive(self, replica: Replica) -> None:
        """Checks a server and gives it the adapters in use; it is ready afterwards."""
        await replica.ask("GET", "/health", timeout=self._limits.liveness)
        replica.info = info = await replica.inspect(self._limits.liveness)
        if problems := info.problems(self._config, self._context, self._experts):
            raise Failure("server", "; ".join(problems), again=False)
        if replica.weights is not None and info.weights != replica.weights:
            raise Failure("version", f"its weights are {info.weights!r} and were {replica.weights!r}", again=False)
        replica.weights = info.weights
        before, replica.loaded = replica.loaded, set()  # it may be a new process
        for name in before - self._in_use.keys():
            await self._unload_from(replica, name, self._limits.load)
        replica.base = await self._score(replica, None)
        self._compare(replica.base, self._base, "the base")
        while missing := [w for name, w in self._in_use.items() if name not in replica.loaded and not (w.retired and not w.uses)]:
            await self._install(replica, missing[0])
        if replica.down.done():
            replica.down = asyncio.get_running_loop().create_future()
        replica.wake.clear()
        replica.ready = True
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _some_ready(self, timeout: float) -> None:
        """Raises `EngineError` if no server is up in time, or none will be."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not any(r.ready for r in self.replicas):
                    if all(not r.failure.again for r in self.replicas):
                        break
                    await self._changed.wait()
        if not any(r.ready for r in self.replicas):
            raise EngineError(f"no SGLang server can be used: {self._why(self.replicas)}")

    @staticmethod
    def _why(replicas: Sequence[Replica]) -> str:
        return "; ".join(f"{r.name}: {r.failure}" for r in replicas if not r.ready)

    # --- requests

    async def serve(self, session: Session) -> Completion | EngineFault:
        """The completion of a session's request; faults of servers are tried elsewhere until the request's deadline or last attempt."""
        request, failures = session.request, 0
        prompt, done, logprobs, experts = np.asarray(request.tokens).tolist(), [], [], None
        limit = min(request.max_tokens, self._context - len(prompt))
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
                    experts=None if experts is None else self._sparse(experts),
                )

    def _sparse(self, rows: np.ndarray) -> np.ndarray:
        """[T, L * k] of all layers -> int16 [T + 1, L', k] of the sparse ones, -1 for the last token."""
        found = rows.reshape(len(rows), self._config.num_hidden_layers, -1)
        sparse = [i for i, kind in enumerate(self._config.kinds()) if kind.sparse]
        return np.pad(found[:, sparse].astype(np.int16), ((0, 1), (0, 0), (0, 0)), constant_values=-1)

    async def _choose(self, session: Session, deadline: float) -> Replica:
        """The session's server, or the one that its group prefers (the rollouts of a task share their prompt), unless that has too much."""
        end = min(deadline, time.monotonic() + self._limits.outage)
        while not (ready := [r for r in self.replicas if r.ready and session.weights.name in {None, *r.loaded}]):
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                kind = self.replicas[0].failure.kind
                raise Failure(kind, f"no server was up in time: {self._why(self.replicas)}", again=False) from None
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
        body = generate_body(
            session.request,
            tokens,
            count,
            name,
            rid,
            seeded=replica.info.seeded,
            experts=self._experts and replica.info.experts is not False,
        )
        asked = asyncio.create_task(replica.ask("POST", "/generate", body, timeout=deadline - time.monotonic()))
        replica.running += 1
        stop = True
        try:
            await asyncio.wait({asked, down}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Failure("timeout" if replica.failure.kind == "timeout" else "lost", f"given up: {replica.failure}")
            reply = read_generated(asked.result(), len(tokens), count, self._config.vocab_size)
            if reply.weights is not None and replica.weights is not None and reply.weights != replica.weights:
                raise Failure("version", f"its weights are {reply.weights!r} and were {replica.weights!r}")
            stop = False
        except Failure as failure:
            stop = failure.kind in ("timeout", "garbage")
            if failure.status == 400 and name is not None and "never been loaded" in str(failure):  # it was started anew
                failure = Failure("lost", str(failure))
            if failure.again and failure.kind != "aborted":
                self._lose(replica, failure)
            raise failure from None
        finally:
            replica.running -= 1
            if not asked.done():
                asked.cancel()
            if stop:
                self._spawn(self._abort(replica, rid))
        self.counts["prompt"] += len(tokens)
        self.counts["cached"] += reply.cached
        return reply

    async def _abort(self, replica: Replica, rid: str) -> None:
        with contextlib.suppress(Failure):  # the closed connection says the same, some seconds later
            await replica.ask("POST", "/abort_request", {"rid": rid}, timeout=5.0)

    # --- tasks

    def begin(self, session: Session, finished: Callable[[Session, Completion | EngineFault], None]) -> None:
        """Starts a session's request; `finished` gets what becomes of it, unless it is cancelled."""

        weights = session.weights

        async def work() -> None:
            finished(session, await self.serve(session))

        def ended(_: asyncio.Task[None]) -> None:
            weights.uses -= 1
            if weights.retired:
                self.retire(weights)

        weights.uses += 1
        session.task = self._spawn(work())
        session.task.add_done_callback(ended)

    def cancel(self, session: Session) -> None:
        if session.task is not None:
            session.task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._broken(error)

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(ended)
        return task
