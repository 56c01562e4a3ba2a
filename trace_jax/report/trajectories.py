"""Trajectories of the composed policy, each token with the slot that the gate sent it to.

The page holds, for every token, the majority of its layers and every single layer, so that one can be chosen by a few lines of script. That
is a character a token and layer, so long trajectories are cut and their number is bounded.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from rl.trajectory import Trajectory
from trace_jax.report.charts import stacks
from trace_jax.report.reader import Reader
from trace_jax.report.text import visible

MAX_TOKENS = 2000  # of one trajectory
BUDGET = 2_500_000  # characters of all trajectories together
DIGITS = string.digits + string.ascii_lowercase  # one character for a slot; the page's script reads base 36


@dataclasses.dataclass(frozen=True)
class View:
    """A trajectory as it is shown.

    Attributes:
      tokens: the coloured text, None where the texts or the slots are not stored.
      shown: how many of the tokens that is.
      layers: for the majority and then every layer a string with one digit a token.
      share: (slot, share of the sampled tokens over all layers).
    """

    trajectory: Trajectory
    tokens: Markup | None
    shown: int
    layers: str
    share: list[tuple[str, float]]


def examples(read: Reader, slots: Sequence[str]) -> dict[str, Any] | None:
    """The trajectories of gate/examples.jsonl.zst, as many as fit, None where there are none."""
    found = read.shard("gate/examples.jsonl.zst")
    pieces = read.json("gate/pieces.json")
    views, size = [], 0
    for trajectory in found:
        view = token_view(trajectory, pieces, slots)
        size += len(view.layers) + len(view.tokens or "") + sum(min(len(str(m)), 8000) for m in trajectory.messages)
        if size > BUDGET and views:
            break
        views.append(view)
    if not views:
        return None
    layers = max((t.slots.shape[1] for t in found if t.slots is not None), default=0)
    shown = [view.trajectory for view in views if view.trajectory.slots is not None]
    rows = {f"layer {layer}": _named(_share(shown, len(slots), layer), slots) for layer in range(layers)}
    return {
        "views": views,
        "left_out": len(found) - len(views),
        "layers": layers,
        "per_layer": stacks(rows, "Share of the slots in each layer, over the tokens that the agent wrote") if rows else None,
        "has_tokens": any(view.tokens for view in views),
    }


def token_view(trajectory: Trajectory, pieces: Sequence[str] | None, slots: Sequence[str], most: int = MAX_TOKENS) -> View:
    """The first `most` tokens of a trajectory.

    Args:
      pieces: token id to text, the content of gate/pieces.json.
      slots: the names, the base first.
    """
    if trajectory.slots is None or trajectory.tokens is None:
        return View(trajectory, None, 0, "", [])
    shown = np.clip(trajectory.slots[:most], 0, len(DIGITS) - 1)
    chosen = majority(shown, len(slots))
    layers = " ".join("".join(DIGITS[slot] for slot in column) for column in (chosen, *shown.T))
    share = list(zip(slots, _share([trajectory], len(slots), None), strict=True))
    return View(trajectory, None if pieces is None else _coloured(trajectory, chosen, pieces), len(shown), layers, share)


def majority(slots: np.ndarray, count: int) -> np.ndarray:
    """[T] the slot that most layers chose, of `slots` [T, layers]; the lowest of several."""
    return (slots[..., None] == np.arange(count)).sum(1).argmax(-1)


def _coloured(trajectory: Trajectory, chosen: np.ndarray, pieces: Sequence[str]) -> Markup:
    """The tokens' texts, one element each; `o` is what the agent wrote itself."""
    parts = []
    for token, slot, own in zip(trajectory.tokens.tolist(), chosen.tolist(), trajectory.loss_mask.tolist(), strict=False):
        text = pieces[token] if 0 <= token < len(pieces) else "\ufffd"
        parts.append(f'<i class="s{slot}{" o" if own else ""}">{escape(visible(text))}</i>')
    return Markup("".join(parts))


def _share(trajectories: Sequence[Trajectory], count: int, layer: int | None) -> list[float]:
    """Share of each slot among the sampled tokens, of one layer or of all."""
    chosen = [t.slots[t.loss_mask > 0] if layer is None else t.slots[t.loss_mask > 0, layer] for t in trajectories if t.tokens is not None]
    flat = np.concatenate([one.ravel() for one in chosen]) if chosen else np.zeros(0, int)
    return [float((flat == slot).mean()) if len(flat) else 0.0 for slot in range(count)]


def _named(share: Sequence[float], slots: Sequence[str]) -> list[tuple[str, float, str]]:
    return [(name, part, f"s{n}") for n, (name, part) in enumerate(zip(slots, share, strict=True))]
