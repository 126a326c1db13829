"""Exact conditional draws of the Gibbs sampler: loading rows, the null block, noise variances (DESIGN 3.2, 5).

A *row* is one reduced feature's ``[w b c...]``: its loading, its offset and, where the model has them, its run
offsets; k numbers. Given the design X (scalar, k) of node functionals and ones, rows of a pair are independent
normal with precision ``X'X / v + diag(prior)``. Null rows (rotated features that are zero everywhere) have the same
precision and mean zero, so only their Gram matrix is drawn, as a Wishart matrix.
"""

from collections.abc import Callable
from math import exp, expm1, inf, log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from msrm.priors import LogNormal, Normal, Prior, Uniform

__all__ = ["draw_noise", "draw_null_factor", "draw_rows"]

Array = NDArray[np.float64]
_Function = Callable[[float], float]
# Tangents this many curvature sds from the mode make the hull of a normal density tightest (88 % accepted).
_TANGENT = sqrt(2.0)
_MODE_STEPS = 100


def draw_rows(rng: np.random.Generator, gram: Array, cross: Array, prior: Array, noise: float) -> Array:
    """Rows of a pair given the design: N(P^-1 X'y / v, P^-1) with P = X'X / v + diag(prior).

    Parameters
    ----------
    rng : Generator
    gram : (k, k) or (row, k, k)
        X'X, one for each row where entries are missing.
    cross : (row, k)
        X'y.
    prior : (k,)
        Prior precisions.
    noise : float
        v.

    Returns
    -------
    (row, k)
    """
    factor = np.linalg.cholesky(gram / noise + np.diag(prior))
    standard = rng.standard_normal(cross.shape)
    if gram.ndim == 2:
        half = solve_triangular(factor, cross.T / noise, lower=True) + standard.T
        return solve_triangular(factor, half, lower=True, trans="T").T
    half = np.linalg.solve(factor, cross[:, :, None] / noise)[:, :, 0] + standard
    return np.linalg.solve(factor.swapaxes(1, 2), half[:, :, None])[:, :, 0]


def draw_null_factor(rng: np.random.Generator, gram: Array, prior: Array, noise: float, count: int) -> Array:
    """A factor F of the Gram matrix ``F F'`` of `count` null rows, each N(0, P^-1), P = X'X / v + diag(prior).

    Wishart by Bartlett's decomposition; the rows themselves where there are fewer than k.

    Parameters
    ----------
    rng : Generator
    gram : (k, k)
        X'X over the scalars of a null feature.
    prior : (k,)
    noise : float
    count : int
        Null rows.

    Returns
    -------
    (k, k)
    """
    k = len(prior)
    root = np.linalg.cholesky(gram / noise + np.diag(prior))
    if count >= k:
        bartlett = np.tril(rng.standard_normal((k, k)), -1)
        bartlett[np.diag_indices(k)] = np.sqrt(rng.chisquare(count - np.arange(k)))
    else:
        bartlett = np.zeros((k, k))
        bartlett[:, :count] = rng.standard_normal((k, count))
    return solve_triangular(root, bartlett, lower=True, trans="T")


def draw_noise(rng: np.random.Generator, count: float, squares: float, prior: Prior, current: float) -> float:
    """A noise variance given `count` residuals with sum of squares `squares`.

    The density of u = log v, ``-count u / 2 - squares exp(-u) / 2 + log prior``, is log-concave under lognormal and
    uniform priors and drawn exactly, by rejection under tangents. Elsewhere the same proposal is corrected by a
    Metropolis step (Tierney 1994, rejection sampling chains), exact again.

    Parameters
    ----------
    rng : Generator
    count : float
        Residuals, times the modality's power.
    squares : float
        Their sum of squares, times the modality's power.
    prior : LogNormal, Uniform or Normal
        Of v, truncated to its bounds.
    current : float
        v now, used by the correction only.

    Returns
    -------
    float
    """
    value, slope, curvature = _log_prior(prior)

    def density(u: float) -> float:
        return -0.5 * count * u - 0.5 * squares * exp(-u) + value(u)

    def first(u: float) -> float:
        return -0.5 * count + 0.5 * squares * exp(-u) + slope(u)

    def second(u: float) -> float:
        return -0.5 * squares * exp(-u) + curvature(u)

    low = log(prior.lower) if prior.lower > 0 else -inf
    high = log(prior.upper) if prior.upper < inf else inf
    mode = _mode(first, second, low, high, log(max(squares, 1e-300) / max(count, 1.0)))
    hull = _Hull.at(density, first, second, mode, low, high)
    while True:
        u, height = hull.draw(rng)
        excess = density(u) - height
        if log(rng.uniform()) < excess:
            break
    if not isinstance(prior, LogNormal | Uniform):
        u_now = log(current)
        excess_now = density(u_now) - hull.height(u_now)
        if log(rng.uniform()) >= max(excess, 0.0) - max(excess_now, 0.0):
            return current
    return exp(u)


