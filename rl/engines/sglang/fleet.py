"""All servers together: which of them are up, and which adapters they have.

Everything here runs on one event loop. A server that fails is out at once; a watch of its own asks it again, with growing pauses, checks
that it still is what it was, and gives it the adapters that are in use before any request goes there. An adapter that was replaced is
unloaded when its last request has ended, never before: unloading waits for the requests that run, and a later one would load the old files
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import numpy as np

from model import Config
from rl.engines.protocol import EngineError
from rl.engines.sglang.adapters import Adapter
from rl.engines.sglang.replica import Replica
from rl.engines.sglang.wire import Failure, read_scores, scoring_body

_GOODBYE = 2.0  # seconds for telling servers to stop requests, at the end


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

    @property
    def spent(self) -> bool:
        """Whether no request has it or will have it."""
        return self.retired and not self.uses


class Fleet:
    """See the module.

    Args:
      probe: [T] tokens whose log-probs tell weights apart; `base` [T - 1] are those of our own model, if there is one to ask, and
        `tolerance` their largest mean difference.
      broken: told of an exception that is none of a server's doing.

    Attributes:
      changed: set, and replaced, whenever a server is up, or out, or found wanting again.
    """

    def __init__(
        self,
        urls: Sequence[str],
        headers: dict[str, str],
        config: Config,
        context: int,
        limits: Limits,
        experts: bool,
        probe: list[int],
        base: np.ndarray | None,
        tolerance: float,
        broken: Callable[[BaseException], None],
    ):
        self.config, self.context, self.limits, self.experts = config, context, limits, experts
        self._probe, self._base, self._tolerance, self._broken = probe, base, tolerance, broken
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), headers=headers, timeout=aiohttp.ClientTimeout(total=None), trust_env=False
        )
        self.replicas = [Replica(url, self._http) for url in urls]
        self._in_use: dict[str, Weights] = {}  # by the adapter's name
        self.changed = asyncio.Event()
        self._background: set[asyncio.Task] = set()
        self._watches: set[asyncio.Task] = set()
        self.outages = 0

    async def start(self) -> None:
        """Waits for the first server; a server that is not what the engine needs is an error.

        Raises:
          EngineError: none answers, or one that does cannot be used.
        """
        self._watches = {self.spawn(self._watch(replica)) for replica in self.replicas}
        await self._some_ready(self.limits.outage)
        # the others may be as quick
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while any(r.failure.again and not r.ready for r in self.replicas):
                    await self.changed.wait()
        if unusable := [r for r in self.replicas if not r.ready and not r.failure.again]:
            raise EngineError(self.why(unusable))

    async def close(self, patience: float) -> None:
        """Unloads the adapters where servers answer in time; requests must have ended."""
        if said := self._background - self._watches:  # what cancelled requests tell their servers
            await asyncio.wait(said, timeout=_GOODBYE)
        await end_all(self._background)
        have = [(r, name) for r in self.replicas if r.ready for name in r.held]
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
                await self._some_ready(self.limits.outage)
                found = await asyncio.gather(*(self._try_install(r, weights) for r in self.replicas if r.ready), return_exceptions=True)
                for error in filter(None, found):
                    raise error
        except EngineError:
            self.retire(weights)
            raise

    def retire(self, weights: Weights) -> None:
        weights.retired = True
        if weights.adapter and weights.spent:
            self.spawn(self._unload(weights))

    async def _try_install(self, replica: Replica, weights: Weights) -> None:
        try:
            await self._install(replica, weights)
        except Failure as failure:
            if not failure.again:
                raise EngineError(f"{replica.name}: {failure}") from None
            self.lose(replica, failure)

    async def _install(self, replica: Replica, weights: Weights) -> None:
        """Loads an adapter, if it is not there, and shows that requests run under it."""
        adapter = weights.adapter
        if problems := replica.info.adapter_problems(adapter):
            raise Failure("server", "; ".join(problems), again=False)
        async with replica.lock:
            if adapter.name in replica.loaded or weights.spent:
                return
            replica.held.add(adapter.name)
            body = {"lora_name": adapter.name, "lora_path": str(adapter.folder), "pinned": False}
            try:
                reply = await replica.ask("POST", "/load_lora_adapter", body, timeout=self.limits.load)
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
                await self._try_out(replica, weights)
            except Failure as failure:
                if failure.kind not in ("lost", "timeout"):
                    await self._forget(replica, adapter.name, self.limits.load)
                raise
            replica.loaded.add(adapter.name)

    async def _try_out(self, replica: Replica, weights: Weights) -> None:
        """A first request under an adapter: that the server survives it, that it is not the base, that it is ours."""
        adapter = weights.adapter
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

    async def _score(self, replica: Replica, name: str | None) -> np.ndarray:
        body = scoring_body(self._probe, name, uuid.uuid4().hex)
        reply = await replica.ask("POST", "/generate", body, timeout=self.limits.load)
        return read_scores(reply, self._probe, self.config.vocab_size)

    def _compare(self, scores: np.ndarray, expected: np.ndarray | None, what: str) -> None:
        if expected is not None and not (distance := float(np.abs(scores - expected).mean())) <= self._tolerance:
            message = f"log-probs of {what} differ from our model's by {distance:.3g} on average, more than {self._tolerance:.3g}"
            raise Failure("version", message, again=False)

    async def _unload(self, weights: Weights) -> None:
        del self._in_use[weights.name]
        have = [r for r in self.replicas if weights.name in r.held]
        try:
            await asyncio.gather(*(self._unload_from(r, weights.name, self.limits.load) for r in have))
        finally:
            weights.adapter.remove()

    async def _unload_from(self, replica: Replica, name: str, timeout: float) -> None:
        async with replica.lock:
            await self._forget(replica, name, timeout)

    async def _forget(self, replica: Replica, name: str, timeout: float) -> None:
        """Unloads an adapter; a server that is gone is asked again when it comes back."""
        replica.loaded.discard(name)
        try:
            await replica.ask("POST", "/unload_lora_adapter", {"lora_name": name}, timeout=timeout)
        except Failure as failure:
            if failure.status != 400:  # it has no such adapter
                return
        replica.held.discard(name)

    # --- servers

    def lose(self, replica: Replica, failure: Failure) -> None:
        """No more requests for a server, until its watch has found it well."""
        replica.failure = failure
        if replica.ready:
            replica.ready = False
            self.outages += 1
            replica.wake.set()
            self._notify()

    async def _watch(self, replica: Replica) -> None:
        """Asks a server that is up whether it still is, and one that is out whether it can be used again."""
        pause = self.limits.backoff
        while True:
            if replica.ready:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.limits.liveness / 3):
                        await replica.wake.wait()
                if not replica.ready:
                    continue
                try:
                    await replica.ask("GET", "/health", timeout=self.limits.liveness)
                except Failure as failure:
                    self.lose(replica, failure)
                    replica.give_up()
                continue
            try:
                await self._revive(replica)
                pause = self.limits.backoff
            except Failure as failure:
                replica.failure = failure
                replica.give_up()
                self._notify()
                await asyncio.sleep(pause)
                pause = min(2 * pause, 10.0)

    async def _revive(self, replica: Replica) -> None:
        """Checks a server and gives it the adapters in use; it is ready afterwards."""
        await replica.ask("GET", "/health", timeout=self.limits.liveness)
        replica.info = info = await replica.inspect(self.limits.liveness)
        if problems := info.problems(self.config, self.context, self.experts):
            raise Failure("server", "; ".join(problems), again=False)
        if replica.weights is not None and info.weights != replica.weights:
            raise Failure("version", f"its weights are {info.weights!r} and were {replica.weights!r}", again=False)
        replica.weights = info.weights
        replica.loaded = set()  # it may be a new process
        for name in replica.held - self._in_use.keys():
            await self._unload_from(replica, name, self.limits.load)
        replica.base = await self._score(replica, None)
        self._compare(replica.base, self._base, "the base")
        while missing := [w for name, w in self._in_use.items() if name not in replica.loaded and not w.spent]:
            await self._install(replica, missing[0])
        if replica.down.done():
            replica.down = asyncio.get_running_loop().create_future()
        replica.wake.clear()
        replica.ready = True
        self._notify()

    def _notify(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    async def _some_ready(self, timeout: float) -> None:
        """Raises `EngineError` if no server is up in time, or none will be."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not any(r.ready for r in self.replicas):
                    if all(not r.failure.again for r in self.replicas):
                        break
                    await self.changed.wait()
        if not any(r.ready for r in self.replicas):
            raise EngineError(f"no SGLang server can be used: {self.why(self.replicas)}")

    @staticmethod
    def why(replicas: Sequence[Replica]) -> str:
        """What is wrong with those that are not ready, for messages."""
        return "; ".join(f"{r.name}: {r.failure}" for r in replicas if not r.ready)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._broken(error)

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(ended)
        return task


async def end_all(tasks: set[asyncio.Task]) -> None:
    """Cancels tasks and waits until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(set(tasks))
        await asyncio.sleep(0)  # what they call when they end
