"""The gate: what its validation found, which slots it sends tokens to, and which kinds of turns and tools they serve."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rl.trajectory import Trajectory
from trace_jax.report import budgets
from trace_jax.report.charts import Bar, bars, stacks
from trace_jax.report.evaluation import style_of
from trace_jax.report.reader import Reader
from trace_jax.report.training import curves

_OPEN, _CLOSE = "<think>", "</think>"
READ, TURN, SAID, TOOL = "of all tokens", "of what it wrote, by place", "of what it wrote, by kind", "of its calls, by tool"


@dataclasses.dataclass(frozen=True)
class Use:
    """The slots of one kind of tokens.

    Attributes:
      group: READ, TURN, SAID or TOOL; each but the last divides all tokens of one side.
      tokens: how many there are.
      share: [S] of the slots over these tokens and all layers.
    """

    group: str
    kind: str
    tokens: int
    share: list[float]


def gate(read: Reader, styles: Mapping[str, str]) -> dict[str, Any] | None:
    """Curves of the gate's training and what its validation found; the latter only when the step has finished."""
    routing, rows = read.json("gate/routing.json"), read.jsonl("gate/metrics.jsonl")
    if routing is None and not rows:
        return None
    stages: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        stages[row.get("stage", "grpo")].append(row)
    shown: dict[str, Any] = {"routing": routing, "curves": {stage: curves(found, "the gate", "s0") for stage, found in stages.items()}}
    if routing:
        names = routing["slots"]
        validation = routing["validation"].items()
        rates = [Bar(label=name, value=r["rate"], interval=r["interval"], style=style_of(name, styles)) for name, r in validation]
        shown["validation"] = bars(rates, "Success on unseen seeds of the capability environments")
        share = [(name, routing["share"].get(name, 0.0), f"s{n}") for n, name in enumerate(names)]
        shown["share"] = stacks({"tokens": share}, "Share of the slots")
        forms = routing.get("label_form", {}).values()
        measures = dict.fromkeys(key for form in forms for key, value in form.items() if isinstance(value, (int, float)))
        shown["measures"] = {_measure(key, names): [form.get(key) for form in forms] for key in measures}
    return shown


def usage(trajectories: Sequence[Trajectory], pieces: Sequence[str] | None, slots: Sequence[str]) -> dict[str, Any] | None:
    """How the slots divide the tokens of trajectories by kind of turn and by tool; None where no trajectory has slots.

    Args:
      pieces: token id to text; without them thoughts are not told from the rest of a turn.
    """
    chosen: dict[tuple[str, str], list[np.ndarray]] = defaultdict(list)
    routed = [t for t in trajectories if t.slots is not None and t.tokens is not None]
    for t in routed:
        for group, kind, tokens in _kinds(t, pieces):
            chosen[group, kind].append(t.slots[tokens])
    rows = [_use(group, kind, np.concatenate(found), len(slots)) for (group, kind), found in chosen.items()]
    order = [READ, TURN, SAID, TOOL]
    tools = sorted((row for row in rows if row.group == TOOL), key=lambda row: (-row.tokens, row.kind))
    rows = [row for row in rows if row.group != TOOL and row.tokens] + tools[: budgets.TOOLS]
    rows.sort(key=lambda row: order.index(row.group))
    if not rows:
        return None
    named = {row.kind: [(name, part, f"s{n}") for n, (name, part) in enumerate(zip(slots, row.share, strict=True))] for row in rows}
    return {
        "rows": rows,
        "trajectories": len(routed),
        "tools_left_out": max(0, len(tools) - budgets.TOOLS),
        "chart": stacks(named, "Share of the slots by kind of turn and by tool", left=130, step=20),
    }


def _kinds(t: Trajectory, pieces: Sequence[str] | None) -> Iterator[tuple[str, str, np.ndarray]]:
    """(group, kind, [T] whether a token belongs to it). A turn of tokens is the assistant message in the same place, counted from the end:
    a conversation may begin with one that nobody sampled."""
    written = t.loss_mask > 0
    yield READ, "what it read", ~written
    yield READ, "what it wrote", written
    turns = np.unique(t.turns[written])
    replies = [m for m in t.messages if m.get("role") == "assistant"][-len(turns) :] if len(turns) else []
    for n, (turn, reply) in enumerate(zip(turns[len(turns) - len(replies) :], replies, strict=True)):
        own = written & (t.turns == turn)
        thought = own & _thoughts(t.tokens, own, pieces)
        calls = [call["name"] for call in reply.get("tool_calls") or []]
        yield TURN, "its later turns" if n else "its first turn", own
        yield SAID, "thoughts", thought
        yield SAID, "tool calls" if calls else "words to the user", own & ~thought
        for name in dict.fromkeys(calls):
            yield TOOL, name, own & ~thought


def _thoughts(tokens: np.ndarray, own: np.ndarray, pieces: Sequence[str] | None) -> np.ndarray:
    """[T] whether a token of the turn `own` lies in `<think>...</think>`; the template may have opened the thought already."""
    inside = np.zeros(len(tokens), bool)
    if pieces is None:
        return inside
    places = np.flatnonzero(own)
    texts = [pieces[token] if 0 <= token < len(pieces) else "" for token in tokens[places].tolist()]
    text, ends = "".join(texts), np.cumsum([len(one) for one in texts])
    closed = text.find(_CLOSE)
    opened = text.find(_OPEN)
    if closed < 0 and opened < 0:
        return inside
    first = opened if 0 <= opened and (closed < 0 or opened < closed) else 0
    last = closed + len(_CLOSE) if closed >= 0 else len(text)
    inside[places[(ends > first) & (ends <= last)]] = True
    return inside


def _use(group: str, kind: str, slots: np.ndarray, count: int) -> Use:
    """Of the slots [tokens, layers] that were chosen."""
    counts = np.bincount(slots.ravel().astype(np.int64), minlength=count)[:count]
    return Use(group, kind, len(slots), (counts / max(slots.size, 1)).tolist())


def _measure(key: str, slots: Sequence[str]) -> str:
    """The name of a routing metric; `share/2` is that of a slot."""
    kind, _, slot = key.partition("/")
    return f"share of {slots[int(slot)]}" if kind == "share" and slot.isdigit() and int(slot) < len(slots) else key.replace("_", " ")
