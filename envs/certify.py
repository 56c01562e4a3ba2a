"""The certificate of an environment package: machine-checked reasons to believe its rewards.

A learner finds every way to a reward, so an environment enters training only when its oracle earns everything, everybody who has not got
the skill earns little, and the verdict depends on the seed and the actions alone. 16 % of 1,968 public terminal tasks could be gamed
(arXiv 2606.08960). What a certificate cannot see, whether a given model finds the tasks neither trivial nor impossible, is calibration.

A certificate runs the package: give a pool with `sandbox="require"` for one that does not come with trace-jax.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import platform
import re
from collections.abc import Iterable, Sequence
from typing import Any

from envs.base import EnvironmentFault
from envs.package import Package
from envs.probes import Action, Play, Player, at_random, echo, nothing, play, recite, say, spam, start_text
from envs.sandbox import Pool

MEAN_BAR = 0.5  # what a player without the skill must stay below on average
SUCCESS_BAR = 0.05  # the share of seeds on which chance may give such a player the full reward
DISTINCT_BAR = 0.9  # different worlds (all that spamming brings to light) in proportion to seeds
VISIBLE_BAR = 50  # different prompts with their solutions, or half of the seeds where that is less; short prompts may coincide
KNOB_SEEDS = 5


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One line of a certificate. `passed` is None where the check could not be made; `detail` says what was found."""

    name: str
    passed: bool | None
    detail: str


@dataclasses.dataclass(frozen=True)
class Certificate:
    """What was checked of which package, when, and with what result.

    Attributes:
      digest: of the package; the certificate is void for any other.
      seeds: [first, last, how many].
      rewards: mean reward and share of full rewards by player.
    """

    package: str
    digest: str
    seeds: tuple[int, int, int]
    when: str
    versions: dict[str, str]
    checks: list[CheckResult]
    rewards: dict[str, dict[str, float]]

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def reasons(self) -> list[str]:
        """Why it did not pass."""
        return [f"{check.name}: {check.detail}" for check in self.checks if check.passed is False]

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "seeds": list(self.seeds), "passed": self.passed}

    def to_text(self) -> str:
        """A table for people."""
        marks = {True: "ok  ", False: "FAIL", None: "--  "}
        width = max(len(check.name) for check in self.checks)
        lines = [f"{self.package} ({self.digest[:12]}), {self.seeds[2]} seeds from {self.seeds[0]} to {self.seeds[1]}, {self.when}"]
        lines += [f"  {marks[check.passed]} {check.name:<{width}}  {check.detail}" for check in self.checks]
        return "\n".join([*lines, "certified" if self.passed else "NOT certified"])


def certify(package: Package, pool: Pool, *, target_tools: list[dict] | None = None, seeds: Iterable[int] = range(50)) -> Certificate:
    """Runs all checks.

    Args:
      package: at its default knobs; the oracle is also tried at the ends of every knob.
      pool: hosts the episodes; a second one, with other hash seeds and the same sandbox, is started for the comparison.
      target_tools: the tool schemas of the target; without them that check is left open.
      seeds: at least two.

    Raises:
      ValueError: fewer than two different seeds.
      SandboxError: a worker does not start.
    """
    seeds = list(dict.fromkeys(seeds))
    if len(seeds) < 2:
        raise ValueError("a certificate needs at least two different seeds")
    checks: list[CheckResult] = []
    rewards: dict[str, dict[str, float]] = {}
    try:
        tools = pool.function(package, "tools")
        scripts = _scripts(pool, package, seeds)
        hints = dict(zip(seeds, pool.functions(package, "hint", [(seed,) for seed in seeds]), strict=True))
    except EnvironmentFault as fault:
        checks.append(CheckResult("functions", False, brief(fault)))
    else:
        checks.append(CheckResult("functions", True, "TOOLS, oracle and hint give what they should"))
        oracle = play(pool, package, seeds, recite(scripts))
        checks += [
            _tools_equal_target(tools, target_tools),
            _oracle_succeeds(oracle, scripts),
            _oracle_at_knob_ends(pool, package, seeds[:KNOB_SEEDS]),
            _step_limit_leaves_room(package, scripts),
            _hint_keeps_the_answer(hints, scripts),
            _prompt_keeps_the_answer(oracle, scripts),
        ]
        turns = package.max_turns
        probes: dict[str, tuple[Player, int | None]] = {
            "nothing": (nothing, turns),
            "empty": (say(""), turns),
            "say_done": (say("All done."), turns),
            "echo": (echo, turns),
            "random": (at_random(tools, turns), turns),
            "memorised": (recite({seed: scripts[other] for seed, other in zip(seeds, [*seeds[1:], seeds[0]], strict=True)}), turns),
            "spam": (spam(tools), None),
        }
        plays = {"oracle": oracle}
        for name, (player, limit) in probes.items():
            plays[name] = play(pool, package, seeds, player, turns=limit)
            checks.append(_earns_little(name, plays[name]))
        rewards = {name: _summary(found) for name, found in plays.items()}
        checks += [
            _seeds_differ(plays["spam"], scripts),
            _repeats(pool, package, {"oracle": recite(scripts), "random": probes["random"][0]}, plays),
            _verifier_is_stable(plays),
            _no_faults(plays),
        ]
    return Certificate(
        package=package.name,
        digest=package.digest,
        seeds=(min(seeds), max(seeds), len(seeds)),
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), "package": package.version},
        checks=checks,
        rewards=rewards,
    )


