import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.engines.jax.sampler import cumulate, sample, session_key


def test_the_sampler_draws_the_softmax():
    logits = jnp.array([[2.0, -1.0, 0.5, -30.0, 1.0, 0.0, -2.0]])
    n, temperature = 20_000, 0.8
    keys = np.stack([session_key((0, i, 0)) for i in range(n)])
    tokens, logprobs = jax.jit(sample)(jnp.tile(logits, (n, 1)), jnp.asarray(keys), jnp.arange(n), jnp.full(n, temperature))
    p = np.asarray(jax.nn.softmax(logits[0] / temperature))
    counts = np.bincount(tokens, minlength=7)
    assert np.all(np.abs(counts / n - p) < 4 * np.sqrt(p * (1 - p) / n) + 1e-9)
    np.testing.assert_allclose(logprobs, np.log(p)[np.asarray(tokens)], atol=1e-5)


def test_random_bits_depend_on_key_and_position_alone():
    logits = jnp.zeros((6, 1000))
    keys = jnp.asarray(np.stack([session_key(k) for k in [(0, 1, 2), (0, 1, 2), (0, 1, 3), (0, 2, 2), (1, 1, 2), (-1, 2**70, 2)]]))
    tokens, _ = jax.jit(sample)(logits, keys, jnp.array([5, 5, 5, 5, 5, 5]), jnp.ones(6))
    assert tokens[0] == tokens[1] and len(set(tokens.tolist())) == 5
    moved, _ = sample(logits[:1], keys[:1], jnp.array([6]), jnp.ones(1))
    assert moved[0] != tokens[0]


@pytest.mark.parametrize("size", [1, 2, 7, 50, 501, 4099])
def test_the_blockwise_cumulative_sum_is_one(size):
    x = np.random.default_rng(size).random((3, size)).astype(np.float32)
    np.testing.assert_allclose(cumulate(jnp.asarray(x)), np.cumsum(x, axis=-1, dtype=np.float64), rtol=2e-6)


def limited(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The law that the limits leave of softmax(logits)."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    p = np.exp(logits[order] - logits.max())
    before = np.cumsum(p) - p
    order = order[before < top_p * p.sum()] if top_p < 1 else order
    law = np.zeros_like(logits)
    law[order] = np.exp(logits[order])
    return law / law.sum()


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (1, 1.0), (4, 1.0), (0, 0.6), (5, 0.8), (100, 1e-6), (3, 0.999)])
def test_limits_leave_the_likeliest_and_the_logprobs_of_what_is_left(top_k, top_p):
    logits = np.random.default_rng(0).normal(size=(4000, 12)).astype(np.float32) * 2
    logits[:, 3] = logits[:, 7]  # equals
    logits[:] = logits[0]
    keys = np.stack([session_key((1, i, 0)) for i in range(len(logits))])
    half = np.arange(len(logits)) % 2 == 0  # every second row is limited
    k, p = np.where(half, top_k, 0), np.where(half, top_p, 1.0).astype(np.float32)
    tokens, logprobs = jax.jit(sample)(jnp.asarray(logits), jnp.asarray(keys), jnp.arange(len(logits)), jnp.ones(len(logits)), k, p)
    law = limited(logits[0].astype(np.float64), top_k, top_p)
    counts = np.bincount(np.asarray(tokens)[half], minlength=12) / half.sum()
    assert np.all(np.abs(counts - law) < 5 * np.sqrt(law * (1 - law) / half.sum()) + 1e-9)
    np.testing.assert_allclose(logprobs[half], np.log(law[np.asarray(tokens)[half]]), atol=1e-5)
    free = jax.jit(sample)(jnp.asarray(logits), jnp.asarray(keys), jnp.arange(len(logits)), jnp.ones(len(logits)))
    for mine, others in zip((tokens, logprobs), free, strict=True):
        np.testing.assert_array_equal(mine[~half], others[~half])
