"""The checks of a certificate that look at the package itself: its functions, its texts, its determinism, its speed.

What players without the skill can get out of it is in `envs.exploits`.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

from envs.base import EnvironmentFault, Start
from envs.package import Package
from envs.probes import Action, Play, Player, play, recite, request, start_text
from envs.readings import IDS, contains, distinct, tells
from envs.sandbox import Pool

DISTINCT_BAR = 0.9  # different worlds (all that spamming brings to light) in proportion to seeds
VISIBLE_BAR = 50  # different prompts with their solutions, or half of the seeds where that is less; short prompts may coincide
SIZE_BAR = 50_000  # characters of a prompt or a reply, about a third of a context of 32k tokens
MEDIAN_BAR_S, SLOWEST_BAR_S = 0.02, 2.0  # of one request alone; a batch of 256 episodes must fit into the pool's deadline
TIMINGS = 3  # attempts, since the machine may be busy with something else
TIMED_SEEDS, TIMED_CALLS = 4, 60
WATCHED_SEEDS = 8


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """One line of a certificate. `passed` is None where the check could not be made; `detail` says what was found."""

    name: str
    passed: bool | None
    detail: str


def brief(fault: EnvironmentFault | str) -> str:
    """One line for the package's author: what failed, the last line of a traceback, and the line of environment.py."""
    first, *rest = str(fault).strip().splitlines()
    if not rest:
        return first
    places = re.findall(r'File "environment_\w+\.py", (line \d+(?:, in \w+)?)', str(fault))
    where = f" (environment.py, {places[-1]})" if places else ""
    return f"{first.removesuffix('Traceback (most recent call last):')}{rest[-1].strip()}{where}"


def oracle_scripts(pool: Pool, package: Package, seeds: Sequence[int], knobs: dict | None = None) -> dict[int, list[Action]]:
    """What the oracle does on each seed. Raises EnvironmentFault."""
    return dict(zip(seeds, pool.functions(package, "oracle", [(seed, knobs) for seed in seeds]), strict=True))


def tools_equal_target(tools: list[dict], target: list[dict] | None) -> CheckResult:
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


