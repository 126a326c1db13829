"""Time-segment matching: can a stretch of held-out data be told from all others by its prediction?

A run is cut into segments of equal length that do not overlap. A segment counts as matched when, of all predicted
segments, its own correlates best with it (over time and features). With the mean over the other participants as the
prediction this is the field's between-participant matching; chance is one over the number of segments.
"""

from dataclasses import dataclass

import numpy as np

SEGMENT_SECONDS = 15.0
# Half of a segment's entries must be there for it to be tried, and three segments make a choice.
_LEAST_SHARE = 0.5
_LEAST_SEGMENTS = 3


@dataclass(frozen=True)
class Matched:
    """Counts that add up over runs and folds: segments tried, matched, and expected by chance."""

    tried: int = 0
    matched: int = 0
    expected: float = 0.0

    def __add__(self, other: "Matched") -> "Matched":
        return Matched(self.tried + other.tried, self.matched + other.matched, self.expected + other.expected)


class Segments:
    """Sums behind the correlations of every held-out segment with every predicted one, added block by block.

    Parameters
    ----------
    times : (time,) float64
        The stream's clock, seconds.
    seconds : float
        Length of a segment.
    """

    def __init__(self, times: np.ndarray, seconds: float = SEGMENT_SECONDS) -> None:
        interval = float(np.median(np.diff(times))) if len(times) > 1 else seconds
        self._rows = max(1, round(seconds / interval))
        self._count = len(times) // self._rows
        self._cross = np.zeros((self._count, self._count))
        self._truth, self._predicted = np.zeros((2, 2, self._count))
        self._present, self._entries = np.zeros(self._count), 0

    def add(self, truth: np.ndarray, mean: np.ndarray) -> None:
        """Count a block (time, feature) of held-out and predicted values, NaN where missing."""
        width = truth.shape[1]
        cut = self._rows * self._count
        y, p = (np.nan_to_num(values[:cut]).reshape(self._count, self._rows * width) for values in (truth, mean))
        self._present += np.isfinite(truth[:cut]).reshape(self._count, self._rows * width).sum(axis=1)
        self._entries += self._rows * width
        self._cross += y @ p.T
        self._truth += y.sum(axis=1), np.einsum("st,st->s", y, y)
        self._predicted += p.sum(axis=1), np.einsum("st,st->s", p, p)

    def matched(self) -> Matched:
        """Segments tried and matched; none where predictions do not vary."""
        n = max(self._entries, 1)
        tried = np.flatnonzero(self._present > _LEAST_SHARE * n)
        (ty, yy), (tp, pp) = self._truth, self._predicted
        spread_y, spread_p = yy - ty**2 / n, pp - tp**2 / n
        candidates = np.flatnonzero(spread_p > 1e-12 * (pp + 1.0))
        if len(candidates) < _LEAST_SEGMENTS:
            return Matched()
        # A segment's own spread scales its whole row, so it does not change which candidate is best.
        score = (self._cross - np.outer(ty, tp) / n)[:, candidates] / np.sqrt(spread_p[candidates])
        tried = tried[spread_y[tried] > 0]
        best = candidates[np.argmax(score[tried], axis=1)] if len(tried) else tried
        return Matched(len(tried), int(np.sum(best == tried)), len(tried) / len(candidates))
