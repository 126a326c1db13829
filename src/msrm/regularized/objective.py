"""The R-MSRM objective with the latents eliminated, its gradient, and its exact parts (DESIGN 2).

For given loadings W and response parameters theta the latents Z minimize a quadratic, solved run by run; by the envelope theorem
the gradient of the minimum is the partial gradient at that Z,

    df/dw_c = 2 (M_c w_c - B_c + ridge_c w_c),     df/dtheta = 2 sum_n (D_n g_n - h_n)' (dH_n/dtheta Z),

so no derivative passes through the factorization. Sums are those of :mod:`msrm.regularized.statistics`.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.problem import Problem
from msrm.regularized.statistics import RowGroup

Array = NDArray[np.float64]

# `energy - 2 h'g + g'Dg` loses digits as the residual shrinks; below this share of the energy it is summed entry by entry.
_EXACT_SHARE = 1e-3


@dataclass(frozen=True)
class Moments:
    """Second moments of what each loading column sees.

    Attributes
    ----------
    second : (pair, K, K)
        Mean of M_c over a pair's columns.
    share : (column,)
        Trace of M_c over the trace of its pair's mean.
    """

    second: Array
    share: Array


@dataclass(frozen=True)
class Evaluation:
    """The objective at one point, latents eliminated.

    Attributes
    ----------
    value : float
    latents : tuple of (time, path, K)
        One per path system.
    loading_gradient : (column, K)
    response_gradient : (parameter,)
    response_curvature : (parameter,)
        Gauss-Newton diagonal with the penalties' curvature.
    moments : Moments
    """

    value: float
    latents: tuple[Array, ...]
    loading_gradient: Array
    response_gradient: Array
    response_curvature: Array
    moments: Moments


class Objective:
    """The objective of one problem.

    Parameters
    ----------
    problem : Problem
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._columns = [[_joined_columns(group) for group in groups] for groups in problem.groups]
        self._widths = np.array([c.stop - c.start for c in problem.columns])

    def latents(self, loading: Array, vector: Array) -> tuple[Array, ...]:
        """The latents that minimize the objective at these loadings (column, K) and response parameters.

        Raises
        ------
        LatentFailure
        """
        return self._solved(loading, vector)[0]

    def evaluate(self, loading: Array, vector: Array) -> Evaluation:
        """Value and gradient at loadings (column, K) and response parameters (parameter,).

        Raises
        ------
        LatentFailure
        """
        problem, filters = self.problem, self.problem.filters
        latents, work = self._solved(loading, vector)
        penalty, response_gradient, curvature = filters.penalty(vector)
        gradient = 2 * problem.ridge[:, None] * loading
        error, value = problem.energy, penalty + 0.5 * float(np.einsum("ck,ck->", gradient, loading))
        moments = _MomentSums(problem, loading.shape[1])
        for system, groups, z in zip(problem.systems, work, latents, strict=True):
            value += sum(system.parts(z).values())
            for step in groups:
                path = step.operator.rows.apply(z[:, step.group.path])
                curved = step.group.curved(path, step.precision)
                error += float(np.einsum("nk,nk->", path, curved - 2 * step.pull))
                second = step.group.moments(path)
                gradient[step.columns] += 2 * (second.times(step.loading) - second.cross)
                moments.add(step.group, second)
                for name, slot in filters.slots(step.group.owner).items():
                    slope = step.operator.slopes[name].apply(z[:, step.group.path])
                    response_gradient[slot] += 2 * float(np.einsum("nk,nk->", curved - step.pull, slope))
                    bent = step.group.curved(slope, step.precision)
                    curvature[slot] += 2 * float(np.einsum("nk,nk->", bent, slope))
        if error < _EXACT_SHARE * problem.energy:
            error = self.squared_error(loading, vector, latents)
        return Evaluation(value + error, latents, gradient, response_gradient, curvature, moments.mean(self._widths))

    def squared_error(self, loading: Array, vector: Array, latents: tuple[Array, ...]) -> float:
        """The weighted squared error alone, entry by entry."""
        values, error = self.problem.filters.values(vector), 0.0
        for s, (system, groups) in enumerate(zip(self.problem.systems, self.problem.groups, strict=True)):
            for group, columns in zip(groups, self._columns[s], strict=True):
                operator = group.operator(self._response(group), values[group.owner], system.grid)
                error += group.squared_error(operator.rows.apply(latents[s][:, group.path]), loading[columns])
        return error

    def parts(self, loading: Array, vector: Array, latents: tuple[Array, ...]) -> dict[str, float]:
        """Every term of the objective at any loadings, response parameters and latents; they sum to it."""
        terms = {"reconstruction": self.squared_error(loading, vector, latents)}
        terms["loading"] = float(np.einsum("c,ck,ck->", self.problem.ridge, loading, loading))
        for system, z in zip(self.problem.systems, latents, strict=True):
            for name, part in system.parts(z).items():
                terms[name] = terms.get(name, 0.0) + part
        terms["response"] = self.problem.filters.penalty(vector)[0]
        return terms

    def loadings(self, vector: Array, latents: tuple[Array, ...]) -> Array:
        """The loadings (column, K) that minimize the objective at these latents: ridge solves of order K."""
        values, size = self.problem.filters.values(vector), latents[0].shape[-1]
        cross = np.zeros((self.problem.n_columns, size))
        second = np.zeros((self.problem.n_columns, size, size))
        for s, (system, groups) in enumerate(zip(self.problem.systems, self.problem.groups, strict=True)):
            for group in groups:
                operator = group.operator(self._response(group), values[group.owner], system.grid)
                moments = group.moments(operator.rows.apply(latents[s][:, group.path]))
                for block in group.blocks:
                    cross[block.columns] += moments.cross[block.own]
                    second[block.columns] += moments.columns_of(block)
        second += self.problem.ridge[:, None, None] * np.eye(size)
        return np.linalg.solve(second, cross[..., None])[..., 0]

    def _response(self, group: RowGroup):  # noqa: ANN202
        return self.problem.filters.response(group.owner)

    def _solved(self, loading: Array, vector: Array) -> tuple[tuple[Array, ...], list[list["_Step"]]]:
        values = self.problem.filters.values(vector)
        latents, work = [], []
        for s, (system, groups) in enumerate(zip(self.problem.systems, self.problem.groups, strict=True)):
            right = np.zeros((system.grid.count, system.n_paths, loading.shape[1]))
            steps, terms = [], []
            for group, columns in zip(groups, self._columns[s], strict=True):
                operator = group.operator(self._response(group), values[group.owner], system.grid)
                own = loading[columns]
                step = _Step(group, columns, own, operator, group.precision(own), group.pull(own))
                right[:, group.path] += operator.rows.adjoint(step.pull)
                terms += [(group.path, band, matrix) for band, matrix in group.bands(operator, step.precision)]
                steps.append(step)
            latents.append(system.solve(terms, right))
            work.append(steps)
        return tuple(latents), work


