"""What a workdir asks of the place where its files lie.

All files are whole: a write that fails, or whose process dies, leaves the old file or none. Names are relative, with `/`.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, Protocol

from trace_jax.errors import Unfinished

LOCK, TEMPORARY = ".lock", ".tmp-"  # names of files that are none of the workdir's


class StoreFailed(Unfinished):
    """The store does not answer, or another process has taken the workdir over; what was written is there, and the run may go on later."""


class Store(Protocol):
    """The files of one workdir. `address` is where people find it, a path or `gs://bucket/prefix`."""

    address: str

    def make(self) -> None:
        """Makes it, where it must be made. Raises InputError when it cannot be used."""

    def hold(self) -> None:
        """Takes it for this process alone, until `close` or its death. Raises InputError, which names the owner, when it is in use."""

    def hurry(self) -> None:
        """The process is about to end: from now on an answer is waited for a few seconds only."""

    def close(self) -> None:
        """Gives everything back."""

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError, and OSError or StoreFailed when it cannot be read whole."""

    def write(self, name: str, data: bytes) -> None:
        """The whole file, or when it raises the old one as it was."""

    def append(self, name: str, line: bytes) -> None:
        """One more line behind the last whole one; when it returns, the line is there once."""

    def remove(self, name: str) -> None:
        """Removes a file, or a folder with all that is in it; nothing where there is none."""

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""

    def list(self, folder: str) -> list[str]:
        """The names of all files below a folder ("" is all), sorted; empty where there is none."""

    def marks(self, folder: str) -> dict[str, str]:
        """The same names, each with a mark that changes when the file does."""

    def produce(self, name: str, write: Callable[[pathlib.Path], Any]) -> None:
        """Has `write(path)` write a file or folder, for libraries with formats of their own. What a folder of that name held stays where it
        is not written over."""

    def local(self, name: str) -> pathlib.Path:
        """A file or folder, for libraries to read; there may be none of that name. What is written there is lost."""

    def log(self, name: str) -> pathlib.Path:
        """A file or folder that grows, for libraries to write; it gets its place in the store at the latest with `close`."""

    def sweep(self) -> None:
        """Removes what writers left behind that were killed."""

    def at(self, folder: str) -> Store:
        """The store of another folder, relative to this one; what holds this one holds it, and it is closed with this one."""


def check_name(name: str) -> str:
    """A name inside the store. Raises ValueError for one that leads out of it."""
    parts = pathlib.PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"{name!r} is not a name inside a workdir")
    return parts.as_posix()


def lies_in(name: str, folder: str) -> bool:
    """Whether a name is a folder's own, or of something in it."""
    return name == folder or name.startswith(f"{folder}/")


def is_own(name: str) -> bool:
    """Whether a file is one of the workdir's, and not of the store's housekeeping."""
    return not name.rpartition("/")[2].startswith((TEMPORARY, LOCK))
