"""Latent paths of a sweep: joint draws by banded simulation smoothing, node functionals, the coarse component.

Given the parameters a run's grid states are normal with a banded precision (DESIGN 3.3); a draw costs one triangular
solve. A functional is ``g_j = a_j . states + e_j`` where its modality uses residual variances, ``a_j . states``
elsewhere: the same choice as in the likelihood.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.banded import BandCholesky, band_cholesky
from msrm.gp.posterior import Posterior
from msrm.latent_grid import GridPrior

__all__ = ["CoarseComponent", "band_product", "draw_functionals", "draw_states"]

Array = NDArray[np.float64]


def draw_states(rng: np.random.Generator, posterior: Posterior) -> Array:
    """Grid states of a run given its data and the parameters, (grid point * state, K)."""
    standard = rng.standard_normal(posterior.mean.size)
    return posterior.mean + posterior.factor.sample(standard).reshape(posterior.mean.shape)


def draw_functionals(rng: np.random.Generator, posterior: Posterior, states: Array) -> dict[str, Array]:
    """Node functionals (node, K) by modality given the grid states, residuals drawn where the backend uses them."""
    return {modality: terms.draw(rng, states) for modality, terms in posterior.nodes.items()}


def band_product(band: Array, columns: Array) -> Array:
    """A symmetric lower band times columns (order, ...)."""
    out = band[0].reshape(-1, *(1,) * (columns.ndim - 1)) * columns
    for offset in range(1, len(band)):
        entries = band[offset, :-offset].reshape(-1, *(1,) * (columns.ndim - 1))
        out[offset:] += entries * columns[:-offset]
        out[:-offset] += entries * columns[offset:]
    return out


@dataclass(frozen=True, eq=False)
class CoarseComponent:
    """The part of a path that its values at a few grid points determine: E[states | f there].

    The rest is independent of it under the prior, so that a move may change one and hold the other (DESIGN 5, scale).

    Attributes
    ----------
    points : (point,) int
        Grid points.
    band : (2 state, grid point * state)
        Prior precision of all states.
    factor : BandCholesky
        Of that precision with the chosen values held.
    held : (point,) int
        Their places among the states.
    """

    points: NDArray[np.intp]
    band: Array
    factor: BandCholesky
    held: NDArray[np.intp]

    @classmethod
    def of(cls, prior: GridPrior, points: NDArray[np.intp]) -> "CoarseComponent":
        """The component determined by f at grid points."""
        band = prior.band()
        held = points * prior.matern.dimension
        free = np.array(band)
        for offset in range(len(band)):
            free[offset, held] = float(offset == 0)
            free[offset, held[held >= offset] - offset] = float(offset == 0)
        return cls(points, band, band_cholesky(np.asfortranarray(free)), held)

    def split(self, states: Array) -> tuple[Array, Array]:
        """The component (grid point * state, K), and the quadratic form of its prior (K, K)."""
        values = np.zeros_like(states)
        values[self.held] = states[self.held]
        pull = -band_product(self.band, values)
        pull[self.held] = states[self.held]
        component = self.factor.solve(pull)
        return component, component.T @ band_product(self.band, component)
