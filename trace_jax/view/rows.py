"""The rows of the list: what is known of a rollout without its conversation."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from trace_jax.diagnose.evidence import Label
from trace_jax.workdir import policy_name

SUCCESS, PARTLY, ZERO, ERROR = OUTCOMES = ("success", "partly", "zero", "error")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A rollout in the list.

    Attributes:
      key: names it in addresses: its shard, and its number in it.
      where: the workdir that it lies in, from the one that is shown: "", or `rounds/2`, `capabilities/3`.
      folder, policy: the folder of its policy, and the policy's name.
      outcome: one of OUTCOMES.
      ended: its stop reason, or the kind of its error.
      labels: capability to what the diagnosis says of it.
      routed: whether the slots of its tokens are stored.
    """

    key: str
    where: str
    folder: str
    policy: str
    version: Any
    split: str
    environment: str
    task: str
    id: str
    seed: Any
    group: str
    trial: int
    reward: float | None
    outcome: str
    ended: str
    turns: int
    tokens: int | None
    hinted: bool
    labels: Mapping[str, Label] = dataclasses.field(default_factory=dict)
    routed: bool = False


def make_row(key: str, where: str, folder: str, split: str, found: Mapping[str, Any]) -> Row:
    """The row of an entry of `rollout_index`. Raises ValueError, KeyError or TypeError where it is none."""
    policy, reward, tokens = str(found["policy"]["name"] or ""), found["reward"], found["tokens"]
    return Row(
        key=key,
        where=where,
        folder=folder,
        policy=policy if policy_name(policy) == folder else folder,
        version=found["policy"]["version"],
        split=split,
        environment=str(found["environment"]),
        task=str(found["task_id"]),
        id=str(found["id"]),
        seed=found["seed"],
        group=str(found["group"]),
        trial=int(found["trial"]),
        reward=None if reward is None else float(reward),
        outcome=ERROR if reward is None else SUCCESS if found["success"] else PARTLY if reward > 0 else ZERO,
        ended=str(found["stop_reason"] if found["error"] is None else found["error"]),
        turns=int(found["turns"]),
        tokens=None if tokens is None else int(tokens),
        hinted=bool(found["hinted"]),
    )


@dataclasses.dataclass(frozen=True)
class Listing:
    """What is known at a moment.

    Attributes:
      place: of the workdir, or the result files.
      notices: what could not be read, and why.
      unread: how many shards and result files are still to be read.
      looked: False while the first look goes on.
    """

    place: str
    rows: Sequence[Row]
    notices: Sequence[str] = ()
    unread: int = 0
    looked: bool = True

    @functools.cached_property
    def numbers(self) -> dict[str, int]:
        """The key of a row to its number."""
        return {row.key: number for number, row in enumerate(self.rows)}
