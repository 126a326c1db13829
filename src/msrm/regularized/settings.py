"""The choices of an R-MSRM fit, checked once at the door (DESIGN 9): what the numerical modules trust."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Any

from msrm.responses import Response

EDGES = ("trim", "extend")
LOADING_SCALINGS = ("pair", "feature")
LATENT_POOLINGS = ("shared", "population", "separate")
INITS = ("spectral", "random")


@dataclass(frozen=True)
class Settings:
    """Checked settings of one fit; names and meanings are those of :class:`msrm.RMSRM`."""

    n_factors: int
    latent_step: float
    responses: dict[str, Response]
    edges: str
    loading_ridge: float
    loading_scaling: str
    latent_ridge: float
    roughness: float
    modality_weights: dict[str, float]
    latent_pooling: str
    population_strength: float
    init: str
    n_init: int
    n_jobs: int
    max_iter: int
    tol: float
    seed: int

    def __post_init__(self) -> None:
        for name in ("n_factors", "n_init", "max_iter"):
            _check_whole(name, getattr(self, name), 1)
        if self.n_jobs != -1:
            _check_whole("n_jobs", self.n_jobs, 1)
        _check_whole("seed", self.seed, 0)
        for name in ("latent_step", "loading_ridge", "tol"):
            _check_number(name, getattr(self, name), positive=True)
        for name in ("latent_ridge", "roughness", "population_strength"):
            _check_number(name, getattr(self, name), positive=False)
        if self.latent_ridge + self.roughness <= 0:
            raise ValueError("latent_ridge and roughness are both 0: latents that no data see would be arbitrary.")
        _check_choice("edges", self.edges, EDGES)
        _check_choice("loading_scaling", self.loading_scaling, LOADING_SCALINGS)
        _check_choice("latent_pooling", self.latent_pooling, LATENT_POOLINGS)
        _check_choice("init", self.init, INITS)
        for modality, response in self.responses.items():
            if not isinstance(response, Response):
                raise TypeError(f"responses[{modality!r}] must be a response such as Identity(), got {response!r}.")
        for modality, weight in self.modality_weights.items():
            _check_number(f"modality_weights[{modality!r}]", weight, positive=False)

    def weight(self, modality: str) -> float:
        """A modality's weight in the objective, 1 unless given."""
        return float(self.modality_weights.get(modality, 1.0))

    def check_modalities(self, modalities: tuple[str, ...]) -> None:
        """Refuse a recording whose modalities have no response, and weights for modalities it lacks.

        Raises
        ------
        ValueError
        """
        missing = [m for m in modalities if m not in self.responses and self.weight(m) > 0]
        if missing:
            raise ValueError(
                f"No response was given for modality {missing[0]!r}; responses has {sorted(self.responses)}. "
                f"Add responses[{missing[0]!r}], for example Identity(), or drop the modality from the recording."
            )
        unknown = [m for m in self.modality_weights if m not in modalities]
        if unknown:
            raise ValueError(f"modality_weights names {unknown[0]!r}; the recording has {list(modalities)}.")
        if not any(self.weight(m) > 0 for m in modalities):
            raise ValueError(f"Every modality of the recording has weight 0: {list(modalities)}. Give one a weight.")


def checked_settings(params: Mapping[str, Any]) -> Settings:
    """Settings from an estimator's constructor arguments.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value and what is wanted.
    """
    chosen = {name: params[name] for name in Settings.__dataclass_fields__}
    if not isinstance(chosen["responses"], Mapping):
        raise TypeError(f"responses must be a dict from modality to response, got {chosen['responses']!r}.")
    chosen["responses"] = dict(chosen["responses"])
    weights = chosen["modality_weights"]
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(f"modality_weights must be a dict from modality to number or None, got {weights!r}.")
    chosen["modality_weights"] = {} if weights is None else dict(weights)
    return Settings(**chosen)


def _check_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")


def _check_number(name: str, value: object, *, positive: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}.")
    if value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be {'above 0' if positive else 'at least 0'}, got {value!r}.")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
