"""The folder that a run lives in: whatever is in it is whole, and the same command goes on from there.

Files are written under another name, synced, and renamed, so that a crash at any moment leaves the old file or the new one. Trajectories go
to shards, listed in a manifest that is written last: a shard that the manifest does not list does not exist. One run at a time holds the
workdir, by a lock that the kernel drops when its owner dies. The layout below it belongs to the steps; names are relative, with `/`.

A run of several processes has one workdir. Process 0 writes and answers for all (see `trace_jax.processes`), each writes its part of a
shard, and all read the shards.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import socket
import subprocess
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trace_jax.config import ROOT, Config, changed_fields
from trace_jax.errors import InputError
from trace_jax.processes import ALONE, Processes

_LOCK, _TEMPORARY = ".lock", ".tmp-"
_RESULTS = ("agents", "rollouts", "diagnosis", "environments", "adapters", "gate", "evaluation")
_PACKAGES = ("trace-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


class Workdir:
    """A local workdir; open it with `Workdir.open`, in a `with` block, so that its lock is given back.

    Attributes:
      root: the absolute folder.
      config: the run's config, None when it was opened without one and holds none yet.
      processes: that have it open together; all of them call its methods, in the same order.
    """

    def __init__(self, root: pathlib.Path, config: Config | None = None, lock: int | None = None, processes: Processes = ALONE):
        self.root, self.config, self._lock, self.processes = root, config, lock, processes

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        config: Config | None = None,
        *,
        resume: bool = True,
        lock: bool = True,
        processes: Processes = ALONE,
    ) -> Workdir:
        """Makes the workdir, or opens the one that an earlier run left.

        Args:
          config: what the run is asked to do; None takes what the workdir holds.
          resume: False refuses a workdir that a run has used.
          lock: False only reads and writes beside a run that holds the workdir.

        Raises:
          InputError: another run holds it, it belongs to another config (the field is named), or it is no workdir.
        """
        workdir = cls(local_folder(path), config, None, processes)

        def begin() -> None:
            workdir.root.mkdir(parents=True, exist_ok=True)
            workdir._lock = _acquire(workdir.root) if lock else None

        try:
            processes.agree(begin)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise InputError(f"--workdir={path}: {error.strerror}; give a folder that can be written") from error
        try:
            workdir._adopt(config, resume, write=lock)
            if lock:
                processes.agree(workdir._sweep)
        except BaseException:
            workdir.close()
            raise
        return workdir

    def close(self) -> None:
        """Gives the lock back; the workdir may then be opened by another run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def produce(self, name: str, write: Callable[[pathlib.Path], Any]) -> pathlib.Path:
        """Has `write` write the file or folder of a name, and returns its path; for libraries with formats of their own."""
        path = self.path(name)

        def produced() -> None:
            write(path)

        self.processes.agree(produced)
        return path

    def within(self, name: str, shared: Iterable[str] = ()) -> Workdir:
        """A folder of this workdir as a workdir of its own, held by the same run.

        Args:
          shared: names of folders of this one that are linked into it.
        """
        inner = Workdir(self.path(name), self.config, None, self.processes)

        def link() -> None:
            inner.root.mkdir(exist_ok=True)
            for folder in shared:
                path, goal = inner.path(folder), self.root / folder
                if not path.is_symlink() and goal.is_dir():
                    path.symlink_to(os.path.relpath(goal, path.parent), target_is_directory=True)

        self.processes.agree(link)
        return inner

    def path(self, name: str) -> pathlib.Path:
        """The local path of a name, its parent folders made."""
        parts = pathlib.PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise ValueError(f"{name!r} is not a name inside a workdir")
        path = self.root / parts
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""
        return self.processes.agree(lambda: (self.root / name).exists())

    def list(self, name: str = "") -> list[str]:
        """The names of all files below a folder, sorted; empty where there is no such folder."""

        def names() -> list[str]:
            files = (path for path in (self.root / name).rglob("*") if path.is_file() and not path.name.startswith((_TEMPORARY, _LOCK)))
            return sorted(path.relative_to(self.root).as_posix() for path in files)

        return self.processes.agree(names)

    def read_bytes(self, name: str) -> bytes:
        """Raises InputError when there is no such file."""
        return self.processes.agree(lambda: self._read(name))

    def read_json(self, name: str) -> Any:
        """Raises InputError when there is no such file or it is no JSON."""
        data = self.read_bytes(name)
        try:
            return json.loads(data)
        except ValueError as error:
            raise InputError(f"{self.root / name}: not JSON ({error}); remove it and run its step again") from error

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a whole file or, when it raises, leaves the old one as it was."""
        self.processes.agree(lambda: _write(self.path(name), data))

    def write_json(self, name: str, value: Any) -> None:
        """Writes readable JSON. Raises ValueError on NaN and infinity, which are none."""
        self.write_bytes(name, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def append_jsonl(self, name: str, record: dict[str, Any]) -> None:
        """Adds one line, whole or not at all; a line that a crash left torn is dropped first."""
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()
        self.processes.agree(lambda: _append(self.path(name), line))

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """The records of a file, empty where there is none; a torn last line is left out.

        Raises:
          InputError: another line is damaged.
        """
        if not self.exists(name):
            return []
        lines = self.read_bytes(name).split(b"\n")[:-1]
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                raise InputError(f"{self.root / name}, line {number}: not JSON ({error}); remove the line") from error
        return records

    def write_shard(self, policy: str, split: str, index: int, trajectories: Iterable[Any]) -> None:
        """Writes shard `index` of `rollouts/<policy>/<split>/`, and then lists it in the folder's manifest.

        Of several processes each writes its part, and the manifest lists all parts or none.

        Args:
          trajectories: `rl.trajectory.Trajectory` records, in the order in which they will be read; this process's part of the batch.
        """
        from rl.trajectory import encode_shard  # numpy: not for `trace-jax --help`

        folder, trajectories, processes = _shard_folder(policy, split), list(trajectories), self.processes
        data = encode_shard(trajectories)
        manifest = {name: entry for name, entry in self._manifest(folder).items() if _shard_index(name) != index}
        part = f"-{processes.index}of{processes.count}" if processes.count > 1 else ""
        _write(self.path(f"{folder}/{index:05d}{part}.jsonl.zst"), data)
        sampled = sum(int(t.loss_mask.sum()) for t in trajectories if t.loss_mask is not None)
        for number, (count, tokens, size) in enumerate(processes.gather(len(trajectories), sampled, len(data))):
            part = f"-{number}of{processes.count}" if processes.count > 1 else ""
            manifest[f"{index:05d}{part}"] = {"trajectories": count, "sampled_tokens": tokens, "bytes": size}
        self.write_json(f"{folder}/manifest.json", {"shards": dict(sorted(manifest.items()))})

    def shards(self, policy: str, split: str) -> list[int]:
        """The indices of the shards that exist whole, in order."""
        return sorted({_shard_index(name) for name in self._manifest(_shard_folder(policy, split))})

    def read_shards(self, policy: str, split: str, indices: Iterable[int] | None = None) -> Iterator[Any]:
        """The trajectories of all shards, or of those named, in order.

        Raises:
          InputError: a shard is missing or damaged.
        """
        folder = _shard_folder(policy, split)
        manifest = self._manifest(folder)
        for index in self.shards(policy, split) if indices is None else indices:
            yield from self._read_shard(folder, index, manifest)

    def _read_shard(self, folder: str, index: int, manifest: dict[str, dict[str, int]]) -> Iterator[Any]:
        from rl.trajectory import TrajectoryError, decode_shard

        parts = sorted((name for name in manifest if _shard_index(name) == index), key=lambda name: (len(name), name))
        for part in parts or [f"{index:05d}"]:
            name = f"{folder}/{part}.jsonl.zst"
            data = self._read(name)  # by every process: it is the largest of all that is read
            if len(data) != manifest.get(part, {}).get("bytes"):
                raise InputError(
                    f"{self.root / name}: not the size that manifest.json says; remove {self.root / folder} and roll out again"
                )
            try:
                yield from decode_shard(data, str(self.root / name))
            except TrajectoryError as error:
                raise InputError(f"{error}; remove {self.root / folder} and roll out again") from error

    def _manifest(self, folder: str) -> dict[str, dict[str, int]]:
        name = f"{folder}/manifest.json"
        return self.read_json(name)["shards"] if self.exists(name) else {}

    def _read(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except FileNotFoundError as error:
            raise InputError(f"{self.root / name}: no such file; the step that writes it has not run in this workdir") from error

    def _adopt(self, config: Config | None, resume: bool = True, *, write: bool = False) -> None:
        """Takes the stored config, or stores the one given."""
        if not self.exists("config.json"):
            stored = {"versions": package_versions(), "revision": source_revision()} if config else {}
        else:
            stored = self.read_json("config.json")
            if not isinstance(stored, dict) or "config" not in stored:
                raise InputError(f"{self.root / 'config.json'}: not written by trace-jax; give another --workdir")
            if not resume:
                raise InputError(f"--workdir={self.root}: holds a run already; give another --workdir")
            old = Config.from_json(stored["config"], str(self.root / "config.json"))
            self.config = config or old
            kept = any((self.root / folder).is_dir() for folder in _RESULTS)  # a run that failed at its start may be begun otherwise
            for name, before, now in changed_fields(old, self.config) if kept else ():
                fix = f"give another --workdir, or --config.{name}={before}"
                raise InputError(f"--workdir={self.root}: its run has config field {name!r} = {before}, asked for is {now}; {fix}")
        if self.config is not None and write and stored.get("config") != self.config.to_json():
            self.write_json("config.json", {"config": self.config.to_json(), **{k: v for k, v in stored.items() if k != "config"}})

    def _sweep(self) -> None:
        """Removes what writers left behind that were killed before the rename."""
        for path in self.root.rglob(f"{_TEMPORARY}*"):
            path.unlink(missing_ok=True)


def local_folder(path: str | os.PathLike) -> pathlib.Path:
    """The absolute folder of a `--workdir`.

    Raises:
      InputError: a `gs://` path, or one of another store.
    """
    if "://" in str(path):
        raise InputError(f"--workdir={path}: this release works in local folders only; give a local path and copy it to the bucket")
    return pathlib.Path(path).expanduser().absolute()


def stored_config(path: str | os.PathLike) -> Config | None:
    """The config of a workdir, None where there is none; takes no lock and makes nothing."""
    root = local_folder(path)
    if not (root / "config.json").is_file():
        return None
    with contextlib.closing(Workdir(root)) as workdir:
        workdir._adopt(None)
        return workdir.config


def policy_name(policy: str) -> str:
    """A policy as file and folder names write it: `adapter:x` is `adapter-x`."""
    return policy.replace(":", "-")


def package_versions() -> dict[str, str]:
    """The versions that a run's figures depend on."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def source_revision() -> str | None:
    """The git commit of the checkout, with `+changes` where it is modified; None for an installed wheel."""
    if not (ROOT / ".git").exists():
        return None
    try:
        changes = "+changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
        return _git("rev-parse", "HEAD") + changes
    except (OSError, subprocess.SubprocessError):
        return None  # no git on this machine, or not its owner's checkout


def _git(*command: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def _acquire(root: pathlib.Path) -> int:
    """An open descriptor that holds the lock of the workdir; closing it, or dying, gives the lock back."""
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise InputError(f"workdir {root} is in use by {owner}; wait for it, or give another --workdir") from error
    os.ftruncate(descriptor, 0)
    now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
    os.write(descriptor, f"pid {os.getpid()} on host {socket.gethostname()} since {now}\n".encode())
    return descriptor


def _write(path: pathlib.Path, data: bytes) -> None:
    """The whole file, or when it raises the old one as it was."""
    temporary = path.with_name(f"{_TEMPORARY}{os.getpid()}-{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _append(path: pathlib.Path, line: bytes) -> None:
    """One more line, behind the last whole one."""
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


def _shard_index(name: str) -> int:
    """3 of `00003` and of `00003-1of4`, a part."""
    return int(name.partition("-")[0])


def _shard_folder(policy: str, split: str) -> str:
    for word in (policy, split):
        if not re.fullmatch(r"[A-Za-z0-9][\w.:-]*", word):
            raise ValueError(f"{word!r} cannot name a folder of rollouts")
    return f"rollouts/{policy_name(policy)}/{split}"


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
