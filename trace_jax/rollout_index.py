"""What a list shows of each rollout, in a small file beside its shard: ten thousand are listed without a shard being read.

`<shard>.index.json` is for readers alone. It names the crc32c of the shard that it was made of; where there is none, or one of another
shard (older workdirs, a writer that was killed), the shard says the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rl.trajectory import Trajectory

_SHARD = ".jsonl.zst"


def index_of(shard: str) -> str:
    """The name of a shard's index."""
    return f"{shard.removesuffix(_SHARD)}.index.json"


def entry(t: Trajectory) -> dict[str, Any]:
    """A rollout in a list. `turns` are the agent's messages, `tokens` those that it sampled (None where these are not known); `error` is
    the kind of an infrastructure failure."""
    return {
        "id": t.id,
        "task_id": t.task_id,
        "environment": t.environment,
        "seed": t.seed,
        "group": t.group,
        "trial": t.trial,
        "policy": {key: t.policy.get(key) for key in ("name", "version")},
        "reward": t.reward,
        "success": t.success,
        "stop_reason": t.stop_reason.value,
        "turns": sum(message.get("role") == "assistant" for message in t.messages),
        "tokens": None if t.loss_mask is None else int(t.loss_mask.sum()),
        "error": t.error and t.error.get("kind", ""),
        "hinted": t.hint is not None,
    }


def encode_index(trajectories: Iterable[Trajectory], crc32c: int) -> bytes:
    """The index of a shard with that checksum."""
    return json.dumps({"crc32c": crc32c, "trajectories": [entry(t) for t in trajectories]}, separators=(",", ":")).encode()


def decode_index(data: bytes, crc32c: int | None) -> list[dict[str, Any]] | None:
    """The entries, None where the index is of another shard than the one with that checksum. Raises ValueError, KeyError or TypeError where
    it is damaged."""
    found = json.loads(data)
    return found["trajectories"] if found["crc32c"] == crc32c else None
