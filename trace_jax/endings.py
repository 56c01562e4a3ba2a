"""How a command ends: signals, last words and exit codes."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import pathlib
import select
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator

from trace_jax.agents.redaction import redact
from trace_jax.errors import InputError, Unfinished
from trace_jax.processes.job import GO_ON, cause, tell
from trace_jax.stores import is_remote
from trace_jax.workdir import Workdir

_NEWS = 2  # seconds in which a process hears that another was lost, in the midst of a step of both


class Terminated(BaseException):
    """SIGTERM, as an exception of the main thread."""


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """SIGTERM raises `Terminated`. What a signal raises in a callback of the garbage collector (JAX has one), or where an object ends, is
    forgotten by Python; that signal is sent again."""

    def handler(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not break the saving
        raise Terminated

    def forgotten(unraisable: sys.UnraisableHookArgs) -> None:
        number = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(unraisable.exc_type)
        if number is None:
            hook(unraisable)
            return
        if number == signal.SIGTERM:
            signal.signal(number, handler)
        # a little later: this callback would forget it too
        threading.Timer(0.05, signal.pthread_kill, [threading.main_thread().ident, number]).start()

    before, hook = signal.signal(signal.SIGTERM, handler), sys.unraisablehook
    sys.unraisablehook = forgotten
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, before)


def complain(message: str, code: int) -> int:
    """Says in one line, to the user and to the other processes, why the command ends; returns the exit code."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is over; one that another process causes must not break what is said here
    line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in " ".join(message.split()))  # terminals obey some signs
    print(f"trace-jax: {line}", file=sys.stderr)
    tell(code, line)
    return code


def crash(error: Exception, workdir: Workdir | None, argv: list[str]) -> int:
    """Ends a command that an unexpected error has ended: one line, and the traceback in a file. Returns the exit code.

    Args:
      argv: the words after `trace-jax`.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if workdir:
        workdir.hurry()
    if _disk_full(error):
        place = f" ({tempfile.gettempdir() if is_remote(workdir.place()) else workdir.place()})" if workdir else ""
        return complain(f"the disk is full{place}; free some space, the same command goes on from there", 1)
    log = _log_traceback(workdir, argv)
    if lost := cause(_NEWS):  # the error may be no more than what follows from it
        return complain(f"{lost}; {GO_ON} ({type(error).__name__} here: traceback in {log})", 1)
    return complain(f"{type(error).__name__}: {redact(str(error))}; traceback in {log}", 1)


def reader_left() -> bool:
    """Whether nobody reads our output, or what we say beside it, any more, as with `trace-jax ... | head`; else a worker's pipe broke."""
    poll = select.poll()
    for stream in (1, 2):
        poll.register(stream, 0)
    gone = [stream for stream, event in poll.poll(0) if event & select.POLLERR]
    for stream in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)  # else the interpreter complains at its exit
    return bool(gone)


def _disk_full(error: BaseException | None) -> bool:
    """Libraries wrap the system's error in their own, with its text."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _log_traceback(workdir: Workdir | None, argv: list[str]) -> str:
    """Where the traceback is: in the workdir, or where that cannot be reached in a folder of its own."""
    index = workdir.processes.index if workdir else 0
    name, path = f"error{f'-{index}' if index else ''}.log", None
    if workdir:
        with contextlib.suppress(Unfinished, InputError):
            path = workdir.log(name)
    place = str(path := pathlib.Path(tempfile.mkdtemp(prefix="trace-jax-")) / name) if path is None else workdir.place(name)
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    with path.open("a") as file:
        file.write(redact(f"{now}  trace-jax {' '.join(argv)}\n{traceback.format_exc()}\n"))
    return place
