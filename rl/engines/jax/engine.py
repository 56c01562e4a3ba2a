"""Continuous batching: lanes in which requests run, and behind them a pool of blocks for contexts that are shared or wait.

The host decides, the device computes. `poll` gives lanes to waiting requests, brings new tokens into the cache in chunks, and decodes all
lanes that are complete until some have finished. What a request shares with others (the system prompt, the whole prompt of its group) is
computed once and copied from the pool; only keys and values made under the same policy version count. A session goes on in its lane, where
its next turn computes the new tokens alone; one that had to give up its lane finds all its tokens in the pool, as long as that has room.

Nothing depends on time: the same requests in the same order give the same batches. An engine that is told to forget does so when it has no
sessions left, so a batch of rollouts does not depend on what was sampled before it either.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from model import AdapterBank, CausalLM, init_cache, init_pool
from model.lora import bank_shardings
from rl.engines.checks import check_request, generate
from rl.engines.jax.blocks import BLOCK, Node, PrefixTree, pool_size
from rl.engines.jax.policies import Loaded, load_policy, route
from rl.engines.jax.sampler import session_key
from rl.engines.jax.scheduler import Scheduler, Session
from rl.engines.jax.steps import (
    CONTEXT,
    LENGTH,
    RUNNING,
    STOP,
    Turn,
    cache_lengths,
    count_compiles,
    decode,
    extend,
    laid_out,
    restore,
    store,
)
from rl.engines.protocol import Completion, EngineError, Policy, Request

_FINISH = {STOP: "stop", LENGTH: "length", CONTEXT: "context"}
_WORTH_WAITING = 8  # tokens: fewer are computed again
_STOP_IDS = 4
_STORED = 32  # blocks of one call


class JaxEngine:
    """See `rl.engines.protocol.Engine`.

    Args:
      model: its weights stay where they are and are never donated.
      lanes: requests that run at once. There may be more sessions.
      context: longest context in tokens.
      blocks: of 16 tokens in the pool, see `pool_size`.
      steps: tokens sampled per lane in one call of the device, at most.
      patience: share of the running lanes that may have finished before the device returns.
      rows, chunk: new tokens enter the cache `chunk` at a time, `rows` lanes together.
      prefill_budget: tokens that enter the cache between two calls that decode, or one call's; as many as there are while nothing decodes.
      lengths: cache lengths to compile for, see `cache_lengths`; a call uses the shortest that holds its lanes.
      forget: without sessions nothing is kept; else prompts find what earlier ones had in common with them, as far as the pool has room.
      max_waiting: requests that may wait for a lane.
      experts: completions say which experts were taken.

    Raises:
      EngineError: a size out of range, or experts of a model that has none.

    Attributes:
      metrics: counts and seconds since the engine was made: tokens sampled, prefilled and restored (copied from the pool instead), blocks
        stored and evicted, decoding steps, calls of the device, programs compiled.
      gauges: what is there now: lanes, requests that run and wait, sessions, blocks of the pool and how many hold something.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        lanes: int = 64,
        context: int = 320,
        blocks: int | None = None,
        steps: int = 16,
        patience: float = 0.25,
        rows: int = 8,
        chunk: int = 16,
        prefill_budget: int = 2048,
        lengths: Sequence[int] | None = None,
        forget: bool = True,
        max_waiting: int = 4096,
        experts: bool = False,
    ):
        if lanes < 1 or context < 2 or steps < 1:
            raise EngineError(f"lanes = {lanes}, context = {context}, steps = {steps}: must be at least 1, 2 and 1")
        blocks, states = pool_size(lanes, context, blocks)
        if blocks < 0 or prefill_budget < 1 or max_waiting < 1:
            raise EngineError(f"blocks = {blocks}, prefill_budget = {prefill_budget}, max_waiting = {max_waiting}: at least 0, 1 and 1")
        self.lanes, self.context = lanes, context
        self._steps, self._patience, self._forget, self._max_waiting = steps, patience, forget, max_waiting
        self._rows, self._chunk, self._budget = min(rows, lanes), min(chunk, context), prefill_budget
        self._lengths = cache_lengths(context, lengths)
        self._parts = cache_lengths(context, [context // 4, context // 2])  # lengths that are copied from the pool
        self._config, self._mesh = model.config, model.mesh
        self._model = model.config, model.mesh, model.parameters()
        sparse = model.config.count("sparse")
        if experts and not sparse:
            raise EngineError("experts = True: the model has none")
        self._experts = (sparse, model.config.num_experts_per_tok) if experts else None  # [L', k]
        dtype = model.embed[...].dtype
        self._cache = self._empty(lambda: init_cache(model.config, lanes, context, dtype))
        self._pool = self._empty(lambda: init_pool(model.config, max(blocks, 1), BLOCK, max(states, 1), dtype))
        self._tree = PrefixTree(blocks, states, self._cache.recurrent)
        self._scheduler = Scheduler(lanes)
        self._compiles = count_compiles()

        self._policies: dict[str, Loaded] = {}
        self._sessions: dict[str, Session] = {}
        self._done: list[Completion] = []
        self._to_store: dict[int, tuple[int, int]] = {}  # by block of the pool: a lane, and which of its blocks
        self._states_to_store: dict[int, int] = {}  # by state of the pool: a lane
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self._counts) | {"evicted": self._tree.evicted, "compiles": count_compiles() - self._compiles}

    @property
    def gauges(self) -> dict[str, int]:
        at_work = {"lanes": self.lanes, "running": len(self._scheduler.running), "waiting": len(self._scheduler.queue)}
        return at_work | {"sessions": len(self._sessions), "blocks": self._tree.blocks, "blocks_used": self._tree.used}

    @property
    def room(self) -> int:
        """Requests that `submit` takes before some have got lanes."""
        return self._max_waiting - len(self._scheduler.queue)

    def load(self, policy: Policy) -> None:
        known = [*self._policies.values(), *(session.loaded for session in self._sessions.values())]
        self._policies[policy.name] = load_policy(policy, known, self._copy)

    def submit(self, request: Request) -> None:
        """See `rl.engines.protocol.Engine`. Raises EngineError also where there is no `room`."""
        session = self._sessions.get(request.session)
        known = session and session.tokens[: session.known]
        check_request(request, self._policies, self._config.vocab_size, busy=bool(session and session.request), known=known)
        if len(request.stop) > _STOP_IDS:
            raise EngineError(f"request of session {request.session!r}: {len(request.stop)} stop ids, at most {_STOP_IDS} are served")
        if self.room < 1:
            raise EngineError(f"request of session {request.session!r}: {self._max_waiting} others wait already (max_waiting); poll first")
        loaded = self._policies[request.policy]
        if session is None:
            session = Session(request.session, loaded, np.zeros(self.context, np.int32))
            if self._experts:
                session.experts = np.full((self.context, *self._experts), -1, np.int16)
            self._sessions[request.session] = session
        session.request, session.loaded, session.logprobs = request, loaded, []
        if len(request.tokens) >= self.context:
            self._finish(session, "context")
            return
        session.known = len(request.tokens)
        session.tokens[: session.known] = request.tokens
        session.key = session_key(request.key)
        self._scheduler.enqueue(session)

    def poll(self) -> list[Completion]:
        self._admit()
        self._prefill()
        self._decode()
        done, self._done = self._done, []
        return done

    def release(self, session: str) -> None:
        found = self._sessions.pop(session, None)
        if found is None:
            return
        if found.lane is not None and not self._forget:
            self._save(found, found.lane)
        self._tree.release(found.chain, found)
        self._scheduler.remove(found)
        if not self._sessions and self._forget:
            self._tree.clear()
            self._to_store.clear()
            self._states_to_store.clear()

    def partial(self, session: str, start: int = 0) -> tuple[list[int], list[float]]:
        """The tokens and log-probs that the running request of a session has sampled so far, from the `start`-th on; for streaming."""
        found = self._sessions[session]
        return found.tokens[len(found.request.tokens) + start : found.known].tolist(), found.logprobs[start:]

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return generate(self, requests, self._max_waiting)

    def warm_up(self, policies: Iterable[str], *, limited: bool = False) -> None:
        """Compiles all that requests of these policies can come to need; with `limited` also for those with top-k or top-p."""
        named = [self._policies[name] for name in policies]
        kinds = {tuple(x is None for x in route([one])): one for one in named}
        for loaded in kinds.values():
            for length in self._lengths:
                self._extend_lanes([], loaded, length)
                for some in {False, limited}:
                    self._decode_lanes([], loaded, length, some)
        for length in self._parts:
            self._restore_lanes([], length)
        self._store_blocks([], [])

    def close(self) -> None:
        """Nothing is outside this process."""

    # --- the mesh

    def _empty(self, make: Callable[[], Any]) -> Any:
        """A cache or pool, laid out over the mesh."""
        return jax.jit(lambda: laid_out(make(), self._mesh))()

    def _copy(self, arrays: Any) -> Any:
        """Arrays of our own, on a mesh laid out as the learner's; a gate is whole everywhere."""
        if self._mesh is None or arrays is None:
            return jax.tree.map(lambda x: jnp.array(x, copy=True), arrays)
        whole = jax.tree.map(lambda _: NamedSharding(self._mesh, PartitionSpec()), arrays)
        shardings = bank_shardings(arrays, self._config, self._mesh) if isinstance(arrays, AdapterBank) else whole
        return jax.tree.map(lambda x, sharding: jax.device_put(x, sharding, may_alias=False), arrays, shardings)

    # --- scheduling

    def _admit(self) -> None:
        for session, ousted in self._scheduler.admit():
            if ousted is not None:
                self._save(ousted, session.lane)
                ousted.under, ousted.cached = None, 0
            if session.under is session.loaded:
                session.begun = True
            else:
                session.under, session.cached, session.begun = session.loaded, 0, False
                self._hold(session, session.known - 1)

    def _hold(self, session: Session, length: int) -> None:
        """Reserves the blocks of the first `length` tokens, and gives up those that the session had."""
        chain = self._tree.reserve(session.under.serial, session.tokens[:length].tolist())
        self._tree.release(session.chain, session)
        session.chain = chain

    def _save(self, session: Session, lane: int) -> None:
        """Brings all that the session has in a lane to the pool."""
        if session.under is not None:
            self._hold(session, session.cached)
            self._store(session, lane)

    def _store(self, session: Session, lane: int) -> None:
        """What the session's chain needs and the lane has goes to the pool, before the next call that may write to the lane."""
        for place, node in enumerate(session.chain):
            if not node.ready:
                self._to_store[node.block] = lane, place
                node.ready, node.maker = True, None
                if session.experts is not None:
                    node.experts = session.experts[place * BLOCK :][: len(node.tokens)].copy()
        if self._tree.recurrent and session.chain and sum(len(node.tokens) for node in session.chain) == session.cached:
            last = session.chain[-1]
            if last.state is None and (state := self._tree.add_state(last)) is not None:
                self._states_to_store[state] = lane

    def _finish(self, session: Session, finish: str) -> None:
        request, session.request = session.request, None
        self._scheduler.finish(session)
        tokens = session.tokens[len(request.tokens) : session.known].copy()
        logprobs = np.array(session.logprobs, np.float32)
        experts = session.experts
        if experts is not None:
            experts = experts[: len(request.tokens) + len(tokens)].copy()
        self._done.append(Completion(session.name, tokens, logprobs, finish, session.loaded.policy.version, experts))

    # --- tokens that are known

    def _prefill(self) -> None:
        """Brings running sessions' tokens but the last into the cache, those of the first first."""
        began, spent = time.perf_counter(), 0
        self._flush()
        behind = [session for session in self._scheduler.running if session.behind or not session.begun]
        decoding = len(behind) < len(self._scheduler.running)
        waiting = [session for session in behind if not session.begun]
        while behind:
            if waiting:
                self._begin(waiting)
            chosen = [session for session in behind if session.begun and session.behind][: self._rows]
            if chosen:
                new = sum(min(session.behind, self._chunk) for session in chosen)
                if decoding and spent and spent + new > self._budget:
                    break
                self._extend_lanes(chosen, None, None)
                spent += new
            complete = [session for session in behind if session.begun and not session.behind]
            for session in complete:
                self._store(session, session.lane)
            behind = [session for session in behind if session not in complete]
            waiting = [session for session in behind if not session.begun] if complete else []
        if spent:
            jax.block_until_ready(self._cache)  # else the next call that decodes would be charged with it
        self._counts["prefill_seconds"] += time.perf_counter() - began

    def _begin(self, sessions: Sequence[Session]) -> None:
        """Gives sessions what the pool has of their tokens; one that others are computing tokens for goes on waiting for them."""
        self._flush()
        found = []
        for session in sessions:
            missing = [node for node in session.chain if not node.ready]
            if self._awaited(session, missing):
                continue
            for node in missing:
                node.maker = node.maker or session
            session.begun = True
            nodes, length = self._tree.find(session.under.serial, session.chain, session.tokens[: session.known - 1].tolist())
            if length >= _WORTH_WAITING:
                found.append((session, nodes, length))
        for start in range(0, len(found), self._rows):
            some = found[start : start + self._rows]
            longest = max(length for _, _, length in some)
            self._restore_lanes(some, next(length for length in self._parts if length >= longest))

    def _awaited(self, session: Session, missing: Sequence[Node]) -> bool:
        """Whether others are computing enough of what the session misses."""
        makers = [node for node in missing if node.maker not in (None, session)]
        if self._tree.recurrent:  # which leave their state at the end alone
            makers = [node for node in makers if node is node.maker.chain[-1]]
        return sum(len(node.tokens) for node in makers) >= _WORTH_WAITING

    def _extend_lanes(self, chosen: Sequence[Session], warm: Loaded | None, length: int | None) -> None:
        """The next chunk of some lanes. Without any it does nothing, for the policy `warm`."""
        rows, chunk = self._rows, self._chunk
        lanes, offset, count = np.full(rows, self.lanes, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        tokens, loaded = np.zeros((rows, chunk), np.int32), [warm] + [None] * (rows - 1)
        for row, session in enumerate(chosen):
            start, new = session.cached, min(session.behind, chunk)
            lanes[row], offset[row], count[row], loaded[row] = session.lane, start, new, session.under
            tokens[row, :new] = session.tokens[start : start + new]
        adapters, gate, slots = route(loaded)
        length = length or self._length(int((offset + count).max()))
        arguments = adapters, gate, slots, lanes, tokens, offset, count
        self._cache, experts = extend(*self._model, self._cache, *arguments, length=length, experts=self._experts is not None)
        experts = None if experts is None else np.asarray(experts)
        for row, session in enumerate(chosen):
            if experts is not None:
                session.experts[offset[row] : offset[row] + count[row]] = experts[row, : count[row]]
            session.cached += int(count[row])
        self._counts["prefilled"] += int(count.sum())
        self._counts["extend_calls"] += bool(chosen)

    # --- the pool

    def _flush(self) -> None:
        """Copies to the pool what is to be stored."""
        blocks, states = list(self._to_store.items()), list(self._states_to_store.items())
        for start in range(0, max(len(blocks), len(states)), _STORED):
            self._store_blocks(blocks[start : start + _STORED], states[start : start + _STORED])
        self._to_store.clear()
        self._states_to_store.clear()

    def _store_blocks(self, blocks: Sequence[tuple[int, tuple[int, int]]], states: Sequence[tuple[int, int]]) -> None:
        lanes, places, standing = (np.zeros(_STORED, np.int32) for _ in range(3))
        to, states_to = np.full(_STORED, max(self._tree.blocks, 1), np.int32), np.full(_STORED, max(self._tree.states, 1), np.int32)
        for row, (block, (lane, place)) in enumerate(blocks):
            to[row], lanes[row], places[row] = block, lane, place
        for row, (state, lane) in enumerate(states):
            states_to[row], standing[row] = state, lane
        self._pool = store(self._mesh, self._pool, self._cache, lanes, places, to, standing, states_to)
        self._counts["stored"] += len(blocks)
        self._counts["store_calls"] += bool(blocks or states)

    def _restore_lanes(self, found: Sequence[tuple[Session, Sequence[Node], int]], length: int) -> None:
        """Copies contexts of at most `length` tokens from the pool to lanes."""
        rows = self._rows
        lanes, states = np.full(rows, self.lanes, np.int32), np.zeros(rows, np.int32)
        blocks = np.zeros((rows, -(-length // BLOCK)), np.int32)
        for row, (session, nodes, tokens) in enumerate(found):
            lanes[row], states[row] = session.lane, nodes[-1].state or 0
            blocks[row, : len(nodes)] = [node.block for node in nodes]
            if session.experts is not None:
                session.experts[:tokens] = np.concatenate([node.experts for node in nodes])[:tokens]
            session.cached = tokens
            self._counts["restored"] += tokens
        self._cache = restore(self._mesh, self._cache, self._pool, lanes, blocks, states)
        self._counts["restore_calls"] += bool(found)

    # --- tokens that are sampled

    def _decode(self) -> None:
        running = [session for session in self._scheduler.running if session.begun and not session.behind]
        if not running:
            return
        self._flush()
        began = time.perf_counter()
        length = self._length(max(session.known for session in running) + self._steps)
        limited = any(session.request.top_k > 0 or session.request.top_p < 1 for session in running)
        tokens, logprobs, count, finish, experts = self._decode_lanes(running, None, length, limited)
        for session in running:
            lane, n, known = session.lane, int(count[session.lane]), session.known
            session.tokens[known : known + n] = tokens[lane, :n]
            session.logprobs += logprobs[lane, :n].tolist()
            if experts is not None:
                session.experts[known - 1 : known - 1 + n] = experts[lane, :n]
            session.known, session.cached = known + n, known + n - 1
            if finish[lane] != RUNNING:
                self._finish(session, _FINISH[int(finish[lane])])
        self._counts["sampled"] += int(count.sum())
        self._counts["steps"] += int(count.max())
        self._counts["decode_calls"] += 1
        self._counts["decode_seconds"] += time.perf_counter() - began

    def _decode_lanes(self, running: Sequence[Session], warm: Loaded | None, length: int, limited: bool) -> list[np.ndarray | None]:
        """What some lanes have sampled, see `Sampled`. Without any it does nothing, for the policy `warm`."""
        zeros, ones = np.zeros(self.lanes, np.int32), np.ones(self.lanes, np.float32)
        turn = Turn(
            token=zeros.copy(),
            position=zeros.copy(),
            running=np.zeros(self.lanes, bool),
            remaining=zeros + 1,
            keys=np.zeros((self.lanes, 2), np.uint32),
            temperature=ones.copy(),
            stop=np.full((self.lanes, _STOP_IDS), -1, np.int32),
            top_k=zeros.copy(),
            top_p=ones.copy(),
        )
        loaded: list[Loaded | None] = [warm] + [None] * (self.lanes - 1)
        for session in running:
            lane, request = session.lane, session.request
            turn.running[lane], loaded[lane] = True, session.under
            turn.token[lane], turn.position[lane] = session.tokens[session.known - 1], session.known - 1
            turn.remaining[lane] = request.max_tokens - len(session.logprobs)
            turn.keys[lane], turn.temperature[lane] = session.key, request.temperature
            turn.top_k[lane], turn.top_p[lane] = request.top_k, request.top_p
            turn.stop[lane, : len(request.stop)] = request.stop
        enough = np.int32(max(1, round(self._patience * len(running))))
        options = {"steps": self._steps, "length": length, "limited": limited, "experts": self._experts is not None}
        self._cache, out = decode(*self._model, self._cache, *route(loaded), turn, enough, **options)
        return [None if x is None else np.asarray(x) for x in out]

    def _length(self, needed: int) -> int:
        return next((length for length in self._lengths if length >= needed), self.context)
