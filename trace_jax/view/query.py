"""A state of the list: what is chosen, how it is sorted, which page. It is the address, so it can be shared and gone back to."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trace_jax.view.rows import ERROR, OUTCOMES, SUCCESS, Listing, Row

PAGE = 100  # rollouts
MAIN = "this run"  # the workdir that is shown, among those within it
NONE = "none"  # the split or policy of who names none
_YES = ("no", "yes")

# the choices that are lists, each with what a row has of it
FACETS: dict[str, Callable[[Row], str]] = {
    "where": lambda row: row.where or MAIN,
    "policy": lambda row: row.policy or NONE,
    "split": lambda row: row.split or NONE,
    "environment": lambda row: row.environment,
    "reward": lambda row: row.outcome,
    "ended": lambda row: row.ended,
    "hinted": lambda row: _YES[row.hinted],
    "slots": lambda row: _YES[row.routed],
}
# the columns of the list that it can be sorted by
COLUMNS: dict[str, Callable[[Row], Any]] = {
    **{name: FACETS[name] for name in ("where", "policy", "split", "environment", "ended", "hinted")},
    "id": lambda row: row.id,
    "reward": lambda row: row.reward,
    "turns": lambda row: row.turns,
    "tokens": lambda row: row.tokens,
    "lacking": lambda row: lacking(row) or None,
}


def lacking(row: Row) -> str:
    """The capabilities that the diagnosis found lacking."""
    return ", ".join(sorted(name for name, label in row.labels.items() if label.value == "LACKING"))


@dataclasses.dataclass(frozen=True)
class Query:
    """What is asked for; empty: anything.

    Attributes:
      where, policy, split, environment, reward, ended, hinted, slots: values of FACETS.
      capability, label: rows that the diagnosis labelled so, in that capability or in any.
      task: a task's whole id, or a part of one.
      text: a part of the rollout's id.
      low, high: bounds of the reward.
      sort: a column, with `-` in front from the largest down.
      page: from 1.
    """

    where: str = ""
    policy: str = ""
    split: str = ""
    environment: str = ""
    reward: str = ""
    ended: str = ""
    hinted: str = ""
    slots: str = ""
    capability: str = ""
    label: str = ""
    task: str = ""
    text: str = ""
    low: float | None = None
    high: float | None = None
    sort: str = ""
    page: int = 1

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> Query:
        """Of an address. What is no number counts as not given."""
        values: dict[str, Any] = {name: parameters.get(name, "").strip() for name in cls.__dataclass_fields__}
        values |= {name: _number(values[name]) for name in ("low", "high")}
        page = _number(values["page"])
        values["page"] = int(page) if page and 1 <= page < 1e9 else 1
        if values["sort"].removeprefix("-") not in COLUMNS:
            values["sort"] = ""
        return cls(**values)

    def parameters(self, **changes: Any) -> dict[str, Any]:
        """Of the address, with changes; what is as at first is left out."""
        first, given = Query(), vars(self) | changes
        return {name: value for name, value in given.items() if value != getattr(first, name)}

    def sorted_by(self, column: str) -> dict[str, Any]:
        """Of where the heading of a column leads: up first, then down."""
        return self.parameters(sort=f"-{column}" if self.sort == column else column, page=1)


class Found(NamedTuple):
    """What a query finds.

    Attributes:
      order: numbers of the rows, sorted; all pages.
      counts: of each choice the values that there are, each with how many rows it would show, all else as it is.
      successes, graded: of all that is found.
    """

    order: np.ndarray
    counts: dict[str, list[tuple[str, int]]]
    successes: int
    graded: int

    @property
    def pages(self) -> int:
        return max(1, -(-len(self.order) // PAGE))


def mixed(asked: Query, found: Found) -> bool:
    """Whether what is found is of several policies, splits or workdirs, so that its success says nothing of any."""
    return any(not getattr(asked, name) and sum(count > 0 for _, count in found.counts[name]) > 1 for name in ("where", "policy", "split"))


class Table:
    """The rows of a listing as columns of numbers, so that a hundred thousand of them are filtered at once."""

    def __init__(self, listing: Listing):
        self._rows = listing.rows
        self._columns: dict[str, tuple[np.ndarray, Sequence[str]]] = {}
        self._ranks: dict[str, np.ndarray] = {}

    def find(self, query: Query) -> Found:
        """The rows of a query, its page left aside."""
        failed = {name: self._differs(name, getattr(query, name)) for name in FACETS}
        failed["diagnosis"] = ~self._labelled(query.capability, query.label)
        others = ~(self._named(query.task, [row.task for row in self._rows], whole=True) & self._named(query.text, self._ids))
        if query.low is not None or query.high is not None:
            low, high = (default if bound is None else bound for bound, default in ((query.low, 0.0), (query.high, 1.0)))
            others |= ~((self._rewards >= low) & (self._rewards <= high))
        faults = others + sum(each.astype(np.int8) for each in failed.values())
        counts = {name: self._counts(name, faults == failed[name], getattr(query, name)) for name in FACETS}
        open_ = faults == failed["diagnosis"]
        counts["capability"] = [(name, int((open_ & self._labelled(name, query.label)).sum())) for name in self.capabilities]
        counts["label"] = [(value, int((open_ & self._labelled(query.capability, value)).sum())) for value in self._values]
        found = np.flatnonzero(faults == 0)
        outcomes, names = self._column("reward")
        chosen = np.bincount(outcomes[found], minlength=len(names))
        of = dict(zip(names, chosen.tolist(), strict=True))
        return Found(self._sorted(found, query.sort), counts, of.get(SUCCESS, 0), len(found) - of.get(ERROR, 0))

    @functools.cached_property
    def capabilities(self) -> list[str]:
        """That the diagnosis labelled."""
        return sorted({name for _, labels in self._diagnosed for name in labels})

    @functools.cached_property
    def _values(self) -> list[str]:
        return sorted({label.value for _, labels in self._diagnosed for label in labels.values()})

    @functools.cached_property
    def _diagnosed(self) -> list[tuple[int, Mapping[str, Any]]]:
        return [(number, row.labels) for number, row in enumerate(self._rows) if row.labels]

    @functools.cached_property
    def _ids(self) -> list[str]:
        return [row.id for row in self._rows]

    @functools.cached_property
    def _rewards(self) -> np.ndarray:
        return np.array([np.nan if row.reward is None else row.reward for row in self._rows], float)

    def _column(self, name: str) -> tuple[np.ndarray, Sequence[str]]:
        """[N] the place of each row's value among the values, and these."""
        if name not in self._columns:
            values = [FACETS[name](row) for row in self._rows]
            names = sorted(set(values), key=OUTCOMES.index if name == "reward" else _natural)
            places = {value: place for place, value in enumerate(names)}
            self._columns[name] = np.fromiter(map(places.__getitem__, values), int, len(values)), names
        return self._columns[name]

    def _differs(self, name: str, value: str) -> np.ndarray:
        codes, names = self._column(name)
        return codes != (names.index(value) if value in names else -1) if value else np.zeros(len(codes), bool)

    def _counts(self, name: str, open_: np.ndarray, chosen: str) -> list[tuple[str, int]]:
        codes, names = self._column(name)
        found = list(zip(names, np.bincount(codes[open_], minlength=len(names)).tolist(), strict=True))
        return found if not chosen or chosen in names else [*found, (chosen, 0)]

    def _labelled(self, capability: str, value: str) -> np.ndarray:
        """[N] whether the diagnosis gave that label for that capability; empty: any."""
        if not capability and not value:
            return np.ones(len(self._rows), bool)
        found = np.zeros(len(self._rows), bool)
        for number, labels in self._diagnosed:
            found[number] = any(
                (not capability or name == capability) and (not value or label.value == value) for name, label in labels.items()
            )
        return found

    def _named(self, part: str, names: Sequence[str], whole: bool = False) -> np.ndarray:
        """[N] whether a name has a part; with `whole`, where there is one that it is all of, only that."""
        if not part:
            return np.ones(len(names), bool)
        if whole and part in names:
            return np.array([name == part for name in names], bool)
        return np.array([part.lower() in name.lower() for name in names], bool)

    def _sorted(self, found: np.ndarray, sort: str) -> np.ndarray:
        """What has no value comes last, up and down."""
        if not sort:
            return found
        name = sort.removeprefix("-")
        if name not in self._ranks:
            values = [COLUMNS[name](row) for row in self._rows]
            there = sorted(set(values) - {None}, key=lambda value: _natural(value) if isinstance(value, str) else value)
            places = {value: float(place) for place, value in enumerate(there)}
            self._ranks[name] = np.array([places.get(value, np.nan) for value in values])
        ranks = self._ranks[name][found]
        return found[np.argsort(-ranks if sort.startswith("-") else ranks, kind="stable")]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _natural(text: str) -> list[tuple[int, int | str]]:
    """Sorts `desk:9` before `desk:10`."""
    return [(0, int(part)) if part.isdecimal() and len(part) < 20 else (1, part) for part in re.split(r"(\d+)", text) if part]
