"""What every response shares: named parameters (fixed or ``Free``), values, support and pooling (DESIGN 2).

Owns ``Free`` and the abstract ``Response``. The families are in ``families``, their integrals in ``integrate``.
A response h is zero outside a finite support and has unit energy there: integral of h(u)^2 du = 1.
"""

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import product
from math import isfinite
from numbers import Real
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from msrm.priors import Prior, Uniform
from msrm.responses.cells import Array, Cells

__all__ = ["Free", "Response", "Values"]

Values = dict[str, float]
_POOLING = ("pooling", "pooling_strength")
_POOLINGS = ("shared", "partial", "separate")


@dataclass(frozen=True)
class Free:
    """A response parameter to be learned within bounds.

    Parameters
    ----------
    start : float
        Where the search starts, within the bounds.
    bounds : (float, float)
        Finite; the support envelope of a stream is taken over them.
    prior : Prior, optional
        Density of the parameter, truncated to the bounds and renormalized where it is used.

    Raises
    ------
    ValueError
        When bounds are not finite and increasing, the start lies outside, or the prior excludes a part of them.
    TypeError
        When the prior is not a ``Prior``.

    Examples
    --------
    >>> Free(0.0, bounds=(-1.5, 1.5)).bounded_prior
    Uniform(lower=-1.5, upper=1.5)
    """

    start: float
    bounds: tuple[float, float]
    prior: Prior | None = None

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not (isfinite(low) and isfinite(high) and low < high):
            raise ValueError(f"Free: bounds must be two finite increasing numbers, got {self.bounds!r}.")
        if not (isinstance(self.start, Real) and low <= self.start <= high):
            raise ValueError(f"Free: start {self.start!r} must lie within the bounds {self.bounds!r}.")
        if self.prior is not None and not isinstance(self.prior, Prior):
            raise TypeError(f"Free: prior must be Normal, LogNormal, Uniform or None, got {self.prior!r}.")
        object.__setattr__(self, "start", float(self.start))
        object.__setattr__(self, "bounds", (float(low), float(high)))
        if self.prior is not None and not (self.prior.lower <= low and high <= self.prior.upper):
            raise ValueError(
                f"Free: the prior {self.prior!r} has no density in a part of the bounds {self.bounds}; "
                f"narrow the bounds to within [{self.prior.lower:g}, {self.prior.upper:g}] or choose another prior."
            )

    @cached_property
    def bounded_prior(self) -> Prior:
        """The prior cut to the bounds and renormalized; uniform over the bounds when none was given."""
        return Uniform(*self.bounds) if self.prior is None else self.prior.bounded(*self.bounds)


