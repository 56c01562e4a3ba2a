"""What every engine asks of a policy and of a request before it takes them, and one-shot requests by way of its other methods."""

from __future__ import annotations

import collections
from collections.abc import Collection, Sequence

import numpy as np

from rl.engines.protocol import Completion, Engine, EngineError, EngineFault, Policy, Request


def check_policy(policy: Policy) -> np.ndarray | None:
    """The constant weights [S] of a policy, float32; None for the base and for a gate.

    Raises:
      EngineError: it has no name, or its fields do not fit together.
    """

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


def check_request(
    request: Request, policies: Collection[str], vocabulary: int, *, busy: bool = False, known: np.ndarray | None = None
) -> None:
    """Whether an engine may take a request.

    Args:
      policies: that are loaded.
      busy: a request of its session is running.
      known: [T] the tokens that the session holds, if there is one.

    Raises:
      EngineError: what is wrong with which field.
    """

    def fail(why: str):
        raise EngineError(f"request of session {request.session!r}: {why}")

    if not request.policy:
        fail("no policy named; name the policy that is to be sampled")
    if request.policy not in policies:
        fail(f"policy {request.policy!r} is not loaded; loaded are {sorted(policies)}")
    tokens = np.asarray(request.tokens)
    if tokens.ndim != 1 or not len(tokens) or not np.issubdtype(tokens.dtype, np.integer):
        fail("tokens must be a non-empty vector of integers")
    if tokens.min() < 0 or tokens.max() >= vocabulary:  # a server may end at such a token
        fail(f"tokens must be in [0, {vocabulary}), found {tokens.min()} to {tokens.max()}")
    if request.max_tokens < 1 or not 0 <= request.temperature < np.inf:
        fail("max_tokens >= 1 and a finite temperature >= 0 are needed")
    if any(not 0 <= token < vocabulary for token in request.stop):
        fail(f"stop ids must be in [0, {vocabulary}), found {request.stop}")
    if not 0 <= request.top_k < 2**31 or not 0 < request.top_p <= 1:
        fail(f"top_k >= 0 and 0 < top_p <= 1 are needed, found {request.top_k} and {request.top_p}")
    if busy:
        fail("its last request has not finished; poll until it has")
    if known is not None and (len(tokens) <= len(known) or not np.array_equal(tokens[: len(known)], known)):
        fail(f"the tokens do not extend the {len(known)} that the session holds; release it to begin anew")


def generate(engine: Engine, requests: Sequence[Request], room: int | None = None) -> list[Completion]:
    """See `rl.engines.protocol.Engine.generate`.

    Args:
      room: requests that the engine takes at once; all by default.
    """
    names = [request.session for request in requests]
    if len(set(names)) < len(names):
        raise EngineError("generate: two requests have one session; give every request its own")
    found: dict[str, Completion] = {}
    waiting = collections.deque(requests)
    try:
        while len(found) < len(requests):
            while waiting and (room is None or len(requests) - len(waiting) - len(found) < room):
                engine.submit(waiting.popleft())
            for answer in engine.poll():
                if isinstance(answer, EngineFault):
                    raise answer
                found[answer.session] = answer
                engine.release(answer.session)
    finally:
        for name in names:
            engine.release(name)
    return [found[name] for name in names]