def _log_prior(prior: Prior) -> tuple[_Function, _Function, _Function]:
    """``log prior(exp u) + u`` up to a constant, and its first and second derivative in u."""
    if isinstance(prior, LogNormal):
        mean, variance = prior.mean, prior.sd**2
        return lambda u: -0.5 * (u - mean) ** 2 / variance, lambda u: (mean - u) / variance, lambda u: -1.0 / variance
    if isinstance(prior, Uniform):
        return lambda u: u, lambda u: 1.0, lambda u: 0.0
    if isinstance(prior, Normal):
        mean, variance = prior.mean, prior.sd**2
        return (
            lambda u: u - 0.5 * (exp(u) - mean) ** 2 / variance,
            lambda u: 1.0 - exp(u) * (exp(u) - mean) / variance,
            lambda u: -exp(u) * (2.0 * exp(u) - mean) / variance,
        )
    raise TypeError(f"the noise prior must be LogNormal, Uniform or Normal to be sampled, found {prior!r}")


def _mode(first: _Function, second: _Function, low: float, high: float, start: float) -> float:
    """Where a density's slope changes sign inside [low, high]: bracketed, then Newton with bisection."""
    u = min(max(start, low), high)
    left, right = max(low, u - 1.0), min(high, u + 1.0)
    while left > low and first(left) < 0:
        left = max(low, 2 * left - u)
    while right < high and first(right) > 0:
        right = min(high, 2 * right - u)
    if first(left) <= 0:
        return left
    if first(right) >= 0:
        return right
    for _ in range(_MODE_STEPS):
        slope = first(u)
        left, right = (u, right) if slope > 0 else (left, u)
        bend = second(u)
        step = u - slope / bend if bend < 0 else inf
        following = step if left < step < right else 0.5 * (left + right)
        if abs(following - u) <= 1e-10 * max(1.0, abs(u)):
            break
        u = following
    return u


class _Hull:
    """A flat top between two exponential tails: an upper bound of a log-concave density."""

    def __init__(self, top: float, inner: tuple[float, float], slopes: tuple[float, float], low: float, high: float):
        self.top, self.inner, self.slopes, self.low, self.high = top, inner, slopes, low, high

    @classmethod
    def at(
        cls,
        density: _Function,
        first: _Function,
        second: _Function,
        mode: float,
        low: float,
        high: float,
    ) -> "_Hull":
        """Tangents on both sides of the mode; on a side where the mode lies at the bound, none."""
        top = density(mode)
        width = _TANGENT / sqrt(max(-second(mode), 0.5 * first(mode) ** 2, 1e-12))
        inner, slopes = [low, high], [0.0, 0.0]
        for side, (sign, bound) in enumerate(((-1.0, low), (1.0, high))):
            point = mode + sign * width
            if sign * (bound - point) > 0:
                slopes[side] = first(point)
                inner[side] = point + (top - density(point)) / slopes[side]
        return cls(top, (inner[0], inner[1]), (slopes[0], slopes[1]), low, high)

    def height(self, u: float) -> float:
        if u < self.inner[0]:
            return self.top + self.slopes[0] * (u - self.inner[0])
        if u > self.inner[1]:
            return self.top + self.slopes[1] * (u - self.inner[1])
        return self.top

    def draw(self, rng: np.random.Generator) -> tuple[float, float]:
        """A draw from the normalized hull and the hull's height there."""
        (a, b), (rise, fall) = self.inner, self.slopes
        left = -expm1(rise * (self.low - a)) / rise if rise > 0 else 0.0
        right = expm1(fall * (self.high - b)) / fall if fall < 0 else 0.0
        pick, p = rng.uniform() * (left + b - a + right), rng.uniform()
        if pick < left:
            u = a + log1p(p * expm1(rise * (self.low - a))) / rise
        elif pick < left + b - a:
            u = a + p * (b - a)
        else:
            u = b + log1p(p * expm1(fall * (self.high - b))) / fall
        return u, self.height(u)
