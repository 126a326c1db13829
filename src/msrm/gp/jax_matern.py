"""Matern factors on a uniform grid in JAX: prior precision of the states, conditional mean and covariance in a cell.

The traced twin of `msrm.latent_grid`, same formulas (DESIGN 3.3), for a length scale that is a tracer. Everything
depends on ``x = rate * step``; states are ``(f, f'/rate, f''/rate^2)``. Where x is a NumPy number, so are all answers,
and nothing is traced or compiled.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.polynomial.legendre import leggauss

from msrm.gp.jax_settings import FLOAT
from msrm.latent_grid import Matern

__all__ = [
    "PriorBlocks",
    "cell_covariance",
    "cell_means",
    "namespace",
    "noise",
    "prior_blocks",
    "small_inverse",
    "transition",
]

Table = Array | np.ndarray
_NOISE_POINTS = 32  # integrate polynomials of degree 4 times exp(-2 u) to rounding over steps up to 10 rates


def namespace(x: Any) -> Any:
    """`numpy` for a number or an array of it, `jax.numpy` for what JAX made."""
    return np if isinstance(x, float | np.ndarray) else jnp


def transition(matern: Matern, x: Any) -> Any:
    """exp(F x), (..., state, state): F + 1 is nilpotent, so the series ends."""
    nilpotent = matern.drift + np.eye(matern.dimension)
    xp = namespace(x)
    scaled = xp.asarray(x)[..., None, None]
    total, power, factor = xp.eye(matern.dimension), np.eye(matern.dimension), 1.0
    for order in range(1, matern.dimension):
        power, factor = power @ nilpotent, factor * order
        total = total + power * scaled**order / factor
    return total * xp.exp(-scaled)


def noise(matern: Matern, x: Any) -> Any:
    """Covariance (..., state, state) of the states a time x after they are known, integrated without cancellation."""
    xp = namespace(x)
    points, weights = leggauss(_NOISE_POINTS)
    scaled = xp.asarray(x)[..., None]
    column = transition(matern, scaled * (points + 1.0) / 2.0)[..., :, -1]
    return matern._density * xp.einsum("...q,...qi,...qj->...ij", scaled * weights / 2.0, column, column)


def small_inverse(matrix: Any) -> tuple[Any, Any]:
    """Inverse (..., s, s) and log determinant (...,) of positive definite matrices of order 1, 2 or 3, by cofactors.

    States differ by powers of x, which scaling to unit diagonal takes out; a library call costs an accelerator ten
    kernels for four numbers.
    """
    xp, order = namespace(matrix), matrix.shape[-1]
    diagonal = xp.diagonal(matrix, axis1=-2, axis2=-1)
    scale = 1.0 / xp.sqrt(diagonal)
    unit = matrix * scale[..., :, None] * scale[..., None, :]
    one = xp.ones(matrix.shape[:-2], FLOAT)
    if order == 1:
        rows, determinant = [one[..., None]], one
    elif order == 2:
        a = unit[..., 0, 1]
        rows, determinant = [xp.stack([one, -a], -1), xp.stack([-a, one], -1)], 1.0 - a * a
    else:
        a, b, c = unit[..., 0, 1], unit[..., 0, 2], unit[..., 1, 2]
        rows = [
            xp.stack([1.0 - c * c, b * c - a, a * c - b], -1),
            xp.stack([b * c - a, 1.0 - b * b, a * b - c], -1),
            xp.stack([a * c - b, a * b - c, 1.0 - a * a], -1),
        ]
        determinant = 1.0 - a * a - b * b - c * c + 2.0 * a * b * c
    inverse = xp.stack(rows, -2) / determinant[..., None, None]
    return inverse * scale[..., :, None] * scale[..., None, :], xp.log(determinant) + xp.log(diagonal).sum(-1)


def cell_means(matern: Matern, x: Any, fractions: Table) -> tuple[Any, Any]:
    """Conditional mean and variance of the process in a cell of scaled length x, given the states at its ends.

    Parameters
    ----------
    matern : Matern
    x : ()
    fractions : (point,)
        Points as fractions of the cell.

    Returns
    -------
    mean : (point, 2 state)
        Weights of the states at (start, end).
    variance : (point,)
    """
    xp = namespace(x)
    inside, ahead, late = _given_start(matern, x, fractions)
    early = transition(matern, x * fractions)[:, 0, :] - late @ transition(matern, x)
    return xp.concatenate([early, late], -1), inside[:, 0, 0] - (late * ahead).sum(-1)


def cell_covariance(matern: Matern, x: Any, fractions: Table) -> Any:
    """Conditional covariance (point, point) of the process in a cell of scaled length x, given both ends."""
    xp = namespace(x)
    r = xp.asarray(fractions)
    inside, ahead, late = _given_start(matern, x, r)
    gap = transition(matern, x * xp.abs(r[:, None] - r[None, :]))[..., 0, :]
    earlier = r[:, None] <= r[None, :]
    column = xp.where(earlier[..., None], inside[:, None, :, 0], inside[None, :, :, 0])
    return (gap * column).sum(-1) - late @ ahead.T


def _given_start(matern: Matern, x: Any, fractions: Table) -> tuple[Any, Any, Any]:
    """State covariance at points given the start, their covariance with the end's states, and gains from the end."""
    xp = namespace(x)
    inside, rest = noise(matern, x * fractions), transition(matern, x * (1.0 - fractions))
    ahead = xp.einsum("pj,pij->pi", inside[:, 0, :], rest)
    return inside, ahead, ahead @ small_inverse(noise(matern, x))[0]


class PriorBlocks(NamedTuple):
    """Precision of one factor's states on a uniform grid cut into blocks of points, (point state, point state) each."""

    within: Table  # a block with neighbours on both sides
    first: Table  # added to the first block of a run
    last: Table  # added to the last block of a run
    below: Table  # from a block to the next
    log_step: Table  # (), log determinant of Q^-1, the precision of a step
    log_start: Table  # (), log determinant of the stationary precision


def prior_blocks(matern: Matern, x: Any, points: int) -> PriorBlocks:
    """Blocks of ``points`` grid points; states within a point, points within a block."""
    xp = namespace(x)
    s, ahead = matern.dimension, transition(matern, x)
    noise_inverse, log_noise = small_inverse(noise(matern, x))
    through, below = ahead.T @ noise_inverse @ ahead, -noise_inverse @ ahead
    start = np.linalg.inv(matern.stationary)
    size = points * s

    def placed(block: Table, row: int, column: int) -> Table:
        return xp.pad(block, ((row * s, size - (row + 1) * s), (column * s, size - (column + 1) * s)))

    shift = np.eye(points, k=-1)
    within = xp.kron(np.eye(points), noise_inverse + through) + xp.kron(shift, below) + xp.kron(shift.T, below.T)
    return PriorBlocks(
        within,
        placed(start - noise_inverse, 0, 0),
        placed(-through, points - 1, points - 1),
        placed(below, 0, points - 1),
        -log_noise,
        xp.asarray(np.linalg.slogdet(start)[1]),
    )
