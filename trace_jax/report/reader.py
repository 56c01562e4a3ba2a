"""How the report reads a run: four questions, so that it can be given a workdir, a bucket, or a dictionary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from rl.trajectory import ARRAYS, Trajectory, TrajectoryError, decode_shard
from trace_jax.errors import InputError
from trace_jax.workdir import Workdir


class Reader(Protocol):
    """Reads files by the names of the workdir's layout. A file that is not there yet is no error; a damaged one is."""

    def json(self, name: str) -> Any:
        """The content of a JSON file, None where there is none."""

    def jsonl(self, name: str) -> list[dict[str, Any]]:
        """The records of a file of JSON lines, empty where there is none."""

    def list(self, prefix: str) -> list[str]:
        """The names of all files below a folder, sorted."""

    def shard(self, name: str) -> Iterator[Trajectory]:
        """The trajectories of a shard, one at a time; none where there is no such file."""


class WorkdirReader:
    """A workdir as the report reads it."""

    def __init__(self, workdir: Workdir):
        self._workdir = workdir

    def json(self, name: str) -> Any:
        return self._workdir.read_json(name) if self._workdir.exists(name) else None

    def jsonl(self, name: str) -> list[dict[str, Any]]:
        return self._workdir.read_jsonl(name)

    def list(self, prefix: str) -> list[str]:
        return self._workdir.list(prefix)

    def shard(self, name: str) -> Iterator[Trajectory]:
        if not self._workdir.exists(name):
            return
        try:
            yield from decode_shard(self._workdir.read_bytes(name), self._workdir.place(name))
        except TrajectoryError as error:
            raise InputError(f"{error}; remove the file and run its step again") from error


def find_trajectories(read: Reader, folder: str, ids: Iterable[str]) -> dict[str, Trajectory]:
    """Those of the ids that the shards of a folder hold, without their tokens."""
    missing, found = set(ids), {}
    for name in read.list(folder):
        if missing and name.endswith(".jsonl.zst"):
            found |= {t.id: told(t) for t in read.shard(name) if t.id in missing}
            missing -= set(found)
    return found


def told(trajectory: Trajectory) -> Trajectory:
    """What a person reads of a trajectory: without its arrays, which are most of it."""
    return dataclasses.replace(trajectory, **dict.fromkeys(ARRAYS))
