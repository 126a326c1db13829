"""Prior densities of scalar parameters and the standing priors of GP-MSRM (DESIGN 2 and 5).

Owns ``Normal``, ``LogNormal``, ``Uniform``, their truncation and renormalization by ``bounded``, and ``Priors``.
Every density is that of the physical parameter: p(x) = phi((g(x) - mean) / sd) |g'(x)| / (sd Z), with g(x) = x or
log x and Z = Phi(b) - Phi(a) the mass between the bounds, evaluated in logarithms so that far tails stay exact.
"""

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, ndtri_exp

__all__ = ["LogNormal", "Normal", "Prior", "Priors", "Uniform"]

_LOG_ROOT_TWO_PI = 0.5 * np.log(2 * np.pi)


def _log_mass(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """log(Phi(b) - Phi(a)) for a <= b, on whichever side of zero keeps its relative accuracy."""
    a, b = np.broadcast_arrays(np.asarray(a, float), np.asarray(b, float))
    flip = a > 0
    low, high = np.where(flip, -b, a), np.where(flip, -a, b)
    log_high = log_ndtr(high)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(low == high, -np.inf, log_high + np.log1p(-np.exp(log_ndtr(low) - log_high)))


@dataclass(frozen=True)
class Prior:
    """A density of one scalar on (lower, upper); use ``Normal``, ``LogNormal`` or ``Uniform``."""

    def bounded(self, lower: float, upper: float) -> Self:
        """This density cut to (lower, upper), within its own bounds, and renormalized.

        Raises
        ------
        ValueError
            When nothing is left between the bounds.
        """
        lower, upper = max(float(lower), self.lower), min(float(upper), self.upper)
        if not lower < upper:
            raise ValueError(f"{self} has no mass between {lower:g} and {upper:g}: give bounds with lower < upper.")
        return replace(self, lower=lower, upper=upper)

    lower: float
    upper: float

    def _inside(self, x: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        x = np.asarray(x, float)
        return x, (x >= self.lower) & (x <= self.upper)

    def log_density(self, x: ArrayLike) -> NDArray[np.float64]:
        """log p(x), -inf outside the bounds."""
        raise NotImplementedError

    def log_density_gradient(self, x: ArrayLike) -> NDArray[np.float64]:
        """d log p(x) / dx, NaN outside the bounds."""
        raise NotImplementedError

    def cdf(self, x: ArrayLike) -> NDArray[np.float64]:
        """Probability of a value at most x."""
        raise NotImplementedError

    def quantile(self, p: ArrayLike) -> NDArray[np.float64]:
        """The value whose cdf is p."""
        raise NotImplementedError

    def sample(self, rng: np.random.Generator, size: int | tuple[int, ...] | None = None) -> NDArray[np.float64]:
        """Independent draws by inversion."""
        return self.quantile(rng.uniform(size=size))


@dataclass(frozen=True, repr=False)
class _Gaussian(Prior):
    """Shared algebra of Normal and LogNormal: a truncated normal of g(x)."""

    mean: float
    sd: float
    lower: float = field(default=-np.inf, kw_only=True)
    upper: float = field(default=np.inf, kw_only=True)

    def __post_init__(self) -> None:
        if not (np.isfinite(self.mean) and np.isfinite(self.sd) and self.sd > 0):
            raise ValueError(f"{self}: mean must be finite and sd a positive finite number.")
        if not self.lower < self.upper:
            raise ValueError(f"{self}: lower must be below upper.")

    def __repr__(self) -> str:
        plain = (self.lower, self.upper) == (type(self).lower, type(self).upper)
        bounds = "" if plain else f", lower={self.lower!r}, upper={self.upper!r}"
        return f"{type(self).__name__}({self.mean!r}, {self.sd!r}{bounds})"

    def _coordinate(self, x: ArrayLike) -> NDArray[np.float64]:
        return np.asarray(x, float)

    def _inverse(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        return y

    def _z(self, x: ArrayLike) -> NDArray[np.float64]:
        return (self._coordinate(x) - self.mean) / self.sd

    def _log_normalizer(self) -> float:
        return float(_log_mass(self._z(self.lower), self._z(self.upper)) + np.log(self.sd) + _LOG_ROOT_TWO_PI)

    def cdf(self, x: ArrayLike) -> NDArray[np.float64]:
        x = np.clip(np.asarray(x, float), self.lower, self.upper)
        low = self._z(self.lower)
        return np.exp(_log_mass(low, self._z(x)) - _log_mass(low, self._z(self.upper)))

    def quantile(self, p: ArrayLike) -> NDArray[np.float64]:
        p = np.asarray(p, float)
        a, b = self._z(self.lower), self._z(self.upper)
        flip = a > 0
        share, low = (1 - p, -b) if flip else (p, a)
        with np.errstate(divide="ignore"):
            log_share = np.log(share)
        z = ndtri_exp(np.minimum(np.logaddexp(log_ndtr(low), log_share + _log_mass(a, b)), 0.0))
        return np.clip(self._inverse(self.mean + self.sd * (-z if flip else z)), self.lower, self.upper)


@dataclass(frozen=True, repr=False)
class Normal(_Gaussian):
    """Normal density.

    Parameters
    ----------
    mean, sd : float
        In the parameter's own units.

    Examples
    --------
    >>> float(Normal(0.5, 1.0).bounded(-1.0, 2.0).cdf(0.5))
    0.5
    """

    def log_density(self, x: ArrayLike) -> NDArray[np.float64]:
        x, inside = self._inside(x)
        return np.where(inside, -0.5 * self._z(x) ** 2 - self._log_normalizer(), -np.inf)

    def log_density_gradient(self, x: ArrayLike) -> NDArray[np.float64]:
        x, inside = self._inside(x)
        return np.where(inside, -self._z(x) / self.sd, np.nan)


@dataclass(frozen=True, repr=False)
class LogNormal(_Gaussian):
    """Density of a positive value whose logarithm is normal.

    Parameters
    ----------
    mean, sd : float
        Of the logarithm.

    Examples
    --------
    >>> round(float(LogNormal(-0.5, 1.0).quantile(0.5)), 6)
    0.606531
    """

    lower: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lower < 0:
            raise ValueError(f"{self}: a lognormal lives above 0; lower must not be negative.")

    def bounded(self, lower: float, upper: float) -> Self:
        return super().bounded(max(lower, 0.0), upper)

    def _coordinate(self, x: ArrayLike) -> NDArray[np.float64]:
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(x, float))

    def _inverse(self, y: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.exp(y)

    def log_density(self, x: ArrayLike) -> NDArray[np.float64]:
        x, inside = self._inside(x)
        inside &= x > 0
        safe = np.where(inside, x, 1.0)
        return np.where(inside, -0.5 * self._z(safe) ** 2 - np.log(safe) - self._log_normalizer(), -np.inf)

    def log_density_gradient(self, x: ArrayLike) -> NDArray[np.float64]:
        x, inside = self._inside(x)
        inside &= x > 0
        safe = np.where(inside, x, 1.0)
        return np.where(inside, -(self._z(safe) / self.sd + 1) / safe, np.nan)


@dataclass(frozen=True)
class Uniform(Prior):
    """Constant density between two finite numbers."""

    def __post_init__(self) -> None:
        if not (np.isfinite(self.lower) and np.isfinite(self.upper) and self.lower < self.upper):
            raise ValueError(f"{self}: lower and upper must be finite and lower below upper.")

    def log_density(self, x: ArrayLike) -> NDArray[np.float64]:
        x, inside = self._inside(x)
        return np.where(inside, -np.log(self.upper - self.lower), -np.inf)

    def log_density_gradient(self, x: ArrayLike) -> NDArray[np.float64]:
        x, inside = self._inside(x)
        return np.where(inside, 0.0, np.nan)

    def cdf(self, x: ArrayLike) -> NDArray[np.float64]:
        return np.clip((np.asarray(x, float) - self.lower) / (self.upper - self.lower), 0.0, 1.0)

    def quantile(self, p: ArrayLike) -> NDArray[np.float64]:
        return self.lower + np.asarray(p, float) * (self.upper - self.lower)


@dataclass(frozen=True)
class Priors:
    """The standing priors of GP-MSRM, the same for every feature of every stream.

    Parameters
    ----------
    noise : Prior
        Of each participant-modality's noise variance (data units squared).
    loading_sd, offset_sd : float
        Sd of the zero-mean normal priors of loadings and offsets (data units).
    run_offset_sd : float
        Sd of the zero-mean normal prior of run offsets, where the model has them (data units).

    Raises
    ------
    TypeError
        When ``noise`` is not a prior.
    ValueError
        When a sd is not positive and finite, or the noise prior has mass below 0.
    """

    noise: Prior = LogNormal(-0.5, 1.0)
    loading_sd: float = 1.0
    offset_sd: float = 1.0
    run_offset_sd: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.noise, Prior):
            raise TypeError(f"Priors: noise must be a prior such as LogNormal(-0.5, 1.0), got {self.noise!r}.")
        if self.noise.lower < 0:
            raise ValueError(f"Priors: noise is a variance; {self.noise} reaches below 0. Bound it or use LogNormal.")
        for name in ("loading_sd", "offset_sd", "run_offset_sd"):
            sd = getattr(self, name)
            if not (np.isfinite(sd) and sd > 0):
                raise ValueError(f"Priors: {name} must be a positive finite number, got {sd!r}.")
