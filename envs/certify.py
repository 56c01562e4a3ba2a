"""The certificate of an environment package: machine-checked reasons to believe its rewards.

A learner finds every way to a reward, so an environment enters training only when its oracle earns everything, everybody who has not got
the skill earns little, and the verdict depends on the seed and the actions alone. 16 % of 1,968 public terminal tasks could be gamed
(arXiv 2606.08960). What a certificate cannot see, whether a given model finds the tasks neither trivial nor impossible, is calibration.

Some of the seeds are drawn for the certificate, from the package's own text and a word that its author does not know, so that a package
cannot be honest on known seeds alone. `envs.checks` looks at the package, `envs.exploits` tries to be rewarded for nothing.

A certificate runs the package: give a pool with `sandbox="require"` for one that does not come with trace-jax.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import platform
import random
from collections.abc import Iterable, Sequence
from typing import Any

from envs import checks as look
from envs import exploits
from envs.base import EnvironmentFault
from envs.checks import CheckResult, brief
from envs.package import Package
from envs.probes import (
    VERDICTS,
    Cast,
    Play,
    Player,
    at_random,
    echo,
    inject_calls,
    inject_texts,
    nothing,
    odd,
    play,
    play_all,
    recite,
    say,
    spam,
)
from envs.sandbox import Pool

__all__ = ["Certificate", "CheckResult", "brief", "certify", "draw_seeds"]

KNOB_SEEDS = 5
FRESH = 4  # one seed is drawn for so many that are given, and so many are drawn at least
ALL_PROBED = 50  # with more seeds than this, the players try every second one
ODD_SEEDS = 6
USUAL_SEEDS = 10_000_000  # most people's are smaller


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was checked of which package, when, and with what result.

    Attributes:
      digest: of the package; the certificate is void for any other.
      seeds: [first, last, how many] of those that were given.
      fresh: how many were drawn beside them.
      rewards: mean reward and share of full rewards by player, on the given seeds.
      timing: milliseconds of one request, `median_ms`, `p99_ms` and `slowest_ms`; of this machine, so they are not part of what is stored.
    """

    package: str
    digest: str
    seeds: tuple[int, int, int]
    fresh: int
    when: str
    versions: dict[str, str]
    checks: list[CheckResult]
    rewards: dict[str, dict[str, float]]
    timing: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """Why it did not pass."""
        return [f"{check.name}: {check.detail}" for check in self.checks if check.passed is False]

    def to_json(self, timing: bool = False) -> dict[str, Any]:
        """All but `when` and `timing` follows from the package and the seeds."""
        content = {**dataclasses.asdict(self), "seeds": list(self.seeds), "passed": self.passed}
        return content if timing else {key: value for key, value in content.items() if key != "timing"}

    def to_text(self) -> str:
        """A table for people."""
        marks = {True: "ok  ", False: "FAIL", None: "--  "}
        width = max(len(check.name) for check in self.checks)
        seeds = f"{self.seeds[2]} seeds from {self.seeds[0]} to {self.seeds[1]} and {self.fresh} others"
        lines = [f"{self.package} ({self.digest[:12]}), {seeds}, {self.when}"]
        lines += [f"  {marks[check.passed]} {check.name:<{width}}  {check.detail}" for check in self.checks]
        if self.timing:
            median, p99, slowest = (self.timing[key] for key in ("median_ms", "p99_ms", "slowest_ms"))
            lines.append(f"one request takes {median:.2f} ms (median), {p99:.2f} ms (p99), {slowest:.2f} ms (slowest)")
        return "\n".join([*lines, "certified" if self.passed else "NOT certified"])


def draw_seeds(package: Package, salt: str, given: Sequence[int], used: Sequence[range] = ()) -> list[int]:
    """Seeds that nobody knows who does not know `salt`: by turns of each range of `used`, below USUAL_SEEDS, and of all sizes up to 2^31.

    The package's text is part of the draw, so a text cannot hold the seeds that it will be tried on.
    """
    rng = random.Random(f"{package.digest} {salt}")
    places = [functools.partial(rng.choice, one) for one in used]
    places += [lambda: rng.randrange(USUAL_SEEDS), lambda: int(2 ** rng.uniform(0, 31))]
    count = max(FRESH, len(given) // FRESH, len(places) if len(given) > FRESH else 0)
    drawn: dict[int, None] = {}
    turns = itertools.cycle(places)
    while len(drawn) < count:
        seed = next(turns)()
        if seed not in given:
            drawn[seed] = None
    return list(drawn)


def certify(
    package: Package,
    pool: Pool,
    *,
    target_tools: list[dict] | None = None,
    seeds: Iterable[int] = range(50),
    salt: str = "",
    used: Sequence[range] = (),
) -> Certificate:
    """Runs all checks.

    Args:
      package: at its default knobs; the oracle is also tried at the ends of every knob.
      pool: hosts the episodes; a second one, with other hash seeds and the same sandbox, is started for the comparison.
      target_tools: the tool schemas of the target; without them that check is left open.
      seeds: at least two. `draw_seeds` adds others.
      salt: what the package's author does not know, for `draw_seeds`; the same one gives the same certificate.
      used: where the seeds lie that the package will be used on; some of each are tried.

    Raises:
      ValueError: fewer than two different seeds.
      SandboxError: a worker does not start.
    """
    seeds = list(dict.fromkeys(seeds))
    if len(seeds) < 2:
        raise ValueError("a certificate needs at least two different seeds")
    fresh = draw_seeds(package, salt, seeds, used)
    checks: list[CheckResult] = []
    rewards: dict[str, dict[str, float]] = {}
    timing: dict[str, float] = {}
    try:
        tools = pool.function(package, "tools")
        scripts = look.oracle_scripts(pool, package, seeds + fresh)
        hints = dict(zip(scripts, pool.functions(package, "hint", [(seed,) for seed in scripts]), strict=True))
    except EnvironmentFault as fault:
        checks.append(CheckResult("functions", False, brief(fault)))
    else:
        checks.append(CheckResult("functions", True, "TOOLS, oracle and hint give what they should"))
        found, rewards, timing = _Trial(package, pool, tools, target_tools, seeds, fresh, scripts, hints).run()
        checks += found
    return Certificate(
        package=package.name,
        digest=package.digest,
        seeds=(min(seeds), max(seeds), len(seeds)),
        fresh=len(fresh),
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), "package": package.version},
        checks=checks,
        rewards=rewards,
        timing=timing,
    )


