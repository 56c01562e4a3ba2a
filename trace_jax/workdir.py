"""The place that a run lives in: whatever is in it is whole, and the same command goes on from there.

A workdir is a local folder or `gs://bucket/prefix`; `trace_jax.stores` has both, with the same promises: a file is the old one or the new
one, whatever happens while it is written, and one run at a time holds the workdir. Trajectories go to shards, listed in a manifest that
is written last: a shard that the manifest does not list does not exist. The layout below it belongs to the steps; names are relative,
with `/`.

A run of several processes has one workdir. Process 0 writes and answers for all (see `trace_jax.processes`), each writes its part of a
shard, and all read the shards.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import google_crc32c

from trace_jax.config import ROOT, Config, changed_fields
from trace_jax.errors import InputError
from trace_jax.processes import ALONE, Processes
from trace_jax.stores import Store, is_remote, open_store
from trace_jax.stores.protocol import lies_in

_SHARED = "shared.json"  # of a workdir within another: {"levels": folders up to that one, "names": {name here: name there}}
_ELSEWHERE = ("rollouts", "diagnosis", "gate", "rounds", "capabilities")  # folders that may be links, to a larger disk
_RESULTS = ("agents", "rollouts", "diagnosis", "environments", "adapters", "gate", "evaluation")
_PACKAGES = ("trace-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")


class Workdir:
    """A workdir; open it with `Workdir.open`, in a `with` block, so that it is given back.

    Attributes:
      config: the run's config, None when it was opened without one and holds none yet.
      processes: that have it open together; all of them call its methods, in the same order.
    """

    def __init__(self, store: Store, config: Config | None = None, processes: Processes = ALONE, outer: Workdir | None = None):
        self.config, self.processes = config, processes
        self._store, self._outer, self._shared = store, outer, {}
        self._held = store  # what is to be given back: a workdir that was opened by itself may lie in another, which is held for it

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
          path: a folder, or `gs://bucket/prefix`.
          config: what the run is asked to do; None takes what the workdir holds.
          resume: False refuses a workdir that a run has used.
          lock: False only reads and writes beside a run that holds the workdir.

        Raises:
          InputError: another run holds it, it belongs to another config (the field is named), or it is no workdir.
        """
        workdir = cls(open_store(path), config, processes)
        try:
            processes.agree(workdir._store.make)
            workdir._find_outer()
            if lock:
                processes.agree(workdir._held.hold)
            workdir._adopt(config, resume, write=lock)
            if lock:
                processes.agree(workdir._store.sweep)
        except BaseException:
            workdir.close()
            raise
        return workdir

    @classmethod
    def look(cls, path: str | os.PathLike) -> Workdir:
        """Opens what is there, finished or not, only to be read: nothing is made or held, its config is not asked for, and a bucket is
        waited for a few seconds only.

        Raises:
          InputError: there is nothing, or something else than a workdir.
        """
        workdir = cls(open_store(path))
        workdir.hurry()
        if not is_remote(path) and not pathlib.Path(workdir.place()).is_dir():
            raise InputError(f"--workdir={path}: no such folder; give one that a run has written, or gs://BUCKET/PREFIX")
        if not any(map(workdir.exists, ("config.json", "rollouts", "diagnosis"))):
            if is_remote(path) or any(pathlib.Path(workdir.place()).iterdir()):
                raise InputError(f"--workdir={path}: holds no run, neither config.json nor rollouts; give the folder that a run writes")
        workdir._find_outer()
        return workdir

    def hurry(self) -> None:
        """The process is about to end: a bucket is waited for a few seconds only."""
        self._store.hurry()

    def close(self) -> None:
        """Gives it back; the workdir may then be opened by another run."""
        self._held.close()

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, name: str = "") -> str:
        """Where people, and orbax, find the workdir, or a file or folder of it: a path, or an address in a bucket."""
        if (there := self._of_outer(name)) is not None:
            return self._outer.place(there)
        return f"{self._store.address}/{name}" if name else self._store.address

    def produce(self, name: str, write: Callable[[pathlib.Path], Any]) -> None:
        """Has `write(path)` write the file or folder of a name; for libraries with formats of their own."""

        def produced() -> None:
            self._store.produce(name, write)

        self.processes.agree(produced)

    def local(self, name: str) -> pathlib.Path:
        """A file or folder of this machine with what the name holds, for libraries to read; there may be none."""
        there = self._of_outer(name)
        return self._store.local(name) if there is None else self._outer.local(there)

    def log(self, name: str) -> pathlib.Path:
        """A file or folder of this machine that this process alone writes, little by little. A bucket gets a copy now and then, and a last
        one with `close`."""
        return self._store.log(name)

    def remove(self, name: str) -> None:
        """Removes a file or a folder."""
        self.processes.agree(lambda: self._store.remove(name))

    def within(self, name: str, shared: Iterable[str] | Mapping[str, str] = ()) -> Workdir:
        """A folder of this workdir as a workdir of its own, held by the same run. Later it may be opened by itself.

        Args:
          shared: names of folders that are this one's, as far as they are there, and are only read; with the names that they have here
            where these are others.
        """
        wanted = shared if isinstance(shared, Mapping) else {folder: folder for folder in shared}
        inner = Workdir(self._store.at(name), self.config, self.processes, outer=self)
        inner._shared = inner._read_shared().get("names", {})

        def share() -> None:
            inner._store.make()
            found = {here: there for here, there in wanted.items() if self.exists(there) and not inner._store.exists(here)}
            if names := {here: there for here, there in sorted(found.items()) if here not in inner._shared}:
                names = {**inner._shared, **names}
                inner.write_json(_SHARED, {"levels": len(pathlib.PurePosixPath(name).parts), "names": names})
            if not inner._store.exists("config.json") and self.exists("config.json"):
                inner.write_json("config.json", self.read_json("config.json"))

        self.processes.agree(share)
        inner._shared = inner._read_shared().get("names", {})
        return inner

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""

        def found() -> bool:
            if (there := self._of_outer(name)) is not None:
                return self._outer.exists(there)
            return self._store.exists(name) or any(folder.startswith(f"{name}/") for folder in self._shared)

        return self.processes.agree(found)

    def list(self, name: str = "", *, own: bool = False) -> list[str]:
        """The names of all files below a folder, sorted; empty where there is no such folder.

        Args:
          own: without what is another workdir's.
        """

        def names() -> list[str]:
            if (there := self._of_outer(name)) is not None:
                return [] if own else self._list_outer(name, there)
            below = [pair for pair in self._shared.items() if not own and (not name or pair[0].startswith(f"{name}/"))]
            return sorted({*self._store.list(name), *(file for pair in below for file in self._list_outer(*pair))})

        return self.processes.agree(names)

    def marks(self) -> dict[str, str]:
        """The names of all files, sorted, each with a mark that changes when the file does; for one process alone."""
        found = dict(self._store.marks(""))
        if not is_remote(self._store.address):  # a walk does not follow links
            for folder in _ELSEWHERE:
                if not any(lies_in(name, folder) for name in found):
                    found |= self._store.marks(folder)
        for here, there in self._shared.items():
            found |= {here + name[len(there) :]: mark for name, mark in self._outer.marks().items() if lies_in(name, there)}
        return dict(sorted(found.items()))

    def read_bytes(self, name: str) -> bytes:
        """Raises InputError when there is no such file."""
        return self.processes.agree(lambda: self._read(name))

    def read_json(self, name: str) -> Any:
        """Raises InputError when there is no such file or it is no JSON."""
        data = self.read_bytes(name)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self.place(name)}: not JSON ({error}); remove it and run its step again") from error

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes a whole file or, when it raises, leaves the old one as it was."""
        self.processes.agree(lambda: self._store.write(name, data))

    def write_json(self, name: str, value: Any) -> None:
        """Writes readable JSON. Raises ValueError on NaN and infinity, which are none."""
        self.write_bytes(name, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())

    def append_jsonl(self, name: str, record: dict[str, Any]) -> None:
        """Adds one line, whole or not at all; a line that a crash left torn is dropped first."""
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()
        self.processes.agree(lambda: self._store.append(name, line))

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
            except (ValueError, RecursionError) as error:
                raise InputError(f"{self.place(name)}, line {number}: not JSON ({error}); remove the line") from error
            if not isinstance(records[-1], dict):
                raise InputError(f"{self.place(name)}, line {number}: {type(records[-1]).__name__} instead of an object; remove the line")
        return records

    def write_shard(self, policy: str, split: str, index: int, trajectories: Iterable[Any]) -> None:
        """Writes shard `index` of `rollouts/<policy>/<split>/`, and then lists it in the folder's manifest.

        Of several processes each writes its part, and the manifest lists all parts or none.

        Args:
          trajectories: `rl.trajectory.Trajectory` records, in the order in which they will be read; this process's part of the batch.
        """
        from rl.trajectory import encode_shard  # numpy: not for `trace-jax --help`
        from trace_jax.rollout_index import encode_index, index_of

        folder, trajectories, processes = _shard_folder(policy, split), list(trajectories), self.processes
        data = encode_shard(trajectories)
        checksum = google_crc32c.value(data)
        manifest = {name: entry for name, entry in self._manifest(folder).items() if _shard_index(name) != index}
        part = f"-{processes.index}of{processes.count}" if processes.count > 1 else ""
        name = f"{folder}/{index:05d}{part}.jsonl.zst"
        self._store.write(index_of(name), encode_index(trajectories, checksum))
        self._store.write(name, data)
        sampled = sum(int(t.loss_mask.sum()) for t in trajectories if t.loss_mask is not None)
        gathered = processes.gather(len(trajectories), sampled, len(data), checksum)
        for number, figures in enumerate(gathered):
            part = f"-{number}of{processes.count}" if processes.count > 1 else ""
            manifest[f"{index:05d}{part}"] = dict(zip(("trajectories", "sampled_tokens", "bytes", "crc32c"), figures, strict=True))
        self.write_json(f"{folder}/manifest.json", {"shards": dict(sorted(manifest.items()))})

    def shards(self, policy: str, split: str) -> list[int]:
        """The indices of the shards that exist whole, in order."""
        return _shard_indices(self._manifest(_shard_folder(policy, split)))

    def read_shards(self, policy: str, split: str, indices: Iterable[int] | None = None) -> Iterator[Any]:
        """The trajectories of all shards, or of those named, in order.

        Raises:
          InputError: a shard is missing or damaged.
        """
        folder = _shard_folder(policy, split)
        manifest = self._manifest(folder)
        for index in _shard_indices(manifest) if indices is None else indices:
            yield from self._read_shard(folder, index, manifest)

    def _read_shard(self, folder: str, index: int, manifest: dict[str, dict[str, int]]) -> Iterator[Any]:
        from rl.trajectory import TrajectoryError, decode_shard

        parts = sorted((name for name in manifest if _shard_index(name) == index), key=lambda name: (len(name), name))
        for part in parts or [f"{index:05d}"]:
            name, fix = f"{folder}/{part}.jsonl.zst", f"remove {self.place(folder)} and roll out again"
            data, entry = self._read(name), manifest.get(part, {})  # by every process: it is the largest of all that is read
            # manifests of old have no checksum
            if len(data) != entry.get("bytes") or google_crc32c.value(data) != entry.get("crc32c", google_crc32c.value(data)):
                raise InputError(f"{self.place(name)}: not the size and the crc32c that manifest.json says; {fix}")
            try:
                yield from decode_shard(data, self.place(name))
            except TrajectoryError as error:
                raise InputError(f"{error}; {fix}") from error

    def _manifest(self, folder: str) -> dict[str, dict[str, int]]:
        name = f"{folder}/manifest.json"
        return self.read_json(name)["shards"] if self.exists(name) else {}

    def _read(self, name: str) -> bytes:
        if (there := self._of_outer(name)) is not None:
            return self._outer._read(there)
        try:
            return self._store.read(name)
        except FileNotFoundError as error:
            raise InputError(f"{self.place(name)}: no such file; the step that writes it has not run in this workdir") from error

    def _of_outer(self, name: str) -> str | None:
        """The name in the workdir that this one lies in, of a file or folder that is that one's."""
        return next((there + name[len(here) :] for here, there in self._shared.items() if lies_in(name, here)), None)

    def _list_outer(self, here: str, there: str) -> list[str]:
        """The files of a folder that is the outer workdir's, by their names here."""
        return [here + file[len(there) :] for file in self._outer.list(there)]

    def _find_outer(self) -> None:
        """The workdir that this one lies in, where it shares something of it."""
        if shared := self._read_shared():
            if not _is_shared(shared):
                raise InputError(f"{self.place(_SHARED)}: not written by trace-jax; copy it again with the workdir that this one lies in")
            self._outer = Workdir(self._store.at("/".join([".."] * shared["levels"])), self.config, self.processes)
            self._outer._find_outer()
            if not self._outer.exists("config.json"):
                raise InputError(f"--workdir={self.place()}: lies no longer in {self._outer.place()}, which it shares files of; copy both")
            self._held, self._shared = self._outer._held, shared["names"]

    def _read_shared(self) -> dict[str, Any]:
        return self.read_json(_SHARED) if self.exists(_SHARED) else {}

    def _adopt(self, config: Config | None, resume: bool = True, *, write: bool = False) -> None:
        """Takes the stored config, or stores the one given."""
        if not self.exists("config.json"):
            stored = {"versions": package_versions(), "revision": source_revision()} if config else {}
        else:
            stored = self.read_json("config.json")
            if not isinstance(stored, dict) or "config" not in stored:
                raise InputError(f"{self.place('config.json')}: not written by trace-jax; give another --workdir")
            if not resume:
                raise InputError(f"--workdir={self.place()}: holds a run already; give another --workdir")
            old = Config.from_json(stored["config"], self.place("config.json"))
            self.config = config or old
            differing = list(changed_fields(old, self.config))
            if differing and any(self.exists(folder) for folder in _RESULTS):  # a run that failed at its start may be begun otherwise
                name, before, now = differing[0]
                fix = f"give another --workdir, or --config.{name}={before}"
                more = f" (and {len(differing) - 1} more that differ)" if len(differing) > 1 else ""
                raise InputError(f"--workdir={self.place()}: its run has config field {name!r} = {before}, asked for is {now}{more}; {fix}")
        if self.config is not None and write and stored.get("config") != self.config.to_json():
            self.write_json("config.json", {"config": self.config.to_json(), **{k: v for k, v in stored.items() if k != "config"}})


