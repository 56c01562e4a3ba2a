"""A prefix of a Google Cloud Storage bucket as a store.

A file is an object. Each write names the generation that it replaces, so that it cannot undo what another process wrote meanwhile; a line
is added by putting the object together of itself and the line. What libraries read and write as files lies in a folder of this machine for
as long as the store is open.
"""

from __future__ import annotations

import pathlib
import posixpath
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

from trace_jax.errors import InputError
from trace_jax.stores.lease import Lease
from trace_jax.stores.mirror import Mirror
from trace_jax.stores.objects import Conflict, Objects
from trace_jax.stores.protocol import LOCK, TEMPORARY, StoreFailed, check_name, is_own, lies_in

_ADDRESS = re.compile(r"gs://([a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/+(.+?)/*")
_LEAVE = 5.0  # seconds for a last answer, twice, when the process ends: a machine that is taken away gives 30
_ATTEMPTS = 3  # of a write that others get in the way of


class Bucket:
    """`gs://bucket/prefix`; `Store` says what its methods do."""

    def __init__(self, address: str, session: _Session | None = None):
        found = _ADDRESS.fullmatch(address)
        if found is None:
            raise InputError(f"--workdir={address}: give gs://BUCKET/PREFIX")
        self._bucket, prefix = found.groups()
        if {"", ".", ".."} & set(prefix.split("/")) or set("#?*[]") & set(prefix):  # libraries take them for something else
            raise InputError(f"--workdir={address}: give a prefix without #, ?, *, [ and ], and without empty folders, . and ..")
        self.address, self._prefix = f"gs://{self._bucket}/{prefix}", f"{prefix}/"
        self._session = session or _Session(self._bucket)
        self._objects = self._session.objects

    def make(self) -> None:
        self._objects.list(self._prefix, most=1)  # which says what cannot be used

    def hold(self) -> None:
        self._session.lease = Lease(Objects(self._bucket), self._prefix + LOCK, self.address)

    def hurry(self) -> None:
        self._objects.patience = _LEAVE

    def close(self) -> None:
        self._session.close()

    def read(self, name: str) -> bytes:
        return self._objects.get(self._prefix + check_name(name))[0]

    def write(self, name: str, data: bytes) -> None:
        self._replace(name, lambda full, generation: self._objects.put(full, data, generation))

    def append(self, name: str, line: bytes) -> None:
        folder, _, file = name.rpartition("/")
        part = f"{self._prefix}{folder}{'/' if folder else ''}{TEMPORARY}{uuid.uuid4().hex}-{file}"

        def add(full: str, generation: int) -> int:
            if not generation:
                return self._objects.put(full, line, 0)
            if full not in self._session.known:  # somebody else's, maybe copied from a disk with a torn line at its end
                found, generation = self._objects.get(full)
                whole = found[: found.rfind(b"\n") + 1]
                if whole != found:
                    return self._objects.put(full, whole + line, generation)
            return self._objects.append(full, line, generation, part)

        self._replace(name, add)

    def _replace(self, name: str, write: Callable[[str, int], int]) -> None:
        """Has `write` replace the generation that is there."""
        full = self._prefix + check_name(name)
        for _ in range(_ATTEMPTS):
            if self._session.lease is not None:
                self._session.lease.check()
            generation = self._session.known.get(full)
            if generation is None:
                found = self._objects.stat(full)
                generation = found.generation if found else 0
            try:
                self._session.known[full] = write(full, generation)
                return
            except Conflict:  # by a command beside the run, or by one that took it over
                self._session.known.pop(full, None)
                if self._session.lease is not None:
                    self._session.lease.renew()
        raise StoreFailed(f"{self.address}/{name}: other processes write it all the time; end them, the same command goes on from there")

    def remove(self, name: str) -> None:
        full = self._prefix + check_name(name)
        gone = [full, *self._objects.list(f"{full}/")]
        self._objects.delete(gone)
        for each in gone:
            self._session.known.pop(each, None)

    def exists(self, name: str) -> bool:
        full = self._prefix + check_name(name)
        return self._objects.stat(full) is not None or bool(self._objects.list(f"{full}/", most=1))

    def list(self, folder: str) -> list[str]:
        return list(self.marks(folder))

    def marks(self, folder: str) -> dict[str, str]:
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        found = {name.removeprefix(self._prefix): str(stat.generation) for name, stat in self._objects.list(prefix).items()}
        return {name: found[name] for name in sorted(found) if is_own(name) and not name.endswith("/")}

    def produce(self, name: str, write: Callable[[pathlib.Path], Any]) -> None:
        scratch = self._session.folder("made")
        path = scratch / check_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(path)
            files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
            files.sort(key=lambda file: (file.stat().st_mtime_ns, file))  # as they were finished: the last says that all are
            for file in files:
                self._replace(file.relative_to(scratch).as_posix(), lambda full, match, file=file: self._objects.put(full, file, match))
        finally:
            shutil.rmtree(scratch)

    def local(self, name: str) -> pathlib.Path:
        root, full, fetched = self._session.folder("local"), self._prefix + check_name(name), self._session.fetched
        listed = ((found, stat.generation) for found, stat in self._objects.list(full).items())
        there = {found: generation for found, generation in listed if lies_in(found, full) and not found.endswith("/")}
        for found in [found for found in fetched if lies_in(found, full) and found not in there]:
            (root / found).unlink(missing_ok=True)
            del fetched[found]
        for found, generation in there.items():
            if fetched.get(found) != generation:
                self._make_way(root, found)
                self._objects.download(found, root / found)
                fetched[found] = generation
        return root / full

    def _make_way(self, root: pathlib.Path, found: str) -> None:
        """Removes the copy of a folder where there is a file now, and of a file where there is a folder; a bucket may hold both."""
        folders = [found[: place.start()] for place in re.finditer("/", found)]
        for name in [name for name in self._session.fetched if name in folders or (name != found and lies_in(name, found))]:
            (root / name).unlink(missing_ok=True)
            del self._session.fetched[name]
        if (root / found).is_dir():
            shutil.rmtree(root / found)

    def log(self, name: str) -> pathlib.Path:
        full = self._prefix + check_name(name)
        path = self._session.mirrored() / full
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() and self._objects.stat(full) is not None:
            self._objects.download(full, path)  # a run that goes on adds to it
            self._session.copied(path)
        return path

    def sweep(self) -> None:
        self._objects.delete([name for name in self._objects.list(self._prefix) if name.rpartition("/")[2].startswith(TEMPORARY)])

    def at(self, folder: str) -> Bucket:
        return Bucket(f"gs://{self._bucket}/{posixpath.normpath(self._prefix + folder)}", self._session)


