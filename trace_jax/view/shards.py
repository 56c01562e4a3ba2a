"""Shards as they lie in a workdir: their lines, of which a page needs one, and of which the last used are kept."""

from __future__ import annotations

import collections
import json
import re
import threading
from typing import Any, NamedTuple

import google_crc32c
import zstandard

from rl.trajectory import ARRAYS, Trajectory, TrajectoryError
from trace_jax.errors import InputError
from trace_jax.rollout_index import entry
from trace_jax.workdir import Workdir

_KEPT = 256 << 20  # bytes of decompressed shards
_ARRAYS = re.compile(rb',"(?:%s)":\[[\d\[\],.eE+-]*\]' % "|".join(ARRAYS).encode())
_MASK = re.compile(rb',"loss_mask":\[([01,]*)\]')
_FIX = "remove its folder and roll out again"


class Shard(NamedTuple):
    """A shard as the manifest of its folder lists it. Manifests of old have no crc32c; files beside the rollouts have no manifest."""

    name: str
    size: int | None
    crc32c: int | None

    @classmethod
    def listed(cls, name: str, entry: dict[str, Any]) -> Shard:
        """By its entry in the manifest. Raises KeyError, TypeError or AttributeError where it is none."""
        size, crc32c = entry["bytes"], entry.get("crc32c")
        if not isinstance(size, int) or not isinstance(crc32c, int | None):
            raise TypeError("not the size and the crc32c of a shard")
        return cls(name, size, crc32c)


class Shards:
    """The lines of a workdir's shards; may be asked by several threads."""

    def __init__(self, workdir: Workdir, kept: int = _KEPT):
        self._workdir, self._most, self._lock = workdir, kept, threading.Lock()
        self._kept: collections.OrderedDict[Shard, tuple[list[bytes], int]] = collections.OrderedDict()

    def line(self, shard: Shard, number: int) -> bytes:
        """A line, without its end. Raises InputError when the shard is missing, damaged or shorter than that."""
        with self._lock:
            lines, size = self._kept.pop(shard, (None, 0))
        if lines is None:
            lines = self.read(shard)
            size = sum(map(len, lines))
        with self._lock:
            self._kept[shard] = lines, size
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > self._most:
                self._kept.popitem(last=False)
        if number >= len(lines):
            raise InputError(f"{self._workdir.place(shard.name)}: has fewer lines than its index; remove the index beside it")
        return lines[number]

    def read(self, shard: Shard) -> list[bytes]:
        """All lines. Raises InputError when the shard is missing or damaged."""
        place, data = self._workdir.place(shard.name), self._workdir.read_bytes(shard.name)
        if shard.size not in (None, len(data)) or shard.crc32c not in (None, google_crc32c.value(data)):
            raise InputError(f"{place}: damaged, not the size and the crc32c that manifest.json says; {_FIX}")
        try:
            with zstandard.ZstdDecompressor().stream_reader(data) as stream:
                return stream.read().split(b"\n")[:-1]
        except zstandard.ZstdError as error:
            raise InputError(f"{place}: damaged ({error}); {_FIX}") from error

    def entry(self, shard: Shard, number: int, line: bytes) -> dict[str, Any]:
        """The line's entry in an index. What is long in it, arrays of tokens, is not parsed. Raises as `decode`."""
        mask = _MASK.search(line)
        try:
            short = Trajectory.from_json(json.loads(_ARRAYS.sub(b"", line)))
            return entry(short) | {"tokens": mask[1].count(b"1") if mask else None}
        except (TrajectoryError, ValueError, RecursionError):  # written otherwise than we do
            return entry(self.decode(shard, number, line))

    def decode(self, shard: Shard, number: int, line: bytes) -> Trajectory:
        """The trajectory of a line. Raises InputError when it is none."""
        try:
            return Trajectory.from_json(json.loads(line))
        except (TrajectoryError, ValueError, RecursionError) as error:
            raise InputError(f"{self._workdir.place(shard.name)}, line {number + 1}: {error}; {_FIX}") from error
