"""Matern factors on a uniform grid: prior precision, conditional means within a cell, weights of functionals.

A Matern factor of half-integer order with its derivatives is a Markov state, so on a grid its precision is block
tridiagonal. Given the states at the grid points a functional is ``a . states + e``, where a integrates the conditional
mean over the cells of its support and the variance rho of e is the integral of the conditional covariance
(DESIGN 3.3). States are scaled to ``(f, f'/rate, f''/rate^2)``: everything depends on ``x = rate * step`` only.

A grid may carry *moments*. Given its two ends the process in a cell is a bridge, independent of all else. With
``b = L eps`` its first Legendre moments ``integral P_k(u) (f - E[f | ends]) du`` and ``L L'`` their covariance, the
coordinates eps are standard normal and independent of the states a priori. A smooth filter is close to a polynomial of
low degree within a cell, so that ``integral h Cov(f, b) L^-T . eps`` leaves little of a filtered node's e: the error of
the log likelihood falls as ``step^(2 (dimension + moments))`` where it falls as ``step^(2 dimension)`` without. Columns
are [states of point l, eps of the cell after it, states of point l + 1, ...]; nothing sees the last point's cell.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from msrm.banded import TemporalRows
from msrm.matern import Matern, Matern12, Matern32, Matern52
from msrm.responses import Response, quadrature
from msrm.responses.cells import legendre, unit_gauss
from msrm.responses.integrate import CellQuadrature

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
_MOMENT_ORDER = 16  # with moments: kinks of Matern-3/2 and 5/2 leave 1e-6 and less of the variance
_PIECE_ORDER = 10  # either side of the kink of Matern-1/2: exponentials times polynomials
MOST_MOMENTS = 6  # of a cell: beyond it their variances on short cells are rounding
_DROPPED = 1e-13  # variance of a moment, of the prior's 1, below which it is rounding


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
        return cls(matern, x, count, matern.transition(x), noise, _inverse(noise), moments)

    @property
    def block(self) -> int:
        """Columns of a grid point: its states and the moments of the cell after it."""
        return self.matern.dimension + self.moments

    def band(self) -> np.ndarray:
        """Lower band (block + state, count * block) of the precision."""
        s, count, block = self.matern.dimension, self.count, self.block
        through = self.transition.T @ self.noise_inverse @ self.transition
        diagonal = np.broadcast_to(self.noise_inverse, (count, s, s)).copy()
        diagonal[0] = _inverse(self.matern.stationary)
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


def _inverse(matrix: np.ndarray) -> np.ndarray:
    """Inverse of a positive definite matrix, scaled to unit diagonal first: the states differ by powers of x."""
    scale = 1.0 / np.sqrt(np.diag(matrix))
    inverse = np.linalg.inv(matrix * scale[:, None] * scale) * scale[:, None] * scale
    return 0.5 * (inverse + inverse.T)


@dataclass(frozen=True, eq=False)
class CellBasis:
    """The process inside a cell given the states at its two ends and the moments in it.

    Attributes
    ----------
    mean, mean_slope : (set, point, 2 state + moment)
        Weights of the start's and the end's states and of eps in the conditional mean, and d/dx.
    covariance, covariance_slope : (set, point, point)
        Conditional covariance between points of the cell, and d/dx.
    """

    mean: np.ndarray
    mean_slope: np.ndarray
    covariance: np.ndarray
    covariance_slope: np.ndarray


def cell_basis(matern: Matern, x: float, fractions: np.ndarray, moments: int = 0) -> CellBasis:
    """Conditional mean and covariance at ``fractions`` (set, point) of a cell of scaled length x, with derivatives."""
    return _cell_basis(matern, x, np.ascontiguousarray(fractions).tobytes(), fractions.shape, moments)


@lru_cache(maxsize=64)
def _cell_basis(matern: Matern, x: float, content: bytes, shape: tuple[int, int], moments: int) -> CellBasis:
    r = np.frombuffer(content).reshape(shape)
    return _bridge_basis(matern, x, r) if moments == 0 else _moment_basis(matern, x, r, moments)


def _moment_basis(matern: Matern, x: float, r: np.ndarray, moments: int) -> CellBasis:
    """The basis given the moments too.

    With C their covariance and R = L^-T, ``dR = -R (R' dC R) / 2`` is a derivative of R: any other differs by a
    rotation of eps, which no functional can tell.
    """
    nodes, weights = unit_gauss(_MOMENT_ORDER)
    of_nodes = weights[:, None] * legendre(nodes, moments)
    found, found_slope = _moment_covariance(matern, x, np.concatenate([r.ravel(), nodes]), moments)
    covariance, slope = (of[: r.size].reshape(*r.shape, moments) for of in (found, found_slope))
    between, between_slope = of_nodes.T @ found[r.size :], of_nodes.T @ found_slope[r.size :]
    ends = _bridge_basis(matern, x, r)
    variances, directions = np.linalg.eigh(between)
    kept = variances > _DROPPED
    root = directions * np.where(kept, np.maximum(variances, _DROPPED) ** -0.5, 0.0)
    turned = root.T @ between_slope @ root
    loadings = covariance @ root
    loading_slopes = slope @ root - 0.5 * loadings @ turned
    crossed = loading_slopes @ np.swapaxes(loadings, 1, 2)
    return CellBasis(
        np.concatenate([ends.mean, loadings], axis=-1),
        np.concatenate([ends.mean_slope, loading_slopes], axis=-1),
        ends.covariance - loadings @ np.swapaxes(loadings, 1, 2),
        ends.covariance_slope - crossed - np.swapaxes(crossed, 1, 2),
    )


def _moment_covariance(matern: Matern, x: float, r: np.ndarray, moments: int) -> tuple[np.ndarray, np.ndarray]:
    """Covariance (point, moment) of the bridge at points and its Legendre moments, and d/dx.

    The covariance has a kink where its arguments meet. Sharp likelihoods feel that of Matern-1/2, so its integrals are
    split there: what comes of them is smooth in the point, and Gauss rules over cells integrate it.
    """
    at = r[..., None]
    if matern.dimension == 1:
        nodes, weights = unit_gauss(_PIECE_ORDER)
        u = np.concatenate([at * nodes, at + (1.0 - at) * nodes], axis=-1)
        weights = np.concatenate([at * weights, (1.0 - at) * weights], axis=-1)
    else:
        nodes, weights = unit_gauss(_MOMENT_ORDER)
        u = nodes[None]
    of = weights[..., None] * legendre(u, moments)
    inside, inside_slope, g, g_slope = _toward_end(matern, x, u)
    here, here_slope, g_here, g_here_slope = _toward_end(matern, x, r)
    noise_inverse, noise_slope = _inverse(matern.noise(x)), matern.noise_slope(x)
    late = g_here @ noise_inverse
    late_slope = (g_here_slope - late @ noise_slope) @ noise_inverse
    earlier = (u <= at)[..., None]
    column = np.where(earlier, inside[..., :, 0], here[..., None, :, 0])
    column_slope = np.where(earlier, inside_slope[..., :, 0], here_slope[..., None, :, 0])
    covariance, slope = _across(matern, x, np.abs(u - at), column, column_slope)
    covariance = covariance - np.sum(g * late[..., None, :], axis=-1)
    slope = slope - np.sum(g * late_slope[..., None, :] + g_slope * late[..., None, :], axis=-1)
    return (covariance[..., None, :] @ of)[..., 0, :], (slope[..., None, :] @ of)[..., 0, :]


def _toward_end(matern: Matern, x: float, r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Covariance of the state at points, and of the process there and the state at the end, given the start; d/dx."""
    drift = matern.drift
    rest = matern.transition(x * (1.0 - r))
    rest_slope = (1.0 - r)[..., None, None] * (drift @ rest)
    inside, inside_slope = matern.noise(x * r), r[..., None, None] * matern.noise_slope(x * r)
    g = np.einsum("...j,...ij->...i", inside[..., 0, :], rest)
    g_slope = np.einsum("...j,...ij->...i", inside_slope[..., 0, :], rest)
    g_slope += np.einsum("...j,...ij->...i", inside[..., 0, :], rest_slope)
    return inside, inside_slope, g, g_slope


def _bridge_basis(matern: Matern, x: float, r: np.ndarray) -> CellBasis:
    drift = matern.drift
    ahead, ahead_slope = matern.transition(x), drift @ matern.transition(x)
    noise_inverse, noise_slope = _inverse(matern.noise(x)), matern.noise_slope(x)
    start = matern.transition(x * r)
    start_slope = r[..., None, None] * (drift @ start)
    inside, inside_slope, g, g_slope = _toward_end(matern, x, r)
    late = g @ noise_inverse
    late_slope = (g_slope - late @ noise_slope) @ noise_inverse
    early = start[..., 0, :] - late @ ahead
    early_slope = start_slope[..., 0, :] - late_slope @ ahead - late @ ahead_slope
    covariance, covariance_slope = _cell_covariance(matern, x, r, inside, inside_slope)
    covariance = covariance - late @ np.swapaxes(g, -1, -2)
    covariance_slope = covariance_slope - late_slope @ np.swapaxes(g, -1, -2) - late @ np.swapaxes(g_slope, -1, -2)
    return CellBasis(
        np.concatenate([early, late], axis=-1),
        np.concatenate([early_slope, late_slope], axis=-1),
        covariance,
        covariance_slope,
    )


def _cell_covariance(
    matern: Matern, x: float, r: np.ndarray, inside: np.ndarray, inside_slope: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of the process at two points given the state at the start of the cell, and d/dx."""
    gap = np.abs(r[:, :, None] - r[:, None, :])
    earlier = np.where(r[:, :, None] <= r[:, None, :], np.arange(r.shape[1])[:, None], np.arange(r.shape[1]))
    which = np.arange(r.shape[0])[:, None, None]
    column, column_slope = inside[..., :, 0][which, earlier], inside_slope[..., :, 0][which, earlier]
    return _across(matern, x, gap, column, column_slope)


def _across(
    matern: Matern, x: float, gap: np.ndarray, column: np.ndarray, column_slope: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance given the start of the process a gap later and the process now, from the state's with it; d/dx."""
    after = matern.transition(x * gap)
    after_slope = gap[..., None] * (matern.drift @ after)[..., 0, :]
    after = after[..., 0, :]
    return np.sum(after * column, axis=-1), np.sum(after_slope * column + after * column_slope, axis=-1)


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
    order = _MOMENT_ORDER if moments else _ORDER
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


def difference_rows(rows: TemporalRows, pairs: np.ndarray, coefficients: np.ndarray) -> TemporalRows:
    """Rows ``sum_k coefficients[j, k] rows[pairs[j, k]]`` (node, ...), each in the window that holds both."""
    first, offsets, width = pair_windows(rows, pairs)
    weights = np.zeros((len(pairs), width))
    index = np.arange(len(pairs))[:, None]
    for k in range(2):
        span = offsets[:, k, None] + np.arange(rows.width)
        weights[index, span] += coefficients[:, k, None] * rows.weights[pairs[:, k]]
    return TemporalRows(first, weights, rows.length)


def pair_windows(rows: TemporalRows, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """First columns (pair,), offsets (pair, 2) of the members in them and the width of windows that hold pairs."""
    members = rows.first[pairs]
    first = members.min(axis=1)
    width = int((members.max(axis=1) - first).max(initial=0)) + rows.width
    first = np.minimum(first, rows.length - width)
    return first, members - first[:, None], width
