"""Block descent: latents, loadings, responses and scale in turn, each to its own minimum.

Slow near the optimum (each block waits for the others) but every step is a closed form or a search in a few
coordinates: the fallback when the joint search is stuck, and the oracle of its endpoint.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.quasi_newton import minimize
from msrm.regularized.gauge import Latents, balanced
from msrm.regularized.objective import Objective

Array = NDArray[np.float64]

_RESPONSE_STEPS = 8


@dataclass(frozen=True)
class _ResponsePoint:
    """Response parameters at fixed loadings and latents."""

    x: Array
    value: float
    gradient: Array
    curvature: Array

    def inverse_metric(self, gradient: Array) -> Array:
        return gradient / np.where(self.curvature > 0, self.curvature, 1.0)


def best_responses(objective: Objective, loading: Array, vector: Array, latents: Latents) -> Array:
    """Response parameters within bounds that lower the objective at these loadings and latents."""
    filters = objective.problem.filters
    if not len(vector):
        return vector

    def at(x: Array) -> _ResponsePoint:
        found = objective.evaluate(loading, x, latents)
        return _ResponsePoint(x, found.value, found.response_gradient, found.response_curvature)

    return minimize(at, at(vector), filters.lower, filters.upper, max_iter=_RESPONSE_STEPS, tol=1e-12).point.x


def sweep(objective: Objective, loading: Array, vector: Array) -> tuple[Array, Array, Latents]:
    """One round: latents, loadings, responses, then the balance of loadings against latents.

    Parameters
    ----------
    loading : (column, K)
    vector : (parameter,)

    Returns
    -------
    loading, vector, latents
        Never a higher objective than before.
    """
    latents = objective.latents(loading, vector)
    loading = objective.loadings(vector, latents)
    vector = best_responses(objective, loading, vector, latents)
    loading, latents = balanced(objective.problem, loading, latents)
    return loading, vector, latents


def alternate(
    objective: Objective, loading: Array, vector: Array, *, max_iter: int, tol: float
) -> tuple[Array, Array, Latents, list[float]]:
    """Sweep until the objective falls by less than `tol` of itself, or `max_iter` times.

    Returns
    -------
    loading, vector, latents, and the objective after every sweep.
    """
    history: list[float] = []
    latents: Latents = ()
    for _ in range(max_iter):
        loading, vector, latents = sweep(objective, loading, vector)
        history.append(sum(objective.parts(loading, vector, latents).values()))
        if len(history) > 1 and history[-2] - history[-1] <= tol * abs(history[-1]):
            break
    return loading, vector, latents, history
