"""The one record of an episode: sampled, stored, diagnosed, trained on and shown without ever changing shape.

A trajectory that we sampled carries, per token, the id, whether the policy sampled it (the loss mask), its log-prob under the law that
sampled it, the index of its turn and the policy version. A trajectory that another tool sampled has messages, reward and checks only.
One trajectory is one JSON line; a shard is a zstandard-compressed file of such lines.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import zstandard


class StopReason(enum.StrEnum):
    """Why an episode ended."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    INVALID_ACTION = "invalid_action"
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"


# how an episode may end that no infrastructure ended
ENDS = tuple(reason.value for reason in StopReason if reason not in (StopReason.ENVIRONMENT_ERROR, StopReason.ENGINE_ERROR))

_TOKEN_ARRAYS = {"tokens": np.int32, "loss_mask": np.int8, "logprobs": np.float32, "turns": np.int32, "versions": np.int32}

# beside the tokens: what each layer chose, as dtype and the names of the axes after the tokens'
_LAYER_ARRAYS = {"slots": (np.int8, ("layers",)), "experts": (np.int16, ("sparse layers", "k"))}

ARRAYS = (*_TOKEN_ARRAYS, *_LAYER_ARRAYS)  # the fields that are most of a record, and nothing that a person reads

_TEXTS = ("id", "environment", "task_id", "split", "group", "stop_reason")
_OBJECTS = ("policy", "checks", "metrics")
_OBJECTS_OR_NULL = ("hint", "record", "error")


class TrajectoryError(ValueError):
    """A record that is not a trajectory; the message names the trajectory and the field."""


