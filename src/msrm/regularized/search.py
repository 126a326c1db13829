"""From starts to the fitted point: race, search, fall back, and the evidence of each start.

The starts of one initialization run a few iterations each; the best goes on to convergence. Where the joint search
stops short, a few rounds of alternation move it and it resumes. Initializations are independent jobs with one
BLAS thread each, so that any number of processes gives the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msrm.quasi_newton import INTERRUPTED, Outcome, minimize
from msrm.regularized.alternation import alternate
from msrm.regularized.objective import Objective
from msrm.regularized.position import Position, evaluated, position, stationarity
from msrm.regularized.problem import Problem
from msrm.regularized.settings import Settings
from msrm.regularized.starts import Beginning, beginnings
from msrm.runtime import blas_threads
from msrm.runtime import progress as progress_bar
from msrm.runtime.workers import parallel_map, worker_count

Array = NDArray[np.float64]

_RACE_STEPS = 8
_RESCUES = 3
_RESCUE_SWEEPS = 5


@dataclass(frozen=True)
class Start:
    """One start of a fit and what came of it.

    Attributes
    ----------
    label : str
        How it was made.
    first_responses, responses : dict from path to float
        Free response parameters `response/{modality}/{name}` (or `.../{participant}/...`) at the start and the end.
    objectives : (iteration + 1,)
        At the start and after every accepted step; never increasing.
    objective : float
    n_evaluations : int
    converged : bool
    reason : str
        Why it stopped.
    stationarity : dict
        Of loadings, responses and latents, at the end.
    """

    label: str
    first_responses: dict[str, float]
    responses: dict[str, float]
    objectives: Array
    n_evaluations: int
    converged: bool
    reason: str
    stationarity: dict[str, float]

    @property
    def objective(self) -> float:
        """The last objective."""
        return float(self.objectives[-1])

    @property
    def n_iter(self) -> int:
        """Accepted steps."""
        return len(self.objectives) - 1


@dataclass(frozen=True)
class Found:
    """The best point of one initialization and the evidence of all its starts, the winner's first.

    Attributes
    ----------
    loading : (column, K)
    vector : (parameter,)
    starts : tuple of Start
    """

    loading: Array
    vector: Array
    starts: tuple[Start, ...]

    @property
    def interrupted(self) -> bool:
        """Whether the keyboard ended it."""
        return any(start.reason == INTERRUPTED for start in self.starts)


def search(problem: Problem, settings: Settings, progress: bool | None) -> tuple[Array, Array, tuple[Start, ...]]:
    """Run every initialization.

    Returns
    -------
    loading, vector
        The best point.
    tuple of Start
        The evidence of all starts, the winner first.
    """
    if worker_count(settings.n_jobs, settings.n_init) == 1:
        found = _one_by_one(problem, settings, progress)
    else:
        jobs = [(number,) for number in range(settings.n_init)]
        try:
            found = parallel_map(
                initialization,
                jobs,
                n_jobs=settings.n_jobs,
                shared=(problem, settings),
                desc="starts",
                progress=progress,
            )
        except KeyboardInterrupt:
            # What the workers had found went with them: the first start's first step is left.
            first = initialization(problem, replace(settings, max_iter=1), 0)
            found = [replace(first, starts=tuple(replace(start, reason=INTERRUPTED) for start in first.starts))]
    best = min(range(len(found)), key=lambda i: found[i].starts[0].objective)
    order = [best, *(i for i in range(len(found)) if i != best)]
    return found[best].loading, found[best].vector, tuple(start for i in order for start in found[i].starts)


def _one_by_one(problem: Problem, settings: Settings, progress: bool | None) -> list[Found]:
    """The initializations in this process, until one is interrupted."""
    found: list[Found] = []
    total = settings.n_init * settings.max_iter
    with blas_threads(1), progress_bar(total, desc="R-MSRM iterations", enabled=progress) as bar:

        def watch(point: Position) -> None:
            bar.update()
            bar.set_postfix_str(f"objective {point.value:.6g}", refresh=False)

        for number in range(settings.n_init):
            found.append(initialization(problem, settings, number, watch))
            if found[-1].interrupted:
                break
    return found


def initialization(
    problem: Problem, settings: Settings, number: int, watch: Callable[[Position], None] | None = None
) -> Found:
    """One initialization: its starts raced, the best one searched to the end."""
    objective = Objective(problem)
    begun = beginnings(objective, settings.n_factors, settings.init, number, settings.seed)
    races = [_Race(objective, one) for one in begun]
    for race in races if len(races) > 1 else ():
        race.run(min(_RACE_STEPS, settings.max_iter), settings.tol, watch)
        if race.interrupted:
            break
    interrupted = any(race.interrupted for race in races)
    races.sort(key=lambda race: race.outcome.point.value)
    if not interrupted:
        races[0].finish(settings.max_iter, settings.tol, watch)
    elif not races[0].interrupted:
        races[0].outcome.reason = INTERRUPTED
    point = races[0].outcome.point
    return Found(point.loading, point.vector, tuple(race.evidence() for race in races))


class _Race:
    """A start on its way."""

    def __init__(self, objective: Objective, begun: Beginning) -> None:
        filters = objective.problem.filters
        self.objective, self.begun = objective, begun
        n_free = objective.problem.n_columns * begun.loading.shape[1]
        self.lower = np.concatenate([np.full(n_free, -np.inf), filters.lower])
        self.upper = np.concatenate([np.full(n_free, np.inf), filters.upper])
        point = position(objective, begun.loading, begun.vector)
        self.outcome: Outcome[Position] = Outcome(point, history=[point.value])

    @property
    def interrupted(self) -> bool:
        return self.outcome.reason == INTERRUPTED

    def run(self, max_iter: int, tol: float, watch: Callable[[Position], None] | None) -> None:
        """Search on for up to so many iterations more."""
        before = self.outcome
        after = minimize(
            lambda x: evaluated(self.objective, x),
            before.point,
            self.lower,
            self.upper,
            max_iter=max_iter,
            tol=tol,
            watch=watch,
            model=before.model,
        )
        after.history = before.history + after.history[1:]
        after.n_iter += before.n_iter
        after.n_evaluations += before.n_evaluations
        self.outcome = after

    def finish(self, max_iter: int, tol: float, watch: Callable[[Position], None] | None) -> None:
        """Search to the end; alternate and resume where no step helps though the gradient does not vanish."""
        self.run(max_iter - self.outcome.n_iter, tol, watch)
        for _ in range(_RESCUES):
            if self.outcome.converged or self.interrupted or self.outcome.n_iter >= max_iter:
                return
            point = self.outcome.point
            loading, vector, _, _ = alternate(
                self.objective, point.loading, point.vector, max_iter=_RESCUE_SWEEPS, tol=tol
            )
            moved = position(self.objective, loading, vector)
            if not moved.value < point.value:
                return
            self.outcome.point = moved
            self.outcome.history.append(moved.value)
            self.outcome.n_iter += 1
            self.run(max_iter - self.outcome.n_iter, tol, watch)

    def evidence(self) -> Start:
        filters = self.objective.problem.filters
        point = self.outcome.point
        return Start(
            self.begun.label,
            filters.named(self.begun.vector),
            filters.named(point.vector),
            np.array(self.outcome.history),
            self.outcome.n_evaluations,
            self.outcome.converged,
            self.outcome.reason,
            stationarity(point),
        )
