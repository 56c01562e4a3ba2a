"""Many questions side by side: one event loop for all, in order out, and nothing lost when it ends early."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from trace_jax.agents.protocol import Unavailable

if TYPE_CHECKING:
    from trace_jax.agents.client import Client

T = TypeVar("T")


def ask_all(
    agent: Client, questions: Sequence[Callable[[], Awaitable[T]]], progress: Callable[[int], None] | None = None
) -> list[T | Unavailable]:
    """What comes of all questions, in their order.

    Each is begun only when its turn comes, so that not all prompts are in memory at once. In a run of several processes one asks: call
    this inside `Processes.agree`.

    Args:
      questions: each gives a coroutine, which may put several questions to `agent`.
      progress: told after each question how many are done.

    Returns:
      What the coroutines return; `Unavailable` in place of one that raised it.

    Raises:
      Unfinished, InputError: a question raised it. The others are cancelled; what was answered is in the record.
    """
    interrupted: list[int] = []
    try:
        return asyncio.run(_ask_all(agent, questions, progress, interrupted))
    finally:
        if interrupted:
            signal.raise_signal(interrupted[0])  # the handlers are the command line's again: it raises here, outside of the loop


async def _ask_all(
    agent: Client, questions: Sequence[Callable[[], Awaitable[T]]], progress: Callable[[int], None] | None, interrupted: list[int]
) -> list[T | Unavailable]:
    results: list[T | Unavailable | None] = [None] * len(questions)
    waiting, done = iter(enumerate(questions)), 0

    async def work() -> None:
        nonlocal done
        for index, question in waiting:
            try:
                results[index] = await question()
            except Unavailable as error:
                results[index] = error
            done += 1
            if progress:
                progress(done)
            await asyncio.sleep(0)  # a question that the record answers waits for nothing: let the signals in

    with _signals_cancel(asyncio.current_task(), interrupted):
        # twice as many as are sent at once: some wait for an answer that another has asked for
        workers = [asyncio.create_task(work()) for _ in range(min(2 * agent.settings.concurrency, len(questions)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await agent.close()
    return results


@contextlib.contextmanager
def _signals_cancel(task: asyncio.Task, interrupted: list[int]) -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel the task. What their handlers raise would end up in any callback of the loop, and be lost there."""
    before: dict[int, Callable] = {}
    loop = asyncio.get_running_loop()

    def cancel(number: int) -> None:
        if not interrupted:  # a second one must not break off the cleaning up
            task.cancel()
        interrupted.append(number)

    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        before = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in before:
        loop.add_signal_handler(number, cancel, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
