"""The state-space likelihood: latent states on a uniform grid, banded posterior precision (DESIGN 3.3, 4).

A run's posterior precision is ``prior (x) I_K + sum_j (a_j a_j') (x) D_j`` over grid points times states, factor within
state, with D shrunk where a node's residual variance rho is used. Log evidence, moments and derivatives follow from its
band Cholesky factor and the band of its inverse (Fisher's identity); no reverse pass. NumPy and LAPACK only: compiled
JAX was no faster on a CPU and costs its compilation.

This module owns one run's algebra and the backend over runs; spacing, error and the use of rho are
:mod:`msrm.gp.refinement`, the grid and the weights :mod:`msrm.latent_grid`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from msrm.banded import BandCholesky, TemporalRows, band_cholesky, kron_band, kron_moment, kron_trace, zero_band
from msrm.latent_grid import (
    Functionals,
    GridPrior,
    Matern,
    Matern32,
    UniformGrid,
    difference_rows,
    functionals,
    pair_windows,
)
from msrm.nodes import Evidence, GroupStatistics, NodeGroup

Values = Mapping[str, Mapping[str, float]]
_ON_GRID = 1e-6  # of a step: clocks given in decimals miss grid points by rounding


@dataclass(frozen=True, eq=False)
class StateSpace:
    """The state-space backend: node groups by run on uniform grids of one spacing.

    Attributes
    ----------
    groups : {run: {modality: NodeGroup}}
    n_factors : int
    step : float
        Grid spacing, seconds.
    matern : Matern
    residual : frozenset of str
        Modalities whose residual variances rho are used, in every evaluation.
    length_scale_slope : bool
        Whether :class:`Evidence` carries the length scale's derivative.
    """

    groups: Mapping[str, Mapping[str, NodeGroup]]
    n_factors: int
    step: float
    matern: Matern = field(default_factory=Matern32)
    residual: frozenset[str] = frozenset()
    length_scale_slope: bool = True

    @cached_property
    def grids(self) -> dict[str, UniformGrid]:
        """The grid of each run: covers every support over the parameter bounds."""
        return {run: covering_grid(groups, self.step) for run, groups in self.groups.items()}

    @classmethod
    def on(
        cls,
        groups: Mapping[str, Mapping[str, NodeGroup]],
        n_factors: int,
        step: float,
        *,
        matern: Matern | None = None,
        length_scale_slope: bool = True,
    ) -> "StateSpace":
        """A backend at a spacing up to ``step`` that suits the clocks, with residual variances for Identity off it."""
        made = cls(groups, n_factors, step, matern or Matern32(), length_scale_slope=length_scale_slope).at_step(step)
        return made.with_residual(made.off_grid[0])

    def at_step(self, step: float) -> "StateSpace":
        """The same at the largest spacing up to ``step`` that puts a regular Identity clock on grid points."""
        period = identity_period(self.groups)
        if period is not None:
            step = period * np.floor(step / period + 1e-9) if step >= period else period / np.ceil(period / step - 1e-9)
        return replace(self, step=float(step))

    def with_residual(self, modalities: frozenset[str]) -> "StateSpace":
        """The same with residual variances used in the given modalities."""
        return replace(self, residual=frozenset(modalities))

    @property
    def off_grid(self) -> tuple[frozenset[str], frozenset[str]]:
        """Modalities with residual variances: those seen through Identity off the grid points, and the filtered ones.

        Differenced nodes have none: their residuals would be correlated.
        """
        identity, filtered = set(), set()
        for run, groups in self.groups.items():
            for modality, group in groups.items():
                if group.pairs is None and not group.response.is_identity:
                    filtered.add(modality)
                elif group.pairs is None:
                    place = (group.times - self.grids[run].start) / self.step
                    if np.any(np.abs(place - np.round(place)) > _ON_GRID):
                        identity.add(modality)
        return frozenset(identity), frozenset(filtered)

    def posterior(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        *,
        slopes: bool = False,
    ) -> "Posterior":
        """The states of one run given the data.

        Parameters
        ----------
        run : str
        response_values : {modality: {name: float}}
        length_scale : float
            Seconds.
        statistics : {modality: GroupStatistics}
        slopes : bool
            Prepare what :meth:`Posterior.evidence` needs for derivatives.
        """
        grid = self.grids[run]
        prior = GridPrior.on(self.matern, self.matern.rate(length_scale) * grid.step, grid.count)
        nodes = {}
        for modality, group in self.groups[run].items():
            made = functionals(
                grid,
                self.matern,
                length_scale,
                group.response,
                response_values.get(modality),
                group.times,
                length_scale_slope=slopes and self.length_scale_slope,
            )
            nodes[modality] = _node_terms(group, made, statistics[modality], modality in self.residual)
        return Posterior.of(self, grid, length_scale, prior, nodes)

    def evidence(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run and its derivatives (:class:`msrm.nodes.Backend`)."""
        posterior = self.posterior(run, response_values, length_scale, statistics, slopes=gradient)
        return posterior.evidence(gradient)