def brief(fault: EnvironmentFault | str) -> str:
    """One line for the package's author: what failed, the last line of a traceback, and the line of environment.py."""
    first, *rest = str(fault).strip().splitlines()
    if not rest:
        return first
    places = re.findall(r'File "environment_\w+\.py", (line \d+(?:, in \w+)?)', str(fault))
    where = f" (environment.py, {places[-1]})" if places else ""
    return f"{first.removesuffix('Traceback (most recent call last):')}{rest[-1].strip()}{where}"


def _scripts(pool: Pool, package: Package, seeds: Sequence[int], knobs: dict | None = None) -> dict[int, list[Action]]:
    return dict(zip(seeds, pool.functions(package, "oracle", [(seed, knobs) for seed in seeds]), strict=True))


def _summary(plays: list[Play]) -> dict[str, float]:
    found = [one.reward for one in plays if one.reward is not None]
    return {"mean": sum(found) / len(found) if found else 0.0, "success": sum(r == 1.0 for r in found) / len(found) if found else 0.0}


def _tools_equal_target(tools: list[dict], target: list[dict] | None) -> CheckResult:
    if target is None:
        return CheckResult("tools", None, "not compared: no target given")
    by_name = {tool["function"]["name"]: tool for tool in target}
    unknown = [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in by_name]
    changed = [name for tool in tools if (name := tool["function"]["name"]) in by_name and tool != by_name[name]]
    if unknown or changed:
        return CheckResult(
            "tools", False, f"not in the target: {', '.join(unknown) or 'none'}; schema differs: {', '.join(changed) or 'none'}"
        )
    return CheckResult("tools", True, f"{len(tools)} of the target's {len(target)} tools, each equal to it")


