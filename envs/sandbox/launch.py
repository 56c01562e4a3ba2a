"""How worker processes come to be: forked in a few milliseconds by a zygote that has imported everything, or started on their own.

The zygote (`envs.sandbox.zygote`) is a subprocess like any other, never a fork of this process, which may have JAX, threads and secrets in
it. One serves all packages of a pool, since what a package adds is its own code, which must not run where others come from. Where the
system has no descriptors for processes (Linux before 5.3, other systems), or a zygote does not work, every worker is an interpreter of its
own, which takes twenty times as long and is otherwise the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, NamedTuple

from envs.package import ALLOWED_MODULES
from envs.sandbox.replies import MAX_REPLY_BYTES

FOLDER = pathlib.Path(__file__).parent
CPU_SECONDS = 3600  # of one worker in its life; a worker that reaches it is replaced without harm
START_SECONDS = 60.0  # for a process to be ready, which takes a tenth of a second where nothing is in the way
# -I would be -E -P -s, and -E ignores PYTHONHASHSEED too. The environment holds nothing else of Python's, so -E is not missed.
INTERPRETER = (sys.executable, "-s", "-P", "-S", "-B")


class Options(NamedTuple):
    """What a worker is started with.

    Attributes:
      memory_bytes: address space.
      locked: whether it locks itself down; `required`: whether it is of no use without the necessary layers.
      without: layers that it leaves out, to test the others.
      cpu_seconds: in its life.
      reply_bytes: largest reply to one request.
    """

    memory_bytes: int
    locked: bool
    required: bool
    without: tuple[str, ...] = ()
    cpu_seconds: int = CPU_SECONDS
    reply_bytes: int = MAX_REPLY_BYTES

    @property
    def arguments(self) -> list[str]:
        limits = (self.memory_bytes, self.cpu_seconds, self.reply_bytes)
        return [*map(str, limits), "locked" if self.locked else "off", ",".join(self.without)]


class Started(subprocess.Popen):
    """A process of its own interpreter; `kill` ends its group too."""

    def __init__(self, script: str, hash_seed: int, arguments: list[str], **streams: Any):
        command = [*INTERPRETER, str(FOLDER / script), str(os.getpid()), ",".join(sorted(ALLOWED_MODULES)), *arguments]
        environment = {"PATH": "/nonexistent", "LANG": "C.UTF-8", "PYTHONHASHSEED": str(hash_seed)}
        super().__init__(command, env=environment, start_new_session=True, **streams)

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it does not lead a group yet
                os.killpg(self.pid, signal.SIGKILL)
        super().kill()


class _Zygote:
    """A running zygote. `ask` raises OSError when it has gone, and sees to it that it has."""

    def __init__(self, hash_seed: int):
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(START_SECONDS)
        with theirs:
            self.process = Started("zygote.py", hash_seed, [], stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, request: list, streams: tuple[int, ...] = ()) -> int | str:
        with self._lock:
            try:
                socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
                answer = self._channel.recv(1000)
                if not answer:
                    raise BrokenPipeError("the zygote has ended")
            except BaseException:  # interrupted: the next answer would be this one's
                self.process.kill()
                raise
        return json.loads(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        with self._lock:
            self._channel.close()


class Forked:
    """A worker that the zygote forked, with what is used of `subprocess.Popen`; `kill` ends its group too.

    When the zygote has gone the kernel has killed the worker, so its return code is that of SIGKILL then.
    """

    def __init__(self, zygote: _Zygote, pid: int):
        self.pid, self.returncode = pid, None
        self._zygote, self._lock = zygote, threading.Lock()
        try:
            self._descriptor = os.pidfd_open(pid)  # of this process and no other: the id is taken until the zygote was told to wait
        except OSError:  # no descriptors left
            os.kill(pid, signal.SIGKILL)
            zygote.ask(["wait", pid])
            raise

    def wait(self, timeout: float | None = None) -> int:
        """The return code. Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            ended = select.poll()
            ended.register(self._descriptor, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a worker", timeout)
            try:
                code = self._zygote.ask(["wait", self.pid])
            except OSError:
                code = -signal.SIGKILL
            os.close(self._descriptor)
            self.returncode = code
            return code

    def kill(self) -> None:
        with self._lock:
            if self.returncode is not None:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):  # ended; does not lead a group yet
                if self._zygote.process.poll() is None:  # else the id may be somebody else's
                    os.killpg(self.pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


class Launcher:
    """Starts the workers of a pool. May be used from several threads."""

    def __init__(self, hash_seed: int):
        self._hash_seed = hash_seed
        self._lock = threading.Lock()
        self._closed = False
        self._zygote = _Zygote(hash_seed) if _has_process_descriptors() else None

    def launch(self, options: Options, stdin: int, stdout: int, stderr: int) -> Forked | Started:
        """A new worker between these descriptors.

        Raises:
          OSError: no process can be started.
          ValueError: the launcher is closed.
        """
        with self._lock:
            for last in (False, True):
                if self._closed or self._zygote is None:
                    break
                try:
                    answer = self._zygote.ask(["fork", options.arguments], (stdin, stdout, stderr))
                except OSError:  # it has gone, and all its workers; twice in a row: it is of no use here
                    self._zygote.close()
                    self._zygote = None if last or self._closed else _Zygote(self._hash_seed)
                    continue
                if isinstance(answer, str):
                    break
                return Forked(self._zygote, answer)
            if self._closed:
                raise ValueError("the pool is closed")
            return Started("worker.py", self._hash_seed, options.arguments, stdin=stdin, stdout=stdout, stderr=stderr)

    def close(self) -> None:
        """Ends the zygote, and with it all workers that still run."""
        self._closed = True
        if (zygote := self._zygote) is not None:
            zygote.process.kill()  # another thread may wait for it, with the lock
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()


def _has_process_descriptors() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError):  # the kernel, a container's filter, the interpreter
        return False
    return True
