"""Worker processes and the exchange of one message with many of them, with a deadline and without trust.

Everything is non-blocking: a worker that does not read, does not answer, answers too much or fills its stderr costs its own life and
nobody's time beyond the deadline.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from envs.base import SandboxError
from envs.sandbox.launch import START_SECONDS, Launcher, Options
from envs.sandbox.lockdown import LAYERS, REQUIRED
from envs.sandbox.worker import HEADER

STDERR_TAIL = 2000
HELLO_BYTES = 10_000
SIGNALS = {one.value: one.name for one in signal.Signals}  # real-time ones have no names
ATTEMPTS = 3  # to start a worker; a zygote may end meanwhile


class Death(Exception):
    """A worker that had to be given up; the message quotes the end of its stderr.

    Attributes:
      kind: as in EnvironmentFault.
      signal: which ended it, if one did that the host did not send.
    """

    def __init__(self, kind: str, message: str, signal: int | None = None):
        super().__init__(message)
        self.kind, self.signal = kind, signal


class Process:
    """One worker process, its pipes, and what it has been told so far.

    Attributes:
      hosted: keys of the episodes that live here.
      packages: digests of the sources that were sent.
      freed: keys to forget with the next message; filled when a handle is dropped, maybe by another thread.
      opened: resets so far, the age of the worker.
      layers: what `envs.sandbox.lockdown` did, {layer: None where it is on, else why not}; None until `greet` has read it.
    """

    def __init__(self, launcher: Launcher, options: Options):
        theirs, self.write_end = os.pipe()
        self.read_end, reply_end = os.pipe()
        self.stderr_end, complaint_end = os.pipe()  # not a file: a worker that may not write files must still be able to complain
        self.closed = False
        try:
            self.child = launcher.launch(options, theirs, reply_end, complaint_end)
        except BaseException:
            self._close()
            raise
        finally:
            for descriptor in (theirs, reply_end, complaint_end):
                os.close(descriptor)
        for descriptor in (self.write_end, self.read_end, self.stderr_end):
            os.set_blocking(descriptor, False)
        self.complaints = b""
        self.hosted: set[int] = set()
        self.packages: set[str] = set()
        self.freed: collections.deque[int] = collections.deque()
        self.opened = 0
        self.required = options.required
        self.layers: dict[str, str | None] | None = None

    def drain(self) -> bool:
        """Keeps the end of what waits on stderr; False when there will be no more."""
        while chunk := receive(self.stderr_end):
            self.complaints = (self.complaints + chunk)[-STDERR_TAIL:]
        return chunk is None

    def kill(self) -> None:
        """Ends the process and its group and closes the pipes; may be called twice."""
        if self.closed:
            return
        self.child.kill()
        self.child.wait()
        self._close()

    def _close(self) -> None:
        self.closed = True
        for descriptor in (self.write_end, self.read_end, self.stderr_end):
            os.close(descriptor)

    def death(self, kind: str, reason: str) -> Death:
        """Kills the process and says how it ended."""
        ended_by = None
        if kind == "crash":
            try:
                code = self.child.wait(timeout=1.0)  # its pipe is closed, so it is about to end
                ended_by = -code if code < 0 else None
                reason += f" by signal {SIGNALS.get(ended_by, ended_by)}" if ended_by else f" with exit code {code}"
            except subprocess.TimeoutExpired:
                reason += ", having closed its pipe"
        self.drain()
        self.kill()
        tail = self.complaints.decode(errors="replace").strip()
        return Death(kind, reason + (f"; its last words: {tail}" if tail else ""), ended_by)


class _Exchange:
    """One message to one process, half sent and half answered."""

    def __init__(self, process: Process, payload: bytes | None, largest: int):
        self.process, self.largest = process, largest
        self.unsent = memoryview(b"" if payload is None else HEADER.pack(len(payload)) + payload)
        self.received = bytearray()
        self.result: bytes | Death | None = None

    def write(self) -> bool:
        """Sends on; False when all is sent or nobody reads (the end of the reply pipe will tell)."""
        try:
            while self.unsent:
                self.unsent = self.unsent[os.write(self.process.write_end, self.unsent) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            pass
        return False

    def read(self) -> bool:
        """Reads on; False when there is a result."""
        chunk = receive(self.process.read_end)
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
    end = time.monotonic() + deadline_s
    exchanges = [_Exchange(*message) for message in messages]
    waiting = select.poll()
    advances: dict[int, tuple[_Exchange, Callable[[], bool]]] = {}
    left = 0
    for one, sending in [(one, one.write()) for one in exchanges]:  # all have their message before anybody's reply is looked for
        if not sending and not one.read():  # a quick one has answered by now
            continue
        left += 1
        for descriptor, event, advance in (
            *(((one.process.write_end, select.POLLOUT, one.write),) if sending else ()),
            (one.process.read_end, select.POLLIN, one.read),
            (one.process.stderr_end, select.POLLIN, one.process.drain),
        ):
            waiting.register(descriptor, event)
            advances[descriptor] = one, advance

    def forget(descriptor: int) -> None:
        if advances.pop(descriptor, None):
            waiting.unregister(descriptor)

    while left and (remaining := end - time.monotonic()) > 0:
        for descriptor, _ in waiting.poll(remaining * 1000):
            if descriptor not in advances:
                continue
            one, advance = advances[descriptor]
            more = advance()
            if one.result is not None:
                left -= 1
                for each in (one.process.write_end, one.process.read_end, one.process.stderr_end):
                    forget(each)
            elif not more:
                forget(descriptor)
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


def start(launcher: Launcher, options: Sequence[Options]) -> list[Process]:
    """New processes, ready for code.

    Raises:
      OSError, SandboxError: one cannot be started, or lacks a layer that is required.
    """
    for _ in range(ATTEMPTS):
        processes = [Process(launcher, one) for one in options]
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


def receive(descriptor: int) -> bytes | None:
    """What is waiting: None for nothing yet, empty at the end."""
    try:
        return os.read(descriptor, 1 << 16)  # all that a pipe holds
    except BlockingIOError:
        return None
