"""A pool with an end: whoever uses it longer is told so. A package that is slow at every step would keep a certificate busy for hours."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from envs.sandbox import Pool


class OutOfTime(Exception):
    """The time is up; nothing is wrong with the pool."""


class TimedPool:
    """A pool that raises OutOfTime once `ends` (of time.monotonic) is past. A request that has begun is waited for: the pool ends those."""

    def __init__(self, pool: Pool, ends: float):
        self.pool, self.ends = pool, ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def batch(self, requests: Any) -> list[Any]:
        return self._in_time().batch(requests)

    def function(self, *arguments: Any) -> Any:
        return self._in_time().function(*arguments)

    def functions(self, *arguments: Any) -> list[Any]:
        return self._in_time().functions(*arguments)

    @contextlib.contextmanager
    def another(self) -> Iterator[TimedPool]:
        """A pool of one worker with other hash seeds, in the same sandbox, with the same end."""
        own = self.pool
        with Pool(1, deadline_s=own.deadline_s, hash_seed=own.hash_seed + 1, sandbox=own.sandbox) as pool:
            yield TimedPool(pool, self.ends)

    def _in_time(self) -> Pool:
        if time.monotonic() > self.ends:
            raise OutOfTime
        return self.pool
