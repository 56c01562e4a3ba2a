"""The certificate of an environment package: machine-checked reasons to believe its rewards.

A learner finds every way to a reward, so an environment enters training only when its oracle earns everything, everybody who has not got
the skill earns little, and the verdict depends on the seed and the actions alone. 16 % of 1,968 public terminal tasks could be gamed
(arXiv 2606.08960). What a certificate cannot see, whether a given model finds the tasks neither trivial nor impossible, is calibration.

Some of the seeds are drawn for the certificate, from the package's own text and a word that its author does not know, so that a package
cannot be honest on known seeds alone. `envs.checks` and `envs.repeats` look at the package, `envs.exploits` and `envs.guesses` try to be
rewarded for nothing. What they cannot find, a certificate says: `LIMITS`.

A certificate runs the package: give a pool with `sandbox="require"` for one that does not come with trace-jax.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import platform
import random
import time
from collections.abc import Iterable, Sequence
from typing import Any

from envs import checks as look
from envs import exploits, guesses, repeats
from envs.arguments import check_schema
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
    last_words,
    nothing,
    odd,
    parrot,
    play,
    play_all,
    recite,
    say,
    spam,
    start_text,
)
from envs.sandbox import Pool
from envs.timed import OutOfTime, TimedPool

__all__ = ["Certificate", "CheckResult", "brief", "certify", "draw_seeds"]

KNOB_SEEDS = 5
FRESH = 4, 40  # the least that are drawn; half of those that are given, but no more than so many, or a tenth if that is more
ALL_PROBED = 50  # with more given seeds than this, the players try no more of them than were drawn
ODD_SEEDS = 6
WATCHED_SEEDS = 8  # where each action of the oracle is left out in turn
MINUTES = 30.0
LIMITS = (
    "Not found by any of this: a reward for what the package keeps as a hash alone, for several words in a row, or on a few seeds of "
    "its choice; free writes, or a crash, about records that only a look-up by a word shows which no prompt and no result holds; "
    "a memory or clock hidden from a look at the module; a hint in a cipher or riddle. Read a package that is not yours."
)
USUAL_SEEDS = 10_000_000  # most people's are smaller


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was checked of which package, when, and with what result.

    Attributes:
      digest: of the package; the certificate is void for any other.
      seeds: [first, last, how many] of those that were given.
      fresh: those that were drawn beside them.
      rewards: mean reward and share of full rewards by player, on the given seeds.
      timing: milliseconds of one request, `median_ms`, `p99_ms` and `slowest_ms`; of this machine, so they are not part of what is stored.
    """

    package: str
    digest: str
    seeds: tuple[int, int, int]
    fresh: list[int]
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
        content = {**dataclasses.asdict(self), "seeds": list(self.seeds), "passed": self.passed, "limits": LIMITS}
        return content if timing else {key: value for key, value in content.items() if key != "timing"}

    def to_text(self) -> str:
        """A table for people."""
        marks = {True: "ok  ", False: "FAIL", None: "--  "}
        width = max(len(check.name) for check in self.checks)
        seeds = f"{self.seeds[2]} seeds from {self.seeds[0]} to {self.seeds[1]} and {len(self.fresh)} others"
        lines = [f"{self.package} ({self.digest[:12]}), {seeds}, {self.when}"]
        lines += [f"  {marks[check.passed]} {check.name:<{width}}  {check.detail}" for check in self.checks]
        if self.timing:
            median, p99, slowest = (self.timing[key] for key in ("median_ms", "p99_ms", "slowest_ms"))
            lines.append(f"one request takes {median:.2f} ms (median), {p99:.2f} ms (p99), {slowest:.2f} ms (slowest)")
        return "\n".join([*lines, LIMITS, "certified" if self.passed else "NOT certified"])


