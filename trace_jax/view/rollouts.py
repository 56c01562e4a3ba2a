"""What rollouts there are: looked for whenever a page is asked for, so that the list follows a run that is under way.

A look lists the files, then reads the manifests and indices that are new, side by side, since each may lie in a bucket. Shards without an
index (of an older run) and result files of benchmarks are read one after the other behind the pages, which say how many are to come.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl.trajectory import Trajectory
from trace_jax.diagnose.evidence import Label
from trace_jax.diagnose.select import KNOWN
from trace_jax.errors import InputError, Unfinished
from trace_jax.evaluate.hygiene import MINED
from trace_jax.rollout_index import decode_index, entry, index_of
from trace_jax.stores import is_remote
from trace_jax.view.rows import Listing, Row, make_row
from trace_jax.view.shards import Shard, Shards
from trace_jax.workdir import Workdir, policy_name

RESULTS = "result files"  # where the rollouts of these are
_THREADS = 8  # of a look; the client of a bucket keeps ten connections
_FRESH, _FRESH_REMOTE = 0.5, 5.0  # seconds for which what was found holds
_MANIFEST = re.compile(r"(?:.+/)?rollouts/[^/]+/[^/]+/manifest\.json")
_EVIDENCE, _EXAMPLES = "diagnosis/evidence.jsonl", "gate/examples.jsonl.zst"
_TARGET = ("heldout", "train")  # splits of the target; all others are seeds of capability environments


class Rollouts:
    """The rollouts of a workdir, or of result files; may be asked by several threads.

    Args:
      workdir: of `Workdir.look`, or None.
      results: result files of benchmarks.
    """

    def __init__(self, workdir: Workdir | None, results: Sequence[str] = ()):
        self._workdir, self._results = workdir, _Results(results)
        self.place = workdir.place() if workdir else ", ".join(results)
        self.alone = tuple(results) if workdir is None else ()  # result files without a workdir have no labels
        self._fresh = _FRESH_REMOTE if is_remote(self.place) else _FRESH
        self._shards = Shards(workdir) if workdir else None
        self._files: dict[str, tuple[str, Any]] = {}  # JSON files with their marks
        self._looked, self._look = 0.0, None
        self._lock = threading.Lock()  # of what follows
        self._marks: dict[str, str] = {}  # all files as the last look found them
        self._folders: dict[str, list[Shard]] = {}
        self._rows: dict[Shard, list[Row]] = {}
        self._labels: dict[str, dict[str, dict[str, Label]]] = {}  # where to id to capability
        self._examples: dict[str, dict[str, Trajectory]] = {}  # where to id
        self._notices: dict[str, str] = {}  # by the file
        self._waiting: set[str] = set()  # files that are read behind the pages
        self._changes, self._shown = 1, (0, Listing(self.place, ()))
        self._one = concurrent.futures.ThreadPoolExecutor(1, "look")
        self._many = concurrent.futures.ThreadPoolExecutor(_THREADS, "read")
        self._behind: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # a daemon: Ctrl-C does not wait for a large file
        threading.Thread(target=self._read_behind, name="behind", daemon=True).start()
        if results:
            self._later(self.place, self._results.read)

    def close(self) -> None:
        """Ends the threads when what they read is read."""
        self._behind.put(None)
        for pool in (self._one, self._many):
            pool.shutdown(wait=False, cancel_futures=True)

    def now(self, patience: float = 1.0) -> Listing:
        """What there is. Looks for it first, and waits for that so many seconds."""
        if self._workdir:
            with self._lock:
                if self._look is None or (self._look.done() and time.monotonic() - self._looked > self._fresh):
                    self._look = self._one.submit(self._find)
                    self._look.add_done_callback(_surprise)
                look = self._look
            concurrent.futures.wait([look], patience)
        with self._lock:
            if self._shown[0] != self._changes:
                self._shown = self._changes, self._listing()
            return self._shown[1]

    def line(self, row: Row) -> bytes:
        """The trajectory's line of JSON. Raises InputError when its shard cannot be read."""
        if row.where == RESULTS:
            return json.dumps(self._results.found[_number(row)].to_json()).encode()
        return self._shards.line(self._shard(row), _number(row))

    def trajectory(self, row: Row) -> Trajectory:
        """The whole record, with the slots of its tokens where the examples of the gate have them. Raises as `line`."""
        if row.where == RESULTS:
            return self._results.found[_number(row)]
        shard = self._shard(row)
        found = self._shards.decode(shard, _number(row), self._shards.line(shard, _number(row)))
        with self._lock:
            example = self._examples.get(row.where, {}).get(row.id) if row.routed else None
        if found.slots is None and example is not None and np.array_equal(example.tokens, found.tokens):
            found = dataclasses.replace(found, slots=example.slots)
        return found

    def file(self, where: str, name: str) -> Any:
        """A JSON file of a workdir within this one, or of this one where that has none; None where neither has it whole."""
        with self._lock:
            found = next((full for full in (_join(where, name), name) if full in self._marks), None)
            mark = self._marks.get(found)
        if found is None:
            return None
        if self._files.get(found, ("",))[0] != mark:
            with self._told(found):
                self._files[found] = mark, self._workdir.read_json(found)
        return self._files.get(found, (mark, None))[1]

    def _shard(self, row: Row) -> Shard:
        stem = row.key.rpartition("/")[0]
        with self._lock:
            for shard in self._folders.get(stem.rpartition("/")[0], ()):
                if _stem(shard) == stem:
                    return shard
        raise InputError(f"{self._workdir.place(stem)}: no longer there; load the list again")

    # --- a look: in its own thread, which hands what it finds to many

    def _find(self) -> None:
        found = None
        with self._told(""):
            found = self._workdir.marks()
        if found is not None:
            with self._lock:
                before, self._marks = self._marks, found
                self._folders = {folder: shards for folder, shards in self._folders.items() if f"{folder}/manifest.json" in found}
                self._changes += 1
            self._read_new([name for name, mark in found.items() if before.get(name) != mark])
        self._looked = time.monotonic()

    def _read_new(self, names: Sequence[str]) -> None:
        self._all(self._read_manifest, filter(_MANIFEST.fullmatch, names))
        self._all(self._read_labels, _called(names, _EVIDENCE))
        if MINED in names:
            self._all(self._read_mined, [MINED])
        with self._lock:
            new = [shard for shards in self._folders.values() for shard in shards if shard not in self._rows]
            new = [shard for shard in new if shard.name not in self._waiting]
        self._all(self._read_index, new, lambda shard: index_of(shard.name))
        for name in _called(names, _EXAMPLES):
            self._later(name, functools.partial(self._read_examples, name))

    def _read_manifest(self, name: str) -> None:
        listed, folder = self._workdir.read_json(name), name.rpartition("/")[0]
        try:
            shards = [Shard.listed(f"{folder}/{stem}.jsonl.zst", found) for stem, found in listed["shards"].items()]
            if any(shard.name.count("/") != name.count("/") for shard in shards):
                raise TypeError("a shard of another folder")
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{self._workdir.place(name)}: damaged; remove its folder and roll out again") from error
        with self._lock:
            self._folders[folder] = shards
            self._changes += 1

    def _read_index(self, shard: Shard) -> None:
        """Of a shard; where there is none, the shard itself is read later."""
        name, rows = index_of(shard.name), None
        try:
            if name in self._marks:
                found = decode_index(self._workdir.read_bytes(name), shard.crc32c)
                rows = None if found is None else _rows(shard, found)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise InputError(f"{self._workdir.place(name)}: damaged; its shard is read instead, remove it") from error
        finally:
            if rows is None:
                self._later(shard.name, functools.partial(self._read_shard, shard))
        if rows is not None:
            self._keep(shard, rows)

    def _read_shard(self, shard: Shard) -> None:
        rows = []
        try:
            lines = self._shards.read(shard)
            rows = _rows(shard, (self._shards.entry(shard, number, line) for number, line in enumerate(lines)))
        finally:
            self._keep(shard, rows)

    def _keep(self, shard: Shard, rows: list[Row]) -> None:
        with self._lock:
            self._rows[shard] = rows
            self._changes += 1

    def _read_labels(self, name: str) -> None:
        labels: dict[str, dict[str, Label]] = {}
        for record in self._workdir.read_jsonl(name):
            try:
                label = Label(**{key: value for key, value in record.items() if key != "passed"})
                if not all(isinstance(value, int | None if key == "message_index" else str) for key, value in vars(label).items()):
                    raise TypeError("a field of another type")
            except TypeError as error:
                raise InputError(f"{self._workdir.place(name)}: not labels of a diagnosis; diagnose again") from error
            labels.setdefault(label.trajectory, {})[label.capability] = label
        with self._lock:
            self._labels[_where(name, _EVIDENCE)] = labels
            self._changes += 1

    def _read_examples(self, name: str) -> None:
        shard = Shard(name, None, None)
        lines = enumerate(self._shards.read(shard))
        found = {t.id: t for t in (self._shards.decode(shard, number, line) for number, line in lines) if t.slots is not None}
        with self._lock:
            self._examples[_where(name, _EXAMPLES)] = found
            self._changes += 1

    def _read_mined(self, name: str) -> None:
        """A workdir that was diagnosed from result files shows these, as far as they are still there."""
        mined = self._workdir.read_json(name)
        files = mined.get("results", []) if isinstance(mined, dict) else None
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise InputError(f"{self._workdir.place(name)}: not what a diagnosis writes; diagnose again")
        if files:
            self._results = _Results(files)
            self._later(", ".join(files), self._results.read)

    # --- how things are read

    def _all(self, read: Callable[[Any], None], things: Iterable[Any], name: Callable[[Any], str] = str) -> None:
        """Reads them side by side."""

        def one(thing: Any) -> None:
            with self._told(name(thing)):
                read(thing)

        for _ in self._many.map(one, things):
            continue

    def _later(self, name: str, read: Callable[[], None]) -> None:
        """Reads it when all that was to be read before is read."""

        def behind() -> None:
            try:
                with self._told(name):
                    read()
            finally:
                with self._lock:
                    self._waiting.discard(name)
                    self._changes += 1

        with self._lock:
            self._waiting.add(name)
        self._behind.put(behind)

    def _read_behind(self) -> None:
        """One after the other, each in a thread: what no notice is made of ends that one alone, and is printed."""
        for job in iter(self._behind.get, None):
            one = threading.Thread(target=job, name="behind", daemon=True)
            one.start()
            one.join()

    @contextlib.contextmanager
    def _told(self, name: str) -> Any:
        """What is wrong with a file becomes a notice, until it can be read. A store that does not answer is asked again."""
        told = None
        try:
            yield
        except InputError as error:
            told = str(error)
        except (Unfinished, OSError) as error:
            told = f"{self.place}: not to be read at the moment: {error}"
            self._marks.pop(name, None)
        with self._lock:
            self._changes += self._notices.get(name) != told
            self._notices.pop(name, None)
            if told:
                self._notices[name] = told

    def _listing(self) -> Listing:
        folders = sorted(self._folders, key=_place)
        rows = [row for folder in folders for shard in self._folders[folder] for row in self._rows.get(shard, ())]
        rows = [self._with_labels(row) for row in (*rows, *self._results.rows)]
        notices = [self._notices[name] for name in sorted(self._notices)]
        return Listing(self.place, rows, notices, len(self._waiting), looked=self._workdir is None or self._looked > 0)

    def _with_labels(self, row: Row) -> Row:
        """The row with what was read beside its shard."""
        mined = bool(self._results.rows)
        if row.where == RESULTS:
            labels = self._labels.get("", {}).get(row.id)
        elif row.split == "train" and row.folder == ("previous" if _join(row.where, KNOWN) in self._marks else "base") and not mined:
            labels = self._labels.get(row.where, {}).get(row.id)
        else:
            labels = None
        routed = row.folder == "composed" and row.split == "heldout" and row.id in self._examples.get(row.where, ())
        return dataclasses.replace(row, labels=labels or {}, routed=routed) if labels or routed else row


