"""Log-probs and entropies in chunks against whole logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import token_logprobs
from tests.model import tiny


def whole(model, hidden, targets, temperature):
    logs = jax.nn.log_softmax(model.unembed(hidden) / jnp.reshape(jnp.asarray(temperature, jnp.float32), (-1, 1, 1)))
    return jnp.take_along_axis(logs, targets[..., None], -1)[..., 0], -jnp.sum(jnp.exp(logs) * logs, -1)


@pytest.mark.parametrize("chunk", [1, 5, 7, 21, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.7, np.array([0.5, 2.0])])
def test_chunks_equal_the_whole(chunk, temperature):
    model = tiny.model()
    hidden, targets = tiny.forward(model, jnp.asarray(tiny.tokens(2, 21))).hidden, jnp.asarray(tiny.tokens(2, 21, seed=1))
    for got, expected in zip(
        token_logprobs(model, hidden, targets, temperature, chunk), whole(model, hidden, targets, temperature), strict=True
    ):
        assert got.shape == (2, 21) and got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_gradients_equal_those_of_the_whole():
    model, targets = tiny.model(), jnp.asarray(tiny.tokens(2, 21, seed=1))
    hidden = tiny.forward(model, jnp.asarray(tiny.tokens(2, 21))).hidden

    def score(function, *rest):
        return jax.grad(lambda h: sum(jnp.sum(jnp.sin(x)) for x in function(model, h, targets, 0.7, *rest)))(hidden)

    expected = score(whole)
    np.testing.assert_allclose(score(token_logprobs, 5), expected, atol=1e-5 * float(jnp.abs(expected).max()))


def test_no_logits_of_a_whole_sequence_are_made():
    model, targets = tiny.model(), jnp.asarray(tiny.tokens(2, 64))
    hidden = jnp.ones((2, 64, 48))
    step = jax.jit(jax.grad(lambda h: token_logprobs(model, h, targets, 1.0, 8)[0].sum()))
    text = step.lower(hidden).compile().as_text()
    assert "f32[16,97]" in text
    assert "f32[128,97]" not in text and "f32[2,64,97]" not in text and "f32[8,16,97]" not in text
