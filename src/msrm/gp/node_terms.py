"""A node group's part of a run's posterior precision and what the posterior says of its nodes (DESIGN 3.3).

``D_j = sum_c weights[j, c] matrices[c]``: one matrix per distinct D, or the entries of D where those are fewer or a
residual variance makes every node its own. Four classes, one interface: few distinct D; many; nodes with residual
variances rho, ``g = a . states + e`` with ``e ~ N(0, rho)`` and D shrunk to ``D (1 + rho D)^-1``; and Identity nodes
that share cells, whose residuals are correlated there.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from msrm.banded import FactorPairs, TemporalRows, add_blocks
from msrm.latent_grid import Functionals, difference_rows, pair_windows
from msrm.nodes import GroupStatistics, NodeGroup

_FEW = 16  # classes up to which sums over their nodes are one matrix product


@dataclass(frozen=True, eq=False)
class NodeMoments:
    """Moments of a group's nodes under the posterior.

    Attributes
    ----------
    mean : (node, K)
        E[g].
    second : (P, K, K)
        Sum of E[g g'] over the nodes of each distinct D.
    pulled : (node, width)
        ``sum_c weights[j, c] Cov(states) M_c a_j`` in the row's window: what couples a change of a to the evidence.
        Left zero where no derivative of the rows is asked for.
    residual_slopes : {name: float}
        Derivatives of the log evidence through the residuals' covariance.
    """

    mean: np.ndarray
    second: np.ndarray
    pulled: np.ndarray
    residual_slopes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class NodeTerms:
    """Nodes with few distinct D and no residual variances.

    Attributes
    ----------
    made : Functionals
    rows : TemporalRows
        a_j of the nodes: those of ``made``, differenced where the group has pairs.
    statistics : GroupStatistics
    weights : (node, set)
    matrices : (set, K, K)
    information : (node, K)
        h, shrunk as D is.
    constant : float
        What integrating the residuals adds to the log evidence.
    pairs : (node, 2) or None
    """

    made: Functionals
    rows: TemporalRows
    statistics: GroupStatistics
    weights: np.ndarray
    matrices: np.ndarray
    information: np.ndarray
    constant: float = 0.0
    pairs: np.ndarray | None = None

    def add_to(self, band: np.ndarray) -> None:
        """Add what ``gram`` and ``matrices`` do not hold of the posterior precision; nothing here."""

    def mean(self, state_means: np.ndarray) -> np.ndarray:
        """E[g] (node, K) from ``a_j . E[states]`` (node, K)."""
        return state_means

    def draw(self, rng: np.random.Generator, states: np.ndarray) -> np.ndarray:
        """The nodes' functionals (node, K) given the states (column, K), residuals drawn."""
        return self.rows.apply(states)

    @property
    def movable(self) -> bool:
        """Whether the rows have derivatives."""
        return bool(self.made.row_slopes) or self.pairs is not None

    @cached_property
    def gram(self) -> np.ndarray:
        """Temporal band of each set, (width, column, set)."""
        return self.rows.gram(self.weights)

    @cached_property
    def precision(self) -> np.ndarray:
        """D_j of every node, (node, K, K), shrunk by rho."""
        return np.tensordot(self.weights, self.matrices, 1)

    def moments(self, state_means: np.ndarray, inverse: FactorPairs) -> NodeMoments:
        """The nodes' moments from ``a_j . E[states]`` (node, K) and the band of the states' covariance."""
        pulled = np.zeros(self.rows.weights.shape)
        for weight, matrix in zip(self.weights.T, self.matrices, strict=True) if self.movable else ():
            pulled += weight[:, None] * self.rows.windows(inverse.trace(matrix, self.rows.width))
        return NodeMoments(state_means, inverse.moment(self.gram) + self._outer(state_means), pulled)

    def _outer(self, mean: np.ndarray) -> np.ndarray:
        index = self.statistics.index
        return np.stack([mean[index == p].T @ mean[index == p] for p in range(len(self.statistics.precision))])

    def row_slopes(self, states: np.ndarray, moments: NodeMoments, state_means: np.ndarray) -> np.ndarray:
        """Derivative of the log evidence in the nodes' rows, (node, width)."""
        score = self.information - np.einsum("jik,jk->ji", self.precision, state_means)
        columns = self.rows.first[:, None] + np.arange(self.rows.width)
        return np.einsum("jwk,jk->jw", states[columns], score) - moments.pulled

    def through_pairs(self, on_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Derivatives in the nodes' rows as those in the rows of ``made``, and in the coefficients of pairs."""
        coefficients = self.statistics.coefficients
        if self.pairs is None or coefficients is None:
            return on_rows, None
        rows, pairs = self.made.rows, self.pairs
        _, offsets, _ = pair_windows(rows, pairs)
        out, slopes = np.zeros(rows.weights.shape), np.empty(pairs.shape)
        for k in range(2):
            seen = np.take_along_axis(on_rows, offsets[:, k, None] + np.arange(rows.width), axis=1)
            slopes[:, k] = np.sum(seen * rows.weights[pairs[:, k]], axis=1)
            np.add.at(out, pairs[:, k], coefficients[:, k, None] * seen)
        return out, slopes


@dataclass(frozen=True, eq=False)
class EntryTerms(NodeTerms):
    """Nodes with many distinct D: sets are D's entries, moments are taken node by node."""

    def moments(self, state_means: np.ndarray, inverse: FactorPairs) -> NodeMoments:
        covariance, pulled = self._covariance(inverse)
        second = self._summed(covariance + state_means[:, :, None] * state_means[:, None, :])
        return NodeMoments(state_means, second, pulled)

    def _covariance(self, inverse: FactorPairs) -> tuple[np.ndarray, np.ndarray]:
        """Cov(a_j . states) (node, K, K), and the windows (node, width) summed with D's entries."""
        covariance = np.empty(self.precision.shape)
        pulled = np.zeros(self.rows.weights.shape)
        for (i, k), band in zip(inverse.pairs, inverse.bands, strict=True):
            one = self.rows.windows(band[:, : self.rows.width].T)
            pulled += self.precision[:, i, k, None] * one
            covariance[:, i, k] = covariance[:, k, i] = np.sum(one * self.rows.weights, axis=1) / (1 + (i != k))
        return covariance, pulled

    def _summed(self, each: np.ndarray) -> np.ndarray:
        """Sums (P, K, K) over the nodes of each distinct D."""
        return class_sums(each, self.statistics.index, len(self.statistics.precision))


@dataclass(frozen=True, eq=False)
class ResidualTerms(EntryTerms):
    """Nodes with residual variances.

    Attributes
    ----------
    shrink : (node, K, K)
        ``S = (1 + rho D)^-1``; D and h are shrunk to S D and S h.
    """

    shrink: np.ndarray = field(kw_only=True)

    def _shrunk_score(self, state_means: np.ndarray) -> np.ndarray:
        """``S (h - D a . states)``, (node, K): E of the residuals over rho."""
        full = self.statistics.precision[self.statistics.index]
        score = self.statistics.information - np.einsum("jik,jk->ji", full, state_means)
        return np.einsum("jik,jk->ji", self.shrink, score)

    def mean(self, state_means: np.ndarray) -> np.ndarray:
        return state_means + self.made.residual[:, None] * self._shrunk_score(state_means)

    def moments(self, state_means: np.ndarray, inverse: FactorPairs) -> NodeMoments:
        covariance, pulled = self._covariance(inverse)
        rho, shrink = self.made.residual[:, None], self.shrink
        residual_mean = self._shrunk_score(state_means)
        spread = self.precision @ covariance @ self.precision - self.precision
        slope = 0.5 * (np.sum(residual_mean**2, axis=1) + np.trace(spread, axis1=1, axis2=2))
        mean = state_means + rho * residual_mean
        each = shrink @ covariance @ np.swapaxes(shrink, 1, 2) + rho[:, :, None] * shrink
        slopes = {name: float(slope @ of) for name, of in self.made.residual_slopes.items()}
        return NodeMoments(mean, self._summed(each + mean[:, :, None] * mean[:, None, :]), pulled, slopes)

    def draw(self, rng: np.random.Generator, states: np.ndarray) -> np.ndarray:
        means, rho = self.rows.apply(states), self.made.residual[:, None]
        standard = np.sqrt(rho) * rng.standard_normal(means.shape)
        root = np.linalg.cholesky(self.shrink)
        return self.mean(means) + np.einsum("jik,jk->ji", root, standard)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Cells of equally many nodes: likelihood and residuals of a cell's nodes, stacked (node, factor).

    Attributes
    ----------
    nodes : (cell, count)
    first : (cell,) int
        First column among the posterior's.
    rows : (cell, count, width)
    shrink, precision, residual : (cell, count * K, count * K)
        ``S = (1 + C D)^-1``, ``D S`` and C, the residuals' covariance for all factors.
    covariance, slope : (cell, count, count)
    """

    nodes: np.ndarray
    first: np.ndarray
    rows: np.ndarray
    shrink: np.ndarray
    precision: np.ndarray
    residual: np.ndarray
    slope: np.ndarray

    def stacked(self, each: np.ndarray) -> np.ndarray:
        """Values (node, K) of the cells' nodes, (cell, count * K, 1)."""
        return each[self.nodes].reshape(len(self.nodes), -1, 1)

    def weights(self, size: int) -> np.ndarray:
        """Rows for every factor, (cell, count * K, width * K)."""
        count, width = self.rows.shape[1:]
        out = np.zeros((len(self.rows), count, size, width, size))
        for k in range(size):
            out[:, :, k, :, k] = self.rows
        return out.reshape(len(self.rows), count * size, width * size)


@dataclass(frozen=True, eq=False)
class JointTerms(NodeTerms):
    """Identity nodes, several to a cell: their residuals are correlated within cells, known exactly and no further.

    ``weights`` and ``matrices`` are empty: a cell's precision is no product of a temporal and a factor matrix.
    """

    cells: tuple[_Cells, ...] = field(kw_only=True)

    def add_to(self, band: np.ndarray) -> None:
        for one in self.cells:
            weights = one.weights(self.statistics.information.shape[1])
            add_blocks(band, one.first, np.swapaxes(weights, 1, 2) @ one.precision @ weights)

    def _score(self, one: _Cells, state_means: np.ndarray) -> np.ndarray:
        """E of the derivative of the log likelihood in the cell's residuals, (cell, count * K, 1)."""
        return one.stacked(self.information) - one.precision @ one.stacked(state_means)

    def mean(self, state_means: np.ndarray) -> np.ndarray:
        out = np.empty(state_means.shape)
        for one in self.cells:
            moved = (one.residual @ self._score(one, state_means)).reshape(*one.nodes.shape, -1)
            out[one.nodes] = state_means[one.nodes] + moved
        return out

    def moments(self, state_means: np.ndarray, inverse: FactorPairs) -> NodeMoments:
        size = state_means.shape[1]
        mean, each = self.mean(state_means), np.empty((len(state_means), size, size))
        pulled, slope = np.zeros(self.rows.weights.shape), 0.0
        for one in self.cells:
            weights, count = one.weights(size), one.nodes.shape[1]
            score = self._score(one, state_means)
            across = weights @ inverse.blocks(one.first, weights.shape[2])
            covariance = across @ np.swapaxes(weights, 1, 2)
            full = one.shrink @ (covariance @ np.swapaxes(one.shrink, 1, 2) + one.residual)
            each[one.nodes] = np.einsum("cnanb->cnab", full.reshape(-1, count, size, count, size))
            through = (one.precision @ across).reshape(-1, count, size, self.rows.width, size)
            pulled[one.nodes] = np.einsum("cnawa->cnw", through)
            on_residual = score @ np.swapaxes(score, 1, 2) + one.precision @ covariance @ one.precision - one.precision
            blocks = np.einsum("cnama->cnm", on_residual.reshape(-1, count, size, count, size))
            slope += 0.5 * float(np.sum(blocks * one.slope))
        second = class_sums(
            each + mean[:, :, None] * mean[:, None, :], self.statistics.index, len(self.statistics.precision)
        )
        return NodeMoments(mean, second, pulled, {"length_scale": slope} if self.made.row_slopes else {})

    def row_slopes(self, states: np.ndarray, moments: NodeMoments, state_means: np.ndarray) -> np.ndarray:
        score = np.empty(state_means.shape)
        for one in self.cells:
            score[one.nodes] = self._score(one, state_means).reshape(*one.nodes.shape, -1)
        columns = self.rows.first[:, None] + np.arange(self.rows.width)
        return np.einsum("jwk,jk->jw", states[columns], score) - moments.pulled

    def draw(self, rng: np.random.Generator, states: np.ndarray) -> np.ndarray:
        means = self.rows.apply(states)
        standard, out = rng.standard_normal(means.shape), means.copy()
        for one in self.cells:
            left = one.shrink @ one.residual
            values, vectors = np.linalg.eigh(0.5 * (left + np.swapaxes(left, 1, 2)))
            root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None, :]
            moved = one.residual @ self._score(one, means) + root @ one.stacked(standard)
            out[one.nodes] += moved.reshape(*one.nodes.shape, -1)
        return out


def _joint_terms(made: Functionals, statistics: GroupStatistics) -> JointTerms:
    size = statistics.information.shape[1]
    every = statistics.precision[statistics.index]
    information, constant, cells = np.empty(statistics.information.shape), 0.0, []
    for shared in made.shared:
        nodes, count = shared.nodes, shared.nodes.shape[1]
        shape = len(nodes), count * size, count * size
        residual = np.einsum("cnm,ab->cnamb", shared.covariance, np.eye(size)).reshape(shape)
        product = np.einsum("cnm,cmab->cnamb", shared.covariance, every[nodes]).reshape(shape)
        system = np.eye(count * size) + product
        shrink = np.linalg.inv(system)
        precision = np.matmul(every[nodes], shrink.reshape(len(nodes), count, size, -1)).reshape(shape)
        precision = 0.5 * (precision + np.swapaxes(precision, 1, 2))
        given = statistics.information[nodes].reshape(len(nodes), -1, 1)
        pulled = np.swapaxes(shrink, 1, 2) @ given
        information[nodes] = pulled.reshape(*nodes.shape, size)
        constant += 0.5 * float(np.sum(given * (residual @ pulled)) - np.sum(np.linalg.slogdet(system)[1]))
        first = made.rows.first[nodes[:, 0]] * size
        cells.append(_Cells(nodes, first, made.rows.weights[nodes], shrink, precision, residual, shared.slope))
    empty = np.zeros((len(every), 0)), np.zeros((0, size, size))
    return JointTerms(made, made.rows, statistics, *empty, information, constant, cells=tuple(cells))


def node_terms(group: NodeGroup, made: Functionals, statistics: GroupStatistics, *, residual: bool) -> NodeTerms:
    """The terms of a group; ``residual`` uses the residual variances of its functionals."""
    if residual and group.pairs is None and made.residual.any():
        return _joint_terms(made, statistics) if made.shared else _residual_terms(made, statistics)
    rows = made.rows
    if group.pairs is not None and statistics.coefficients is not None:
        rows = difference_rows(rows, group.pairs, statistics.coefficients)
    precision, index, information = statistics.precision, statistics.index, statistics.information
    if len(precision) <= _n_entries(precision):
        weights = (index[:, None] == np.arange(len(precision))).astype(float)
        return NodeTerms(made, rows, statistics, weights, precision, information, pairs=group.pairs)
    weights, matrices = _entries(precision[index])
    return EntryTerms(made, rows, statistics, weights, matrices, information, pairs=group.pairs)


def _residual_terms(made: Functionals, statistics: GroupStatistics) -> ResidualTerms:
    rho, index, information = made.residual, statistics.index, statistics.information
    values, vectors = np.linalg.eigh(statistics.precision)
    shrunk, turn = 1.0 / (1.0 + rho[:, None] * values[index]), vectors[index]
    shrink = (turn * shrunk[:, None, :]) @ np.swapaxes(turn, 1, 2)
    pulled = np.einsum("jik,jk->ji", shrink, information)
    constant = 0.5 * float(rho @ np.sum(information * pulled, axis=1) + np.sum(np.log(shrunk)))
    if len(values) == 1:
        # K Grams in the eigenbasis of the only D rather than K (K + 1) / 2 of its entries.
        weights, matrices = shrunk * values, np.einsum("ik,jk->kij", vectors[0], vectors[0])
    else:
        weights, matrices = _entries((turn * (shrunk * values[index])[:, None, :]) @ np.swapaxes(turn, 1, 2))
    return ResidualTerms(made, made.rows, statistics, weights, matrices, pulled, constant, shrink=shrink)


def class_sums(each: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    """Sums (class, ...) of values (node, ...) over the nodes of each class."""
    if count > _FEW:
        out = np.zeros((count, *each.shape[1:]))
        np.add.at(out, index, each)
        return out
    return np.tensordot((index == np.arange(count)[:, None]).astype(float), each, 1)


def _n_entries(precision: np.ndarray) -> int:
    return precision.shape[-1] * (precision.shape[-1] + 1) // 2


def _entries(each: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric matrices (node, K, K) as weights (node, entry) of unit symmetric matrices (entry, K, K)."""
    rows, columns = np.tril_indices(each.shape[-1])
    units = np.zeros((len(rows), *each.shape[1:]))
    units[np.arange(len(rows)), rows, columns] = units[np.arange(len(rows)), columns, rows] = 1.0
    return each[:, rows, columns], units
