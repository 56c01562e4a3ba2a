import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.loss import LossConfig, mean_metrics, policy_loss
from rl.packing import Batch

ROWS, LENGTH = 5, 24


def ragged_batch(seed=0):
    """Random rows of one to three segments with padding, and log-probs that stray far from the engine's."""
    random = np.random.default_rng(seed)
    segment_ids = np.zeros((ROWS, LENGTH), np.int32)
    advantages = np.zeros((ROWS, LENGTH), np.float32)
    for row in range(ROWS):
        start = 0
        for segment in range(1, random.integers(2, 5)):
            end = start + int(random.integers(3, 9))
            segment_ids[row, start:end], advantages[row, start:end] = segment, random.normal()
            start = end
    mask = ((random.random((ROWS, LENGTH)) < 0.6) & (segment_ids > 0)).astype(np.float32)
    old = -random.random((ROWS, LENGTH)).astype(np.float32) * 3
    engine = (old + random.normal(size=old.shape) * random.choice([0.05, 1.0, 8.0], old.shape)).astype(np.float32) * mask
    logprobs = (old + random.normal(size=old.shape) * 0.4).astype(np.float32)
    zeros = np.zeros_like(segment_ids)
    hinted = np.where(segment_ids == 1, 1, 0)
    batch = Batch(zeros, zeros, mask, engine, advantages, segment_ids, zeros, zeros, zeros, hinted)
    base = (logprobs + random.normal(size=old.shape) * 0.3).astype(np.float32)
    return batch, logprobs, old, base


def oracle(batch, logprobs, old, base, config, weight_old=None):
    """The formula, token by token, in float64."""
    total, n = 0.0, batch.mask.sum()
    for row, t in zip(*np.nonzero(batch.mask), strict=True):
        same = (batch.segment_ids[row] == batch.segment_ids[row, t]) & (batch.mask[row] > 0)
        log_ratio = np.float64(logprobs[row, t]) - old[row, t]
        if config.ratio == "sequence":
            log_ratio = np.mean(np.float64(logprobs[row][same]) - old[row][same])
        weight = np.exp(np.float64((old if weight_old is None else weight_old)[row, t]) - batch.logprobs[row, t])
        keep = config.drop_below <= weight <= config.drop_above
        if config.icepop:
            keep = keep and config.icepop[0] <= weight <= config.icepop[1]
        rho, a = np.exp(log_ratio), np.float64(batch.advantages[row, t])
        p = min(rho * a, np.clip(rho, 1 - config.clip_low, 1 + config.clip_high) * a)
        if a < 0:
            p = max(p, config.dual_clip * a)
        total -= keep * min(weight, config.weight_cap) * p
        if config.kl:
            total += config.kl * (np.float64(logprobs[row, t]) - base[row, t]) ** 2 / 2
    return total / n


CONFIGS = {
    "default": LossConfig(),
    "sequence": LossConfig(ratio="sequence"),
    "icepop": LossConfig(icepop=(0.5, 5.0)),
    "kl": LossConfig(kl=0.3),
    "tight": LossConfig(clip_low=0.01, clip_high=0.02, dual_clip=1.1, weight_cap=1.0, ratio="sequence", kl=0.1),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_the_formula(name, seed):
    config = CONFIGS[name]
    batch, logprobs, old, base = ragged_batch(seed)

    def loss(x):
        return policy_loss(x, batch, batch.mask.sum(), config, old_logprobs=old, base_logprobs=base)[0]

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(logprobs))
    np.testing.assert_allclose(value, oracle(batch, logprobs, old, base, config), rtol=2e-5, atol=1e-6)
    # finite differences of the float64 oracle; tokens at a kink of the clip are too few to hit at this step
    step = 1e-6
    for row, t in zip(*np.nonzero(batch.mask), strict=True):
        up, down = logprobs.astype(np.float64), logprobs.astype(np.float64)
        up[row, t] += step
        down[row, t] -= step
        difference = (oracle(batch, up, old, base, config) - oracle(batch, down, old, base, config)) / (2 * step)
        np.testing.assert_allclose(gradient[row, t], difference, rtol=2e-4, atol=1e-6)


def test_by_default_the_old_logprobs_are_the_current_ones():
    batch, logprobs, _, _ = ragged_batch()
    value, gradient = jax.value_and_grad(lambda x: policy_loss(x, batch, batch.mask.sum(), LossConfig())[0])(jnp.asarray(logprobs))
    np.testing.assert_allclose(value, oracle(batch, logprobs, logprobs, None, LossConfig()), rtol=2e-5)
    weight = np.exp(np.float64(logprobs) - batch.logprobs)
    kept = (weight >= 1e-4) & (weight <= 1e2)
    expected = -batch.mask * kept * np.minimum(weight, 2) * batch.advantages / batch.mask.sum()
    np.testing.assert_allclose(gradient, expected, rtol=2e-5, atol=1e-7)


