"""`trace-jax synthesize`: for every retained capability an environment that is certified, calibrated against the base, and stored.

    generator -> package -> certificate, rollouts of the base, calibration (`admission`) -> selected_capabilities.json says DONE

An environment that fails its certificate or its calibration never reaches training; the selection keeps it PENDING and the reasons stand in
`certificate.json` and `calibration.json`. So does a capability for which there is no environment. What an LLM could not do in its rounds
needs a person's attention, and the selection and the exit code say so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from trace_jax.cli import Arguments
from trace_jax.diagnose.select import finished
from trace_jax.errors import InputError, Unfinished
from trace_jax.runtime import Runtime, open_runtime
from trace_jax.synthesize.generate import generate
from trace_jax.synthesize.generation import NEEDS_ATTENTION, OPEN
from trace_jax.synthesize.packages import own_packages, ready_made
from trace_jax.workdir import Workdir

_SELECTION = "diagnosis/selected_capabilities.json"
_DISTRIBUTION = ("n_rollouts", "mean_reward", "std_reward", "success_rate", "zero_rate", "partial_rate")
_GROUPS = ("groups_all_perfect", "groups_all_zero", "groups_mixed")


def record(runtime: Runtime, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Marks the usable environments DONE in the selection, with the keys of the published format; what needs attention gets its reasons."""
    selection = runtime.workdir.read_json(_SELECTION)
    for entry in selection:
        result = results.get(entry["skill"])
        if result is None:
            continue
        entry.pop(NEEDS_ATTENTION, None)
        if result["usable"]:
            distribution = {key: result[key] for key in (*_DISTRIBUTION, *_GROUPS)}
            entry |= finished(entry, f"environments/{entry['skill']}", "environment", distribution)
        elif result.get("status") == NEEDS_ATTENTION:
            entry[NEEDS_ATTENTION] = result["reasons"]
    runtime.workdir.write_json(_SELECTION, selection)


def synthesize_all(runtime: Runtime, only: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
    """Step 2 for every retained capability, or for some.

    Raises:
      InputError: one of `only` was not retained, or a package of the user's own cannot be used.
    """
    retained = runtime.retained()
    for capability in only or ():
        if capability not in retained:
            raise InputError(f"--capability={capability}: not retained; retained are {', '.join(retained) or 'none'}")
    asked = [capability for capability in retained if only is None or capability in only]
    own = own_packages(runtime)
    written = [capability for capability in asked if runtime.config.generator == "llm" and capability not in own]
    found = generate(runtime, written) if written else {}
    results = {capability: found.get(capability) or ready_made(runtime, capability, own) for capability in asked}
    record(runtime, results)
    return results


def require_finished(workdir: Workdir, results: Mapping[str, Mapping[str, Any]], *statuses: str) -> None:
    """
    Raises:
      Unfinished: the generator has left a capability in one of these statuses.
    """
    left = {capability: result for capability, result in results.items() if result.get("status") in statuses}
    if waiting := [capability for capability, result in left.items() if result["status"] == OPEN]:
        why = left[waiting[0]]["reasons"][0]
        raise Unfinished(f"{', '.join(waiting)}: no environment yet: {why}; the same command goes on from there")
    if left:
        said = "; ".join(f"{capability}: {refusal(workdir, capability, result)}" for capability, result in left.items())
        rounds = workdir.config.synthesis.rounds
        raise Unfinished(f"no usable environment in {rounds} rounds for {said}; or allow more --config.synthesis.rounds")


def refusal(workdir: Workdir, capability: str, result: Mapping[str, Any]) -> str:
    """Every reason why a capability's environment was refused, and the file that has the whole of it."""
    names = ("generation.json",) if "status" in result else ("calibration.json", "certificate.json")
    files = (f"environments/{capability}/{name}" for name in names)
    where = next((f"; see {workdir.place(file)}" for file in files if workdir.exists(file)), "")
    return "; ".join(result["reasons"]) + where


def main(arguments: Arguments) -> None:
    """`trace-jax synthesize [--capability=C]`.

    Raises:
      Unfinished: the LLM gave no answer, or no package of its that can be used.
    """
    with open_runtime(arguments, "synthesize") as runtime:
        results = synthesize_all(runtime, [arguments.capability] if arguments.capability else None)
    for capability, result in results.items():
        base = f", success {result['success_rate']:.3f} of the base" if "success_rate" in result else ""
        reasons = "; ".join(result["reasons"]) if result["usable"] else refusal(arguments.workdir, capability, result)
        print(f"{capability}: {'usable' if result['usable'] else 'not usable'}{base}{'; ' if reasons else ''}{reasons}")
    require_finished(arguments.workdir, results, OPEN, NEEDS_ATTENTION)
