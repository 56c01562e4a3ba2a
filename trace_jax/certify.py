"""`trace-jax certify DIR [--output=FILE]`: the certificate of an environment package, for people and as JSON.

The package is run, so one that does not come with trace-jax runs in workers that the kernel holds, or not at all. Beside the fixed seeds it
is tried on some that are drawn anew each time, so that nobody can write a package for them. Tools are compared with those of the target,
where it comes with trace-jax or `--config` has it.
"""

from __future__ import annotations

import json
import pathlib
import secrets

from envs import HarnessPool, Package, PackageError, Pool, SandboxError, load_package
from envs.builtin import builtin_names, is_builtin, load_builtin, target_tools
from envs.certify import certify
from trace_jax.benchmarks.live import live_targets
from trace_jax.cli import Arguments
from trace_jax.config import Config
from trace_jax.errors import InputError
from trace_jax.runtime import CALIBRATION, USED, find_package


def main(arguments: Arguments) -> None:
    """Prints the certificate of a package, given by its folder, or if it is built in by its name, <target>/<capability>, and writes it to
    `--output`.

    Raises:
      InputError: no package, no lock-down for one of somebody else's, a file that cannot be written, or checks that failed.
    """
    name = arguments.argument
    try:
        package = load_builtin(name) if name in builtin_names() else load_package(name)
        sandbox = arguments.config.rollout.sandbox or ("best_effort" if is_builtin(package) else "require")
        with Pool(workers=1, sandbox=sandbox) as pool:
            print(pool.describe())
            tools = _target_tools(arguments.config, package, pool)
            bounds = arguments.config.synthesis
            seeds, salt = range(CALIBRATION, CALIBRATION + bounds.certify_seeds), secrets.token_hex(16)
            certificate = certify(package, pool, target_tools=tools, seeds=seeds, salt=salt, used=USED, minutes=bounds.certify_minutes)
    except PackageError as error:
        known = "" if pathlib.Path(name).exists() else f", or the name of one that is built in: {', '.join(builtin_names())}"
        raise InputError(f"{error}{known}") from error
    except SandboxError as error:
        raise InputError(f"{name}: not run, config field 'rollout.sandbox': {error}") from error
    print(certificate.to_text())
    if arguments.output is not None:
        content = certificate.to_json(timing=True) | {"reasons": certificate.reasons}
        try:
            pathlib.Path(arguments.output).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--output={arguments.output}: {error.strerror}; give a file that can be written") from error
    if not certificate.passed:
        raise InputError(f"{name}: not certified: {'; '.join(certificate.reasons)}")


def _target_tools(config: Config, package: Package, pool: Pool) -> list[dict] | None:
    """The tools of the target that a package is made for, None where nobody knows it.

    Raises:
      InputError: the config's driver cannot be used, or the package is made for another target.
    """
    if config.benchmark.name == "own":
        with HarnessPool(deadline_s=config.benchmark.timeout) as harness:
            (target,) = live_targets(config, harness)
        if package.target != target.target:
            raise InputError(f"{package.path}/package.json: target = {package.target!r} must be {target.target!r}, the target of --config")
        return target.tools
    target = find_package("desk" if config.benchmark.name else config.target.package, "target.package")
    return pool.function(target, "tools") if package.target == target.target else target_tools(package.target)
