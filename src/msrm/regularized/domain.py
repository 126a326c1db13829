"""Where and how strongly a stream enters the objective: observed domain, usable rows, cells, latent grid.

These are the exact readings of DESIGN 2 (they reproduce the reference objectives to rounding), as plain functions of
times in seconds; what they weigh belongs to :mod:`msrm.regularized.problem`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.coverage import TIME_TOLERANCE, segments

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Grid:
    """A run's latent grid: `start + l step` for l = 0 .. count - 1, seconds."""

    start: float
    step: float
    count: int

    @property
    def times(self) -> Array:
        """Grid times (count,), seconds."""
        return np.asarray(self.start + self.step * np.arange(self.count), np.float64)

    @property
    def last(self) -> float:
        """The last grid time, seconds."""
        return self.start + self.step * (self.count - 1)

    @property
    def duration(self) -> float:
        """From the first to the last grid time, seconds."""
        return self.step * (self.count - 1)

    @property
    def shares(self) -> Array:
        """Trapezoid weights a (count,), summing to 1."""
        weights = np.full(self.count, 1.0 / (self.count - 1))
        weights[[0, -1]] *= 0.5
        return weights


def latent_grid(first: float, last: float, step: float) -> Grid:
    """The grid that covers first to last; it may pass the last time by less than a step."""
    return Grid(first, step, max(2, 1 + int(np.ceil((last - first) / step - 1e-9))))


def usable_rows(times: Array, observed: Mask, envelope: tuple[float, float], domain: tuple[float, float]) -> Mask:
    """Rows with a finite entry whose support envelope `[t - u_max, t - u_min]` lies inside the domain."""
    low, high = envelope
    inside = (times - high >= domain[0] - TIME_TOLERANCE) & (times - low <= domain[1] + TIME_TOLERANCE)
    return observed & inside


def cell_weights(times: Array) -> Array:
    """Trapezoid cells of increasing times, split at gaps and normalized to sum 1.

    A row alone in its segment weighs the median interval.
    """
    pieces, median = segments(times)
    cells = np.empty(len(times))
    for piece in pieces:
        own = times[piece]
        if len(own) == 1:
            cells[piece] = 1.0 if np.isnan(median) else median
            continue
        half = 0.5 * np.diff(own)
        cells[piece] = np.append(half, 0.0) + np.append(0.0, half)
    return cells / cells.sum()
