"""Who holds a workdir in a bucket: an object that its holder writes again every few seconds.

A lock file of a bucket does not go away with its owner, so it is a lease. Whoever wants the workdir and finds the lease waits until its
holder writes it again, and is refused, or until its term is over, and takes it. Both are decided by the object's generation, so that of two
only one can succeed. Where the holder was a process of this machine that is gone, nobody waits.

A holder that could not write for longer than the term, because it was stopped or cut off, asks whether it still holds the lease before it
writes anything else.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import threading
import time
from typing import Any

from trace_jax.errors import InputError
from trace_jax.stores.folder import describe_owner
from trace_jax.stores.objects import Conflict, Objects
from trace_jax.stores.protocol import StoreFailed

RENEW, TERM = 10.0, 60.0  # seconds
_LOOK = 1.0  # seconds between two looks at somebody else's lease


class Lease:
    """The lease of this process, from its making to `release`.

    Args:
      objects: for the thread that renews it alone.
      name: of the object.
      place: of the workdir, for messages.

    Raises:
      InputError: another process holds it; the message names it.
    """

    def __init__(self, objects: Objects, name: str, place: str):
        self._objects, self._name, self._place = objects, name, place
        self._content = json.dumps({"owner": describe_owner(), "process": _process()}).encode()
        self._renewing, self._ended, self._lost = threading.Lock(), threading.Event(), ""
        self._generation = self._take()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """Whether another process has it."""
        return bool(self._lost)

    def check(self) -> None:
        """Before a write: that the workdir is still this process's.

        Raises:
          StoreFailed: it is not.
        """
        if self._lost or _now() - self._renewed > TERM:
            self.renew()

    def renew(self) -> None:
        """Writes it again. Raises StoreFailed when another process has it, or the store does not answer."""
        with self._renewing:
            if not self._lost:
                asked = _now()  # its term begins no later than this, however late the answer comes
                try:
                    self._generation = self._objects.put(self._name, self._content, self._generation)
                    self._renewed = asked
                except Conflict:
                    self._lost = (
                        f"{self._place} was taken over by {_owner(self._read())} while this process was cut off from it; let that go on"
                    )
            if self._lost:
                raise StoreFailed(self._lost)

    def release(self, patience: float) -> None:
        """Gives it back, with so many seconds for an answer; the next one need not wait then."""
        self._ended.set()
        self._objects.patience = patience
        if not self._renewing.acquire(timeout=patience):  # its thread waits for an answer; the term will end
            return
        try:
            if not self._lost:
                self._objects.delete([self._name], match=self._generation)
        except (StoreFailed, InputError):
            return
        finally:
            self._renewing.release()

    def _keep(self) -> None:
        while not self._ended.wait(RENEW):
            try:
                self.renew()
            except (StoreFailed, InputError) as error:  # told by the next write; without an answer it is tried again
                if self._lost:
                    print(f"trace-jax: {error}", file=sys.stderr)
                    return

    def _take(self) -> int:
        generation = self._free()
        while generation is not None:  # somebody's, or lately was
            self._renewed = _now()
            try:
                return self._objects.put(self._name, self._content, generation)
            except Conflict:
                generation = self._free()
        raise InputError(f"workdir {self._place} is in use by {_owner(self._read())}; wait for it, or give another --workdir")

    def _free(self) -> int | None:
        """The generation that may be replaced, 0 where there is none; None where its holder lives."""
        found = self._objects.stat(self._name)
        if found is None:
            return 0
        holder = self._read()
        if _gone(holder):
            return found.generation
        first, told = time.monotonic(), False
        while time.monotonic() - first < TERM:
            if not told and time.monotonic() - first > 3 * _LOOK:
                told = True
                print(f"workdir {self._place} was held by {_owner(holder)}; waiting up to {TERM:.0f} s whether it lives", file=sys.stderr)
            time.sleep(_LOOK)
            now = self._objects.stat(self._name)
            if now is None:
                return 0
            if now.generation != found.generation:
                return None
        return found.generation

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._objects.get(self._name)[0])
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _now() -> float:
    """Seconds, those included in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _owner(holder: dict[str, Any]) -> str:
    return str(holder.get("owner") or "another process")[:200]


def _process() -> list[str | int]:
    """What tells processes apart: the boot of the machine, the namespace of its process ids, id and time of start."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return [boot, os.stat("/proc/self/ns/pid").st_ino, os.getpid(), _status(os.getpid())[1]]


def _status(pid: int) -> tuple[str, int]:
    """State, and time of start in clock ticks since boot."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def _gone(holder: dict[str, Any]) -> bool:
    """Whether it was a process that can be seen from here to have ended."""
    match holder.get("process"), _process():
        case [boot, space, int(pid), started], [own_boot, own_space, _, _] if (boot, space) == (own_boot, own_space):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            except PermissionError:
                return False  # another user's
            state, start = _status(pid)
            return state in "ZX" or start != started
    return False
