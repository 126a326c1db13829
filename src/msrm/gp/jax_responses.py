"""Integrals of response curves over grid cells in JAX, as smooth functions of the free parameters (DESIGN 3.3).

The traced twin of `msrm.responses`' product integration: ``w[c, q] = integral over cell c of h(t - s) l_q(s) ds`` with
l_q the Lagrange polynomials of the same Gauss points of a cell. Shapes are fixed: every cell of a window is integrated
over its overlap with the support, which may be empty, so nothing depends on where the support falls. Gamma densities
are integrated in the power of time that makes their onset smooth. Curves, supports and unit-energy normalizers are
those of `msrm.responses`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import gammaln
from numpy.polynomial import chebyshev
from numpy.polynomial.laguerre import laggauss
from scipy.special import gammainccinv

from msrm.gp.jax_settings import FLOAT
from msrm.responses import Bateman, DoubleGamma, Free, Gamma, Gaussian, Response
from msrm.responses.cells import gauss_rule, unit_gauss

__all__ = ["RULE", "Curve", "cell_weights", "traced_curve"]

RULE = gauss_rule(12)  # the rule of msrm.responses.quadrature
_DEGREES = np.arange(RULE.order)
_MONIC = _DEGREES**2 / (4.0 * _DEGREES**2 - 1.0)  # q_{n+1} = z q_n - [n] q_{n-1} of Legendre polynomials P_n = k_n q_n
_FROM_MONIC = RULE.from_legendre * np.cumprod([1.0, *((2 * n - 1) / n for n in range(1, RULE.order))])[:, None]
_TINY = 1e-300
_EMPTY = 1e-8  # of a cell
_TIE = 1.7e-7  # of a cell: no multiple of any clock, so that rounding cannot turn a comparison
Values = dict[str, Any]


class Curve(Protocol):
    """A response with traced parameters."""

    @property
    def power(self) -> int:
        """Cells are integrated in the variable v with ``u = u_min + v^power``."""

    @property
    def points(self) -> int:
        """Gauss points of a panel."""

    @property
    def panels(self) -> int:
        """Panels of a cell."""

    def support(self, values: Values) -> tuple[Array, Array]:
        """(u_min, u_max), seconds."""

    def height(self, values: Values) -> Array:
        """The factor that makes `shape` a curve of unit energy."""

    def shape(self, s: Array, values: Values) -> Array:
        """The curve but for its height, s seconds after u_min."""


@dataclass(frozen=True)
class _Gaussian:
    panels: int
    power: int = 1
    points: int = 16

    def support(self, values: Values) -> tuple[Array, Array]:
        return values["lag"] - 6.0 * values["width"], values["lag"] + 6.0 * values["width"]

    def height(self, values: Values) -> Array:
        # erf(6) is 1 to rounding.
        return (np.sqrt(np.pi) * values["width"]) ** -0.5

    def shape(self, s: Array, values: Values) -> Array:
        z = s / values["width"] - 6.0
        return jnp.exp(-0.5 * z * z)


@dataclass(frozen=True)
class _Bateman:
    panels: int
    power: int = 1
    points: int = 16

    def support(self, values: Values) -> tuple[Array, Array]:
        return values["lag"], values["lag"] + 90.0

    def shape(self, s: Array, values: Values) -> Array:
        # exp(-s / decay) - exp(-s / rise) over the difference of the rates, without cancellation when they meet.
        slow, fast = (
            jnp.minimum(1 / values["decay"], 1 / values["rise"]),
            jnp.maximum(1 / values["decay"], 1 / values["rise"]),
        )
        return s * jnp.exp(-slow * s) * _relative_difference((fast - slow) * s)

    def height(self, values: Values) -> Array:
        rise, decay = values["rise"], values["decay"]
        # shape = b rise decay with b of energy 1 / (2 (rise + decay)) up to infinity; what lies beyond 90 s comes off.
        y, w = laggauss(48)
        slow = jnp.maximum(rise, decay)
        beyond = slow / 2 * jnp.sum(w * np.exp(y) * self.shape(90.0 + slow * y / 2, values) ** 2)
        return (0.5 * (rise * decay) ** 2 / (rise + decay) - beyond) ** -0.5


def _relative_difference(x: Array) -> Array:
    """(1 - exp(-x)) / x for x >= 0, smooth through 0."""
    small = x < 1e-2
    safe = jnp.where(small, 1.0, x)
    series = 1.0 - x / 2.0 * (1.0 - x / 3.0 * (1.0 - x / 4.0 * (1.0 - x / 5.0 * (1.0 - x / 6.0 * (1.0 - x / 7.0)))))
    return jnp.where(small, series, -jnp.expm1(-safe) / safe)


@dataclass(frozen=True)
class _Part:
    """One gamma density: names of its parameters, its sign and ratio, and its cut by shape."""

    shape: str
    scale: str
    ratio: str | None
    cut: Callable[[Any], Any]

    def reach(self, values: Values) -> Array:
        return values[self.scale] * self.cut(values[self.shape])

    def density(self, s: Array, values: Values) -> Array:
        k, scale = values[self.shape], values[self.scale]
        x = jnp.maximum(s / scale, _TINY)
        density = jnp.exp((k - 1) * jnp.log(x) - x - gammaln(jnp.asarray(k, FLOAT))) / scale
        return density if self.ratio is None else -values[self.ratio] * density


@dataclass(frozen=True)
class _Gammas:
    parts: tuple[_Part, ...]
    power: int
    panels: int
    points: int

    def support(self, values: Values) -> tuple[Array, Array]:
        reach = self.parts[0].reach(values)
        for part in self.parts[1:]:
            reach = jnp.maximum(reach, part.reach(values))
        return values["lag"], values["lag"] + reach

    def shape(self, s: Array, values: Values) -> Array:
        total = self.parts[0].density(s, values)
        for part in self.parts[1:]:
            total = total + part.density(s, values)
        return total

    def height(self, values: Values) -> Array:
        low, high = self.support(values)
        points, weights = unit_gauss(32, 16)
        end = (high - low) ** (1.0 / self.power)
        v = end * points
        energy = jnp.sum(end * weights * self.power * v ** (self.power - 1) * self.shape(v**self.power, values) ** 2)
        return energy**-0.5


def traced_curve(response: Response, step: float) -> Curve:
    """The traced form of a response with free parameters, resolved over their bounds for cells of ``step`` seconds.

    Raises
    ------
    TypeError
        For a family without free parameters in its definition: its weights are numbers, take them from
        `msrm.responses.quadrature`.
    """
    low = {name: p.bounds[0] if isinstance(p, Free) else float(p) for name, p in response.parameters.items()}
    if isinstance(response, Gaussian):
        return _Gaussian(int(np.ceil(step / (2.5 * low["width"]))))
    if isinstance(response, Bateman):
        return _Bateman(int(np.ceil(step / (2.0 * min(low["rise"], low["decay"])))))
    if isinstance(response, Gamma):
        names: list[tuple[str, str, str | None]] = [("shape", "scale", None)]
    elif isinstance(response, DoubleGamma):
        names = [
            ("peak_shape", "peak_scale", None),
            ("undershoot_shape", "undershoot_scale", "undershoot_ratio"),
        ]
    else:
        raise TypeError(f"{type(response).__name__} has no free parameters; its weights are constants.")
    parts = tuple(_Part(shape, scale, ratio, _cut(response.parameters[shape])) for shape, scale, ratio in names)
    smoothest = min(low[part.shape] for part in parts)
    panels = int(np.ceil(step / (2.0 * min(low[part.scale] for part in parts))))
    power = max(1, int(np.ceil(4.0 / smoothest)))
    return _Gammas(parts, power, panels, points=24 if power <= 4 else 40)


def _cut(shape: float | Free) -> Callable[[Any], Any]:
    """Where a unit-scale gamma has survival 1e-8, as a function of a traced shape.

    The inverse incomplete gamma has no traced form without a loop whose length is data; its logarithm over the bounds
    is a Chebyshev series in the logarithm of the shape.
    """
    if not isinstance(shape, Free):
        constant = float(gammainccinv(float(shape), 1e-8))
        return lambda _: constant
    lower, upper = np.log(shape.bounds)
    series = chebyshev.Chebyshev.interpolate(lambda x: np.log(gammainccinv(np.exp(x), 1e-8)), 24, domain=[lower, upper])
    coefficients = series.coef[::-1]

    def cut(value: Any) -> Array:
        x = (2.0 * jnp.log(value) - lower - upper) / (upper - lower)
        before, last = jnp.zeros_like(x), jnp.zeros_like(x)
        for coefficient in coefficients[:-1]:
            before, last = last, coefficient + 2.0 * x * last - before
        return jnp.exp(coefficients[-1] + x * last - before)

    return cut


def _root(x: Array, power: int, smallest: float) -> Array:
    """x^(1/power) for x >= 0; 0, derivative included, below `smallest`.

    The root's derivative is unbounded at 0 while the integrand vanishes: rounding would be all that is left of their
    product. What the cell before an onset gives up the next one takes over.
    """
    positive = x > smallest
    return jnp.where(positive, jnp.where(positive, x, 1.0) ** (1.0 / power), 0.0)


def _weights(curve: Curve, step: float, cells: int, ahead: Array, values: Values) -> Array:
    low, high = curve.support(values)
    edges = ahead[..., None] - step * np.arange(cells + 1)  # u at the cell edges, falling
    # Supports often end where cells do. Compiled code computes edges in several places, rounded differently: were they
    # compared with the ends themselves, parts of one integral would see the moving end and others not.
    tie = _TIE * step
    inside = jnp.where(edges > high - tie, high, jnp.where(edges < low + tie, low, edges)) - low
    upper, lower = inside[..., :-1, None], inside[..., 1:, None]
    points, weights = unit_gauss(curve.points, curve.panels)
    if curve.power == 1:
        s, measure = lower + (upper - lower) * points, (upper - lower) * weights
    else:
        start, end = (_root(s, curve.power, _EMPTY * step) for s in (lower, upper))
        v = start + (end - start) * points
        s = v**curve.power
        measure = (end - start) * (weights * curve.power) * v ** (curve.power - 1)
    h = curve.shape(s, values) * measure
    z = 2.0 * ((ahead[..., None, None] - low - s) / step - np.arange(cells)[:, None]) - 1.0
    moments: list[Array] = [h.sum(-1)]
    previous, current = jnp.ones(()), z
    for n in range(1, RULE.order):
        moments.append((h * current).sum(-1))
        previous, current = current, z * current - float(_MONIC[n]) * previous
    return curve.height(values) * (jnp.stack(moments, -1) @ _FROM_MONIC)


def cell_weights(curve: Curve, step: float, cells: int, ahead: Array, values: Values) -> Array:
    """Product-integration weights over a window of cells, differentiable in the response parameters.

    Parameters
    ----------
    curve : Curve
    step : float
        Length of a cell, seconds.
    cells : int
        Cells of the window.
    ahead : (...,)
        Time of a node from the window's start, seconds; constant.
    values : {name: () array or float}
        All parameters; arrays are differentiated.

    Returns
    -------
    (..., cell, point)
    """
    names = tuple(name for name, value in values.items() if isinstance(value, jax.Array))
    if not names:
        return _weights(curve, step, cells, ahead, values)
    fixed = {name: value for name, value in values.items() if name not in names}

    def function(free: Array, ahead: Array) -> Array:
        return _weights(curve, step, cells, ahead, fixed | dict(zip(names, free, strict=True)))

    return _by_forward_derivatives(function)(jnp.stack([values[name] for name in names]), ahead)


def _by_forward_derivatives(function: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """The same function of a short vector and a constant, its gradient by derivatives carried forward.

    A reverse pass would keep every quadrature point; the derivatives are as few arrays as parameters.
    """
    wrapped = jax.custom_jvp(function)

    def rule(primals: Any, tangents: Any) -> Any:
        vector, constant = primals

        def along(direction: Array) -> tuple[Array, Array]:
            return jax.jvp(lambda moved: function(moved, constant), (vector,), (direction,))

        values, slopes = jax.vmap(along, out_axes=(None, 0))(jnp.eye(vector.shape[0]))
        return values, jnp.tensordot(tangents[0], slopes, 1)

    wrapped.defjvp(rule)
    return wrapped
