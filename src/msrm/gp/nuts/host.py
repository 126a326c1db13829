"""The NumPy likelihood inside traced code: a callback that sees NumPy arrays only, with its own gradient (DESIGN 4).

On one CPU core, value and gradient of 314 parameters (features=16, K = 2, 140 s) took 14 ms in NumPy and 88 ms compiled
(`msrm.gp.jax_backend`), of 4,205 parameters (features=360, K = 3) 55 and 520 ms; the compiled one took 40 to 90 s to
compile. A callback that is handed JAX arrays can deadlock on few cores (DESIGN 11); this one is lowered so that it
never is.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from msrm.gp.jax_settings import FLOAT
from msrm.gp.likelihood import Likelihood

__all__ = ["HostLikelihood"]


class HostLikelihood:
    """A NumPy log likelihood as a traced function of packed parameters.

    Parameters
    ----------
    likelihood : Likelihood

    Attributes
    ----------
    calls : int
        Values and gradients so far.
    interrupted : bool
        Whether a keyboard interrupt arrived inside; what was computed since is not to be used.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood, self.calls, self.interrupted = likelihood, 0, False
        self.log_likelihood = jax.custom_vjp(lambda packed: _bound(packed, self)[0])
        self.log_likelihood.defvjp(
            lambda packed: _bound(packed, self), lambda gradient, cotangent: (cotangent * gradient,)
        )

    def value_and_gradient(self, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values (...,) and gradients (..., parameter) of packed parameters (..., parameter); NaN where they fail."""
        points = np.reshape(packed, (-1, packed.shape[-1]))
        values, gradients = np.full(len(points), np.nan), np.full(points.shape, np.nan)
        try:
            for place, point in enumerate(points):
                values[place], gradients[place] = self._one(np.array(point))
        except KeyboardInterrupt:
            self.interrupted = True
        return values.reshape(packed.shape[:-1]), gradients.reshape(packed.shape)

    def _one(self, point: np.ndarray) -> tuple[float, Any]:
        self.calls += 1
        layout = self.likelihood.layout
        if not np.isfinite(point).all():
            return np.nan, np.nan
        try:
            # Far from the posterior anything may overflow; NaN then ends the trajectory.
            with np.errstate(all="ignore"):
                value, gradient = self.likelihood.value_and_gradient(layout.unpacked(point))
        except np.linalg.LinAlgError:
            return np.nan, np.nan
        return value, layout.packed(gradient)


_primitive = Primitive("msrm_host_likelihood")
_primitive.multiple_results = True


def _bound(packed: Array, host: HostLikelihood) -> tuple[Array, Array]:
    return tuple(_primitive.bind(jnp.asarray(packed, FLOAT), host=host))


def _abstract(packed: Any, *, host: HostLikelihood) -> list[Any]:
    return [ShapedArray(packed.shape[:-1], packed.dtype), packed]


def _lower(context: Any, packed: Any, *, host: HostLikelihood) -> Any:
    avals = context.avals_in, context.avals_out
    return mlir.emit_python_callback(
        context, host.value_and_gradient, None, [packed], *avals, has_side_effect=False, returns_token=False
    )[0]


def _batch(arguments: Any, axes: Any, *, host: HostLikelihood) -> Any:
    return _primitive.bind(jnp.moveaxis(arguments[0], axes[0], 0), host=host), (0, 0)


_primitive.def_impl(lambda packed, *, host: jax.jit(lambda x: _primitive.bind(x, host=host))(packed))
_primitive.def_abstract_eval(_abstract)
mlir.register_lowering(_primitive, _lower, cacheable=False)
batching.primitive_batchers[_primitive] = _batch
