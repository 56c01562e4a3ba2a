"""Trajectory lines that anybody can write: `.jsonl`, `.jsonl.zst`, or a folder of them, such as `rollouts/base/train` of a workdir.

A line is a JSON object with `id`, `task_id`, `environment`, `messages` and `reward`; the evidence analyst reads `checks`. All other fields
are those of `rl.trajectory.Trajectory`. What is wrong with one is said with the file, the line, the field and the fix.
"""

from __future__ import annotations

import collections
import io
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import zstandard

from rl.trajectory import Trajectory, TrajectoryError
from trace_jax.benchmarks import TOLERANCE
from trace_jax.benchmarks.own.checks import Misshapen, parse_checks, parse_messages
from trace_jax.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.zst")
_NEEDED = ("id", "task_id", "environment", "messages")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half a sign, where a text was cut in it: no file could hold it, U+FFFD stands for it


def recognises(path: pathlib.Path) -> bool:
    """A file of lines, which are not the predictions of SWE-bench; or a folder with a file whose first line has a `task_id`."""
    if path.is_dir():
        return any('"task_id"' in _first_line(file) for file in _files(path))
    return path.name.endswith(SUFFIXES) and '"model_patch"' not in _first_line(path)


def read(path: pathlib.Path) -> Iterator[Trajectory]:
    """The trajectories of a file, or of the files of a folder in the order of their names.

    A line without `trial` is the next trial of its task; one without `success` is a success from reward 1 on.

    Raises:
      InputError: a file that cannot be read, or a line that is no trajectory.
    """
    seen: dict[str, str] = {}
    trials: collections.Counter[tuple[str, str]] = collections.Counter()
    for file in _files(path):
        for number, line in enumerate(_lines(file), 1):
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            data = _parse(line, where)
            if data["id"] in seen:
                raise InputError(f"{where}, field 'id': {data['id']!r} is also that of {seen[data['id']]}; write task_id#trial")
            seen[data["id"]] = where
            key = (data["environment"], data["task_id"])
            data.setdefault("trial", trials[key])
            trials[key] += 1
            if data.get("reward") is not None:
                data.setdefault("success", data["reward"] >= 1.0 - TOLERANCE)
            try:
                yield Trajectory.from_json(data)
            except TrajectoryError as error:
                raise InputError(f"{where}: {error}; see 'trajectory lines' in docs/own_benchmark.md") from error
    if not seen:
        raise InputError(f"{path}: no trajectory in it, or it is cut short; write it again")


def _parse(line: str, where: str) -> dict[str, Any]:
    """The object of a line, the fields that every reader relies on checked."""

    def no_number(word: str) -> None:
        raise InputError(f"{where}: {word} is no JSON; write a finite number, or null with an error")

    try:
        data = json.loads(line, parse_constant=no_number)
        if _SURROGATE.search(line):
            data = json.loads(json.dumps(data, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); write one object a line, as json.dumps does") from None
    if not isinstance(data, dict):
        raise InputError(f"{where}: {type(data).__name__} instead of an object; write one trajectory a line")
    for name in _NEEDED:
        if name not in data:
            raise InputError(f"{where}, field {name!r}: missing; a line needs {', '.join(_NEEDED)} and reward")
    for name in _NEEDED[:3]:
        if not isinstance(data[name], str) or not data[name]:
            raise InputError(f"{where}, field {name!r}: {data[name]!r} must be a text that is not empty")
    reward, error = data.get("reward"), data.get("error")
    if not (reward is None if error else isinstance(reward, int | float) and not isinstance(reward, bool) and 0 <= reward <= 1):
        fix = 'a number from 0 to 1, or null with an error {"kind", "message"} where no agent was at fault'
        raise InputError(f"{where}, field 'reward': {reward!r} must be {fix}")
    try:
        data["messages"] = parse_messages(data["messages"])
        data["checks"] = parse_checks(data.get("checks", {}))
    except Misshapen as why:
        raise InputError(f"{where}, field {why}") from None
    return data


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    return sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES)) if path.is_dir() else [path]


def _lines(file: pathlib.Path) -> Iterator[str]:
    try:
        with file.open("rb") as raw:
            stream = zstandard.ZstdDecompressor().stream_reader(raw) if file.suffix == ".zst" else raw
            yield from io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from None
    except zstandard.ZstdError as error:
        raise InputError(f"{file}: damaged, or not compressed with zstd ({error}); write it again") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text ({error.reason}); write it as UTF-8") from None


def _first_line(file: pathlib.Path) -> str:
    return next(_lines(file), "")
