"""Brute force for the GP that shares no code with the package: textbook kernels, expectations, dense Gaussians."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.polynomial.legendre import leggauss

Array = np.ndarray
Functional = tuple[float, float, float]


def matern_covariance(lag: Array, length_scale: float, smoothness: float) -> Array:
    """The textbook kernels (Rasmussen and Williams 2006, eq. 4.17)."""
    x = np.sqrt(2.0 * smoothness) * np.abs(lag) / length_scale
    return np.exp(-x) * {0.5: 1.0, 1.5: 1.0 + x, 2.5: 1.0 + x + x**2 / 3.0}[smoothness]


def gaussian_functional(width: float, lag: float) -> Functional:
    """A unit-energy Gaussian response as (gain, variance, lag): gain times a normal density."""
    return np.sqrt(2.0 * np.sqrt(np.pi) * width), width**2, lag


IMPULSE: Functional = (1.0, 0.0, 0.0)


def functional_covariance(
    nodes: Sequence[tuple[Functional, float]], length_scale: float, smoothness: float = 1.5
) -> Array:
    """Covariance of functionals (response, time): gains times E[k(X)], X normal around the difference of their times.

    The expectation is split where the kernel has its kink. Responses are not cut at 6 widths: 2e-9 of the variance.
    """
    gain, variance, lag = np.array([response for response, _ in nodes]).T
    place = np.array([time for _, time in nodes]) - lag
    mean = place[:, None] - place
    sd = np.sqrt(variance[:, None] + variance)
    points, weights = leggauss(80)
    expected = np.where(sd > 0.0, 0.0, matern_covariance(mean, length_scale, smoothness))
    low, high = mean - 9.0 * sd, mean + 9.0 * sd
    for start, stop in ((low, np.clip(0.0, low, high)), (np.clip(0.0, low, high), high)):
        half = 0.5 * (stop - start)
        for x, w in zip(points, weights, strict=True):
            lags = start + half * (1.0 + x)
            z = (lags - mean) / np.where(sd > 0.0, sd, 1.0)
            density = np.exp(-0.5 * z**2) / np.where(sd > 0.0, np.sqrt(2.0 * np.pi) * sd, 1.0)
            expected += w * half * density * matern_covariance(lags, length_scale, smoothness)
    return gain[:, None] * gain * expected


def normal_log_density(y: Array, covariance: Array) -> float:
    """log N(y; 0, covariance)."""
    root = np.linalg.cholesky(covariance)
    white = np.linalg.solve(root, y)
    return float(-0.5 * white @ white - np.sum(np.log(np.diag(root))) - 0.5 * len(y) * np.log(2.0 * np.pi))


def gp_log_likelihood(
    streams: Mapping[tuple[str, str, str], tuple[Array, Array]],
    functionals: Mapping[str, Functional],
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
    functionals : {modality: (gain, variance, lag)}
        The responses.
    """
    total = 0.0
    for run in dict.fromkeys(run for _, run, _ in streams):
        scalars: list[tuple[int, Array, float, str, str, int, float]] = []
        nodes: list[tuple[Functional, float]] = []
        residuals: list[float] = []
        for (participant, own, modality), (values, times) in streams.items():
            if own != run:
                continue
            loading = np.asarray(parameters[f"loading/{participant}/{modality}"])
            offset = np.asarray(parameters[f"offset/{participant}/{modality}"])
            offset = offset + parameters.get(f"run_offset/{participant}/{run}/{modality}", 0.0)
            variance = float(parameters[f"noise/{participant}/{modality}"])
            for row, time in enumerate(times):
                nodes.append((functionals[modality], time))
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
