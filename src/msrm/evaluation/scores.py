"""Scores of predictions against held-out values, and their null under circular shifts of the held-out stream.

Owns the sums from which every score is made. They add up over features, runs and folds, and are kept for every circular
shift s of the held-out rows (s = 0 is the score itself), by FFT:

    sse_s = sum_tf p(t) y(t+s) masks (y(t+s) - p(t))^2,   R^2_s = 1 - sse_s / sst_s

in units of the training standard deviation, so that R^2 is the pooled one of DESIGN 9.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np
from scipy.fft import irfft, rfft
from scipy.special import ndtri

LEVELS = (0.5, 0.8, 0.95)
LOG_2PI = float(np.log(2.0 * np.pi))
# Relative to a sum of squares, below which a variance is rounding error of the FFT and not signal.
_ROUNDING = 1e-10


@dataclass(frozen=True)
class ScoreSums:
    """Sums over the entries of one held-out piece of a stream (one run of one fold), for every circular shift.

    Attributes
    ----------
    entries, sse, sst : (shift,)
        Entries scored, squared error and squared distance from the training mean, training sd units.
    correlation, correlated : (shift,)
        Sum of Pearson correlations over features, and the features that have one.
    log_density : (shift,)
        Sum of log predictive densities of the entries, nats, training sd units; NaN without a variance.
    exact : float
        The unshifted sum of log densities where predictions are no single normal (draws); NaN elsewhere.
    hits : (level,)
        Entries inside the central intervals of `LEVELS`; NaN without a variance.
    """

    entries: np.ndarray
    sse: np.ndarray
    sst: np.ndarray
    correlation: np.ndarray
    correlated: np.ndarray
    log_density: np.ndarray
    exact: float
    hits: np.ndarray

    def __add__(self, other: "ScoreSums") -> "ScoreSums":
        return ScoreSums(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def shifted(self, shift: np.ndarray) -> "ScoreSums":
        """The same sums at the given shifts only, (draw,)."""
        by_shift = {f.name: getattr(self, f.name)[shift] for f in fields(self)[:-2]}
        return ScoreSums(**by_shift, exact=self.exact, hits=self.hits)


def score_sums(
    truth: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray | None = None,
    *,
    null: bool = True,
    exact: tuple[np.ndarray, np.ndarray] | None = None,
) -> ScoreSums:
    """Sums of scores of a block of features, for every circular shift of the truth's rows.

    Parameters
    ----------
    truth : (time, feature)
        Held-out values in training sd units about the training mean, NaN where missing.
    mean, variance : (time, feature)
        Predictions in the same units, NaN where there is none.
    null : bool
        Whether every shift is wanted, or the unshifted sums alone.
    exact : two of (time, feature), optional
        Log density of the truth, same units, and probability of a smaller value, where the prediction is a mixture.

    Returns
    -------
    ScoreSums
        Over the entries where both are finite.
    """
    given, wanted = np.isfinite(mean), np.isfinite(truth)
    y, p = np.where(wanted, truth, 0.0), np.where(given, mean, 0.0)
    shifts = _Shifts(len(y), null=null, complete=bool(given.all() and wanted.all()))
    n = shifts.counts(given, wanted)
    yy, pp, yp = shifts.right(y**2, given), shifts.left(p**2, wanted), shifts.both(p, y)
    sse, sst = (pp + yy - 2.0 * yp).sum(axis=1), yy.sum(axis=1)
    # The unshifted sums are taken directly: a score keeps its last digits when the error is small.
    both = given & wanted
    sse[0], sst[0] = np.sum((y - p)[both] ** 2), np.sum(y[both] ** 2)
    correlation = _correlations(n, shifts.right(y, given), shifts.left(p, wanted), yy, pp, yp)
    defined = np.isfinite(correlation)
    log_density, hits = np.full(len(sse), np.nan), np.full(len(LEVELS), np.nan)
    if variance is not None:
        partly = _Shifts(len(y), null=null, complete=False)
        log_density, hits = _densities(y, p, np.where(given, variance, 1.0), given, wanted, partly)
    total = np.nan
    if exact is not None:
        density, below = (part[both] for part in exact)
        total, hits = float(density.sum()), np.array([np.sum(np.abs(2.0 * below - 1.0) <= level) for level in LEVELS])
    return ScoreSums(
        n.sum(axis=1),
        sse,
        sst,
        np.where(defined, correlation, 0.0).sum(axis=1),
        defined.sum(axis=1),
        log_density,
        total,
        hits,
    )


@dataclass(frozen=True)
class _Shifts:
    """Circular cross-correlations over time: ``out[s] = sum_t left[t] right[t + s]`` by feature, (shift, feature).

    Without a null only s = 0. With complete data a sum of one side alone is the same for every shift: no FFT.
    """

    n: int
    null: bool
    complete: bool

    def both(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        if not self.null:
            return np.sum(left * right, axis=0, keepdims=True)
        return irfft(np.conj(rfft(left, axis=0)) * rfft(right, axis=0), self.n, axis=0)

    def right(self, values: np.ndarray, given: np.ndarray) -> np.ndarray:
        """Sums of the truth's `values` where there is a prediction."""
        return self._constant(values) if self.complete else self.both(given.astype(float), values)

    def left(self, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Sums of the prediction's `values` where there is a truth."""
        return self._constant(values) if self.complete else self.both(values, wanted.astype(float))

    def counts(self, given: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        return np.rint(self.right(wanted.astype(float), given))

    def _constant(self, values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values.sum(axis=0), (self.n if self.null else 1, values.shape[1]))


def _correlations(
    n: np.ndarray, y: np.ndarray, p: np.ndarray, yy: np.ndarray, pp: np.ndarray, yp: np.ndarray
) -> np.ndarray:
    """Pearson correlation from sums (shift, feature); NaN where a side does not vary or has fewer than three rows."""
    n = np.maximum(n, 1.0)
    truth, predicted = yy - y**2 / n, pp - p**2 / n
    varies = (n > 2) & (truth > _ROUNDING * yy) & (predicted > _ROUNDING * pp)
    spread = np.sqrt(np.where(varies, truth * predicted, 1.0))
    return np.where(varies, (yp - y * p / n) / spread, np.nan)


def _densities(
    y: np.ndarray, p: np.ndarray, variance: np.ndarray, given: np.ndarray, wanted: np.ndarray, shifts: _Shifts
) -> tuple[np.ndarray, np.ndarray]:
    """Log predictive density for every shift (nats) and hits of the central intervals."""
    if not (variance > 0).all():
        raise ValueError("A predictive variance is not positive; the predictor must give variances above 0.")
    both, weight = given & wanted, given / variance
    quadratic = (
        shifts.both(weight, y**2)
        - 2.0 * shifts.both(weight * p, y)
        + shifts.both(weight * p**2 + given * (np.log(variance) + LOG_2PI), wanted.astype(float))
    )
    log_density = -0.5 * quadratic.sum(axis=1)
    error, v = (y - p)[both], variance[both]
    log_density[0] = -0.5 * np.sum(error**2 / v + np.log(v) + LOG_2PI)
    z = np.abs(error) / np.sqrt(v)
    return log_density, np.array([np.sum(z <= ndtri(0.5 + level / 2)) for level in LEVELS], float)


@dataclass(frozen=True)
class Scores:
    """Scores pooled over the pieces of a stream.

    Attributes
    ----------
    r2, correlation, log_density : float
        DESIGN 9: R^2 pooled over entries in training sd units; Pearson correlation in time, mean over features and
        pieces; mean log predictive density of an entry, nats, training sd units. NaN where undefined.
    coverage : (level,)
        Share of entries inside the central intervals of `LEVELS`.
    r2_p, correlation_p, log_density_p : float
        Share of circular shifts that score at least as well, the score itself counted.
    """

    r2: float
    correlation: float
    log_density: float
    coverage: np.ndarray
    r2_p: float
    correlation_p: float
    log_density_p: float


def pool(pieces: Iterable[ScoreSums], *, n_shifts: int = 1000, seed: int = 0) -> Scores:
    """Scores of all pieces together, with p-values from `n_shifts` random circular shifts, one in each piece.

    Parameters
    ----------
    pieces : iterable of ScoreSums
        One for each run and fold.
    n_shifts : int
        Draws of the null; 0 for none.
    seed : int
    """
    pieces = list(pieces)
    if not pieces:
        return Scores(np.nan, np.nan, np.nan, np.full(len(LEVELS), np.nan), np.nan, np.nan, np.nan)
    sums = _added(piece.shifted(np.zeros(1, dtype=int)) for piece in pieces)
    found = _ratios(sums)
    r2, correlation, log_density = (float(score[0]) for score in found[:3])
    chance = [np.nan] * 3
    if n_shifts and all(len(piece.sse) > 1 for piece in pieces):
        rng = np.random.default_rng(seed)
        null = _added(piece.shifted(rng.integers(1, len(piece.sse), n_shifts)) for piece in pieces)
        actual = (r2, correlation, log_density)
        chance = [_p_value(score, draws) for score, draws in zip(actual, _ratios(null)[:3], strict=True)]
    if np.isfinite(sums.exact) and sums.entries[0] > 0:
        # Shifts are judged by normals of the same moments, the score itself by its own density.
        log_density = sums.exact / float(sums.entries[0])
    return Scores(r2, correlation, log_density, found[3], *chance)


def _added(sums: Iterable[ScoreSums]) -> ScoreSums:
    first, *rest = sums
    for other in rest:
        first = first + other
    return first


def _ratios(sums: ScoreSums) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """R^2, correlation and mean log density (draw,), and coverage (level,); NaN where a denominator is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        r2 = np.where(sums.sst > 0, 1.0 - sums.sse / sums.sst, np.nan)
        correlation = np.where(sums.correlated > 0, sums.correlation / sums.correlated, np.nan)
        log_density = np.where(sums.entries > 0, sums.log_density / sums.entries, np.nan)
        coverage = sums.hits / sums.entries[0] if sums.entries[0] > 0 else np.full(len(LEVELS), np.nan)
    return r2, correlation, log_density, coverage


def _p_value(actual: float, null: np.ndarray) -> float:
    null = null[np.isfinite(null)]
    if not np.isfinite(actual) or not null.size:
        return np.nan
    return float((1 + np.sum(null >= actual)) / (1 + null.size))
