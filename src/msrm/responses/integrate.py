"""Rows of a stream against a uniform latent grid: quadrature of smooth cells, and hat functions (DESIGN 2 and 3.3).

Owns ``quadrature`` (the statespace latent grid) and ``hat_rows`` (R-MSRM's operator H), with their derivatives in the
free parameters. Rows that fall on the same place of a cell share their weights: everything is computed once per
distinct phase. Phases depend on the times only, so they are kept between calls.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from msrm.responses.base import Response, Values
from msrm.responses.cells import Array, Index, cells_of, gauss_rule, hat_rule
from msrm.temporal_rows import TemporalRows

__all__ = ["CellQuadrature", "hat_rows", "quadrature"]


@dataclass(frozen=True, eq=False)
class CellQuadrature:
    """Integrals of h(u) f(t - u) du as weighted values of f at fixed points of grid cells.

    For row n, with p = phase[n], the integral is the sum over c and q of
    ``weights[p, c, q] * f(start + step * (first[n] + c + fractions[..., q]))``. Cells outside the grid weigh nothing.

    Parameters
    ----------
    first : (row,) int
        Index of each row's first cell; cell l is [start + l step, start + (l + 1) step). May lie outside the grid
        where its weights are zero: clip before indexing.
    phase : (row,) int
        Which of the weights a row uses.
    fractions : (1, 1, point) or (phase, 1, point)
        Points as fractions of a cell, the same for all; but Identity has one point, the row's own time.
    weights : (phase, cell, point)
    gradient : dict of (phase, cell, point)
        Derivatives of the weights in each free parameter, moving edges included; the points do not move.
    step : float
        Cell length, seconds.
    """

    first: Index
    phase: Index
    fractions: Array
    weights: Array
    gradient: dict[str, Array]
    step: float

    @property
    def nodes(self) -> Array:
        """Time of each point from the start of the first cell, (phase, cell, point), seconds."""
        cells = np.arange(self.weights.shape[1])[None, :, None]
        return np.broadcast_to((cells + self.fractions) * self.step, self.weights.shape)


def quadrature(
    response: Response, values: Values | None, times: Array, start: float, step: float, count: int, *, order: int = 12
) -> CellQuadrature:
    """Quadrature of a response at ``times`` over a uniform grid, for functions smooth within each cell.

    Parameters
    ----------
    response : Response
    values : dict, optional
        Values of free parameters; others as constructed.
    times : (row,)
        Seconds.
    start, step, count : float, float, int
        Grid points are start + l step, l = 0 .. count - 1.
    order : int
        Points per cell: exact for polynomials of degree ``order - 1`` within cells.

    Returns
    -------
    CellQuadrature

    Raises
    ------
    ValueError
        When a row's support leaves the grid.
    """
    lattice = _lattice(np.ascontiguousarray(times, float).tobytes(), float(start), float(step))
    v = response.resolved(values)
    low, high = response._support(v)
    _check_inside(times, low, high, start, step, count)
    if response.is_identity:
        fractions = (lattice.offsets / step)[:, None, None]
        return CellQuadrature(lattice.cell, lattice.phase, fractions, np.ones_like(fractions), {}, step)
    rule = gauss_rule(order)
    first, cells = cells_of(lattice.offsets, step, (low, high), rule)
    weights, gradient = response._cell_weights(cells, v)
    fractions = rule.fractions[None, None, :]
    return CellQuadrature(lattice.cell + first[lattice.phase], lattice.phase, fractions, weights, gradient, step)


def hat_rows(
    response: Response, values: Values | None, times: Array, start: float, step: float, count: int
) -> tuple[TemporalRows, dict[str, TemporalRows]]:
    """R-MSRM's operator: H[n, l] = integral of h(u) phi_l(t_n - u) du over hat functions phi_l, and its derivatives.

    Parameters
    ----------
    response, values, times, start, step, count
        As in ``quadrature``; phi_l peaks at start + l step.

    Returns
    -------
    TemporalRows, dict of TemporalRows
        The operator (row, count), and its derivative in each free parameter.

    Raises
    ------
    ValueError
        When a row's support leaves the grid.
    """
    lattice = _lattice(np.ascontiguousarray(times, float).tobytes(), float(start), float(step))
    v = response.resolved(values)
    low, high = response._support(v)
    _check_inside(times, low, high, start, step, count)
    if response.is_identity:
        x = lattice.offsets / step
        return _rows(lattice.cell, np.stack([1 - x, x], axis=1)[lattice.phase], count), {}
    first, cells = cells_of(lattice.offsets, step, (low, high), hat_rule())
    weights, gradient = response._hat_weights(cells, v)
    columns = lattice.cell + first[lattice.phase]
    made = {name: _rows(columns, _joined(w)[lattice.phase], count) for name, w in gradient.items()}
    return _rows(columns, _joined(weights)[lattice.phase], count), made


@dataclass(frozen=True, eq=False)
class _Lattice:
    """Where rows lie on the grid: cell (row,) and phase (row,) of each, and a phase's offset in its cell, seconds."""

    cell: Index
    phase: Index
    offsets: Array


@lru_cache(maxsize=256)
def _lattice(times: bytes, start: float, step: float) -> _Lattice:
    t = np.frombuffer(times) - start
    cell = np.floor(t / step)
    offset = t - cell * step
    # Times are multiples of a clock up to their own rounding: offsets that differ by less are the same phase.
    tolerance = 64 * np.finfo(float).eps * max(1.0, float(np.max(np.abs(t), initial=0.0)), abs(start))
    _, representative, phase = np.unique(np.round(offset / tolerance), return_index=True, return_inverse=True)
    return _Lattice(cell.astype(np.intp), phase.reshape(-1), offset[representative])


def _check_inside(times: Array, low: float, high: float, start: float, step: float, count: int) -> None:
    """Refuse rows whose support leaves the grid by more than the tolerance of trimming (1e-9 s) and rounding."""
    if len(times) == 0:
        return
    first, last = float(np.min(times)), float(np.max(times))
    end = start + (count - 1) * step
    slack = 2e-9 + 1e-12 * max(abs(start), abs(end))
    if first - high < start - slack or last - low > end + slack:
        raise ValueError(
            f"rows at {first:g} to {last:g} s see the latent from {first - high:g} to {last - low:g} s, "
            f"outside the grid from {start:g} to {end:g} s. Extend the grid by the response's support or drop the rows."
        )


def _joined(w: Array) -> Array:
    """Weights of grid points (phase, cell + 1) from those of the two ends of each cell (phase, cell, 2)."""
    out = np.zeros((w.shape[0], w.shape[1] + 1))
    out[:, :-1] = w[..., 0]
    out[:, 1:] += w[..., 1]
    return out


def _rows(first: Index, weights: Array, count: int) -> TemporalRows:
    """Temporal rows; what rounding leaves in columns outside the grid is cleared."""
    width = weights.shape[1]
    outside = np.flatnonzero((first < 0) | (first + width > count))
    if len(outside):
        columns = first[outside, None] + np.arange(width)
        weights[outside] *= (columns >= 0) & (columns < count)
    return TemporalRows(first, weights, count)
