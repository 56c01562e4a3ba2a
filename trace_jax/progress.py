"""One line for the whole run: the stage, how far it is, and the time that is left.

Every stage has a weight: the seconds that it was measured to take, or anything proportional to them. The time left is the weight that
is left, times this run's own pace, seconds over weight, on what it has done so far; work that an earlier run did counts as done but not
towards the pace. On a terminal the line is drawn in place by rich; elsewhere a plain line is printed every ten seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

PRINT_EVERY = 10.0  # seconds between two plain lines
_PACE = 0.005  # share of the run that must be done before its pace says anything: the first steps compile
STALL = 300.0  # seconds without progress after which all stacks are written


class Progress:
    """The progress of a run; use it in a `with` block.

    Args:
      stages: name to weight, in the order in which they run.
      stall_log: an open file, to which the stacks of all threads are written when nothing moves for five minutes.
    """

    def __init__(
        self,
        stages: Mapping[str, float],
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        stall_log: io.TextIOBase | None = None,
    ):
        self.console = console or Console(stderr=True)
        self._clock, self._stall_log = clock, stall_log
        self._shares: dict[str, float] = {}  # done, by this run or an earlier one
        self._earlier: dict[str, float] = {}  # done by an earlier one
        self._current: Stage | None = None
        self._start = self._printed = self._armed = clock()
        self.plan(stages)
        share = "{task.percentage:>3.0f} %  {task.fields[left]}"
        columns = (TextColumn("{task.description}", markup=False), BarColumn(None), TextColumn(share, markup=False))
        self._bar = Bar(*columns, console=self.console, refresh_per_second=4)
        self._task = self._bar.add_task("", total=1.0, left="")

    def __enter__(self) -> Progress:
        self._start = self._clock()
        if self.console.is_interactive:
            self._bar.start()
        self._arm(force=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_interactive:
            self._bar.stop()
        if self._stall_log:
            faulthandler.cancel_dump_traceback_later()

    def plan(self, stages: Mapping[str, float]) -> None:
        """Another list of stages, as soon as more is known; what is done of those that stay is kept."""
        if not stages or any(weight <= 0 for weight in stages.values()):
            raise ValueError("every stage needs a positive weight")
        self._weights = dict(stages)
        self._shares = {name: self._shares.get(name, 0.0) for name in stages}
        self._earlier = {name: self._earlier.get(name, 0.0) for name in stages}

    @contextlib.contextmanager
    def stage(self, name: str, total: float = 1.0) -> Iterator[Stage]:
        """One stage of the run, finished when the block ends without an exception.

        Args:
          total: units of work in it (updates, rollouts).
        """
        self._current = Stage(self, name, total)
        self._show(name, 0.0, "")
        yield self._current
        self._current = None
        self._show(name, 1.0, "", last=True)

    def skip(self, name: str) -> None:
        """A stage that an earlier run finished."""
        self._earlier[name] = self._shares[name] = 1.0

    def advance(self, units: float = 1.0, text: str = "", *, earlier: bool = False) -> None:
        """`Stage.advance` of the stage that is running; outside one, nothing."""
        if self._current:
            self._current.advance(units, text, earlier=earlier)

    @property
    def fraction(self) -> float:
        """Share of the whole run that is done, by weight, in [0, 1]."""
        return sum(self._shares[name] * weight for name, weight in self._weights.items()) / sum(self._weights.values())

    @property
    def seconds_left(self) -> float | None:
        """At this run's own pace; None as long as it has done too little to have one."""
        own = sum((self._shares[name] - self._earlier[name]) * weight for name, weight in self._weights.items())
        if own < _PACE * sum(self._weights.values()):
            return None
        rest = (1.0 - self.fraction) * sum(self._weights.values())
        return rest * (self._clock() - self._start) / own

    def print(self, *objects: object) -> None:
        """Prints above the line."""
        self.console.print(*objects)

    def _show(self, name: str, share: float, text: str, last: bool = False) -> None:
        self._shares[name] = share
        description = f"{name}  {text}".rstrip()
        left = _duration(self.seconds_left)
        if self.console.is_interactive:
            self._bar.update(self._task, completed=self.fraction, description=description, left=left)
        elif last or self._clock() - self._printed >= PRINT_EVERY:
            self._printed = self._clock()
            self.console.print(f"{self.fraction:4.0%}  {description}  {left}".rstrip(), markup=False, highlight=False, soft_wrap=True)
        self._arm()

    def _arm(self, force: bool = False) -> None:
        """Starts the wait for a stall again, at most once a second."""
        if self._stall_log and (force or self._clock() - self._armed >= 1.0):
            self._armed = self._clock()
            faulthandler.dump_traceback_later(STALL, repeat=True, file=self._stall_log)


class Stage:
    """A running stage; `Progress.stage` makes it."""

    def __init__(self, progress: Progress, name: str, total: float):
        self._progress, self._name, self._total, self._done, self._text = progress, name, total or 1.0, 0.0, ""

    def advance(self, units: float = 1.0, text: str = "", *, earlier: bool = False) -> None:
        """`units` more of the stage's total are done.

        Args:
          text: shown behind the stage's name; the last one stays.
          earlier: an earlier run did them.
        """
        self._text = text or self._text
        before, self._done = self._done, min(self._done + units, self._total)
        if earlier:
            self._progress._earlier[self._name] += (self._done - before) / self._total
        self._progress._show(self._name, self._done / self._total, self._text)


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min left" if minutes >= 60 else f"{minutes} min {rest:02d} s left"
