"""Residual models of a modality: white, or Ornstein-Uhlenbeck in time (DESIGN 2). Powers and run offsets are numbers.

An OU residual of one feature whitens exactly by differencing its neighbouring kept rows,
``(y_n - phi y_p) / s`` with ``phi = exp(-gap / timescale)`` and ``s^2 = 1 - phi^2``; the first kept row of a run stays
as it is. The latent functionals and the offset are differenced with it, so a node becomes a pair of times
(:attr:`msrm.nodes.NodeGroup.pairs`) and the rest of the model sees white residuals.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from msrm.responses import Free

_FORGOTTEN = 18.0  # timescales after which phi is 1e-8: bridging such a gap changes nothing and widens the band


@dataclass(frozen=True)
class White:
    """Independent residuals: every row stands alone."""

    differenced: ClassVar[bool] = False
    free: ClassVar[Free | None] = None
    start: ClassVar[float] = np.nan

    def previous(self, present: np.ndarray, times: np.ndarray) -> np.ndarray:
        """The row each of the rows is differenced with, (row,) int; itself where it stands alone.

        Parameters
        ----------
        present : (row,) bool
            Rows of one run in which the feature is kept.
        times : (row,)
            Seconds.
        """
        return np.arange(len(times))

    def coefficients(self, gaps: np.ndarray, timescale: float) -> np.ndarray | None:
        """None: nothing is differenced."""
        return None

    def coefficient_slopes(self, gaps: np.ndarray, timescale: float) -> np.ndarray:
        """Zeros: there is no timescale."""
        return np.zeros((len(gaps), 2))

    def log_variance(self, gaps: np.ndarray, timescale: float) -> np.ndarray:
        """Zeros: residuals keep their variance."""
        return np.zeros(len(gaps))

    def log_variance_slope(self, gaps: np.ndarray, timescale: float) -> np.ndarray:
        """Zeros: there is no timescale."""
        return np.zeros(len(gaps))


@dataclass(frozen=True)
class OrnsteinUhlenbeck:
    """Cov = v exp(-|dt| / timescale) per feature, restarting each run, bridging gaps.

    Parameters
    ----------
    timescale : float or Free
        Seconds.
    """

    timescale: float | Free

    differenced: ClassVar[bool] = True

    def __post_init__(self) -> None:
        shortest = self.timescale.bounds[0] if isinstance(self.timescale, Free) else self.timescale
        if not (np.isfinite(shortest) and shortest > 0):
            raise ValueError(f"A residual timescale must be positive seconds, found {self.timescale!r}.")

    @property
    def free(self) -> Free | None:
        """The timescale where it is learned."""
        return self.timescale if isinstance(self.timescale, Free) else None

    @property
    def start(self) -> float:
        """The timescale, or where learning it starts, seconds."""
        return self.timescale.start if isinstance(self.timescale, Free) else float(self.timescale)

    @property
    def longest(self) -> float:
        """The largest timescale allowed, seconds."""
        return self.timescale.bounds[1] if isinstance(self.timescale, Free) else float(self.timescale)

    def previous(self, present: np.ndarray, times: np.ndarray) -> np.ndarray:
        """The kept row before each kept row; itself at a start and after gaps that forget everything."""
        out = np.arange(len(times))
        kept = np.flatnonzero(present)
        near = np.diff(times[kept]) < _FORGOTTEN * self.longest
        out[kept[1:][near]] = kept[:-1][near]
        return out

    def coefficients(self, gaps: np.ndarray, timescale: float) -> np.ndarray:
        """Weights (node, 2) of a row and its previous one: ``(1, -phi) / s``; (1, 0) at a start (gap 0)."""
        phi, spread = self._decay(gaps, timescale)
        return np.stack([1.0 / spread, np.where(gaps > 0.0, -phi / spread, 0.0)], axis=1)

    def coefficient_slopes(self, gaps: np.ndarray, timescale: float) -> np.ndarray:
        """Derivatives (node, 2) of :meth:`coefficients` in the timescale."""
        phi, spread = self._decay(gaps, timescale)
        slope = phi * gaps / timescale**2 / spread**3
        return np.stack([phi * slope, -slope], axis=1)

    def log_variance(self, gaps: np.ndarray, timescale: float) -> np.ndarray:
        """``log s^2`` (node,), 0 at a start."""
        return 2.0 * np.log(self._decay(gaps, timescale)[1])

    def log_variance_slope(self, gaps: np.ndarray, timescale: float) -> np.ndarray:
        """Derivative (node,) of :meth:`log_variance` in the timescale."""
        phi, spread = self._decay(gaps, timescale)
        return -2.0 * phi**2 * gaps / timescale**2 / spread**2

    def _decay(self, gaps: np.ndarray, timescale: float) -> tuple[np.ndarray, np.ndarray]:
        scaled = gaps / timescale
        return np.exp(-scaled), np.where(gaps > 0.0, np.sqrt(-np.expm1(-2.0 * scaled)), 1.0)


Residual = White | OrnsteinUhlenbeck
