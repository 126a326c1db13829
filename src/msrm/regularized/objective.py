"""The R-MSRM objective with the latents eliminated, its gradient, and its exact parts (DESIGN 2).

For given loadings W and response parameters theta the latents Z minimize a quadratic, solved run by run; by the
envelope theorem the gradient of the minimum is the partial gradient at that Z,

    df/dw_c = 2 (M_c w_c - B_c + ridge_c w_c),     df/dtheta = 2 sum_n (D_n g_n - h_n)' (dH_n/dtheta Z),

so no derivative passes through the factorization. Sums are those of :mod:`msrm.regularized.statistics`.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.problem import Problem
from msrm.regularized.statistics import Moments as RowMoments
from msrm.regularized.statistics import Operator, RowGroup
from msrm.responses import Response

Array = NDArray[np.float64]

# `energy - 2 h'g + g'Dg` loses digits as the residual shrinks; below this share it is summed entry by entry.
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
        self.group_columns = [[_joined_columns(group) for group in groups] for groups in problem.groups]
        self._widths = np.array([c.stop - c.start for c in problem.columns])

    def latents(self, loading: Array, vector: Array) -> tuple[Array, ...]:
        """The latents that minimize the objective at these loadings (column, K) and response parameters.

        Raises
        ------
        LatentFailure
        """
        return self._solutions(loading, self._steps(loading, vector))

    def evaluate(self, loading: Array, vector: Array, latents: tuple[Array, ...] | None = None) -> Evaluation:
        """Value and gradient at loadings (column, K) and response parameters (parameter,).

        Parameters
        ----------
        latents : tuple of (time, path, K), optional
            Hold these instead of eliminating the latents.

        Raises
        ------
        LatentFailure
        """
        problem, filters = self.problem, self.problem.filters
        work = self._steps(loading, vector)
        latents = self._solutions(loading, work) if latents is None else latents
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
        return float(self.column_sums(loading, vector, latents)[0].sum())

    def column_sums(self, loading: Array, vector: Array, latents: tuple[Array, ...]) -> tuple[Array, Array]:
        """Weighted squared error (column,) and the energy of each factor alone (column, K), entry by entry."""
        values = self.problem.filters.values(vector)
        error, energy = np.zeros(self.problem.n_columns), np.zeros_like(loading)
        for s, (system, groups) in enumerate(zip(self.problem.systems, self.problem.groups, strict=True)):
            for group, columns in zip(groups, self.group_columns[s], strict=True):
                operator = group.operator(self._response(group), values[group.owner], system.grid)
                path = operator.rows.apply(latents[s][:, group.path])
                error[columns] += group.squared_errors(path, loading[columns])
                energy[columns] += group.factor_energies(path, loading[columns])
        return error, energy

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

    def latent_residual(self, loading: Array, vector: Array, latents: tuple[Array, ...]) -> float:
        """Largest residual of the latents' normal equations, relative to their right-hand sides."""
        worst = 0.0
        for system, steps, z in zip(self.problem.systems, self._steps(loading, vector), latents, strict=True):
            right, left = np.zeros_like(z), system.pressed(z)
            for step in steps:
                rows, path = step.operator.rows, step.group.path
                right[:, path] += rows.adjoint(step.pull)
                left[:, path] += rows.adjoint(step.group.curved(rows.apply(z[:, path]), step.precision))
            worst = max(worst, float(np.linalg.norm(left - right) / max(np.linalg.norm(right), np.finfo(float).tiny)))
        return worst

    def _steps(self, loading: Array, vector: Array) -> list[list["_Step"]]:
        values = self.problem.filters.values(vector)
        work = []
        for system, groups, columns in zip(self.problem.systems, self.problem.groups, self.group_columns, strict=True):
            steps = []
            for group, own in zip(groups, columns, strict=True):
                operator = group.operator(self._response(group), values[group.owner], system.grid)
                part = loading[own]
                steps.append(_Step(group, own, part, operator, group.precision(part), group.pull(part)))
            work.append(steps)
        return work

    def _solutions(self, loading: Array, work: list[list["_Step"]]) -> tuple[Array, ...]:
        latents = []
        for system, steps in zip(self.problem.systems, work, strict=True):
            right = np.zeros((system.grid.count, system.n_paths, loading.shape[1]))
            terms = []
            for step in steps:
                right[:, step.group.path] += step.operator.rows.adjoint(step.pull)
                bands = step.group.bands(step.operator, step.precision)
                terms += [(step.group.path, band, matrix) for band, matrix in bands]
            latents.append(system.solve(terms, right))
        return tuple(latents)

    def _response(self, group: RowGroup) -> Response:
        return self.problem.filters.response(group.owner)


@dataclass(frozen=True)
class _Step:
    """What one evaluation keeps of a group between the latent solve and the gradient."""

    group: RowGroup
    columns: slice | NDArray[np.intp]
    loading: Array
    operator: Operator
    precision: Array
    pull: Array


class _MomentSums:
    """Second moments of the pairs, gathered over groups and runs."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.second = np.zeros((len(problem.pairs), size, size))
        self.trace = np.zeros(problem.n_columns)

    def add(self, group: RowGroup, moments: RowMoments) -> None:
        for block in group.blocks:
            mean, trace = moments.of_block(block)
            self.second[block.pair] += mean
            self.trace[block.columns] += trace

    def mean(self, widths: NDArray[np.intp]) -> Moments:
        whole = np.trace(self.second, axis1=1, axis2=2)
        safe = np.where(whole > 0, whole, 1.0).repeat(widths)
        return Moments(self.second, self.trace / safe)


def _joined_columns(group: RowGroup) -> slice | NDArray[np.intp]:
    """The group's columns among all loadings, as one slice where they are contiguous."""
    blocks = group.blocks
    if all(a.columns.stop == b.columns.start for a, b in pairwise(blocks)):
        return slice(blocks[0].columns.start, blocks[-1].columns.stop)
    return np.concatenate([np.arange(b.columns.start, b.columns.stop) for b in blocks])
