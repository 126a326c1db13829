"""The log density that NUTS moves in: latent-marginal likelihood, priors and Jacobians, in whitened coordinates.

``log p(z) = log likelihood(parameters(x)) + log prior(x)`` with ``x = centre + T z``, T constant
(:mod:`msrm.gp.nuts.whitening`). The likelihood is the NumPy one on a CPU (:mod:`msrm.gp.nuts.host`) and, on an
accelerator with the state-space backend, the compiled one (:mod:`msrm.gp.jax_backend`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from msrm.gp.jax_backend import NativeLikelihood
from msrm.gp.likelihood import Likelihood
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.host import HostLikelihood
from msrm.gp.nuts.whitening import Whitening
from msrm.gp.programs import Program
from msrm.gp.statespace import StateSpace
from msrm.nodes import Backend

__all__ = ["Density", "runs_compiled"]


def runs_compiled(backend: Backend) -> bool:
    """Whether the compiled likelihood is the one to use: JAX's platform is an accelerator, and there is one."""
    return jax.default_backend() != "cpu" and isinstance(backend, StateSpace)


class Density:
    """The log density of a posterior.

    Parameters
    ----------
    coordinates : Coordinates
    backend : Backend
        Of the likelihood: state-space at a spacing, or dense.
    compiled : bool
        The compiled likelihood rather than NumPy's; it needs a `StateSpace`.

    Attributes
    ----------
    host : HostLikelihood or None
    data : pytree
        Arrays of the recording's size, passed to traced code.
    made_of : tuple or None
        What traces of the density follow from, for :class:`msrm.gp.programs.Program`.
    """

    def __init__(self, coordinates: Coordinates, backend: Backend, *, compiled: bool) -> None:
        self.coordinates = coordinates
        likelihood = Likelihood(coordinates.specification, coordinates.nodes, backend)
        self.host: HostLikelihood | None = None
        self.data: Any = ()
        self._log_likelihood: Callable[[Any, Array], Array]
        if compiled:
            # Blocks hold the longest response that the bounds allow, so that no point is refused.
            native = NativeLikelihood(likelihood, solver="parallel", room=np.inf)
            self.data = native.data
            named: Any = likelihood.layout.unpacked
            self._log_likelihood = lambda data, packed: native.log_likelihood(data, named(packed))
        else:
            self.host = host = HostLikelihood(likelihood)
            self._log_likelihood = lambda data, packed: host.log_likelihood(packed)
        # What calls back to the host belongs to this density alone.
        self.made_of = (coordinates, backend) if compiled else None
        self._compiled = Program(jax.value_and_grad(self.log_density), self.made_of)
        self._parts = jax.jit(jax.vmap(lambda x: (coordinates.packed(x), coordinates.log_prior(x))))

    def log_density(self, x: Array, data: Any) -> Array:
        """Log density of x, not normalized (traced)."""
        return self._log_likelihood(data, self.coordinates.packed(x)) + self.coordinates.log_prior(x)

    def potential(self, data: Any, whitening: Whitening) -> Callable[[Array], Array]:
        """Minus the log density of z, for NumPyro (traced)."""
        return lambda z: -self.log_density(whitening.x(z), data)

    def value_and_gradient(self, x: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """The log density of x and its derivatives."""
        value, gradient = self._compiled(jnp.asarray(x), self.data)
        return float(value), np.asarray(gradient)

    def parts(self, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Packed parameters (draw, parameter) and log priors with Jacobians (draw,) of points (draw, coordinate)."""
        packed, log_prior = self._parts(jnp.asarray(x))
        return np.asarray(packed), np.asarray(log_prior)