def stored_config(path: str | os.PathLike) -> Config | None:
    """The config of a workdir, None where there is none; takes no lock and makes nothing."""
    with contextlib.closing(Workdir(open_store(path))) as workdir:
        if not workdir.exists("config.json"):
            return None
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
    """The git commit of the checkout, with `+changes` where it is modified, or of the archive that was unpacked here (`REVISION`); None for
    an installed wheel."""
    if not (ROOT / ".git").exists():
        archived = (ROOT / "REVISION").read_text().strip() if (ROOT / "REVISION").is_file() else "$"
        return None if archived.startswith("$") else archived
    try:
        changes = "+changes" if _git("status", "--porcelain", "--untracked-files=no") else ""
        return _git("rev-parse", "HEAD") + changes
    except (OSError, subprocess.SubprocessError):
        return None  # no git on this machine, or not its owner's checkout


def _git(*command: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *command], capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def _is_shared(value: Any) -> bool:
    """Whether it is what `within` writes: a number of folders up, and names within workdirs."""
    if not isinstance(value, dict) or value.keys() != {"levels", "names"} or not isinstance(value["names"], dict):
        return False
    names = [*value["names"], *value["names"].values()]
    inside = all(isinstance(name, str) and name and ".." not in name.split("/") and name[0] != "/" for name in names)
    return inside and isinstance(value["levels"], int) and 1 <= value["levels"] <= 99


def _shard_indices(names: Iterable[str]) -> list[int]:
    return sorted({_shard_index(name) for name in names})


def _shard_index(name: str) -> int:
    """3 of `00003` and of `00003-1of4`, a part."""
    return int(name.partition("-")[0])


def _shard_folder(policy: str, split: str) -> str:
    for word in (policy, split):
        if not re.fullmatch(r"[A-Za-z0-9][\w.:-]*", word):
            raise ValueError(f"{word!r} cannot name a folder of rollouts")
    return f"rollouts/{policy_name(policy)}/{split}"
