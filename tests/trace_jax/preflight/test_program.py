import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trace_jax.preflight.accelerators import find, topology_devices
from trace_jax.preflight.program import DoesNotFit, compile_program, read_out_of_memory

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install 'trace-jax[tpu]'"
)
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the CUDA plugin is not installed: pip install 'trace-jax[gpu]'"
)


def test_a_donated_argument_is_counted_once():
    x, w = jnp.ones((64, 64)), jnp.ones((64, 64))
    program = compile_program("step", jax.jit(lambda x, w: x @ w, donate_argnums=0).lower(x, w))
    size = 64 * 64 * 4
    assert (program.arguments, program.outputs, program.aliased) == (2 * size, size, size)
    assert program.held == 2 * size + program.code and program.peak == program.held + program.temporaries
    assert program.dot_flops == 2 * 64**3 and program.touched >= 3 * size and program.compile_seconds > 0


HBM_TEMPORARIES = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO temporaries (34.21G) "
    "exceeds available HBM (31.25G). HLO module: jit_step.\nSee the documentation for more details."
)
HBM_USED = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 16.29G of 15.75G hbm. Exceeded hbm "
    "capacity by 558.95M.\n\nTotal hbm usage >= 16.54G:\n    reserved 258.00M"
)
HBM_CORES = "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, exceeding available bytes: 95.74G"


@pytest.mark.parametrize(
    "message, needed, available", [(HBM_TEMPORARIES, 34.21, 31.25), (HBM_USED, 16.29, 15.75), (HBM_CORES, 34.82, 95.74)]
)
def test_the_compilers_ways_to_say_that_it_does_not_fit(message, needed, available):
    found = read_out_of_memory("train", message)
    assert (found.needed, found.available) == (int(needed * 2**30), int(available * 2**30))
    assert found.name == "train" and found.message.startswith("RESOURCE_EXHAUSTED") and "\n" not in found.message


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 20.00M of 16.00M vmem.",  # a kernel's tiles
        "INTERNAL: Mosaic failed to compile TPU kernel",
        "INVALID_ARGUMENT: Used 2G of 1G hbm",
    ],
)
def test_other_errors_of_the_compiler_are_not_about_the_devices_memory(message):
    assert read_out_of_memory("train", message) is None


def test_an_error_that_is_not_about_memory_goes_on():
    class Lowered:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: no such kernel")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no such kernel"):
        compile_program("train", Lowered())


def model(topology: str):
    """The gradient of six layers, each with a batched product, sharded over four devices."""
    mesh = Mesh(np.array(topology_devices(topology)).reshape(2, 2), ("data", "fsdp"))

    def array(shape, *axes):
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    def loss(w, x):
        def layer(x, w):
            scores = jnp.einsum("bik,bjk->bij", x, x)
            return jnp.tanh(jnp.einsum("bij,bjk->bik", scores, x) @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32) ** 2)

    w, x = array((6, 256, 256), None, "fsdp"), array((16, 128, 256), ("data", "fsdp"))
    return jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x)


def check(program):
    batch, time, width = 4, 128, 256  # of one device
    scores, product = 2 * batch * time * time * width, 2 * batch * time * width * width
    # forward; forward again but for the last product's result; two products back for each
    most, least = 6 * (3 * (2 * scores + product) + 2 * scores + product), 6 * (2 * (2 * scores + product))
    assert least <= program.dot_flops <= most and not program.unknown_loops
    assert program.collectives["all-gather"].count >= 6 and program.arguments == 6 * 128 * 256 * 2 + batch * time * width * 2


@needs_libtpu
def test_a_model_compiles_for_a_tpu_that_is_not_there():
    check(compile_program("train", model("v5e:2x2")))


@needs_libtpu
def test_a_program_that_is_too_large_does_not_fit():
    (device, *_), accelerator = topology_devices("v5e:2x2"), find("v5e:2x2")
    x = jax.ShapeDtypeStruct((2**17, 2**17), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    found = compile_program("sort", jax.jit(lambda x: jnp.sort(x + 1, axis=0).sum(0)).lower(x))
    assert isinstance(found, DoesNotFit) and found.needed > found.available == accelerator.hbm


@needs_cuda
def test_a_model_compiles_for_a_gpu_that_is_not_there():
    check(compile_program("train", model("h100:4")))
