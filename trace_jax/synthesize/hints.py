"""May an environment's hint be used, how much does it help, and how many rollouts of a group need it?

A hint is guidance: how to go about it, never what. That it holds no argument of the oracle is in the certificate. Here it is measured
whether it tells anything about its own seed that the agent would have to find out: its words must not be found among the secrets of that
seed (values and texts of the oracle, and what calling every tool brings to light, without what the agent is told anyway) more often than
among those of other seeds. A permutation test says whether they are; words that all hints share count nothing in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs import Package, Pool
from envs.probes import Action, play, spam, start_text
from rl.trajectory import Trajectory
from trace_jax.evaluate.statistics import clustered_wilson

BAND = (0.6, 0.8)  # hinted success that the method aims at
MOST = 0.5  # largest share of a group's rollouts that see a hint
_LEAK = 0.05  # secret words a hint, beyond those that it shares with other seeds' secrets
_SHUFFLES, _CHANCE = 4000, 0.001  # of hints among the seeds, and the share of these that may tell as much


def leaks(pool: Pool, package: Package, seeds: Sequence[int]) -> list[str]:
    """What the hints tell about their own seeds, in a sentence; empty where it is nothing.

    Raises:
      EnvironmentFault: the hints or the oracle cannot be had.
    """
    calls = [(seed,) for seed in seeds]
    hints = [_words(hint) for hint in pool.functions(package, "hint", calls)]
    scripts = pool.functions(package, "oracle", calls)
    plays = play(pool, package, seeds, spam(pool.function(package, "tools")))
    secrets = [
        _words(" ".join([_said(script), *(reply.text or "" for _, reply in one.steps)])) - _words(start_text(one.start))
        for script, one in zip(scripts, plays, strict=True)
        if one.start is not None
    ]
    if len(secrets) < max(len(seeds), 2):
        return ["the hint cannot be checked: an episode does not begin"]
    words = {word: n for n, word in enumerate(sorted(set().union(*hints) & set().union(*secrets)))}
    in_hint, in_secret = (
        np.array([[word in one for word in words] for one in texts], float) for texts in (hints, secrets)
    )  # [seeds, words]
    shared, order = in_hint @ in_secret.T, np.arange(len(seeds))  # [hint, secret]
    random = np.random.default_rng(0)
    shuffled = np.array([shared[order, random.permutation(order)].sum() for _ in range(_SHUFFLES)])
    told = shared.trace()
    if told - shuffled.mean() <= _LEAK * len(seeds) or np.mean(shuffled >= told) > _CHANCE:
        return []
    surplus = (in_hint * in_secret).sum(0) - in_hint.sum(0) * in_secret.mean(0)
    most = ", ".join(repr(list(words)[n]) for n in np.argsort(-surplus)[:3] if surplus[n] > 0)
    return [
        f"the hint tells what the agent has to find out: {(told - shuffled.mean()) / len(seeds):.2f} secret words a seed, such as {most}"
    ]


def hinted_success(hinted: Sequence[Trajectory]) -> dict[str, Any]:
    """What the base earns with hints: n_rollouts, success_rate, success_interval (95 %, by seeds), mean_reward, band, and a `note` where
    success is outside the band."""
    scored = [t for t in hinted if t.error is None]
    success = [float(t.success) for t in scored]
    rate = sum(success) / len(success) if success else 0.0
    note = ""
    if not BAND[0] <= rate <= BAND[1]:
        says = "tells too little" if rate < BAND[0] else "tells too much, or was not needed"
        note = f"success with a hint is {rate:.3f}, outside of {BAND[0]} to {BAND[1]}: it {says}"
    return {
        "n_rollouts": len(scored),
        "success_rate": rate,
        "success_interval": list(clustered_wilson(success, [t.seed for t in scored])),
        "mean_reward": sum(t.reward for t in scored) / len(scored) if scored else 0.0,
        "band": list(BAND),
        "note": note,
    }


def hint_share(base: float, hinted: float, low: float, least: float) -> float:
    """The smallest share h of a group's rollouts, from `least` to MOST, at which its success (1 - h) base + h hinted reaches `low`.

    Few, since the update weighs hinted rollouts by their importance for a policy without hints, and learns less from each.
    """
    wanted = (low - base) / (hinted - base) if hinted > base else MOST
    return min(max(wanted, least), max(MOST, least))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def _said(script: Sequence[Action]) -> str:
    return " ".join(action["text"] if "text" in action else json.dumps(list(action["arguments"].values())) for action in script)
