"""Product integration of a filter over the cells of a uniform grid, whatever the filter.

Owns the integrals w_q = integral over one cell of h(t - s) l_q(s) ds, where l_q are the Lagrange polynomials of a few
fixed points of the cell. The points never move, so sum_q w_q f(s_q) is the integral of h f for any f that is a
polynomial in the cell, wherever the edges of the support fall, and w varies with the response as smoothly as h does.
Hat functions are the rule with the cell's two ends as points (DESIGN 2); latent grids use Gauss points (DESIGN 3.3).

Shifts and dilations of h are differentiated by parts, which needs no derivative of h, holds for moving edges and jumps,
and stays finite at the onset of a gamma of shape below 2:

    d/dlag   w_q = [h l_q] - integral of h l_q' ds
    d/dscale w_q = w_q / (2 scale) + ([(u - lag) h l_q] - integral of (u - lag) h l_q' ds) / scale,  u = t - s
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.polynomial.legendre import leggauss
from numpy.typing import NDArray

__all__ = ["FINE", "Array", "Cells", "Rule", "cells_of", "gauss_rule", "hat_rule", "legendre", "unit_gauss"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]

# Least points of every inner quadrature: families state over which length this many resolve them to rounding.
FINE = 12


@lru_cache(maxsize=64)
def unit_gauss(order: int, panels: int = 1) -> tuple[Array, Array]:
    """Gauss-Legendre points and weights on (0, 1), composite over equal panels."""
    x, w = leggauss(order)
    starts = np.arange(panels)[:, None]
    return ((starts + (x + 1) / 2) / panels).ravel(), np.tile(w / (2 * panels), panels)


def legendre(x: Array, order: int) -> Array:
    """Legendre polynomials P_0 .. P_{order-1} of 2 x - 1, stacked along a new last axis."""
    z = 2 * x - 1
    out = np.empty((*x.shape, order))
    out[..., 0] = 1.0
    if order > 1:
        out[..., 1] = z
    for n in range(1, order - 1):
        out[..., n + 1] = ((2 * n + 1) * z * out[..., n] - n * out[..., n - 1]) / (n + 1)
    return out


@dataclass(frozen=True, eq=False)
class Rule:
    """Fixed points of a cell, as fractions of it, and their Lagrange polynomials.

    Parameters
    ----------
    fractions : (point,)
    from_legendre : (degree, point)
        Lagrange polynomials in the Legendre basis: l_q(x) = sum_n P_n(2 x - 1) from_legendre[n, q].
    derivative : (point, point)
        l_q'(x_p) at [p, q], per cell.
    """

    fractions: Array
    from_legendre: Array
    derivative: Array

    @property
    def order(self) -> int:
        """Number of points."""
        return len(self.fractions)

    def basis(self, x: Array) -> Array:
        """Lagrange polynomials at fractions x, (..., point)."""
        return legendre(x, self.order) @ self.from_legendre

    @cached_property
    def ends(self) -> tuple[Array, Array]:
        """Lagrange polynomials at the cell's start and end, (point,) each."""
        start, end = self.basis(np.array([0.0, 1.0]))
        return start, end

    @lru_cache(maxsize=16)  # noqa: B019  rules are module-level constants
    def refinement(self, panels: int) -> tuple[Array, Array]:
        """Fine points and the matrix (fine, point) that turns values of h there into weights per unit cell."""
        x, w = unit_gauss(max(FINE, self.order), panels)
        return x, w[:, None] * self.basis(x)


@lru_cache(maxsize=16)
def gauss_rule(order: int) -> Rule:
    """Gauss-Legendre points."""
    x, w = unit_gauss(order)
    degree = np.arange(order)
    values = legendre(x, order)
    slopes = np.zeros_like(values)
    for n in range(1, order):
        # P'_n = P'_{n-2} + (2 n - 1) P_{n-1}, times 2 for the unit cell
        slopes[:, n] = (slopes[:, n - 2] if n > 1 else 0.0) + 2 * (2 * n - 1) * values[:, n - 1]
    from_legendre = (2 * degree[:, None] + 1) * values.T * w
    return Rule(x, from_legendre, slopes @ from_legendre)


