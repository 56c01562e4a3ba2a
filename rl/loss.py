"""The policy loss, one pure function of log-probs:

    L = -(1/N) sum_t m_t k_t sg(min(exp(l_old - l_mu), 2)) P(rho_t, A_t)  +  (kl / N) sum_t m_t (l - l_base)^2 / 2

l is the log-prob under the weights that are trained, l_old under the weights at the start of the update, l_mu under the engine that
sampled. rho = exp(l - l_old), clipped asymmetrically (arXiv 2503.14476) with a dual clip for negative advantages (arXiv 1912.09729). The
weight between trainer and engine, truncated, corrects for the engine's other numerics and, where rollouts are of an older version, for
the older policy; k drops tokens on which the two disagree altogether. Where a rollout saw a hint, l_mu is the log-prob after the hint and l
that without it, so the same weight leads from the hinted law to the policy that is trained. N counts the action tokens of the whole batch,
so the sum over micro-batches does not depend on how the batch is cut.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from rl.packing import Batch

Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Constants of the loss.

    Attributes:
      clip_low, clip_high: rho is clipped to [1 - clip_low, 1 + clip_high].
      dual_clip: with A < 0 the surrogate is not below dual_clip * A.
      weight_cap: cap of the importance weight between trainer and engine.
      drop_below, drop_above: tokens with a weight outside carry no loss.
      ratio: rho per token, or one per trajectory, the geometric mean over its action tokens (GSPO, arXiv 2507.18071).
      icepop: narrower bounds outside of which tokens are masked (IcePop: 0.5, 5), or None.
      kl: coefficient of the k2 estimate of the divergence from the base.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float = 3.0
    weight_cap: float = 2.0
    drop_below: float = 1e-4
    drop_above: float = 1e2
    ratio: Literal["token", "sequence"] = "token"
    icepop: tuple[float, float] | None = None
    kl: float = 0.0

    def __post_init__(self):
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise ValueError(f"loss.clip_low must be in (0, 1) and clip_high positive, found {self.clip_low}, {self.clip_high}")
        if self.dual_clip <= 1 or self.weight_cap <= 0:
            raise ValueError(f"loss.dual_clip must exceed 1 and weight_cap 0, found {self.dual_clip}, {self.weight_cap}")
        if not 0 <= self.drop_below < self.drop_above:
            raise ValueError(f"loss.drop_below must be under drop_above, found {self.drop_below}, {self.drop_above}")
        if self.ratio not in ("token", "sequence"):
            raise ValueError(f"loss.ratio must be 'token' or 'sequence', found {self.ratio!r}")


def trajectory_mean(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[N, T]: at every token the masked mean of `values` over its segment of its row; linear in T."""
    rows, length = values.shape
    segment = (segment_ids + (length + 1) * jnp.arange(rows)[:, None]).reshape(-1)

    def total(x):
        return jax.ops.segment_sum(x.reshape(-1), segment, rows * (length + 1))

    mean = total(values * mask) / jnp.maximum(total(mask), 1)
    return mean[segment].reshape(rows, length)


def surrogate(ratio: jax.Array, advantages: jax.Array, config: LossConfig) -> jax.Array:
    """P(rho, A), elementwise."""
    clipped = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    lower = jnp.minimum(ratio * advantages, clipped * advantages)
    return jnp.where(advantages < 0, jnp.maximum(lower, config.dual_clip * advantages), lower)


