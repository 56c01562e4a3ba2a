"""The checks of a certificate that look at the package itself: its functions, its texts, its determinism, its speed.

What players without the skill can get out of it is in `envs.exploits`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

from envs.base import EnvironmentFault
from envs.package import Package
from envs.probes import Action, Play, Player, play, recite, request, start_text
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


def oracle_at_knob_ends(pool: Pool, package: Package, seeds: Sequence[int]) -> CheckResult:
    ends = [{name: value} for name, knob in package.knobs.items() for value in (knob.min, knob.max)]
    bad = []
    for knobs in ends:
        try:
            scripts = oracle_scripts(pool, package, seeds, knobs)
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


def step_limit_leaves_room(package: Package, scripts: dict[int, list[Action]]) -> CheckResult:
    longest = max(map(len, scripts.values()))
    return CheckResult("step_limit", longest <= package.max_turns, f"the oracle needs up to {longest} of {package.max_turns} turns")


def seeds_differ(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
    """Args: `plays`: those of the player that brings most to light."""
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


def contains(text: str, value: str) -> bool:
    """Whether a value stands in a text as a word of its own."""
    if value.lower() not in text.lower():
        return False
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text, re.IGNORECASE) is not None


def hint_keeps_the_answer(hints: dict[int, str], scripts: dict[int, list[Action]]) -> CheckResult:
    for seed, hint in hints.items():
        for value in sorted(argument_values(scripts[seed])):
            if contains(hint, value):
                return CheckResult("hint", False, f"seed {seed}: the hint holds {value!r}, an argument of the oracle")
        for action in scripts[seed]:
            if len(action.get("text", "")) >= 20 and action["text"] in hint:
                return CheckResult("hint", False, f"seed {seed}: the hint holds the oracle's text {action['text'][:60]!r}")
    return CheckResult("hint", True, "no hint holds an argument or a text of the oracle")


def prompt_keeps_the_answer(plays: list[Play], scripts: dict[int, list[Action]]) -> CheckResult:
    for one in plays:
        calls = [action for action in scripts[one.seed] if argument_values([action])]
        if one.start and calls and all(spells_out(start_text(one.start), call) for call in calls):
            return CheckResult("prompt", False, f"seed {one.seed}: the prompt spells out all calls of the oracle")
    return CheckResult("prompt", True, "no prompt spells out the oracle's calls")


def spells_out(text: str, call: Action) -> bool:
    """A call is given away by a line that holds the tool's name and all its values."""
    values = argument_values([call])
    return any(contains(line, call["name"]) and all(contains(line, value) for value in values) for line in text.splitlines())


def plays_alike(
    pool: Pool,
    package: Package,
    players: dict[str, tuple[Player, int | None]],
    plays: dict[str, list[Play]],
    told: dict[str, dict[int, Any]],
) -> list[CheckResult]:
    """The same seeds and actions again, in this worker and in one with other hash seeds, in another order: all replies must be equal.

    The second worker also looks at the variables of the package's module, so that a memory is found that would matter only after a
    thousand episodes. It finds what an author left behind, not what an adversary hides.

    Args:
      told: what the functions `oracle` and `hint` gave, by seed.
    """
    watched = dataclasses.replace(package, source=package.source + _WATCH)
    seeds = [one.seed for one in plays["random"]]
    with Pool(1, deadline_s=pool.deadline_s, hash_seed=pool.hash_seed + 1, sandbox=pool.sandbox) as other:
        states = []
        for place, host, code, part in (
            ("again", pool, package, seeds),
            # what is made when it is first needed is no memory, hence one seed before the first look
            ("with another hash seed", other, watched, seeds[-1:]),
            ("with another hash seed", other, watched, seeds[:-1]),
        ):
            wrong = _again(host, code, players, {name: [p for p in plays[name] if p.seed in part] for name in players}, place)
            wrong = wrong or _told_again(host, code, {name: {seed: found[seed] for seed in part} for name, found in told.items()}, place)
            if wrong:
                break
            if host is other:
                try:
                    states.append(json.loads(other.function(watched, "hint", _DOOR)))
                except (EnvironmentFault, ValueError):
                    break
    detail = "equal starts, replies and verdicts when played again, in another order, with another hash seed"
    return [CheckResult("repeats", not wrong, wrong or detail), _nothing_kept(states)]


