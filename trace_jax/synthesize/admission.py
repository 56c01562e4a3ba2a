"""What a package has to pass before training may use it, wherever it came from: the certificate, and the calibration against the base."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from envs import EnvironmentFault, Package
from envs.certify import brief, certify
from envs.probes import Action, play, recite
from rl.trajectory import Trajectory
from trace_jax.runtime import BASE, CALIBRATION, Runtime
from trace_jax.synthesize.calibrate import calibrate
from trace_jax.synthesize.handin import tool_faults

_FAULTS = 3  # how many are told
_OWN = ("exception", "reply", "replay", "crash", "quarantine")  # a deadline may have been missed for the machine's sake
_CARELESS_SEEDS = 3


def sandbox_faults(runtime: Runtime, package: Package) -> list[str]:
    """What is wrong with a package that nobody has run yet: process 0 tries it for all, before any certificate.

    The tools, on which the players of a certificate rely, must be the target's, and careless calls must do no harm.
    """
    return runtime.processes.agree(lambda: _tools(runtime, package) or _careless(runtime, package))


def _tools(runtime: Runtime, package: Package) -> list[str]:
    target = runtime.tools(runtime.target)
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


def certified(runtime: Runtime, package: Package) -> dict[str, Any]:
    """The certificate of a package, as JSON; process 0 makes it for all."""
    seeds = range(CALIBRATION, CALIBRATION + runtime.config.synthesis.certify_seeds)

    def make() -> dict[str, Any]:
        certificate = certify(package, runtime.pool, target_tools=runtime.tools(runtime.target), seeds=seeds)
        return certificate.to_json() | {"reasons": certificate.reasons}

    return runtime.processes.agree(make)


def calibrated(runtime: Runtime, package: Package, split: str) -> dict[str, Any]:
    """The calibration of a package, by rollouts of the base that are stored under `split`.

    Returns:
      As `calibrate`, with `usable`: whether training may use it, `hint_ratio`, and `faults` of the package that the base met.
    """
    config = runtime.config.synthesis
    tasks = runtime.tasks(package, split, CALIBRATION, config.calibration_seeds, config.calibration_rollouts)
    trajectories = runtime.roll_out(BASE, "base", split, 0, tasks)
    result = calibrate(trajectories, config)
    # a base that succeeds too rarely can still learn when some of a group's rollouts are shown the way
    hinted = result["verdict"] == "too_hard" and config.hint_ratio > 0 and result["success_rate"] > 0
    usable = result["verdict"] == "ok" or hinted
    return result | {"hint_ratio": config.hint_ratio if hinted else 0.0, "usable": usable, "faults": _faults(trajectories)}


def _faults(trajectories: Sequence[Trajectory]) -> list[str]:
    """What the package's own code did wrong, each once."""
    errors = (t.error for t in trajectories if t.error is not None)
    return sorted({brief(error["message"]) for error in errors if error["kind"] in _OWN})[:_FAULTS]
