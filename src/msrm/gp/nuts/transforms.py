"""Bounded scalars on the whole line, and their priors there, in JAX: ``p(x) = p(value(x)) |d value / d x|``.

Owns the maps of DESIGN 5's free scalars (noise variances, response parameters, residual timescales, length scale):
a logistic curve between two bounds, an exponential beside one, the value itself without any.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.jax_settings import FLOAT
from msrm.priors import LogNormal, Normal, Prior, Uniform

__all__ = ["Line", "prior_density"]

_LOG_ROOT_TWO_PI = 0.5 * float(np.log(2.0 * np.pi))
_INSIDE = 1e-9  # of the interval: a start at a bound moves inside by this much


@dataclass(frozen=True)
class Line:
    """The map from the whole line onto an interval.

    Attributes
    ----------
    lower, upper : float
        May be infinite.
    """

    lower: float
    upper: float

    def value(self, x: Array) -> Array:
        """Values of coordinates."""
        if np.isfinite(self.lower) and np.isfinite(self.upper):
            return self.lower + (self.upper - self.lower) * jax.nn.sigmoid(x)
        if np.isfinite(self.lower):
            return self.lower + jnp.exp(x)
        return self.upper - jnp.exp(x) if np.isfinite(self.upper) else x

    def log_slope(self, x: Array) -> Array:
        """``log |d value / d x|``."""
        if np.isfinite(self.lower) and np.isfinite(self.upper):
            return float(np.log(self.upper - self.lower)) + jax.nn.log_sigmoid(x) + jax.nn.log_sigmoid(-x)
        return x if np.isfinite(self.lower) or np.isfinite(self.upper) else jnp.zeros_like(jnp.asarray(x, FLOAT))

    def coordinate(self, value: float) -> float:
        """The coordinate of a value, which is first moved off the bounds."""
        low, high = self.lower, self.upper
        if np.isfinite(low) and np.isfinite(high):
            share = np.clip((value - low) / (high - low), _INSIDE, 1.0 - _INSIDE)
            return float(np.log(share) - np.log1p(-share))
        if np.isfinite(low):
            return float(np.log(max(value - low, _INSIDE)))
        return float(np.log(max(high - value, _INSIDE))) if np.isfinite(high) else float(value)


def prior_density(prior: Prior) -> Any:
    """The log density of a prior inside its bounds, as a traced function of the value.

    Raises
    ------
    TypeError
        For a prior without a traced density.
    """
    if isinstance(prior, Uniform):
        height = -float(np.log(prior.upper - prior.lower))
        return lambda value: jnp.full_like(value, height)
    if not isinstance(prior, Normal | LogNormal):
        raise TypeError(f'sampler="nuts" knows Normal, LogNormal and Uniform priors, found {prior!r}; use "gibbs".')
    middle = float(prior.quantile(0.5))
    mean, sd, log = prior.mean, prior.sd, isinstance(prior, LogNormal)

    def bare(value: Any, logarithm: Any) -> Any:
        if not log:
            return -0.5 * ((value - mean) / sd) ** 2
        u = logarithm(value)
        return -0.5 * ((u - mean) / sd) ** 2 - u

    # The mass between the bounds is the prior's own affair: one value of its density gives the constant.
    constant = float(prior.log_density(middle)) - float(bare(middle, np.log))
    return lambda value: bare(value, jnp.log) + constant
