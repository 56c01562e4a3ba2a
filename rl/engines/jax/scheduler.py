"""Who has which lane: sessions queue for lanes, keep theirs between their turns, and lose it when another one needs it.

A lane is what a running request needs. There may be any number of sessions: a request without a lane takes a free one, or the one whose
session has been between its turns for longest. A session that asks again before that goes on at once, ahead of those that wait for lanes.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Iterator

import numpy as np

from rl.engines.jax.blocks import Node
from rl.engines.jax.policies import Batch, Loaded
from rl.engines.protocol import Request


@dataclasses.dataclass(eq=False)
class Session:
    """A growing context, and its request: queued, then running in a lane, then None until the next.

    Attributes:
      loaded: the policy of its last request.
      tokens: int32 [context], of which `known` are there.
      under, cached: the lane holds what this policy makes of the first `cached` tokens.
      chain: the blocks of the pool that it holds.
      begun: its tokens are being computed; False while it waits for another session to compute some of them.
      logprobs: of what was sampled for the request.
      experts: int16 [context, L', k], see `rl.engines.protocol.Completion`; None where nobody asks.
    """

    name: str
    loaded: Loaded
    tokens: np.ndarray
    request: Request | None = None
    known: int = 0
    under: Loaded | None = None
    cached: int = 0
    lane: int | None = None
    chain: list[Node] = dataclasses.field(default_factory=list)
    begun: bool = False
    key: np.ndarray | None = None
    logprobs: list[float] = dataclasses.field(default_factory=list)
    experts: np.ndarray | None = None

    @property
    def behind(self) -> int:
        """Tokens to be computed before it can be sampled from. The last known one is the first input of sampling."""
        return self.known - 1 - self.cached


class Scheduler:
    """The lanes.

    Attributes:
      queue: sessions whose request does not run yet, by name, first come first served.
      running: sessions whose request runs, the one that was started first comes first.
    """

    def __init__(self, lanes: int):
        self.queue: dict[str, Session] = {}
        self.running: dict[Session, None] = {}
        self._free = list(range(lanes))
        self._idle: collections.OrderedDict[Session, None] = collections.OrderedDict()  # have a lane and no request

    def enqueue(self, session: Session) -> None:
        self._idle.pop(session, None)
        self.queue[session.name] = session

    def admit(self) -> Iterator[tuple[Session, Session | None]]:
        """Starts queued requests: those of sessions in a lane, and the first of the others while there are lanes that nobody uses.

        A request that cannot run with those that do waits until they have ended, new sessions behind it too.

        Yields:
          A session that was given `lane`, and the one that had it until now, if it was one's.
        """
        batch, blocked = Batch(session.loaded for session in self.running), False
        for name, session in list(self.queue.items()):
            homeless = session.lane is None
            if homeless and (blocked or not (self._free or self._idle)):
                continue
            if not batch.add(session.loaded):
                blocked = True
                continue
            ousted = None
            if homeless and self._free:
                session.lane = heapq.heappop(self._free)
            elif homeless:
                ousted, _ = self._idle.popitem(last=False)
                session.lane, ousted.lane = ousted.lane, None
            del self.queue[name]
            self.running[session] = None
            yield session, ousted

    def finish(self, session: Session) -> None:
        """The request has ended; the lane stays its session's until it is needed."""
        self.running.pop(session, None)
        if session.lane is not None:
            self._idle[session] = None

    def remove(self, session: Session) -> None:
        """Frees the session's lane at once."""
        self.queue.pop(session.name, None)
        self.running.pop(session, None)
        self._idle.pop(session, None)
        if session.lane is not None:
            heapq.heappush(self._free, session.lane)
            session.lane = None
