"""Identity, Gaussian and Sampled responses (DESIGN 2): curves, supports, gains, and their integrals over grid cells.

Each family owns its formula, the normalizer that gives it unit energy on its support, and the derivatives in its
parameters; ``cells`` owns the integration and the derivatives in shifts and dilations. ``gamma`` and ``bateman`` own
the other families.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from scipy.special import erf

from msrm.responses.base import Free, Response, Values
from msrm.responses.cells import Array, Cells

__all__ = ["Gaussian", "Identity", "Sampled"]

_HALF_SUPPORT = 6.0
# Twelve Gauss points integrate a Gaussian times a smooth function over 2.5 widths to rounding.
_GAUSSIAN_RESOLUTION = 2.5
_ROOT_HALF = np.sqrt(0.5)
_ERF_SIX = float(erf(_HALF_SUPPORT))
_ERF_EDGE = float(erf(_HALF_SUPPORT * _ROOT_HALF))


@dataclass(frozen=True, repr=False)
class Identity(Response):
    """The unit impulse: the stream sees the latent itself at its own times.

    Examples
    --------
    >>> Identity().support()
    (0.0, 0.0)
    """

    is_identity: ClassVar[bool] = True

    def _support(self, v: Values) -> tuple[float, float]:
        return 0.0, 0.0

    def curve(self, u: object, values: Values | None = None) -> Array:
        """An impulse has no curve.

        Raises
        ------
        TypeError
            Always.
        """
        raise TypeError("Identity is a unit impulse and has no curve to evaluate; test is_identity first.")

    curve_gradient = curve  # type: ignore[assignment]

    def _resolution(self, v: Values) -> float:
        return np.inf

    def _gain(self, v: Values) -> float:
        return 1.0

    def _gain_gradient(self, v: Values) -> Values:
        return {}


@dataclass(frozen=True, repr=False)
class Gaussian(Response):
    """h(u) proportional to exp(-(u - lag)^2 / (2 width^2)) on lag +- 6 width.

    Parameters
    ----------
    width : float or Free
        Standard deviation, seconds.
    lag : float or Free
        Centre, seconds; positive when the stream follows the latent.

    Examples
    --------
    >>> Gaussian(width=0.5, lag=1.0).support()
    (-2.0, 4.0)
    """

    width: float | Free
    lag: float | Free

    positive: ClassVar[frozenset[str]] = frozenset({"width"})

    def _support(self, v: Values) -> tuple[float, float]:
        reach = _HALF_SUPPORT * v["width"]
        return v["lag"] - reach, v["lag"] + reach

    def _height(self, v: Values) -> float:
        return float((np.sqrt(np.pi) * _ERF_SIX * v["width"]) ** -0.5)

    def _curve(self, u: Array, v: Values) -> Array:
        z = (u - v["lag"]) / v["width"]
        return self._height(v) * np.exp(-0.5 * z * z)

    def _curve_gradient(self, u: Array, v: Values) -> dict[str, Array]:
        z = (u - v["lag"]) / v["width"]
        h = self._curve(u, v)
        return {"lag": h * z / v["width"], "width": h * (z * z - 0.5) / v["width"]}

    def _gain(self, v: Values) -> float:
        return float(self._height(v) * np.sqrt(2 * np.pi) * v["width"] * _ERF_EDGE)

    def _gain_gradient(self, v: Values) -> Values:
        return {"lag": 0.0, "width": 0.5 * self._gain(v) / v["width"]}

    def _resolution(self, v: Values) -> float:
        return _GAUSSIAN_RESOLUTION * v["width"]

    def _cell_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        w = cells.weights(lambda u: self._curve(u, v), self._resolution(v))
        return w, self._derivatives(cells, w, v, cells.edge_values(lambda u: self._curve(u, v)) if self.free else None)

    def _hat_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        width, height = v["width"], self._height(v)
        z = np.clip((cells.edges - v["lag"]) / width, -_HALF_SUPPORT, _HALF_SUPPORT)
        mass = height * width * np.sqrt(np.pi / 2) * erf(z * _ROOT_HALF)
        moment = -height * width**2 * np.exp(-0.5 * z * z)
        w = cells.weights_from_antiderivatives(mass, moment, v["lag"])
        return w, self._derivatives(cells, w, v, None)

    def _derivatives(self, cells: Cells, w: Array, v: Values, edge_values: Array | None) -> dict[str, Array]:
        made = {
            "lag": lambda: cells.by_parts(w, edge_values),
            "width": lambda: cells.dilated(w, edge_values, v["lag"], v["width"]),
        }
        return {name: made[name]() for name in self.free}


@dataclass(frozen=True, repr=False)
class Sampled(Response):
    """A measured curve, piecewise linear between its samples and zero outside; rescaled to unit energy, sign kept.

    Parameters
    ----------
    lags : sequence of float
        Increasing, seconds; at least two.
    values : sequence of float
        Heights at the lags, not all zero.

    Raises
    ------
    ValueError
        When lags do not increase, lengths differ, or anything is not finite.

    Examples
    --------
    >>> Sampled(lags=[0.0, 1.0, 3.0], values=[0.0, 1.0, 0.0]).gain()
    1.5
    """

    lags: Sequence[float]
    values: Sequence[float]

    _data_fields: ClassVar[frozenset[str]] = frozenset({"lags", "values"})

    def __post_init__(self) -> None:
        lags, values = (np.asarray(given, float) for given in (self.lags, self.values))
        if lags.ndim != 1 or lags.shape != values.shape or len(lags) < 2:
            raise ValueError(
                f"Sampled: lags and values must be two sequences of one length, at least 2; "
                f"got shapes {lags.shape} and {values.shape}."
            )
        if not (np.isfinite(lags).all() and np.isfinite(values).all() and values.any()):
            raise ValueError("Sampled: lags and values must be finite and the values not all zero.")
        steps = np.diff(lags)
        if not (steps > 0).all():
            where = int(np.argmin(steps))
            raise ValueError(f"Sampled: lags must increase; {lags[where + 1]:g} s follows {lags[where]:g} s.")
        object.__setattr__(self, "lags", tuple(lags.tolist()))
        object.__setattr__(self, "values", tuple(values.tolist()))
        super().__post_init__()

    @cached_property
    def _knots(self) -> tuple[Array, Array]:
        """Lags and unit-energy heights."""
        lags, values = np.array(self.lags), np.array(self.values)
        low, high = values[:-1], values[1:]
        energy = float(np.diff(lags) @ (low * low + low * high + high * high)) / 3
        return lags, values / np.sqrt(energy)

    def _support(self, v: Values) -> tuple[float, float]:
        return self.lags[0], self.lags[-1]

    def _curve(self, u: Array, v: Values) -> Array:
        return np.interp(u, *self._knots)

    def _curve_gradient(self, u: Array, v: Values) -> dict[str, Array]:
        return {}

    def _gain(self, v: Values) -> float:
        lags, values = self._knots
        return float(np.trapezoid(values, lags))

    def _gain_gradient(self, v: Values) -> Values:
        return {}

    def _resolution(self, v: Values) -> float:
        # What is left of a knot after two integrations is a corner of high order: a quarter of the spacing is ample.
        return max(float(np.diff(self.lags).min()) / 4, 0.1)

    def _cell_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        # Pieces end at every knot and every cell edge, so the curve is linear in each and Gauss points are exact.
        lags, _ = self._knots
        cuts = np.sort(
            np.concatenate([np.clip(cells.edges, lags[0], lags[-1]), np.tile(lags, (len(cells.top), 1))], axis=1),
            axis=1,
        )[:, ::-1]
        out = np.zeros((len(cells.top), cells.count, cells.rule.order))
        rows = np.arange(len(cells.top))
        for upper, lower in zip(cuts.T[:-1], cuts.T[1:], strict=True):
            cell = np.floor((cells.top - (upper + lower) / 2) / cells.step).astype(np.intp)
            cell = np.clip(cell, 0, cells.count - 1)
            out[rows, cell] += cells.piece(lambda u: self._curve(u, v), cell, upper, lower)
        return out, {}

    def _hat_weights(self, cells: Cells, v: Values) -> tuple[Array, dict[str, Array]]:
        return self._cell_weights(cells, v)
