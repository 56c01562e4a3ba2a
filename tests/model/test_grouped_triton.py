"""The GPU's kernels in interpret mode against a product for each group; compiled for GPUs that are not there."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from model.grouped import plan, products
from model.grouped_triton import _items, grouped_outer, grouped_product
from trace_jax.preflight.accelerators import topology_devices
from trace_jax.preflight.program import compile_program

CUDA = importlib.util.find_spec("jax_cuda13_plugin") is not None
TILE = 16


SLOW = [((64, 0, 0, 0), 16, 130), ((0, 0, 0, 0), 16, 16), ((1, 2, 3, 40), 150, 8)]


@pytest.mark.parametrize("sizes, inner, out", [((20, 0, 3, 25), 40, 24), *(pytest.param(*x, marks=pytest.mark.slow) for x in SLOW)])
def test_each_group_has_its_own_matrix_whatever_its_size(sizes, inner, out):
    random, ends = np.random.default_rng(0), np.cumsum(sizes)
    x, w = random.standard_normal((64, inner), np.float32), random.standard_normal((4, inner, out), np.float32)
    dy = random.standard_normal((64, out), np.float32)
    y = grouped_product(x, w, jnp.asarray(sizes), TILE, transposed=False, interpret=True)
    dx = grouped_product(dy, w, jnp.asarray(sizes), TILE, transposed=True, interpret=True)
    dw = grouped_outer(x, dy, jnp.asarray(sizes), TILE, interpret=True)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        mine = slice(end - size, end)
        np.testing.assert_allclose(y[mine], x[mine] @ w[group], atol=1e-4)
        np.testing.assert_allclose(dx[mine], dy[mine] @ w[group].T, atol=1e-4)
        np.testing.assert_allclose(dw[group], x[mine].T @ dy[mine], atol=1e-4)


def test_every_row_of_a_group_is_in_one_tile_of_its_own():
    random = np.random.default_rng(0)
    for _ in range(5):
        sizes = random.multinomial(random.integers(0, 97), random.dirichlet(np.ones(5) / 2))
        owners = [[] for _ in range(96)]
        for tile, group, start, end in zip(*map(np.asarray, _items(jnp.asarray(sizes), 6, TILE)), strict=True):
            for row in range(max(start, TILE * tile), min(end, TILE * (tile + 1))):
                owners[row].append(group)
        assert owners == [[group] for group, size in enumerate(sizes) for _ in range(size)] + [[]] * (96 - sizes.sum())


@pytest.mark.skipif(not CUDA, reason="the CUDA plugin is not installed: pip install 'trace-jax[gpu]'")
@pytest.mark.parametrize("topology, dtype", [("h100:1", jnp.bfloat16), ("a100:1", jnp.float32)])
def test_the_kernels_compile_for_gpus_and_make_nothing_dense(topology, dtype):
    mesh = Mesh(np.array(topology_devices(topology)), ("fsdp",))

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def gradient(x, w, a, sizes):
        how = plan(8192, 16, "gpu")
        return jax.grad(lambda x, a: sum(jnp.sum(y.astype(jnp.float32)) for y in products(x, (w, a), sizes, how)), (0, 1))(x, a)

    operands = array(8192, 512), array(16, 512, 768), array(16, 512, 8), array(16, dtype=jnp.int32)
    program = compile_program("gradient", jax.jit(gradient).lower(*operands))
    assert sum(program.kernels.values()) >= 3 and program.dot_flops == 0
    assert program.temporaries < 6 * 8192 * 768 * 4  # dense, 16 times as much
