"""Processes with several virtual CPU devices, whose number is set before JAX starts."""

import os


def environment(count: int) -> dict[str, str]:
    """The environment of a Python process that has `count` devices and finds the packages of this checkout."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    # PJRT_NPROC: with fewer threads than devices a loop of collectives can wait for itself
    return os.environ | {"XLA_FLAGS": flags.strip(), "PJRT_NPROC": "16", "PYTHONPATH": "."}