def test_what_stands_at_masked_positions_does_not_matter():
    batch, logprobs, _, base = ragged_batch()
    wild = np.where(batch.mask > 0, logprobs, -np.inf).astype(np.float32)
    config = LossConfig(kl=0.1)

    def run(x):
        return policy_loss(x, batch, batch.mask.sum(), config, base_logprobs=base, entropy=-x)

    (a, first), (b, second) = run(logprobs), run(wild)
    assert a == b and all(first[k] == second[k] for k in first)
    assert np.isfinite(jax.grad(lambda x: run(x)[0])(wild)).all()


def test_micro_batches_add_up_with_the_global_denominator():
    batch, logprobs, old, _ = ragged_batch()
    n = batch.mask.sum()
    whole, sums = policy_loss(logprobs, batch, n, LossConfig(), old_logprobs=old)
    parts = []
    for rows in (slice(0, 1), slice(1, 5)):
        part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
        parts.append(policy_loss(logprobs[rows], part, n, LossConfig(), old_logprobs=old[rows]))
    np.testing.assert_allclose(sum(p[0] for p in parts), whole, rtol=1e-5)
    for name in sums:
        np.testing.assert_allclose(sum(p[1][name] for p in parts), sums[name], rtol=1e-4, atol=1e-4)


def test_outliers_carry_no_loss_and_are_counted():
    batch, logprobs, _, _ = ragged_batch()
    engine = np.where(batch.mask > 0, logprobs - 10.0, 0).astype(np.float32)  # weight e^10 everywhere
    loss, sums = policy_loss(logprobs, dataclasses.replace(batch, logprobs=engine), 7.0, LossConfig())
    metrics = mean_metrics(sums)
    assert loss == 0 and metrics["dropped_share"] == 1 and metrics["effective_sample_share"] == 0
    assert metrics["engine_gap"] == pytest.approx(10, rel=1e-5)


def test_metrics_are_means_over_action_tokens():
    batch, logprobs, old, base = ragged_batch()
    on = batch.mask > 0
    loss, sums = policy_loss(logprobs, batch, on.sum(), LossConfig(), entropy=old**2, old_logprobs=old, base_logprobs=base)
    metrics = mean_metrics(sums)
    gap = np.float64(logprobs - base)[on]
    weight = np.exp(np.float64(old)[on] - batch.logprobs[on])
    kept = weight[(weight >= 1e-4) & (weight <= 1e2)]
    rho, a = np.exp(logprobs - old)[on], batch.advantages[on]
    assert metrics["action_tokens"] == on.sum() and metrics["loss"] == pytest.approx(float(loss))
    assert metrics["entropy"] == pytest.approx((old[on] ** 2).mean(), rel=1e-5)
    assert metrics["base_k3"] == pytest.approx(np.mean(np.exp(-gap) - 1 + gap), rel=1e-4)
    assert metrics["engine_gap"] == pytest.approx(np.abs(np.log(weight)).mean(), rel=1e-5)
    assert metrics["effective_sample_share"] == pytest.approx(kept.sum() ** 2 / len(kept) / (kept**2).sum(), rel=1e-4)
    assert metrics["clip_share"] == pytest.approx(np.mean(np.where(a >= 0, rho > 1.28, rho < 0.8)))
    assert metrics["capped_share"] == pytest.approx((weight > 2).mean()) and metrics["dropped_share"] == pytest.approx(
        1 - len(kept) / on.sum()
    )


def test_what_masking_leaves_of_hinted_rollouts_is_told():
    batch, logprobs, old, _ = ragged_batch()
    _, sums = policy_loss(logprobs, batch, batch.mask.sum(), LossConfig(), old_logprobs=old)
    metrics, on = mean_metrics(sums), (batch.mask > 0) & (batch.segment_ids == 1)
    weight = np.exp(np.float64(old)[on] - batch.logprobs[on])
    kept = (weight >= 1e-4) & (weight <= 1e2)
    assert 0 < metrics["hinted_masked_share"] == pytest.approx(1 - kept.mean())
    assert metrics["hinted_weight"] == pytest.approx(np.mean(kept * np.minimum(weight, 2)), rel=1e-5)
    _, sums = policy_loss(logprobs, dataclasses.replace(batch, hinted=0 * batch.hinted), 1.0, LossConfig())
    assert not [name for name in mean_metrics(sums) if "hinted" in name]


@pytest.mark.parametrize("bad", [{"clip_low": 1.5}, {"dual_clip": 0.5}, {"drop_below": 5.0, "drop_above": 1.0}, {"ratio": "word"}])
def test_impossible_constants_are_refused(bad):
    with pytest.raises(ValueError, match="loss."):
        LossConfig(**bad)


def test_a_divergence_term_needs_the_base():
    batch, logprobs, _, _ = ragged_batch()
    with pytest.raises(ValueError, match="base_logprobs"):
        policy_loss(logprobs, batch, 1.0, LossConfig(kl=0.1))
