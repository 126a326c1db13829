"""The MAP of GP-MSRM: a race of starts on a coarse grid, then the winner on the grid that its likelihood needs.

Every start takes a few EM steps, then whitened quasi-Newton steps with real bounds (:mod:`msrm.gp.ascent`,
:mod:`msrm.quasi_newton`). Starts that fall behind, or fall into the basin of a better one, are left where they
are; the rest are run to convergence. The winner goes on at the spacing that :mod:`msrm.gp.refinement` asks for, until
the error measured at its end is within the tolerance (DESIGN 5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from msrm.gp.ascent import Ascent, MapPoint, expectation_steps
from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import Parameters
from msrm.gp.refinement import LikelihoodError, coarse_backend, measured_error, resolved
from msrm.gp.starts import Start
from msrm.nodes import Backend
from msrm.quasi_newton import INTERRUPTED, Outcome, QuasiNewton, minimize
from msrm.runtime import progress

_EM_STEPS = 6
# Iterations after which the field is looked at, and the nats by which a start may trail then and still be run on.
_HEATS = {6: 1000.0, 12: 200.0, 16: 200.0, 20: 200.0, 25: 200.0, 30: 200.0}
_SAME = 0.02  # of a scalar's range (or value): closer ends are one basin
_ALIKE = 1.0  # nats within which ends of one basin lie
_RIVAL = 10.0  # nats within which another basin is worth a warning
_COARSE_TOLERANCE = 1e-4  # nats that the coarse search may leave
_STAGES = 3  # refinements after which the error is reported as it is


@dataclass(frozen=True)
class StartRecord:
    """How one start fared.

    Attributes
    ----------
    name : str
    first, last : float
        Objective at the start and where it was left; of the best on the final grid, of the others on the coarse one.
    n_iter, n_evaluations : int
    status : str
        ``"best"``, or why it was left.
    scalars : {name: float}
        Response parameters, timescales and length scale where it was left.
    """

    name: str
    first: float
    last: float
    n_iter: int
    n_evaluations: int
    status: str
    scalars: dict[str, float]


@dataclass(frozen=True, eq=False)
class MapResult:
    """The maximum found and the evidence that it is one.

    Attributes
    ----------
    point : MapPoint
    likelihood : Likelihood
        On the grid of ``point``.
    error : LikelihoodError
    converged : bool
    reason : str
    decrement : float
        Newton decrement of the projected gradient, nats.
    n_iter, n_evaluations : int
        Over all starts and grids.
    starts : tuple of StartRecord
    at_bounds : tuple of str
    rivals : tuple of StartRecord
        Other basins that end within 10 nats, on the coarse grid.
    history : (iteration,)
        Objective of the winner after every accepted step; it falls within a grid.
    """

    point: MapPoint
    likelihood: Likelihood
    error: LikelihoodError
    converged: bool
    reason: str
    decrement: float
    n_iter: int
    n_evaluations: int
    starts: tuple[StartRecord, ...]
    at_bounds: tuple[str, ...]
    rivals: tuple[StartRecord, ...]
    history: np.ndarray


@dataclass
class _Runner:
    start: Start
    point: MapPoint | None
    first: float
    outcome: Outcome[MapPoint] | None = None
    model: QuasiNewton | None = None
    n_iter: int = 0
    n_evaluations: int = 0
    history: list[float] = field(default_factory=list)
    status: str = ""

    @property
    def value(self) -> float:
        return np.inf if self.point is None else self.point.value


def maximize(
    likelihood: Likelihood,
    starts: Sequence[Callable[[], Sequence[Start]]],
    *,
    tolerance: float,
    likelihood_tolerance: float,
    max_iter: int,
    show: bool | None = None,
) -> MapResult:
    """The MAP from several starts.

    Parameters
    ----------
    likelihood : Likelihood
        The search begins on a grid coarser than its own.
    starts : sequence of callable
        Each makes some starts; made one after another, so that an interrupt keeps what there is.
    tolerance : float
        Newton decrement of the projected gradient at which the search has converged, nats.
    likelihood_tolerance : float
        Error of the log likelihood that the final grid may have, nats.
    max_iter : int
        Iterations of one start, over all grids.
    show : bool, optional
        Progress bar; on a terminal by default.

    Raises
    ------
    ValueError
        If the objective is not finite at any start; the message names the term.
    """
    with progress(max_iter, desc="MAP", enabled=show) as bar:
        search = _Search(likelihood.with_backend(coarse_backend(likelihood.backend)), max_iter, bar)
        try:
            for make in starts:
                search.enter(make())
            search.race(max(tolerance, _COARSE_TOLERANCE))
        except KeyboardInterrupt:
            search.interrupted = True
        best = search.best()
        return _finished(search, best, tolerance, likelihood_tolerance)


class _Search:
    """Starts on their way."""

    def __init__(self, likelihood: Likelihood, max_iter: int, bar: Any) -> None:
        self.likelihood, self.max_iter, self.bar = likelihood, max_iter, bar
        self.runners: list[_Runner] = []
        self.interrupted = False

    def enter(self, starts: Sequence[Start]) -> None:
        ascent = Ascent(self.likelihood)
        for start in starts:
            point = None if start.refused else ascent.point(ascent.packed(start.parameters))
            first = np.inf if point is None else point.value
            status = "" if point else start.refused or "not finite at the start"
            self.runners.append(_Runner(start, point, first, status=status))

    def race(self, tolerance: float) -> None:
        for runner in self.alive():
            assert runner.point is not None
            runner.point = expectation_steps(runner.point, _EM_STEPS)
            runner.n_evaluations += _EM_STEPS
            with_curvature = runner.point.ascent.with_curvature(runner.point)
            runner.n_evaluations += len(with_curvature.scalars)
            runner.point = replace(runner.point, ascent=with_curvature)
        for heat, behind in _HEATS.items():
            for runner in self.alive():
                self.run(runner, min(heat, self.max_iter), tolerance)
            self.judge(behind, final=False)
        for runner in self.alive():
            self.run(runner, self.max_iter, tolerance)
        self.judge(np.inf, final=True)

    def alive(self) -> list[_Runner]:
        return [runner for runner in self.runners if not runner.status]

    def run(self, runner: _Runner, limit: int, tolerance: float) -> None:
        """Continue a start up to a number of iterations."""
        if runner.point is None or (runner.outcome is not None and runner.outcome.converged):
            return
        lower, upper = runner.point.ascent.bounds
        outcome = minimize(
            runner.point.ascent.point,
            runner.point,
            lower,
            upper,
            max_iter=limit - runner.n_iter,
            tol=tolerance / max(abs(runner.point.value), 1.0),
            watch=lambda point: self.show(runner.start.name, point),
            model=runner.model,
        )
        runner.outcome, runner.point, runner.model = outcome, outcome.point, outcome.model
        runner.n_iter += outcome.n_iter
        runner.n_evaluations += outcome.n_evaluations
        runner.history += outcome.history
        if outcome.reason == INTERRUPTED:
            raise KeyboardInterrupt

    def show(self, name: str, point: MapPoint) -> None:
        self.bar.update(1)
        slope = float(np.sqrt(max(point.gradient @ point.inverse_metric(point.gradient), 0.0)))
        self.bar.set_postfix_str(f"{name}: objective {point.value:.3f}, gradient {slope:.2g}")

    def judge(self, behind: float, *, final: bool) -> None:
        """Leave starts that trail or that share the basin of a better one."""
        field_ = sorted(self.alive(), key=lambda runner: runner.value)
        for i, runner in enumerate(field_[1:], start=1):
            ahead = [better for better in field_[:i] if not better.status]
            same = next((better for better in ahead if _same_basin(runner, better, final=final)), None)
            if same is not None:
                runner.status = f"joins the basin of {same.start.name!r}"
            elif runner.value > field_[0].value + behind:
                runner.status = f"left {runner.value - field_[0].value:.0f} nats behind {field_[0].start.name!r}"

    def best(self) -> _Runner:
        ready = [runner for runner in self.runners if runner.point is not None]
        if not ready:
            self.fail()
        return min(ready, key=lambda runner: runner.value)

    def fail(self) -> None:
        if not self.runners:
            raise KeyboardInterrupt
        start = self.runners[0].start
        reason = Ascent(self.likelihood).diagnostic(start.parameters) or "a gradient is not finite; rescale the data"
        raise ValueError(
            f"The objective is not finite at any of {len(self.runners)} starts. At {start.name!r}: {reason}."
        )


def _same_basin(first: _Runner, second: _Runner, *, final: bool) -> bool:
    """Whether scalars agree; at the end, or where there are none, also the objectives: loadings have basins, too."""
    a, b = first.point, second.point
    assert a is not None
    assert b is not None
    if (final or not a.ascent.scalars) and abs(a.value - b.value) > _ALIKE:
        return False
    lower, upper = a.ascent.bounds
    for name in a.ascent.scalars:
        at = a.ascent.layout.slices[name].start
        room = upper[at] - lower[at]
        if abs(a.x[at] - b.x[at]) > _SAME * (room if np.isfinite(room) else abs(a.x[at])):
            return False
    return True


def _finished(search: _Search, best: _Runner, tolerance: float, likelihood_tolerance: float) -> MapResult:
    """The winner on the grid its likelihood needs, with the evidence."""
    point = best.point
    assert point is not None
    rivals = () if search.interrupted else _rivals(search, best)
    reason, decrement, converged = INTERRUPTED, np.inf, False
    likelihood, error = search.likelihood, None
    try:
        for _ in range(_STAGES):
            if search.interrupted:
                break
            parameters = point.parameters
            value = partial(_value_on, likelihood, parameters)
            backend, error = resolved(likelihood.backend, value, likelihood_tolerance, extrapolate=True)
            if converged and _same_grid(backend, likelihood.backend):
                break
            likelihood = likelihood.with_backend(backend)
            ascent = point.ascent.on(likelihood)
            again = ascent.point(point.x)
            if again is None:
                reason = f"not finite on the finer grid: {likelihood.diagnostic(parameters)}"
                break
            best.point = again
            best.outcome = None
            search.run(best, search.max_iter, tolerance)
            outcome = best.outcome
            assert outcome is not None
            point, converged, reason = outcome.point, outcome.converged, outcome.reason
            decrement = outcome.decrement * max(abs(point.value), 1.0)
        else:
            error = measured_error(likelihood.backend, partial(_value_on, likelihood, point.parameters))
    except KeyboardInterrupt:
        search.interrupted = True
        point = best.point or point
    if error is None or search.interrupted:
        error = LikelihoodError(np.nan, np.nan, getattr(likelihood.backend, "step", 0.0))
        converged, reason = False, INTERRUPTED
    best.status = "best"
    best.point = point
    return MapResult(
        point,
        point.ascent.likelihood,
        error,
        converged,
        reason,
        float(decrement),
        sum(runner.n_iter for runner in search.runners),
        sum(runner.n_evaluations for runner in search.runners),
        tuple(_record(runner) for runner in search.runners),
        _at_bounds(point),
        rivals,
        np.array(best.history),
    )


def _value_on(likelihood: Likelihood, parameters: Parameters, backend: Backend) -> float:
    return likelihood.with_backend(backend).value(parameters)


def _same_grid(first: Backend, second: Backend) -> bool:
    facts = "step", "coarse_step", "residual", "moments"
    return all(getattr(first, name, None) == getattr(second, name, None) for name in facts)


def _record(runner: _Runner) -> StartRecord:
    scalars: dict[str, float] = {}
    if runner.point is not None:
        scalars = {name: float(runner.point.parameters[name]) for name in runner.point.ascent.scalars}
    done = runner.outcome is not None and runner.outcome.converged
    status = runner.status or ("another basin" if done else "not finished")
    return StartRecord(
        runner.start.name, runner.first, runner.value, runner.n_iter, runner.n_evaluations, status, scalars
    )


def _at_bounds(point: MapPoint) -> tuple[str, ...]:
    layout, bounds = point.ascent.layout, point.ascent.bounds
    out = []
    for name, named in layout.bounds.items():
        at = layout.slices[name].start
        for side, bound, value in zip(("lower", "upper"), bounds, named, strict=True):
            if point.x[at] == bound[at]:
                out.append(f"{name} at its {side} bound {value:g}")
    return tuple(out)


def _rivals(search: _Search, best: _Runner) -> tuple[StartRecord, ...]:
    return tuple(
        _record(runner)
        for runner in search.runners
        if runner is not best
        and not runner.status
        and runner.outcome is not None
        and runner.outcome.converged
        and runner.value < best.value + _RIVAL
    )
