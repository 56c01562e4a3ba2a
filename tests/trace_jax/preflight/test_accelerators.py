import importlib.util
import types

import pytest

from trace_jax.errors import InputError
from trace_jax.preflight import accelerators
from trace_jax.preflight.accelerators import find, topology_devices

LIBTPU, CUDA = (importlib.util.find_spec(name) is not None for name in ("libtpu", "jax_cuda13_plugin"))


@pytest.mark.parametrize(
    "topology, devices, gib",
    [("v5e:4x4", 16, 15.75), ("v5p:2x2x4", 16, 95.73), ("v6e:8x8", 64, 31.24), ("v4:2x2x1", 4, 30.75), ("tpu7x:2x2x2", 16, 94.74)],
)
def test_a_topology_is_named_in_chips_and_has_the_memory_of_a_device(topology, devices, gib):
    found = find(topology)
    assert found.devices == devices and found.hbm == int(gib * 2**30)


def test_links_carry_both_ways_where_all_axes_close_to_rings():
    assert find("v5p:4x4x8").interconnect == 2 * find("v5p:2x2x4").interconnect
    assert find("v5e:16x16").interconnect == 2 * find("v5e:8x16").interconnect


def test_gpus_of_several_hosts_talk_through_the_network():
    assert find("h100:16").interconnect < find("h100:8").interconnect / 5


def test_a_device_that_is_there_is_found_by_its_kind():
    def device(kind):
        return types.SimpleNamespace(device_kind=kind)

    assert accelerators.of_device(device("NVIDIA H200")).flops == find("h200:8").flops
    assert accelerators.of_device(device("TPU v5 lite")).name == "v5e" and accelerators.of_device(device("TPU v5")).name == "v5p"
    assert accelerators.of_device(device("NVIDIA H100 PCIe")) is None  # another chip: its peak is lower


def test_a_gpu_program_may_use_the_share_that_jax_takes(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    default = find("h200:8").hbm
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert find("h200:8").hbm == pytest.approx(default * 0.9 / 0.75)


@pytest.mark.parametrize(
    "topology, message",
    [
        ("v5p-32", "write v5p:2x2x4, 16 chips"),  # cores in the name, chips in the shape
        ("v4-16", "write v4:2x2x2, 8 chips"),
        ("v6e-16", "write v6e:4x4, 16 chips"),
        ("v5litepod-16", "write v5e:4x4, 16 chips"),
        ("h100-8", "write h100:8"),
        ("v5p-9999", "give the shape of the slice in chips, such as v5p:2x2x4"),
        ("ironwood:2x2x1", "write tpu7x:2x2x1"),
        ("v5e:4", "the shape of a v5e slice has 2 axes, in chips: write v5e:2x2"),
        ("v5p:4x4", "has 3 axes, in chips: write v5p:2x2x4"),
        ("v5e", "write such as v5e:4x4"),
        ("v5e:0x4", "write such as v5e:4x4"),
        ("h100:12", "up to 8 GPUs or whole hosts of 8"),
        ("b1000:8", "there are v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4, tpu7x:2x2x4, a100:8, h100:8, h200:8"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_one(topology, message):
    for function in (find, topology_devices):
        with pytest.raises(InputError, match=f"^--topology={topology}: ") as error:
            function(topology)
        assert message in str(error.value)


def test_every_example_is_one():
    for topology in accelerators._EXAMPLES.split(", "):
        assert find(topology).devices >= 8


def test_a_machine_without_libtpu_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(InputError, match=r"pip install 'trace-jax\[tpu\]'"):
        topology_devices("v5e:2x2")


@pytest.mark.skipif(CUDA, reason="the CUDA plugin is installed")
def test_a_machine_without_the_cuda_plugin_is_told_what_to_install():
    with pytest.raises(InputError, match=r"pip install 'trace-jax\[gpu\]'"):
        topology_devices("h100:8")


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed: pip install 'trace-jax[tpu]'")
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:1x1", "v5e:4x4", "v5p:2x2x4", "v6e:4x4", "tpu7x:2x2x1"])
def test_the_devices_of_a_tpu_are_those_of_the_table(topology):
    devices, accelerator = topology_devices(topology), find(topology)
    assert len(devices) == accelerator.devices and {device.device_kind for device in devices} == {accelerator.device_kind}


@pytest.mark.skipif(not LIBTPU, reason="libtpu is not installed: pip install 'trace-jax[tpu]'")
def test_a_slice_that_libtpu_refuses_is_an_input_error():
    with pytest.raises(InputError, match=r"^--topology=v5e:3x3: libtpu: .*slices are v5e:1x1, v5e:2x2, "):
        topology_devices("v5e:3x3")


@pytest.mark.skipif(not CUDA, reason="the CUDA plugin is not installed: pip install 'trace-jax[gpu]'")
@pytest.mark.parametrize("topology", ["a100:4", "h100:8", "h200:16"])
def test_the_devices_of_a_gpu_are_those_of_the_table(topology):
    devices, accelerator = topology_devices(topology), find(topology)
    assert len(devices) == accelerator.devices and {device.device_kind for device in devices} == {accelerator.device_kind}
