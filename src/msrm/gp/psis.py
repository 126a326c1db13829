"""Pareto-smoothed importance weights (Vehtari, Simpson, Gelman, Yao and Gabry 2024) and their k-hat.

The largest weights are replaced by quantiles of a generalized Pareto distribution fitted to them (Zhang and Stephens
2009); its shape k says how many moments the raw weights have. Above 0.7 an average over them is not to be trusted.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

__all__ = ["GOOD_K", "good_k", "smoothed"]

Array = NDArray[np.float64]
GOOD_K = 0.7
_FEWEST_IN_TAIL = 5


def good_k(count: int) -> float:
    """The largest k-hat at which so many draws suffice."""
    return min(1.0 - 1.0 / np.log10(count), GOOD_K) if count > 10 else 0.0


def smoothed(log_weights: Array) -> tuple[Array, float]:
    """Smoothed, normalized log weights and k-hat.

    Parameters
    ----------
    log_weights : (draw,)
        Up to a constant.

    Returns
    -------
    (draw,), float
        k-hat is infinite when there are too few draws to tell.
    """
    count = len(log_weights)
    shifted = log_weights - log_weights.max()
    tail = int(min(0.2 * count, 3.0 * np.sqrt(count)))
    k = np.inf
    if tail >= _FEWEST_IN_TAIL:
        order = np.argsort(shifted, kind="stable")
        cutoff = max(shifted[order[-tail - 1]], np.log(np.finfo(float).tiny))
        largest = np.flatnonzero(shifted > cutoff)
        if len(largest) >= _FEWEST_IN_TAIL:
            largest = largest[np.argsort(shifted[largest], kind="stable")]
            above = np.exp(shifted[largest]) - np.exp(cutoff)
            k, scale = _pareto(above)
            if np.isfinite(k):
                probability = (np.arange(len(above)) + 0.5) / len(above)
                shifted = shifted.copy()
                shifted[largest] = np.minimum(np.log(_quantile(probability, k, scale) + np.exp(cutoff)), 0.0)
        elif np.ptp(shifted) == 0.0:
            k = -np.inf
    return shifted - logsumexp(shifted), float(k)


def _pareto(above: Array) -> tuple[float, float]:
    """Shape and scale of a generalized Pareto distribution of sorted excesses, with the prior that pulls k to 0.5."""
    count = len(above)
    grid = 30 + int(np.sqrt(count))
    steps = 1.0 - np.sqrt(grid / (np.arange(1, grid + 1) - 0.5))
    theta = steps / (3.0 * above[int(count / 4 + 0.5) - 1]) + 1.0 / above[-1]
    shapes = np.log1p(-theta[:, None] * above).mean(axis=1)
    heights = count * (np.log(-theta / shapes) - shapes - 1.0)
    weights = np.exp(heights - logsumexp(heights))
    chosen = float(np.sum(theta * weights))
    k = float(np.log1p(-chosen * above).mean())
    scale = -k / chosen
    return (count * k + 5.0) / (count + 10.0), scale


def _quantile(probability: Array, k: float, scale: float) -> Array:
    if abs(k) < np.finfo(float).eps:
        return -scale * np.log1p(-probability)
    return scale * np.expm1(-k * np.log1p(-probability)) / k
