"""Gamma and DoubleGamma: signed sums of gamma densities that share an onset, a cut and one unit-energy normalizer.

Owns h(u) = A sum_i c_i f_i(u - lag), f_i the density of shape k_i and scale theta_i, on [lag, lag + T] with
T = max_i theta_i x_i, where x_i is the point of unit scale with survival Q(k_i, x_i) = 1e-8. The energy is a double sum
of incomplete gammas,

    A^-2 = sum_ij c_i c_j Gamma(a) P(a, b T) / (Gamma(k_i) Gamma(k_j) theta_i^k_i theta_j^k_j b^a),
    a = k_i + k_j - 1,  b = 1 / theta_i + 1 / theta_j,

and everything is differentiated through A and T as well. ``onset`` owns the integrals over cells.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import exp, lgamma, log
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.polynomial.laguerre import laggauss
from scipy.special import digamma, gammainc, gammaincc, gammainccinv

from msrm.responses.base import Free, Response, Values
from msrm.responses.cells import Array, Cells
from msrm.responses.onset import PANEL, gamma_curves, gamma_weights

__all__ = ["DoubleGamma", "Gamma"]

_SURVIVAL = 1e-8


@lru_cache(maxsize=1)
def _laguerre() -> tuple[Array, Array]:
    return laggauss(48)


def _tail_slope(a: float, x: float) -> float:
    """Gamma(a) e^x x^(1-a) dQ(a, x)/da = integral of (1 + t/x)^(a-1) e^-t (log(x + t) - digamma(a)) dt, for x > a."""
    y, w = _laguerre()
    # Stretching t by the integrand's own decay rate keeps large shapes as accurate as small ones.
    rate = min(1.0, 1.0 - (a - 1.0) / x)
    t = y / rate
    factor = np.exp((a - 1) * np.log1p(t / x) - t + y)
    return float(w @ (factor * (np.log(x + t) - digamma(a))) / rate)


@lru_cache(maxsize=256)
def _cut(shape: float) -> tuple[float, float]:
    """The point where a unit-scale gamma has survival 1e-8, and its derivative in the shape."""
    x = float(gammainccinv(shape, _SURVIVAL))
    return x, _tail_slope(shape, x)


def _survival_slope(a: float, x: float) -> float:
    """dQ(a, x)/da beyond the bulk, where Q is small."""
    return exp((a - 1) * log(x) - x - lgamma(a)) * _tail_slope(a, x)


class _Part(NamedTuple):
    """One gamma density: its coefficient, and the names and values of its shape and scale."""

    coefficient: float
    shape_name: str
    shape: float
    scale_name: str
    scale: float

    @property
    def reach(self) -> float:
        """Where its survival is 1e-8, seconds after onset."""
        return self.scale * _cut(self.shape)[0]


class _Normalizer(NamedTuple):
    """A, its logarithmic derivatives, the support length T and its derivatives."""

    height: float
    log_slopes: Values
    length: float
    length_slopes: Values


@dataclass(frozen=True, repr=False)
class _GammaSum(Response):
    """Shared algebra; a family says which parts it has and which parameter, if any, weighs the second."""

    ratio: ClassVar[str | None] = None

    def _parts(self, v: Values) -> tuple[_Part, ...]:
        raise NotImplementedError

    def _lower_limit(self, name: str) -> float:
        # Below a shape of 1/2 the energy at the onset is infinite.
        return 0.5 if name.endswith("shape") else super()._lower_limit(name)

    def _support(self, v: Values) -> tuple[float, float]:
        return v["lag"], v["lag"] + max(part.reach for part in self._parts(v))

    def _normalizer(self, v: Values) -> _Normalizer:
        return _normalizer(self._parts(v), self.ratio)

    def _curve(self, u: Array, v: Values) -> Array:
        s = u - v["lag"]
        parts = self._parts(v)
        densities = (part.coefficient * gamma_curves(s, part.shape, part.scale, False)[0] for part in parts)
        return self._normalizer(v).height * sum(densities)

    def _curve_gradient(self, u: Array, v: Values) -> dict[str, Array]:
        s = np.maximum(u - v["lag"], 1e-300)
        norm, parts = self._normalizer(v), self._parts(v)
        slopes = {name: np.zeros_like(s) for name in v}
        total = np.zeros_like(s)
        for part in parts:
            f, f_log = gamma_curves(s, part.shape, part.scale, True)
            scaled = norm.height * part.coefficient
            slopes["lag"] += scaled * f * (1 / part.scale - (part.shape - 1) / s)
            slopes[part.shape_name] += scaled * (f_log - digamma(part.shape) * f)
            slopes[part.scale_name] += scaled * f * (s / part.scale - part.shape) / part.scale
            total += scaled * f
        if self.ratio is not None:
            slopes[self.ratio] -= norm.height * gamma_curves(s, parts[1].shape, parts[1].scale, False)[0]
        return {name: slope + norm.log_slopes.get(name, 0.0) * total for name, slope in slopes.items()}

    def _gain(self, v: Values) -> float:
        norm = self._normalizer(v)
        masses = (part.coefficient * gammainc(part.shape, norm.length / part.scale) for part in self._parts(v))
        return float(norm.height * sum(masses))

    def _gain_gradient(self, v: Values) -> Values:
        norm, parts = self._normalizer(v), self._parts(v)
        gain = self._gain(v)
        slopes = dict.fromkeys(v, 0.0)
        end = 0.0
        for part in parts:
            x = norm.length / part.scale
            density = float(gamma_curves(np.array(norm.length), part.shape, part.scale, False)[0])
            slopes[part.shape_name] -= part.coefficient * _survival_slope(part.shape, x)
            slopes[part.scale_name] -= part.coefficient * density * x
            end += part.coefficient * density
        if self.ratio is not None:
            slopes[self.ratio] -= float(gammainc(parts[1].shape, norm.length / parts[1].scale))
        return {
            name: norm.height * (slope + end * norm.length_slopes.get(name, 0.0))
            + norm.log_slopes.get(name, 0.0) * gain
            for name, slope in slopes.items()
        }

    def _resolution(self, v: Values) -> float:
        return PANEL * min(part.scale for part in self._parts(v))

    def _cell_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        def at_edges(part: _Part) -> Array:
            values = cells.edge_values(lambda u: gamma_curves(u - cells.low, part.shape, part.scale, False)[0])
            # Infinite exactly at an onset of shape below 1, where the terms of both cells cancel.
            return np.where(np.abs(values) < 1e200, values, 0.0)

        edges = [at_edges(part) for part in self._parts(v)] if self.free else None
        return self._weights(cells, v, edges)

    def _hat_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        return self._weights(cells, v, None)

    def _weights(self, cells: Cells, v: Values, edges: list[Array] | None) -> tuple[Array, dict[str, Array]]:
        """Weights and derivatives; ``edges`` holds each part's density at the cell edges for boundary terms."""
        norm, parts, free = self._normalizer(v), self._parts(v), self.free
        end_basis = cells.rule.basis((cells.top - cells.high) / cells.step)
        total = np.zeros((len(cells.top), cells.count, cells.rule.order))
        total_edges = None if edges is None else np.zeros_like(cells.edges)
        end = 0.0
        slopes: dict[str, Array] = {}
        for i, part in enumerate(parts):
            scaled = norm.height * part.coefficient
            w, *logs = gamma_weights(cells, part.shape, part.scale, log=part.shape_name in free)
            density = float(gamma_curves(np.array(norm.length), part.shape, part.scale, False)[0])
            total += scaled * w
            end += scaled * density
            if edges is not None and total_edges is not None:
                total_edges += scaled * edges[i]
            if part.shape_name in free:
                slopes[part.shape_name] = scaled * (logs[0] - digamma(part.shape) * w)
            if part.scale_name in free:
                moment = w * (cells.points() - cells.low)
                at_edges = None if edges is None else edges[i] * (cells.edges - cells.low)
                slope = scaled * cells.by_parts(moment, at_edges) / part.scale
                # By parts the cut dilates with this density; the true motion of the cut is added below.
                slope[:, 0] -= scaled * density * norm.length / part.scale * end_basis
                slopes[part.scale_name] = slope
            if i == 1 and self.ratio in free:
                slopes[self.ratio] = -norm.height * w
        for name, slope in slopes.items():
            slope += norm.log_slopes[name] * total
            slope[:, 0] += end * norm.length_slopes.get(name, 0.0) * end_basis
        if "lag" in free:
            slopes["lag"] = cells.by_parts(total, total_edges)
        return total, {name: slopes[name] for name in free}


