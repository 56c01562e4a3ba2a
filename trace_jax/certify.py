"""`trace-jax certify DIR`: the certificate of an environment package.

The package is run, so one that does not come with trace-jax runs in workers that the kernel holds, or not at all.
"""

from __future__ import annotations

from envs import PackageError, Pool, SandboxError, load_package
from envs.builtin import builtin_names, is_builtin, load_builtin, target_tools
from envs.certify import certify
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.runtime import CALIBRATION


def main(arguments: Arguments) -> None:
    """Prints the certificate of a package, given by its folder, or if it is built in by name: <target>/<capability>.

    Raises:
      InputError: no package, no lock-down for one of somebody else's, or a check that failed.
    """
    name = arguments.argument
    try:
        package = load_builtin(name) if name in builtin_names() else load_package(name)
        sandbox = arguments.config.rollout.sandbox or ("best_effort" if is_builtin(package) else "require")
        with Pool(workers=1, sandbox=sandbox) as pool:
            print(pool.describe())
            tools = pool.function(load_builtin("desk"), "tools") if package.target == "desk" else target_tools(package.target)
            count = arguments.config.synthesis.certify_seeds
            certificate = certify(package, pool, target_tools=tools, seeds=range(CALIBRATION, CALIBRATION + count))
    except PackageError as error:
        raise InputError(str(error)) from error
    except SandboxError as error:
        raise InputError(f"{name}: not run, config field 'rollout.sandbox': {error}") from error
    print(certificate.to_text())
    if not certificate.passed:
        raise InputError(f"{name}: not certified; see the checks above")