def _again(pool: Pool, package: Package, players: dict[str, tuple[Player, int | None]], plays: dict[str, list[Play]], place: str) -> str:
    """What is not as it was; empty if all is."""
    for name, (player, turns) in players.items():
        first = {one.seed: one for one in plays[name]}
        for one in play(pool, package, list(reversed(first)), player, turns=turns):
            before = first[one.seed]
            part = "start" if one.start != before.start else "replies" if one.steps != before.steps else None
            part = part or ("verdict" if one.scores != before.scores else None)
            if part and one.fault is None and before.fault is None:
                return f"seed {one.seed}, {name}: another {part} when played {place}"
    return ""


def _told_again(pool: Pool, package: Package, told: dict[str, dict[int, Any]], place: str) -> str:
    for function, first in told.items():
        try:
            found = pool.functions(package, function, [(seed,) for seed in first])
        except EnvironmentFault as fault:
            return f"no {function} when asked {place}: {brief(fault)}"
        for (seed, before), after in zip(first.items(), found, strict=True):
            if after != before:
                return f"seed {seed}: another {function} when asked {place}"
    return ""


def _nothing_kept(states: list[dict[str, int]]) -> CheckResult:
    """Compares what the worker saw of the module's variables."""
    if len(states) < 2:
        return CheckResult("state", None, "the module's variables were not looked at, since its episodes could not be repeated")
    before, after = states
    changed = sorted(name for name in after if after[name] != before.get(name))
    if changed:
        keep = "keep the state of an episode in its Environment, and what is costly to make behind functools.cache"
        return CheckResult("state", False, f"{', '.join(changed[:5])} of environment.py changed while other episodes were played; {keep}")
    return CheckResult("state", True, "episodes changed no variable of the module")


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


_DOOR = "look"
# Runs in the worker behind the package's own text; `hint` is the door through which the host gets at it. It looks at what a module can keep
# between episodes: its variables, those of its classes, defaults and closures of its functions. Caches of functools are left alone.
_WATCH = """

def _certificate_look(value, seen):
    import types
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray, range)):
        return repr(value)
    if id(value) in seen or isinstance(value, types.ModuleType):
        return ""
    seen.add(id(value))
    parts = [type(value).__name__]
    if isinstance(value, dict):
        parts += [_certificate_look(k, seen) + ":" + _certificate_look(v, seen) for k, v in value.items()]
    elif isinstance(value, (set, frozenset)):
        parts += sorted(_certificate_look(item, seen) for item in value)
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        parts += [_certificate_look(item, seen) for item in value]
    elif isinstance(value, types.FunctionType):
        parts += [_certificate_look(value.__defaults__, seen), _certificate_look(value.__kwdefaults__, seen)]
        parts += [_certificate_look(cell.cell_contents, seen) for cell in value.__closure__ or () if cell != types.CellType()]
        parts += [_certificate_look(value.__dict__, seen)]
    elif isinstance(value, type):
        if value.__module__ == __name__:
            parts += [k + ":" + _certificate_look(v, seen) for k, v in vars(value).items() if not isinstance(v, types.GetSetDescriptorType)]
    elif hasattr(value, "getstate"):
        parts += [repr(value.getstate())]
    elif type(value).__module__ in ("itertools", "builtins"):
        parts += [repr(value)]
    elif hasattr(value, "__dict__"):
        parts += [_certificate_look(vars(value), seen)]
    return "(" + ",".join(parts) + ")"


def hint(seed, knobs, _certificate_hint=hint):
    if seed != "look":
        return _certificate_hint(seed, knobs)
    import json, zlib
    state = {k: v for k, v in globals().items() if not (k.startswith("__") or k in ("hint", "_certificate_look"))}
    return json.dumps({k: zlib.crc32(_certificate_look(v, set()).encode("utf-8", "replace")) for k, v in state.items()})
"""


def summary(plays: list[Play]) -> dict[str, float]:
    """Mean reward and share of full rewards, of the episodes that had a verdict."""
    found: list[Any] = [one.reward for one in plays if one.reward is not None]
    return {"mean": sum(found) / len(found) if found else 0.0, "success": sum(r == 1.0 for r in found) / len(found) if found else 0.0}