@dataclass(frozen=True)
class _Step:
    """What one evaluation keeps of a group between the latent solve and the gradient."""

    group: RowGroup
    columns: slice | NDArray[np.intp]
    loading: Array
    operator: "Operator"
    precision: Array
    pull: Array


class _MomentSums:
    """Second moments of the pairs, gathered over groups and runs."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.second = np.zeros((len(problem.pairs), size, size))
        self.trace = np.zeros(problem.n_columns)

    def add(self, group: RowGroup, moments) -> None:
        for block in group.blocks:
            mean, trace = moments.of_block(block)
            self.second[block.pair] += mean
            self.trace[block.columns] += trace

    def mean(self, widths: Array) -> Moments:
        whole = np.trace(self.second, axis1=1, axis2=2)
        safe = np.repeat(np.where(whole > 0, whole, 1.0), widths)
        return Moments(self.second, self.trace / safe)


def _joined_columns(group: RowGroup) -> slice | NDArray[np.intp]:
    """The group's columns among all loadings, as one slice where they are contiguous."""
    blocks = group.blocks
    if all(a.columns.stop == b.columns.start for a, b in zip(blocks[:-1], blocks[1:], strict=True)):
        return slice(blocks[0].columns.start, blocks[-1].columns.stop)
    return np.concatenate([np.arange(b.columns.start, b.columns.stop) for b in blocks])
