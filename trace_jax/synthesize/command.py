"""`trace-jax synthesize`: for every retained capability an environment that is certified, calibrated against the base, and stored.

    generator -> package -> certificate -> rollouts of the base -> calibration -> selected_capabilities.json says DONE

An environment that fails its certificate or its calibration never reaches training; the selection keeps it PENDING and the reasons stand in
`certificate.json` and `calibration.json`. So does a capability for which the library has no environment. Where success is too rare, a share
of each group's rollouts gets the package's hint.
"""

from __future__ import annotations

from typing import Any

from envs import write_package
from envs.builtin import LIBRARY, load_builtin
from envs.certify import certify
from envs.package import load_package
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.runtime import BASE, CALIBRATION, Runtime, open_runtime
from trace_jax.synthesize.calibrate import calibrate

_SELECTION = "diagnosis/selected_capabilities.json"
_DISTRIBUTION = ("n_rollouts", "mean_reward", "std_reward", "success_rate", "zero_rate", "partial_rate")
_GROUPS = ("groups_all_perfect", "groups_all_zero", "groups_mixed")


def synthesize(runtime: Runtime, capability: str) -> dict[str, Any]:
    """Makes, certifies and calibrates one environment, or finds that this was done.

    Returns:
      `usable`: whether training may use the environment, and `reasons` if not; with the calibration where there was one, and `hint_ratio`.
    """
    config, workdir, folder = runtime.config.synthesis, runtime.workdir, f"environments/{capability}"
    if workdir.exists(f"{folder}/calibration.json"):
        runtime.progress.advance(config.calibration_seeds * config.calibration_rollouts, earlier=True)
        return workdir.read_json(f"{folder}/calibration.json")
    if capability not in LIBRARY:
        return {"usable": False, "reasons": [f"the library has no environment for it, only for {', '.join(LIBRARY)}"]}
    builtin = load_builtin(capability)
    package = load_package(workdir.produce(folder, lambda path: write_package(path, builtin.meta, builtin.source)))
    seeds = range(CALIBRATION, CALIBRATION + config.certify_seeds)
    target_tools = runtime.tools(runtime.target)
    certificate = runtime.processes.agree(lambda: certify(package, runtime.pool, target_tools=target_tools, seeds=seeds).to_json())
    workdir.write_json(f"{folder}/certificate.json", certificate)
    if not certificate["passed"]:
        return {"usable": False, "reasons": certificate["reasons"]}
    split = f"calibration-{capability}"
    tasks = runtime.tasks(package, split, CALIBRATION, config.calibration_seeds, config.calibration_rollouts)
    result = calibrate(runtime.roll_out(BASE, "base", split, 0, tasks), config)
    # a base that succeeds too rarely can still learn when some of a group's rollouts are shown the way
    hinted = result["verdict"] == "too_hard" and config.hint_ratio > 0 and result["success_rate"] > 0
    result |= {"hint_ratio": config.hint_ratio if hinted else 0.0, "usable": result["verdict"] == "ok" or hinted}
    workdir.write_json(f"{folder}/calibration.json", result)
    return result


def record(runtime: Runtime, calibrations: dict[str, dict[str, Any]]) -> None:
    """Marks the usable environments DONE in the selection, with the keys of the published format."""
    selection = runtime.workdir.read_json(_SELECTION)
    for entry in selection:
        result = calibrations.get(entry["skill"])
        if result and result["usable"]:
            entry |= {
                "status": "DONE",
                "environment_path": f"environments/{entry['skill']}",
                "environment_module": "environment",
                "reward_distribution": {key: result[key] for key in (*_DISTRIBUTION, *_GROUPS)},
            }
    runtime.workdir.write_json(_SELECTION, selection)


def synthesize_all(runtime: Runtime, only: str | None = None) -> dict[str, dict[str, Any]]:
    """Step 2 for every retained capability, or for one.

    Raises:
      InputError: `only` was not retained.
    """
    retained = runtime.retained()
    if only is not None and only not in retained:
        raise InputError(f"--capability={only}: not retained; retained are {', '.join(retained) or 'none'}")
    calibrations = {capability: synthesize(runtime, capability) for capability in retained if only in (None, capability)}
    record(runtime, calibrations)
    return calibrations


def main(arguments: Arguments) -> None:
    """`trace-jax synthesize [--capability=C]`."""
    with open_runtime(arguments, "synthesize") as runtime:
        for capability, result in synthesize_all(runtime, arguments.capability).items():
            base = f", success {result['success_rate']:.3f} of the base" if "success_rate" in result else ""
            reasons = "".join(f"; {reason}" for reason in result["reasons"])
            print(f"{capability}: {'usable' if result['usable'] else 'not usable'}{base}{reasons}")
