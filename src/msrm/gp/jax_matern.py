"""Matern factors on a uniform grid in JAX: prior precision of the states, conditional mean and covariance in a cell.

The traced twin of `msrm.latent_grid`, same formulas (DESIGN 3.3), for a length scale that is a tracer. Everything
depends on ``x = rate * step``; states are ``(f, f'/rate, f''/rate^2)``.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.polynomial.legendre import leggauss

from msrm.gp.jax_settings import FLOAT
from msrm.latent_grid import Matern

__all__ = ["PriorBlocks", "cell_covariance", "cell_means", "noise", "prior_blocks", "small_inverse", "transition"]

_NOISE_POINTS = 32  # integrate polynomials of degree 4 times exp(-2 u) to rounding over steps up to 10 rates


def transition(matern: Matern, x: Array) -> Array:
    """exp(F x), (..., state, state): F + 1 is nilpotent, so the series ends."""
    nilpotent = matern.drift + np.eye(matern.dimension)
    scaled = jnp.asarray(x)[..., None, None]
    total, power, factor = jnp.eye(matern.dimension), np.eye(matern.dimension), 1.0
    for order in range(1, matern.dimension):
        power, factor = power @ nilpotent, factor * order
        total = total + power * scaled**order / factor
    return total * jnp.exp(-scaled)


def noise(matern: Matern, x: Array) -> Array:
    """Covariance (..., state, state) of the states a time x after they are known, integrated without cancellation."""
    points, weights = leggauss(_NOISE_POINTS)
    scaled = jnp.asarray(x)[..., None]
    column = transition(matern, scaled * (points + 1.0) / 2.0)[..., :, -1]
    return matern._density * jnp.einsum("...q,...qi,...qj->...ij", scaled * weights / 2.0, column, column)


def small_inverse(matrix: Array) -> tuple[Array, Array]:
    """Inverse (..., s, s) and log determinant (...,) of positive definite matrices of order 1, 2 or 3, by cofactors.

    States differ by powers of x, which scaling to unit diagonal takes out; a library call costs an accelerator ten
    kernels for four numbers.
    """
    order = matrix.shape[-1]
    diagonal = jnp.diagonal(matrix, axis1=-2, axis2=-1)
    scale = 1.0 / jnp.sqrt(diagonal)
    unit = matrix * scale[..., :, None] * scale[..., None, :]
    one = jnp.ones(matrix.shape[:-2], FLOAT)
    if order == 1:
        rows, determinant = [one[..., None]], one
    elif order == 2:
        a = unit[..., 0, 1]
        rows, determinant = [jnp.stack([one, -a], -1), jnp.stack([-a, one], -1)], 1.0 - a * a
    else:
        a, b, c = unit[..., 0, 1], unit[..., 0, 2], unit[..., 1, 2]
        rows = [
            jnp.stack([1.0 - c * c, b * c - a, a * c - b], -1),
            jnp.stack([b * c - a, 1.0 - b * b, a * b - c], -1),
            jnp.stack([a * c - b, a * b - c, 1.0 - a * a], -1),
        ]
        determinant = 1.0 - a * a - b * b - c * c + 2.0 * a * b * c
    inverse = jnp.stack(rows, -2) / determinant[..., None, None]
    return inverse * scale[..., :, None] * scale[..., None, :], jnp.log(determinant) + jnp.log(diagonal).sum(-1)


def cell_means(matern: Matern, x: Array, fractions: Array) -> tuple[Array, Array]:
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
    inside, ahead, late = _given_start(matern, x, fractions)
    early = transition(matern, x * fractions)[:, 0, :] - late @ transition(matern, x)
    return jnp.concatenate([early, late], -1), inside[:, 0, 0] - (late * ahead).sum(-1)


def cell_covariance(matern: Matern, x: Array, fractions: Array) -> Array:
    """Conditional covariance (point, point) of the process in a cell of scaled length x, given both ends."""
    r = jnp.asarray(fractions)
    inside, ahead, late = _given_start(matern, x, r)
    gap = transition(matern, x * jnp.abs(r[:, None] - r[None, :]))[..., 0, :]
    earlier = r[:, None] <= r[None, :]
    column = jnp.where(earlier[..., None], inside[:, None, :, 0], inside[None, :, :, 0])
    return (gap * column).sum(-1) - late @ ahead.T


def _given_start(matern: Matern, x: Array, fractions: Array) -> tuple[Array, Array, Array]:
    """State covariance at points given the start, their covariance with the end's states, and gains from the end."""
    inside, rest = noise(matern, x * fractions), transition(matern, x * (1.0 - fractions))
    ahead = jnp.einsum("pj,pij->pi", inside[:, 0, :], rest)
    return inside, ahead, ahead @ small_inverse(noise(matern, x))[0]


class PriorBlocks(NamedTuple):
    """Precision of one factor's states on a uniform grid cut into blocks of points, (point state, point state) each."""

    within: Array  # a block with neighbours on both sides
    first: Array  # added to the first block of a run
    last: Array  # added to the last block of a run
    below: Array  # from a block to the next
    log_step: Array  # (), log determinant of Q^-1, the precision of a step
    log_start: Array  # (), log determinant of the stationary precision


def prior_blocks(matern: Matern, x: Array, points: int) -> PriorBlocks:
    """Blocks of ``points`` grid points; states within a point, points within a block."""
    s, ahead = matern.dimension, transition(matern, x)
    noise_inverse, log_noise = small_inverse(noise(matern, x))
    through, below = ahead.T @ noise_inverse @ ahead, -noise_inverse @ ahead
    start = np.linalg.inv(matern.stationary)
    size = points * s

    def placed(block: Array | np.ndarray, row: int, column: int) -> Array:
        return jnp.zeros((size, size)).at[row * s : (row + 1) * s, column * s : (column + 1) * s].set(block)

    shift = np.eye(points, k=-1)
    within = jnp.kron(np.eye(points), noise_inverse + through) + jnp.kron(shift, below) + jnp.kron(shift.T, below.T)
    return PriorBlocks(
        within,
        placed(start - noise_inverse, 0, 0),
        placed(-through, points - 1, points - 1),
        placed(below, 0, points - 1),
        -log_noise,
        jnp.asarray(np.linalg.slogdet(start)[1]),
    )
