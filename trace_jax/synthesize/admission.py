"""What a package has to pass before training may use it, wherever it came from: the certificate, and the calibration against the base.

    certificate -> calibration -> too easy or too hard? the knobs are searched -> still too hard? hints -> usable, or not and why

The knobs that are found become the defaults of the package, which is certified again. A batch of rollouts is a shard, and all that is
decided follows from the shards, so a step that was interrupted goes on to the same end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator, Sequence
from typing import Any

from envs import EnvironmentFault, Package, write_package
from envs.certify import brief, certify
from envs.probes import Action, play, recite
from rl.trajectory import Trajectory
from trace_jax.runtime import BASE, CALIBRATION, USED, Runtime
from trace_jax.synthesize.calibrate import OK, TOO_HARD, calibrate, look_seeds, settled
from trace_jax.synthesize.difficulty import Knobs, bisect, distance, ends, harder_end
from trace_jax.synthesize.handin import tool_faults
from trace_jax.synthesize.hints import hint_share, hinted_success, leaks

_FAULTS = 3  # how many are told
_OWN = ("exception", "reply", "replay", "crash", "quarantine")  # a deadline may have been missed for the machine's sake
_CARELESS_SEEDS = 3
_SMALL = (32, 4)  # seeds and rollouts that tell which end of a knob is harder, and what a hint does
_LEAK_SEEDS = 50
_SHOWN = ("success_rate", "success_interval", "mean_reward", "n_rollouts", "verdict")


@dataclasses.dataclass(frozen=True)
class Admission:
    """What became of a package.

    Attributes:
      package: to be stored: the one that was handed in, at the knobs that were found.
      certificate, calibration: of this package, as JSON; no calibration where the certificate failed.
      reasons: why training may not use it; empty if it may.
    """

    package: Package
    certificate: dict[str, Any]
    calibration: dict[str, Any] | None
    reasons: list[str]


def sandbox_faults(runtime: Runtime, package: Package) -> list[str]:
    """What is wrong with a package that nobody has run yet: process 0 tries it for all, before any certificate.

    The tools, on which the players of a certificate rely, must be the target's, and careless calls must do no harm.
    """
    return runtime.processes.agree(lambda: _tools(runtime, package) or _careless(runtime, package))


def _tools(runtime: Runtime, package: Package) -> list[str]:
    target = runtime.tools(runtime.target_of(package.capability, package))
    try:
        return tool_faults(runtime.tools(package), target)
    except EnvironmentFault as fault:
        return [f"environment.py does not run: {brief(fault)}"]


def _careless(runtime: Runtime, package: Package) -> list[str]:
    """Calls as a model makes them: of no tool, without arguments, with others, with values of another kind."""
    careless: list[Action] = [{"text": ""}, {"name": "no_such_tool", "arguments": {}}]
    for tool in runtime.tools(package):
        required = tool["function"]["parameters"].get("required", [])
        for arguments in ({}, {"no_such_argument": 1}, dict.fromkeys(required), {key: [{"a": 1}] for key in required}):
            careless.append({"name": tool["function"]["name"], "arguments": arguments})
    seeds, faults = range(CALIBRATION, CALIBRATION + _CARELESS_SEEDS), []
    for action in careless:
        found = [one.fault for one in play(runtime.pool, package, seeds, recite(dict.fromkeys(seeds, [action]))) if one.fault]
        faults += [f"{json.dumps(action)} ends in a fault: {brief(fault)}" for fault in found[:1]]
        if len(faults) == _FAULTS or any(fault.kind == "deadline" for fault in found):  # which is waited for, three times a fault
            break
    return faults


def admit(runtime: Runtime, package: Package, split: str) -> Admission:
    """Certifies and calibrates a package, at other knobs if need be.

    Args:
      split: begins the names under which the base's rollouts are stored.

    Returns:
      Its calibration is that of `calibrate`, with `split`, `knobs`, `looks`, `stopped` (before all seeds were rolled out), `search` (all
      settings that were tried, the package's own first) and `harder` (the end of each knob) where the knobs were searched, `hinted` where
      hints were tried, `hint_ratio`, `spent` (all rollouts that it took) and `usable`.
    """
    certificate = certified(runtime, package)
    if not certificate["passed"]:
        return Admission(package, certificate, None, certificate["reasons"])
    own, faults = calibrated(runtime, package, split)
    if faults:
        return Admission(package, certificate, None, [f"played by the agent it ends in a fault: {fault}" for fault in faults])
    trials = [own]
    if own["verdict"] != OK and runtime.config.synthesis.probes:
        trials += _search(runtime, package, own)
    trials_by_fit = sorted(trials, key=lambda trial: (trial["verdict"] != OK, distance(trial, runtime.config.synthesis)))
    for trial in trials_by_fit:  # the first of equals
        tuned = package.with_defaults(trial["knobs"])
        other = certificate if trial is own else certified(runtime, tuned)
        if other["passed"]:
            break
        trial["note"] = f"not certified: {'; '.join(other['reasons'])}"
    found = trial | {"search": [_tried(one) for one in trials] if len(trials) > 1 else [], "spent": sum(one["spent"] for one in trials)}
    found |= {"harder": own.get("harder", {}), "faults": []} | _hinted(runtime, tuned, trial)
    found["spent"] += found["hinted"]["n_rollouts"] if "hinted" in found else 0
    found["usable"] = found["verdict"] == OK or found["hint_ratio"] > 0
    return Admission(tuned, other, found, [] if found["usable"] else found["reasons"])


def store(runtime: Runtime, capability: str, admission: Admission) -> None:
    """The package, its certificate and its calibration where training looks for them, in this order."""
    folder, package = f"environments/{capability}", admission.package
    runtime.workdir.produce(folder, lambda path: write_package(path, package.meta, package.source))
    runtime.workdir.write_json(f"{folder}/certificate.json", admission.certificate)
    if admission.calibration:
        runtime.workdir.write_json(f"{folder}/calibration.json", admission.calibration)


def certified(runtime: Runtime, package: Package) -> dict[str, Any]:
    """The certificate of a package, as JSON; process 0 makes it for all."""
    bounds = runtime.config.synthesis
    seeds = range(CALIBRATION, CALIBRATION + bounds.certify_seeds)

    def make() -> dict[str, Any]:
        salt = str(runtime.config.seed)  # the same when a run is resumed
        tools, minutes = runtime.tools(runtime.target_of(package.capability, package)), bounds.certify_minutes
        certificate = certify(package, runtime.pool, target_tools=tools, seeds=seeds, salt=salt, used=USED, minutes=minutes)
        return certificate.to_json() | {"reasons": certificate.reasons}

    return runtime.processes.agree(make)


def calibrated(runtime: Runtime, package: Package, split: str) -> tuple[dict[str, Any], list[str]]:
    """The calibration of a package at its defaults, and faults of its own that the base met.

    The base's rollouts are stored under `split`, one shard more for each look, until the verdict is certain or all seeds are rolled out.
    """
    bounds = runtime.config.synthesis
    found, looks, before = [], [], 0
    for index, seeds in enumerate(look_seeds(bounds)):
        tasks = runtime.tasks(package, split, CALIBRATION + before, seeds - before, bounds.calibration_rollouts)
        found += runtime.roll_out(BASE, "base", split, index, tasks)
        certain, before = settled(found, bounds), seeds
        looks.append({"seeds": seeds, "rollouts": len(found), "certain": certain})
        if certain:
            break
    runtime.progress.advance((bounds.calibration_seeds - before) * bounds.calibration_rollouts, earlier=True)
    own = {"split": split, "knobs": package.resolve_knobs(), "looks": looks, "stopped": before < bounds.calibration_seeds}
    return calibrate(found, bounds) | own | {"spent": len(found)}, _faults(found)


def _search(runtime: Runtime, package: Package, own: dict[str, Any]) -> list[dict[str, Any]]:
    """The calibrations at the settings of the knobs that bisection came to; those at which the package has faults are left out."""
    harder, probed = _harder_ends(runtime, package, own["split"])
    own |= {"harder": harder, "spent": own["spent"] + probed}
    settings, trials, verdict = bisect(package, harder, own["verdict"], runtime.config.synthesis.probes), [], None
    while (knobs := _next(settings, verdict)) is not None:
        tuned = package.with_defaults(knobs)
        runtime.progress.advance(0, f"{package.name} at {json.dumps(knobs)}")
        trial, faults = calibrated(runtime, tuned, f"{own['split']}-{tuned.digest[:8]}")
        verdict = trial["verdict"]
        if faults:
            own["spent"] += trial["spent"]
        else:
            trials.append(trial)
    return trials


def _harder_ends(runtime: Runtime, package: Package, split: str) -> tuple[dict[str, str | None], int]:
    """At which end of each knob tasks are harder, as the package says or a few rollouts show, and how many these were."""
    harder, probed = {name: knob.harder for name, knob in package.knobs.items()}, 0
    for name, settings in ends(package).items():
        found = []
        for knobs in settings:
            tuned = package.with_defaults(knobs)
            found.append(_few(runtime, tuned, f"{split}-{tuned.digest[:8]}-end"))
        harder[name] = harder_end(*found)
        probed += sum(map(len, found))
    return harder, probed


def _tried(trial: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a setting that was tried."""
    return {key: trial.get(key, "") for key in ("split", "knobs", *_SHOWN, "note")}


def _few(runtime: Runtime, package: Package, split: str, hints: bool = False) -> list[Trajectory]:
    """A few rollouts on seeds of the calibration, all with hints or none."""
    bounds = runtime.config.synthesis
    seeds, rollouts = min(_SMALL[0], bounds.calibration_seeds), min(_SMALL[1], bounds.calibration_rollouts)
    tasks = runtime.tasks(package, split, CALIBRATION, seeds, rollouts)
    return runtime.roll_out(BASE, "base", split, 0, runtime.with_hints(package, 1.0, tasks) if hints else tasks)


def _hinted(runtime: Runtime, package: Package, calibration: dict[str, Any]) -> dict[str, Any]:
    """`hint_ratio`, and what was found on the way to it.

    A base that succeeds too rarely can still learn when some of a group's rollouts are shown the way; one that never succeeds cannot, since
    the policy that is trained goes without.
    """
    bounds, none = runtime.config.synthesis, {"hint_ratio": 0.0}
    if calibration["verdict"] != TOO_HARD or not bounds.hint_ratio or not calibration["success_rate"]:
        return none
    seeds = range(CALIBRATION, CALIBRATION + min(_LEAK_SEEDS, bounds.certify_seeds))
    if found := runtime.processes.agree(lambda: leaks(runtime.pool, package, seeds)):
        return none | {"reasons": [*calibration["reasons"], *found]}
    hinted = hinted_success(_few(runtime, package, f"{calibration['split']}-hinted", hints=True))
    if hinted["success_rate"] <= calibration["success_rate"]:
        why = f"the hint does not help: success {hinted['success_rate']:.3f} with it"
        return none | {"hinted": hinted, "reasons": [*calibration["reasons"], why]}
    ratio = hint_share(calibration["success_rate"], hinted["success_rate"], bounds.mean_low, bounds.hint_ratio)
    return {"hint_ratio": ratio, "hinted": hinted}


def _next(settings: Generator[Knobs, str, None], verdict: str | None) -> Knobs | None:
    try:
        return settings.send(verdict)
    except StopIteration:
        return None


def _faults(trajectories: Sequence[Trajectory]) -> list[str]:
    """What the package's own code did wrong, each once."""
    errors = (t.error for t in trajectories if t.error is not None)
    return sorted({brief(error["message"]) for error in errors if error["kind"] in _OWN})[:_FAULTS]