def oracle_succeeds(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
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


def oracle_at_knob_ends(pool: Pool, package: Package, seeds: Sequence[int], player: Player) -> CheckResult:
    """Also whether each knob changes anything that the oracle or `player`, who tries all tools, meets."""
    ends = [{name: value} for name, knob in package.knobs.items() for value in (knob.min, knob.max) if knob.min < knob.max]
    bad, met = [], {}
    for knobs in ends:
        try:
            scripts = oracle_scripts(pool, package, seeds, knobs)
            plays = play(pool, package, seeds, recite(scripts), knobs=knobs)
            met.setdefault(*knobs, []).append([(one.start, one.steps, one.scores) for one in plays])
        except EnvironmentFault as fault:
            bad.append(f"{knobs}: {brief(fault)}")
            continue
        bad += [
            f"{knobs}, seed {one.seed}: {brief(one.fault) if one.fault else f'reward {one.reward}'}" for one in plays if one.reward != 1.0
        ]
        longest = max(map(len, scripts.values()))
        if longest > package.max_turns:
            bad.append(f"{knobs}: the oracle needs {longest} turns of {package.max_turns}")
    idle = []
    for name in [name for name, found in met.items() if len(found) == 2 and found[0] == found[1]]:
        knob = package.knobs[name]
        low, high = (play(pool, package, seeds, player, knobs={name: value}) for value in (knob.min, knob.max))
        if [(one.start, one.steps) for one in low] == [(one.start, one.steps) for one in high]:
            idle.append(name)
    if idle and len(idle) == len(met):
        bad.append(f"no knob changes anything that can be seen ({', '.join(idle)}); use them in the task, or remove them from package.json")
    detail = "; ".join(bad[:3]) or f"reward 1 at the {len(ends)} ends of {len(package.knobs)} knobs, {len(seeds)} seeds each"
    if idle:
        detail += f"; {', '.join(idle)} changes nothing that can be seen, so no difficulty will be found there"
    return CheckResult("oracle_knobs", not bad, detail)


def step_limit_leaves_room(package: Package, scripts: dict[int, list[Action]]) -> CheckResult:
    longest = max(map(len, scripts.values()))
    return CheckResult("step_limit", longest <= package.max_turns, f"the oracle needs up to {longest} of {package.max_turns} turns")


def seeds_differ(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
    """Whether seeds make different tasks, as the player sees them that brings most to light."""
    visible = len({repr((one.start, scripts[one.seed])) for one in plays})
    worlds = len({repr((one.start, scripts[one.seed], one.steps)) for one in plays})
    passed = worlds >= DISTINCT_BAR * len(plays) and visible >= min(VISIBLE_BAR, len(plays) / 2)
    return CheckResult("seeds_differ", passed, f"{len(plays)} seeds: {worlds} different worlds, {visible} different prompts with solutions")


def argument_values(actions: list[Action]) -> set[str]:
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


def hint_keeps_the_answer(hints: dict[int, str], scripts: dict[int, list[Action]]) -> CheckResult:
    for seed, hint in hints.items():
        for value in sorted(argument_values(scripts[seed])):
            if tells(hint, value):
                how = "" if contains(hint, value) else ", in disguise"
                return CheckResult("hint", False, f"seed {seed}: the hint holds {value!r}, an argument of the oracle{how}")
        for action in scripts[seed]:
            if len(action.get("text", "")) >= 20 and tells(hint, action["text"]):
                return CheckResult("hint", False, f"seed {seed}: the hint holds the oracle's text {action['text'][:60]!r}")
    return CheckResult("hint", True, "no hint holds an argument or a text of the oracle")


def prompt_keeps_the_answer(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
    for one in plays:
        calls = [action for action in scripts[one.seed] if argument_values([action])]
        if one.start and calls and all(spells_out(start_text(one.start), call) for call in calls):
            return CheckResult("prompt", False, f"seed {one.seed}: the prompt spells out all calls of the oracle")
    found = {one.seed: one.start for one in plays if one.start and scripts[one.seed]}
    told = [seed for seed, start in found.items() if _told_by_policy(start, scripts[seed], found.values())]
    if len(told) > len(found) / 2:
        detail = f"the system prompt holds what the oracle writes and the user does not say, on {len(told)} of {len(found)} seeds"
        return CheckResult("prompt", False, f"{detail} ({told[0]})")
    return CheckResult("prompt", True, "no prompt spells out the oracle's calls, no system prompt its values")


def _told_by_policy(start: Start, script: list[Action], others: Iterable[Start]) -> bool:
    """Whether the system prompt holds a value of the oracle's last action that is of this seed and that nobody else says."""
    said = "\n".join(message["content"] for message in start.messages)
    for value in argument_values(script[-2:]) | set(IDS.findall(script[-1].get("text", ""))):
        if distinct(value) and tells(start.system, value) and not contains(said, value):
            return sum(contains(other.system, value) for other in others) <= 2
    return False


def clock_is_not_read(package: Package) -> CheckResult:
    """The other source of chance that no two plays an instant apart show. What an author means is found, not what an adversary hides."""
    for node in ast.walk(ast.parse(package.source)):
        if isinstance(node, ast.Attribute) and node.attr in ("now", "utcnow", "today", "SystemRandom"):
            owner = _dotted(node.value)
            if re.search(r"date|random", owner):
                detail = f"environment.py:{node.lineno} reads {owner}.{node.attr}; take time and chance from the seed"
                return CheckResult("clock", False, detail)
    return CheckResult("clock", True, "no clock and no chance but the seed's is read")


def _dotted(node: ast.expr) -> str:
    """`a.b` of a name or of attributes of one; not `ast.unparse`, which goes as deep as a text of the package makes it."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([getattr(node, "id", ""), *reversed(parts)])


def spells_out(text: str, call: Action) -> bool:
    """A call is given away by a line that holds the tool's name and all its values."""
    values = argument_values([call])
    return any(contains(line, call["name"]) and all(contains(line, value) for value in values) for line in text.splitlines())


def verifier_is_stable(pool: Pool, package: Package, plays: dict[str, list[Play]], scripts: dict[int, list[Action]]) -> CheckResult:
    for name, found in plays.items():
        for one in found:
            if any(score != one.scores[0] for score in one.scores):
                return CheckResult("verifier", False, f"seed {one.seed}, {name}: asked {len(one.scores)} times, it gave different verdicts")
    undisturbed = {one.seed: one for one in plays["oracle"]}
    for one in play(pool, package, list(undisturbed)[:WATCHED_SEEDS], recite(scripts), peek=True):
        before = undisturbed[one.seed]
        if one.fault is None and before.fault is None and (one.steps, one.scores) != (before.steps, before.scores):
            return CheckResult("verifier", False, f"seed {one.seed}, oracle: asked after every turn as well, it gave another verdict")
    return CheckResult("verifier", True, "equal verdicts when asked three times, and when asked after every turn")


def no_faults(plays: dict[str, list[Play]]) -> CheckResult:
    faults = [(name, one) for name, found in plays.items() for one in found if one.fault is not None]
    if faults:
        name, one = faults[0]
        kinds = collections.Counter(one.fault.kind for _, one in faults)
        counts = json.dumps(dict(sorted(kinds.items())))
        return CheckResult("faults", False, f"{len(faults)} episodes ended in a fault {counts}; {name}: {brief(one.fault)}")
    episodes = sum(map(len, plays.values()))
    return CheckResult("faults", True, f"{episodes} episodes: no crash, no deadline missed, replies well-formed, rewards in [0, 1]")


def sizes_fit(plays: dict[str, list[Play]]) -> CheckResult:
    prompts = [len(start_text(one.start)) for one in plays["oracle"] if one.start]
    replies = [len(reply.text or "") for name in ("oracle", "random", "spam") for one in plays[name] for _, reply in one.steps]
    longest = max(prompts, default=0), max(replies, default=0)
    detail = f"prompts of up to {longest[0]} characters, replies of up to {longest[1]} (<= {SIZE_BAR})"
    return CheckResult("sizes", max(longest) <= SIZE_BAR, detail)


def steps_are_fast(
    pool: Pool, package: Package, scripts: dict[int, list[Action]], calls: list[Action]
) -> tuple[CheckResult, dict[str, float]]:
    """Times requests one by one: the oracle's, and `calls` of another player. The figures are for people, the verdict is kept.

    Returns:
      The check, and median, p99 and slowest in milliseconds.
    """
    bars = f"median (<= {MEDIAN_BAR_S * 1000:g} ms), slowest (<= {SLOWEST_BAR_S:g} s)"
    for _ in range(TIMINGS):
        seconds = sorted(_time(pool, package, scripts, calls))
        median, p99, slowest = statistics.median(seconds), seconds[int(0.99 * (len(seconds) - 1))], seconds[-1]
        passed = median <= MEDIAN_BAR_S and slowest <= SLOWEST_BAR_S
        if passed:
            break
    detail = f"within the bounds: {bars}" if passed else f"median {median * 1000:.1f} ms, slowest {slowest:.2f} s; bounds: {bars}"
    return CheckResult("speed", passed, detail), {"median_ms": median * 1000, "p99_ms": p99 * 1000, "slowest_ms": slowest * 1000}


def _time(pool: Pool, package: Package, scripts: dict[int, list[Action]], calls: list[Action]) -> list[float]:
    """Seconds of each request."""
    seconds: list[float] = []
    for seed in list(scripts)[:TIMED_SEEDS]:
        episode = pool.open(package, seed)
        actions = scripts[seed] if seconds else scripts[seed] + calls[:TIMED_CALLS]
        for operation in [("reset", ()), *map(request, actions), ("score", ())]:
            began = time.perf_counter()
            pool.batch([(episode, *operation)])
            seconds.append(time.perf_counter() - began)
            if episode.fault is not None:
                break
    return seconds


def summary(plays: list[Play]) -> dict[str, float]:
    """Mean reward and share of full rewards, of the episodes that had a verdict."""
    found: list[Any] = [one.reward for one in plays if one.reward is not None]
    return {"mean": sum(found) / len(found) if found else 0.0, "success": sum(r == 1.0 for r in found) / len(found) if found else 0.0}