class _Session:
    """What the stores of one workdir, and of those within it, share. Files of this machine are named like their objects.

    Attributes:
      known: generations of the objects that this process wrote.
      fetched: those of the files in `folder("local")`.
    """

    def __init__(self, bucket: str):
        self._bucket, self.objects = bucket, Objects(bucket)
        self.known: dict[str, int] = {}
        self.fetched: dict[str, int] = {}
        self.lease: Lease | None = None
        self._mirror: Mirror | None = None
        self._root: pathlib.Path | None = None

    def folder(self, purpose: str) -> pathlib.Path:
        """A folder of this machine, which is gone after `close`."""
        if self._root is None:
            self._root = pathlib.Path(tempfile.mkdtemp(prefix="trace-jax-"))
        path = self._root / purpose
        path.mkdir(exist_ok=True)
        return path

    def mirrored(self) -> pathlib.Path:
        """The folder whose files are copied into the bucket."""
        if self._mirror is None:
            self._mirror = Mirror(Objects(self._bucket), self.folder("logs"))
        return self.folder("logs")

    def copied(self, path: pathlib.Path) -> None:
        """The bucket has a file of `mirrored()` as it is."""
        self._mirror.copied(path)

    def close(self) -> None:
        (mirror, self._mirror), (lease, self.lease) = (self._mirror, None), (self.lease, None)
        try:
            whole = mirror is None or mirror.close(_LEAVE, last=lease is None or not lease.lost)
        finally:
            if lease is not None:
                lease.release(_LEAVE)
        if self._root is not None and whole:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None
