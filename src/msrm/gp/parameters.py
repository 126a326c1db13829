"""The model's specification and its parameters: a flat dict of named arrays (DESIGN 9), its layout and prior density.

Names are ``loading/{participant}/{modality}`` (feature, factor), ``offset/{p}/{m}`` (feature,), ``noise/{p}/{m}`` (a
variance), ``response/{m}/{name}``, ``length_scale``, ``residual_timescale/{m}`` and ``run_offset/{p}/{run}/{m}``
(feature,). Only free scalars are in it. The same layout serves raw features and the rotated coordinates of
DESIGN 3.2, where the features that carry no data are zero and enter the prior by their number.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from msrm.gp.data import PairData
from msrm.gp.terms import Residual, White
from msrm.latent_grid import Matern, Matern32
from msrm.priors import Prior, Priors
from msrm.responses import Response

Parameters = dict[str, np.ndarray]


@dataclass(frozen=True)
class FreeLengthScale:
    """A length scale to be learned: where it starts and its prior density, in seconds."""

    start: float
    prior: Prior

    @property
    def bounds(self) -> tuple[float, float]:
        """Where the prior is positive."""
        return self.prior.lower, self.prior.upper


@dataclass(frozen=True, eq=False)
class Specification:
    """What a GP-MSRM is, apart from data and parameters.

    Attributes
    ----------
    n_factors : int
    responses : {modality: Response}
    length_scale : float or FreeLengthScale
        Seconds.
    priors : Priors
    matern : Matern
    residuals : {modality: Residual}
        White where a modality is absent.
    powers : {modality: float}
        Exponents of the likelihood; 1 where absent.
    run_offsets : frozenset of str
        Modalities whose offsets vary by run.
    """

    n_factors: int
    responses: Mapping[str, Response]
    length_scale: float | FreeLengthScale = 3.0
    priors: Priors = field(default_factory=Priors)
    matern: Matern = field(default_factory=Matern32)
    residuals: Mapping[str, Residual] = field(default_factory=dict)
    powers: Mapping[str, float] = field(default_factory=dict)
    run_offsets: frozenset[str] = frozenset()

    def residual(self, modality: str) -> Residual:
        """The residual model of a modality."""
        return self.residuals.get(modality, White())

    def power(self, modality: str) -> float:
        """The exponent of a modality's likelihood."""
        return self.powers.get(modality, 1.0)

    def response_values(self, parameters: Mapping[str, np.ndarray]) -> dict[str, dict[str, float]]:
        """Free response parameters by modality."""
        return {
            modality: {name: float(parameters[f"response/{modality}/{name}"]) for name in response.free}
            for modality, response in self.responses.items()
            if all(f"response/{modality}/{name}" in parameters for name in response.free)
        }

    def length_scale_of(self, parameters: Mapping[str, np.ndarray]) -> float:
        """The length scale in seconds, learned or fixed."""
        if isinstance(self.length_scale, FreeLengthScale):
            return float(parameters["length_scale"])
        return float(self.length_scale)

    def timescale_of(self, parameters: Mapping[str, np.ndarray], modality: str) -> float:
        """The residual timescale of a modality in seconds, learned or fixed; NaN for white residuals."""
        residual = self.residual(modality)
        return residual.start if residual.free is None else float(parameters[f"residual_timescale/{modality}"])

    def timescale_start(self, modality: str) -> float:
        """Where the residual timescale of a modality starts, or its fixed value, seconds."""
        return self.residual(modality).start


