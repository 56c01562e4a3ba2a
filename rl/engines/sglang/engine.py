"""`SGLangEngine`: rollouts from SGLang servers over HTTP.

A thread of its own runs an event loop with all requests in flight (`fleet`); the engine hands requests in and takes results out. A policy
is the base or one adapter, which is written to a folder that the servers can read, loaded on all of them under a name that is used once,
and asked for log-probs before the first request may name it.

Tokens do not follow from a request's key as they do in `JaxEngine`, unless the servers run with --enable-deterministic-inference.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import queue
import threading
import time
import urllib.parse
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model import AdapterBank, CausalLM, Config
from rl.engines.checks import check_request, generate
from rl.engines.protocol import Completion, EngineError, EngineFault, Policy, Request
from rl.engines.sglang.adapters import pick_adapter, write_adapter
from rl.engines.sglang.dispatch import Dispatcher, Session
from rl.engines.sglang.fleet import Fleet, Limits, Weights
from rl.engines.sglang.launch import Servers
from rl.engines.whole_law import check_whole_law

_PROBE = 24  # tokens
_ORDINARY = 1000  # ids below are bytes and short words in all tokenizers of these models, and never an image's place
_MOMENT = 0.05  # seconds that `poll` waits for a result
_CLOSING = 10.0  # seconds for unloading adapters at the end

Reference = Callable[[AdapterBank | None, np.ndarray], np.ndarray]


def reference_of(model: CausalLM) -> Reference:
    """The log-probs [T - 1] of tokens [T] under our own model and an adapter, for `SGLangEngine(reference=...)`."""

    @functools.partial(jax.jit, static_argnums=0)
    def logprobs(graph, state, tokens: jax.Array, bank: AdapterBank | None) -> jax.Array:
        logits = nnx.merge(graph, state)(tokens[None], adapters=bank)[0, :-1]
        return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[1:, None], axis=-1)[:, 0]

    def reference(bank: AdapterBank | None, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(logprobs(*nnx.split(model), jnp.asarray(tokens), bank))

    return reference


class SGLangEngine:
    """See `rl.engines.protocol.Engine`.

    Args:
      servers: their addresses, or servers that were started for this engine, which `close` ends.
      config: of the model that they serve.
      folder: where adapters are written; an absolute path that the servers see under the same name.
      lanes: requests in flight at once, on all servers together.
      context: longest context in tokens; the servers need a few more, see `Info.problems`.
      limits: how long what may take.
      experts: ask for the experts of each token.
      reference: log-probs by our own model, see `reference_of`. With it a server whose base or adapter is another than ours is refused;
        without it only one that runs the base for an adapter.
      tolerance: largest mean |difference of log-prob| from the reference. 0.2 leaves room for logits in bfloat16; in float32 1e-4 will do.
      api_key: sent with every request and never shown.

    Attributes:
      metrics: counts since the engine was made: tokens sampled, of prompts, and of these found in a server's cache; further attempts,
        outages of servers, faults by kind; servers up; seconds spent on loading policies.

    Raises:
      EngineError: no server answers, or one cannot be used; the message names the flag to set.
    """

    def __init__(
        self,
        servers: Sequence[str] | Servers,
        *,
        config: Config,
        folder: str | Path,
        lanes: int = 64,
        context: int = 320,
        limits: Limits | None = None,
        experts: bool = False,
        reference: Reference | None = None,
        tolerance: float = 0.2,
        api_key: str | None = None,
    ):
        self._servers = servers if isinstance(servers, Servers) else None
        urls = list(servers.urls if isinstance(servers, Servers) else servers)
        if not urls or lanes < 1 or context < 2:
            raise EngineError(f"{len(urls)} servers, lanes = {lanes}, context = {context}: must be at least 1, 1 and 2")
        if experts and not config.count("sparse"):
            raise EngineError("experts = True: the model has none")
        for url in urls:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
                shown = f"{parts.scheme}://{parts.hostname}"
                raise EngineError(f"server {shown}: an address is http://host:port; credentials are given as api_key")
        self.lanes, self.context = lanes, context
        self._config, self._folder, self._reference = config, Path(folder).resolve(), reference
        self._folder.mkdir(parents=True, exist_ok=True)
        self._policies: dict[str, tuple[Policy, Weights]] = {}
        self._sessions: dict[str, Session] = {}
        self._results: queue.SimpleQueue[tuple[Session, Completion | EngineFault]] = queue.SimpleQueue()
        self._sync_seconds = 0.0
        self._closed = False
        self._working: concurrent.futures.Future | None = None
        self._error: BaseException | None = None
        probe = np.random.default_rng(0).integers(0, min(_ORDINARY, config.vocab_size), min(_PROBE, context - 1)).astype(np.int32)
        self._probe, base = probe, reference and reference(None, probe)

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-requests", daemon=True)
        self._thread.start()

        async def make() -> tuple[Fleet, Dispatcher]:
            headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
            limited = limits or Limits()
            fleet = Fleet(urls, headers, config, context, limited, experts, probe.tolist(), base, tolerance, self._break)
            return fleet, Dispatcher(fleet, lanes)

        self._fleet, self._dispatcher = self._run(make())
        try:
            self._run(self._fleet.start())
        except BaseException:
            self.close()
            raise

    @property
    def metrics(self) -> dict[str, float]:
        up = sum(replica.ready for replica in self._fleet.replicas)
        return {**self._dispatcher.counts, "outages": self._fleet.outages, "servers": up, "sync_seconds": self._sync_seconds}

    def load(self, policy: Policy) -> None:
        began = time.perf_counter()
        bank = pick_adapter(policy)
        before = self._policies.get(policy.name)
        weights = Weights(policy.version, None)
        if bank is not None:
            adapter = write_adapter(bank, self._config, policy.version, self._folder)
            if before and before[1].adapter and (before[0].version, before[1].adapter.digest) == (policy.version, adapter.digest):
                adapter.remove()
                return
            weights = Weights(policy.version, adapter, self._reference and self._reference(bank, self._probe))
            self._run(self._fleet.install(weights))
        self._policies[policy.name] = policy, weights
        if before:
            self._loop.call_soon_threadsafe(self._fleet.retire, before[1])
        self._sync_seconds += time.perf_counter() - began

    def submit(self, request: Request) -> None:
        if self._closed:
            raise EngineError(f"request of session {request.session!r}: the engine is closed")
        session = self._sessions.get(request.session)
        known = session and session.known
        check_request(request, self._policies, self._config.vocab_size, busy=bool(session and session.busy), known=known)
        check_whole_law(request, "SGLang")
        weights = self._policies[request.policy][1]
        if session is None:
            session = self._sessions[request.session] = Session(weights)
        session.request, session.weights, session.busy = request, weights, True
        if len(request.tokens) >= self.context:
            nothing = Completion(request.session, np.zeros(0, np.int32), np.zeros(0, np.float32), "context", weights.version)
            self._results.put((session, nothing))
        else:
            self._loop.call_soon_threadsafe(self._dispatcher.begin, session, lambda *result: self._results.put(result))

    def poll(self) -> list[Completion | EngineFault]:
        out = []
        self._check_thread()
        wait = any(session.busy for session in self._sessions.values())
        while True:
            try:
                result = self._results.get(timeout=_MOMENT) if wait else self._results.get_nowait()
            except queue.Empty:
                return out
            session, found = result
            if self._sessions.get(found.session) is not session:  # released since
                continue
            wait = session.busy = False
            if isinstance(found, Completion):
                session.known = np.concatenate([np.asarray(session.request.tokens, np.int32), found.tokens])
            out.append(found)

    def release(self, session: str) -> None:
        found = self._sessions.pop(session, None)
        if found is not None and found.busy:
            self._loop.call_soon_threadsafe(self._dispatcher.cancel, found)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return generate(self, requests)

    def close(self) -> None:
        """Cancels what runs, unloads the adapters, ends the servers that were started for this engine."""
        if self._closed:
            return
        self._closed = True
        if self._working is not None:
            self._working.cancel()
        try:
            self._run(self._dispatcher.close())
            self._run(self._fleet.close(_CLOSING))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self._servers is not None:
                self._servers.close()

    def __enter__(self) -> SGLangEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of work on the loop; an interrupt of this thread cancels it, and so does `close`."""
        if self._loop.is_closed():
            work.close()
            raise concurrent.futures.CancelledError
        future = self._working = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not concurrent.futures.wait([future], timeout=1.0).done:
                self._check_thread()
            return future.result()
        finally:
            future.cancel()

    def _break(self, error: BaseException) -> None:
        self._error = error

    def _check_thread(self) -> None:
        """What failed on the loop and is no server's doing is raised here, where somebody sees it."""
        if self._error is not None:
            raise RuntimeError("the thread of requests failed") from self._error
