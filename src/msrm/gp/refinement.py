"""How fine the latent grid must be: the likelihood's error measured by refining it (DESIGN 3.3).

The state-space log likelihood converges as ``step^(2 dimension)`` for a Matern process with ``dimension`` states, so
two spacings give its limit by Richardson's extrapolation, and the difference from it the error. The limit from two
coarse spacings is itself a likelihood (:mod:`msrm.gp.extrapolation`), often the cheapest of a given error; its error is
its distance from the limit that a third, finer spacing gives.
Whether residual variances help is a choice by the same measure, made once per backend.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from msrm.gp.extrapolation import Extrapolated, extrapolation_weight
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Matern
from msrm.nodes import Backend

_ROUNDS = 12  # more mean that the likelihood does not converge
_FINER = 0.8  # the least step from one spacing to the next
_MARGIN = 0.8  # share of the tolerance aimed at, so that the next measurement lies below it
_RESIDUAL_COST = 1.5  # time of an evaluation with residual variances of filtered nodes, over one without
_STEP_POWER = 2.5  # measured growth of the time with 1 / step
_PAIR_RATIO = 1.4  # least ratio of two spacings combined: closer ones magnify what is not of the leading order


@runtime_checkable
class GridBackend(Backend, Protocol):
    """A backend on a latent grid."""

    step: float
    matern: Matern
    residual: frozenset[str]

    def at_step(self, step: float) -> "GridBackend":
        """The same at the largest spacing up to ``step`` that suits the clocks; half a spacing always does."""
        ...

    def with_residual(self, modalities: frozenset[str]) -> "GridBackend":
        """The same with residual variances used in the given modalities."""
        ...

    @property
    def off_grid(self) -> tuple[frozenset[str], frozenset[str]]:
        """Modalities with residual variances: those seen through Identity, and the filtered ones."""
        ...


@dataclass(frozen=True)
class LikelihoodError:
    """What a backend leaves out of the log likelihood at one point.

    Attributes
    ----------
    log_likelihood : float
        As the backend gives it.
    extrapolated : float
        Its limit for a vanishing spacing.
    step : float
        Spacing, seconds; 0 for an exact backend.
    """

    log_likelihood: float
    extrapolated: float
    step: float

    @property
    def error(self) -> float:
        """Absolute difference in nats."""
        return abs(self.log_likelihood - self.extrapolated)


def measured_error(backend: Backend, value: Callable[[Backend], float]) -> LikelihoodError:
    """The error of a backend from its own spacing and half of it.

    Parameters
    ----------
    backend : Backend
    value : callable
        Log likelihood with a backend, at the point in question.
    """
    if isinstance(backend, Extrapolated):
        return _Series(backend.coarse, value).extrapolated(backend.coarse.step, backend.fine.step)
    if not isinstance(backend, GridBackend):
        exact = value(backend)
        return LikelihoodError(exact, exact, 0.0)
    return _Series(backend, value).measured(backend.step)


def resolved(
    backend: Backend, value: Callable[[Backend], float], tolerance: float, *, extrapolate: bool
) -> tuple[Backend, LikelihoodError]:
    """The cheapest spacing or pair of spacings, and the use of residual variances, whose error is within a tolerance.

    Parameters
    ----------
    backend : Backend
        Where the search starts; a backend without a grid is returned as it is.
    value : callable
        Log likelihood with a backend, at the point in question.
    tolerance : float
        Nats.
    extrapolate : bool
        Consider two grids combined; samplers need the one model that a single grid is.

    Returns
    -------
    Backend, LikelihoodError
        The error may exceed the tolerance where the log likelihood does not converge.
    """
    if isinstance(backend, Extrapolated):
        backend = backend.coarse
    if not isinstance(backend, GridBackend):
        return backend, measured_error(backend, value)
    identity, filtered = backend.off_grid
    plain = _Series(backend.with_residual(identity), value)
    found = plain.measured(backend.step)
    if not np.isfinite(found.extrapolated):
        return plain.backend, found
    series = plain
    if filtered:
        other = _Series(backend.with_residual(identity | filtered), value)
        other.measured(backend.step)
        if _RESIDUAL_COST * other.cost(tolerance) < plain.cost(tolerance):
            series = other
    found = series.measured(backend.step)
    if extrapolate and isinstance(series.backend, StateSpace):
        pair = series.cheapest_pair(backend.step, tolerance)
        if pair is not None:
            return Extrapolated(*map(series.backend.at_step, pair)), series.extrapolated(*pair)
    for _ in range(_ROUNDS):
        if found.error <= tolerance:
            break
        found = series.measured(min(series.needed(tolerance), _FINER * found.step))
    return series.backend.at_step(found.step), found


class _Series:
    """Log likelihoods of one backend at several spacings, and their limit."""

    def __init__(self, backend: GridBackend, value: Callable[[Backend], float]) -> None:
        self.backend, self.value = backend, value
        self.values: dict[float, float] = {}

    def at(self, step: float) -> tuple[float, float]:
        """The spacing that suits the clocks, and the log likelihood there."""
        made = self.backend.at_step(step)
        if made.step not in self.values:
            self.values[made.step] = self.value(made)
        return made.step, self.values[made.step]

    def measured(self, step: float) -> LikelihoodError:
        """The error at a spacing."""
        step, here = self.at(step)
        if not any(other < _FINER * step for other in self.values):
            self.at(0.5 * step)
        return LikelihoodError(here, self.limit(), step)

    def limit(self) -> float:
        """Richardson's extrapolation of the two finest spacings."""
        fine, coarse = sorted(self.values)[:2]
        return self.combined(coarse, fine)

    def combined(self, coarse: float, fine: float) -> float:
        """Richardson's extrapolation of two spacings."""
        weight = extrapolation_weight(coarse, fine, self.backend.matern)
        return self.values[fine] + (weight - 1.0) * (self.values[fine] - self.values[coarse])

    def extrapolated(self, coarse: float, fine: float) -> LikelihoodError:
        """The error of two spacings combined, from one or two that are finer."""
        (coarse, _), (fine, _) = self.at(coarse), self.at(fine)
        if not any(other < _FINER * fine for other in self.values):
            self.at(_FINER * fine)
        return LikelihoodError(self.combined(coarse, fine), self.limit(), fine)

    def cheapest_pair(self, step: float, tolerance: float) -> tuple[float, float] | None:
        """Two spacings whose combination is within the tolerance and cheaper than one spacing that is."""
        coarse = self.at(step)[0]
        while True:
            fine = self.at(coarse / _PAIR_RATIO)[0]
            if coarse**-_STEP_POWER + fine**-_STEP_POWER >= self.cost(tolerance):
                return None
            if self.extrapolated(coarse, fine).error <= _MARGIN * tolerance:
                return coarse, fine
            coarse = fine

    def needed(self, tolerance: float) -> float:
        """The spacing at which the error should be within the tolerance."""
        finest = min(self.values)
        error = max(abs(self.values[finest] - self.limit()), 1e-12)
        step = finest * (_MARGIN * tolerance / error) ** (0.5 / self.backend.matern.dimension)
        return min(step, max(self.values))

    def cost(self, tolerance: float) -> float:
        """Time of an evaluation at that spacing, up to a factor."""
        return self.needed(tolerance) ** -_STEP_POWER
