"""One axis of difficulty for all knobs of a package, and the bisection of it.

At share 0 every knob has its default; at share 1 each is at the end that makes tasks harder, or, for a package that is too hard, easier.
Which end that is the package says (`harder` in package.json), or it is measured: the base plays the same few seeds at both ends. A knob
without a measurable effect stays where it is.

The verdict is taken to be monotone along the axis: too easy, ok, too hard. Between a setting that is on the default's side of the bounds
and one that is beyond them lies the next one to try; before anything is beyond, it is the middle, then the end.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import numpy as np

from envs import Package
from envs.package import Knob
from rl.trajectory import Trajectory
from trace_jax.config import SynthesisSection
from trace_jax.synthesize.calibrate import OK, TOO_EASY

_SIGNIFICANT = 1.645  # standard errors by which the mean rewards at two ends must differ: by chance in one of ten knobs without effect
_FINEST = 1 / 64  # of the axis; no nearer to a bound is looked

Knobs = dict[str, int | float]


def ends(package: Package) -> dict[str, tuple[Knobs, Knobs]]:
    """The settings (at `min`, at `max`) of every knob of which it must be measured which end is harder."""
    return {
        name: ({name: knob.min}, {name: knob.max}) for name, knob in package.knobs.items() if knob.harder is None and knob.min < knob.max
    }


def harder_end(at_min: Sequence[Trajectory], at_max: Sequence[Trajectory]) -> str | None:
    """At which end the same seeds earn less, None where that may be chance: a paired test, seed by seed."""
    means = [{seed: np.mean([t.reward for t in found if t.seed == seed and t.error is None] or [math.nan])
              for seed in sorted({t.seed for t in at_min})} for found in (at_min, at_max)]  # fmt: skip
    gains = np.array([means[1][seed] - means[0][seed] for seed in means[0]])
    gains = gains[np.isfinite(gains)]
    if len(gains) < 2 or abs(gains.mean()) <= _SIGNIFICANT * gains.std(ddof=1) / math.sqrt(len(gains)):
        return None
    return "min" if gains.mean() > 0 else "max"


def setting(package: Package, harder: Mapping[str, str | None], share: float, towards_harder: bool) -> Knobs:
    """The value of every knob at a share of the axis."""
    out = {}
    for name, knob in package.knobs.items():
        end = knob.default
        if harder.get(name):
            end = knob.max if (harder[name] == "max") == towards_harder else knob.min
        out[name] = _between(knob, end, share)
    return out


def bisect(package: Package, harder: Mapping[str, str | None], verdict: str, probes: int) -> Generator[Knobs, str, None]:
    """Yields settings to be calibrated, at most `probes`, all different, and is sent their verdicts; it ends at the first that is ok."""
    known = {tuple(setting(package, harder, 0.0, True).values()): verdict}
    near, far = 0.0, None  # shares on the default's side, and beyond the bounds
    while len(known) <= probes and (far is None or far - near > _FINEST):
        share = (near + far) / 2 if far is not None else 0.5 if near == 0.0 else 1.0
        knobs = setting(package, harder, share, towards_harder=verdict == TOO_EASY)
        key = tuple(knobs.values())
        if key not in known:
            known[key] = yield knobs
        if known[key] == OK:
            return
        if known[key] != verdict:
            far = share
        elif share == 1.0:
            return
        else:
            near = share


def distance(calibration: Mapping[str, Any], bounds: SynthesisSection) -> float:
    """How far mean reward and success are outside the bounds, together; 0 inside."""
    figures = (calibration["mean_reward"], calibration["success_rate"])
    return sum(max(bounds.mean_low - x, x - bounds.mean_high, 0.0) for x in figures)


def _between(knob: Knob, end: float, share: float) -> int | float:
    value = knob.default + share * (end - knob.default)
    if knob.whole:
        return math.floor(value + 0.5)
    return float(min(max(float(f"{value:.6g}"), knob.min), knob.max))
