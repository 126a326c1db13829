"""Covariance between filtered nodes: double integral of h_a(u) h_b(w) k(lag - u + w) over u and w (DESIGN 4).

Owns ``cross_covariance``. Pairs of Identity and Gaussian are analytic (``gaussian_covariance``). Others are integrated
over one response at a time by the product rules of ``responses``, on uniform cells whose edges lie where the integrand
is not smooth: at lag zero for k, at the onset for k seen through one response, at the difference of onsets for the
result, which is then interpolated to the lags asked for. All cells share their weights, so each step is a few products
of small matrices and costs the same for one clock as for many.

Error, relative to the variances of the functionals: 1e-12 for closed forms, 1e-11 for cells; with Matern-1/2 and gammas
of shapes that are not integers 1e-8, because their onset leaves a fractional power in the result.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.gp.gaussian_covariance import gaussian_covariance, has_closed_form, smoothed
from msrm.latent_grid import Matern
from msrm.responses import Response, Values
from msrm.responses.cells import Rule, cells_of, gauss_rule

__all__ = ["cross_covariance"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Slopes = dict[tuple[str, str], Array]

_ORDER = {1: 20, 2: 14, 3: 14}
# Longest cell in units of 1 / rate that the rules above resolve to rounding.
_CELL = 1.0
# And in units of the length that resolves the narrower response.
_SHARE = 0.75
# Beyond this many units the covariance is below 1e-17 of the variances.
_REACH = 45.0


def cross_covariance(
    response_a: Response,
    values_a: Mapping[str, float] | None,
    response_b: Response,
    values_b: Mapping[str, float] | None,
    lags: Array,
    *,
    length_scale: float,
    matern: Matern,
    gradient: bool = True,
) -> tuple[Array, Slopes]:
    """Covariance of one factor seen through two responses, and its derivatives.

    Parameters
    ----------
    response_a, response_b : Response
    values_a, values_b : dict, optional
        Values of free parameters; others as constructed.
    lags : (lag,)
        Time of the first functional minus time of the second, seconds; distinct lags, each costs.
    length_scale : float
        Seconds.
    matern : Matern
    gradient : bool

    Returns
    -------
    values : (lag,)
        For a latent of unit variance.
    slopes : dict of (lag,)
        Keys ("a", name) and ("b", name) for the free parameters, ("length_scale", ""); empty without ``gradient``.
        Where both sides are one response, its derivative is the sum of both.
    """
    rate = float(matern.rate(length_scale))
    a, b = response_a.resolved(dict(values_a or {})), response_b.resolved(dict(values_b or {}))
    lags = np.asarray(lags, float)
    if has_closed_form(response_a) and has_closed_form(response_b):
        near = _near(response_a.support(a), response_b.support(b), lags, rate)
        made, parts = gaussian_covariance(response_a, a, response_b, b, lags[near], rate, matern.dimension)
        values, slopes = _among(lags, near, made), {key: _among(lags, near, part) for key, part in parts.items()}
    elif response_a.is_identity:
        values, swapped = _cell_covariance(response_b, b, response_a, a, -lags, rate, matern.dimension, gradient)
        side = {"a": "b", "b": "a", "rate": "rate"}
        slopes = {(side[which], name): slope for (which, name), slope in swapped.items()}
    else:
        values, slopes = _cell_covariance(response_a, a, response_b, b, lags, rate, matern.dimension, gradient)
    if not gradient:
        return values, {}
    wanted: Slopes = {("a", name): slopes["a", name] for name in response_a.free}
    wanted |= {("b", name): slopes["b", name] for name in response_b.free}
    wanted["length_scale", ""] = slopes["rate", ""] * (-rate / length_scale)
    return values, wanted


def _near(support_a: tuple[float, float], support_b: tuple[float, float], lags: Array, rate: float) -> Index:
    """The lags beyond which the covariance is zero to rounding: of long recordings, few."""
    reach = _REACH / rate
    return np.flatnonzero((lags > support_a[0] - support_b[1] - reach) & (lags < support_a[1] - support_b[0] + reach))


def _among(lags: Array, near: Index, values: Array) -> Array:
    """Values at the near ones of all lags, zero at the others."""
    out = np.zeros_like(lags)
    out[near] = values
    return out


@dataclass(frozen=True, eq=False)
class _Filter:
    """Integrals against one response at the points of cells counted from its onset, over cells counted from zero.

    Point q of cell j is the sum over c and p of weights[c, p, q] times point p of cell j + first + c.
    """

    first: int
    weights: Array
    slopes: dict[str, Array]

    @classmethod
    def of(cls, response: Response, values: Values, step: float, rule: Rule) -> "_Filter":
        """The filter of a response, with its derivatives."""
        support = response.support(values)
        first, cells = cells_of(support[0] + step * rule.fractions, step, support, rule)
        weights, slopes = response._cell_weights(cells, values)
        shift = first - first.min()

        def placed(w: Array) -> Array:
            out = np.zeros((w.shape[1] + int(shift.max()), rule.order, rule.order))
            for q, begin in enumerate(shift):
                out[begin : begin + w.shape[1], :, q] = w[q]
            return out

        made = {name: placed(slope) for name, slope in slopes.items()}
        return cls(int(first.min()), placed(weights), made)

    def needs(self, cells: Index) -> Index:
        """The cells, without gaps, that ``applied`` to ``cells`` reads."""
        return np.arange(cells.min() + self.first, cells.max() + self.first + len(self.weights))

    def applied(self, weights: Array, samples: Array, cells: Index) -> Array:
        """(cell, point) from the ``samples`` at ``needs(cells)``."""
        begin = cells - cells.min()
        out = np.zeros((len(cells), weights.shape[-1]))
        for c, block in enumerate(weights):
            out += samples[begin + c] @ block
        return out


def _cell_covariance(
    response_a: Response, a: Values, response_b: Response, b: Values, lags: Array, rate: float, dimension: int,
    gradient: bool,
) -> tuple[Array, Slopes]:  # fmt: skip
    """``cross_covariance`` by cells, where only b may be Identity; slopes in the rate under ("rate", "")."""
    # Where one response has an onset the other leaves a corner rounded by its own width only: resolve both.
    step = min(_CELL / rate, _SHARE * response_a._resolution(a), _SHARE * response_b._resolution(b))
    rule = gauss_rule(_ORDER[dimension])
    low_a, high_a = response_a.support(a)
    low_b, high_b = response_b.support(b)
    near = _near((low_a, high_a), (low_b, high_b), lags, rate)
    place = (lags[near] - (low_a - low_b)) / step
    cells, index = np.unique(np.floor(place).astype(np.intp), return_inverse=True)
    basis = rule.basis(place - cells[index])
    slopes: Slopes = {}

    def at_lags(points: Array) -> Array:
        return _among(lags, near, np.sum(basis * points[index], axis=1))

    if not len(near):
        names = [("a", name) for name in response_a.free] + [("b", name) for name in response_b.free] + [("rate", "")]
        return np.zeros_like(lags), {key: np.zeros_like(lags) for key in names}
    outer = _Filter.of(response_a, a, step, rule)
    middle = outer.needs(cells)
    # k is even: seen through b at -y it is a filtered function too, in cells and points of the reverse order.
    mirrored = -middle[::-1] - 1
    inner = None if response_b.is_identity else _Filter.of(response_b, b, step, rule)
    kernel_cells = middle if inner is None else inner.needs(mirrored)
    nodes = step * (kernel_cells[:, None] + rule.fractions)
    kernel = smoothed(nodes.ravel(), 0.0, rate, dimension)

    def through_b(samples: Array, name: str | None = None) -> Array:
        samples = samples.reshape(nodes.shape)
        if inner is None:
            return samples
        return inner.applied(inner.weights if name is None else inner.slopes[name], samples, mirrored)[::-1, ::-1]

    seen = through_b(kernel.value)
    values = at_lags(outer.applied(outer.weights, seen, cells))
    if gradient:
        for name, weights in outer.slopes.items():
            slopes["a", name] = at_lags(outer.applied(weights, seen, cells))
        for name in response_b.free:
            slopes["b", name] = at_lags(outer.applied(outer.weights, through_b(kernel.value, name), cells))
        slopes["rate", ""] = at_lags(outer.applied(outer.weights, through_b(kernel.in_rate), cells))
    return values, slopes
