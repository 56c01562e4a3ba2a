"""The tokens of a rollout, one element each: which of them the agent sampled, with what log-prob, and to which slot a layer sent them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape

from rl.trajectory import Trajectory
from trace_jax.report.text import visible
from trace_jax.report.trajectories import DIGITS, majority, sampled_share

MOST = 4_000  # tokens, unless all are asked for


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens as they are shown.

    Attributes:
      text: one element a token: `o` the agent sampled it, `h` it is of the hint, `s2` its slot is 2.
      shown, count: how many these are, and how many there are.
      layers: of the slots, 0 where none are stored.
      layer: whose slots give the colours; None: the majority of them.
      share: (slot, share of the sampled tokens in that layer, or in all).
    """

    text: Markup
    shown: int
    count: int
    sampled: int
    layers: int
    layer: int | None
    share: Sequence[tuple[str, float]]


def shown_tokens(
    t: Trajectory, pieces: Sequence[str] | None, slots: Sequence[str], layer: int | None = None, most: int | None = MOST
) -> Tokens | None:
    """The first tokens of a trajectory; None where it has none.

    Args:
      pieces: token id to text; None: ids are shown.
      slots: the names, as far as they are known.
    """
    if t.tokens is None:
        return None
    count, chosen, layers, share = len(t.tokens), None, 0, []
    if t.slots is not None and t.slots.ndim == 2 and t.slots.shape[1]:
        stored, layers = np.clip(t.slots, 0, len(DIGITS) - 1), t.slots.shape[1]
        layer = layer if layer is not None and 0 <= layer < layers else None
        slots = [*slots, *(f"slot {n}" for n in range(len(slots), int(stored.max(initial=0)) + 1))]
        chosen = majority(stored, len(slots)) if layer is None else stored[:, layer]
        share = list(zip(slots, sampled_share([t], len(slots), layer), strict=True))
    span = (t.hint or {}).get("token_span")
    hinted = range(*span) if isinstance(span, list) and [type(end) for end in span] == [int, int] else range(0)
    parts = []
    for n, token in enumerate(t.tokens[:most].tolist()):
        text = f"[{token}]" if pieces is None else pieces[token] if 0 <= token < len(pieces) else "\ufffd"
        own, title = bool(t.loss_mask[n]), []
        style = ["o"] * own + ["h"] * (n in hinted)
        if chosen is not None:
            style.append(f"s{chosen[n]}")
            title.append(slots[chosen[n]])
        if own:
            title.append(f"log-prob {t.logprobs[n]:.3f}, p {math.exp(min(float(t.logprobs[n]), 0.0)):.3g}")
        title = f' title="{escape(visible("; ".join(title)))}"' if title else ""
        parts.append(f'<i class="{" ".join(style)}"{title}>{escape(visible(text))}</i>' if style else f"<i>{escape(visible(text))}</i>")
    return Tokens(Markup("".join(parts)), len(parts), count, int(t.loss_mask.sum()), layers, layer, share)
