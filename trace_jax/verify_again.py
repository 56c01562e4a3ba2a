"""`trace-jax verify-again`: stored rollouts scored by the verifier as it is now, and what differs.

    stored messages -> the agent's actions -> the environment, in the sandbox -> the same replies? -> the verdict, old and new

Nothing is sampled and no rollout is changed. A rollout whose environment now replies otherwise cannot be compared, since with that reply
the agent might have done something else: it is listed as drifted, with the first reply that differs. Differences are a result, not a
failure: the exit code is 0, and `verify-again.json` has them all.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envs import Check, EnvironmentFault, Package, PackageError, Pool, SandboxError, load_package
from envs.builtin import is_builtin
from envs.certify import brief
from rl.replay import steps
from rl.trajectory import StopReason, Trajectory
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.runtime import find_package
from trace_jax.workdir import Workdir

FILE = "verify-again.json"
SAME, CHANGED, DRIFTED, FAULT, SKIPPED = KINDS = ("same", "changed", "drifted", "fault", "skipped")
_CHUNK = 64  # rollouts whose actions travel together
_SHOWN = 10  # rollouts of each kind that are printed
_TEXT = 300  # characters of a reply that are kept


@dataclasses.dataclass(frozen=True)
class Verifier:
    """Who scores the rollouts of one environment.

    Attributes:
      package: the stored one, or the changed one.
      knobs: at which the rollouts were made.
      calibrations: knobs by split, where step 2 tried others; what other packages earned in its other splits is not verified.
    """

    package: Package
    knobs: Mapping[str, Any]
    calibrations: Mapping[str, Mapping[str, Any]]

    def knobs_of(self, split: str) -> Mapping[str, Any] | None:
        """None where the rollouts are of another package."""
        return self.calibrations.get(split) if split.startswith("calibration-") else self.knobs


def find_verifiers(arguments: Arguments) -> dict[str, Verifier]:
    """Who scores what, by the name of the environment: the target and the capabilities of the workdir, or the one that was asked for.

    Raises:
      InputError: no such capability, or a package that cannot be used.
    """
    workdir, config, found = arguments.workdir, arguments.config, {}
    names = [name.split("/") for name in workdir.list("environments")]
    capabilities = sorted(name[1] for name in names if name[2:] == ["package.json"])
    if arguments.capability and arguments.capability not in capabilities:
        there = ", ".join(capabilities) or "none"
        raise InputError(f"--capability={arguments.capability}: the workdir has no such environment; there are: {there}")
    if not arguments.capability and not config.benchmark.name:  # a benchmark judges its own files again, with its own command
        target = find_package(config.target.package, "target.package")
        found[target.name] = Verifier(target, target.resolve_knobs(config.target.knobs), {})
    try:
        for capability in [arguments.capability] if arguments.capability else capabilities:
            package = load_package(workdir.local(f"environments/{capability}"))
            found[package.name] = Verifier(package, package.resolve_knobs(), _calibrations(workdir, capability, package))
        return found if arguments.package is None else _changed(found, load_package(arguments.package))
    except PackageError as error:
        raise InputError(str(error)) from error


def _changed(found: Mapping[str, Verifier], package: Package) -> dict[str, Verifier]:
    """The changed package alone, at the knobs of the rollouts, whatever its own defaults are."""
    if package.name not in found:
        raise InputError(f"--package={package.path}: nothing was rolled out in {package.name!r}; there are: {', '.join(found)}")
    stored = found[package.name]
    for knobs in (stored.knobs, *stored.calibrations.values()):
        package.resolve_knobs(knobs)  # raises where it has not these knobs
    return {package.name: dataclasses.replace(stored, package=package)}


def _calibrations(workdir: Workdir, capability: str, package: Package) -> dict[str, Mapping[str, Any]]:
    """The splits in which this package was calibrated, and its knobs there."""
    name = f"environments/{capability}/calibration.json"
    found = workdir.read_json(name) if workdir.exists(name) else {}
    split, knobs = found.get("split", f"calibration-{capability}"), package.resolve_knobs()
    return {one["split"]: one["knobs"] for one in found.get("search", ())} | {split: knobs, f"{split}-hinted": knobs}


def verify(pool: Pool, verifier: Verifier, trajectories: Sequence[Trajectory]) -> Iterator[dict[str, Any]]:
    """Plays trajectories again.

    Yields:
      For each `result`, one of KINDS; with it `old` and `new` reward and the `checks` that flipped, or the reply that differs
      (`message_index`, `stored`, `replayed`), or `why` there is none.
    """
    for start in range(0, len(trajectories), _CHUNK):
        chunk, requests, ends = trajectories[start : start + _CHUNK], [], [0]
        for t in chunk:
            episode = pool.open(verifier.package, t.seed, dict(verifier.knobs_of(t.split)))
            requests.append((episode, "reset", ()))
            requests += [(episode, step.act.op, step.act.arguments) for step in steps(t)]
            requests.append((episode, "score", ()))
            ends.append(len(requests))
        answers = pool.batch(requests)
        for t, first, last in zip(chunk, ends, ends[1:], strict=False):
            yield _compare(t, answers[first:last])


def _compare(t: Trajectory, answers: Sequence[Any]) -> dict[str, Any]:
    start, *replies, score = answers
    if fault := next((answer for answer in answers if isinstance(answer, EnvironmentFault)), None):
        return {"result": FAULT, "why": brief(fault)}
    begins = [*([{"role": "system", "content": start.system}] if start.system else []), *start.messages]
    for index, (stored, message) in enumerate(zip(t.messages, begins, strict=False)):
        if stored != message:
            return _drift(index, stored["content"], message["content"])
    for step, reply in zip(steps(t), replies, strict=True):
        if reply.text != step.text:
            return _drift(step.message_index, step.text, reply.text)
        if reply.done != step.done:
            words = ("the episode goes on", "the episode is over")
            return _drift(step.message_index, words[step.done], words[reply.done])
    new = score.reward if t.stop_reason == StopReason.DONE else 0.0  # as `rl.episode` has it
    before, now = ({name: _passed(check) for name, check in checks.items()} for checks in (t.checks, score.checks))
    flipped = {n: {"old": before.get(n), "new": now.get(n)} for n in dict.fromkeys((*before, *now)) if before.get(n) != now.get(n)}
    return {"result": CHANGED if flipped or new != t.reward else SAME, "old": t.reward, "new": new, "checks": flipped}


def _passed(check: Check | Mapping[str, Any]) -> bool:
    return bool(check.passed if isinstance(check, Check) else check["passed"])


def _drift(index: int, stored: str | None, replayed: str | None) -> dict[str, Any]:
    stored, replayed = (None if text is None else text[:_TEXT] for text in (stored, replayed))
    return {"result": DRIFTED, "message_index": index, "stored": stored, "replayed": replayed}


def verify_workdir(workdir: Workdir, pool: Pool, verifiers: Mapping[str, Verifier]) -> dict[str, Any]:
    """All stored rollouts of the environments; the content of verify-again.json."""
    totals: dict[str, collections.Counter[str]] = {}
    listed: dict[str, list[dict[str, Any]]] = {CHANGED: [], DRIFTED: [], FAULT: []}
    folders = sorted(name.split("/")[1:3] for name in workdir.list("rollouts") if name.endswith("/manifest.json"))
    for folder, split in folders:
        for index in workdir.shards(folder, split):
            stored = list(workdir.read_shards(folder, split, [index]))
            for name, verifier in verifiers.items():
                if not (own := [t for t in stored if t.environment == name]):
                    continue
                known = [t for t in own if t.error is None and t.seed is not None and verifier.knobs_of(t.split) is not None]
                count = totals.setdefault(f"{folder}/{split}", collections.Counter(dict.fromkeys(KINDS, 0)))
                count[SKIPPED] += len(own) - len(known)
                for t, found in zip(known, verify(pool, verifier, known), strict=True):
                    result = found.pop("result")
                    count[result] += 1
                    if result in listed:
                        listed[result].append({"id": t.id, "policy": folder, "split": split, **found})
    packages = {name: {"digest": verifier.package.digest, "path": verifier.package.path} for name, verifier in verifiers.items()}
    return {"packages": packages, "totals": totals, **listed}


def main(arguments: Arguments) -> None:
    """`trace-jax verify-again [--capability=C] [--package=DIR]`.

    Raises:
      InputError: nothing to verify with, or no lock-down for code that does not come with trace-jax.
    """
    verifiers, settings = find_verifiers(arguments), arguments.config.rollout
    own = all(is_builtin(verifier.package) for verifier in verifiers.values())
    try:
        with Pool(settings.workers, sandbox=settings.sandbox or ("best_effort" if own else "require")) as pool:
            found = verify_workdir(arguments.workdir, pool, verifiers)
    except SandboxError as error:
        raise InputError(f"config field 'rollout.sandbox': {error}") from error
    arguments.workdir.write_json(FILE, found)
    for line in _lines(found):
        print(line)
    print(f"all of them are in {arguments.workdir.place(FILE)}")


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """What is printed: the totals, and the first of each kind."""
    width = max(map(len, found["totals"]), default=0)
    for place, count in found["totals"].items():
        yield f"{place:<{width}}  {', '.join(f'{number} {kind}' for kind, number in count.items() if number)}"
    for one in found[CHANGED][:_SHOWN]:
        flipped = ", ".join(one["checks"]) or "none"
        yield f"{one['policy']}/{one['split']} {one['id']}: reward {one['old']:g} -> {one['new']:g}; checks that flipped: {flipped}"
    for one in found[DRIFTED][:_SHOWN]:
        replies = f"{one['stored']!r} -> {one['replayed']!r}"
        yield f"{one['policy']}/{one['split']} {one['id']}: drifted at message {one['message_index']}: {replies}"
    for one in found[FAULT][:_SHOWN]:
        yield f"{one['policy']}/{one['split']} {one['id']}: {one['why']}"