def policy_loss(
    logprobs: jax.Array,
    batch: Batch,
    denominator: jax.Array,
    config: LossConfig,
    *,
    entropy: jax.Array | None = None,
    old_logprobs: jax.Array | None = None,
    base_logprobs: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """This (micro-)batch's share of L, and sums for the metrics.

    Args:
      logprobs: [N, T] log-probs of `batch.targets`, at the sampling temperature.
      denominator: N of the whole batch, a scalar.
      entropy: [N, T] of the predicted distribution, for the metrics.
      old_logprobs: [N, T]; by default the log-probs themselves without gradient, as with one update per batch.
      base_logprobs: [N, T] under the base; needed when `config.kl` is not 0.

    Returns:
      The loss, and metrics that add up over micro-batches; `mean_metrics` turns their sums into figures.

    Raises:
      ValueError: `config.kl` without `base_logprobs`.
    """
    if config.kl and base_logprobs is None:
        raise ValueError("loss.kl is set, so base_logprobs are needed")
    # Padding predicts nothing: its log-probs must not reach the sums even as 0 * inf.
    mask, real = batch.mask, batch.mask > 0

    def zeroed(x):
        return jnp.where(real, x, 0.0)

    logprobs = zeroed(logprobs)
    old = jax.lax.stop_gradient(logprobs) if old_logprobs is None else zeroed(old_logprobs)
    log_weight = jax.lax.stop_gradient(old) - batch.logprobs
    weight = jnp.exp(log_weight)
    keep = (weight >= config.drop_below) & (weight <= config.drop_above)
    inside = keep
    if config.icepop is not None:
        inside = keep & (weight >= config.icepop[0]) & (weight <= config.icepop[1])
    capped = jnp.where(inside, jnp.minimum(weight, config.weight_cap), 0.0)
    log_ratio = logprobs - old
    if config.ratio == "sequence":
        log_ratio = trajectory_mean(log_ratio, mask, batch.segment_ids)
    ratio = jnp.exp(log_ratio)
    loss = -jnp.sum(mask * capped * surrogate(ratio, batch.advantages, config)) / denominator

    positive = batch.advantages >= 0
    clipped = jnp.where(positive, ratio > 1 + config.clip_high, ratio < 1 - config.clip_low)

    def total(x):
        return jnp.sum(mask * x)

    sums = {
        "tokens": jnp.sum(mask),
        "engine_gap": total(jnp.abs(log_weight)),
        "weight": total(jnp.where(keep, weight, 0.0)),
        "weight_squared": total(jnp.where(keep, jnp.square(weight), 0.0)),
        "weight_kept": total(keep),
        "capped_share": total(weight > config.weight_cap),
        "dropped_share": total(~keep),
        "masked_share": total(~inside),
        "clip_share": total(clipped),
        "dual_clip_share": total(~positive & (ratio > config.dual_clip)),
        "logprob": total(logprobs),
        "hinted_tokens": total(batch.hinted),
        "hinted_weight": total(batch.hinted * capped),
        "hinted_masked_share": total(batch.hinted * ~inside),
    }
    if entropy is not None:
        sums["entropy"] = total(zeroed(entropy))
    if base_logprobs is not None:
        gap = logprobs - zeroed(base_logprobs)
        if config.kl:
            loss = loss + config.kl * jnp.sum(mask * jnp.square(gap)) / (2 * denominator)
        sums["base_k3"] = total(jnp.exp(-gap) - 1 + gap)
        sums["base_tokens"] = jnp.sum(mask)
    sums["loss"] = loss
    return loss, jax.lax.stop_gradient(sums)


def mean_metrics(sums: Metrics) -> dict[str, float]:
    """Figures from the summed metrics of a batch: means over action tokens; `effective_sample_share` is (sum w)^2 / (n sum w^2).

    Over the tokens of hinted rollouts, where there are any: `hinted_weight`, the weight that enters the loss, 0 where a token is masked,
    and `hinted_masked_share`.
    """
    sums = {name: float(value) for name, value in sums.items()}
    tokens, loss = sums.pop("tokens"), sums.pop("loss")
    weight, squared, kept = (sums.pop(name) for name in ("weight", "weight_squared", "weight_kept"))
    out = {"loss": loss, "action_tokens": tokens, "effective_sample_share": weight**2 / max(kept * squared, 1e-30)}
    base_tokens, hinted_tokens = sums.pop("base_tokens", 0.0), sums.pop("hinted_tokens")
    hinted = {name: sums.pop(name) / max(hinted_tokens, 1.0) for name in ("hinted_weight", "hinted_masked_share")}
    for name, value in sums.items():
        out[name] = value / max(base_tokens if name == "base_k3" else tokens, 1.0)
    return out | (hinted if hinted_tokens else {})
