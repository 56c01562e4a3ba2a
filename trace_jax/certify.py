"""`trace-jax certify DIR`: the certificate of an environment package.

Environment code runs in worker processes that are not locked down by the kernel yet, so only packages that come with trace-jax are
accepted; those of others wait for the sandbox.
"""

from __future__ import annotations

from envs import PackageError, Pool, load_package
from envs.builtin import LIBRARY, load_builtin
from envs.certify import certify
from trace_jax.cli import Arguments
from trace_jax.errors import InputError
from trace_jax.runtime import CALIBRATION


def main(arguments: Arguments) -> None:
    """Prints the certificate of a built-in package, given by its capability, or by a folder that holds the same code.

    Raises:
      InputError: no package, not one of ours, or a check that failed.
    """
    name = arguments.argument
    try:
        package = load_builtin(name) if name in LIBRARY else load_package(name)
    except PackageError as error:
        raise InputError(str(error)) from error
    known = {load_builtin(capability).digest for capability in LIBRARY}
    if package.digest not in known:
        raise InputError(f"{name}: not one of the packages that come with trace-jax; others are certified once workers are locked down")
    count = arguments.config.synthesis.certify_seeds
    with Pool(workers=1) as pool:
        tools = pool.function(load_builtin("desk"), "tools")
        certificate = certify(package, pool, target_tools=tools, seeds=range(CALIBRATION, CALIBRATION + count), trusted=True)
    print(certificate.to_text())
    if not certificate.passed:
        raise InputError(f"{name}: not certified; see the checks above")
