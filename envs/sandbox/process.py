"""Worker processes and the exchange of one message with many of them, with a deadline and without trust.

Everything is non-blocking: a worker that does not read, does not answer, answers too much or fills its stderr costs its own life and
nobody's time beyond the deadline.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import platform
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from envs.base import SandboxError
from envs.package import ALLOWED_MODULES
from envs.sandbox.lockdown import LAYERS, REQUIRED
from envs.sandbox.replies import MAX_REPLY_BYTES
from envs.sandbox.worker import HEADER

WORKER = pathlib.Path(__file__).with_name("worker.py")
CPU_SECONDS = 3600  # of one worker in its life; a worker that reaches it is replaced without harm
STDERR_TAIL = 2000
HELLO_BYTES = 10_000
START_SECONDS = 60.0  # for a worker to start and lock itself down, which takes a tenth of one where nothing is in the way
# -I would be -E -P -s, and -E ignores PYTHONHASHSEED too. The environment holds nothing else of Python's, so -E is not missed.
INTERPRETER = (sys.executable, "-s", "-P", "-S", "-B")


class Options(NamedTuple):
    """What workers are started with.

    Attributes:
      locked: whether they lock themselves down; `required`: whether they are of no use without the necessary layers.
      without: layers that they leave out, to test the others.
      cpu_seconds: of one worker in its life.
      reply_bytes: largest reply to one request.
    """

    hash_seed: int
    memory_bytes: int
    locked: bool
    required: bool
    without: tuple[str, ...] = ()
    cpu_seconds: int = CPU_SECONDS
    reply_bytes: int = MAX_REPLY_BYTES


class Death(Exception):
    """A worker that had to be given up; the message quotes the end of its stderr.

    Attributes:
      kind: as in EnvironmentFault.
      out_of_time: whether it missed the deadline, or used up its CPU time.
    """

    def __init__(self, kind: str, message: str, out_of_time: bool = False):
        super().__init__(message)
        self.kind, self.out_of_time = kind, out_of_time


class Process:
    """One worker process, its pipes, and what it has been told so far.

    Attributes:
      hosted: keys of the episodes that live here.
      packages: digests of the sources that were sent.
      freed: keys to forget with the next message; filled when a handle is dropped, maybe by another thread.
      opened: resets so far, the age of the worker.
      layers: what `envs.sandbox.lockdown` did, {layer: None where it is on, else why not}; None until `greet` has read it.
    """

    def __init__(self, options: Options):
        request_end, self.write_end = os.pipe()
        self.read_end, reply_end = os.pipe()
        limits = (options.memory_bytes, options.cpu_seconds, options.reply_bytes)
        arguments = (request_end, reply_end, os.getpid(), *limits, "locked" if options.locked else "off")
        lists = (",".join(options.without), ",".join(sorted(ALLOWED_MODULES)))
        try:
            self.popen = subprocess.Popen(
                [*INTERPRETER, str(WORKER), *map(str, arguments), *lists],
                env={"PATH": "/nonexistent", "LANG": "C.UTF-8", "PYTHONHASHSEED": str(options.hash_seed)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,  # not a file: a worker that may not write files must still be able to complain
                pass_fds=(request_end, reply_end),
                start_new_session=True,
            )
        except BaseException:
            os.close(self.write_end)
            os.close(self.read_end)
            raise
        finally:
            os.close(request_end)
            os.close(reply_end)
        self.stderr_end = self.popen.stderr.fileno()
        for descriptor in (self.write_end, self.read_end, self.stderr_end):
            os.set_blocking(descriptor, False)
        self.complaints = b""
        self.hosted: set[int] = set()
        self.packages: set[str] = set()
        self.freed: collections.deque[int] = collections.deque()
        self.opened = 0
        self.required = options.required
        self.layers: dict[str, str | None] | None = None

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def drain(self) -> bool:
        """Keeps the end of what waits on stderr; False when there will be no more."""
        while chunk := _receive(self.stderr_end):
            self.complaints = (self.complaints + chunk)[-STDERR_TAIL:]
        return chunk is None

    def kill(self) -> None:
        """Ends the process and its group and closes the pipes; may be called twice."""
        if self.popen.stderr.closed:
            return
        if self.popen.returncode is None:
            try:
                os.killpg(self.popen.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self.popen.kill()  # it ended already, or was killed before it led a group of its own
            self.popen.wait()
        os.close(self.write_end)
        os.close(self.read_end)
        self.popen.stderr.close()

    def death(self, kind: str, reason: str) -> Death:
        """Kills the process and says how it ended."""
        out_of_time = kind == "deadline"
        if kind == "crash":
            try:
                code = self.popen.wait(timeout=1.0)  # its pipe is closed, so it is about to end
                out_of_time = code == -signal.SIGXCPU
                reason += f" with exit code {code}" if code >= 0 else f" by signal {signal.Signals(-code).name}"
            except subprocess.TimeoutExpired:
                reason += ", having closed its pipe"
        self.drain()
        self.kill()
        tail = self.complaints.decode(errors="replace").strip()
        return Death(kind, reason + (f"; its last words: {tail}" if tail else ""), out_of_time)


class _Exchange:
    """One message to one process, half sent and half answered."""

    def __init__(self, process: Process, payload: bytes | None, largest: int):
        self.process, self.largest = process, largest
        self.unsent = memoryview(b"" if payload is None else HEADER.pack(len(payload)) + payload)
        self.received = bytearray()
        self.result: bytes | Death | None = None

    def write(self) -> bool:
        """Sends on; False when all is sent or nobody reads (the end of the reply pipe will tell)."""
        if not self.unsent:
            return False
        try:
            self.unsent = self.unsent[os.write(self.process.write_end, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        return len(self.unsent) > 0

    def read(self) -> bool:
        """Reads on; False when there is a result."""
        chunk = _receive(self.process.read_end)
        if chunk is None:
            return True
        self.received += chunk
        size = HEADER.unpack_from(self.received)[0] if len(self.received) >= HEADER.size else None
        if chunk == b"":
            self.result = self.process.death("crash", "the worker ended")
        elif size is not None and size > self.largest:
            self.result = self.process.death("reply", f"the worker announced {size} bytes where at most {self.largest} are allowed")
        elif size is not None and len(self.received) > HEADER.size + size:
            self.result = self.process.death("reply", "the worker sent more than one message")
        elif size is not None and len(self.received) == HEADER.size + size:
            self.result = bytes(self.received[HEADER.size :])
        return self.result is None


def exchange(messages: list[tuple[Process, bytes | None, int]], deadline_s: float) -> list[bytes | Death]:
    """Sends one message to each process and waits for all replies at the same time; a process that fails is killed.

    Args:
      messages: (process, payload or None to wait for what it says unasked, largest reply in bytes), every process once.
      deadline_s: for all of them together, in seconds.

    Returns:
      The payload of each reply, or the death of its process.
    """
    exchanges = [_Exchange(*message) for message in messages]
    waiting = len(exchanges)
    end = time.monotonic() + deadline_s
    with selectors.DefaultSelector() as selector:
        for one in exchanges:
            selector.register(one.process.write_end, selectors.EVENT_WRITE, (one, one.write))
            selector.register(one.process.read_end, selectors.EVENT_READ, (one, one.read))
            selector.register(one.process.stderr_end, selectors.EVENT_READ, (one, one.process.drain))
        while waiting and (remaining := end - time.monotonic()) > 0:
            for key, _ in selector.select(remaining):
                one, advance = key.data
                if one.result is None:
                    descriptors = (one.process.write_end, one.process.read_end, one.process.stderr_end)
                    more = advance()
                    if one.result is not None:
                        waiting -= 1
                        for descriptor in descriptors:
                            _forget(selector, descriptor)
                    elif not more:
                        _forget(selector, key.fd)
    for one in exchanges:
        if one.result is None:
            one.result = one.process.death("deadline", f"no reply within {deadline_s:g} s")
    return [one.result for one in exchanges]


def greet(new: list[Process]) -> list[Death]:
    """Waits until workers that were just started are ready, and takes down their layers. No code of an environment runs before.

    Returns:
      Of those that will never be ready, why.

    Raises:
      SandboxError: one lacks a layer that is required. All are ended then.
    """
    if not new:
        return []
    try:
        results = exchange([(process, None, HELLO_BYTES) for process in new], START_SECONDS)
        for process, result in zip(new, results, strict=True):
            if isinstance(result, bytes):
                hello = json.loads(result)
                process.layers = {layer: hello[layer] for layer in LAYERS if layer in hello}
                for layer in REQUIRED if process.required else ():
                    if (why := process.layers.get(layer, "not reported")) is not None:
                        raise SandboxError(_not_locked(layer, why))
    except BaseException:  # an unlocked one, or interrupted with half a message read
        for process in new:
            process.kill()
        raise
    return [result for result in results if isinstance(result, Death)]


def start(options: Sequence[Options]) -> list[Process]:
    """New processes, ready for code.

    Raises:
      OSError, SandboxError: one cannot be started, or lacks a layer that is required.
    """
    for _ in range(2):
        processes = [Process(one) for one in options]
        deaths = greet(processes)
        if not deaths:
            return processes
        for process in processes:
            process.kill()
    raise SandboxError(f"a worker does not start: {deaths[0]}")


def _not_locked(layer: str, why: str) -> str:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    return (
        f"sandbox 'require': the layer {layer} is missing on {system} ({why}); use Linux on x86_64 or aarch64, in a container one whose "
        "seccomp profile allows prctl and seccomp, or choose best_effort for code that you trust"
    )


def _forget(selector: selectors.BaseSelector, descriptor: int) -> None:
    if descriptor in selector.get_map():
        selector.unregister(descriptor)


def _receive(descriptor: int) -> bytes | None:
    """What is waiting: None for nothing yet, empty at the end."""
    try:
        return os.read(descriptor, 1 << 20)
    except BlockingIOError:
        return None
