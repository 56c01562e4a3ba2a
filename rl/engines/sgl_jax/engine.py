"""Rollouts by SGL-JAX in this process: its scheduler batches the requests, the policy's weights are written into its arrays.

The model holds one set of weights. Requests of other policies wait until those that run have finished, then the weights change; among
requests that wait, the first decides. A gated policy needs the JAX engine.

What SGL-JAX returns is corrected here. Of more than 50 tokens the log-probs come several times, of more than 100 the ids too, and the ids
lack the stop token: ids and log-probs are both read from the last `completion_tokens` log-probs. A turn that SGL-JAX ends at an end of text
of its own, which the request does not name, is continued.

Samples cannot be repeated: `Request.key` is not used. SGL-JAX's seeded sampler does not draw from the law whose log-probs it returns. Its
noise for any two tokens differs by a fixed pattern of bits; of two tokens with probabilities 0.7 and 0.3 it takes the first up to 89 % of
the time.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from model import Config
from rl.engines.checks import check_request, generate
from rl.engines.protocol import Completion, EngineError, EngineFault, Finish, Policy, Request
from rl.engines.sgl_jax.launch import MISSING
from rl.engines.sgl_jax.weights import Factors, Weights, fold
from rl.engines.whole_law import check_whole_law, sampling_params

_MOMENT = 0.05  # seconds that a poll waits for something to finish
_FLUSH = 60.0  # seconds for the scheduler to come to rest before the weights change
_UNKNOWN = Factors({}, {})  # a write did not end


@dataclasses.dataclass(eq=False)
class _Loaded:
    policy: Policy
    factors: Factors | None  # None: the base


@dataclasses.dataclass(eq=False)
class _Session:
    """A context, and its request: queued, then running as a future, then None until the next."""

    name: str
    request: Request | None
    loaded: _Loaded
    deadline: float = math.inf
    id: str = ""
    future: concurrent.futures.Future | None = None
    known: np.ndarray | None = None  # the tokens of the last request and those sampled for it


class SglJaxEngine:
    """See `rl.engines.protocol.Engine`.

    Args:
      engine: an `sgl_jax` Engine, see `launch`; used by nobody else. Its own `shutdown` would end every child of this process and is never
        called.
      config: that of the model it serves.
      timeout: seconds a request may take, waiting included, before it is given up as an EngineFault.

    Attributes:
      lanes: the requests that it decodes at once; `context`: the longest context, six positions less than the one it was launched with.
      metrics: counts and seconds since the engine was made: tokens sampled, prefilled and copied (found in its cache), changes of weights.

    Raises:
      EngineError: SGL-JAX is not installed, or the engine was launched in a way that cannot serve; the message names the argument.
    """

    def __init__(self, engine: Any, config: Config, *, timeout: float = 600.0):
        try:
            from sgl_jax.srt.managers.io_struct import GenerateReqInput
        except ImportError as error:
            raise EngineError(f"{MISSING} ({error})") from error
        arguments = engine.server_args
        for name, wanted, why in (
            ("enable_single_process", True, "the weights are written in this process"),
            ("enable_engine_loop_run_forever_daemon", True, "its event loop must run beside the caller's thread"),
            ("enable_deterministic_sampling", False, "its seeded sampler draws from another law than its log-probs are of"),
        ):
            if bool(getattr(arguments, name)) is not wanted:
                raise EngineError(f"SGL-JAX was launched with {name}={getattr(arguments, name)}; launch it with {wanted}: {why}")
        scheduler = engine.scheduler_info["scheduler"]
        self.lanes, self.context = scheduler.max_running_requests, engine.scheduler_info["max_req_input_len"]
        self._engine, self._make_request, self._vocabulary, self._timeout = engine, GenerateReqInput, config.vocab_size, timeout
        scaling = arguments.lora_scaling if arguments.enable_static_lora else None
        self._weights = Weights(scheduler.tp_worker.worker.model_runner, config, scaling)
        self._written: Factors | None = None
        self._policies: dict[str, _Loaded] = {}
        self._sessions: dict[str, _Session] = {}
        self._queue: list[_Session] = []  # whose request does not run yet, first come first served
        self._running: dict[concurrent.futures.Future, _Session] = {}  # cancelled ones too, until they have ended
        self._done: list[Completion | EngineFault] = []
        # SGL-JAX cancels by prefix: ids of one length, none of which begins another
        self._ids = (f"trace-jax-{n:012d}" for n in itertools.count())
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self._counts)

    def load(self, policy: Policy) -> None:
        factors = fold(policy)
        self._weights.check(factors)
        self._policies[policy.name] = _Loaded(policy, factors)

    def submit(self, request: Request) -> None:
        session = self._sessions.get(request.session)
        known = session and session.known
        check_request(request, self._policies, self._vocabulary, busy=bool(session and session.request), known=known)
        check_whole_law(request, "SGL-JAX")
        loaded = self._policies[request.policy]
        session = self._sessions.setdefault(request.session, _Session(request.session, None, loaded))
        session.request, session.loaded, session.id = request, loaded, next(self._ids)
        session.deadline = time.monotonic() + self._timeout
        if len(request.tokens) >= self.context:
            self._finish(session, [], [], "context")
        else:
            self._queue.append(session)

    def poll(self) -> list[Completion | EngineFault]:
        self._admit()
        if self._running and not self._done:
            concurrent.futures.wait(self._running, _MOMENT, concurrent.futures.FIRST_COMPLETED)
        for future in [future for future in self._running if future.done()]:
            session = self._running.pop(future)
            if session.future is not future:  # released, or given up
                continue
            error = future.exception()
            if error is None:
                self._finish(session, *future.result())
            else:
                self._fail(session, error if isinstance(error, EngineFault) else f"{type(error).__name__}: {error}")
        for session in [s for s in self._sessions.values() if s.request is not None and time.monotonic() > s.deadline]:
            self._cancel(session)
            self._fail(session, EngineFault(session.name, "timeout", f"no answer within {self._timeout:g} s, waiting included"))
        done, self._done = self._done, []
        return done

    def release(self, session: str) -> None:
        if found := self._sessions.pop(session, None):
            self._cancel(found)
            found.request = None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return generate(self, requests)

    def close(self) -> None:
        """Cancels what runs; nothing is outside this process."""
        for name in list(self._sessions):
            self.release(name)

    # --- scheduling

    def _admit(self) -> None:
        """Starts the queued requests of the weights that are written, up to the first that needs others; with nothing running, those of
        the weights that the first needs."""
        if not self._queue:
            return
        if not self._running and self._queue[0].loaded.factors is not self._written and not self._change(self._queue[0].loaded.factors):
            return
        fits = [session.loaded.factors is self._written for session in self._queue]
        if self._running:
            fits = list(itertools.accumulate(fits, lambda x, y: x and y))
        for session in itertools.compress(self._queue, fits):
            session.future = asyncio.run_coroutine_threadsafe(self._sample(session.id, session.request), self._engine.loop)
            self._running[session.future] = session
        self._queue = [session for session, fit in zip(self._queue, fits, strict=True) if not fit]

    def _change(self, factors: Factors | None) -> bool:
        """Writes other weights. Flushing comes first: it succeeds once no step runs, and from then on nothing fills the cache."""
        began = time.perf_counter()
        if problem := asyncio.run_coroutine_threadsafe(self._flush(), self._engine.loop).result():
            for session in self._queue:
                self._fail(session, f"SGL-JAX did not come to rest within {_FLUSH:g} s, so its weights were not changed: {problem}")
            self._queue = []
            return False
        self._written = _UNKNOWN
        self._weights.write(factors)
        self._written = factors
        self._counts["changes"] += 1
        self._counts["change_seconds"] += time.perf_counter() - began
        return True

    async def _flush(self) -> str:
        """Empties the cache of keys and values; what is in the way, if that fails for long."""
        problem, end = "no answer", time.monotonic() + _FLUSH
        while (left := end - time.monotonic()) > 0:
            try:
                answer = await asyncio.wait_for(self._engine.async_flush_cache(), left)
            except TimeoutError:
                break
            if answer.success:
                return ""
            problem = answer.error_msg
            await asyncio.sleep(0.01)
        return problem

    def _cancel(self, session: _Session) -> None:
        if session in self._queue:
            self._queue.remove(session)
        if session.future is not None:
            asyncio.run_coroutine_threadsafe(self._abort(session.id), self._engine.loop)
            session.future = None

    async def _abort(self, id: str) -> None:
        self._engine.abort_request(rid=id)

    def _finish(self, session: _Session, tokens: list[int], logprobs: list[float], finish: Finish) -> None:
        request, session.request, session.future = session.request, None, None
        tokens = np.array(tokens, np.int32)
        session.known = np.concatenate([np.asarray(request.tokens, np.int32), tokens])
        version = session.loaded.policy.version
        self._done.append(Completion(session.name, tokens, np.array(logprobs, np.float32), finish, version))

    def _fail(self, session: _Session, why: str | EngineFault) -> None:
        session.request, session.future = None, None
        self._done.append(why if isinstance(why, EngineFault) else EngineFault(session.name, "server", why))

    # --- one request, in the engine's event loop

    async def _sample(self, id: str, request: Request) -> tuple[list[int], list[float], Finish]:
        prompt, tokens, logprobs = np.asarray(request.tokens).tolist(), [], []
        limit = min(request.max_tokens, self.context - len(prompt))
        while len(tokens) < limit:
            asked = self._make_request(
                rid=id,
                input_ids=prompt + tokens,
                sampling_params=sampling_params(request, limit - len(tokens)),
                return_logprob=True,
                return_text_in_logprobs=False,
            )
            answer = await anext(self._engine.tokenizer_manager.generate_request(asked, None))
            more, values = read_answer(request.session, answer)
            tokens += more
            logprobs += values
            self._counts.update(sampled=len(more), copied=answer["meta_info"]["cached_tokens"])
            self._counts["prefilled"] += answer["meta_info"]["prompt_tokens"] - answer["meta_info"]["cached_tokens"]
            if tokens[-1] in request.stop:
                return tokens, logprobs, "stop"
        return tokens, logprobs, "length" if len(tokens) == request.max_tokens else "context"


def read_answer(session: str, answer: Mapping[str, Any]) -> tuple[list[int], list[float]]:
    """The ids and log-probs that were sampled.

    Raises:
      EngineFault: "aborted", or "garbage" if they are not all there or not finite.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] == "abort":
        raise EngineFault(session, "aborted", str(reason.get("message")))
    count = meta["completion_tokens"]
    found = meta["output_token_logprobs"][-count:] if count > 0 else []
    # SGL-JAX puts a stop token in the place of one that came of NaN logits, and says so in a text
    if not found or len(found) != count or isinstance(reason.get("matched"), str) or not all(math.isfinite(x[0]) for x in found):
        raise EngineFault(session, "garbage", f"{count} tokens, {len(found)} log-probs, finish_reason {reason}")
    return [int(x[1]) for x in found], [float(x[0]) for x in found]
