"""Intervals and agreement: how far a figure may be trusted.

Only NumPy, vectorised, no state: every function that draws random numbers takes a seed.
"""

from __future__ import annotations

import functools

import numpy as np

Z95 = 1.959963984540054  # the 97.5 % point of the normal law


def wilson(successes: np.ndarray | int, trials: np.ndarray | int, z: float = Z95) -> tuple[np.ndarray, np.ndarray]:
    """The score interval of a proportion (Wilson 1927); stays inside [0, 1] and is honest for 0 of n and n of n.

    Args:
      successes, trials: counts, broadcast against each other.
      z: the normal quantile, 1.96 for 95 %.

    Returns:
      (low, high), float arrays of the broadcast shape; (0, 1) where there are no trials.

    Raises:
      ValueError: successes outside [0, trials].
    """
    s, n = np.broadcast_arrays(np.asarray(successes, float), np.asarray(trials, float))
    if np.any((s < 0) | (s > n)):
        raise ValueError("successes must lie in [0, trials]")
    some = np.maximum(n, 1.0)
    p = s / some
    denominator = 1.0 + z * z / some
    centre = (p + z * z / (2 * some)) / denominator
    half = z / denominator * np.sqrt(p * (1 - p) / some + z * z / (4 * some * some))
    # exact ends: rounding must not leave 1e-17 or 1 - 1e-16 where the formula gives 0 or 1
    low = np.where((n == 0) | (s == 0), 0.0, centre - half)
    high = np.where((n == 0) | (s == n), 1.0, centre + half)
    return low, high


def clustered_wilson(values: np.ndarray, clusters: np.ndarray, z: float = Z95) -> tuple[float, float]:
    """Wilson's interval of the mean of 0-1 `values` [N] whose units come in clusters: at the effective sample size p (1 - p) / var(p).

    Source: Rao and Scott, "A Simple Method for the Analysis of Clustered Binary Data" (1992); var(p) is that of a ratio over clusters. The
    size is kept between the number of clusters, as if each were one unit, and N; where all values are equal, var(p) says nothing and it is
    the former. (0, 1) where there are no values.
    """
    y, (names, member) = np.asarray(values, float), np.unique(np.asarray(clusters), return_inverse=True)
    n, count = len(y), len(names)
    if not n:
        return 0.0, 1.0
    p = y.mean()
    residuals = np.bincount(member, weights=y - p)
    variance = count / max(count - 1, 1) * np.square(residuals).sum() / n**2
    size = np.clip(p * (1 - p) / variance, count, n) if variance > 0 else count
    low, high = wilson(p * size, size, z)
    return float(low), float(high)


def bootstrap_weights(clusters: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """How often each unit occurs in each bootstrap sample, when whole clusters are drawn with replacement.

    Trials of one task are not independent, so the task is what is drawn; with one trial a task this is the plain bootstrap over trials.

    Args:
      clusters: [N] the cluster of each unit, any hashable dtype.
      draws: number of bootstrap samples B.

    Returns:
      [B, N] float32 counts; every row sums to about N (exactly N when clusters have one size).
    """
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    count = int(member.max()) + 1 if len(member) else 0
    if not count:
        return np.zeros((draws, 0), np.float32)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1.0 / count), size=draws)
    return weights[:, member].astype(np.float32)


def percentile_interval(samples: np.ndarray, confidence: float = 0.95, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The percentile interval of bootstrap samples along an axis; NaN samples (an empty denominator) are left out."""
    tail = 100.0 * (1.0 - confidence) / 2.0
    low, high = np.nanpercentile(samples, [tail, 100.0 - tail], axis=axis)
    return low, high


def bootstrap_mean(
    values: np.ndarray, clusters: np.ndarray | None = None, draws: int = 2000, seed: int = 0, confidence: float = 0.95
) -> tuple[float, float]:
    """The bootstrap interval of a mean of `values` [N], by clusters where given.

    Raises:
      ValueError: no values.
    """
    values = np.asarray(values, float)
    if not len(values):
        raise ValueError("the mean of nothing has no interval")
    _, member = np.unique(np.arange(len(values)) if clusters is None else np.asarray(clusters), return_inverse=True)
    sizes, sums = np.bincount(member), np.bincount(member, weights=values)  # [C]: all that a draw of whole clusters depends on
    weights = _weights(len(sizes), draws, seed)
    low, high = percentile_interval(weights @ sums / (weights @ sizes), confidence)
    return float(low), float(high)


@functools.lru_cache(maxsize=2)
def _weights(count: int, draws: int, seed: int) -> np.ndarray:
    """Bootstrap weights of `count` units; drawing them takes half a second, and all policies face the same number of tasks."""
    weights = bootstrap_weights(np.arange(count), draws, seed)
    weights.flags.writeable = False
    return weights


def krippendorff_alpha(codes: np.ndarray, categories: int) -> np.ndarray:
    """Krippendorff's alpha for nominal codes with missing values: 1 - observed / expected disagreement.

    Source: Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), the coincidence-matrix form.

    Args:
      codes: [..., coders, units] integers in [0, categories), negative where a coder did not see the unit.
      categories: how many codes exist.

    Returns:
      [...] float; NaN where no unit has two codes or only one category occurs (alpha is undefined there).
    """
    codes = np.asarray(codes)
    counts = np.stack([(codes == c).sum(-2) for c in range(categories)], -1).astype(float)  # [..., units, categories]
    coders = counts.sum(-1)
    counts = np.where(coders[..., None] >= 2, counts, 0.0)  # a unit coded once says nothing about agreement
    pairable = np.maximum(counts.sum(-1), 2.0)
    total = counts.sum((-1, -2))
    same = ((counts * (counts - 1)).sum(-1) / (pairable - 1)).sum(-1)
    marginal = counts.sum(-2)
    expected_same = (marginal * (marginal - 1)).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        alpha = 1.0 - (total - same) * (total - 1) / (total * (total - 1) - expected_same)
    return np.where(np.isfinite(alpha), alpha, np.nan)
