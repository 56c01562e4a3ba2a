"""Many episodes in flight: each is a coroutine that waits for the engine or for its environment, while the others go on.

Whatever is asked of the environments at one moment travels in one batch a worker, in threads; the engine works in a thread too, so a slow
environment holds up nobody but its own episode. A group is handed out when its last episode has ended, in whatever order that happens.

A reproducible rollout is another matter: the engine waits until no episode is with its environment. Then the order of everything follows
from the tasks alone, not from time, and a batch that was interrupted gives the same tokens when it is rolled out again.

Whose failure an episode was is said in its trajectory. What an engine failed is tried again from the start before it is given up.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

from envs import EnvironmentFault, HarnessPool, Pool
from envs import Episode as Instance
from rl.chat import Chat
from rl.engines.protocol import Completion, Engine, EngineFault, Request
from rl.episode import Act, Sampling, Task, play
from rl.trajectory import StopReason, Trajectory

__all__ = ["Rollout", "Task", "roll_out"]


def roll_out(engine: Engine, pool: Pool | HarnessPool, chat: Chat, tasks: Sequence[Task], policy: str, **settings: Any) -> list[Trajectory]:
    """The trajectories of `tasks`, in their order; the arguments are those of `Rollout`."""
    return Rollout(engine, pool, chat, tasks, policy, **settings).result()


class Rollout:
    """A batch that is being rolled out, in a thread of its own from the moment that this is made.

    The engine belongs to that thread until the batch has ended.

    Args:
      policy: name of a loaded policy, for tasks that name none.
      temperature, max_tokens: of every turn.
      max_turns: below the package's own limit, if given.
      success: smallest reward that counts as success.
      user, user_temperature: the loaded policy that a harness's user simulator is sampled with, and how.
      in_flight: episodes at once, as many as the engine has lanes by default.
      reproducible: the engine waits for the environments, see above.
      deadline_s: of an episode; past it the episode is a failure of whom it waits for.
      retries: how often an episode that the engine failed is played again from its start.
      on_progress: called with 1 when an episode has ended, in the rollout's thread.
    """

    def __init__(
        self,
        engine: Engine,
        pool: Pool | HarnessPool,
        chat: Chat,
        tasks: Sequence[Task],
        policy: str,
        *,
        temperature: float,
        run_seed: int,
        max_tokens: int,
        max_turns: int | None = None,
        success: float = 1.0,
        user: str = "base",
        user_temperature: float = 0.0,
        in_flight: int | None = None,
        reproducible: bool = True,
        deadline_s: float | None = None,
        retries: int = 1,
        on_progress: Callable[[int], Any] | None = None,
    ):
        self._engine, self._pool, self._chat, self._tasks, self._policy = engine, pool, chat, tasks, policy
        self._sampling = Sampling(temperature, run_seed, max_tokens, max_turns, success, user, user_temperature)
        self._in_flight, self._reproducible = in_flight or engine.lanes, reproducible
        self._deadline_s, self._retries, self._on_progress = deadline_s, retries, on_progress
        self._found: list[Trajectory | None] = [None] * len(tasks)
        self._members: dict[tuple[str, str], list[int]] = collections.defaultdict(list)
        for index, task in enumerate(tasks):
            self._members[task.package.digest, task.group].append(index)
        self._left = {key: len(members) for key, members in self._members.items()}
        self._ended: queue.SimpleQueue[list[Trajectory] | BaseException | None] = queue.SimpleQueue()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def groups(self) -> Iterator[list[Trajectory]]:
        """Each group when its last episode has ended, its trajectories in the order of the tasks. Can be gone through once.

        Raises:
          EngineError: a policy that is not loaded.
          EnvironmentFault: the tools of a package cannot be read. Faults of single episodes are errors of their trajectories instead.
          CancelledError: of `concurrent.futures`; another thread has cancelled the batch.
        """
        try:
            while (item := self._ended.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.cancel()

    def result(self) -> list[Trajectory]:
        """All trajectories, in the order of the tasks; raises what `groups` raises."""
        for _ in self.groups():
            continue
        return self._found

    def cancel(self) -> None:
        """Ends the batch, if it has not ended, and the thread; the engine's sessions are released."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread has ended
            self._loop.call_soon_threadsafe(self._fail, CancelledError())
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._all())
        except BaseException as error:  # it is raised again in the thread that asks for the groups
            self._ended.put(error)
        else:
            self._ended.put(None)
        finally:
            self._loop.close()

    # --- in the thread

    async def _all(self) -> None:
        tools = {task.package.digest: task.package for task in self._tasks}
        self._tools = {digest: self._pool.function(package, "tools") for digest, package in tools.items()}
        self._waiting = collections.deque(enumerate(self._tasks))
        self._live: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Future[Completion]] = {}  # by session: requests that the engine has, or is about to get
        self._requests: list[Request] = []
        self._released: list[str] = []
        threads = ThreadPoolExecutor(self._pool.workers + 1, thread_name_prefix="rollout")
        self._environments = _Environments(self._pool, threads, self._fail, together=self._reproducible)
        try:
            while self._waiting and len(self._live) < self._in_flight:
                self._start()
            while await self._engine_is_wanted():
                await self._engine_turn(threads)
        finally:
            left = [*self._live, *self._environments.answering]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            threads.shutdown(wait=False, cancel_futures=True)
            for session in self._released:
                self._engine.release(session)

    def _fail(self, error: BaseException) -> None:
        """Ends the batch at the next moment at which no thread has the engine. Nothing is cancelled before: that would end the wait too."""
        self._failure = self._failure or error
        self._changed.set()

    async def _engine_is_wanted(self) -> bool:
        """Waits until it is, or until no episode is left; raises what ended the batch."""
        while self._failure is None:
            if not self._live:
                return False
            if self._turns and (not self._reproducible or len(self._turns) == len(self._live)):
                return True
            self._changed.clear()
            await self._changed.wait()
        raise self._failure

    async def _engine_turn(self, threads: ThreadPoolExecutor) -> None:
        """Gives the engine what has come since, and the episodes what it has finished."""
        requests, self._requests = [request for request in self._requests if request.session in self._turns], []
        released, self._released = self._released, []

        def work() -> list[Completion | EngineFault]:
            for session in released:
                self._engine.release(session)
            for request in requests:
                self._engine.submit(request)
            return self._engine.poll()

        for answer in await self._loop.run_in_executor(threads, work):
            turn = self._turns.pop(answer.session, None)
            if turn is None or turn.done():
                continue
            if isinstance(answer, EngineFault):
                turn.set_exception(answer)
            else:
                turn.set_result(answer)
        await asyncio.sleep(0)

    def _start(self) -> None:
        index, task = self._waiting.popleft()
        playing = self._loop.create_task(self._episode(index, task))
        self._live.add(playing)
        playing.add_done_callback(self._end)

    def _end(self, playing: asyncio.Task[None]) -> None:
        self._live.discard(playing)
        self._changed.set()
        if playing.cancelled():
            return
        if playing.exception() is not None:
            self._fail(playing.exception())
        elif self._waiting and self._failure is None:
            self._start()

    async def _episode(self, index: int, task: Task) -> None:
        for attempt in range(self._retries + 1):
            session = f"{index}:{task.id}" + (f":{attempt}" if attempt else "")
            trajectory = await self._play(task, session)
            if trajectory.stop_reason != StopReason.ENGINE_ERROR:
                break
        self._found[index] = trajectory
        if self._on_progress is not None:
            self._on_progress(1)
        key = task.package.digest, task.group
        self._left[key] -= 1
        if not self._left[key]:
            self._ended.put([self._found[member] for member in self._members[key]])

    async def _play(self, task: Task, session: str) -> Trajectory:
        loop = asyncio.get_running_loop()
        ends = None if self._deadline_s is None else loop.time() + self._deadline_s
        instance = self._pool.open(task.package, task.seed, task.knobs)
        episode = play(task, self._chat, self._tools[task.package.digest], task.policy or self._policy, session, self._sampling)
        answer: Any = None
        sessions = [session]  # a user simulator has one too
        try:
            while True:
                failed = isinstance(answer, EnvironmentFault | EngineFault)
                need = episode.throw(answer) if failed else episode.send(answer)
                if isinstance(need, Request) and need.session not in sessions:
                    sessions.append(need.session)
                try:
                    async with asyncio.timeout_at(ends):
                        answer = await (self._environments.ask(instance, need) if isinstance(need, Act) else self._sample(need))
                except EngineFault as fault:
                    answer = fault
                except TimeoutError:
                    why = f"the episode has taken longer than {self._deadline_s:g} s"
                    answer = EnvironmentFault("deadline", why) if isinstance(need, Act) else EngineFault(session, "timeout", why)
        except StopIteration as stop:
            return stop.value
        finally:
            for session in sessions:
                self._turns.pop(session, None)
            self._released += sessions

    async def _sample(self, request: Request) -> Completion:
        turn = self._turns[request.session] = asyncio.get_running_loop().create_future()
        self._requests.append(request)
        self._changed.set()
        return await turn


