"""Bateman: the two-compartment response of skin conductance, and its limit at equal constants.

Owns h(u) = A b(s), s = u - lag in [0, 90 s], with rates a = 1/decay and c = 1/rise,

    b(s) = (e^(-s/decay) - e^(-s/rise)) / (decay - rise) = a c d(s),    d(s) = (e^(-a s) - e^(-c s)) / (c - a).

The divided difference d and its derivatives in both rates are sums of s^m e^(-rate s): the two exponentials themselves
when the rates are apart, and for close or equal rates a Gauss rule over the rates between them,
d = integral over x in (0, 1) of s e^(-(a + x (c - a)) s), which has no cancellation. Shifted by a cell an exponential
only changes by a factor, so all cells share one vector of weights per rate.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.polynomial.laguerre import laggauss

from msrm.responses.base import Free, Response, Values
from msrm.responses.cells import Array, Cells, unit_gauss

__all__ = ["Bateman"]

_LENGTH = 90.0
# Relative distance of the rates below which the direct difference would lose more than 1e-13.
_CLOSE = 0.05
_BETWEEN = 8
# Twelve Gauss points integrate an exponential times a cell's polynomials over 2 time constants to rounding.
_RESOLUTION = 2.0


class _Exponentials(NamedTuple):
    """h, dh/ddecay and dh/drise as sums of coefficients[f, r, m] s^m e^(-rates[r] s), m = 0, 1, 2."""

    rates: Array
    coefficients: Array

    def at(self, s: Array, count: int = 3) -> Array:
        """The first ``count`` functions at s, (count, ...)."""
        out = np.zeros((count, *s.shape))
        for rate, (flat, linear, square) in zip(
            self.rates, self.coefficients[:count].swapaxes(0, 1).swapaxes(1, 2), strict=True
        ):
            exponential = np.exp(-rate * s)
            for f in range(count):
                out[f] += exponential * (flat[f] + s * (linear[f] + s * square[f]))
        return out

    def slope(self) -> "_Exponentials":
        """Their derivatives in s."""
        out = -self.rates[:, None] * self.coefficients
        out[..., :2] += self.coefficients[..., 1:] * [1.0, 2.0]
        return _Exponentials(self.rates, out)

    def masses(self, length: float) -> Array:
        """Their integrals from 0 to ``length``, (3,)."""
        x = self.rates * length
        end = np.exp(-x)
        powers = [
            (1 - end) / self.rates,
            (1 - end * (1 + x)) / self.rates**2,
            (2 - end * (2 + x * (2 + x))) / self.rates**3,
        ]
        return np.einsum("frm,mr->f", self.coefficients, np.array(powers))

    def cell_weights(self, cells: Cells, count: int, panels: int) -> Array:
        """Weights (count, phase, cell, point) over whole cells.

        With s = e + r, e taken at the cell's end, s^m e^(-rate s) is a sum over j of (m choose j) e^j e^(-rate e) times
        r^(m - j) e^(-rate r): a factor of the cell times a vector over points that all cells share.
        """
        x, to_points = cells.rule.refinement(panels)
        r = cells.step * (1 - x)
        e = np.maximum(cells.edges[:, 1:] - cells.low, 0.0)
        factors, vectors = [], []
        for k, rate in enumerate(self.rates):
            kernels = (cells.step * np.exp(-rate * r) * r ** np.arange(3)[:, None]) @ to_points
            factor = np.where(cells.whole, np.exp(-rate * e), 0.0)
            for j in range(3):
                c = self.coefficients[:count, k]
                vector = sum(comb(m, j) * np.multiply.outer(c[:, m], kernels[m - j]) for m in range(j, 3))
                if np.any(vector):
                    factors.append(factor * e**j)
                    vectors.append(vector)
        columns = np.stack(factors, axis=-1).reshape(e.size, -1)
        out = np.empty((count, e.size, cells.rule.order))
        for f in range(count):
            np.matmul(columns, np.stack([vector[f] for vector in vectors]), out=out[f])
        return out.reshape(count, *e.shape, cells.rule.order)


def _divided_difference(a: float, c: float) -> _Exponentials:
    """d(s) and its derivatives in a and c."""
    gap = c - a
    if abs(gap) > _CLOSE * max(a, c):
        coefficients = np.zeros((3, 2, 3))
        coefficients[0, :, 0] = np.array([1.0, -1.0]) / gap
        coefficients[1, :, 0], coefficients[2, :, 0] = coefficients[0, :, 0] / gap, -coefficients[0, :, 0] / gap
        coefficients[1, 0, 1], coefficients[2, 1, 1] = -1 / gap, 1 / gap
        return _Exponentials(np.array([a, c]), coefficients)
    x, w = unit_gauss(_BETWEEN)
    coefficients = np.zeros((3, _BETWEEN, 3))
    coefficients[0, :, 1], coefficients[1, :, 2], coefficients[2, :, 2] = w, -w * (1 - x), -w * x
    return _Exponentials(a + x * gap, coefficients)


@lru_cache(maxsize=1)
def _laguerre() -> tuple[Array, Array]:
    y, w = laggauss(48)
    return y, w * np.exp(y)


@dataclass(frozen=True, repr=False)
class Bateman(Response):
    """h(u) proportional to (exp(-s/decay) - exp(-s/rise)) / (decay - rise), s = u - lag, on 90 s from onset.

    Symmetric in its two constants; s exp(-s/decay) where they are equal.

    Parameters
    ----------
    rise, decay : float or Free
        Time constants, seconds.
    lag : float or Free
        Onset, seconds.

    Examples
    --------
    >>> Bateman(rise=0.7, decay=3.0, lag=0.5).support()
    (0.5, 90.5)
    """

    rise: float | Free
    decay: float | Free
    lag: float | Free

    positive: ClassVar[frozenset[str]] = frozenset({"rise", "decay"})

    def _support(self, v: Values) -> tuple[float, float]:
        return v["lag"], v["lag"] + _LENGTH

    def _exponentials(self, v: Values) -> _Exponentials:
        """h, dh/ddecay and dh/drise on the support, unit energy included."""
        rise, decay = v["rise"], v["decay"]
        a, c = 1 / decay, 1 / rise
        rates, (d, in_a, in_c) = _divided_difference(a, c)
        b = a * c * d
        raw = np.stack([b, -a * (b + a * a * c * in_a), -c * (b + a * c * c * in_c)])
        # Energy up to infinity is 1 / (2 (rise + decay)); what lies beyond 90 s is subtracted.
        y, w = _laguerre()
        slow = max(rise, decay)
        beyond = _Exponentials(rates, raw).at(_LENGTH + slow * y / 2)
        energy = 0.5 / (rise + decay) - slow / 2 * float(w @ beyond[0] ** 2)
        slopes = -0.5 / (rise + decay) ** 2 - slow * (beyond[1:] * beyond[0]) @ w
        scaled = raw * energy**-0.5
        scaled[1:] -= (0.5 * slopes / energy)[:, None, None] * scaled[0]
        return _Exponentials(rates, scaled)

    def _curve(self, u: Array, v: Values) -> Array:
        return self._exponentials(v).at(u - v["lag"], 1)[0]

    def _curve_gradient(self, u: Array, v: Values) -> dict[str, Array]:
        s = u - v["lag"]
        exponentials = self._exponentials(v)
        _, in_decay, in_rise = exponentials.at(s)
        return {"rise": in_rise, "decay": in_decay, "lag": -exponentials.slope().at(s, 1)[0]}

    def _gain(self, v: Values) -> float:
        return float(self._exponentials(v).masses(_LENGTH)[0])

    def _gain_gradient(self, v: Values) -> Values:
        _, in_decay, in_rise = self._exponentials(v).masses(_LENGTH)
        return {"rise": float(in_rise), "decay": float(in_decay), "lag": 0.0}

    def _resolution(self, v: Values) -> float:
        return _RESOLUTION * min(v["rise"], v["decay"])

    def _cell_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        return self._weights(cells, v, boundary=True)

    def _hat_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        return self._weights(cells, v, boundary=False)

    def _weights(self, cells: Cells, v: Values, *, boundary: bool) -> tuple[Array, dict[str, Array]]:
        exponentials = self._exponentials(v)
        count = 3 if {"rise", "decay"} & self.free.keys() else 1
        panels = int(np.ceil(cells.step / self._resolution(v)))
        out = exponentials.cell_weights(cells, count, panels)
        cells.set_cut_cells(out, lambda u: exponentials.at(u - cells.low, count), panels)
        slopes = dict(zip(("decay", "rise"), out[1:], strict=False))
        if "lag" in self.free:
            edges = cells.edge_values(lambda u: exponentials.at(u - cells.low, 1)[0]) if boundary else None
            slopes["lag"] = cells.by_parts(out[0], edges)
        return out[0], {name: slopes[name] for name in self.free}
