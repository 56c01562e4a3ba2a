"""One thread owns the engine; requests from everywhere decode together in its lanes.

The thread takes what has arrived, lets the engine work for a moment, and hands every session's new tokens to the event loop that waits for
them. A request that nobody waits for any more is released, which frees its lane. When the thread stops, or the engine fails, every request
that is not finished is told so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from rl.engines.jax import JaxEngine
from rl.engines.protocol import EngineError, Request


class Unavailable(Exception):
    """The server is ending, its engine has failed, or too many requests wait."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of one request, which has the place `index` among those that were asked for together; `finish` is the engine's."""

    index: int
    tokens: list[int]
    logprobs: list[float]
    finish: str | None


@dataclasses.dataclass
class _Live:
    """A request in the engine: where its tokens go, and how many have gone."""

    request: Request
    index: int
    deliver: Callable[[Piece | Exception], None]
    sent: int = 0


class Decoder:
    """Use it in a `with` block.

    Args:
      engine: touched by the decoder's thread alone, once that runs.
      on_failure: called in that thread when the engine has failed.

    Attributes:
      failure: what the engine failed with.
      running: requests in the engine.
    """

    def __init__(self, engine: JaxEngine, on_failure: Callable[[], None] = lambda: None):
        self.engine, self.on_failure, self.failure = engine, on_failure, None
        self._inbox: queue.SimpleQueue[_Live | str | None] = queue.SimpleQueue()  # a request, a session to release, None to stop
        self._live: dict[str, _Live] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decoder", daemon=True)

    @property
    def running(self) -> int:
        return len(self._live)

    def __enter__(self) -> Decoder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Takes no more requests and fails those that run; does not wait. May be called in a signal handler."""
        self._stopped.set()
        self._inbox.put(None)

    def check(self) -> None:
        """Raises Unavailable when no request would be answered."""
        if self._stopped.is_set():
            raise Unavailable("the engine has failed" if self.failure else "the server is shutting down")

    async def sample(self, requests: Sequence[Request]) -> AsyncIterator[Piece]:
        """The pieces of all requests as they come, each request's in order, until all are finished.

        Close the iterator (`contextlib.aclosing`) when you leave it early: what still runs is released.

        Raises:
          Unavailable: see there.
          EngineError: the engine refuses a request.
        """
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue()

        def deliver(piece: Piece | Exception) -> None:
            try:
                loop.call_soon_threadsafe(arrived.put_nowait, piece)
            except RuntimeError:  # the loop has closed, nobody waits
                pass

        waiting = {index: request.session for index, request in enumerate(requests)}
        try:
            for index, request in enumerate(requests):
                self._inbox.put(_Live(request, index, deliver))
            self.check()  # after the put: whoever stopped the thread before has answered nothing
            while waiting:
                piece = await arrived.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece.finish:
                    waiting.pop(piece.index, None)
                yield piece
        finally:
            for session in waiting.values():
                self.release(session)

    def release(self, session: str) -> None:
        """Ends a request early; its last piece is an empty one that finishes with "released"."""
        self._inbox.put(session)

    # --- the thread

    def _run(self) -> None:
        try:
            while self._take():
                self._work()
        except Exception as error:  # the last frame of the thread: whoever waits is told, and the command ends with the error
            self.failure = error
            self._stopped.set()
            self.on_failure()
        for live in [*self._live.values(), *self._left()]:
            live.deliver(Unavailable("the engine has failed" if self.failure else "the server is shutting down"))
        self._live.clear()

    def _take(self) -> bool:
        """Takes all that has arrived, waiting when there is nothing to do; False to stop."""
        while not self._live or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, str):
                self.engine.release(message)
                if (live := self._live.pop(message, None)) is not None:
                    live.deliver(Piece(live.index, [], [], "released"))
                continue
            session = message.request.session
            if self.engine.room < 1:
                message.deliver(Unavailable("too many requests wait for the engine; try again later"))
                continue
            self._live[session] = message
            try:
                self.engine.submit(message.request)
            except EngineError as error:
                del self._live[session]
                message.deliver(error)
        return True

    def _work(self) -> None:
        """One call of the engine; new tokens go out."""
        done = {completion.session: completion for completion in self.engine.poll()}
        for session, live in list(self._live.items()):
            finished = done.get(session)
            if finished is None:
                tokens, logprobs, finish = *self.engine.partial(session, live.sent), None
            else:
                tokens, logprobs, finish = finished.tokens[live.sent :], finished.logprobs[live.sent :], finished.finish
                self.engine.release(session)
                del self._live[session]
            live.sent += len(tokens)
            if finish or len(tokens):
                live.deliver(Piece(live.index, [int(t) for t in tokens], [float(x) for x in logprobs], finish))

    def _left(self) -> list[_Live]:
        left = []
        while not self._inbox.empty():
            if isinstance(message := self._inbox.get(), _Live):
                left.append(message)
        return left
