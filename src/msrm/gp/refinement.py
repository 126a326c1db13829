"""How fine the latent grid must be: the likelihood's error measured by refining it (DESIGN 3.3).

The state-space log likelihood converges as ``step^(2 dimension)`` for a Matern process with ``dimension`` states, so
two spacings give its limit by Richardson's extrapolation, and the difference from it the error. The limit from two
coarse spacings is itself a likelihood (:mod:`msrm.gp.extrapolation`), often the cheapest of a given error; its error is
its distance from the limit that a third, finer spacing gives.
Whether residual variances help is a choice by the same measure, made once per backend.

With moments of its cells (:mod:`msrm.latent_grid`) a grid converges as ``step^(2 (dimension + moments))``, too fast to
extrapolate: its error is the distance from a finer grid with one moment more.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeGuard, runtime_checkable

import numpy as np

from msrm.gp.extrapolation import Extrapolated, extrapolation_weight
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import MOST_MOMENTS, Matern
from msrm.nodes import Backend

_ROUNDS = 12  # more mean that the likelihood does not converge
_FINER = 0.8  # the least step from one spacing to the next
_MARGIN = 0.8  # share of the tolerance aimed at, so that the next measurement lies below it
_RESIDUAL_COST = 1.5  # time of an evaluation with residual variances of filtered nodes, over one without
_STEP_POWER = 2.5  # measured growth of the time with 1 / step
_MOMENTS = (1, 2, 3, 4)  # of a cell that are tried
_LIMIT_MOMENTS = 3  # at the first spacing: far more precise than what is tried
_COARSEST = 2.0  # spacing with moments, over the first one: beyond it supports are cut into too few cells
_CHECK = 1.5  # least ratio of a spacing with moments to that which shows its error
_FINEST = 1.0 / 16.0  # of the first spacing: finer ones take a thousand times as long, and more
_PAIR_RATIO = 1.4  # least ratio of two spacings combined: closer ones magnify what is not of the leading order


@runtime_checkable
class GridBackend(Backend, Protocol):
    """A backend on a latent grid."""

    @property
    def step(self) -> float:
        """Spacing, seconds."""
        ...

    @property
    def matern(self) -> Matern:
        """The factors' process."""
        ...

    @property
    def residual(self) -> frozenset[str]:
        """Modalities with residual variances in use."""
        ...

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
    if isinstance(backend, StateSpace) and backend.moments:
        return _Moments(backend, value).measured(backend.step, backend.moments)
    if not isinstance(backend, GridBackend):
        exact = value(backend)
        return LikelihoodError(exact, exact, 0.0)
    return _Series(backend, value).measured(backend.step)


def coarse_backend(backend: Backend) -> Backend:
    """Where a search begins: the coarsest grid with moments, or a backend that has none as it is."""
    if not _has_moments(backend):
        return backend
    made = backend.with_moments(1).at_step(_COARSEST * backend.step)
    return made.with_residual(made.off_grid[0])


def _has_moments(backend: Backend) -> TypeGuard[StateSpace]:
    """Whether cells can carry moments: compiled grids have none."""
    return isinstance(backend, StateSpace) and backend.with_moments(1).moments == 1


def resolved(
    backend: Backend, value: Callable[[Backend], float], tolerance: float, *, extrapolate: bool
) -> tuple[Backend, LikelihoodError]:
    """The cheapest grid whose error is within a tolerance: spacing, moments, residual variances, or two combined.

    Parameters
    ----------
    backend : Backend
        Where the search starts; a backend without a grid is returned as it is.
    value : callable
        Log likelihood with a backend, at the point in question.
    tolerance : float
        Nats.
    extrapolate : bool
        Consider two grids combined, and moments; samplers need the one model that a grid of states is.

    Returns
    -------
    Backend, LikelihoodError
        The error may exceed the tolerance where the log likelihood does not converge.
    """
    if isinstance(backend, Extrapolated):
        backend = backend.coarse
    if not isinstance(backend, GridBackend):
        return backend, measured_error(backend, value)
    if not _has_moments(backend):
        return _of_states(backend, value, tolerance, pairs=extrapolate and isinstance(backend, StateSpace))
    moments = _Moments(backend, value)
    if not extrapolate:
        return _of_states(moments.states, value, tolerance)
    chosen = moments.cheapest(tolerance)
    if chosen is None:
        return _of_states(moments.states, value, tolerance, pairs=True)
    cost, first = moments.cost(*chosen), moments.states.step
    if moments.given.step != chosen[0] and cost > first**-_STEP_POWER + (first / _PAIR_RATIO) ** -_STEP_POWER:
        found, error = _of_states(moments.states, value, tolerance, pairs=True, most=cost)
        # Spacings of states may agree by chance before they converge: the grid that vouches for moments is a witness.
        witness = moments.measured(*chosen).extrapolated
        if abs(error.log_likelihood - witness) > error.error:
            error = replace(error, extrapolated=witness)
        if error.error <= tolerance:
            return found, error
    return moments.backend_at(*chosen), moments.measured(*chosen)