def _normalizer(parts: tuple[_Part, ...], ratio: str | None) -> _Normalizer:
    """The unit-energy height of a sum of gamma densities cut where the longest ends, with derivatives."""
    longest = max(parts, key=lambda part: part.reach)
    length = longest.reach
    x, x_slope = _cut(longest.shape)
    length_slopes = {longest.scale_name: x, longest.shape_name: longest.scale * x_slope}
    energy, at_cut = 0.0, 0.0
    slopes = {name: 0.0 for part in parts for name in (part.shape_name, part.scale_name)}
    ratio_slope = 0.0
    for p in parts:
        for q in parts:
            a, b = p.shape + q.shape - 1, 1 / p.scale + 1 / q.scale
            survival = float(gammaincc(a, b * length))
            log_full = lgamma(a) - lgamma(p.shape) - lgamma(q.shape) - a * log(b)
            full = exp(log_full - p.shape * log(p.scale) - q.shape * log(q.scale))
            share = p.coefficient * q.coefficient
            product = share * full * (1 - survival)
            # Derivative of the product of both densities at the cut, per second.
            edge = share * full * exp((a - 1) * log(b * length) - b * length - lgamma(a)) * b
            energy += product
            at_cut += edge
            bulk = digamma(a) - digamma(p.shape) - log(p.scale) - log(b)
            slopes[p.shape_name] += 2 * (product * bulk - share * full * _survival_slope(a, b * length))
            slopes[p.scale_name] += 2 * (product * (a / b / p.scale - p.shape) - edge * length / b / p.scale) / p.scale
            if p is parts[-1]:
                ratio_slope += -2 * full * (1 - survival) * q.coefficient
    for name, slope in length_slopes.items():
        slopes[name] += at_cut * slope
    if ratio is not None:
        slopes[ratio] = ratio_slope
    return _Normalizer(energy**-0.5, {name: -0.5 * s / energy for name, s in slopes.items()}, length, length_slopes)


