"""Continuous batching: a fixed number of lanes, each holding one session's keys and values until the session is released.

The host decides, the device computes. `poll` gives free lanes to waiting sessions, brings new tokens into the cache in chunks, and decodes
all running lanes until some have finished. What a new session shares with one that is in the cache already (the system prompt, the whole
prompt of its group) is copied and not computed again; only keys and values made under the same policy version count. The second turn of a
session computes the new tokens alone.

Nothing depends on time: the same requests in the same order give the same batches. An engine without sessions forgets what its lanes hold,
so a batch of rollouts does not depend on what was sampled before it either.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model import AdapterBank, Cache, CausalLM, Gate, init_cache
from model.lora import bank_shardings
from rl.engines.jax.sampler import session_key
from rl.engines.jax.steps import CONTEXT, LENGTH, RUNNING, STOP, Slots, Turn, copy_lanes, count_compiles, decode, extend
from rl.engines.protocol import Completion, EngineError, Policy, Request

_FINISH = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}
_WORTH_WAITING = 8  # tokens: a shorter common prefix is computed again
_STOP_IDS = 4


@dataclasses.dataclass(eq=False)
class _Loaded:
    """A policy as the engine holds it: its own copy of the arrays, since a learner may donate the originals."""

    policy: Policy
    adapters: AdapterBank | None
    gate: Gate | None
    weights: np.ndarray | None  # [S]


@dataclasses.dataclass(eq=False)
class _Session:
    """A context, and its request: queued, then running in a lane, then None until the next."""

    request: Request | None
    loaded: _Loaded
    running: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)  # sampled for the request so far
    logprobs: list[float] = dataclasses.field(default_factory=list)
    lane: int | None = None


class JaxEngine:
    """See `rl.engines.protocol.Engine`.

    Args:
      model: its weights stay where they are and are never donated.
      lanes: sessions in the cache at once.
      context: longest context in tokens.
      steps: tokens sampled per lane in one call of the device, at most.
      patience: share of the running lanes that may have finished before the device returns.
      rows, chunk: new tokens enter the cache `chunk` at a time, `rows` lanes together.
      lengths: cache lengths to compile for; a call uses the shortest that holds its lanes. The context is always one of them.

    Attributes:
      metrics: counts and seconds since the engine was made: tokens sampled, prefilled and copied, decoding steps, calls of the device,
        programs compiled.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        lanes: int = 64,
        context: int = 320,
        steps: int = 16,
        patience: float = 0.25,
        rows: int = 8,
        chunk: int = 16,
        lengths: Sequence[int] = (),
    ):
        if lanes < 1 or context < 2 or steps < 1:
            raise EngineError(f"lanes = {lanes}, context = {context}, steps = {steps}: must be at least 1, 2 and 1")
        self.lanes, self.context = lanes, context
        self._steps, self._patience = steps, patience
        self._rows, self._chunk = min(rows, lanes), min(chunk, context)
        self._lengths = sorted({min(n, context) for n in lengths} | {context})
        self._vocabulary = model.config.vocab_size
        self._model = model.config, model.mesh, model.parameters()
        self._cache = self._empty_cache(model.embed[...].dtype)
        self._compiles = count_compiles()

        self._policies: dict[str, _Loaded] = {}
        self._sessions: dict[str, _Session] = {}
        self._queue: list[str] = []  # sessions whose request does not run yet, first come first served
        self._done: list[Completion] = []
        # Per lane: the known tokens, how many there are, how many of them are in the cache, and under which policy.
        self._tokens = np.zeros((lanes, context), np.int32)
        self._known = np.zeros(lanes, np.int32)
        self._cached = np.zeros(lanes, np.int32)
        self._under: list[_Loaded | None] = [None] * lanes
        self._owner: list[_Session | None] = [None] * lanes
        self._keys = np.zeros((lanes, 2), np.uint32)
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self._counts) | {"compiles": count_compiles() - self._compiles}

    def load(self, policy: Policy) -> None:
        weights = _check_policy(policy)
        known = [*self._policies.values(), *(s.loaded for s in self._sessions.values())]

        def own(name: str):
            """The copy made for another policy that holds the same object, so that both decode in one batch; else a new one."""
            original = getattr(policy, name)
            shared = (getattr(k, name) for k in known if original is not None and getattr(k.policy, name) is original)
            return next(shared, None) or self._copy(original)

        self._policies[policy.name] = _Loaded(policy, own("adapters"), own("gate"), weights)

    def submit(self, request: Request) -> None:
        loaded = self._check_request(request)
        session = self._sessions.get(request.session)
        if session is None:
            session = self._sessions[request.session] = _Session(request, loaded)
        else:
            session.request, session.loaded, session.tokens, session.logprobs = request, loaded, [], []
        if len(request.tokens) >= self.context:
            self._finish(session, "context")
        else:
            self._queue.append(request.session)

    def poll(self) -> list[Completion]:
        self._admit()
        self._prefill()
        self._decode_some()
        done, self._done = self._done, []
        return done

    def release(self, session: str) -> None:
        found = self._sessions.pop(session, None)
        if found is None:
            return
        if found.lane is not None:
            self._owner[found.lane] = None
        if session in self._queue:
            self._queue.remove(session)
        if not self._sessions:
            self._under = [None] * self.lanes
            self._cached[:] = 0

    def partial(self, session: str, start: int = 0) -> tuple[list[int], list[float]]:
        """The tokens and log-probs that the running request of a session has sampled so far, from the `start`-th on; for streaming."""
        found = self._sessions[session]
        return found.tokens[start:], found.logprobs[start:]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        names = [request.session for request in requests]
        if len(set(names)) < len(names):
            raise EngineError("generate: two requests have one session; give every request its own")
        found: dict[str, Completion] = {}
        try:
            for request in requests:
                self.submit(request)
            while len(found) < len(requests):
                for completion in self.poll():
                    found[completion.session] = completion
                    self.release(completion.session)
        finally:
            for name in names:
                self.release(name)
        return [found[name] for name in names]

    def close(self) -> None:
        """Nothing is outside this process."""

    # --- the mesh

    def _empty_cache(self, dtype: jnp.dtype) -> Cache:
        config, mesh, _ = self._model

        def make() -> Cache:
            return init_cache(config, self.lanes, self.context, dtype)

        return make() if mesh is None else jax.jit(make, out_shardings=jax.eval_shape(make).shardings(mesh))()

    def _copy(self, arrays: AdapterBank | Gate | None) -> AdapterBank | Gate | None:
        """Arrays of our own, on a mesh laid out as the learner's; a gate is whole everywhere."""
        config, mesh, _ = self._model
        if mesh is None or arrays is None:
            return jax.tree.map(lambda x: jnp.array(x, copy=True), arrays)
        whole = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), arrays)
        shardings = bank_shardings(arrays, config, mesh) if isinstance(arrays, AdapterBank) else whole
        return jax.tree.map(lambda x, sharding: jax.device_put(x, sharding, may_alias=False), arrays, shardings)

    # --- scheduling

    def _check_request(self, request: Request) -> _Loaded:
        def fail(why: str):
            raise EngineError(f"request of session {request.session!r}: {why}")

        if not request.policy:
            fail("no policy named; name the policy that is to be sampled")
        if request.policy not in self._policies:
            fail(f"policy {request.policy!r} is not loaded; loaded are {sorted(self._policies)}")
        tokens = np.asarray(request.tokens)
        if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
            fail("tokens must be a non-empty vector of integers")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            fail(f"tokens must be in [0, {self._vocabulary}), found {tokens.min()} to {tokens.max()}")
        if request.max_tokens < 1 or not 0 <= request.temperature < np.inf or len(request.stop) > _STOP_IDS:
            fail(f"max_tokens >= 1, a finite temperature >= 0 and at most {_STOP_IDS} stop ids are needed")
        session = self._sessions.get(request.session)
        if session is not None:
            if session.request is not None:
                fail("its last request has not finished; poll until it has")
            if session.lane is not None:
                known = self._known[session.lane]
                if len(tokens) <= known or not np.array_equal(tokens[:known], self._tokens[session.lane, :known]):
                    fail(f"the tokens do not extend the {known} that the session holds; release it to begin anew")
        return self._policies[request.policy]

    @property
    def _running(self) -> list[_Session]:
        return [s for s in self._owner if s is not None and s.running]

    def _admit(self) -> None:
        """Starts queued requests: those of sessions in a lane, and the first waiting ones while lanes are free.

        One batch runs one bank and one gate. A request that needs others waits until the batch has drained, new sessions behind it too.
        """
        adapters = next((s.loaded.adapters for s in self._running if s.loaded.adapters is not None), None)
        gate = next((s.loaded.gate for s in self._running if s.loaded.gate is not None), None)
        blocked, waiting = False, []
        free = [lane for lane, owner in enumerate(self._owner) if owner is None]
        for name in self._queue:
            session = self._sessions[name]
            mine = session.loaded
            fits = _agree(adapters, mine.adapters) and _agree(gate, mine.gate)
            if not fits or (session.lane is None and (blocked or not free)):
                blocked |= not fits
                waiting.append(name)
                continue
            adapters = adapters if mine.adapters is None else mine.adapters
            gate = gate if mine.gate is None else mine.gate
            self._start(session, free)
        self._queue = waiting

    def _start(self, session: _Session, free: list[int]) -> None:
        """Puts the request's tokens into the session's lane, or into the free lane that holds most of them already."""
        request, tokens, session.running = session.request, np.asarray(session.request.tokens, np.int32), True
        if session.lane is None:
            shared = self._shared(tokens, session.loaded)
            lane = session.lane = max(free, key=lambda lane: (shared[lane], -lane))
            free.remove(lane)
            self._owner[lane], self._cached[lane] = session, shared[lane]
        lane = session.lane
        if self._under[lane] is not session.loaded:
            self._under[lane], self._cached[lane] = session.loaded, 0
        self._tokens[lane, : len(tokens)] = tokens
        self._known[lane] = len(tokens)
        self._keys[lane] = session_key(request.key)

    def _shared(self, tokens: np.ndarray, loaded: _Loaded, within: np.ndarray | None = None) -> np.ndarray:
        """[N]: how many of `tokens`, the last excepted, each lane holds under the same policy; of its first within[N] (default: cached)."""
        limit = len(tokens) - 1
        differs = self._tokens[:, :limit] != tokens[:limit]
        common = np.where(differs.any(axis=1), differs.argmax(axis=1), limit) if limit else np.zeros(self.lanes, int)
        within = self._cached if within is None else within
        same = np.array([under is loaded for under in self._under])
        if self._cache.recurrent:  # a state holds all its tokens or is of no use
            same &= common >= within
        return np.where(same, np.minimum(common, within), 0)

    # --- device calls

    def _prefill(self) -> None:
        """Brings every running lane's tokens but the last into the cache.

        A lane that shares a prefix with one that is being computed waits for it and copies.
        """
        began = time.perf_counter()
        behind = [s.lane for s in self._running if self._cached[s.lane] < self._known[s.lane] - 1]
        fresh = [lane for lane in behind if self._cached[lane] + _WORTH_WAITING < self._known[lane]]
        ready = [lane for lane in behind if lane not in fresh]
        while fresh or ready:
            snapshot = self._cached.copy()
            copies, later = [], []
            coming = np.zeros(self.lanes, np.int32)
            coming[ready] = self._known[ready] - 1
            for lane in fresh:
                tokens, under = self._tokens[lane, : self._known[lane]], self._under[lane]
                here = self._shared(tokens, under, snapshot)
                source = int(here.argmax())
                if self._shared(tokens, under, coming).max() >= max(here[source], self._cached[lane]) + _WORTH_WAITING:
                    later.append(lane)
                else:
                    if here[source] >= self._cached[lane] + _WORTH_WAITING:
                        copies.append((source, lane))
                        self._counts["copied"] += int(here[source] - self._cached[lane])
                        self._cached[lane] = here[source]
                    ready.append(lane)
                coming[lane] = self._known[lane] - 1
            self._copy_lanes(copies)
            fresh = later
            ready = [lane for lane in ready if self._cached[lane] < self._known[lane] - 1]
            if ready:
                self._extend_lanes(ready[: self._rows])
                ready = [lane for lane in ready if self._cached[lane] < self._known[lane] - 1]
        self._counts["prefill_seconds"] += time.perf_counter() - began

    def _copy_lanes(self, pairs: list[tuple[int, int]]) -> None:
        for start in range(0, len(pairs), self._rows):
            source, target = np.zeros(self._rows, np.int32), np.full(self._rows, self.lanes, np.int32)
            some = pairs[start : start + self._rows]
            source[: len(some)], target[: len(some)] = zip(*some, strict=True)
            self._cache = copy_lanes(self._cache, source, target)
            self._counts["copy_calls"] += 1

    def _extend_lanes(self, chosen: list[int]) -> None:
        lanes, count = np.full(self._rows, self.lanes, np.int32), np.zeros(self._rows, np.int32)
        offset, tokens = np.zeros(self._rows, np.int32), np.zeros((self._rows, self._chunk), np.int32)
        for row, lane in enumerate(chosen):
            start = self._cached[lane]
            lanes[row], offset[row] = lane, start
            count[row] = min(self._known[lane] - 1 - start, self._chunk)
            tokens[row, : count[row]] = self._tokens[lane, start : start + count[row]]
        adapters, gate, slots = self._route([self._under[lane] for lane in chosen], self._rows)
        length = self._length(int((offset + count).max()))
        self._cache = extend(*self._model, self._cache, adapters, gate, slots, lanes, tokens, offset, count, length=length)
        self._cached[chosen] += count[: len(chosen)]
        self._counts["prefilled"] += int(count.sum())
        self._counts["extend_calls"] += 1

    def _decode_some(self) -> None:
        running = self._running
        if not running:
            return
        began = time.perf_counter()
        turn = Turn(
            token=self._tokens[np.arange(self.lanes), np.maximum(self._known - 1, 0)],
            position=np.maximum(self._known - 1, 0),
            running=np.zeros(self.lanes, bool),
            remaining=np.ones(self.lanes, np.int32),
            keys=self._keys,
            temperature=np.ones(self.lanes, np.float32),
            stop=np.full((self.lanes, _STOP_IDS), -1, np.int32),
        )
        loaded: list[_Loaded | None] = [None] * self.lanes
        for session in running:
            lane, request = session.lane, session.request
            turn.running[lane] = True
            turn.remaining[lane] = request.max_tokens - len(session.tokens)
            turn.temperature[lane] = request.temperature
            turn.stop[lane, : len(request.stop)] = request.stop
            loaded[lane] = session.loaded
        adapters, gate, slots = self._route(loaded, self.lanes)
        length = self._length(int(self._known[turn.running].max()) + self._steps)
        enough = np.int32(max(1, round(self._patience * len(running))))
        self._cache, out = decode(*self._model, self._cache, adapters, gate, slots, turn, enough, steps=self._steps, length=length)
        tokens, logprobs, count, finish = (np.asarray(x) for x in out)
        for session in running:
            lane, n = session.lane, int(count[session.lane])
            known = self._known[lane]
            self._tokens[lane, known : known + n] = tokens[lane, :n]
            self._known[lane] += n
            self._cached[lane] = self._known[lane] - 1
            session.tokens += tokens[lane, :n].tolist()
            session.logprobs += logprobs[lane, :n].tolist()
            if finish[lane] != RUNNING:
                self._finish(session, _FINISH[int(finish[lane])])
        self._counts["sampled"] += int(count.sum())
        self._counts["steps"] += int(count.max())
        self._counts["decode_calls"] += 1
        self._counts["decode_seconds"] += time.perf_counter() - began

    def _finish(self, session: _Session, finish: str) -> None:
        request, session.request, session.running = session.request, None, False
        tokens, logprobs = np.array(session.tokens, np.int32), np.array(session.logprobs, np.float32)
        self._done.append(Completion(request.session, tokens, logprobs, finish, session.loaded.policy.version))

    def _length(self, needed: int) -> int:
        return next((length for length in self._lengths if length >= needed), self.context)

    def _route(self, loaded: Sequence[_Loaded | None], rows: int) -> tuple[AdapterBank | None, Gate | None, Slots]:
        """The one bank and gate of these rows, and how each row uses them; rows without a policy take the base."""
        adapters = next((x.adapters for x in loaded if x is not None and x.adapters is not None), None)
        gate = next((x.gate for x in loaded if x is not None and x.gate is not None), None)
        if adapters is None:
            return None, None, Slots(None, None)
        weights = np.zeros((rows, adapters.size + 1), np.float32)
        weights[:, 0] = 1.0
        for row, x in enumerate(loaded):
            if x is not None and x.weights is not None:
                weights[row] = x.weights
        gated = None if gate is None else np.array([x is not None and x.gate is not None for x in loaded] + [False] * (rows - len(loaded)))
        return adapters, gate, Slots(weights, gated)


def _agree(one: object | None, other: object | None) -> bool:
    """Whether one batch can run under both: they are the same, or one of them is none."""
    return one is None or other is None or one is other


def _check_policy(policy: Policy) -> np.ndarray | None:
    """The constant weights [S] of a policy, if it has any."""

    def fail(why: str):
        raise EngineError(f"policy {policy.name!r}: {why}")

    if not policy.name:
        fail("has no name")
    if policy.adapters is None:
        if policy.weights is not None or policy.gate is not None:
            fail("has weights or a gate but no adapters to apply them to")
        return None
    slots = policy.adapters.size + 1
    if policy.gate is not None:
        if policy.weights is not None:
            fail("has both weights and a gate; give one of them")
        if policy.gate.bias.shape[-1] != slots:
            fail(f"its gate has {policy.gate.bias.shape[-1]} slots, its bank {slots} (base included)")
        return None
    if policy.weights is None and slots != 2:
        fail(f"a bank of {slots - 1} adapters needs weights or a gate")
    weights = np.array([0.0, 1.0] if policy.weights is None else policy.weights, np.float32)
    if weights.shape != (slots,) or not np.isfinite(weights).all():
        fail(f"weights must be {slots} finite numbers (base first), found {weights.tolist()}")
    return weights
