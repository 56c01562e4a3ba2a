"""`trace-jax synthesize`: for every retained capability an environment that is certified, calibrated against the base, and stored.

    generator -> package -> certificate -> rollouts of the base -> calibration -> selected_capabilities.json says DONE

An environment that fails its certificate or its calibration never reaches training; the selection keeps it PENDING and the reasons stand in
`certificate.json` and `calibration.json`. Where success is too rare, a share of each group's rollouts gets the package's hint.
"""

from __future__ import annotations

from typing import Any

from envs.builtin import LIBRARY, load_builtin
from envs.certify import certify
from envs.package import Package, write_package
from rl.engines.protocol import Policy
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.runtime import CALIBRATION, Runtime, open_runtime
from trace_jax.synthesize.calibrate import calibrate

_SELECTION = "diagnosis/selected_capabilities.json"
_DISTRIBUTION = ("n_rollouts", "mean_reward", "std_reward", "success_rate", "zero_rate", "partial_rate")
_GROUPS = ("groups_all_perfect", "groups_all_zero", "groups_mixed")


def generate(runtime: Runtime, capability: str) -> Package:
    """The environment package of a capability, written into the workdir.

    Raises:
      InputError: the library has none for it.
    """
    if capability not in LIBRARY:
        raise InputError(f"capability {capability!r}: the library has no environment for it; it has {', '.join(LIBRARY)}")
    package = load_builtin(capability)
    return write_package(runtime.workdir.path(f"environments/{capability}"), package.meta, package.source)


def synthesize(runtime: Runtime, capability: str) -> dict[str, Any]:
    """Makes, certifies and calibrates one environment, or finds that this was done.

    Returns:
      The calibration, with `usable`: whether training may use the environment, and `hint_ratio`.
    """
    config, workdir, folder = runtime.config, runtime.workdir, f"environments/{capability}"
    if workdir.exists(f"{folder}/calibration.json"):
        runtime.progress.advance(config.synthesis.calibration_seeds * config.synthesis.calibration_rollouts)
        return workdir.read_json(f"{folder}/calibration.json")
    package = generate(runtime, capability)
    target_tools = runtime.pool.function(runtime.target, "tools")
    seeds = range(CALIBRATION, CALIBRATION + config.synthesis.certify_seeds)
    certificate = certify(package, runtime.pool, target_tools=target_tools, seeds=seeds, trusted=True)
    workdir.write_json(f"{folder}/certificate.json", certificate.to_json())
    tasks = runtime.tasks(
        package, f"calibration-{capability}", CALIBRATION, config.synthesis.calibration_seeds, config.synthesis.calibration_rollouts
    )
    found = runtime.roll_out(Policy(name="base", version=0), "base", f"calibration-{capability}", 0, tasks)
    result = calibrate(found, config.synthesis)
    # a base that succeeds too rarely can still learn when some of a group's rollouts are shown the way
    hinted = result["verdict"] == "too_hard" and config.synthesis.hint_ratio > 0 and result["success_rate"] > 0
    result |= {"hint_ratio": config.synthesis.hint_ratio if hinted else 0.0}
    result |= {"usable": certificate.passed and (result["verdict"] == "ok" or hinted)}
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
    with open_runtime(arguments) as runtime:
        for capability, result in synthesize_all(runtime, arguments.capability).items():
            outcome = "usable" if result["usable"] else "not usable"
            reasons = "; ".join(result["reasons"])
            print(f"{capability}: {outcome}, success {result['success_rate']:.3f} of the base{': ' if reasons else ''}{reasons}")
