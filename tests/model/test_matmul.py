"""The matrix product: values and gradients of plain `@`, and no work for frozen weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.matmul import dense
from tests.model import tiny


@pytest.mark.parametrize("shape", [(5, 3, 8), (4, 8), (1, 1, 8)])
def test_values_and_gradients_are_those_of_a_plain_product(shape):
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, c = jax.random.normal(keys[0], shape), jax.random.normal(keys[1], (8, 6)), jax.random.normal(keys[2], (*shape[:-1], 6))
    got, expected = (jax.value_and_grad(lambda x, w, f=f: jnp.sum(f(x, w) * c), (0, 1))(x, w) for f in (dense, jnp.matmul))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_bfloat16_accumulates_in_float32():
    x, w = jnp.ones((1, 4096), jnp.bfloat16), jnp.full((4096, 2), 1.0 + 1 / 128, jnp.bfloat16)
    assert dense(x, w).dtype == jnp.bfloat16
    np.testing.assert_allclose(dense(x, w).astype(jnp.float32), 4096 * (1 + 1 / 128), rtol=4e-3)


@pytest.mark.parametrize("change", [{}, pytest.param({"unroll": 1}, marks=pytest.mark.slow), {"remat": True}])
def test_frozen_weights_cost_no_gradient(change):
    """The compiled adapter step does fewer FLOPs than the full step by at least the products dW of all layers."""
    model, bank, x = tiny.model(**change), tiny.bank(rank=2), jnp.asarray(tiny.tokens(4, 32))
    graphdef, state = nnx.split(model)

    def loss(state, factors):
        return jnp.mean(nnx.merge(graphdef, state)(x, adapters=bank.replace_factors(factors)) ** 2)

    def dots(argument):
        """How many products make the gradient of a base weight, [in, out] or turned, in the program as it is compiled."""
        text = jax.jit(jax.grad(loss, argument)).lower(state, bank.factors).compile().as_text()
        shapes = {(p.width, p.out) for p in model.config.projections().values()}
        names = {f"f32[{i},{o}]" for pair in shapes for i, o in (pair, pair[::-1])}
        return sum(name in line and " dot(" in line for name in names for line in text.splitlines())

    assert dots(1) == 0 < dots(0)
