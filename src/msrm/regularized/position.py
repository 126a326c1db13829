"""A point of the search: loadings and response parameters as one vector, with the metric that whitens them.

The Hessian at fixed latents is block diagonal, `2 (M_c + ridge_c)` for a loading column, and its inverse is the metric
of :mod:`msrm.quasi_newton`; response parameters are scaled by their Gauss-Newton curvature. M_c is taken as its
pair's mean times the column's share, exact without missing entries.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.latents import LatentFailure
from msrm.regularized.objective import Evaluation, Objective

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Position:
    """An evaluated point.

    Attributes
    ----------
    objective : Objective
    x : (column * K + parameter,)
    evaluation : Evaluation
    """

    objective: Objective
    x: Array
    evaluation: Evaluation

    @property
    def value(self) -> float:
        """The objective."""
        return self.evaluation.value

    @cached_property
    def gradient(self) -> Array:
        """Its gradient."""
        return np.concatenate([self.evaluation.loading_gradient.ravel(), self.evaluation.response_gradient])

    @property
    def loading(self) -> Array:
        """Stacked loadings (column, K)."""
        return self.x[: self._size].reshape(self.objective.problem.n_columns, -1)

    @property
    def vector(self) -> Array:
        """Response parameters."""
        return self.x[self._size :]

    @property
    def _size(self) -> int:
        return len(self.x) - len(self.objective.problem.filters.start)

    @cached_property
    def _axes(self) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh(self.evaluation.moments.second)
        problem = self.objective.problem
        widths = [c.stop - c.start for c in problem.columns]
        stretch = np.repeat(values, widths, axis=0) * self.evaluation.moments.share[:, None]
        return 2 * (stretch + problem.ridge[:, None]), vectors

    def inverse_metric(self, gradient: Array) -> Array:
        """The inverse metric times a gradient."""
        stretch, vectors = self._axes
        out = np.empty_like(gradient)
        loading, turned = gradient[: self._size].reshape(stretch.shape), out[: self._size].reshape(stretch.shape)
        for columns, axes in zip(self.objective.problem.columns, vectors, strict=True):
            turned[columns] = ((loading[columns] @ axes) / stretch[columns]) @ axes.T
        curvature = self.evaluation.response_curvature
        out[self._size :] = gradient[self._size :] / np.where(curvature > 0, curvature, 1.0)
        return out


def position(objective: Objective, loading: Array, vector: Array) -> Position:
    """The point at loadings (column, K) and response parameters.

    Raises
    ------
    LatentFailure
    """
    return Position(objective, np.concatenate([loading.ravel(), vector]), objective.evaluate(loading, vector))


def evaluated(objective: Objective, x: Array) -> Position | None:
    """The point at a vector, or None where the latents cannot be solved for."""
    split = len(x) - len(objective.problem.filters.start)
    try:
        return position(objective, x[:split].reshape(objective.problem.n_columns, -1), x[split:])
    except LatentFailure:
        return None


def stationarity(point: Position) -> dict[str, float]:
    """How far from stationary each block is, as the share of the objective that its own metric promises.

    `g' M^-1 g / 2` over the objective, with the gradient projected on the bounds of response parameters. The latents'
    entry is the residual of their normal equations, relative to the right-hand side.
    """
    filters = point.objective.problem.filters
    split = point._size
    gradient = point.gradient.copy()
    response, vector = gradient[split:], point.vector
    response[((vector <= filters.lower) & (response > 0)) | ((vector >= filters.upper) & (response < 0))] = 0.0
    promised = 0.5 * gradient * point.inverse_metric(gradient)
    scale = max(abs(point.value), np.finfo(float).tiny)
    return {
        "loadings": float(promised[:split].sum()) / scale,
        "responses": float(promised[split:].sum()) / scale,
        "latents": point.objective.latent_residual(point.loading, point.vector, point.evaluation.latents),
    }
