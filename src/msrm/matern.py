"""Matern processes of half-integer order as linear stochastic differential equations: kernels, transitions, noise.

In time scaled by the rate ``sqrt(2 nu) / length scale`` the states are the process and its derivatives, ``(f, f'/rate,
f''/rate^2)``, with ``ds = F s dx + L dw``; everything depends on ``x = rate * time`` only.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.polynomial.legendre import leggauss

_LONG = 3.0  # scaled time from which P - A P A' has no cancellation
_POINTS, _WEIGHTS = leggauss(20)  # integrate polynomials of degree 4 times exp(-2 u) to rounding up to there


@dataclass(frozen=True)
class Matern:
    """A unit-variance Matern process as a linear stochastic differential equation in scaled time.

    Subclasses give the drift's companion row; states are the process and its scaled derivatives.

    Attributes
    ----------
    dimension : int
        States: 1, 2 or 3.
    """

    dimension: ClassVar[int]
    _shape: ClassVar[float]
    _density: ClassVar[float]
    _stationary: ClassVar[list[list[float]]]

    @property
    def stationary(self) -> np.ndarray:
        """Stationary covariance of the states, (state, state)."""
        return np.array(self._stationary)

    @property
    def drift(self) -> np.ndarray:
        """F of ``ds = F s dx + L dw``: companion matrix of (D + 1)^dimension, (state, state)."""
        drift = np.eye(self.dimension, k=1)
        drift[-1] = [[-1.0], [-1.0, -2.0], [-1.0, -3.0, -3.0]][self.dimension - 1]
        return drift

    def rate(self, length_scale: float) -> float:
        """Rate per second: sqrt(2 nu) / length scale."""
        return np.sqrt(2.0 * self._shape) / length_scale

    def covariance(self, lag: np.ndarray, length_scale: float) -> np.ndarray:
        """Covariance of the process at lags in seconds."""
        return self.transition(self.rate(length_scale) * np.abs(lag))[..., 0, :] @ self.stationary[:, 0]

    def transition(self, x: np.ndarray | float) -> np.ndarray:
        """exp(F x), (..., state, state): F + 1 is nilpotent, so the series ends."""
        nilpotent = self.drift + np.eye(self.dimension)
        scaled = np.asarray(x, dtype=float)[..., None, None]
        total, power, factor = np.eye(self.dimension), np.eye(self.dimension), 1.0
        for order in range(1, self.dimension):
            power, factor = power @ nilpotent, factor * order
            total = total + power * scaled**order / factor
        return total * np.exp(-scaled)

    def noise_slope(self, x: np.ndarray | float) -> np.ndarray:
        """d/dx of :meth:`noise`, (..., state, state)."""
        column = self.transition(x)[..., :, -1]
        return self._density * column[..., :, None] * column[..., None, :]

    def noise(self, x: np.ndarray | float) -> np.ndarray:
        """Covariance of the states a time x after they are known, (..., state, state).

        Short times are integrated: ``P - A P A'`` loses all digits of its smallest entries, of order
        x^(2 dimension - 1).
        """
        given = np.asarray(x, dtype=float)[..., None]
        short = np.minimum(given, _LONG)
        integral = np.einsum(
            "...q,...qij->...ij", short * _WEIGHTS / 2.0, self.noise_slope(short * (_POINTS + 1.0) / 2.0)
        )
        if np.all(given <= _LONG):
            return integral
        transition = self.transition(x)
        left = self.stationary - transition @ self.stationary @ np.swapaxes(transition, -1, -2)
        return np.where(given[..., None] > _LONG, left, integral)


@dataclass(frozen=True)
class Matern12(Matern):
    """Matern-1/2: continuous, not differentiable (Ornstein-Uhlenbeck)."""

    dimension, _shape, _density = 1, 0.5, 2.0
    _stationary: ClassVar[list[list[float]]] = [[1.0]]


@dataclass(frozen=True)
class Matern32(Matern):
    """Matern-3/2: once differentiable; the model's default."""

    dimension, _shape, _density = 2, 1.5, 4.0
    _stationary: ClassVar[list[list[float]]] = [[1.0, 0.0], [0.0, 1.0]]


@dataclass(frozen=True)
class Matern52(Matern):
    """Matern-5/2: twice differentiable."""

    dimension, _shape, _density = 3, 2.5, 16.0 / 3.0
    _stationary: ClassVar[list[list[float]]] = [[1.0, 0.0, -1 / 3], [0.0, 1 / 3, 0.0], [-1 / 3, 0.0, 1.0]]
