"""libtpu on a machine without a TPU: it compiles for TPUs that are not there (`trace-jax preflight`), and is silent otherwise.

Where it is installed, JAX asks it for devices. It looks for the machine that it runs on and complains on standard error that there is none.
"""

import os
import pathlib

# These say that there is no machine. The accelerator type need not be that of the topology that is compiled for. A second process may use
# libtpu at the same time.
_NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_GOOGLE = "0x1ae0"  # PCI vendor, by which JAX finds the chips too


def expect_no_tpu() -> None:
    """Tells libtpu that this machine has no TPU; what the environment says already stays."""
    for variable, value in _NO_TPU.items():
        os.environ.setdefault(variable, value)


def expect_no_tpu_without_chips() -> None:
    """`expect_no_tpu` if there are no chips. To be called before JAX looks for devices."""
    vendors = pathlib.Path("/sys/bus/pci/devices").glob("*/vendor")
    if not any(vendor.read_text().strip() == _GOOGLE for vendor in vendors) and not any(name.startswith("TPU_") for name in os.environ):
        expect_no_tpu()