class _Environments:
    """The pool, asked from coroutines: while a worker answers one batch, what it is asked meanwhile becomes the next.

    Args:
      failed: told of what the pool raised; it cannot be used any more.
      together: all workers answer before any answer is given out.
    """

    def __init__(self, pool: Pool | HarnessPool, threads: ThreadPoolExecutor, failed: Callable[[BaseException], None], together: bool):
        self._pool, self._threads, self._failed, self._together = pool, threads, failed, together
        self._asked: dict[int, list[tuple[Instance, Act, asyncio.Future[Any]]]] = collections.defaultdict(list)
        self._busy: dict[int, asyncio.Task[None]] = {}

    @property
    def answering(self) -> list[asyncio.Task[None]]:
        """What is to be cancelled at the end."""
        return list(self._busy.values())

    async def ask(self, instance: Instance, act: Act) -> Any:
        """The answer, or the fault."""
        loop = asyncio.get_running_loop()
        worker = 0 if self._together else instance.worker
        answer = loop.create_future()
        self._asked[worker].append((instance, act, answer))
        if worker not in self._busy:
            self._busy[worker] = answering = loop.create_task(self._answer(worker))
            answering.add_done_callback(self._end)
        return await answer

    async def _answer(self, worker: int) -> None:
        try:
            await asyncio.sleep(0)  # whoever was woken together asks together
            while asked := self._asked.pop(worker, None):
                batch = [(instance, act.op, act.arguments) for instance, act, _ in asked]
                answers = await asyncio.get_running_loop().run_in_executor(self._threads, self._pool.batch, batch)
                for (_, _, answer), found in zip(asked, answers, strict=True):
                    if not answer.done():
                        answer.set_result(found)
                await asyncio.sleep(0)
        finally:
            del self._busy[worker]

    def _end(self, answering: asyncio.Task[None]) -> None:
        if not answering.cancelled() and answering.exception() is not None:
            self._failed(answering.exception())