def _of_states(
    backend: GridBackend,
    value: Callable[[Backend], float],
    tolerance: float,
    *,
    pairs: bool = False,
    most: float = np.inf,
) -> tuple[Backend, LikelihoodError]:
    """:func:`resolved` without moments, as far as an evaluation costs no more than ``most``."""
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
    if pairs:
        pair = series.cheapest_pair(backend.step, tolerance, most)
        if pair is not None:
            coarse, fine = map(series.backend.at_step, pair)
            assert isinstance(coarse, StateSpace)
            assert isinstance(fine, StateSpace)
            return Extrapolated(coarse, fine), series.extrapolated(*pair)
    for _ in range(_ROUNDS):
        step = min(series.needed(tolerance), _FINER * found.step)
        if found.error <= tolerance or step**-_STEP_POWER > most or step < series.finest:
            break
        found = series.measured(step)
    return series.backend.at_step(found.step), found


class _Moments:
    """Log likelihoods of one backend at several spacings with several moments.

    A backend that has moments already is where the search ends if its error is within the tolerance.
    """

    def __init__(self, backend: StateSpace, value: Callable[[Backend], float]) -> None:
        self.given, self.value = backend, value
        first = backend.at_step(backend.step / _COARSEST) if backend.moments else backend
        self.states = first.with_moments(0)
        self.values: dict[tuple[float, int], float] = {}

    def backend_at(self, step: float, moments: int) -> StateSpace:
        """The backend with residual variances where Identity needs them: moments take up the filtered nodes'."""
        made = self.states.with_moments(moments).at_step(step)
        return made.with_residual(made.off_grid[0])

    def at(self, step: float, moments: int) -> float:
        made = self.backend_at(step, moments)
        key = made.step, moments
        if key not in self.values:
            self.values[key] = self.value(made)
        return self.values[key]

    def measured(self, step: float, moments: int) -> LikelihoodError:
        """The error at a spacing, from a finer grid with more moments."""
        step, here = self.backend_at(step, moments).step, self.at(step, moments)
        more = min(moments + 1, MOST_MOMENTS)
        finer = [key for key in self.values if _CHECK * key[0] <= step * (1.0 + 1e-9) and key[1] >= more]
        key = min(finer) if finer else (step / _CHECK, more)
        return LikelihoodError(here, self.at(*key), step)

    def cost(self, step: float, moments: int) -> float:
        """Time of an evaluation, up to the factor of :meth:`_Series.cost`: columns a second to a power."""
        columns = 1.0 + moments / self.states.matern.dimension
        return (columns / self.backend_at(step, moments).step) ** _STEP_POWER

    def cheapest(self, tolerance: float) -> tuple[float, int] | None:
        """The spacing and moments of least cost within the tolerance; None where no error is finite or small enough."""
        if self.given.moments:
            held = self.given.step, self.given.moments
            if self.measured(*held).error <= tolerance:
                return held
        limit = self.at(self.states.step, _LIMIT_MOMENTS)
        if not np.isfinite(limit):
            return None
        coarsest = _COARSEST * self.states.step
        needed: dict[int, float] = {}
        for moments in _MOMENTS:
            if needed and self.cost(coarsest, moments) >= min(self.cost(needed[k], k) for k in needed):
                break
            needed[moments] = self._needed(coarsest, moments, abs(self.at(coarsest, moments) - limit), tolerance)
        for _ in range(_ROUNDS):
            moments = min(needed, key=lambda k: self.cost(needed[k], k))
            found = self.measured(needed[moments], moments)
            if found.error <= tolerance:
                return needed[moments], moments
            needed[moments] = self._needed(found.step, moments, found.error, tolerance, _FINER)
        return None

    def _needed(self, step: float, moments: int, error: float, tolerance: float, most: float = 1.0) -> float:
        """The spacing at which the error should be within the tolerance, from that at another."""
        order = 2 * (self.states.matern.dimension + moments)
        wanted = step * min((_MARGIN * tolerance / max(error, 1e-12)) ** (1.0 / order), most)
        return max(wanted, _FINEST * self.states.step)


class _Series:
    """Log likelihoods of one backend at several spacings, and their limit."""

    def __init__(self, backend: GridBackend, value: Callable[[Backend], float]) -> None:
        self.backend, self.value = backend, value
        self.values: dict[float, float] = {}

    @property
    def finest(self) -> float:
        """The smallest spacing tried, seconds."""
        return _FINEST * self.backend.step

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

    def cheapest_pair(self, step: float, tolerance: float, most: float) -> tuple[float, float] | None:
        """Two spacings whose combination is within the tolerance, cheaper than one that is and than ``most``."""
        coarse = self.at(step)[0]
        while coarse / _PAIR_RATIO >= self.finest:
            fine = self.at(coarse / _PAIR_RATIO)[0]
            if coarse**-_STEP_POWER + fine**-_STEP_POWER >= min(self.cost(tolerance), most):
                return None
            if self.extrapolated(coarse, fine).error <= _MARGIN * tolerance:
                return coarse, fine
            coarse = fine
        return None

    def needed(self, tolerance: float) -> float:
        """The spacing at which the error should be within the tolerance."""
        finest = min(self.values)
        error = max(abs(self.values[finest] - self.limit()), 1e-12)
        step = finest * (_MARGIN * tolerance / error) ** (0.5 / self.backend.matern.dimension)
        return min(step, max(self.values))

    def cost(self, tolerance: float) -> float:
        """Time of an evaluation at that spacing, up to a factor."""
        return self.needed(tolerance) ** -_STEP_POWER
