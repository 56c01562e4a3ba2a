"""The host's side of benchmarks that drive the conversation themselves: a pool of workers, each with many episodes.

A harness asks for turns; the host samples them. So an episode's answers are `Ask`, and its verdict is the benchmark's own. Nothing can be
played again here: a program that died takes its episodes with it, as faults that are never the agent's reward.

The benchmark is the user's own installation and is trusted as such; it runs apart because of its dependencies, its threads, and whatever it
prints. What it says is still checked.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from envs.base import Ask, EnvironmentFault, Verdict
from envs.harness.process import Process, Switchboard
from envs.harness.target import Program, Target, TaskInfo
from envs.sandbox.replies import ROLES, check_json, check_tool_calls, parse_function, refuse

ANSWERS = 256  # that can be waited for at once
MESSAGE = 2000  # characters of a fault's
RECYCLE = 2000  # episodes after which a worker takes no more, against slow leaks
_FAREWELL_SECONDS = 5.0

Request = tuple["HarnessEpisode", str, tuple]


class HarnessEpisode:
    """One conversation of a harness; `HarnessPool.open` makes it. Dropping the last reference ends it.

    Attributes:
      worker: what is asked of episodes with one number is answered together; each has its own.
    """

    def __init__(self, key: int, target: Target, task: TaskInfo, seed: int):
        self.key, self.target, self.task, self.seed = key, target, task, seed
        self.worker = key % ANSWERS
        self.fault: EnvironmentFault | None = None
        self.process: Process | None = None
        self.verdict: Verdict | None = None


class HarnessPool:
    """Workers that host harnesses; stands where `envs.Pool` does. A context manager; `close` ends the processes.

    May be used from several threads. Workers start when they are needed and serve all targets of one driver.

    Args:
      processes: of one driver; a harness is Python, so that one process has one core's worth of them.
      deadline_s: for one answer: from a turn to what is asked next, tools and user simulator included, or to the verdict.
    """

    workers = ANSWERS

    def __init__(self, processes: int = 1, *, deadline_s: float = 600.0):
        self.processes, self.deadline_s = processes, deadline_s
        self._folder = tempfile.mkdtemp(prefix="harness-")
        self._keys = itertools.count(1)
        self._lock = threading.Lock()
        self._running: list[Process] = []
        self._begun: dict[int, int] = {}  # episodes by id of the process
        self._closed = False
        self._switchboard = Switchboard(self._fell)

    def __enter__(self) -> HarnessPool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers; whoever waits for one gets a fault."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._switchboard.close()
        for process in self._running:
            process.farewell(0.0)  # all at once
        ends = time.monotonic() + _FAREWELL_SECONDS
        for process in self._running:
            process.farewell(max(ends - time.monotonic(), 0.0))
            process.kill("the pool is closed")
        shutil.rmtree(self._folder, ignore_errors=True)

    def describe(self, program: Program) -> dict[str, Any]:
        """What the driver says of the benchmark.

        Raises:
          EnvironmentFault: it cannot be started, or said something else.
        """
        key = next(self._keys)
        process, waiting = self._send(program, key, {"op": "describe", "settings": program.settings})
        return _parsed(_parse_description, self._wait(process, key, waiting).get("described"), process)

    def function(self, target: Target, name: str, *_: Any) -> Any:
        """The tools of a target."""
        if name != "tools":
            raise ValueError(f"function {name!r} of {target.name}: a harness has its tools only")
        return target.tools

    def open(self, target: Target, seed: int, knobs: dict[str, Any] | None = None) -> HarnessEpisode:
        """An episode of the target's task number `seed`, still to be reset. Of the knobs, `seed` is the driver's."""
        episode = HarnessEpisode(next(self._keys), target, target.all_tasks[seed], int((knobs or {}).get("seed", 0)))
        weakref.finalize(episode, self._abandon, episode.key).atexit = False
        return episode

    def batch(self, requests: Sequence[Request]) -> list[Ask | Verdict | EnvironmentFault]:
        """Performs requests `(episode, op, arguments)`, one an episode, side by side, and waits for all answers.

        Ops: `("reset", ())` and `("turn", (message,))` give Ask, `("score", ())` gives Verdict; before the episode is over, it ends it.
        """
        begun = [self._begin(*request) for request in requests]
        return [self._answer(episode, op, *what) for (episode, op, _), what in zip(requests, begun, strict=True)]

    # --- one request

    def _begin(self, episode: HarnessEpisode, op: str, arguments: tuple) -> tuple[Future | None, EnvironmentFault | None]:
        if episode.fault is not None or (op == "score" and episode.verdict is not None):
            return None, episode.fault
        program, task = episode.target.program, episode.task
        message = {
            "reset": {"op": "start", "settings": program.settings, "task": task.id, "seed": episode.seed},
            "turn": {"op": "turn", "message": arguments[0] if arguments else None},
            "score": {"op": "stop"},
        }[op]
        if op == "score":
            episode.process.stopped[episode.key] = time.monotonic()
        try:
            episode.process, waiting = self._send(program, episode.key, message, episode.process)
        except EnvironmentFault as fault:
            episode.fault = fault
            return None, fault
        return waiting, None

    def _answer(
        self, episode: HarnessEpisode, op: str, waiting: Future | None, fault: EnvironmentFault | None
    ) -> Ask | Verdict | EnvironmentFault:
        if waiting is None:
            return fault or episode.verdict
        try:
            message = self._wait(episode.process, episode.key, waiting)
            if "ask" in message:
                return _parsed(_parse_ask, message["ask"], episode.process)
            episode.verdict = _parsed(_parse_end, message["end"], episode.process) if "end" in message else Verdict(0.0, "")
        except EnvironmentFault as error:
            episode.fault = error
            self._abandon(episode.key)
            return error
        return episode.verdict if op == "score" else Ask(done=True)

    def _send(self, program: Program, key: int, message: dict[str, Any], process: Process | None = None) -> tuple[Process, Future]:
        """Sends a message of an episode, to a new place where it has none."""
        waiting: Future = Future()
        with self._lock:
            if self._closed:
                raise EnvironmentFault("crash", "the pool is closed")
            process = process or self._place(program)
            if message["op"] in ("describe", "start"):
                process.live.add(key)
            process.waiting[key] = waiting
        if process.death is not None:
            waiting.set_result({"death": process.death})
        self._switchboard.send(process, {**message, "id": key})
        return process, waiting

    def _wait(self, process: Process, key: int, waiting: Future) -> dict[str, Any]:
        try:
            message = waiting.result(self.deadline_s)
        except TimeoutError:
            process.retired = True  # the thread may hang for ever; who runs beside it may finish
            raise EnvironmentFault("deadline", f"the harness gave no answer within {self.deadline_s:g} s") from None
        finally:
            process.waiting.pop(key, None)
        if "death" in message:
            raise EnvironmentFault("crash", message["death"])
        if "fault" in message:
            raise EnvironmentFault("exception", process.hide(str(message["fault"]))[:MESSAGE])
        return message

    # --- processes

    def _place(self, program: Program) -> Process:
        """Where a new episode goes: to the process with the fewest, or to a new one. With the lock."""
        tired = time.monotonic() - self.deadline_s
        for process in list(self._running):
            process.retired |= any(when < tired for when in list(process.stopped.values()))
            process.retired |= self._begun[id(process)] >= RECYCLE
            if process.retired and process.live <= set(process.stopped):
                self._switchboard.end(process)
        mine = [process for process in self._running if process.kind == program.kind and not process.retired and process.death is None]
        if not mine or (len(mine) < self.processes and all(process.live for process in mine)):
            try:
                process = Process(program, self._folder)
            except OSError as error:
                raise EnvironmentFault("crash", f"{program.python or 'Python'} cannot be started: {error}") from None
            self._running.append(process)
            self._begun[id(process)] = 0
            self._switchboard.add(process)
            mine = [process]
        process = min(mine, key=lambda process: len(process.live))
        self._begun[id(process)] += 1
        return process

    def _fell(self, process: Process) -> None:
        """In the switchboard's thread: a process has ended."""
        with self._lock:
            self._running.remove(process)
            del self._begun[id(process)]

    def _abandon(self, key: int) -> None:
        """Ends an episode that nobody waits for any more."""
        if self._closed:
            return
        for process in list(self._running):
            if key in process.live and key not in process.stopped:
                process.stopped[key] = time.monotonic()
                self._switchboard.send(process, {"op": "stop", "id": key})