@dataclasses.dataclass
class _Trial:
    """What all checks of one certificate share. The players try the `probed` seeds and the fresh ones, the oracle all of them."""

    package: Package
    pool: Pool
    tools: list[dict]
    target_tools: list[dict] | None
    seeds: list[int]
    fresh: list[int]
    scripts: exploits.Scripts
    hints: dict[int, str]

    def run(self) -> tuple[list[CheckResult], dict[str, dict[str, float]], dict[str, float]]:
        """The checks, the rewards by player, the timing."""
        package, pool, scripts, turns = self.package, self.pool, self.scripts, self.package.max_turns
        given = set(self.seeds)
        probed = (self.seeds[::2] if len(self.seeds) > ALL_PROBED else self.seeds) + self.fresh
        neighbours = dict(zip(probed, [*probed[1:], probed[0]], strict=True))
        probes: dict[str, tuple[Player, int | None]] = {
            "nothing": (nothing, turns),
            "empty": (say(""), turns),
            "say_done": (say("All done."), turns),
            "echo": (echo, turns),
            "random": (at_random(self.tools, turns), turns),
            "memorised": (recite({seed: scripts[other] for seed, other in neighbours.items()}), turns),
            "spam": (spam(self.tools), None),
            "inject_text": (inject_texts, None),
            "inject_call": (inject_calls(self.tools), None),
        }
        plays = {"oracle": play(pool, package, list(scripts), recite(scripts))}
        writes = exploits.find_writes(plays["oracle"])
        # a verdict may run programs: it is asked for three times where most can have happened, once elsewhere
        casts = {name: Cast(probed, *probe, VERDICTS if name in ("random", "spam") else 1) for name, probe in probes.items()}
        casts["odd"] = Cast(probed[:ODD_SEEDS], odd(self.tools), verdicts=1)
        tried = {seed: scripts[seed] for seed in (probed[::2] if len(probed) > ALL_PROBED else probed)}
        plays |= play_all(pool, package, casts | self._spoilt(tried, writes.names))
        strays = exploits.with_strays(tried, plays["spam"], writes)
        edited = {seed: script for seed, (script, _) in strays.items()}
        plays["stray_write"] = play(pool, package, list(edited), recite(edited))

        known = {name: [one for one in found if one.seed in given] for name, found in plays.items()}
        judged = [exploits.earns_little(name, known[name]) for name in probes]
        others = {name: [one for one in found if one.seed not in given] for name, found in plays.items()}
        oracle = look.oracle_succeeds(known["oracle"], scripts)
        behaved = {check.name: check.passed is True for check in [oracle, *judged]}

        def again(name: str, seeds: range) -> list[Play]:
            player, limit = probes[name]
            return play_all(pool, package, {name: Cast(seeds, player, limit, 1)})[name] if name != "memorised" else []

        both = {"oracle": (recite(scripts), None), "random": probes["random"]}
        calls = [action for action, _ in plays["spam"][0].steps]
        speed, timing = look.steps_are_fast(pool, package, scripts, calls)
        checks = [
            look.tools_equal_target(self.tools, self.target_tools),
            oracle,
            look.oracle_at_knob_ends(pool, package, self.seeds[:KNOB_SEEDS]),
            look.step_limit_leaves_room(package, scripts),
            look.hint_keeps_the_answer(self.hints, scripts),
            look.prompt_keeps_the_answer(plays["oracle"], scripts),
            *judged,
            exploits.a_write_left_out_costs("early", plays["early"], writes.names),
            exploits.a_write_left_out_costs("incomplete", plays["incomplete"], writes.names),
            exploits.repetition_earns_nothing(plays["once"], plays["repeat"]),
            exploits.strays_cost(package, plays["stray_write"], {seed: place for seed, (_, place) in strays.items()}, writes),
            exploits.same_on_fresh_seeds(others["oracle"], {name: others[name] for name in probes}, behaved, again),
            exploits.tools_keep_the_answer(plays["oracle"], plays["spam"], plays["inject_call"] + plays["odd"], self.tools),
            look.seeds_differ(plays["spam"], scripts),
            *look.plays_alike(pool, package, both, plays, {"oracle": scripts, "hint": self.hints}),
            look.verifier_is_stable(pool, package, plays, scripts),
            look.no_faults(plays),
            look.sizes_fit(plays),
            speed,
        ]
        return checks, {name: look.summary(known[name]) for name in ("oracle", *probes)}, timing

    def _spoilt(self, scripts: exploits.Scripts, writes: set[str] | None) -> dict[str, Cast]:
        """The oracle, with something missing or too much."""
        spoilt = {
            "early": exploits.early(scripts, writes),
            "incomplete": exploits.incomplete(scripts, writes),
            "once": exploits.alone(scripts, 1),
            "repeat": exploits.alone(scripts, exploits.REPEATS),
            "twice": exploits.twice(scripts),
        }
        return {name: Cast(list(edited), recite(edited), verdicts=1) for name, edited in spoilt.items()}
