"""Does an episode depend on its seed and actions alone? It is played again, elsewhere, in another order, and its module is watched."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from envs.base import EnvironmentFault
from envs.checks import CheckResult, brief
from envs.package import Package
from envs.probes import Play, Player, play
from envs.timed import TimedPool

_DOOR = "look"
# Runs in the worker behind the package's own text; `hint` is the door through which the host gets at it. It looks at what a module can keep
# between episodes: its variables, those of its classes, defaults and closures of its functions, the names in modules and builtins. A cache
# of functools may grow; what is in it may not change.
_WATCH = """

def _certificate_cached(state):
    # by cache and key, what caches of functools hold
    import functools, gc, zlib
    made = {}
    for name, value in list(state.items()):
        for owner, one in [(name, value), *((name + "." + k, v) for k, v in (vars(value).items() if isinstance(value, type) else ()))]:
            if isinstance(one, functools._lru_cache_wrapper):
                parts = gc.get_referents(one)
                kinds = [getattr(part, "__name__", "") if isinstance(part, type) else "" for part in parts]
                links = [i for i, kind in enumerate(kinds[:-2]) if kind == "_lru_list_elem" and kinds[i + 1] != "CacheInfo"]
                found = [(parts[i - 2], parts[i - 1]) for i in links]  # of a cache with a size; one without has a dict
                if not links:
                    found = [pair for part in parts if type(part) is dict and part is not one.__dict__ for pair in part.items()]
                made.update({owner + "() #" + repr(zlib.crc32(repr(key).encode("utf-8", "replace"))): item for key, item in found[:50]})
    return made


def _certificate_look(value, seen):
    import types
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, bytearray, range)):
        return repr(value)
    if isinstance(value, types.ModuleType):
        return ",".join(sorted(vars(value)))
    if id(value) in seen:
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
    state = {k: v for k, v in globals().items() if not (k.startswith("__") or k in ("hint", "_certificate_look", "_certificate_cached"))}
    state |= {"builtins": sorted(__builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)), **_certificate_cached(state)}
    return json.dumps({k: zlib.crc32(_certificate_look(v, set()).encode("utf-8", "replace")) for k, v in state.items()})
"""


def plays_alike(
    pool: TimedPool,
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
    with pool.another() as other:
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
                    state = json.loads(other.function(watched, "hint", _DOOR))
                except (EnvironmentFault, ValueError, RecursionError):
                    break
                states += [state] if isinstance(state, dict) else []  # the package may answer in its place
    detail = "equal starts, replies and verdicts when played again, in another order, with another hash seed"
    return [CheckResult("repeats", not wrong, wrong or detail), _nothing_kept(states)]


def _again(
    pool: TimedPool, package: Package, players: dict[str, tuple[Player, int | None]], plays: dict[str, list[Play]], place: str
) -> str:
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


def _told_again(pool: TimedPool, package: Package, told: dict[str, dict[int, Any]], place: str) -> str:
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
    # what a cache did not hold before is new, not changed
    changed = sorted({name.split(" #")[0] for name in after if after[name] != before.get(name, after[name] if " #" in name else None)})
    if changed:
        keep = "keep the state of an episode in its Environment, and what is costly to make behind functools.cache"
        return CheckResult("state", False, f"{', '.join(changed[:5])} of environment.py changed while other episodes were played; {keep}")
    return CheckResult("state", True, "episodes changed no variable of the module")
