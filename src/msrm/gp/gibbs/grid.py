"""The latent grid that chains run on: one whose error hardly varies over the posterior (DESIGN 3.3).

An error of the log likelihood that is the same everywhere changes no draw, and most of it is: it is a property of the
paths. So the spacing is the coarsest whose error has a small standard deviation over a few states of a trial chain. A
standard deviation of s nats moves no posterior mean by more than about s posterior standard deviations.
"""

import numpy as np

from msrm.gp.data import NodeLayout
from msrm.gp.gibbs.chains import dispersed
from msrm.gp.gibbs.start import balanced
from msrm.gp.gibbs.state import State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.parameters import Specification
from msrm.gp.statespace import StateSpace

__all__ = ["sampling_grid"]

_STATES = 8
_APART = 5  # sweeps between states
_ROUNDS = 8
_MARGIN = 0.9  # share of the tolerance aimed at, so that the next measurement lies below it


def sampling_grid(
    specification: Specification, layout: NodeLayout, backend: StateSpace, start: State, tolerance: float
) -> StateSpace:
    """The coarsest grid, from the backend's own spacing down, whose error varies little.

    Parameters
    ----------
    specification : Specification
    layout : NodeLayout
    backend : StateSpace
        Its spacing is the first that is tried.
    start : State
        The MAP.
    tolerance : float
        Largest standard deviation of the log likelihood's error over the posterior, nats.

    Returns
    -------
    StateSpace
        Residual variances are used for streams that Identity sees off the grid only: with them elsewhere the error
        varies no less, and a sweep is slower.

    Raises
    ------
    FloatingPointError
        When no spacing gives a finite log likelihood at the start, or the error does not fall.
    """
    backend = backend.with_residual(backend.off_grid[0])
    states: list[State] = []
    for _ in range(_ROUNDS):
        states = states or _trial(specification, layout, backend, start)
        here, finer = (_values(specification, layout, one, states) for one in (backend, _half(backend)))
        spread = float(np.std(here - finer)) if len(states) else np.nan
        if spread <= tolerance:
            return backend
        order = 2 * backend.matern.dimension
        ratio = (_MARGIN * tolerance / spread) ** (1 / order) if np.isfinite(spread) else 0.5
        backend = backend.at_step(backend.step * min(max(ratio, 0.5), 0.95))
    raise FloatingPointError(
        f"The log likelihood's error still varies by {spread:.2g} nats at a spacing of {backend.step:.3g} s; raise "
        "likelihood_tolerance, or check the length scale against the sampling times."
    )


def _half(backend: StateSpace) -> StateSpace:
    return backend.at_step(0.5 * backend.step)


def _trial(specification: Specification, layout: NodeLayout, backend: StateSpace, start: State) -> list[State]:
    """States of a short chain; none when its start has no finite density."""
    sweeper, rng = Sweeper(specification, layout, backend), np.random.default_rng(0)
    current = sweeper.start(dispersed(rng, balanced(sweeper, start), sweeper))
    states: list[State] = []
    for sweep in range(_STATES * _APART):
        if not np.isfinite(current.log_likelihood):
            return []
        finished = sweeper.sweep(rng, current, tune=True)
        if sweep % _APART == _APART - 1:
            states.append(finished.state)
        current = sweeper.marginal.current(finished.state, finished.design)
    return states


def _values(specification: Specification, layout: NodeLayout, backend: StateSpace, states: list[State]) -> np.ndarray:
    sweeper = Sweeper(specification, layout, backend)
    return np.array([sweeper.start(state).log_likelihood for state in states])