@dataclass(frozen=True, repr=False)
class Gamma(_GammaSum):
    """h(u) proportional to s^(shape - 1) exp(-s / scale), s = u - lag, from onset to survival 1e-8.

    Parameters
    ----------
    shape : float or Free
        Above 1/2; the peak is (shape - 1) scale after onset.
    scale : float or Free
        Seconds.
    lag : float or Free
        Onset, seconds.

    Examples
    --------
    >>> round(Gamma(shape=3.0, scale=1.0, lag=0.0).support()[1], 6)
    24.181314
    """

    shape: float | Free
    scale: float | Free
    lag: float | Free

    positive: ClassVar[frozenset[str]] = frozenset({"shape", "scale"})

    def _parts(self, v: Values) -> tuple[_Part, ...]:
        return (_Part(1.0, "shape", v["shape"], "scale", v["scale"]),)


@dataclass(frozen=True, repr=False)
class DoubleGamma(_GammaSum):
    """Haemodynamic response: a gamma density minus ``undershoot_ratio`` times a later one, both from onset ``lag``.

    Cut where the longer of the two has survival 1e-8.

    Parameters
    ----------
    peak_shape, undershoot_shape : float or Free
        Above 1/2.
    peak_scale, undershoot_scale : float or Free
        Seconds.
    undershoot_ratio : float or Free
        Area of the undershoot per area of the peak; at least 0.
    lag : float or Free
        Onset, seconds.
    """

    peak_shape: float | Free
    peak_scale: float | Free
    undershoot_shape: float | Free
    undershoot_scale: float | Free
    undershoot_ratio: float | Free
    lag: float | Free

    positive: ClassVar[frozenset[str]] = frozenset({"peak_shape", "peak_scale", "undershoot_shape", "undershoot_scale"})
    ratio: ClassVar[str | None] = "undershoot_ratio"

    def _lower_limit(self, name: str) -> float:
        return -1e-300 if name == "undershoot_ratio" else super()._lower_limit(name)

    def _parts(self, v: Values) -> tuple[_Part, ...]:
        return (
            _Part(1.0, "peak_shape", v["peak_shape"], "peak_scale", v["peak_scale"]),
            _Part(
                -v["undershoot_ratio"],
                "undershoot_shape",
                v["undershoot_shape"],
                "undershoot_scale",
                v["undershoot_scale"],
            ),
        )
