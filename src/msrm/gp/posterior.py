"""The posterior of a run's latent states: log evidence, its derivatives, functionals at any times, draws (DESIGN 3.3).

The states of all factors at all grid points are normal with the banded precision ``prior (x) I_K + sum_j (a_j a_j') (x)
D_j``, factor within state. Everything follows from its Cholesky factor and the band of the inverse; derivatives by
Fisher's identity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from msrm.banded import BandCholesky, FactorPairs, band_cholesky, kron_sum
from msrm.gp.node_terms import NodeTerms
from msrm.latent_grid import Functionals, GridPrior, UniformGrid, functionals
from msrm.nodes import Evidence
from msrm.responses import Response

_SOLVED_TOGETHER = 64  # right-hand sides of a wide functional's covariance


@dataclass(frozen=True, eq=False)
class Posterior:
    """Latent states of one run given its data.

    Attributes
    ----------
    grid : UniformGrid
    n_factors : int
    length_scale : float
        Seconds.
    prior : GridPrior
    nodes : {modality: NodeTerms}
    factor : BandCholesky
        Of the posterior precision; check ``factor.ok`` first.
    mean : (column, factor)
        Of the states at the grid points, and of the cells' moments where the prior has them.
    log_evidence : float
    """

    grid: UniformGrid
    n_factors: int
    length_scale: float
    prior: GridPrior
    nodes: dict[str, NodeTerms]
    factor: BandCholesky
    mean: np.ndarray
    log_evidence: float

    @classmethod
    def of(
        cls, grid: UniformGrid, n_factors: int, length_scale: float, prior: GridPrior, nodes: dict[str, NodeTerms]
    ) -> "Posterior":
        """Assemble and factor the posterior precision."""
        states = grid.count * prior.block
        terms = [(prior.band(), np.eye(n_factors)), *((one.gram, one.matrices) for one in nodes.values())]
        band = kron_sum(terms, n_factors, states)
        for one in nodes.values():
            one.add_to(band)
        factor = band_cholesky(band, overwrite=True)
        information = np.zeros((states, n_factors))
        for one in nodes.values():
            information += one.rows.adjoint(one.information)
        if not factor.ok:
            return cls(grid, n_factors, length_scale, prior, nodes, factor, information * np.nan, np.nan)
        mean = factor.solve(information.ravel()).reshape(states, n_factors)
        log_evidence = 0.5 * (n_factors * prior.log_determinant - factor.log_determinant + np.sum(mean * information))
        log_evidence += sum(one.constant for one in nodes.values())
        return cls(grid, n_factors, length_scale, prior, nodes, factor, mean, float(log_evidence))

    @cached_property
    def covariance(self) -> FactorPairs:
        """The band of the states' covariance."""
        return FactorPairs(self.factor.inverse_band(), self.n_factors)

    def evidence(self, gradient: bool = True) -> Evidence:
        """The log evidence and, by Fisher's identity from the band of the inverse, its derivatives.

        Derivatives are those that the functionals of the nodes carry, the length scale's where they have it.
        """
        if not self.factor.ok or not np.isfinite(self.log_evidence):
            return Evidence.failed(self.factor.diagnostic or "the log evidence is not finite")
        if not gradient:
            seen = {modality: terms.mean(terms.rows.apply(self.mean)) for modality, terms in self.nodes.items()}
            return Evidence(self.log_evidence, mean=seen)
        mean, second, coefficients = {}, {}, {}
        slopes: dict[str, dict[str, float]] = {}
        length_scale = None
        for modality, terms in self.nodes.items():
            state_means = terms.rows.apply(self.mean)
            moments = terms.moments(state_means, self.covariance)
            mean[modality], second[modality] = moments.mean, moments.second
            slopes[modality] = {}
            if not terms.movable:
                continue
            on_rows, on_pairs = terms.through_pairs(terms.row_slopes(self.mean, moments, state_means))
            if on_pairs is not None:
                coefficients[modality] = on_pairs
            mine = {name: float(np.sum(on_rows * of.weights)) for name, of in terms.made.row_slopes.items()}
            for name, slope in moments.residual_slopes.items():
                mine[name] += slope
            if "length_scale" in mine:
                length_scale = (length_scale or 0.0) + mine.pop("length_scale")
            slopes[modality] = mine
        if length_scale is not None:
            length_scale += self._prior_slope()
        return Evidence(self.log_evidence, True, "", mean, second, slopes, length_scale or 0.0, coefficients)

    def _prior_slope(self) -> float:
        """The length scale's derivative through the prior of the states."""
        s, block, size, count = self.prior.matern.dimension, self.prior.block, self.n_factors, self.grid.count
        total = self.covariance.trace(np.eye(size), block + s).T.reshape(count, block, block + s)
        within, across = np.empty((count, s, s)), np.empty((count - 1, s, s))
        for j in range(s):
            within[:, j:, j] = within[:, j, j:] = total[:, j, : s - j]
            across[:, :, j] = total[:-1, j, block - j : block + s - j]
        states = self.mean.reshape(count, block, size)[:, :s]
        within += states @ np.swapaxes(states, 1, 2)
        across += states[1:] @ np.swapaxes(states[:-1], 1, 2)
        moments = within[:-1].sum(axis=0), across.sum(axis=0), within[1:].sum(axis=0)
        return -self.prior.x / self.length_scale * self.prior.slope(moments, size)

    def functionals(self, response: Response, values: Mapping[str, float] | None, times: np.ndarray) -> Functionals:
        """The factors seen through a response at times (node,) in seconds that the grid covers."""
        prior = self.prior
        return functionals(self.grid, prior.matern, self.length_scale, response, values, times, moments=prior.moments)

    def mean_of(self, made: Functionals) -> np.ndarray:
        """E[g], (node, K)."""
        return made.rows.apply(self.mean)

    def covariance_of(self, made: Functionals) -> np.ndarray:
        """Cov(g) of each functional, (node, K, K), residual variance included."""
        size, rows = self.n_factors, made.rows
        out = np.empty((len(rows), size, size))
        if rows.width <= self.covariance.bands.shape[2]:
            for (i, k), band in zip(self.covariance.pairs, self.covariance.bands, strict=True):
                window = rows.windows(band[:, : rows.width].T)
                out[:, i, k] = out[:, k, i] = np.sum(window * rows.weights, axis=1) / (1 + (i != k))
        else:
            for start in range(0, len(rows), _SOLVED_TOGETHER):
                part = slice(start, start + _SOLVED_TOGETHER)
                right = self._right_hand_sides(rows.matrix[part].toarray())
                out[part] = np.einsum("xjk,xjl->jkl", right, self.factor.solve(right))
        return out + made.residual[:, None, None] * np.eye(size)

    def joint_covariance(self, made: Sequence[Functionals]) -> np.ndarray:
        """Cov of all functionals of several responses, (node, K, node, K), in the order given."""
        rows = np.concatenate([one.rows.matrix.toarray() for one in made])
        right = self._right_hand_sides(rows)
        out = np.tensordot(right, self.factor.solve(right), (0, 0))
        index, residual = np.arange(len(rows)), np.concatenate([one.residual for one in made])
        for k in range(self.n_factors):
            out[index, k, index, k] += residual
        return out

    def _right_hand_sides(self, rows: np.ndarray) -> np.ndarray:
        """Rows (node, column) for each factor, (column * K, node, K)."""
        out = np.zeros((rows.shape[1], self.n_factors, len(rows), self.n_factors))
        for k in range(self.n_factors):
            out[:, k, :, k] = rows.T
        return out.reshape(-1, len(rows), self.n_factors)

    def draw(self, rng: np.random.Generator, size: int | None = None) -> np.ndarray:
        """Independent draws of all columns, (column, factor) or (draw, column, factor)."""
        count = 1 if size is None else size
        noise = self.factor.sample(rng.standard_normal((self.mean.size, count)))
        states = self.mean + np.moveaxis(noise, 1, 0).reshape(count, *self.mean.shape)
        return states[0] if size is None else states
