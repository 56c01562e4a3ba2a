"""Trajectories of the composed policy, each token with the slot that the gate sent it to.

The page holds, for every token, the majority of its layers and every single layer, so that one can be chosen by a few lines of script. That
is a character a token and layer, so long trajectories are cut (`budgets`).
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from rl.trajectory import Trajectory
from trace_jax.report import budgets
from trace_jax.report.charts import stacks
from trace_jax.report.text import visible

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


def token_views(trajectories: Sequence[Trajectory], pieces: Sequence[str] | None, slots: Sequence[str]) -> dict[str, Any] | None:
    """The trajectories of gate/examples.jsonl.zst; None where there are none."""
    if not trajectories:
        return None
    views = [token_view(trajectory, pieces, slots) for trajectory in trajectories]
    layers = max((t.slots.shape[1] for t in trajectories if t.slots is not None), default=0)
    routed = [t for t in trajectories if t.slots is not None]
    shares = [sampled_share(routed, len(slots), layer) for layer in range(layers)]
    rows = {f"layer {layer}": _named(share, slots) for layer, share in enumerate(shares)}
    return {
        "views": views,
        "layers": layers,
        "shares": shares,
        "per_layer": stacks(rows, "Share of the slots in each layer, over the tokens that the agent wrote") if rows else None,
        "has_tokens": any(view.tokens for view in views),
    }


def token_view(trajectory: Trajectory, pieces: Sequence[str] | None, slots: Sequence[str], most: int = budgets.TOKENS) -> View:
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
    share = list(zip(slots, sampled_share([trajectory], len(slots), None), strict=True))
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


def sampled_share(trajectories: Sequence[Trajectory], count: int, layer: int | None) -> list[float]:
    """Share of each slot among the sampled tokens, of one layer or of all."""
    chosen = [t.slots[t.loss_mask > 0] if layer is None else t.slots[t.loss_mask > 0, layer] for t in trajectories if t.tokens is not None]
    flat = np.concatenate([one.ravel() for one in chosen]) if chosen else np.zeros(0, int)
    return [float((flat == slot).mean()) if len(flat) else 0.0 for slot in range(count)]


def _named(share: Sequence[float], slots: Sequence[str]) -> list[tuple[str, float, str]]:
    return [(name, part, f"s{n}") for n, (name, part) in enumerate(zip(slots, share, strict=True))]
