"""Latent paths: their penalty, and their elimination by a banded Cholesky (DESIGN 2 and 3.3).

A path system is what must be solved together: one run's path, or, under population pooling, the paths of all its
participants, drawn to their mean. Its penalty is `weight` times

    sum_p [ lambda_Z sum_l a_l |z_pl|^2 + lambda_T / (step duration) sum_l |z_p,l+1 - z_pl|^2 ]
    + lambda_P sum_p sum_l a_l |z_pl - mean_p z_pl|^2

with weight one over the number of systems (paths, for population pooling), so that it is the mean of DESIGN 2. The
unknowns are ordered by grid time, path, factor: a symmetric band of half-width paths x K x (cells of the widest
response in play).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from msrm.banded import band_cholesky, zero_band
from msrm.regularized.domain import Grid

Array = NDArray[np.float64]


class LatentFailure(ArithmeticError):
    """The latents' normal matrix was not positive definite; the message names run, cause and remedy."""


@dataclass(frozen=True)
class PathSystem:
    """The latent paths of one run that are solved together.

    Attributes
    ----------
    run : str
    participants : tuple of str
        Owners of the paths; empty when one path serves every participant.
    grid : Grid
    weight : float
        Of this system's penalty in the mean.
    latent_ridge, roughness, coupling : float
        lambda_Z, lambda_T, lambda_P.
    """

    run: str
    participants: tuple[str, ...]
    grid: Grid
    weight: float
    latent_ridge: float
    roughness: float
    coupling: float

    @property
    def n_paths(self) -> int:
        """Paths in the system."""
        return max(1, len(self.participants))

    def path_of(self, participant: str) -> int:
        """Which path a participant's streams see."""
        return self.participants.index(participant) if self.participants else 0

    @cached_property
    def penalty_band(self) -> Array:
        """Temporal band (2, time) of the first two terms."""
        count = self.grid.count
        tension = self.roughness / (self.grid.step * self.grid.duration)
        band = np.zeros((2, count))
        band[0] = self.latent_ridge * self.grid.shares
        band[0, 1:] += tension
        band[0, :-1] += tension
        band[1, :-1] = -tension
        return self.weight * band

    @cached_property
    def coupling_matrix(self) -> Array:
        """lambda_P (I - 1 1' / n) over paths, times the weight; zero for a single path."""
        n = self.n_paths
        return self.weight * self.coupling * (np.eye(n) - np.full((n, n), 1.0 / n))

    def pressed(self, latents: Array) -> Array:
        """Penalty matrix times latents (time, path, K)."""
        diagonal, off = self.penalty_band
        out = diagonal[:, None, None] * latents
        out[1:] += off[:-1, None, None] * latents[:-1]
        out[:-1] += off[:-1, None, None] * latents[1:]
        return out + self.grid.shares[:, None, None] * np.einsum("pq,lqk->lpk", self.coupling_matrix, latents)

    def parts(self, latents: Array) -> dict[str, float]:
        """The three penalty terms of latents (time, path, K)."""
        shares = self.grid.shares
        steps = np.diff(latents, axis=0)
        deviation = latents - latents.mean(1, keepdims=True)
        tension = self.roughness / (self.grid.step * self.grid.duration)
        return {
            "latent": self.weight * self.latent_ridge * float(np.einsum("l,lpk,lpk->", shares, latents, latents)),
            "roughness": self.weight * tension * float(np.einsum("lpk,lpk->", steps, steps)),
            "population": self.weight * self.coupling * float(np.einsum("l,lpk,lpk->", shares, deviation, deviation)),
        }

    def solve(self, terms: Iterable[tuple[int, Array, Array]], right: Array) -> Array:
        """Latents that minimize the penalty plus `sum z'(band (x) matrix) z - 2 right'z`.

        Parameters
        ----------
        terms : iterable of (path, band (width, time), matrix (K, K))
        right : (time, path, K)

        Returns
        -------
        (time, path, K)

        Raises
        ------
        LatentFailure
        """
        count, paths, size = right.shape
        pieces = list(terms)
        width = max([2, *(band.shape[0] for _, band, _ in pieces)])
        order = paths * size
        band = zero_band(min(width, count) * order - 1, count * order)
        for path, temporal, matrix in pieces:
            _add_block(temporal, matrix, band, path * size, order)
        identity = np.eye(size)
        for path in range(paths):
            _add_block(self.penalty_band, identity, band, path * size, order)
        if paths > 1:
            coupling = np.asarray(np.kron(self.coupling_matrix, identity), np.float64)
            _add_block(self.grid.shares[None], coupling, band, 0, order)
        cholesky = band_cholesky(band, overwrite=True)
        if not cholesky.ok:
            raise LatentFailure(
                f"The latents of {self.run} cannot be solved for: {cholesky.diagnostic}. "
                "Raise latent_ridge or roughness, or look for huge values in the recording."
            )
        return cholesky.solve(right.reshape(-1)).reshape(right.shape)


def _add_block(temporal: Array, matrix: Array, band: Array, offset: int, order: int) -> None:
    """Add `temporal (x) matrix` to the diagonal block of a lower band that starts at `offset` within each time."""
    target, columns = band.T, temporal.T
    width = columns.shape[1]
    for i in range(matrix.shape[0]):
        for j in range(matrix.shape[0]):
            skip = int(i < j)
            if matrix[i, j] != 0 and width > skip:
                low, stop = skip * order + i - j, (width - 1) * order + i - j + 1
                target[offset + j :: order, low:stop:order] += columns[:, skip:] * matrix[i, j]
