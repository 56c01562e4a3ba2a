"""Experts on every mesh: eight virtual devices give the values and the gradients of one, whatever divides what."""

import subprocess
import sys

from tests.devices import environment

# in a process of its own, since the number of devices is set before JAX starts
PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from model import moe
from model.moe import NAMES, expert_ffn, route

D, F, K, R, T, k = 24, 16, 2, 4, 6, 2


def normal(seed, *shape):
    return jnp.asarray(0.4 * np.random.default_rng(seed).standard_normal(shape, np.float32))


@functools.cache
def run(batch, experts, mesh=None, per_token=True):
    w = {n: normal(i, experts, *((F, D) if n == "expert_down" else (D, F))) for i, n in enumerate(NAMES)}
    a = {n: normal(10 + i, K, experts, w[n].shape[1], R) for i, n in enumerate(NAMES)}
    b = {n: normal(20 + i, K, experts, R, w[n].shape[2]) for i, n in enumerate(NAMES)}
    x, c, router = normal(3, batch, T, D), normal(4, batch, T, D), normal(5, D, experts)
    ranks = jnp.abs(normal(6, *((batch, T) if per_token else (1, 1)), K * R))

    def loss(x, factors, ranks):
        y = expert_ffn(x, *route(x, router, k, True), w, factors, ranks, mesh=mesh)
        return jnp.sum(y * c), y

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(x, (a, b), ranks)


def check(axes, batch, experts=8, per_token=True):
    size = int(np.prod(list(axes.values())))
    mesh = Mesh(np.array(jax.devices()[:size]).reshape(tuple(axes.values())), tuple(axes))
    (_, y), gradients = run(batch, experts, mesh, per_token)
    (_, expected), reference = run(batch, experts, None, per_token)
    assert (len(y.sharding.device_set), y.dtype) == (size, expected.dtype)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.abs(b).max()), err_msg=str((axes, batch, experts)))

    jax.tree.map(close, (y, gradients), (expected, reference))


check({"expert": 8}, 8)
check({"data": 2, "fsdp": 2, "expert": 2}, 8)  # tokens are exchanged along expert
check({"data": 2, "fsdp": 2, "expert": 2}, 4)  # tokens are whole along expert
check({"data": 2, "fsdp": 2, "expert": 2}, 3, per_token=False)  # tokens are whole
check({"expert": 2, "tensor": 4}, 8)
check({"expert": 4, "tensor": 2}, 8, experts=6)  # experts are whole
run(4, 8, None, False)
moe._most_rows = lambda platform: 12  # from here on in pieces of three tokens
check({"data": 4, "expert": 2}, 8)
check({"fsdp": 2, "expert": 4}, 4, per_token=False)
print(len(jax.devices()), "devices agree")
"""


def test_every_mesh_gives_the_values_and_gradients_of_one_device():
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(8), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 devices agree" in done.stdout
