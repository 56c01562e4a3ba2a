"""Scripted players of any skill: they play the oracle, and at each decision that a capability is about they may slip.

An environment is learnable if a little more skill earns a little more, so a ladder of such players has to climb: mean reward and success
grow with the skill, and somewhere in between the calibration would let the environment into training.
"""

import dataclasses
import random
import types
from collections.abc import Callable, Generator

from envs import Package, Pool, Reply, Start
from envs.probes import Action, Player, play
from trace_jax.config import SynthesisSection
from trace_jax.synthesize.calibrate import calibrate

SKILLS = (0.0, 0.25, 0.5, 0.75, 1.0)

# (seed, the rest of the oracle's script, random numbers) -> what an unskilled agent does instead of that rest; None: nothing to decide here
Slip = Callable[[int, list[Action], random.Random], list[Action] | None]


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The oracle's scripts by seed, and how one slips.

    A player of skill s keeps to the script at a decision with probability s. What it does after a slip may hold further decisions. The
    random numbers follow from seed and rollout alone, so that players of different skill are compared on equal luck.
    """

    scripts: dict[int, list[Action]]
    slip: Slip

    def player(self, skill: float, rollout: int = 0) -> Player:
        def act(seed: int, start: Start) -> Generator[Action, Reply, None]:
            luck, rng = random.Random(f"luck {seed} {rollout}"), random.Random(f"slip {seed} {rollout}")
            rest = self.scripts[seed]
            while rest:
                instead = self.slip(seed, rest, rng)
                if instead is not None and luck.random() >= skill:
                    rest = instead
                yield rest[0]
                rest = rest[1:]

        return act

    def climb(self, pool: Pool, package: Package, rollouts: int = 4, skills: tuple[float, ...] = SKILLS) -> dict[float, dict]:
        """What the calibration finds for each skill (`trace_jax.synthesize.calibrate`), at the package's default knobs."""
        done = types.SimpleNamespace(value="done")
        found = {}
        for skill in skills:
            plays = [one for rollout in range(rollouts) for one in play(pool, package, list(self.scripts), self.player(skill, rollout))]
            fields = [{"seed": one.seed, "reward": one.reward, "success": one.reward == 1.0} for one in plays]
            trajectories = [types.SimpleNamespace(error=None, stop_reason=done, **values) for values in fields]
            found[skill] = calibrate(trajectories, SynthesisSection())
        return found