def identity_period(groups: Mapping[str, Mapping[str, NodeGroup]]) -> float | None:
    """The interval of which all Identity times are multiples within each run, None where there is no such clock."""
    clocks = [[group.times for group in run.values() if group.response.is_identity] for run in groups.values()]
    every = np.concatenate([np.diff(np.unique(np.concatenate(times))) for times in clocks if times] or [np.zeros(0)])
    if not len(every):
        return None
    period = float(every.min())
    multiples = np.round(every / period)
    period = float(every.sum() / multiples.sum())
    return period if np.all(np.abs(every - multiples * period) < _ON_GRID * period) else None


def covering_grid(groups: Mapping[str, NodeGroup], step: float) -> UniformGrid:
    """The grid of a run: on the Identity clock with most nodes where there is one, else on the first node's time."""
    identity = [group for group in groups.values() if group.response.is_identity]
    main = max(identity or groups.values(), key=lambda group: len(group.times))
    first, last = np.inf, -np.inf
    for group in groups.values():
        low, high = group.response.envelope()
        first, last = min(first, group.times[0] - high), max(last, group.times[-1] - low)
    return UniformGrid.covering(first, last, step, float(main.times[0]))


@dataclass(frozen=True, eq=False)
class _NodeTerms:
    """One group's part of a run's posterior precision: rows a_j, node weights and factor matrices of D_j.

    ``D_j = sum_c weights[j, c] matrices[c]``: one matrix per distinct D, or the entries of D where those are fewer or
    rho makes every node its own.
    """

    made: Functionals
    rows: TemporalRows
    statistics: GroupStatistics
    weights: np.ndarray
    matrices: np.ndarray
    information: np.ndarray
    constant: float = 0.0
    pairs: np.ndarray | None = None

    @cached_property
    def gram(self) -> np.ndarray:
        return self.rows.gram(self.weights)

    @cached_property
    def precision(self) -> np.ndarray:
        """D_j of every node, (node, K, K), shrunk by rho."""
        return np.tensordot(self.weights, self.matrices, 1)

    def moments(
        self, means: np.ndarray, inverse: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """E[g] (node, K), sums of E[g g'] (P, K, K), windows of Cov(states) D rows (node, width), d/d rho (node,)."""
        second = kron_moment(self.gram, inverse, means.shape[1])
        index, groups = self.statistics.index, len(self.statistics.precision)
        second += np.stack([means[index == p].T @ means[index == p] for p in range(groups)])
        windows = np.zeros(self.rows.weights.shape)
        for weight, matrix in zip(self.weights.T, self.matrices, strict=True):
            windows += weight[:, None] * self.rows.windows(kron_trace(inverse, matrix, self.rows.width))
        return means, second, windows, None


class _EntryTerms(_NodeTerms):
    """Node terms in the basis of D's entries, for many distinct D."""

    def covariance(self, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cov(a_j . states) (node, K, K) and the windows (node, width) summed with D's entries."""
        size = self.statistics.precision.shape[-1]
        upper = np.triu_indices(size)
        out, windows = np.empty((len(self.rows), size, size)), np.zeros(self.rows.weights.shape)
        for i, k in zip(*upper, strict=True):
            entry = np.zeros((size, size))
            entry[i, k] = entry[k, i] = 1.0
            one = self.rows.windows(kron_trace(inverse, entry, self.rows.width))
            windows += self.precision[:, i, k, None] * one
            out[:, i, k] = out[:, k, i] = np.sum(one * self.rows.weights, axis=1) / (1.0 if i == k else 2.0)
        return out, windows

    def moments(
        self, means: np.ndarray, inverse: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        covariance, windows = self.covariance(inverse)
        return means, self.summed(covariance + means[:, :, None] * means[:, None, :]), windows, None

    def summed(self, each: np.ndarray) -> np.ndarray:
        """Sums (P, K, K) over the nodes of each distinct D."""
        out = np.zeros(self.statistics.precision.shape)
        np.add.at(out, self.statistics.index, each)
        return out


@dataclass(frozen=True, eq=False)
class _ResidualTerms(_EntryTerms):
    """Node terms with residual variances: ``g = a . states + e``, ``e ~ N(0, rho)``, S = (1 + rho D)^-1."""

    shrink: np.ndarray = field(kw_only=True)

    def moments(
        self, means: np.ndarray, inverse: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        covariance, windows = self.covariance(inverse)
        rho, shrink = self.made.residual[:, None], self.shrink
        full = self.statistics.precision[self.statistics.index]
        score = self.statistics.information - np.einsum("jik,jk->ji", full, means)
        pulled = np.einsum("jik,jk->ji", shrink, score)
        spread = np.einsum("jik,jkl,jml->jim", self.precision, covariance, self.precision)
        slope = 0.5 * (
            np.sum(pulled**2, axis=1) + np.trace(spread, axis1=1, axis2=2) - np.trace(self.precision, axis1=1, axis2=2)
        )
        nodes = means + rho * pulled
        each = np.einsum("jik,jkl,jml->jim", shrink, covariance, shrink) + rho[:, :, None] * shrink
        return nodes, self.summed(each + nodes[:, :, None] * nodes[:, None, :]), windows, slope


def _node_terms(group: NodeGroup, made: Functionals, statistics: GroupStatistics, residual: bool) -> _NodeTerms:
    rows = made.rows
    if group.pairs is not None and statistics.coefficients is not None:
        rows = difference_rows(rows, group.pairs, statistics.coefficients)
    precision, index, information = statistics.precision, statistics.index, statistics.information
    size = precision.shape[-1]
    entries = size * (size + 1) // 2
    if residual and group.pairs is None and made.residual.any():
        rho = made.residual
        values, vectors = np.linalg.eigh(precision)
        shrunk = 1.0 / (1.0 + rho[:, None] * values[index])
        turn = vectors[index]
        shrink = np.einsum("jik,jk,jlk->jil", turn, shrunk, turn)
        pulled = np.einsum("jik,jk->ji", shrink, information)
        constant = 0.5 * float(np.sum(rho * np.sum(information * pulled, axis=1)) + np.sum(np.log(shrunk)))
        each = np.einsum("jik,jk,jlk->jil", turn, shrunk * values[index], turn)
        if len(precision) == 1:
            weights, matrices = shrunk * values, np.einsum("ik,jk->kij", vectors[0], vectors[0])
        else:
            weights, matrices = _entries(each)
        return _ResidualTerms(made, rows, statistics, weights, matrices, pulled, constant, shrink=shrink)
    if len(precision) <= entries:
        weights = (index[:, None] == np.arange(len(precision))).astype(float)
        return _NodeTerms(made, rows, statistics, weights, precision, information, 0.0, group.pairs)
    weights, matrices = _entries(precision[index])
    return _EntryTerms(made, rows, statistics, weights, matrices, information, 0.0, group.pairs)


def _entries(each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric matrices (node, K, K) as weights (node, entry) of unit symmetric matrices (entry, K, K)."""
    rows, columns = np.triu_indices(each.shape[-1])
    units = np.zeros((len(rows), *each.shape[1:]))
    units[np.arange(len(rows)), rows, columns] = units[np.arange(len(rows)), columns, rows] = 1.0
    return each[:, rows, columns], units


@dataclass(frozen=True, eq=False)
class Posterior:
    """Latent states of one run given its data: N(mean, precision^-1) over (grid point, state, factor).

    Attributes
    ----------
    grid : UniformGrid
    prior : GridPrior
    nodes : {modality: node terms}
    factor : BandCholesky
        Of the posterior precision.
    mean : (grid point * state, factor)
    log_evidence : float
    """

    backend: StateSpace
    grid: UniformGrid
    length_scale: float
    prior: GridPrior
    nodes: dict[str, _NodeTerms]
    factor: BandCholesky
    mean: np.ndarray
    log_evidence: float

    @classmethod
    def of(
        cls,
        backend: StateSpace,
        grid: UniformGrid,
        length_scale: float,
        prior: GridPrior,
        nodes: dict[str, _NodeTerms],
    ) -> "Posterior":
        """Assemble and factor the posterior precision."""
        size, states = backend.n_factors, grid.count * backend.matern.dimension
        width = max([2 * backend.matern.dimension, *(terms.rows.width for terms in nodes.values())])
        band = zero_band(width * size - 1, states * size)
        information = np.zeros((states, size))
        kron_band(prior.band(), np.eye(size), band)
        for terms in nodes.values():
            kron_band(terms.gram, terms.matrices, band)
            information += terms.rows.adjoint(terms.information)
        factor = band_cholesky(band, overwrite=True)
        if not factor.ok:
            return cls(backend, grid, length_scale, prior, nodes, factor, information * np.nan, np.nan)
        mean = factor.solve(information.ravel()).reshape(states, size)
        log_evidence = (
            0.5 * (size * prior.log_determinant - factor.log_determinant)
            + 0.5 * float(np.sum(mean * information))
            + sum(terms.constant for terms in nodes.values())
        )
        return cls(backend, grid, length_scale, prior, nodes, factor, mean, log_evidence)

    def evidence(self, gradient: bool = True) -> Evidence:
        """The log evidence and, by Fisher's identity from the band of the inverse, its derivatives."""
        if not self.factor.ok or not np.isfinite(self.log_evidence):
            return Evidence.failed(self.factor.diagnostic or "the log evidence is not finite")
        if not gradient:
            return Evidence(self.log_evidence)
        inverse = self.factor.inverse_band()
        mean, second, slopes, coefficients = {}, {}, {}, {}
        length_scale = self._prior_slope(inverse) if self.backend.length_scale_slope else 0.0
        for modality, terms in self.nodes.items():
            state_means = terms.rows.apply(self.mean)
            mean[modality], second[modality], windows, residual = terms.moments(state_means, inverse)
            score = terms.information - np.einsum("jik,jk->ji", terms.precision, state_means)
            columns = terms.rows.first[:, None] + np.arange(terms.rows.width)
            on_rows = np.einsum("jwk,jk->jw", self.mean[columns], score) - windows
            if terms.pairs is not None and terms.statistics.coefficients is not None:
                on_rows, coefficients[modality] = _through_pairs(
                    terms.made.rows, terms.pairs, terms.statistics.coefficients, on_rows
                )
            slopes[modality] = {name: float(np.sum(on_rows * of.weights)) for name, of in terms.made.row_slopes.items()}
            if residual is not None:
                for name, of in terms.made.residual_slopes.items():
                    slopes[modality][name] += float(residual @ of)
            length_scale += slopes[modality].pop("length_scale", 0.0)
        return Evidence(self.log_evidence, True, "", mean, second, slopes, length_scale, coefficients)

    def _prior_slope(self, inverse: np.ndarray) -> float:
        """The length scale's derivative through the prior of the states."""
        s, size, count = self.backend.matern.dimension, self.backend.n_factors, self.grid.count
        total = kron_trace(inverse, np.eye(size), 2 * s).T.reshape(count, s, 2 * s)
        within, across = np.empty((count, s, s)), np.empty((count - 1, s, s))
        for j in range(s):
            within[:, j:, j] = within[:, j, j:] = total[:, j, : s - j]
            across[:, :, j] = total[:-1, j, s - j : 2 * s - j]
        states = self.mean.reshape(count, s, size)
        within += states @ np.swapaxes(states, 1, 2)
        across += states[1:] @ np.swapaxes(states[:-1], 1, 2)
        moments = within[:-1].sum(axis=0), across.sum(axis=0), within[1:].sum(axis=0)
        per_second = -self.prior.x / self.length_scale
        return per_second * self.prior.slope(moments, size)


def _through_pairs(
    rows: TemporalRows, pairs: np.ndarray, coefficients: np.ndarray, on_pairs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives in differenced rows (node, width) as those in the rows themselves and in the coefficients."""
    _, offsets, _ = pair_windows(rows, pairs)
    out, slopes = np.zeros(rows.weights.shape), np.empty(pairs.shape)
    for k in range(2):
        seen = np.take_along_axis(on_pairs, offsets[:, k, None] + np.arange(rows.width), axis=1)
        slopes[:, k] = np.sum(seen * rows.weights[pairs[:, k]], axis=1)
        np.add.at(out, pairs[:, k], coefficients[:, k, None] * seen)
    return out, slopes
