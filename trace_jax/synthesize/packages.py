"""Environments that come ready made: the user's own, `synthesis.packages`, before those of the library.

    FOLDER/<capability>/     package.json and environment.py, as `trace-jax prompt general/environment_contract` says

They go through the same certificate and calibration as any; their code runs where the kernel holds it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from envs import Package, PackageError, load_package
from envs.builtin import library, load_builtin
from trace_jax.errors import InputError
from trace_jax.runtime import Runtime
from trace_jax.synthesize.admission import admit, store


def own_packages(runtime: Runtime) -> dict[str, Package]:
    """The packages of `synthesis.packages` by capability, none of them run; hidden folders and `__pycache__` are passed over.

    Raises:
      InputError: no such folder, a package that breaks the contract, or one of another capability or target than it is there for.
    """
    if not runtime.config.synthesis.packages:
        return {}
    root = pathlib.Path(runtime.config.synthesis.packages).expanduser()
    if not root.is_dir():
        raise InputError(f"config field 'synthesis.packages': {root}: no such folder; give one with a folder for each capability")
    if (root / "package.json").exists():
        raise InputError(f"config field 'synthesis.packages': {root} is a package itself; give the folder that it lies in")
    targets = [target.target for target in runtime.targets]
    packages = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] not in "._"):
        try:
            package = load_package(folder)
        except PackageError as error:
            raise InputError(f"config field 'synthesis.packages': {error}") from error
        if package.capability != folder.name:
            raise InputError(f"{folder}/package.json: capability = {package.capability!r} must be {folder.name!r}, as its folder is called")
        if package.target not in targets:
            raise InputError(
                f"{folder}/package.json: target = {package.target!r} must be {' or '.join(map(repr, targets))}, the run's target"
            )
        packages[folder.name] = package
    return packages


def ready_made(runtime: Runtime, capability: str, own: Mapping[str, Package]) -> dict[str, Any]:
    """Stores, certifies and calibrates the user's environment for a capability or the library's, or finds that this was done.

    Returns:
      `usable`: whether training may use the environment, and `reasons` if not; with the calibration where there was one, and `hint_ratio`.

    Raises:
      InputError: an adapter was trained in another version of the user's.
    """
    config, workdir, folder = runtime.config.synthesis, runtime.workdir, f"environments/{capability}"
    mine = own.get(capability)
    if workdir.exists(f"{folder}/calibration.json") and (mine is None or _is_stored(runtime, capability, mine)):
        runtime.progress.advance(config.calibration_seeds * config.calibration_rollouts, earlier=True)
        return runtime.calibration(capability)
    if mine is not None:
        package, split = mine, f"calibration-{capability}-r1-{mine.digest[:8]}"  # named as an author's first hand-in
    else:
        target = runtime.target_of(capability).target
        if capability not in library(target):
            return {"usable": False, "reasons": [_missing(capability, target)]}
        package, split = load_builtin(capability, target), f"calibration-{capability}"
    admission = admit(runtime, package, split)
    store(runtime, capability, admission)
    return admission.calibration or {"usable": False, "reasons": admission.reasons}


def _missing(capability: str, target: str) -> str:
    there = ", ".join(library(target)) or "none at all"
    return (
        f"the library has no environment for it in target {target}, only for {there}; write one, FOLDER/{capability}/, and set "
        "synthesis.packages=FOLDER; or let an LLM write it, generator=llm; or leave it out, by a diagnosis.candidates without it"
    )


def _is_stored(runtime: Runtime, capability: str, package: Package) -> bool:
    """Whether the workdir's environment is this package, at whatever knobs were found for it; one that was edited is calibrated again."""
    workdir, adapter = runtime.workdir, f"adapters/{capability}"
    stored = load_package(workdir.local(f"environments/{capability}"))  # not through the runtime, which would remember it
    if _apart_from_defaults(stored) == _apart_from_defaults(package):
        return True
    if workdir.list(adapter):
        raise InputError(f"{package.path}: was edited since {workdir.place(adapter)} was trained in it; take another --workdir")
    return False


def _apart_from_defaults(package: Package) -> Package:
    knobs = {name: dataclasses.replace(knob, default=knob.min) for name, knob in package.knobs.items()}
    return dataclasses.replace(package, knobs=knobs, path="")
