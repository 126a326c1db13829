"""Covariance of a Matern process seen through Identity and Gaussian responses, in closed form (DESIGN 4).

Owns E[k(x - s Z)], Z standard normal, for k(y) = sum_j c_j (rate |y|)^j e^(-rate |y|). With xi = x / s, alpha = rate s
and phi the normal density it is F(xi) + F(-xi), where

    F(xi) = sum_j c_j alpha^j K_j(xi),    K_j(xi) = integral over v > 0 of v^j e^(-alpha v) phi(xi - v) dv,
    K_0 = phi(xi) Mills(alpha - xi),      K_{j+1} = (xi - alpha) K_j + j K_{j-1} + [j = 0] phi(xi),

and dK_j/dxi = j K_{j-1} - alpha K_j + [j = 0] phi. Two Gaussian responses see the process through
s^2 = width_a^2 + width_b^2. Cutting each at 6 widths takes 2e-9 of that away, which is subtracted: a tail beyond its
cut meets a smooth covariance, so the two-point Gauss rule of the tail leaves 1e-15.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.polynomial.laguerre import laggauss
from numpy.typing import NDArray
from scipy.special import erfcx, ndtr

from msrm.responses import Gaussian, Identity, Response, Values

__all__ = ["POLYNOMIALS", "Smoothed", "gaussian_covariance", "has_closed_form", "smoothed"]

Array = NDArray[np.float64]

# c_j of Matern-1/2, 3/2, 5/2, by state dimension.
POLYNOMIALS = {1: (1.0,), 2: (1.0, 1.0), 3: (1.0, 1.0, 1.0 / 3.0)}
_CUT = 6.0
# Below this the recurrence would cancel; there a Laguerre rule is exact to rounding.
_DEEP = -4.0


@dataclass(frozen=True, eq=False)
class Smoothed:
    """E[k(x - s Z)] at each x and its derivatives in x, s and rate; those in s are 0 where s is."""

    value: Array
    in_x: Array
    in_s: Array
    in_rate: Array


def smoothed(x: Array, s: float, rate: float, dimension: int) -> Smoothed:
    """E[k(x - s Z)] for a Matern covariance k.

    Parameters
    ----------
    x : (lag,)
        Seconds.
    s : float
        Sd of the smoothing, seconds; 0 for none.
    rate : float
        sqrt(2 nu) / length scale, per second.
    dimension : {1, 2, 3}
        nu + 1/2.
    """
    c = np.array(POLYNOMIALS[dimension])
    degree = np.arange(dimension)
    if s == 0:
        y = rate * np.abs(x)
        powers, decay = y[:, None] ** degree, np.exp(-y)
        value = powers @ c * decay
        in_y = powers[:, :-1] @ (c * degree)[1:] * decay - value
        return Smoothed(value, rate * np.sign(x) * in_y, np.zeros_like(x), np.abs(x) * in_y)
    xi, alpha = x / s, rate * s
    right, phi = _moments(xi, alpha, dimension)
    left, _ = _moments(-xi, alpha, dimension)
    even, odd = right + left, right[:-1] - left[:-1]

    def slope(a: Array) -> Array:
        return np.append(degree[1:] * a[1:], 0.0) - alpha * a

    a = c * alpha**degree
    first = slope(a)
    second = slope(first)
    value = a @ even[:-1]
    # The normal density's own terms cancel between both sides but for the kink of Matern-1/2.
    curvature = second @ even[:-1] + 2 * first[0] * phi
    in_alpha = (a * degree / alpha) @ even[:-1] - a @ even[1:]
    return Smoothed(value, first @ odd / s, curvature / s, s * in_alpha)


@lru_cache(maxsize=1)
def _laguerre() -> tuple[Array, Array]:
    return laggauss(24)


def _moments(xi: Array, alpha: float, count: int) -> tuple[Array, Array]:
    """K_0 .. K_count, (count + 1, lag), and phi(xi)."""
    phi = np.exp(-0.5 * xi * xi) / np.sqrt(2 * np.pi)
    m = xi - alpha
    k = np.empty((count + 1, len(xi)))
    # erfcx where its argument is positive; elsewhere the exponent is negative: neither overflows.
    scaled = phi * np.sqrt(np.pi / 2) * erfcx(np.maximum(-m, 0.0) / np.sqrt(2))
    k[0] = np.where(m > 0, np.exp(np.minimum(0.5 * alpha * alpha - alpha * xi, 0.0)) * ndtr(m), scaled)
    for j in range(count):
        k[j + 1] = m * k[j] + (j * k[j - 1] if j else phi)
    # For smaller alpha phi is small there, and cancellation with it.
    deep = np.flatnonzero(m < _DEEP)
    if alpha > -_DEEP and len(deep):
        y, w = _laguerre()
        v = y / -m[deep, None]
        rest = w * np.exp(-0.5 * v * v)
        for j in range(count + 1):
            k[j, deep] = phi[deep] / -m[deep] * np.sum(rest * v**j, axis=1)
    return k, phi


@lru_cache(maxsize=1)
def _tail_rule() -> tuple[tuple[float, float], ...]:
    """(point, weight) of the Gauss rule of the standard normal density beyond 6."""
    y, w = laggauss(24)
    v = y / _CUT
    density = w * np.exp(-0.5 * v * v)
    share = density / density.sum()
    mean = share @ v
    variance, third = share @ (v - mean) ** 2, share @ (v - mean) ** 3
    skew = third / variance
    nodes = (skew + np.array([-1.0, 1.0]) * np.sqrt(skew * skew + 4 * variance)) / 2
    weights = ndtr(-_CUT) * np.array([nodes[1], -nodes[0]]) / (nodes[1] - nodes[0])
    return tuple(zip((_CUT + mean + nodes).tolist(), weights.tolist(), strict=True))


def has_closed_form(response: Response) -> bool:
    """Whether ``gaussian_covariance`` covers this response."""
    return isinstance(response, Gaussian | Identity)


def gaussian_covariance(
    response_a: Response, a: Values, response_b: Response, b: Values, lags: Array, rate: float, dimension: int
) -> tuple[Array, dict[tuple[str, str], Array]]:
    """Covariance of the functionals of two Identity or Gaussian responses, and its derivatives.

    Parameters
    ----------
    response_a, response_b : Identity or Gaussian
    a, b : dict
        All values of their parameters.
    lags : (lag,)
        Time of the first functional minus time of the second, seconds.
    rate, dimension
        As in ``smoothed``.

    Returns
    -------
    values : (lag,)
    slopes : dict of (lag,)
        Keys ("a", name) and ("b", name) for every parameter of a Gaussian, ("rate", "").
    """
    width_a, lag_a, gain_a = _shape(response_a, a)
    width_b, lag_b, gain_b = _shape(response_b, b)
    x = lags - lag_a + lag_b
    value, in_x, in_rate = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    in_a, in_b = np.zeros_like(x), np.zeros_like(x)

    def add(weight: float, points: tuple[float, float], s: float, in_width: tuple[float, float]) -> None:
        """A term E[k(x - point_a width_a + point_b width_b - s Z)]; ``in_width`` holds ds / dwidth."""
        nonlocal value, in_x, in_rate, in_a, in_b
        part = smoothed(x - points[0] * width_a + points[1] * width_b, s, rate, dimension)
        value = value + weight * part.value
        in_x = in_x + weight * part.in_x
        in_rate = in_rate + weight * part.in_rate
        in_a = in_a + weight * (part.in_s * in_width[0] - points[0] * part.in_x)
        in_b = in_b + weight * (part.in_s * in_width[1] + points[1] * part.in_x)

    s = float(np.hypot(width_a, width_b))
    add(1.0, (0.0, 0.0), s, (width_a / s, width_b / s) if s else (0.0, 0.0))
    for point, weight in _tail_rule():
        for signed in (point, -point):
            if width_a:
                add(-weight, (signed, 0.0), width_b, (0.0, 1.0))
            if width_b:
                add(-weight, (0.0, signed), width_a, (1.0, 0.0))
    gain = gain_a * gain_b
    slopes: dict[tuple[str, str], Array] = {("rate", ""): gain * in_rate}
    if width_a:
        slopes["a", "lag"] = -gain * in_x
        slopes["a", "width"] = gain * (in_a + 0.5 * value / width_a)
    if width_b:
        slopes["b", "lag"] = gain * in_x
        slopes["b", "width"] = gain * (in_b + 0.5 * value / width_b)
    return gain * value, slopes


def _shape(response: Response, values: Values) -> tuple[float, float, float]:
    """Width, lag and the gain that the response would have without its cut."""
    if response.is_identity:
        return 0.0, 0.0, 1.0
    width = values["width"]
    return width, values["lag"], response.gain(values) / (1 - 2 * float(ndtr(-_CUT)))