@lru_cache(maxsize=1)
def hat_rule() -> Rule:
    """The two ends of the cell: weights of the hat functions that meet there."""
    return Rule(np.array([0.0, 1.0]), np.array([[0.5, 0.5], [-0.5, 0.5]]), np.array([[-1.0, 1.0], [-1.0, 1.0]]))


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells under one response's support, for every distinct phase of the rows within a cell.

    Parameters
    ----------
    rule : Rule
    step : float
        Length of a cell, seconds.
    top : (phase,)
        u = t - s at the start of the first cell; at least the support's end, by less than a step.
    low, high : float
        Support, seconds.
    count : int
        Cells per phase, enough for each.
    """

    rule: Rule
    step: float
    top: Array
    low: float
    high: float
    count: int

    @cached_property
    def edges(self) -> Array:
        """u at the cell edges, (phase, count + 1), falling."""
        return self.top[:, None] - self.step * np.arange(self.count + 1)

    @cached_property
    def last(self) -> Index:
        """The cell of each phase in which the support begins (u = low), (phase,) of int."""
        return np.clip(np.floor((self.top - self.low) / self.step), 0, self.count - 1).astype(np.intp)

    @cached_property
    def whole(self) -> NDArray[np.bool_]:
        """Cells before the last of their phase; all but the first lie inside the support, (phase, count)."""
        # By index: comparing edges with the support again would round differently where they coincide.
        return np.arange(self.count) < self.last[:, None]

    def points(self) -> Array:
        """u at the rule's points, (phase, count, point)."""
        return self.edges[:, :-1, None] - self.step * self.rule.fractions

    def weights(self, curve: Callable[[Array], Array], resolution: float) -> Array:
        """w (..., phase, count, point) of a curve that is smooth inside the support.

        Parameters
        ----------
        curve : callable
            h(u) for u inside the support; several curves are stacked along first axes.
        resolution : float
            Length over which ``FINE`` Gauss points integrate the curve to rounding, seconds.
        """
        panels = int(np.ceil(self.step / resolution))
        x, to_points = self.rule.refinement(panels)
        u = self.edges[:, :-1, None] - self.step * x
        h = np.where(self.whole[..., None], curve(np.clip(u, self.low, self.high)), 0.0)
        out = (h.reshape(-1, len(x)) @ (self.step * to_points)).reshape(*h.shape[:-1], self.rule.order)
        self.set_cut_cells(out, curve, panels)
        return out

    def set_cut_cells(self, out: Array, curve: Callable[[Array], Array], panels: int) -> None:
        """Overwrite the cells where the support ends (the first) and begins (the last) by integrals up to there."""
        rows, last = np.arange(len(self.top)), self.last
        bottom = np.maximum(self.top - self.step, self.low)
        out[..., 0, :] = self.piece(curve, np.zeros_like(last), np.full_like(bottom, self.high), bottom, panels)
        start = np.minimum(self.edges[rows, last], self.high)
        final = self.piece(curve, last, start, np.full_like(bottom, self.low), panels)
        out[..., rows, last, :] = np.where((last > 0)[:, None], final, out[..., rows, last, :])

    def piece(self, curve: Callable[[Array], Array], cell: Index, upper: Array, lower: Array, panels: int = 1) -> Array:
        """w (..., phase, point) over u from ``lower`` to ``upper`` (phase,), within one ``cell`` of each phase."""
        g, w = unit_gauss(max(FINE, self.rule.order), panels)
        length = np.maximum(upper - lower, 0.0)[:, None]
        u = upper[:, None] - length * g
        return self.accumulate(cell, u, length * w * curve(u))

    def accumulate(self, cell: Index, u: Array, values: Array) -> Array:
        """w (..., phase, point) of weighted ``values`` (..., phase, node) at ``u`` (phase, node) of one cell each."""
        z = 2 * ((self.top[:, None] - u) / self.step - cell[:, None]) - 1
        moments = np.empty((*values.shape[:-1], self.rule.order))
        # The polynomials are summed as the recurrence makes them: storing them would cost more than computing them.
        previous, current = np.zeros_like(z), np.ones_like(z)
        for n in range(self.rule.order):
            moments[..., n] = np.einsum("...pr,pr->...p", values, current)
            previous, current = current, ((2 * n + 1) * z * current - n * previous) / (n + 1)
        return moments @ self.rule.from_legendre

    def weights_from_antiderivatives(self, mass: Array, moment: Array, origin: float) -> Array:
        """w (phase, count, 2) of the hat rule from antiderivatives in u of h and of (u - origin) h.

        Both are (phase, count + 1), taken at the edges clipped to the support.
        """
        m0, m1 = mass[:, :-1] - mass[:, 1:], moment[:, :-1] - moment[:, 1:]
        right = ((self.edges[:, :-1] - origin) * m0 - m1) / self.step
        return np.stack([m0 - right, right], axis=-1)

    def edge_values(self, curve: Callable[[Array], Array]) -> Array:
        """h at the cell edges, zero outside the support, (phase, count + 1)."""
        inside = (self.edges >= self.low) & (self.edges <= self.high)
        # The outermost edges have one cell each: where the support ends on them, their terms must not remain.
        inside[:, [0, -1]] = False
        return np.where(inside, curve(np.clip(self.edges, self.low, self.high)), 0.0)

    def by_parts(self, w: Array, edge_values: Array | None) -> Array:
        """[h l_q] - integral of h l_q' ds, the lag derivative, from the weights of h and its values at the edges.

        Hat functions are continuous, so their boundary terms cancel between cells: pass None.
        """
        out = (w.reshape(-1, self.rule.order) @ (self.rule.derivative / -self.step)).reshape(w.shape)
        if edge_values is not None:
            start, end = self.rule.ends
            out += edge_values[:, 1:, None] * end
            out -= edge_values[:, :-1, None] * start
        return out

    def dilated(self, w: Array, edge_values: Array | None, lag: float, scale: float) -> Array:
        """The derivative of w in the scale of h(u) = scale^(-1/2) phi((u - lag) / scale)."""
        # (u - lag) l_q' has the degree of the rule, so the weights of h integrate it exactly.
        moment = w * (self.points() - lag)
        at_edges = None if edge_values is None else edge_values * (self.edges - lag)
        return (0.5 * w + self.by_parts(moment, at_edges)) / scale


def cells_of(offsets: Array, step: float, support: tuple[float, float], rule: Rule) -> tuple[Index, Cells]:
    """First cell (phase,) of int relative to a row's own cell, and the cells, for rows at ``offsets`` in their cell."""
    low, high = support
    first = np.floor((offsets - high) / step)
    top = offsets - first * step
    count = max(1, int(np.ceil(np.max(top - low, initial=0.0) / step)))
    return first.astype(np.intp), Cells(rule, step, top, low, high, count)
