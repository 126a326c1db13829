"""Matern factors on a uniform grid: prior precision, conditional means within a cell, weights of functionals.

A Matern factor of half-integer order with its derivatives is a Markov state, so on a grid its precision is block
tridiagonal. Given the states at the grid points a functional is ``a . states + e``, where a integrates the conditional
mean over the cells of its support and the variance rho of e is the integral of the conditional covariance
(DESIGN 3.3). States are scaled to ``(f, f'/rate, f''/rate^2)``: everything depends on ``x = rate * step`` only.

A grid may carry *moments* eps of each cell (:mod:`msrm.latent_cells`). A smooth filter is close to a polynomial of low
degree within a cell, so that ``integral h Cov(f, b) L^-T . eps`` leaves little of a filtered node's e: the error of the
log likelihood falls as ``step^(2 (dimension + moments))`` where it falls as ``step^(2 dimension)`` without. Columns are
[states of point l, eps of the cell after it, states of point l + 1, ...]; nothing sees the last point's cell.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from msrm.latent_cells import MOMENT_ORDER, MOST_MOMENTS, CellBasis, cell_basis, inverse
from msrm.matern import Matern, Matern12, Matern32, Matern52
from msrm.responses import Response, quadrature
from msrm.responses.integrate import CellQuadrature
from msrm.temporal_rows import TemporalRows, difference_rows, pair_windows

__all__ = [
    "MOST_MOMENTS",
    "CellBasis",
    "Functionals",
    "GridPrior",
    "Matern",
    "Matern12",
    "Matern32",
    "Matern52",
    "SharedCells",
    "UniformGrid",
    "cell_basis",
    "difference_rows",
    "functionals",
    "pair_windows",
]

_ORDER = 12  # Gauss points of a cell


@dataclass(frozen=True)
class UniformGrid:
    """Grid points ``start + l step``, l = 0 .. count - 1, seconds."""

    start: float
    step: float
    count: int

    @property
    def times(self) -> np.ndarray:
        """Grid points, (count,), seconds."""
        return self.start + self.step * np.arange(self.count)

    @classmethod
    def covering(cls, first: float, last: float, step: float, anchor: float) -> "UniformGrid":
        """The grid with a point at ``anchor`` that covers ``[first, last]`` with a cell to spare on both sides."""
        before = int(np.floor((first - anchor) / step + 1e-9)) - 1
        after = int(np.ceil((last - anchor) / step - 1e-9)) + 1
        return cls(anchor + before * step, step, after - before + 1)


@dataclass(frozen=True)
class GridPrior:
    """Block tridiagonal precision of one factor's states on a uniform grid.

    Attributes
    ----------
    transition, noise_inverse : (state, state)
        A and Q^-1 from one point to the next.
    count : int
        Grid points.
    moments : int
        Of each cell.
    """

    matern: Matern
    x: float
    count: int
    transition: np.ndarray
    noise: np.ndarray
    noise_inverse: np.ndarray
    moments: int = 0

    @classmethod
    def on(cls, matern: Matern, x: float, count: int, moments: int = 0) -> "GridPrior":
        """The prior for ``count`` points a scaled time x apart."""
        noise = matern.noise(x)
        return cls(matern, x, count, matern.transition(x), noise, inverse(noise), moments)

    @property
    def block(self) -> int:
        """Columns of a grid point: its states and the moments of the cell after it."""
        return self.matern.dimension + self.moments

    def band(self) -> np.ndarray:
        """Lower band (block + state, count * block) of the precision."""
        s, count, block = self.matern.dimension, self.count, self.block
        through = self.transition.T @ self.noise_inverse @ self.transition
        diagonal = np.broadcast_to(self.noise_inverse, (count, s, s)).copy()
        diagonal[0] = inverse(self.matern.stationary)
        diagonal[:-1] += through
        below = -self.noise_inverse @ self.transition
        out = np.zeros((count, block, block + s))
        out[:, s:, 0] = 1.0
        for j in range(s):
            out[:, j, : s - j] = diagonal[:, j:, j]
            out[:-1, j, block - j : block + s - j] = below[:, j]
        return out.reshape(count * block, block + s).T

    @property
    def log_determinant(self) -> float:
        """Log determinant of the precision."""
        scale = np.linalg.slogdet(self.noise_inverse)[1]
        return (self.count - 1) * float(scale) - float(np.linalg.slogdet(self.matern.stationary)[1])

    def slope(self, moments: tuple[np.ndarray, np.ndarray, np.ndarray], copies: int) -> float:
        """d/dx of ``copies * log|precision| / 2 - E[s' precision s] / 2`` with the moments held.

        Parameters
        ----------
        moments : three (state, state)
            Sums over grid steps and factors of E[s s'], E[t s'] and E[t t'], with t the state after s.
        copies : int
            Factors.
        """
        before, across, after = moments
        transition_slope = self.matern.drift @ self.transition
        noise_slope = self.matern.noise_slope(self.x)
        crossed = across - self.transition @ before
        residual = after - self.transition @ across.T - crossed @ self.transition.T
        gain = self.noise_inverse @ noise_slope
        log_determinant = -0.5 * copies * (self.count - 1) * np.trace(gain)
        quadratic = 0.5 * np.sum((gain @ self.noise_inverse) * residual.T) + np.sum(
            (self.noise_inverse @ transition_slope) * crossed
        )
        return float(log_determinant + quadratic)


@dataclass(frozen=True, eq=False)
class SharedCells:
    """Cells that hold equally many Identity nodes.

    Attributes
    ----------
    nodes : (cell, count) int
    covariance, slope : (cell, count, count)
        Conditional covariance of a cell's nodes given the states, and its derivative in the length scale, per second.
    """

    nodes: np.ndarray
    covariance: np.ndarray
    slope: np.ndarray


@dataclass(frozen=True, eq=False)
class Functionals:
    """Functionals ``g_j = a_j . states + e_j`` of one response at many times.

    Attributes
    ----------
    rows : TemporalRows
        a, over grid points times states.
    residual : (node,)
        rho, the variance of e, not negative.
    row_slopes : {name: TemporalRows}
        Derivatives of a in the response parameters, and in ``"length_scale"`` when asked for.
    residual_slopes : {name: (node,)}
    shared : tuple of SharedCells
        All nodes by their cell, where they are Identity's and some cell holds several: their e is one cell's, so its
        covariance is known. Empty otherwise.
    """

    rows: TemporalRows
    residual: np.ndarray
    row_slopes: dict[str, TemporalRows]
    residual_slopes: dict[str, np.ndarray]
    shared: tuple[SharedCells, ...] = ()


def functionals(
    grid: UniformGrid,
    matern: Matern,
    length_scale: float,
    response: Response,
    values: Mapping[str, float] | None,
    times: np.ndarray,
    *,
    length_scale_slope: bool = False,
    moments: int = 0,
) -> Functionals:
    """Weights and residual variances of ``integral h(u) f(t - u) du`` at times (node,), with derivatives.

    Parameters
    ----------
    grid : UniformGrid
        Must cover the response's support at every time.
    matern : Matern
    length_scale : float
        Seconds.
    response : Response
    values : dict
        Free parameters of the response.
    times : (node,)
        Seconds.
    length_scale_slope : bool
        Also differentiate in the length scale.
    moments : int
        Of each cell, among the columns of the rows.

    Returns
    -------
    Functionals
    """
    rate = matern.rate(length_scale)
    order = MOMENT_ORDER if moments else _ORDER
    cells = quadrature(response, dict(values or {}), times, grid.start, grid.step, grid.count, order=order)
    basis = cell_basis(matern, rate * grid.step, cells.fractions[:, 0], moments)
    weights, phase, s = cells.weights, cells.phase, matern.dimension
    block = s + moments

    def rows(of: np.ndarray, mean: np.ndarray) -> np.ndarray:
        ends = of @ mean
        out = np.zeros((of.shape[0], of.shape[1] + 1, block))
        out[:, :-1, :s] += ends[..., :s]
        out[:, 1:, :s] += ends[..., s : 2 * s]
        out[:, :-1, s:] += ends[..., 2 * s :]
        return out.reshape(len(out), -1)[:, : out[0].size - moments]

    def spread(of: np.ndarray) -> TemporalRows:
        return TemporalRows(cells.first * block, of[phase], grid.count * block)

    pulled = weights @ basis.covariance
    residual = np.sum(pulled * weights, axis=(1, 2))
    positive = residual > 0.0
    row_slopes = {name: spread(rows(of, basis.mean)) for name, of in cells.gradient.items()}
    slopes = {name: 2.0 * np.sum(pulled * of, axis=(1, 2)) for name, of in cells.gradient.items()}
    if length_scale_slope:
        per_second = -rate * grid.step / length_scale
        row_slopes["length_scale"] = spread(per_second * rows(weights, basis.mean_slope))
        slopes["length_scale"] = per_second * np.sum((weights @ basis.covariance_slope) * weights, axis=(1, 2))
    return Functionals(
        spread(rows(weights, basis.mean)),
        np.where(positive, residual, 0.0)[phase],
        row_slopes,
        {name: np.where(positive, of, 0.0)[phase] for name, of in slopes.items()},
        _shared_cells(cells, matern, rate, length_scale, moments) if response.is_identity else (),
    )


def _shared_cells(
    cells: CellQuadrature, matern: Matern, rate: float, length_scale: float, moments: int
) -> tuple[SharedCells, ...]:
    order = np.argsort(cells.first, kind="stable")
    _, starts, counts = np.unique(cells.first[order], return_index=True, return_counts=True)
    if counts.max(initial=0) <= 1:
        return ()
    out = []
    for count in np.unique(counts):
        nodes = order[starts[counts == count][:, None] + np.arange(count)]
        basis = cell_basis(matern, rate * cells.step, cells.fractions[cells.phase[nodes], 0, 0], moments)
        out.append(SharedCells(nodes, basis.covariance, -rate * cells.step / length_scale * basis.covariance_slope))
    return tuple(out)