@dataclass(frozen=True, repr=False)
class Response:
    """A modality's filter h: the stream sees g(t) = integral of h(u) z(t - u) du, u in seconds.

    Parameters
    ----------
    pooling : {"shared", "partial", "separate"}
        Across participants: one set of free values, one set each drawn together, or one set each.
    pooling_strength : float, optional
        Needed by and only for ``pooling="partial"``: the weight of the mean over participants of squared
        deviations of the free coordinates (logarithms for ``positive`` ones) from their mean.
    """

    pooling: str = field(default="shared", kw_only=True)
    pooling_strength: float | None = field(default=None, kw_only=True)

    positive: ClassVar[frozenset[str]] = frozenset()
    energy: ClassVar[float] = 1.0
    is_identity: ClassVar[bool] = False

    def __post_init__(self) -> None:
        family = type(self).__name__
        for name, parameter in self.parameters.items():
            _check_parameter(family, name, parameter, self._lower_limit(name))
            if not isinstance(parameter, Free):
                object.__setattr__(self, name, float(parameter))
        if self.pooling not in _POOLINGS:
            raise ValueError(f"{family}: pooling must be one of {', '.join(_POOLINGS)}, got {self.pooling!r}.")
        if self.pooling != "shared" and not self.free:
            raise ValueError(f"{family}: pooling={self.pooling!r} needs a Free parameter; all are fixed.")
        strength = self.pooling_strength
        if (self.pooling == "partial") != (strength is not None):
            raise ValueError(
                f"{family}: pooling_strength goes with pooling='partial' and only with it, "
                f"got pooling={self.pooling!r}, pooling_strength={strength!r}."
            )
        if strength is not None and not (isfinite(strength) and strength > 0):
            raise ValueError(f"{family}: pooling_strength must be a positive finite number, got {strength!r}.")

    def __repr__(self) -> str:
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _POOLING}
        if self.pooling != "shared":
            shown |= {name: getattr(self, name) for name in _POOLING if getattr(self, name) is not None}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _lower_limit(self, name: str) -> float:
        """What a parameter must exceed."""
        return 0.0 if name in self.positive else -np.inf

    @cached_property
    def parameters(self) -> dict[str, float | Free]:
        """Every parameter by name, as given."""
        skipped = {*_POOLING, *self._data_fields}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skipped}

    _data_fields: ClassVar[frozenset[str]] = frozenset()

    @cached_property
    def free(self) -> dict[str, Free]:
        """The free parameters by name."""
        return {name: value for name, value in self.parameters.items() if isinstance(value, Free)}

    @cached_property
    def start(self) -> Values:
        """Every parameter's value, free ones at their start."""
        return {name: p.start if isinstance(p, Free) else float(p) for name, p in self.parameters.items()}

    def resolved(self, values: Values | None = None) -> Values:
        """Every parameter's value, those in ``values`` replaced."""
        if not values:
            return self.start
        if not values.keys() <= self.start.keys():
            unknown = sorted(values.keys() - self.start.keys())
            raise ValueError(f"{type(self).__name__} has no parameter {unknown}; it has {sorted(self.start)}.")
        return {**self.start, **values}

    def with_values(self, values: Values | None = None) -> Self:
        """The same family with every parameter fixed, those in ``values`` at the given number."""
        return replace(self, **self.resolved(values), pooling="shared", pooling_strength=None)

    def support(self, values: Values | None = None) -> tuple[float, float]:
        """(u_min, u_max) in seconds outside which h is zero."""
        return self._support(self.resolved(values))

    def envelope(self) -> tuple[float, float]:
        """The union of supports over the bounds of the free parameters (edges are monotone in each)."""
        corners = product(*(p.bounds for p in self.free.values()))
        edges = [self.support(dict(zip(self.free, corner, strict=True))) for corner in corners]
        return min(low for low, _ in edges), max(high for _, high in edges)

    def curve(self, u: ArrayLike, values: Values | None = None) -> Array:
        """h(u), zero outside the support.

        Parameters
        ----------
        u : array, seconds
        values : dict, optional
            Parameter values that replace the fixed or starting ones.
        """
        u, v = np.asarray(u, float), self.resolved(values)
        low, high = self._support(v)
        inside = (u >= low) & (u <= high)
        return np.where(inside, self._curve(np.clip(u, low, high), v), 0.0)

    def curve_gradient(self, u: ArrayLike, values: Values | None = None) -> dict[str, Array]:
        """dh(u)/dparameter of each free parameter inside the support (edge motion excluded), zero outside."""
        u, v = np.asarray(u, float), self.resolved(values)
        low, high = self._support(v)
        inside = (u >= low) & (u <= high)
        slopes = self._curve_gradient(np.clip(u, low, high), v)
        return {name: np.where(inside, slopes[name], 0.0) for name in self.free}

    def gain(self, values: Values | None = None) -> float:
        """Integral of h: what a constant latent is multiplied by."""
        return self._gain(self.resolved(values))

    def gain_gradient(self, values: Values | None = None) -> Values:
        """Derivative of the gain in each free parameter, the motion of the support's edges included."""
        slopes = self._gain_gradient(self.resolved(values))
        return {name: float(slopes[name]) for name in self.free}

    def _support(self, v: Values) -> tuple[float, float]:
        raise NotImplementedError

    def _curve(self, u: Array, v: Values) -> Array:
        raise NotImplementedError

    def _curve_gradient(self, u: Array, v: Values) -> dict[str, Array]:
        raise NotImplementedError

    def _gain(self, v: Values) -> float:
        raise NotImplementedError

    def _gain_gradient(self, v: Values) -> Values:
        raise NotImplementedError

    def _resolution(self, v: Values) -> float:
        """Length over which twelve Gauss points resolve h away from its onset, seconds."""
        raise NotImplementedError

    def _cell_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        """Weights (phase, cell, point) of a Gauss rule and their derivatives in the free parameters."""
        raise NotImplementedError

    def _hat_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        """Weights (phase, cell, 2) of the hat rule and their derivatives, up to terms that cancel between cells."""
        raise NotImplementedError


def _check_parameter(family: str, name: str, parameter: float | Free, limit: float) -> None:
    """Refuse a parameter that is no finite number above its limit, or a Free one that can leave it."""
    if isinstance(parameter, Free):
        if not parameter.bounds[0] > limit:
            raise ValueError(f"{family}: {name} must exceed {limit:g}; its bounds {parameter.bounds} do not.")
        return
    if isinstance(parameter, bool) or not isinstance(parameter, Real):
        raise TypeError(f"{family}: {name} must be a number or Free(start, bounds=...), got {parameter!r}.")
    if not (isfinite(parameter) and parameter > limit):
        raise ValueError(f"{family}: {name} must be finite and exceed {limit:g}, got {parameter!r}.")