def draw_seeds(package: Package, salt: str, given: Sequence[int], used: Sequence[range] = ()) -> list[int]:
    """Seeds that nobody knows who does not know `salt`: by turns of each range of `used`, below USUAL_SEEDS, up to 2^31, beyond, and
    below 0.

    The package's text is part of the draw, so a text cannot hold the seeds that it will be tried on.
    """
    rng = random.Random(f"{package.digest} {salt}")
    places = [functools.partial(rng.choice, one) for one in used]
    places += [lambda: rng.randrange(USUAL_SEEDS), lambda: int(2 ** rng.uniform(0, 31))]
    places += [lambda: int(2 ** rng.uniform(31, 52)), lambda: -int(2 ** rng.uniform(0, 31))]
    least, most = FRESH
    count = max(least, min(len(given) // 2, most), len(given) // 10, len(places) if len(given) > least else 0)
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
    minutes: float = MINUTES,
) -> Certificate:
    """Runs all checks.

    Args:
      package: at its default knobs; the oracle is also tried at the ends of every knob.
      pool: hosts the episodes; a second one, with other hash seeds and the same sandbox, is started for the comparison.
      target_tools: the tool schemas of the target; without them that check is left open.
      seeds: at least two. `draw_seeds` adds others.
      salt: what the package's author does not know, for `draw_seeds`; the same one gives the same certificate.
      used: where the seeds lie that the package will be used on; some of each are tried.
      minutes: what it may take; a package that needs longer is refused.

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
    timed = TimedPool(pool, time.monotonic() + 60 * minutes)
    try:
        tools = timed.function(package, "tools")
        for tool in tools:
            check_schema(tool["function"]["parameters"])
        scripts = look.oracle_scripts(timed, package, seeds + fresh)
        hints = dict(zip(scripts, timed.functions(package, "hint", [(seed,) for seed in scripts]), strict=True))
    except EnvironmentFault as fault:
        checks.append(CheckResult("functions", False, brief(fault)))
    except OutOfTime:
        checks.append(_late(minutes, len(seeds)))
    else:
        checks.append(CheckResult("functions", True, "TOOLS, oracle and hint give what they should"))
        try:
            found, rewards, timing = _Trial(package, timed, tools, target_tools, seeds, fresh, scripts, hints).run()
        except OutOfTime:
            checks.append(_late(minutes, len(seeds)))
        else:
            checks += found
    return Certificate(
        package=package.name,
        digest=package.digest,
        seeds=(min(seeds), max(seeds), len(seeds)),
        fresh=fresh,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), "package": package.version},
        checks=checks,
        rewards=rewards,
        timing=timing,
    )


def _late(minutes: float, seeds: int) -> CheckResult:
    fix = "make reset, calls and score faster (a few milliseconds each), or allow more --config.synthesis.certify_minutes"
    return CheckResult(
        "time", False, f"not done with {seeds} seeds after {minutes:g} minutes (config field 'synthesis.certify_minutes'); {fix}"
    )


@dataclasses.dataclass
class _Trial:
    """What all checks of one certificate share. The players try the `probed` seeds and the fresh ones, the oracle all of them."""

    package: Package
    pool: TimedPool
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
        every = -(-len(self.seeds) // len(self.fresh)) if len(self.seeds) > ALL_PROBED else 1
        probed = self.seeds[::every] + self.fresh
        neighbours = dict(zip(probed, [*probed[1:], probed[0]], strict=True))
        probes: dict[str, tuple[Player, int | None]] = {
            "nothing": (nothing, turns),
            "empty": (say(""), turns),
            "say_done": (say("All done."), turns),
            "echo": (echo, turns),
            "last_words": (last_words, turns),
            "parrot": (parrot(self.tools), turns),
            "random": (at_random(self.tools, turns), turns),
            "memorised": (recite({seed: scripts[other] for seed, other in neighbours.items()}), turns),
            "closing": (recite({seed: [a for a in scripts[other] if "text" in a] for seed, other in neighbours.items()}), turns),
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
        plays |= play_all(pool, package, casts | self._spoilt(tried, writes.names, plays["oracle"]))
        left_out, stray_edits, writing = {}, [], writes
        if writes.names is None:
            watched = {seed: scripts[seed] for seed in probed[-WATCHED_SEEDS:]}
            left_out, stray_edits = self._without_writes(watched)
            writing = exploits.needed_writes(watched, left_out, plays["oracle"])
        strays = {} if stray_edits else exploits.with_strays(tried, plays["spam"], writing)
        edited = {seed: script for seed, (script, _) in strays.items()}
        plays["stray_write"] = stray_edits or play(pool, package, list(edited), recite(edited))

        known = {name: [one for one in found if one.seed in given] for name, found in plays.items()}
        judged = [exploits.earns_little(name, known[name]) for name in (*probes, "odd")]
        others = {name: [one for one in found if one.seed not in given] for name, found in plays.items()}
        oracle = look.oracle_succeeds(known["oracle"], scripts)
        behaved = {check.name: check.passed is True for check in [oracle, *judged]}

        def again(name: str, seeds: range) -> list[Play]:
            player, limit = probes[name]
            return play_all(pool, package, {name: Cast(seeds, player, limit, 1)})[name] if name not in ("memorised", "closing") else []

        told = [start_text(one.start) for one in plays["oracle"][:2] if one.start]
        told += [name for one in plays["oracle"][:2] for score in one.scores[:1] for name in score.checks]
        heard = guesses.listen(pool, package, self.tools, {seed: scripts[seed] for seed in self.seeds})
        ends = all(len(one.steps) == 1 for one in plays["say_done"])
        found = list(dict.fromkeys([*heard, *guesses.words(package, self.tools, told)]))
        blind = guesses.blind_scripts(package, self.tools, found, max(map(len, scripts.values())), ends)

        both = {"oracle": (recite(scripts), None), "random": probes["random"]}
        calls = [action for action, _ in plays["spam"][0].steps]
        speed, timing = look.steps_are_fast(pool, package, scripts, calls)
        checks = [
            look.tools_equal_target(self.tools, self.target_tools),
            oracle,
            look.oracle_at_knob_ends(pool, package, self.seeds[:KNOB_SEEDS], spam(self.tools)),
            look.step_limit_leaves_room(package, scripts),
            look.hint_keeps_the_answer(self.hints, scripts),
            look.prompt_keeps_the_answer(plays["oracle"], scripts),
            *judged,
            exploits.a_write_left_out_costs("early", plays["early"], writes.names),
            exploits.a_write_left_out_costs("incomplete", plays["incomplete"], writes.names)
            if writes.names is not None
            else exploits.something_is_needed(left_out.values()),
            exploits.content_decides("altered", plays["altered"]),
            exploits.content_decides("shape", plays["shape"]),
            guesses.guesses_earn_nothing(pool, package, blind, self.fresh + self.seeds[::-1]),
            exploits.repetition_earns_nothing(plays["once"], plays["repeat"]),
            exploits.stray_edits_cost(stray_edits)
            if stray_edits
            else exploits.strays_cost(package, plays["stray_write"], {seed: place for seed, (_, place) in strays.items()}, writing),
            exploits.same_on_fresh_seeds(others["oracle"], {name: others[name] for name in probes}, behaved, again),
            exploits.tools_keep_the_answer(plays["oracle"], plays["spam"], self._blind(plays), self.tools),
            look.clock_is_not_read(package),
            look.seeds_differ(plays["spam"], scripts),
            *repeats.plays_alike(pool, package, both, plays, {"oracle": scripts, "hint": self.hints}),
            look.verifier_is_stable(pool, package, plays, scripts),
            look.no_faults(plays),
            look.sizes_fit(plays),
            speed,
        ]
        return checks, {name: look.summary(known[name]) for name in ("oracle", *probes)}, timing

    def _blind(self, plays: dict[str, list[Play]]) -> list[Play]:
        """Those of players who know nothing."""
        return [one for name in ("inject_call", "odd", "empty", "say_done", "inject_text") for one in plays[name]]

    def _without_writes(self, scripts: exploits.Scripts) -> tuple[dict[str, list[Play]], list[Play]]:
        """What is tried in place of writes where no check says which calls write."""
        pool, package = self.pool, self.package
        casts = {name: Cast(list(edited), recite(edited), verdicts=1) for name, edited in exploits.one_by_one(scripts).items()}
        tool = next((action["name"] for script in scripts.values() for action in script if "command" in action.get("arguments", {})), None)
        listing = {"name": tool, "arguments": {"command": "git ls-files"}}
        listings = play(pool, package, list(scripts), recite(dict.fromkeys(scripts, [listing]))) if tool else []
        edited = exploits.stray_edits(scripts, listings)
        return play_all(pool, package, casts), play(pool, package, list(edited), recite(edited))

    def _spoilt(self, scripts: exploits.Scripts, writes: set[str] | None, oracle: list[Play]) -> dict[str, Cast]:
        """The oracle, with something missing, too much, or exchanged."""
        shown = {one.seed: "\n".join(reply.text or "" for _, reply in one.steps) for one in oracle}
        last = {seed: place for seed, script in scripts.items() if (place := exploits.last_write(script, writes)) is not None}
        spoilt = {
            "altered": guesses.exchanged({s: scripts[s] for s in last}, shown, {s: slice(i, i + 1) for s, i in last.items()}),
            "shape": guesses.exchanged(scripts, shown, dict.fromkeys(scripts, slice(None))),
            "early": exploits.early(scripts, writes),
            "incomplete": exploits.incomplete(scripts, writes),
            "once": exploits.alone(scripts, 1),
            "repeat": exploits.alone(scripts, exploits.REPEATS),
            "twice": exploits.twice(scripts),
        }
        return {name: Cast(list(edited), recite(edited), verdicts=1) for name, edited in spoilt.items()}
