"""Bounded scalars on the whole line, and their priors there, in JAX: ``p(x) = p(value(x)) |d value / d x|``.

Owns the maps of DESIGN 5's free scalars (noise variances, response parameters, residual timescales, length scale):
a logistic curve between two bounds, an exponential beside one, the value itself without any. All scalars at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from msrm.priors import LogNormal, Normal, Prior, Uniform

__all__ = ["Scalars"]

Vector = NDArray[np.float64]
_INSIDE = 1e-9  # of an interval, or of a unit beside one bound: a start at a bound moves inside by this much


@dataclass(frozen=True, eq=False)
class Scalars:
    """Some scalars with their priors.

    Attributes
    ----------
    lower, upper : (scalar,)
        Bounds; may be infinite.
    mean, sd : (scalar,)
        Of a normal value or logarithm.
    logarithmic : (scalar,) bool
        Lognormal.
    flat : (scalar,) bool
        Uniform.
    constant : (scalar,)
        Log normalizers, the mass between the bounds included.
    """

    lower: Vector
    upper: Vector
    mean: Vector
    sd: Vector
    logarithmic: NDArray[np.bool_]
    flat: NDArray[np.bool_]
    constant: Vector

    @classmethod
    def of(cls, priors: Sequence[Prior]) -> Self:
        """The scalars of some priors.

        Raises
        ------
        TypeError
            For a prior without a traced density.
        """
        for prior in priors:
            if not isinstance(prior, Normal | LogNormal | Uniform):
                raise TypeError(
                    f'sampler="nuts" knows Normal, LogNormal and Uniform priors, found {prior!r}; use sampler="gibbs".'
                )
        shaped = [prior if isinstance(prior, Normal | LogNormal) else None for prior in priors]
        bare = cls(
            np.array([prior.lower for prior in priors]),
            np.array([prior.upper for prior in priors]),
            np.array([0.0 if prior is None else prior.mean for prior in shaped]),
            np.array([1.0 if prior is None else prior.sd for prior in shaped]),
            np.array([isinstance(prior, LogNormal) for prior in priors]),
            np.array([prior is None for prior in shaped]),
            np.zeros(len(priors)),
        )
        # The mass between the bounds is the prior's own affair: one value of its density gives the constant.
        middle = np.array([float(prior.quantile(0.5)) for prior in priors])
        heights = np.array([float(prior.log_density(at)) for prior, at in zip(priors, middle, strict=True)])
        constant = heights - np.asarray(bare.log_density(jnp.asarray(middle)))
        return cls(bare.lower, bare.upper, bare.mean, bare.sd, bare.logarithmic, bare.flat, constant)

    @property
    def _between(self) -> NDArray[np.bool_]:
        return np.isfinite(self.lower) & np.isfinite(self.upper)

    @property
    def _beside(self) -> Vector:
        """1 above a lower bound alone, -1 below an upper one, 0 elsewhere."""
        return np.isfinite(self.lower) * 1.0 - np.isfinite(self.upper) * 1.0

    def value(self, x: Array) -> Array:
        """Values (scalar,) of coordinates."""
        between, side = self._between, self._beside
        low = np.where(np.isfinite(self.lower), self.lower, 0.0)
        width = np.where(between, self.upper - self.lower, 1.0)
        edge = np.where(side < 0.0, self.upper, low)
        # Unused branches are kept finite, or their derivatives would be NaN.
        grown = edge + side * jnp.exp(jnp.where(side != 0.0, x, 0.0))
        return jnp.where(between, low + width * jax.nn.sigmoid(x), jnp.where(side != 0.0, grown, x))

    def log_slope(self, x: Array) -> Array:
        """``log |d value / d x|``, (scalar,)."""
        width = np.where(self._between, self.upper - self.lower, 1.0)
        logistic = np.log(width) + jax.nn.log_sigmoid(x) + jax.nn.log_sigmoid(-x)
        return jnp.where(self._between, logistic, jnp.where(self._beside != 0.0, x, 0.0))

    def log_density(self, value: Array) -> Array:
        """Log prior densities (scalar,) of values within the bounds."""
        logs = jnp.log(jnp.where(jnp.asarray(self.logarithmic), value, 1.0))
        z = (jnp.where(self.logarithmic, logs, value) - self.mean) / self.sd
        return jnp.asarray(self.constant) + jnp.where(self.flat, 0.0, -0.5 * z**2 - logs)

    def coordinate(self, value: Vector) -> Vector:
        """Coordinates of values, which are first moved off the bounds."""
        between, side = self._between, self._beside
        width = np.where(between, self.upper - self.lower, 1.0)
        share = np.clip((value - np.where(between, self.lower, 0.0)) / width, _INSIDE, 1.0 - _INSIDE)
        away = np.where(side > 0.0, value - self.lower, np.where(side < 0.0, self.upper - value, 1.0))
        beside = np.where(side != 0.0, np.log(np.maximum(away, _INSIDE)), value)
        return np.where(between, np.log(share) - np.log1p(-share), beside)
