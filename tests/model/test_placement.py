"""Arrays on eight virtual devices hold what was read, which was read once and in no larger part than the host needs."""

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from model.placement import place, place_stacked
from tests.devices import environment

# in a process of its own, since the number of devices is set before JAX starts
PROGRAM = """
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from model import placement
from model.placement import place, place_stacked

x = np.random.default_rng(0).standard_normal((3, 8, 16)).astype(ml_dtypes.bfloat16)
asked = []


def layers(count=3):
    def read(index, i):
        asked.append((i, index))
        return x[i].T[index[::-1]].T if i % 2 else x[i][index]
    return [lambda index, i=i: read(index, i) for i in range(count)]


def check(array, expected, sharding, dtype):
    assert array.sharding.is_equivalent_to(sharding, array.ndim) and array.dtype == dtype, (array.sharding, array.dtype)
    np.testing.assert_array_equal(np.asarray(array), expected.astype(dtype))
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[shard.index].astype(dtype))


for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    for spec in (P(), P(None, "a"), P(None, None, "b"), P(None, "b", "a"), P(None, ("a", "b")), P(None, None, ("b", "a"))):
        for dtype in (jnp.float32, jnp.bfloat16):
            sharding = NamedSharding(mesh, spec)
            asked.clear()
            check(place_stacked(x.shape, dtype, sharding, layers()), x, sharding, dtype)
            assert asked == [(i, (slice(0, 8), slice(0, 16))) for i in range(3)], asked  # once, however many replicas
            check(place(x.shape, dtype, sharding, x.__getitem__), x, sharding, dtype)
    stack = jnp.zeros(x.shape, jnp.float32, device=sharding)
    layer = place((1, 8, 16), jnp.float32, sharding, x[:1].__getitem__)
    insert = placement._insertion(sharding).lower(stack, layer, 1).compile()
    assert not any(word in insert.as_text() for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))

# meshes of some devices
single = SingleDeviceSharding(jax.devices()[5])
check(place_stacked(x.shape, jnp.float32, single, layers()), x, single, jnp.float32)
part = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("b",)), P(None, "b"))
check(place_stacked(x.shape, jnp.float32, part, layers()), x, part, jnp.float32)
try:
    place_stacked(x.shape, jnp.float32, NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:3]), ("b",)), P("b")), layers())
except ValueError as error:
    assert "splits the leading axis" in str(error)
else:
    raise AssertionError("a split of the layers was taken")
print(len(jax.devices()), "devices agree")
"""

MEMORY = """
import resource
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from model.placement import place_stacked

sharding = NamedSharding(Mesh(np.array(jax.devices()).reshape(2, -1), ("a", "b")), P(None, "b", "a")) if len(jax.devices()) > 1 else None


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def load(layers, width):
    reads = [lambda index: np.ones((width, width), np.float32)[index].T] * layers
    return place_stacked((layers, width, width), jnp.float32, sharding, reads).block_until_ready()


load(4, 1024)  # what compiling takes
before = peak()
array = load(64, 1024)
size = array.nbytes / 2**20
assert size == 256 and peak() - before < 1.25 * size, (before, peak())
"""


def run(program: str, devices: int) -> str:
    env = environment(devices)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_layout_holds_the_whole_and_asks_for_each_layer_once():
    assert run(PROGRAM, 8) == "8 devices agree\n"


@pytest.mark.parametrize("devices", [1, 8])
def test_memory_stays_near_the_result(devices):
    run(MEMORY, devices)


def test_one_device_without_a_layout():
    x = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    for dtype in (jnp.float32, jnp.bfloat16):
        np.testing.assert_array_equal(place(x.shape, dtype, None, x.__getitem__), x.astype(dtype))
        np.testing.assert_array_equal(place_stacked(x.shape, dtype, None, [x[0].__getitem__, x[1].__getitem__]), x.astype(dtype))
    np.testing.assert_array_equal(place((), jnp.float32, None, lambda index: np.float32(3)), 3)
    with pytest.raises(ValueError, match="1 layers for an array of shape"):
        place_stacked(x.shape, jnp.float32, None, [x[0].__getitem__])
