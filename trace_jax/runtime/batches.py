"""Batches of rollouts: found in the workdir, or sampled, one after the other, in a thread.

A batch is the unit of resuming. It is sampled in one go from its seeds and stored as one shard; a step that asks for a batch whose shard
exists reads the shard. `begin` returns at once, so that a learner may work on one batch while the next is being sampled; what must be
asked of other processes or be told to them is done in the caller's thread, in the order of its calls.

Of several processes each samples its share of a batch's groups, writes it, and reads the whole batch; the rest they do alike.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor

from envs import HarnessPool, Pool, Target
from envs.checks import brief
from rl.chat import Chat
from rl.engines.protocol import Engine, Policy
from rl.rollout import Rollout, Task
from rl.trajectory import Trajectory
from trace_jax.config import Config
from trace_jax.errors import InputError, Unfinished
from trace_jax.progress import Progress
from trace_jax.workdir import Workdir, policy_name

Parts = tuple[Engine, Pool | HarnessPool, Chat]
BASE = Policy(name="base")


class Batch:
    """A batch that was asked for.

    Attributes:
      sync_seconds: once there is a result, what it took to bring the policy into the engine; 0 if nothing was sampled.
    """

    def __init__(self, finish: Callable[[], tuple[list[Trajectory], float]], cancel: Callable[[], object]):
        self._finish, self.cancel, self.sync_seconds = finish, cancel, 0.0

    def result(self) -> list[Trajectory]:
        """Waits for it. The trajectories are in the order of the tasks, and stored.

        Raises:
          Unfinished: infrastructure failed every rollout, so nothing was stored.
          Whatever `rl.rollout.Rollout` raises.
        """
        found, self.sync_seconds = self._finish()
        return found


class Batches:
    """The batches of a run.

    Args:
      parts: what a batch of a policy is sampled with: the engine (of a name, that which has it loaded), the workers, the chat. Asked for in
        the caller's thread, and only where something has to be sampled.
    """

    def __init__(self, config: Config, workdir: Workdir, progress: Progress, parts: Callable[[Policy | str, Sequence[Task]], Parts]):
        self._config, self._workdir, self._progress, self._parts = config, workdir, progress, parts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._rollout: Rollout | None = None
        self._loading: Engine | None = None
        self._with_user: list[Engine] = []
        self._lock, self._closed = threading.Lock(), False

    def close(self) -> None:
        """Ends what is being sampled and what waits; waits until the engine is left alone."""
        with self._lock:
            self._closed, rollout, loading = True, self._rollout, self._loading
        if loading is not None:  # it may wait minutes for a server
            loading.close()
        if rollout is not None:
            rollout.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def begin(
        self, policy: Policy | str, folder: str, split: str, index: int, tasks: Sequence[Task], temperature: float | None = None
    ) -> Batch:
        """Asks for a batch, the shard `index` of `rollouts/<folder>/<split>/`; what is begun first is sampled first.

        Args:
          policy: loaded into the engine when the batch has to be sampled, its arrays are not to be donated until then; a name if it is
            loaded already.
          tasks: the same in all processes; those of one group stand together.
          folder: names the policy in the workdir.
          temperature: of training and diagnosis by default.

        Raises:
          InputError: the shard holds other tasks.
        """
        if index in self._workdir.shards(folder, split):
            found = list(self._workdir.read_shards(folder, split, [index]))
            if [(t.environment, t.seed, t.trial) for t in found] != [(t.package.name, t.seed, t.trial) for t in tasks]:
                where = self._workdir.place(f"rollouts/{policy_name(folder)}/{split}")
                raise InputError(f"{where}/{index:05d}.jsonl.zst holds other tasks than asked for; remove that folder and run again")
            self._progress.advance(len(found), earlier=True)
            return Batch(lambda: (found, 0.0), lambda: None)
        processes = self._workdir.processes
        groups = [list(members) for _, members in itertools.groupby(tasks, lambda task: (task.package.name, task.group))]
        own = [task for group in processes.share(len(groups)) for task in groups[group]]
        each = len(tasks) / max(len(own), 1)  # rollouts of all processes, for one of this one's
        given_up = threading.Event()
        job = self._thread.submit(self._sample, self._parts(policy, tasks), policy, own, temperature, each, given_up)

        def finish() -> tuple[list[Trajectory], float]:
            found, sync = job.result()
            if not any(usable for (usable,) in processes.gather(sum(t.error is None for t in found))):
                raise Unfinished(_all_failed(tasks, folder, split, found))
            self._workdir.write_shard(folder, split, index, found)
            return (found if processes.count == 1 else list(self._workdir.read_shards(folder, split, [index]))), sync

        def cancel() -> None:
            with self._lock:
                given_up.set()
                rollout = self._rollout  # if this batch is being sampled, it is this one; else it has ended
            if not job.cancel() and not job.done() and rollout is not None:
                rollout.cancel()

        return Batch(finish, cancel)

    def look(self, policy: Policy, tasks: Sequence[Task]) -> list[Trajectory]:
        """The tasks up to the agent's first turn, which is not taken. Nothing is stored, and all processes do the same."""
        return self._thread.submit(self._sample, self._parts(policy, tasks), policy, tasks, None, 0.0, threading.Event(), 0).result()[0]

    def _sample(
        self,
        parts: Parts,
        policy: Policy | str,
        tasks: Sequence[Task],
        temperature: float | None,
        each: float,
        given_up: threading.Event,
        max_turns: int | None = None,
    ) -> tuple[list[Trajectory], float]:
        """In the thread: the trajectories of this process's share, and the seconds of loading the policy."""
        settings, (engine, pool, chat) = self._config.rollout, parts
        with self._lock:
            if self._closed or given_up.is_set():
                raise CancelledError
            self._loading = engine
        began = time.perf_counter()
        if isinstance(policy, Policy):
            engine.load(policy)
        if any(isinstance(task.package, Target) and task.package.speaks_user for task in tasks) and engine not in self._with_user:
            engine.load(BASE)  # simulates users, beside whatever is rolled out
            self._with_user.append(engine)
        sync = time.perf_counter() - began
        with self._lock:
            self._loading = None
            if self._closed or given_up.is_set():
                raise CancelledError
            rollout = self._rollout = Rollout(
                engine,
                pool,
                chat,
                tasks,
                policy if isinstance(policy, str) else policy.name,
                temperature=settings.temperature if temperature is None else temperature,
                run_seed=self._config.seed,
                max_tokens=settings.max_tokens,
                max_turns=settings.max_turns if max_turns is None else max_turns,
                success=self._config.diagnosis.success,
                user=BASE.name,
                user_temperature=self._config.benchmark.user_temperature,
                in_flight=settings.in_flight,
                reproducible=settings.reproducible,
                deadline_s=settings.deadline,
                retries=settings.retries,
                on_progress=lambda ended: self._progress.advance(ended * each),
            )
        return rollout.result(), sync


def _all_failed(tasks: Sequence[Task], folder: str, split: str, found: Sequence[Trajectory]) -> str:
    """What failed, by what fault first, and what to do about it."""
    error = found[0].error if found else {"kind": "another process", "message": "see its log"}
    names = ", ".join(dict.fromkeys(task.package.capability or task.package.name for task in tasks))
    if error["kind"].startswith("engine_") or not found:
        fix = "see what the engine has printed"
    elif isinstance(tasks[0].package, Target):
        fix = "mend what the benchmark needs, or allow more --config.benchmark.timeout"
    else:
        fix = "mend that environment, `trace-jax certify` tells more, or allow more --config.rollout.deadline"
    which = f"{names}: all {len(tasks)} rollouts of {folder} in {split} failed"
    return f"{which}, the first by {error['kind']}: {brief(error['message'])}; {fix}; the same command goes on from there"