@dataclass(frozen=True, eq=False)
class Layout:
    """Names, shapes and bounds of the parameters of a specification on some data.

    Attributes
    ----------
    shapes : {name: shape}
    bounds : {name: (lower, upper)}
        Of the scalars that have any.
    null_features : int
        Features that are zero in loading and offset and only count in the prior.
    """

    specification: Specification
    shapes: dict[str, tuple[int, ...]]
    bounds: dict[str, tuple[float, float]]
    null_features: dict[str, int]

    @classmethod
    def of(cls, specification: Specification, pairs: Sequence[PairData]) -> "Layout":
        """The layout for the coordinates of the pairs."""
        shapes: dict[str, tuple[int, ...]] = {}
        null = {}
        for pair in pairs:
            shapes |= _pair_shapes(specification, pair.participant, pair.modality, pair.n_coordinates)
            null[f"{pair.participant}/{pair.modality}"] = pair.n_features - pair.n_coordinates
        for pair in pairs:
            if pair.modality in specification.run_offsets:
                for run in pair.rows:
                    shapes[f"run_offset/{pair.participant}/{run}/{pair.modality}"] = (pair.n_coordinates,)
        return cls._of(specification, shapes, [pair.modality for pair in pairs], null)

    @classmethod
    def named(cls, specification: Specification, parameters: Mapping[str, object]) -> "Layout":
        """The layout of a complete set of parameters in raw features: shapes are those of the loadings.

        Raises
        ------
        ValueError
            When a loading is not (feature, factor).
        """
        pairs: dict[tuple[str, str], int] = {}
        for name, value in parameters.items():
            kind, *rest = name.split("/")
            if kind == "loading" and len(rest) == 2:
                shape = np.asarray(value).shape
                if len(shape) != 2 or rest[1] not in specification.responses:
                    wanted = f"(feature, {specification.n_factors}) and a modality of {list(specification.responses)}"
                    raise ValueError(f"Parameter {name!r}: shape {shape}, wanted {wanted}.")
                pairs[rest[0], rest[1]] = shape[0]
        shapes: dict[str, tuple[int, ...]] = {}
        for (participant, modality), features in pairs.items():
            shapes |= _pair_shapes(specification, participant, modality, features)
        for name in parameters:
            kind, *rest = name.split("/")
            if kind == "run_offset" and len(rest) == 3 and rest[2] in specification.run_offsets:
                shapes[name] = (pairs.get((rest[0], rest[2]), 0),)
        return cls._of(
            specification, shapes, [modality for _, modality in pairs], dict.fromkeys(map("/".join, pairs), 0)
        )

    @classmethod
    def _of(
        cls,
        specification: Specification,
        shapes: dict[str, tuple[int, ...]],
        modalities: Sequence[str],
        null_features: dict[str, int],
    ) -> "Layout":
        bounds = {}
        for modality in dict.fromkeys(modalities):
            for parameter, free in specification.responses[modality].free.items():
                bounds[f"response/{modality}/{parameter}"] = free.bounds
            residual = specification.residual(modality)
            if residual.free is not None:
                bounds[f"residual_timescale/{modality}"] = residual.free.bounds
        if isinstance(specification.length_scale, FreeLengthScale):
            bounds["length_scale"] = specification.length_scale.bounds
        shapes = shapes | dict.fromkeys(bounds, ())
        noise = specification.priors.noise
        bounds |= {name: (noise.lower, noise.upper) for name in shapes if name.startswith("noise/")}
        return cls(specification, shapes, bounds, null_features)

    def checked(self, parameters: Mapping[str, object], *, bounded: bool = True) -> Parameters:
        """The parameters as float64 arrays; ``bounded`` refuses values outside their bounds.

        Raises
        ------
        ValueError
            For a missing or unknown name, a wrong shape, a value that is not finite, or one outside its bounds.
        """
        missing, unknown = self.shapes.keys() - parameters.keys(), parameters.keys() - self.shapes.keys()
        if missing or unknown:
            raise ValueError(f"Parameters: missing {sorted(missing)}, unknown {sorted(unknown)}.")
        out = {}
        for name, shape in self.shapes.items():
            value = np.asarray(parameters[name], dtype=float)
            if value.shape != shape:
                raise ValueError(f"Parameter {name!r}: shape {value.shape}, wanted {shape}.")
            if not np.isfinite(value).all():
                raise ValueError(f"Parameter {name!r}: {np.count_nonzero(~np.isfinite(value))} values are not finite.")
            lower, upper = self.bounds.get(name, (-np.inf, np.inf))
            if (bounded and not lower <= value.min(initial=np.inf)) or (
                bounded and not value.max(initial=-np.inf) <= upper
            ):
                raise ValueError(f"Parameter {name!r}: {value} is outside its bounds ({lower:g}, {upper:g}).")
            if bounded and name.startswith("noise/") and not value > 0.0:
                raise ValueError(f"Parameter {name!r}: a variance must be positive, found {value}.")
            out[name] = value
        return out

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each parameter lies in the packed vector."""
        stops = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()])
        return {
            name: slice(int(stop) - int(np.prod(shape)), int(stop))
            for (name, shape), stop in zip(self.shapes.items(), stops, strict=True)
        }

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def packed(self, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
        """The parameters as one vector."""
        return np.concatenate([np.ravel(parameters[name]) for name in self.shapes])

    def unpacked(self, vector: np.ndarray) -> Parameters:
        """The parameters of a vector, as views."""
        return {name: vector[span].reshape(self.shapes[name]) for name, span in self.slices.items()}

    @cached_property
    def scalar_priors(self) -> dict[str, Prior]:
        """Prior densities of the scalars: noise, responses, residual timescales, length scale."""
        specification, out = self.specification, {}
        for name in self.shapes:
            kind, *rest = name.split("/")
            if kind == "noise":
                out[name] = specification.priors.noise
            elif kind == "response":
                out[name] = specification.responses[rest[0]].free[rest[1]].bounded_prior
            elif kind == "residual_timescale":
                free = specification.residual(rest[0]).free
                if free is not None:
                    out[name] = free.bounded_prior
            elif kind == "length_scale":
                out[name] = specification.length_scale.prior  # type: ignore[union-attr]
        return out

    def normal_sd(self, name: str) -> float | None:
        """Prior sd of a loading, offset or run offset; None for other parameters."""
        priors = self.specification.priors
        kinds = {"loading": priors.loading_sd, "offset": priors.offset_sd, "run_offset": priors.run_offset_sd}
        return kinds.get(name.split("/", 1)[0])

    @cached_property
    def prior_constant(self) -> float:
        """Log normalizers of the normal priors, features without data included."""
        total = 0.0
        for name, shape in self.shapes.items():
            sd = self.normal_sd(name)
            if sd is not None:
                parts = name.split("/")
                null = self.null_features[f"{parts[1]}/{parts[-1]}"]
                count = int(np.prod(shape)) + null * (shape[1] if len(shape) == 2 else 1)
                total -= count * (np.log(sd) + 0.5 * np.log(2.0 * np.pi))
        return total

    def log_prior(self, parameters: Mapping[str, np.ndarray]) -> float:
        """Log density of the physical parameters; minus infinity outside the bounds."""
        total = self.prior_constant
        for name, value in parameters.items():
            sd = self.normal_sd(name)
            if sd is None:
                total += float(self.scalar_priors[name].log_density(value))
            else:
                total -= 0.5 * float(np.vdot(value, value)) / sd**2
        return float(total)

    def log_prior_gradient(self, parameters: Mapping[str, np.ndarray]) -> Parameters:
        """Derivatives of :meth:`log_prior`, named like the parameters."""
        out = {}
        for name, value in parameters.items():
            sd = self.normal_sd(name)
            out[name] = (
                np.asarray(self.scalar_priors[name].log_density_gradient(value)) if sd is None else -value / sd**2
            )
        return out


def _pair_shapes(
    specification: Specification, participant: str, modality: str, features: int
) -> dict[str, tuple[int, ...]]:
    name = f"{participant}/{modality}"
    return {
        f"loading/{name}": (features, specification.n_factors),
        f"offset/{name}": (features,),
        f"noise/{name}": (),
    }