@dataclasses.dataclass(kw_only=True)
class Trajectory:
    """One episode.

    Attributes:
      id: unique in its file, usually `task_id#trial`.
      seed: the environment seed, None for tasks of a benchmark that has none.
      group: rollouts that share a group are normalised against each other.
      policy: `{"name", "version"}` of the policy that sampled it.
      messages: OpenAI-style messages, `arguments` of a tool call as a dictionary. System message first.
      reward: in [0, 1]; None exactly when `error` is set.
      checks: `{name: {"passed", "expected", "actual", "message_index"}}`, the grader's evidence.
      tokens, loss_mask, logprobs, turns, versions: [T], all present or all None. `logprobs` is 0 where the mask is 0.
      slots: [T, layers] int8, the slot that each layer chose, where the policy routes.
      experts: [T, sparse layers, k] int16, the experts that each token took as an input, where the engine says; -1 where it does not.
      record: what a benchmark's own program keeps of the episode, for the writers of its result files.
      error: `{"kind", "message"}` of an infrastructure failure; such a trajectory is never trained on and never counted as the
        agent's failure.
    """

    id: str
    environment: str
    task_id: str
    split: str = ""
    seed: int | None = None
    group: str = ""
    trial: int = 0
    policy: dict[str, Any] = dataclasses.field(default_factory=lambda: {"name": "", "version": 0})
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reward: float | None = None
    success: bool = False
    stop_reason: str = StopReason.DONE
    checks: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    tokens: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    logprobs: np.ndarray | None = None
    turns: np.ndarray | None = None
    versions: np.ndarray | None = None
    slots: np.ndarray | None = None
    experts: np.ndarray | None = None
    hint: dict[str, Any] | None = None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    record: dict[str, Any] | None = None
    error: dict[str, str] | None = None

    def __post_init__(self):
        def fail(field: str, why: str):
            raise TrajectoryError(f"trajectory {self.id!r}, field {field!r}: {why}")

        if not isinstance(self.id, str) or not self.id:
            fail("id", "must be a non-empty string")
        if self.stop_reason not in set(StopReason):
            fail("stop_reason", f"{self.stop_reason!r} is not one of {[s.value for s in StopReason]}")
        self.stop_reason = StopReason(self.stop_reason)
        if (self.reward is None) != (self.error is not None):
            fail("reward", "must be null exactly when the trajectory has an error")
        if self.reward is not None and not (math.isfinite(self.reward) and 0.0 <= self.reward <= 1.0):
            fail("reward", f"{self.reward} is outside [0, 1]")
        present = [name for name in _TOKEN_ARRAYS if getattr(self, name) is not None]
        if present and len(present) != len(_TOKEN_ARRAYS):
            fail(present[0], f"the token arrays {list(_TOKEN_ARRAYS)} must be all present or all absent")
        for name in present:
            setattr(self, name, np.asarray(getattr(self, name), _TOKEN_ARRAYS[name]))
            if getattr(self, name).shape != self.tokens.shape or self.tokens.ndim != 1:
                fail(name, f"has shape {getattr(self, name).shape}, the tokens {self.tokens.shape}")
        if present and np.any(self.logprobs[self.loss_mask == 0] != 0.0):
            fail("logprobs", "must be 0 where the loss mask is 0")
        for name, (dtype, axes) in _LAYER_ARRAYS.items():
            if getattr(self, name) is not None:
                value = np.asarray(getattr(self, name), dtype)
                setattr(self, name, value)
                if present and (value.ndim != 1 + len(axes) or len(value) != len(self.tokens)):
                    fail(name, f"has shape {value.shape}, expected [{', '.join([str(len(self.tokens)), *axes])}]")

    def to_json(self) -> dict[str, Any]:
        """The JSON object of one line; absent optional fields are left out."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name in {*ARRAYS, "hint", "record", "error"}:
                continue
            if field.name == "logprobs":
                # nine significant digits restore a float32 exactly
                value = [float(f"{x:.9g}") for x in value]
            elif isinstance(value, np.ndarray):
                value = value.tolist()
            elif isinstance(value, StopReason):
                value = value.value
            out[field.name] = value
        return out

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trajectory:
        """Inverse of `to_json`.

        Raises:
          TrajectoryError: an unknown or missing field, or one that breaks the record's rules.
        """
        if not isinstance(data, dict):
            raise TrajectoryError(f"a trajectory is a JSON object, found {type(data).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise TrajectoryError(f"trajectory {data.get('id')!r}: unknown field {unknown[0]!r}")
        missing = sorted({"id", "environment", "task_id"} - set(data))
        if missing:
            raise TrajectoryError(f"trajectory {data.get('id')!r}: missing field {missing[0]!r}")
        _check_types(data)
        try:
            return cls(**data)
        except TrajectoryError:
            raise
        except (TypeError, ValueError, OverflowError) as error:  # of NumPy, which says nothing of the field
            raise TrajectoryError(f"trajectory {data['id']!r}: an array of tokens is not of numbers of its kind ({error})") from error


def _check_types(data: dict[str, Any]) -> None:
    """Raises TrajectoryError at the first field of another type, so that readers may rely on what a trajectory is."""

    def need(field: str, met: bool, kind: str) -> None:
        if not met:
            raise TrajectoryError(f"trajectory {data['id']!r}, field {field!r}: must be {kind}")

    for field in data.keys() & {*_TEXTS}:
        need(field, isinstance(data[field], str), "a text")
    for field in data.keys() & {*_OBJECTS}:
        need(field, isinstance(data[field], dict), "an object")
    for field in data.keys() & {*_OBJECTS_OR_NULL}:
        need(field, isinstance(data[field], dict | None), "an object or null")
    need("reward", isinstance(data.get("reward"), int | float | None), "a number or null")
    need("trial", isinstance(data.get("trial", 0), int), "a whole number")
    need("policy", isinstance(data.get("policy", {}).get("name"), str | None), "an object whose name is a text")
    need("messages", isinstance(messages := data.get("messages", []), list), "a list")
    for message in messages:
        need("messages", isinstance(message, dict), "objects")
        calls = message.get("tool_calls") or []
        need("messages", isinstance(calls, list) and all(isinstance(call, dict) for call in calls), "objects whose tool_calls are objects")
    for check in data.get("checks", {}).values():
        need("checks", isinstance(check, dict) and "passed" in check, 'objects with "passed"')
    for value in data.get("metrics", {}).values():
        need("metrics", isinstance(value, int | float), "numbers")


def encode_shard(trajectories: Iterable[Trajectory]) -> bytes:
    """A `.jsonl.zst` shard of the trajectories, in order."""
    lines = (json.dumps(t.to_json(), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n" for t in trajectories)
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress("".join(lines).encode())


def decode_shard(data: bytes, name: str = "shard") -> Iterator[Trajectory]:
    """The trajectories of a shard.

    Raises:
      TrajectoryError: the bytes are cut short or are no such shard; the message carries `name` and the line.
    """
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data))
    number = 0
    try:
        for line in io.TextIOWrapper(reader, encoding="utf-8"):
            number += 1
            if not line.endswith("\n"):
                raise TrajectoryError("the file is cut short")
            yield Trajectory.from_json(json.loads(line))
    except (zstandard.ZstdError, ValueError, RecursionError) as error:  # also not UTF-8, not JSON, no trajectory
        raise TrajectoryError(f"{name}, line {number}: {error}") from error
