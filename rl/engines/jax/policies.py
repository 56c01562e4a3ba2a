"""Policies as the engine holds them, and which of them can be computed in one batch.

One call of the device runs one bank and one gate; rows differ by how they use them. So policies that hold the same bank object decode side
by side, and the base beside any.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from model import AdapterBank, Gate
from rl.engines.checks import check_policy
from rl.engines.jax.steps import Slots
from rl.engines.protocol import Policy

_serials = itertools.count()


@dataclasses.dataclass(eq=False)
class Loaded:
    """A policy with arrays of the engine's own, since a learner may donate the originals; `weights` are [S].

    serial: names these weights without keeping them alive.
    """

    policy: Policy
    adapters: AdapterBank | None
    gate: Gate | None
    weights: np.ndarray | None
    serial: int = dataclasses.field(default_factory=lambda: next(_serials))


def load_policy(policy: Policy, known: Iterable[Loaded], copy: Callable[[Any], Any]) -> Loaded:
    """The policy with copies of its arrays, or those that were made for another of the `known` that holds the same object.

    Raises:
      EngineError: fields that do not fit together.
    """
    weights, known = check_policy(policy), list(known)

    def own(name: str) -> Any:
        original = getattr(policy, name)
        shared = (getattr(k, name) for k in known if original is not None and getattr(k.policy, name) is original)
        return next(shared, None) or copy(original)

    return Loaded(policy, own("adapters"), own("gate"), weights)


class Batch:
    """The one bank and gate of all that runs at a time."""

    def __init__(self, loaded: Iterable[Loaded]):
        self.adapters: AdapterBank | None = None
        self.gate: Gate | None = None
        for one in loaded:
            self.add(one)

    def add(self, loaded: Loaded) -> bool:
        """Whether it can run with the others; if so it does."""
        for mine, other in ((self.adapters, loaded.adapters), (self.gate, loaded.gate)):
            if mine is not None and other is not None and mine is not other:
                return False
        self.adapters = self.adapters if loaded.adapters is None else loaded.adapters
        self.gate = self.gate if loaded.gate is None else loaded.gate
        return True


def route(rows: Sequence[Loaded | None]) -> tuple[AdapterBank | None, Gate | None, Slots]:
    """The bank and gate of these rows, and how each uses them; a row without a policy takes the base."""
    batch = Batch(loaded for loaded in rows if loaded is not None)
    if batch.adapters is None:
        return None, None, Slots(None, None)
    weights = np.zeros((len(rows), batch.adapters.size + 1), np.float32)
    weights[:, 0] = 1.0
    for row, loaded in enumerate(rows):
        if loaded is not None and loaded.weights is not None:
            weights[row] = loaded.weights
    gated = None if batch.gate is None else np.array([loaded is not None and loaded.gate is not None for loaded in rows])
    return batch.adapters, batch.gate, Slots(weights, gated)
