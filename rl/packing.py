"""Trajectories into rows of one fixed length, so that the jitted steps see few shapes and little padding.

Several trajectories share a row; segment ids keep their attention apart and positions restart at 0. The layout is first-fit decreasing with
ties broken by index: a function of the trajectories alone, so every host that reads the same batch computes the same rows. Where each has a
row of its own the order is the same.

Position t predicts token t + 1, so all per-token arrays are those of the *target*. What comes after the last sampled token of a trajectory
cannot enter the loss and is not packed; a hint is cut out, since the policy is to act without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from rl.trajectory import Trajectory


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows. All arrays but `experts` are [N, T]; padding has segment id 0, mask 0 and trajectory -1.

    Attributes:
      tokens: int32 input tokens.
      targets: int32, the next token of the same trajectory, 0 where there is none.
      mask: float32, 1 where the target was sampled by the policy.
      logprobs: float32 log-prob of the target under the law that sampled it, 0 where the mask is 0.
      advantages: float32, of the trajectory.
      segment_ids: int32, 1, 2, ... within a row.
      positions: int32, position within the trajectory as packed.
      trajectory: int32, index into the list that was packed.
      versions: int32, policy version that sampled the target.
      hinted: int32, 1 where the trajectory was sampled with a hint, which is not among the tokens.
      experts: int32 [N, T, sparse layers, k], the experts that the engine took for each input token, -1 where it did not say; None where
        it never did.
    """

    tokens: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray
    trajectory: np.ndarray
    versions: np.ndarray
    hinted: np.ndarray
    experts: np.ndarray | None = None

    @property
    def action_tokens(self) -> float:
        """N of the loss: the sampled tokens of the whole batch, before it is cut into micro-batches."""
        return float(self.mask.sum())

    def micro_batches(self, rows: int) -> Iterator[Batch]:
        """Slices of `rows` rows, in order.

        Raises:
          ValueError: the batch was packed for another number of rows.
        """
        if len(self.tokens) % rows:
            raise ValueError(f"{len(self.tokens)} rows do not divide into micro-batches of {rows}; pack with micro_rows={rows}")
        for start in range(0, len(self.tokens), rows):
            yield jax.tree.map(lambda x, start=start: x[start : start + rows], self)


class PackingError(ValueError):
    """A trajectory that cannot be trained on; the message names it."""


def without_hint(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """The token arrays of a trajectory, the hint's token span cut out.

    Raises:
      PackingError: no tokens, a hint without a usable `token_span`, or a span that covers sampled tokens.
    """
    if trajectory.tokens is None:
        raise PackingError(f"trajectory {trajectory.id!r} has no tokens: only trajectories that were sampled here can be packed")
    names = ("tokens", "loss_mask", "logprobs", "versions", "experts")
    arrays = {name: getattr(trajectory, name) for name in names if getattr(trajectory, name) is not None}
    if trajectory.hint is None:
        return arrays
    length, span = len(trajectory.tokens), trajectory.hint.get("token_span")
    if span is None or len(span) != 2 or not 0 <= span[0] <= span[1] <= length:
        raise PackingError(f"trajectory {trajectory.id!r}, field 'hint': token_span {span!r} is not a span of its {length} tokens")
    start, end = span
    if arrays["loss_mask"][start:end].any():
        raise PackingError(f"trajectory {trajectory.id!r}, field 'hint': token_span {list(span)} covers sampled tokens")
    return {name: np.concatenate([x[:start], x[end:]]) for name, x in arrays.items()}


def first_fit_decreasing(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of indices: longest first, each into the first row with room. Items of length 0 are left out."""
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not lengths[index]:
            continue
        row = next((r for r, free in enumerate(room) if free >= lengths[index]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[float] | np.ndarray,
    *,
    lengths: Sequence[int],
    micro_rows: int = 1,
    packed: bool = True,
) -> Batch:
    """Packs trajectories into rows of the smallest of `lengths` that holds the longest of them.

    Args:
      advantages: [n], one for each trajectory.
      lengths: the row lengths that may be compiled, a few.
      micro_rows: the number of rows is padded to a multiple of it.
      packed: trajectories may share a row.

    Raises:
      PackingError: a trajectory that is longer than every row length, or that has no tokens.
    """
    if len(advantages) != len(trajectories):
        raise ValueError(f"{len(advantages)} advantages for {len(trajectories)} trajectories")
    arrays = [without_hint(t) for t in trajectories]
    # input positions up to the one that predicts the last sampled token
    used = [int(np.flatnonzero(a["loss_mask"][1:])[-1]) + 1 if a["loss_mask"][1:].any() else 0 for a in arrays]
    longest = max(range(len(used)), key=used.__getitem__, default=None)
    need = 0 if longest is None else used[longest]
    row_length = min((length for length in lengths if length >= need), default=None)
    if row_length is None:
        raise PackingError(
            f"trajectory {trajectories[longest].id!r} needs {need} positions, the longest row has {max(lengths)}: "
            "raise the longest row length or lower the engine's context"
        )
    rows = first_fit_decreasing(used, row_length)
    if not packed:
        rows = [[index] for index in sorted((i for row in rows for i in row), key=lambda i: (-used[i], i))]
    shape = (-(-max(len(rows), 1) // micro_rows) * micro_rows, row_length)
    out = {f.name: np.zeros(shape, np.int32) for f in dataclasses.fields(Batch) if f.name != "experts"}
    out |= {name: np.zeros(shape, np.float32) for name in ("mask", "logprobs", "advantages")}
    out["trajectory"] -= 1
    if (width := _experts_of(trajectories)) is not None:
        out["experts"] = np.full(shape + width, -1, np.int32)
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, 1):
            a, n = arrays[index], used[index]
            at = (row, slice(start, start + n))
            out["tokens"][at] = a["tokens"][:n]
            out["targets"][at] = a["tokens"][1 : n + 1]
            out["mask"][at] = a["loss_mask"][1 : n + 1]
            out["logprobs"][at] = a["logprobs"][1 : n + 1]
            out["versions"][at] = a["versions"][1 : n + 1]
            if "experts" in a:
                out["experts"][at] = a["experts"][:n]
            out["advantages"][at] = advantages[index]
            out["segment_ids"][at] = segment
            out["positions"][at] = np.arange(n)
            out["trajectory"][at] = index
            out["hinted"][at] = trajectories[index].hint is not None
            start += n
    return Batch(**out)


def _experts_of(trajectories: Sequence[Trajectory]) -> tuple[int, ...] | None:
    """(sparse layers, k) of the trajectories that carry expert ids; None where none does.

    Raises:
      PackingError: they differ, so they are of different models.
    """
    carrying = [t for t in trajectories if t.experts is not None]
    for trajectory in carrying:
        if trajectory.experts.shape[1:] != carrying[0].experts.shape[1:]:
            raise PackingError(
                f"trajectory {trajectory.id!r}, field 'experts': {trajectory.experts.shape[1:]} sparse layers and experts a token, "
                f"trajectory {carrying[0].id!r} has {carrying[0].experts.shape[1:]}"
            )
    return carrying[0].experts.shape[1:] if carrying else None
