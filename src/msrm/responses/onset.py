"""Integrals of a gamma density over grid cells, exact through its onset.

Owns the weights of f(s) = x^(k-1) e^(-x) / (Gamma(k) scale), x = s / scale, s = u - lag, and of f(s) log x. Near s = 0
no Gauss rule converges unless k is an integer, so the panel that starts there uses product integration: the moments of
x^a against shifted Legendre polynomials are known, M_n = M_{n-1} (a - n + 1) / (a + n + 1), M_0 = 1 / (a + 1), and so
are their derivatives in a, which are the moments of x^a log x. The next cell is integrated as a difference of two such
panels when the onset is close before it, and over panels graded towards the onset otherwise.
"""

from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from msrm.responses.cells import Array, Cells, Index, legendre, unit_gauss

__all__ = ["PANEL", "gamma_curves", "gamma_weights"]

# Exponential and Lagrange polynomials (degree 11) together: 28 points leave 1e-16 over two scales.
_ORDER = 28
# Panel length in scales.
PANEL = 2.0
_TINY = 1e-300


@lru_cache(maxsize=64)
def _power_rule(exponent: float) -> tuple[Array, Array, Array]:
    """Points on (0, 1), and the weights of integrals against x^exponent and x^exponent log x."""
    x, w = unit_gauss(_ORDER)
    moments, slopes = np.empty(_ORDER), np.empty(_ORDER)
    moments[0], slopes[0] = 1 / (exponent + 1), -1 / (exponent + 1) ** 2
    for n in range(1, _ORDER):
        ratio = (exponent - n + 1) / (exponent + n + 1)
        moments[n] = moments[n - 1] * ratio
        slopes[n] = slopes[n - 1] * ratio + moments[n - 1] * 2 * n / (exponent + n + 1) ** 2
    series = legendre(x, _ORDER) * (2 * np.arange(_ORDER) + 1) * w[:, None]
    return x, series @ moments, series @ slopes


def gamma_curves(s: Array, shape: float, scale: float, log: bool) -> Array:
    """f(s) and, with ``log``, f(s) log(s / scale), stacked along a new first axis."""
    x = np.maximum(s / scale, _TINY)
    log_x = np.log(x)
    f = np.exp((shape - 1) * log_x - x - gammaln(shape)) / scale
    return np.stack([f, f * log_x]) if log else f[None]


def gamma_weights(cells: Cells, shape: float, scale: float, *, log: bool) -> Array:
    """Weights (1 or 2, phase, cell, point) of f and, with ``log``, of f log x, over the support of ``cells``.

    Parameters
    ----------
    cells : Cells
    shape : float
        Above 0.
    scale : float
        Seconds.
    log : bool
    """

    def curves(u: Array) -> Array:
        return gamma_curves(u - cells.low, shape, scale, log)

    out = cells.weights(curves, PANEL * scale)
    panels = int(np.ceil(cells.step / (PANEL * scale)))
    rows, last = np.arange(len(cells.top)), cells.last
    before = np.maximum(last - 1, 0)
    limit = cells.high - cells.low
    start = np.clip(cells.edges[rows, last] - cells.low, 0.0, limit)
    end = np.minimum(cells.edges[rows, before] - cells.low, limit)

    def power(length: Array, cell: Index) -> Array:
        """From the onset over ``length``, against the polynomials of ``cell``."""
        x, w, w_log = _power_rule(shape - 1)
        reach = np.maximum(length / scale, _TINY)[:, None]
        smooth = np.exp(shape * np.log(reach) - gammaln(shape) - reach * x)
        values = np.stack([w * smooth, (w_log + np.log(reach) * w) * smooth]) if log else (w * smooth)[None]
        return cells.accumulate(cell, cells.low + length[:, None] * x, values)

    def plain(lower: Array, upper: Array, cell: Index, pieces: int) -> Array:
        return cells.piece(curves, cell, cells.low + upper, cells.low + lower, pieces)

    first = start / panels
    onset = power(first, last)
    width = (end - start) / panels
    near = start + width
    close = power(near, before) - power(start, before)
    graded = np.zeros_like(onset)
    lower = start
    for factor in (2.0, 4.0, np.inf):
        upper = np.minimum(factor * np.maximum(start, _TINY), near)
        graded += plain(lower, upper, before, 1)
        lower = upper
    second = np.where((start < width / 8)[:, None], close, graded)
    if panels > 1:
        onset += plain(first, start, last, panels - 1)
        second += plain(near, end, before, panels - 1)
    out[:, rows, last] = onset
    out[:, rows, before] = np.where((last > 0)[:, None], second, out[:, rows, before])
    return out