def _parsed(parse: Callable[[Any], Any], value: Any, process: Process) -> Any:
    """What `parse` makes of a value. A refusal quotes it, so that one is made again of the value without secrets."""
    try:
        return parse(value)
    except EnvironmentFault:
        try:
            parse(process.hide(value))
        except RecursionError:
            raise EnvironmentFault("reply", "the worker's reply is nested too deeply") from None
        raise EnvironmentFault("reply", "the worker's reply cannot be understood, and what is wrong with it is a secret") from None


def _parse_description(description: Any) -> dict[str, Any]:
    if not isinstance(description, dict):
        refuse("describe", "must return an object", description)
    check_json("describe", description)
    return description


def _parse_ask(ask: Any) -> Ask:
    check_json("speak", ask)
    if not isinstance(ask, dict):
        refuse("speak", "must be given a speaker, a system prompt, messages and tools", ask)
    speaker, system, messages, tools = (ask.get(key) for key in ("speaker", "system", "messages", "tools"))
    if speaker not in ("agent", "user"):
        refuse("speak", "must be for the agent or the user", speaker)
    if not isinstance(system or "", str) or not isinstance(messages, list):
        refuse("speak", "must be given a system prompt, a list of messages, and a list of tools", ask)
    return Ask(speaker, system or "", [_message(message) for message in messages], parse_function("tools", tools or []))


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES or not isinstance(message.get("content") or "", str):
        refuse("speak", f'must be given messages {{"role": one of {", ".join(ROLES)}, "content"}}', message)
    check_tool_calls("speak", message)
    kept = {"role": message["role"], "content": message.get("content") or ""}
    return kept | {key: message[key] for key in ("tool_calls", "tool_call_id") if message.get(key)}


def _parse_end(end: Any) -> Verdict:
    """Raises EnvironmentFault also where the program says that it was let down."""
    if not isinstance(end, dict):
        refuse("run_episode", "must return an object", end)
    check_json("run_episode", end, 64)
    if error := end.get("error"):
        if not isinstance(error, dict) or not isinstance(error.get("kind"), str):
            refuse("run_episode", 'must return an error {"kind", "message"} or null', error)
        raise EnvironmentFault(error["kind"], str(error.get("message"))[:MESSAGE])
    reward = end.get("reward")
    if not isinstance(reward, int | float) or isinstance(reward, bool) or not (math.isfinite(reward) and 0 <= reward <= 1):
        refuse("run_episode", "must return a reward from 0 to 1", reward)
    return Verdict(float(reward), str(end.get("stop_reason")), end.get("graded"), end.get("record"))
