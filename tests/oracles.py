"""Brute force that shares no code with the package: kernels in closed form, functionals as point sums, dense Gaussians.

A functional ``integral h(u) f(t - u) du`` is a weighted sum of f at the points of a Gauss rule over the support, so its
covariances are double sums of the kernel. With a kernel that is not smooth at zero lag the error is that of the rule,
which the tests' tolerances allow for.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.polynomial.legendre import leggauss

Array = np.ndarray


def matern_covariance(lag: Array, length_scale: float, smoothness: float) -> Array:
    """The textbook kernels (Rasmussen and Williams 2006, eq. 4.17)."""
    x = np.sqrt(2.0 * smoothness) * np.abs(lag) / length_scale
    return np.exp(-x) * {0.5: 1.0, 1.5: 1.0 + x, 2.5: 1.0 + x + x**2 / 3.0}[smoothness]


def gaussian_points(width: float, lag: float, panels: int = 8, order: int = 24) -> tuple[Array, Array]:
    """Lags u and weights h(u) du of a unit-energy Gaussian response on lag +- 6 width."""
    nodes, weights = leggauss(order)
    edges = lag + 6.0 * width * np.linspace(-1.0, 1.0, panels + 1)
    half = 0.5 * np.diff(edges)
    u = (edges[:-1] + half)[:, None] + half[:, None] * nodes
    curve = np.exp(-0.5 * ((u - lag) / width) ** 2)
    weight = half[:, None] * weights
    return u.ravel(), (weight * curve / np.sqrt(np.sum(weight * curve**2))).ravel()


def impulse_points() -> tuple[Array, Array]:
    """The identity response."""
    return np.zeros(1), np.ones(1)


def functional_covariance(
    nodes: list[tuple[Array, Array, float]], length_scale: float, smoothness: float = 1.5
) -> Array:
    """Covariance of functionals given as (lags, weights, time), by double sums."""
    times = np.concatenate([time - lags for lags, _, time in nodes])
    kernel = matern_covariance(times[:, None] - times, length_scale, smoothness)
    starts = np.cumsum([0, *(len(lags) for lags, _, _ in nodes)])[:-1]
    weights = np.concatenate([weight for _, weight, _ in nodes])
    summed = np.add.reduceat(weights[:, None] * kernel * weights, starts, axis=0)
    return np.add.reduceat(summed, starts, axis=1)


def normal_log_density(y: Array, covariance: Array) -> float:
    """log N(y; 0, covariance)."""
    root = np.linalg.cholesky(covariance)
    white = np.linalg.solve(root, y)
    return float(-0.5 * white @ white - np.sum(np.log(np.diag(root))) - 0.5 * len(y) * np.log(2.0 * np.pi))


def gp_log_likelihood(
    streams: Mapping[tuple[str, str, str], tuple[Array, Array]],
    points: Mapping[str, tuple[Array, Array]],
    parameters: Mapping[str, Array],
    *,
    length_scale: float,
    smoothness: float = 1.5,
    timescales: Mapping[str, float] | None = None,
    powers: Mapping[str, float] | None = None,
) -> float:
    """The marginal likelihood of DESIGN 2 from the covariance of all scalars of each run.

    Parameters
    ----------
    streams : {(participant, run, modality): (values, times)}
        NaN where missing; every row given is used.
    points : {modality: (lags, weights)}
        The responses.
    """
    total = 0.0
    for run in dict.fromkeys(run for _, run, _ in streams):
        scalars: list[tuple[int, Array, float, str, str, int, float]] = []
        nodes: list[tuple[Array, Array, float]] = []
        residuals: list[float] = []
        for (participant, own, modality), (values, times) in streams.items():
            if own != run:
                continue
            loading = np.asarray(parameters[f"loading/{participant}/{modality}"])
            offset = np.asarray(parameters[f"offset/{participant}/{modality}"])
            offset = offset + parameters.get(f"run_offset/{participant}/{run}/{modality}", 0.0)
            variance = float(parameters[f"noise/{participant}/{modality}"])
            for row, time in enumerate(times):
                nodes.append((*points[modality], time))
                for feature in np.flatnonzero(np.isfinite(values[row])):
                    scalars.append((len(nodes) - 1, loading[feature], variance, participant, modality, feature, time))
                    residuals.append(values[row, feature] - offset[feature])
        total += _run_log_likelihood(
            scalars, np.array(residuals), functional_covariance(nodes, length_scale, smoothness), timescales, powers
        )
    return total


def _run_log_likelihood(
    scalars: list[tuple[int, Array, float, str, str, int, float]],
    residuals: Array,
    covariance: Array,
    timescales: Mapping[str, float] | None,
    powers: Mapping[str, float] | None,
) -> float:
    node = np.array([scalar[0] for scalar in scalars])
    loading = np.array([scalar[1] for scalar in scalars])
    noise = np.zeros((len(scalars), len(scalars)))
    full = np.zeros_like(noise)
    for i, (_, _, variance, *key, time) in enumerate(scalars):
        for j, (_, _, _, *other, moment) in enumerate(scalars):
            if key != other:
                continue
            timescale = (timescales or {}).get(key[1])
            share = float(i == j) if timescale is None else np.exp(-abs(time - moment) / timescale)
            full[i, j] = variance * share
            noise[i, j] = variance * share / (powers or {}).get(key[1], 1.0)
    total = normal_log_density(residuals, (loading @ loading.T) * covariance[np.ix_(node, node)] + noise)
    for modality, power in (powers or {}).items():
        mine = [i for i, scalar in enumerate(scalars) if scalar[4] == modality]
        block = 2.0 * np.pi * full[np.ix_(mine, mine)]
        determinant = np.linalg.slogdet(block)[1]
        total += 0.5 * (determinant - len(mine) * np.log(power)) - 0.5 * power * determinant
    return total


def finite_difference(value: Callable[[Array], float], x: Array, index: tuple[int, ...], step: float) -> float:
    """Central difference of fourth order in one entry of x."""
    total = 0.0
    for shift, weight in ((-2, 1), (-1, -8), (1, 8), (2, -1)):
        moved = np.array(x, dtype=float)
        moved[index] += shift * step
        total += weight * value(moved)
    return total / (12.0 * step)
