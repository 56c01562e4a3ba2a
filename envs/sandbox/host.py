"""The host's side of the sandbox: a pool of workers, each with many episodes, and the record from which any of them can be rebuilt.

Requests travel in batches, one message per process, and the processes run at the same time. The host keeps the actions of every episode.
When a worker crashes, hangs or talks nonsense it is killed, and its requests are sent again one by one to a new worker, which first plays
the episode's actions again; so the culprit is found, the others never notice, and an episode that keeps killing its worker becomes an
`EnvironmentFault`. The same replay serves after a worker was retired for age. It must give the same replies; an episode for which it does
not is a fault too, since nothing can be learned from it.

Workers are separate processes with an empty environment and closed files, and the kernel holds what runs in them: see
`envs.sandbox.lockdown` for the layers. A worker says which of them are on before it gets any environment's code; with
`sandbox="require"` no code is sent to a worker that lacks one that it must have.

The lock-down keeps code inside its worker. Within it the code can reach the worker's loop, so every reply is checked as if it were made up,
and a worker hosts episodes of one package only: code that forges replies forges those of its own package.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from envs.base import EnvironmentFault, Reply, SandboxError, Score, Start
from envs.package import Package
from envs.sandbox.launch import Launcher, Options
from envs.sandbox.plan import Item, Message, compose, encode, stages
from envs.sandbox.process import ATTEMPTS, Death, Process, exchange, greet
from envs.sandbox.programs import Program, Runner, parse_programs
from envs.sandbox.replies import MAX_REPLY_BYTES, MalformedMessage, check_json, parse_function, parse_message, parse_value, refuse

EPISODE_OPS = ("reset", "call", "respond", "score")
FUNCTIONS = ("tools", "oracle", "hint")
MODES = ("require", "best_effort", "off")

KEPT = 8  # processes of one worker that wait for more requests of their packages

Request = tuple["Episode", str, tuple]
Answer = Start | Reply | Score | EnvironmentFault
_Place = tuple[int, str]  # a worker and a package


class Episode:
    """One running instance of an environment; `Pool.open` makes it. Its methods raise EnvironmentFault, and the same one ever after.

    Attributes:
      worker: number of the pool's worker that hosts it; batches for different workers run at the same time.

    Dropping the last reference frees the instance in its worker.
    """

    def __init__(self, pool: Pool, key: int, package: Package, seed: int, knobs: dict[str, int | float]):
        self.package, self.seed, self.knobs, self.key = package, seed, knobs, key
        self.fault: EnvironmentFault | None = None
        self._pool = pool
        self._over = False
        self.worker = key % pool.workers
        self._log: list[tuple[str, Sequence, int]] = []  # op, arguments, fingerprint of the reply; begins with the reset

    def reset(self) -> Start:
        """Begins, or begins again."""
        return self._one("reset")

    def call(self, name: str, arguments: dict[str, Any]) -> Reply:
        """Calls a tool: (its result, whether the episode is over)."""
        return self._one("call", name, arguments)

    def respond(self, text: str) -> Reply:
        """Says `text` to the scripted user: (the answer or None, whether the episode is over)."""
        return self._one("respond", text)

    def score(self) -> Score:
        """The verdict on what was done so far."""
        return self._one("score")

    def done(self) -> bool:
        """Whether the episode is over, as the last reply said; costs no message."""
        return self._over

    def _one(self, op: str, *arguments: Any) -> Any:
        (answer,) = self._pool.batch([(self, op, arguments)])
        if isinstance(answer, EnvironmentFault):
            raise answer
        return answer


class Pool:
    """Workers that host environments. A context manager; `close` ends the processes.

    Which worker hosts an episode, and with which others, makes no difference to it: that is what the certificate checks of a package.
    May be used from several threads; batches for one worker follow each other. Where there is no zygote (`envs.sandbox.launch`), make it in
    a thread that lives as long as the pool: the kernel ends a worker together with the thread that started it (the next batch then starts
    another and plays the episodes again).

    Args:
      workers: how many share the episodes of a package, each with a process for every package. Two cores less than the machine has is
        plenty; 256 episodes and more fit in one.
      deadline_s: for one batch, resets and replays included.
      recycle: episodes after which a worker is replaced, against slow leaks.
      quarantine: episodes of one package that may end in a kill before all others of it are refused unseen.
      hash_seed: PYTHONHASHSEED of the workers.
      memory_bytes: address space of one worker.
      sandbox: `require` refuses to host anything where a layer of `envs.sandbox.lockdown.REQUIRED` is not on; `best_effort` takes what the
        system has; `off` is resource limits alone, for looking for a fault of one's own.

    Raises:
      OSError: no process could be started.
      SandboxError: with `require`; later, when a batch finds that a new worker does not start.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        deadline_s: float = 20.0,
        recycle: int = 10_000,
        quarantine: int = 8,
        hash_seed: int = 0,
        memory_bytes: int = 1 << 30,
        sandbox: str = "best_effort",
        _without: tuple[str, ...] = (),  # layers left out, to test the others
    ):
        if workers < 1:
            raise ValueError(f"workers = {workers} must be at least 1")
        if sandbox not in MODES:
            raise ValueError(f"sandbox = {sandbox!r} must be one of {', '.join(MODES)}")
        self.deadline_s, self.recycle, self.quarantine = deadline_s, recycle, quarantine
        self.hash_seed, self.sandbox = hash_seed, sandbox
        self._launcher = Launcher(hash_seed)
        self._options = Options(memory_bytes, sandbox != "off", sandbox == "require", _without)
        self._programs = Runner(self._launcher, self._options)
        self.workers = workers
        self._locks = [threading.Lock() for _ in range(workers)]
        self._opening = threading.Lock()
        # by digest of the package, the one used last at the end; "" is a process that has seen no package yet
        self._processes: list[dict[str, Process]] = [{} for _ in range(workers)]
        self._closed = False
        self._opened = 0
        self._kills: collections.Counter[str] = collections.Counter()  # by package digest
        self.restarts = 0  # workers that were given up
        try:
            for slot in range(workers):
                self._ready(slot, "")
            if sandbox == "require":
                self._greeted([(slot, "") for slot in range(workers)])
        except (OSError, SandboxError):
            self.close()
            raise

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers. Episodes of the pool cannot be used any more."""
        self._closed = True
        self._programs.close()
        for processes in self._processes:
            for process in list(processes.values()):
                process.child.kill()  # no lock: a batch that another thread waits for ends with its worker
        for lock, processes in zip(self._locks, self._processes, strict=True):
            with lock:  # that thread reads from the descriptors until then
                for process in processes.values():
                    process.kill()
        self._launcher.close()

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of the lock-down that are on, in the order in which they were put on.

        Raises:
          SandboxError: no worker starts.
        """
        return tuple(layer for layer, why in self._lockdown().items() if why is None)

    @property
    def missing(self) -> dict[str, str]:
        """The layers that are not on, and why; a layer that there is no use for (`uid` without root) is in neither.

        Raises:
          SandboxError: no worker starts.
        """
        return {layer: why for layer, why in self._lockdown().items() if why is not None}

    def describe(self) -> str:
        """`layers` and `missing` in one line. Raises SandboxError when no worker starts."""
        if self.sandbox == "off":
            return "sandbox off: environments run with resource limits alone"
        missing = "; ".join(f"without {layer} ({why})" for layer, why in self.missing.items())
        return f"sandbox {self.sandbox}: {', '.join(self.layers) or 'no layer'}" + (f"; {missing}" if missing else "")

    def open(self, package: Package, seed: int, knobs: dict[str, Any] | None = None) -> Episode:
        """An episode that is still to be reset; no message is sent. Workers take turns.

        Raises:
          PackageError: a knob that the package has not, or out of its range.
        """
        with self._opening:
            self._opened += 1
            episode = Episode(self, self._opened, package, seed, package.resolve_knobs(knobs))
        weakref.finalize(episode, self._free, episode.key, package.digest).atexit = False
        return episode

    def batch(self, requests: Sequence[Request]) -> list[Answer]:
        """Performs requests `(episode, op, arguments)`, those of one episode in the order given, in one message per worker.

        Where a score depends on programs (`envs.sandbox.programs`), or an episode goes on after its score, there are more messages.

        Ops: `("reset", ())` gives Start, `("call", (name, arguments))` and `("respond", (text,))` give Reply, `("score", ())` gives Score.

        Returns:
          One answer per request. A fault of an episode is the answer to this and all later requests of that episode, and of no other.

        Raises:
          ValueError: an unknown op, an episode of another pool or not yet reset, arguments that are not JSON. Nothing was performed then.
        """
        items = [Item(i, episode.package, episode, op, arguments) for i, (episode, op, arguments) in enumerate(requests)]
        begun = set()
        for item in items:
            if item.op not in EPISODE_OPS:
                raise ValueError(f"request {item.position}: {item.op!r} must be one of {', '.join(EPISODE_OPS)}")
            if item.episode._pool is not self:
                raise ValueError(f"request {item.position}: the episode belongs to another pool")
            if item.op == "reset":
                begun.add(item.episode.key)
            elif not item.episode._log and item.episode.key not in begun and item.episode.fault is None:
                raise ValueError(f"request {item.position}: {item.op} of an episode of {item.package.name} that was never reset")
        return self._perform(items)

    def function(self, package: Package, name: str, *arguments: Any) -> Any:
        """The package's `tools` (no arguments; its TOOLS), `oracle` or `hint` (seed and, optionally, knobs), run in a worker and checked.

        Raises:
          EnvironmentFault: the function raised, killed its worker, or returned something else.
          PackageError: bad knobs.
          ValueError: an unknown name.
        """
        return self.functions(package, name, [arguments])[0]

    def functions(self, package: Package, name: str, calls: Iterable[Sequence]) -> list[Any]:
        """`function` for many arguments in one batch. Raises the first fault."""
        if name not in FUNCTIONS:
            raise ValueError(f"function {name!r} must be one of {', '.join(FUNCTIONS)}")
        items = []
        for position, call in enumerate(calls):
            if name == "tools":
                arguments: list = []
            else:
                seed, knobs = (*call, None)[:2]
                arguments = [seed, package.resolve_knobs(knobs)]
            items.append(Item(position, package, None, "function", [package.digest, name, arguments]))
        answers = self._perform(items)
        for answer in answers:
            if isinstance(answer, EnvironmentFault):
                raise answer
        return answers

    def _perform(self, items: list[Item]) -> list[Any]:
        """The answers. Where a score asks for programs they are run, and it is asked for again before its episode goes on."""
        answers: list[Any] = [None] * len(items)
        staged = stages(items)
        for stage in staged[1:]:
            encode([item.wire for item in stage])  # before anything is performed
        for stage in staged:
            self._ask(stage, answers)
            asking = [item for item in stage if isinstance(answers[item.position], tuple) and item.op == "score"]
            if asking:
                results = iter(self._programs.run([program for item in asking for program in answers[item.position]]))
                self._ask([item._replace(arguments=([next(results) for _ in answers[item.position]],)) for item in asking], answers)
        return answers

    def _ask(self, items: list[Item], answers: list[Any]) -> None:
        """One message per worker, and more where a worker did not survive it."""
        by_place: dict[_Place, list[Item]] = collections.defaultdict(list)
        for item in items:
            slot = item.episode.worker if item.episode else item.position % self.workers
            by_place[slot, item.package.digest].append(item)
        slots = sorted({slot for slot, _ in by_place})
        held = []
        try:
            for slot in slots:  # in one order, so that two batches never wait for each other
                self._locks[slot].acquire()
                held.append(self._locks[slot])
            messages = [
                compose(process, [item for item in group if not self._refused(item, answers)])
                for process, group in zip(self._greeted(by_place), by_place.values(), strict=True)
            ]
            deaths = self._send(messages, answers)
            for (place, group), death in zip(by_place.items(), deaths, strict=True):
                if death is not None:
                    for item in group:
                        self._alone(place, item, answers)
            for slot in slots:
                for digest in list(self._processes[slot])[:-KEPT]:  # whose episodes are played again when they go on
                    self._processes[slot].pop(digest).kill()
        finally:
            for lock in held:
                lock.release()

    def _alone(self, place: _Place, item: Item, answers: list[Any]) -> None:
        """One request in messages of its own, twice at most."""
        for _ in range(2):
            if self._refused(item, answers):
                return
            (process,) = self._greeted([place])
            (death,) = self._send([compose(process, [item])], answers)
            if death is None:
                return
        self._kills[item.package.digest] += 1
        self._blame(item, EnvironmentFault(death.kind, f"{item.where}: {death}"), answers)

    def _refused(self, item: Item, answers: list[Any]) -> bool:
        """Whether the answer is known to be a fault without asking."""
        if item.episode is not None and item.episode.fault is not None:
            answers[item.position] = item.episode.fault
            return True
        kills = self._kills[item.package.digest]
        if kills >= self.quarantine:
            fault = EnvironmentFault("quarantine", f"{item.where}: refused, since {kills} episodes of the package ended their workers")
            self._blame(item, fault, answers)
            return True
        return False

    def _send(self, messages: list[Message], answers: list[Any]) -> list[Death | None]:
        """Exchanges the messages; the answers are in place, or the death of the worker is returned."""
        ready = [(m.process, m.payload, len(m.plan) * (MAX_REPLY_BYTES + 1) + 2) for m in messages]
        try:
            for process, plan, packages, arriving, freed in messages:
                process.packages |= packages.keys()
                process.hosted.difference_update(freed)
                process.hosted |= arriving
                process.opened += sum(item.op == "reset" for item in plan)
                for _ in freed:
                    process.freed.popleft()
            results = exchange(ready, self.deadline_s)
            return [self._accept(message.process, message.plan, result, answers) for message, result in zip(messages, results, strict=True)]
        except BaseException:  # interrupted: workers that were not told all, or did what no log has, would go on from another state
            for message in messages:
                message.process.kill()
            raise

    def _accept(self, process: Process, plan: list[Item], result: bytes | Death, answers: list[Any]) -> Death | None:
        """Takes over the replies of a message, or says why there are none."""
        if isinstance(result, Death):
            return result
        try:
            replies = parse_message(result, len(plan))
        except MalformedMessage as error:
            return process.death("reply", str(error))
        for item, (fault, value) in zip(plan, replies, strict=True):
            episode = item.episode
            if episode is not None and episode.fault is not None:
                if item.position is not None:
                    answers[item.position] = episode.fault
                continue
            try:
                if fault is not None:
                    raise EnvironmentFault("exception", fault)
                if item.op == "function":
                    answers[item.position] = parse_function(item.arguments[1], parse_value(item.op, value, 0))
                    continue
                if item.op == "score" and isinstance(value, dict) and "programs" in value:
                    answers[item.position] = _parse_programs(item, value)
                    continue
                answer = self._record(item, parse_value(item.op, value, max(0, len(episode._log) - 1)), value)
            except EnvironmentFault as error:
                self._blame(item, EnvironmentFault(error.kind, f"{item.where}: {error}"), answers)
            else:
                if item.position is not None:
                    answers[item.position] = answer
        return None

    @staticmethod
    def _record(item: Item, answer: Answer, value: Any) -> Answer:
        """Writes a reply into the episode's log, or compares it with what the log holds."""
        if item.op == "score":
            return answer
        fingerprint = hash(repr(value))
        if item.position is None:
            if fingerprint != item.fingerprint:
                raise EnvironmentFault("replay", "the same actions gave another result; the environment must depend on its seed alone")
            return answer
        episode = item.episode
        if item.op == "reset":
            episode._log = []
        episode._log.append((item.op, item.arguments, fingerprint))
        episode._over = isinstance(answer, Reply) and answer.done
        return answer

    @staticmethod
    def _blame(item: Item, fault: EnvironmentFault, answers: list[Any]) -> None:
        if item.episode is not None:
            item.episode.fault = fault
        if item.position is not None:
            answers[item.position] = fault

    def _lockdown(self) -> dict[str, str | None]:
        with self._locks[0]:
            (process,) = self._greeted([(0, next(reversed(self._processes[0]), ""))])
        return process.layers

    def _greeted(self, places: Iterable[_Place]) -> list[Process]:
        """The processes of the places, ready for code.

        Raises:
          SandboxError: one ended three times before it was ready, or is not locked down as required.
        """
        places = list(places)
        for _ in range(ATTEMPTS):
            processes = [self._ready(*place) for place in places]
            deaths = greet([process for process in processes if process.layers is None])
            if not deaths:
                return processes
        raise SandboxError(f"a worker does not start: {deaths[0]}")

    def _ready(self, slot: int, digest: str) -> Process:
        """The process of a slot for a package; a new one where the old was given up or has served its time."""
        if self._closed:
            raise ValueError("the pool is closed")
        processes = self._processes[slot]
        process = processes.pop(digest, None) or processes.pop("", None)
        if process is not None and (process.closed or process.opened >= self.recycle):
            process.kill()
            self.restarts += 1
            process = None
        processes[digest] = process = process or Process(self._launcher, self._options)
        if self._closed:  # meanwhile, by another thread
            process.kill()
            raise ValueError("the pool is closed")
        return process

    def _free(self, key: int, digest: str) -> None:
        """Called when a handle was dropped, by any thread and in the middle of anything, so it only leaves a note."""
        process = self._processes[key % self.workers].get(digest)
        if process is not None:
            process.freed.append(key)


def _parse_programs(item: Item, value: dict[str, Any]) -> tuple[Program, ...]:
    if item.arguments or set(value) != {"programs"}:
        refuse("score", 'must return {"reward", "checks"}', value)
    check_json("programs", value)
    return parse_programs(value["programs"])
