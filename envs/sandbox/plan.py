"""What is asked of whom: the requests of a batch, the message that carries them to one worker, and the order in which they can be asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from envs.package import Package
from envs.sandbox.process import Process

if TYPE_CHECKING:
    from envs.sandbox.host import Episode

_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)  # what is circular nests too deeply


class Item(NamedTuple):
    """One request of a batch, and its place in it (None: an action that is played again)."""

    position: int | None
    package: Package
    episode: Episode | None  # None for a function of the package
    op: str
    arguments: Sequence
    fingerprint: int | None = None  # what the reply must be, when played again

    @property
    def wire(self) -> tuple:
        return (self.episode.key if self.episode else None, self.op, self.arguments)

    @property
    def where(self) -> str:
        """For the message of a fault."""
        if self.episode is None:
            return f"environment {self.package.name}, function {self.arguments[1]}"
        return f"environment {self.package.name}, seed {self.episode.seed}, {self.op}"


class Message(NamedTuple):
    """What one worker is asked in one go, and what it is told on the way.

    Attributes:
      packages: sources that it has not seen, by digest.
      arriving: keys of the episodes that it hosts from now on; it may host them already.
      freed: keys that it forgets.
    """

    process: Process
    plan: list[Item]
    packages: dict[str, str]
    arriving: set[int]
    freed: list[int]

    @property
    def payload(self) -> bytes:
        """As `encode`."""
        return encode({"packages": self.packages, "free": self.freed, "requests": [item.wire for item in self.plan]})


def compose(process: Process, items: list[Item]) -> Message:
    """All that must be asked of a process to get these requests answered: episodes that live elsewhere are played again first."""
    message = Message(process, [], {}, set(), list(process.freed))
    for item in items:
        digest, episode = item.package.digest, item.episode
        if digest not in process.packages:
            message.packages[digest] = item.package.source
        if item.op == "reset":
            item = item._replace(arguments=(digest, episode.seed, episode.knobs))
        elif episode is not None and episode.key not in process.hosted and episode.key not in message.arriving:
            message.plan.extend(Item(None, item.package, episode, *entry) for entry in episode._log)
        if episode is not None:
            message.arriving.add(episode.key)
        message.plan.append(item)
    return message


def encode(requests: Any) -> bytes:
    """
    Raises:
      ValueError: arguments that are not JSON.
    """
    try:
        return _ENCODER.encode(requests).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of a request are not JSON: {error}") from None


def stages(items: list[Item]) -> list[list[Item]]:
    """The requests in order, with a break wherever an episode goes on after it was scored."""
    found: list[list[Item]] = []
    stage_of: dict[int, int] = {}
    scored: set[int] = set()
    for item in items:
        key = item.episode.key if item.episode else 0
        if item.op == "score":
            scored.add(key)
        elif key in scored:
            scored.remove(key)
            stage_of[key] += 1
        stage = stage_of.setdefault(key, 0)
        if stage == len(found):
            found.append([])
        found[stage].append(item)
    return found
