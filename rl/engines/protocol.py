"""The contract between rollouts and whatever samples the tokens: ids in, ids and log-probs out, under a named policy version.

A session is one growing context, usually an episode. Its second request must extend the tokens of the first, so that an engine computes
only the new part. A request names its policy; there is no default, since a request that forgot its adapter would sample the base unnoticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from model import AdapterBank, Gate

Finish = Literal["stop", "length", "context"]
FaultKind = Literal["timeout", "lost", "server", "garbage", "aborted", "version"]


class EngineError(ValueError):
    """A policy or request that an engine cannot serve; the message names the field and the fix."""


class EngineFault(Exception):
    """A request that an engine accepted and then failed, whatever it tried; nothing of it may be trained on.

    Attributes:
      session: whose request it was.
      kind: "timeout" past its deadline, "lost" the server is gone, "server" it answered with an error, "garbage" its answer cannot be read,
        "aborted" it was cut short, "version" its tokens are of other weights than the policy's, or of several.
    """

    def __init__(self, session: str, kind: FaultKind, message: str):
        super().__init__(message)
        self.session, self.kind = session, kind


@dataclasses.dataclass(frozen=True)
class Policy:
    """What samples: the base model, or the base with adapters.

    Attributes:
      name: what requests ask for.
      version: grows with every update of the weights; every completion carries it.
      adapters: a bank of K adapters, or None for the base. Policies that hold the same bank object can decode side by side.
      weights: [K + 1] constant weights of the slots (slot 0 the base). None with one adapter means that adapter.
      gate: chooses a slot per token and layer instead.
    """

    name: str
    version: int = 0
    adapters: AdapterBank | None = None
    weights: np.ndarray | None = None
    gate: Gate | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """One turn to sample.

    Attributes:
      tokens: [T] the whole context so far, that of earlier requests of the session included.
      max_tokens: at most so many new tokens.
      temperature: 0 takes the likeliest token.
      key: (run seed, task seed, rollout); with a token's position in the context it decides the token's random bits.
      stop: ids that end the turn; the one that did is part of the completion.
      top_k, top_p: only the k likeliest tokens (0: all), of these as many of the likeliest as it takes to reach the probability p. For
        serving: what is trained on is sampled from the whole law.
    """

    session: str
    policy: str
    tokens: np.ndarray
    max_tokens: int
    temperature: float
    key: tuple[int, int, int]
    stop: tuple[int, ...] = ()
    top_k: int = 0
    top_p: float = 1.0


@dataclasses.dataclass(frozen=True)
class Completion:
    """The sampled tokens and their log-probs, both [n]: those of the law they were drawn from, at temperature 0 of softmax(logits).

    Attributes:
      finish: "stop" after a stop id, "length" after max_tokens, "context" when the context is full.
      experts: int16 [len(request.tokens) + n, L', k], the experts that each of the L' sparse layers chose for each token of the context, -1
        where nobody knows (the last token has not been through the model); None from engines that do not tell.
    """

    session: str
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: Finish
    version: int
    experts: np.ndarray | None = None


class Engine(Protocol):
    """Samples many sessions at once.

    `lanes` sessions decode side by side, further ones wait their turn. `context` is the longest context in tokens. One thread at a time
    calls it.
    """

    lanes: int
    context: int

    def load(self, policy: Policy) -> None:
        """Makes a policy known, or replaces the one of its name; requests that run finish under the weights they began with.

        Raises:
          EngineError: fields that do not fit together.
        """

    def submit(self, request: Request) -> None:
        """Queues a request. The session keeps its place in the engine until it is released.

        Raises:
          EngineError: no such policy, the session's tokens are not extended, or another request of it is running.
        """

    def poll(self) -> list[Completion | EngineFault]:
        """Works, or waits, for a moment and gives what was finished or failed; empty when nothing is queued or nothing finished yet."""

    def release(self, session: str) -> None:
        """Ends a session, cancelling its request if one is running; an unknown session is no error."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """The completions of one-shot requests, in order; their sessions are released.

        Raises:
          EngineFault: one of them failed.
        """

    def close(self) -> None:
        """Gives up what the engine holds outside this process; without effect the second time.

        Another thread may call it while one is in `load`; if that waits for others, it raises `concurrent.futures.CancelledError`.
        """
