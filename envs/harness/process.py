"""The processes in which benchmarks' programs run, and the one thread of the host that reads from and writes to all of them."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import pathlib
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from envs.harness.target import Program
from envs.sandbox.process import receive

LARGEST = 1 << 26  # bytes of a message
_TAIL = 4000  # bytes of the error output that are kept
_WORKER = pathlib.Path(__file__).with_name("worker.py")


class Process:
    """A worker.

    Attributes:
      kind: of its programs.
      waiting: by episode, who waits for what it says next.
      live: episodes that have not ended.
      stopped: of these, when they were told to end.
      death: why it is gone, None while it is there.
      retired: takes no new episodes.
    """

    def __init__(self, program: Program, folder: str):
        """Starts it, with PATH, HOME and the program's variables, in a folder of its own.

        Raises:
          OSError: it cannot be started.
        """
        self.kind = program.kind
        secrets = {os.environ[name] for name in program.variables if len(os.environ.get(name, "")) >= 6}
        self._secrets = sorted(secrets, key=len, reverse=True)  # one may be the beginning of another
        environment = {name: os.environ[name] for name in ("PATH", "HOME", *program.variables) if name in os.environ}
        self._popen = subprocess.Popen(
            [*(shlex.split(program.python) or [sys.executable]), "-s", str(_WORKER), str(program.driver)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment | {"PYTHONHASHSEED": "0"},
            bufsize=0,
            start_new_session=True,  # an interrupt from the keyboard is for us; and all that it starts ends with it
        )
        self.pipes = (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        for pipe in self.pipes:
            os.set_blocking(pipe.fileno(), False)
        self.waiting: dict[int, Future] = {}
        self.live: set[int] = set()
        self.stopped: dict[int, float] = {}
        self.death: str | None = None
        self.retired = False
        self.unsent: collections.deque[bytes] = collections.deque()
        self._unread = bytearray()
        self._breach = ""  # of the protocol, why it is not listened to any more
        self._tail = b""

    def write(self) -> bool:
        """Sends what the pipe takes; whether there is more."""
        while self.unsent:
            try:
                sent = os.write(self.pipes[0].fileno(), self.unsent[0])
            except BlockingIOError:
                return True
            except BrokenPipeError:  # the end is seen where it is read
                self.unsent.clear()
                break
            line = self.unsent.popleft()
            if sent < len(line):
                self.unsent.appendleft(line[sent:])
        return False

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that have come; None when it speaks no more, or no longer the protocol."""
        data = receive(self.pipes[1].fileno())
        if data == b"":
            return None
        self._unread += data or b""
        if b"\n" not in (data or b""):  # a long message comes in many pieces
            if len(self._unread) > LARGEST:
                self._breach = f"a message of the worker is larger than {LARGEST >> 20} MiB"
                return None
            return []
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # also nested too deeply
            messages = [None]
        if all(isinstance(m, dict) and isinstance(m.get("id"), int) for m in messages):
            return messages
        self._breach = "a message of the worker is not JSON with an id"
        return None

    def drain(self) -> bool:
        """Keeps the end of what it printed; whether more can come."""
        while data := receive(self.pipes[2].fileno()):
            self._tail = (self._tail + data)[-_TAIL:]
        return data is None

    def hide(self, value: Any) -> Any:
        """A text, or the texts of a JSON value, without the values of the program's variables."""
        if isinstance(value, dict):
            return {self.hide(key): self.hide(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.hide(inner) for inner in value]
        for secret in self._secrets if isinstance(value, str) else ():
            value = value.replace(secret, "***")
        return value

    def kill(self, why: str | None = None) -> None:
        """Ends it and all that it started, and whoever waits is told why."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        code = self._popen.wait()
        self.drain()
        ended = f"the worker was ended by {signal.Signals(-code).name}" if code < 0 else f"the worker ended with exit code {code}"
        tail = self.hide(self._tail.decode(errors="replace").strip())[-2000:]  # cut only then, else a part of a secret might stay
        self.death = why or (self._breach or ended) + (f"; it had printed: {tail}" if tail else "")
        for pipe in self.pipes:
            pipe.close()
        for waiting in list(self.waiting.values()):
            _give(waiting, {"death": self.death})

    def farewell(self, seconds: float) -> None:
        """Lets its episodes tidy up, if there are any."""
        self.pipes[0].close()
        if self.live:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(seconds)


class Switchboard:
    """The thread that talks to the processes. `fell` is called with each that has ended."""

    def __init__(self, fell: Callable[[Process], None]):
        self._fell = fell
        self._selector = selectors.DefaultSelector()
        self._todo: collections.deque[tuple[Process, str, bytes]] = collections.deque()
        self._closed = False
        self._bell, self._rope = socket.socketpair()  # who pulls the rope wakes the thread
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="harness", daemon=True)
        self._thread.start()

    def add(self, process: Process) -> None:
        """Listens to a process from now on."""
        self._tell(process, "add")

    def send(self, process: Process, message: dict[str, Any]) -> None:
        self._tell(process, "send", json.dumps(message).encode() + b"\n")

    def end(self, process: Process) -> None:
        """Ends a process that nobody needs."""
        self._tell(process, "end")

    def close(self) -> None:
        """Ends the thread; the processes are left alone."""
        self._closed = True
        self._wake()
        self._thread.join()
        self._selector.close()
        self._bell.close()
        self._rope.close()

    def _tell(self, process: Process, what: str, line: bytes = b"") -> None:
        self._todo.append((process, what, line))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it was woken often enough, or is gone
            self._rope.send(b".")

    # --- in the thread

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    self._bell.recv(1 << 16)
                    self._work()
                elif key.data[0].death is None:
                    self._advance(*key.data)

    def _work(self) -> None:
        while self._todo:
            process, what, line = self._todo.popleft()
            if process.death is not None:
                continue
            if what == "end":
                self._end(process)
            elif what == "add":
                self._selector.register(process.pipes[1], selectors.EVENT_READ, (process, "read"))
                self._selector.register(process.pipes[2], selectors.EVENT_READ, (process, "drain"))
            else:
                process.unsent.append(line)
                if process.write() and process.pipes[0] not in self._selector.get_map():
                    self._selector.register(process.pipes[0], selectors.EVENT_WRITE, (process, "write"))

    def _end(self, process: Process) -> None:
        for pipe in process.pipes:
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
        process.kill()
        self._fell(process)

    def _advance(self, process: Process, what: str) -> None:
        if what == "write":
            if not process.write():
                self._selector.unregister(process.pipes[0])
            return
        if what == "drain":
            if not process.drain():
                self._selector.unregister(process.pipes[2])
            return
        messages = process.read()
        if messages is None:
            self._end(process)
            return
        for message in messages:
            key = message["id"]
            if "ask" not in message:
                process.live.discard(key)
                process.stopped.pop(key, None)
            elif key in process.stopped:
                continue  # it was told to end meanwhile
            if key in process.waiting:
                _give(process.waiting[key], message)


def _give(waiting: Future, message: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidStateError):  # it has waited too long, or was told already
        waiting.set_result(message)
