"""Programs of code tasks: the host runs each in a fresh locked process, so that a candidate edit never shares one with its verifier.

An environment may have a method `programs()` beside `score`:

  programs() -> [{"files": {path: text}, "code": text, "deadline_s": number}]
  score(results) -> as ever; one result per program, in order:
    {"value": JSON or null, "error": null or {"kind": "exception" | "deadline" | "crash" | "reply", "message": text}}

`files` are importable as modules from memory (`a/b.py` is `a.b`; nothing can be opened) and are there as the dict `FILES`; `code` is run
among them, and what it leaves in the variable `result` is the value. `deadline_s` is CPU time, in whole seconds, rounded up, so that the
verdict does not depend on what else the machine does; a program that only waits is ended after `WAIT` times as long. The constants of this
file bound the rest. Like `score`, `programs` changes nothing. A program that fails is a result like any other, for the verifier to judge;
only `programs` itself may fault.

Code that was edited by the agent can forge what its own process says. So a program should return what the edited code computes, and the
expected values stay in `score`.

A program is a function of its text. The same one is run once, however many episodes and questions for the score have it; what may have
been the machine's doing, a wait too long or SIGKILL, is not remembered, and the latter tried again.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import json
import math
import os
import re
import signal
import threading
from typing import Any, NamedTuple

from envs.base import EnvironmentFault
from envs.sandbox.launch import Launcher, Options
from envs.sandbox.process import Death, exchange, start
from envs.sandbox.replies import MalformedMessage, check_json, parse_message, refuse

MAX_PROGRAMS = 32
MAX_DEADLINE_S = 30.0  # of one
MAX_TOTAL_S = 60.0  # of one episode's
MAX_VALUE_BYTES = 20_000  # what the edited code says must fit into the verifier's reply, or it could end an episode that it would lose
MAX_VALUE_DEPTH = 16
MAX_MESSAGE = 2_000
WAIT = 5  # wall time over CPU time, on a machine with more work than cores
AT_ONCE = min(16, os.cpu_count() or 1)
REMEMBERED = 1_000


class Program(NamedTuple):
    """One checked entry of `programs()`."""

    files: dict[str, str]
    code: str
    deadline_s: float

    @property
    def cpu_seconds(self) -> int:
        return math.ceil(self.deadline_s)

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(json.dumps([self.files, self.code, self.cpu_seconds], sort_keys=True).encode()).digest()


class Outcome(NamedTuple):
    """The result for `score`, and whether it would be the same again."""

    result: dict[str, Any]
    certain: bool = True


def parse_programs(value: Any) -> tuple[Program, ...]:
    """The checked programs of an episode; `check_json` has passed, and a reply's size bounds them all together.

    Raises:
      EnvironmentFault: kind `reply`, naming the field.
    """
    if not isinstance(value, list) or len(value) > MAX_PROGRAMS:
        refuse("programs", f"must return a list of at most {MAX_PROGRAMS}", value)
    for program in value:
        if not isinstance(program, dict) or set(program) != {"files", "code", "deadline_s"}:
            refuse("programs", 'must return {"files", "code", "deadline_s"}', program)
        files, code, deadline = program["files"], program["code"], program["deadline_s"]
        if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
            refuse("programs", "must give files as {path: text}", files)
        if not isinstance(code, str):
            refuse("programs", "must give code as a string", code)
        if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not 0 < deadline <= MAX_DEADLINE_S:
            refuse("programs", f"must give a deadline_s above 0 and up to {MAX_DEADLINE_S:g}", deadline)
    programs = tuple(Program(**program) for program in value)
    if (total := sum(program.cpu_seconds for program in programs)) > MAX_TOTAL_S:
        refuse("programs", f"must have deadlines of at most {MAX_TOTAL_S:g} s together", total)
    return programs


class Runner:
    """Runs programs side by side and remembers what came of them. May be used from several threads."""

    def __init__(self, launcher: Launcher, options: Options):
        self._launcher, self._options = launcher, options
        self._threads = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "program")
        self._lock = threading.Lock()
        self._futures: collections.OrderedDict[bytes, concurrent.futures.Future] = collections.OrderedDict()

    def run(self, programs: list[Program]) -> list[dict[str, Any]]:
        """One result per program.

        Raises:
          SandboxError: a process does not start, or is not locked down as required.
        """
        with self._lock:
            futures = []
            for program in programs:
                key = program.digest
                future = self._futures.get(key)
                if future is None or future.cancelled() or (future.done() and future.exception()):
                    future = self._futures[key] = self._threads.submit(run_program, program, self._launcher, self._options)
                self._futures.move_to_end(key)
                futures.append(future)
            while len(self._futures) > REMEMBERED:
                self._futures.popitem(last=False)
        try:
            outcomes = [future.result() for future in futures]
        except concurrent.futures.CancelledError:
            raise ValueError("the pool is closed") from None
        with self._lock:
            for program, outcome in zip(programs, outcomes, strict=True):
                if not outcome.certain:
                    self._futures.pop(program.digest, None)
        return [outcome.result for outcome in outcomes]

    def close(self) -> None:
        """What has not begun never will; what has begun ends by its deadline."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def run_program(program: Program, launcher: Launcher, options: Options) -> Outcome:
    """What comes of one program in a process of its own."""
    reply = _ask(program, launcher, options)
    if isinstance(reply, Death) and reply.signal == signal.SIGKILL:
        reply = _ask(program, launcher, options)
    if isinstance(reply, Death):
        kind = "deadline" if reply.signal == signal.SIGXCPU else reply.kind
        return _failure(kind, str(reply), certain=reply.kind != "deadline" and reply.signal != signal.SIGKILL)
    try:
        ((fault, value),) = parse_message(reply, 1)
        if fault is not None:
            return _failure("exception", fault)
        if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str | None)):
            raise MalformedMessage("the worker's reply is not a pair of value and error")
        check_json("program", value, MAX_VALUE_DEPTH)
    except (MalformedMessage, EnvironmentFault) as error:
        return _failure("reply", str(error))
    return Outcome({"value": value[0], "error": None}) if value[1] is None else _failure("exception", value[1])


def _ask(program: Program, launcher: Launcher, options: Options) -> bytes | Death:
    (process,) = start(launcher, [options._replace(cpu_seconds=program.cpu_seconds, reply_bytes=MAX_VALUE_BYTES)])
    content = {"packages": {}, "free": [], "requests": [(None, "program", (program.files, program.code))]}
    try:
        (reply,) = exchange([(process, json.dumps(content).encode(), MAX_VALUE_BYTES + 1000)], WAIT * program.cpu_seconds)
        return reply
    finally:
        process.kill()


def _failure(kind: str, message: str, certain: bool = True) -> Outcome:
    message = re.sub(r"\b0x[0-9a-f]{6,}\b", "0x...", message.encode(errors="replace").decode()[-MAX_MESSAGE:])  # addresses differ
    return Outcome({"value": None, "error": {"kind": kind, "message": message}}, certain)