class _Results:
    """Result files of benchmarks, which are read whole."""

    def __init__(self, files: Sequence[str]):
        self._files = files
        self.found: list[Trajectory] = []
        self.rows: list[Row] = []

    def read(self) -> None:
        """Raises InputError when one cannot be read."""
        from trace_jax.benchmarks.results import read_results  # the formats of benchmarks: not for a workdir's own rollouts

        found = read_results(self._files)
        self.rows = [
            make_row(f"results/{number}", RESULTS, policy_name(t.policy.get("name") or ""), t.split, entry(t))
            for number, t in enumerate(found)
        ]
        self.found = found


def _surprise(job: concurrent.futures.Future) -> None:
    """What no notice was made of is a fault of ours."""
    if not job.cancelled() and (error := job.exception()):
        traceback.print_exception(error)


def _rows(shard: Shard, entries: Iterable[Mapping[str, Any]]) -> list[Row]:
    folder, stem = shard.name.rpartition("/")[0], _stem(shard)
    where, _, below = f"/{folder}".rpartition("/rollouts/")
    policy, split = below.split("/")
    return [make_row(f"{stem}/{number}", where[1:], policy, split, found) for number, found in enumerate(entries)]


def _stem(shard: Shard) -> str:
    return shard.name.removesuffix(".jsonl.zst")


def _number(row: Row) -> int:
    return int(row.key.rpartition("/")[2])


def _place(folder: str) -> tuple[bool, int, str]:
    """Where the list begins: the run's own rollouts before those of workdirs within it, the target's tasks before seeds of environments."""
    split = folder.rpartition("/")[2]
    return not folder.startswith("rollouts/"), _TARGET.index(split) if split in _TARGET else len(_TARGET), folder


def _join(where: str, name: str) -> str:
    return f"{where}/{name}" if where else name


def _where(name: str, file: str) -> str:
    """The workdir, within the one that is shown, that has a file of its layout."""
    return name.removesuffix(file).rstrip("/")


def _called(names: Iterable[str], file: str) -> list[str]:
    return [name for name in names if f"/{name}".endswith(f"/{file}")]
