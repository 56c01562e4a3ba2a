"""A local folder as a store.

Files are written under another name, synced, and renamed, so that a crash at any moment leaves the old file or the new one. The lock is one
that the kernel drops when its owner dies.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import pathlib
import shutil
import socket
from collections.abc import Callable
from typing import Any

from trace_jax.errors import InputError
from trace_jax.stores.protocol import LOCK, TEMPORARY, check_name, is_own


class Folder:
    """A folder of this machine, or of a file system that the processes of a run share; `Store` says what its methods do."""

    def __init__(self, path: str | os.PathLike):
        self._root = pathlib.Path(path).expanduser().absolute()
        self.address = str(self._root)
        self._lock: int | None = None

    def make(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # of another's, a file, on a disk that is full or read-only
            raise InputError(f"--workdir={self._root}: {error.strerror}; give a folder that can be written") from error

    def hold(self) -> None:
        try:
            descriptor = os.open(self._root / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(f"--workdir={self._root}: {error.strerror}; give a folder that can be written") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise InputError(f"workdir {self._root} is in use by {owner}; wait for it, or give another --workdir") from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{describe_owner()}\n".encode())
        self._lock = descriptor

    def hurry(self) -> None:
        """Nothing here is waited for."""

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self, name: str) -> bytes:
        return (self._root / check_name(name)).read_bytes()

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def append(self, name: str, line: bytes) -> None:
        path = self._path(name)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            size = _whole_lines(descriptor)
            os.ftruncate(descriptor, size)
            try:
                if os.pwrite(descriptor, line, size) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            except BaseException:
                os.ftruncate(descriptor, size)
                raise
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        path = self._root / check_name(name)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def exists(self, name: str) -> bool:
        return (self._root / check_name(name)).exists()

    def list(self, folder: str) -> list[str]:
        files = (path for path in (self._root / folder).rglob("*") if path.is_file() and is_own(path.name))
        return sorted(path.relative_to(self._root).as_posix() for path in files)

    def marks(self, folder: str) -> dict[str, str]:
        found = {}
        for parent, _, files in os.walk(self._root / folder):
            below = os.path.relpath(parent, self._root)
            for file in filter(is_own, files):
                with contextlib.suppress(OSError):  # removed meanwhile, or a link that leads nowhere
                    status = os.stat(os.path.join(parent, file))
                    found[file if below == "." else f"{below}/{file}"] = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
        return dict(sorted(found.items()))

    def produce(self, name: str, write: Callable[[pathlib.Path], Any]) -> None:
        write(self._path(name))

    def local(self, name: str) -> pathlib.Path:
        return self._root / check_name(name)

    def log(self, name: str) -> pathlib.Path:
        return self._path(name)

    def sweep(self) -> None:
        for path in self._root.rglob(f"{TEMPORARY}*"):
            path.unlink(missing_ok=True)

    def at(self, folder: str) -> Folder:
        return Folder(os.path.normpath(self._root / folder))

    def _path(self, name: str) -> pathlib.Path:
        path = self._root / check_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def describe_owner() -> str:
    """This process, as another one is told who holds a workdir."""
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    return f"pid {os.getpid()} on host {socket.gethostname()} since {now}"


def _sync_folder(path: pathlib.Path) -> None:
    """Makes a rename survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _whole_lines(descriptor: int) -> int:
    """The size of the file up to its last newline."""
    stop = os.fstat(descriptor).st_size
    while stop > 0:
        start = max(stop - 4096, 0)
        found = os.pread(descriptor, stop - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0
