"""`triton` without kernels: the arithmetic that is used on the host, and a driver that has no device."""

import sys
import types

import stubs

__version__ = "0.0.0"
stubs.fill(__name__)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _no_device():
    raise RuntimeError("no accelerator")  # who asks takes the CPU then


runtime = sys.modules["triton.runtime"] = stubs._Module("triton.runtime")
runtime.__path__ = []
runtime.driver = sys.modules["triton.runtime.driver"] = stubs._Module("triton.runtime.driver")
runtime.driver.active = types.SimpleNamespace(get_current_target=_no_device, get_current_device=_no_device)
