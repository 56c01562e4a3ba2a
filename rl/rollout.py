"""Many episodes in flight: the engine decodes the lanes that wait for tokens, the sandbox answers the episodes that wait for it.

An episode goes on as soon as its turn is finished, whatever the others do; at most one call of the engine lies between. All that is asked
of environments at one moment travels in one batch. The order of everything follows from the tasks alone, not from time, so a batch that was
interrupted gives the same tokens when it is rolled out again.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from envs import EnvironmentFault, Pool
from envs import Episode as Instance
from rl.chat import Chat
from rl.engines.protocol import Engine
from rl.episode import Act, Sampling, Task, play
from rl.trajectory import Trajectory

__all__ = ["Task", "roll_out"]


def roll_out(
    engine: Engine,
    pool: Pool,
    chat: Chat,
    tasks: Sequence[Task],
    policy: str,
    *,
    temperature: float,
    run_seed: int,
    max_tokens: int,
    max_turns: int | None = None,
    success: float = 1.0,
    on_progress: Callable[[int], Any] | None = None,
) -> list[Trajectory]:
    """The trajectories of `tasks`, in their order.

    Args:
      policy: name of a loaded policy, for tasks that name none.
      temperature, max_tokens: of every turn.
      max_turns: below the package's own limit, if given.
      success: smallest reward that counts as success.
      on_progress: called with the number of episodes that have just ended.

    Raises:
      EngineError: a policy that is not loaded.
      EnvironmentFault: the tools of a package cannot be read. Faults of single episodes are errors of their trajectories instead.
    """
    sampling = Sampling(temperature, run_seed, max_tokens, max_turns, success)
    tools = {task.package.digest: task.package for task in tasks}
    tools = {digest: pool.function(package, "tools") for digest, package in tools.items()}
    found: list[Trajectory | None] = [None] * len(tasks)
    waiting = collections.deque(enumerate(tasks))
    live: dict[str, tuple[int, Any, Instance]] = {}  # by session: index, the generator that plays it, its instance
    asked: list[tuple[str, Act]] = []  # what the environments are to do next
    ended = 0

    def advance(session: str, answer: Any) -> None:
        """Gives an episode the answer that it waits for and takes down what it needs next."""
        nonlocal ended
        index, episode, _ = live[session]
        try:
            need = episode.throw(answer) if isinstance(answer, EnvironmentFault) else episode.send(answer)
        except StopIteration as stop:
            found[index] = stop.value
            engine.release(session)
            del live[session]
            ended += 1
        else:
            if isinstance(need, Act):
                asked.append((session, need))
            else:
                engine.submit(need)

    try:
        while waiting or live:
            while waiting and len(live) < engine.lanes:
                index, task = waiting.popleft()
                session = f"{index}:{task.id}"
                episode = play(task, chat, tools[task.package.digest], task.policy or policy, session, sampling)
                live[session] = index, episode, pool.open(task.package, task.seed, task.knobs)
                advance(session, None)
            if asked:
                now, asked = asked, []
                answers = pool.batch([(live[session][2], act.op, act.arguments) for session, act in now])
                for (session, _), answer in zip(now, answers, strict=True):
                    advance(session, answer)
            else:
                for completion in engine.poll():
                    advance(completion.session, completion)
            if ended and on_progress is not None:
                on_progress(ended)
            ended = 0
    finally:
        for session in live:
            engine.release(session)
    return found