def _oracle_succeeds(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
    short = [one.seed for one in plays if one.fault is None and len(one.steps) < len(scripts[one.seed])]
    failed = [one for one in plays if one.reward != 1.0]
    if failed:
        one = failed[0]
        why = (
            f"fault: {brief(one.fault)}"
            if one.fault
            else "failed: " + ", ".join(n for n, c in one.scores[0].checks.items() if not c.passed)
        )
        seeds = ", ".join(str(one.seed) for one in failed[:8])
        return CheckResult("oracle", False, f"no full reward on {len(failed)} of {len(plays)} seeds ({seeds}); seed {one.seed}: {why}")
    if short:
        return CheckResult("oracle", False, f"seed {short[0]}: the episode was over before the oracle had finished")
    return CheckResult("oracle", True, f"reward 1 on {len(plays)} of {len(plays)} seeds")


def _oracle_at_knob_ends(pool: Pool, package: Package, seeds: Sequence[int]) -> CheckResult:
    ends = [{name: value} for name, knob in package.knobs.items() for value in (knob.min, knob.max)]
    bad = []
    for knobs in ends:
        try:
            scripts = _scripts(pool, package, seeds, knobs)
            plays = play(pool, package, seeds, recite(scripts), knobs=knobs)
        except EnvironmentFault as fault:
            bad.append(f"{knobs}: {brief(fault)}")
            continue
        bad += [
            f"{knobs}, seed {one.seed}: {brief(one.fault) if one.fault else f'reward {one.reward}'}" for one in plays if one.reward != 1.0
        ]
        longest = max(map(len, scripts.values()))
        if longest > package.max_turns:
            bad.append(f"{knobs}: the oracle needs {longest} turns of {package.max_turns}")
    detail = "; ".join(bad[:3]) or f"reward 1 at the {len(ends)} ends of {len(package.knobs)} knobs, {len(seeds)} seeds each"
    return CheckResult("oracle_knobs", not bad, detail)


def _step_limit_leaves_room(package: Package, scripts: dict[int, list[Action]]) -> CheckResult:
    longest = max(map(len, scripts.values()))
    return CheckResult("step_limit", longest <= package.max_turns, f"the oracle needs up to {longest} of {package.max_turns} turns")


def _seeds_differ(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
    visible = len({repr((one.start, scripts[one.seed])) for one in plays})
    worlds = len({repr((one.start, scripts[one.seed], one.steps)) for one in plays})
    passed = worlds >= DISTINCT_BAR * len(plays) and visible >= min(VISIBLE_BAR, len(plays) / 2)
    return CheckResult("seeds_differ", passed, f"{len(plays)} seeds: {worlds} different worlds, {visible} different prompts with solutions")


def _argument_values(actions: list[Action]) -> set[str]:
    """All values in the arguments of calls, as text; true, false and null say nothing."""
    values, stack = set(), [action["arguments"] for action in actions if "name" in action]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
        elif item is not None and not isinstance(item, bool) and str(item).strip():
            values.add(str(item).strip())
    return values


def _contains(text: str, value: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


def _hint_keeps_the_answer(hints: dict[int, str], scripts: dict[int, list[Action]]) -> CheckResult:
    for seed, hint in hints.items():
        for value in sorted(_argument_values(scripts[seed])):
            if _contains(hint, value):
                return CheckResult("hint", False, f"seed {seed}: the hint holds {value!r}, an argument of the oracle")
        for action in scripts[seed]:
            if len(action.get("text", "")) >= 20 and action["text"] in hint:
                return CheckResult("hint", False, f"seed {seed}: the hint holds the oracle's text {action['text'][:60]!r}")
    return CheckResult("hint", True, "no hint holds an argument or a text of the oracle")


def _prompt_keeps_the_answer(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
    """A call is given away by a line that holds the tool's name and all its values."""
    for one in plays:
        calls = [action for action in scripts[one.seed] if _argument_values([action])]
        lines = start_text(one.start).splitlines() if one.start else []
        if calls and all(
            any(_contains(ln, c["name"]) and all(_contains(ln, v) for v in _argument_values([c])) for ln in lines) for c in calls
        ):
            return CheckResult("prompt", False, f"seed {one.seed}: the prompt spells out all calls of the oracle")
    return CheckResult("prompt", True, "no prompt spells out the oracle's calls")


def _earns_little(name: str, plays: list[Play]) -> CheckResult:
    found = _summary(plays)
    faults = sum(one.fault is not None for one in plays)
    passed = found["mean"] < MEAN_BAR and found["success"] <= SUCCESS_BAR and faults < len(plays)
    detail = f"mean reward {found['mean']:.3f} (< {MEAN_BAR}), full reward on {found['success']:.1%} (<= {SUCCESS_BAR:.0%})"
    return CheckResult(name, passed, detail + (f", {faults} faults" if faults else ""))


def _repeats(pool: Pool, package: Package, players: dict[str, Player], plays: dict[str, list[Play]]) -> CheckResult:
    """The same seeds and actions again, in this worker and in one with other hash seeds, in another order: all replies must be equal."""
    with Pool(1, deadline_s=pool.deadline_s, hash_seed=pool.hash_seed + 1, sandbox=pool.sandbox) as other:
        for place, host in (("again", pool), ("with another hash seed", other)):
            for name, player in players.items():
                first = {one.seed: one for one in plays[name]}
                turns = None if name == "oracle" else package.max_turns
                for one in play(host, package, list(reversed(first)), player, turns=turns):
                    before = first[one.seed]
                    part = "start" if one.start != before.start else "replies" if one.steps != before.steps else None
                    part = part or ("verdict" if one.scores != before.scores else None)
                    if part and one.fault is None and before.fault is None:
                        return CheckResult("repeats", False, f"seed {one.seed}, {name}: another {part} when played {place}")
    return CheckResult("repeats", True, "equal starts, replies and verdicts when played again, in another order, with another hash seed")


def _verifier_is_stable(plays: dict[str, list[Play]]) -> CheckResult:
    for name, found in plays.items():
        for one in found:
            if any(score != one.scores[0] for score in one.scores):
                return CheckResult("verifier", False, f"seed {one.seed}, {name}: asked {len(one.scores)} times, it gave different verdicts")
    return CheckResult("verifier", True, "equal verdicts when asked three times")


def _no_faults(plays: dict[str, list[Play]]) -> CheckResult:
    faults = [(name, one) for name, found in plays.items() for one in found if one.fault is not None]
    if faults:
        name, one = faults[0]
        kinds = collections.Counter(one.fault.kind for _, one in faults)
        counts = json.dumps(dict(sorted(kinds.items())))
        return CheckResult("faults", False, f"{len(faults)} episodes ended in a fault {counts}; {name}: {brief(one.fault)}")
    return CheckResult("faults", True, "no crash, no deadline missed, every reply well-formed, every reward in [0, 1]")
