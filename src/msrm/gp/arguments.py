"""Arguments of GP-MSRM: what is refused, by name, before anything is computed."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np

from msrm.gp.backends import LIKELIHOODS
from msrm.gp.parameters import FreeLengthScale
from msrm.latent_grid import Matern, Matern12, Matern32, Matern52
from msrm.nodes import EDGES
from msrm.priors import Prior, Priors
from msrm.responses import Free, Response

__all__ = ["MATERNS", "check_arguments", "check_count", "length_scale_of"]

MATERNS: dict[float, Matern] = {0.5: Matern12(), 1.5: Matern32(), 2.5: Matern52()}


def check_arguments(model: Any) -> None:
    """Refuse what a :class:`msrm.GPMSRM` cannot be made of, before anything is computed.

    Raises
    ------
    TypeError, ValueError
        The message names the argument, what was found and what is wanted.
    """
    for name in ("n_factors", "n_starts", "max_iter"):
        check_count(name, getattr(model, name))
    if not isinstance(model.standardize, bool | np.bool_):
        raise ValueError(f"standardize must be True or False, found {model.standardize!r}.")
    if not model.tol > 0.0:
        raise ValueError(f"tol must be positive nats, found {model.tol!r}.")
    _check_optional_terms(model)
    if not model.responses:
        raise ValueError("responses is empty: give each modality a response, such as {'brain': Identity()}.")
    for modality, response in model.responses.items():
        if not isinstance(response, Response):
            raise TypeError(f"responses[{modality!r}] must be a response such as Identity(), found {response!r}.")
        if response.pooling != "shared":
            raise ValueError(
                f"responses[{modality!r}]: GPMSRM shares a response over participants; pooling={response.pooling!r} "
                "is available in RMSRM."
            )
    if model.edges not in EDGES:
        raise ValueError(f"edges must be 'extend' or 'trim', found {model.edges!r}.")
    if model.likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood must be one of {', '.join(LIKELIHOODS)}, found {model.likelihood!r}.")
    if not isinstance(model.priors, Priors):
        known = ", ".join(inspect.signature(Priors).parameters)
        raise TypeError(
            f"priors must be msrm.Priors({known}), each by name, such as priors=msrm.Priors(loading_sd=0.5); found "
            f"{model.priors!r}."
        )
    if model.smoothness not in MATERNS:
        raise ValueError(f"smoothness must be 0.5, 1.5 or 2.5 (Matern order), found {model.smoothness!r}.")
    if not model.likelihood_tolerance > 0.0:
        raise ValueError(f"likelihood_tolerance must be positive nats, found {model.likelihood_tolerance!r}.")


def check_count(name: str, value: Any) -> None:
    """Refuse what is no positive integer.

    Raises
    ------
    ValueError
        Naming the argument.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer, found {value!r}.")


def _check_optional_terms(model: Any) -> None:
    """Refuse values of the optional terms that are no collections of modalities, or no positive numbers."""
    if not isinstance(model.run_offsets, tuple | list | set | frozenset):
        one = model.run_offsets if isinstance(model.run_offsets, str) else next(iter(model.responses), "brain")
        raise TypeError(f"run_offsets must be a tuple of modalities, such as ({one!r},), found {model.run_offsets!r}.")
    for argument, wanted in (("residual_timescales", "seconds or Free"), ("powers", "a positive number")):
        values = getattr(model, argument)
        if values is not None and not isinstance(values, Mapping):
            raise TypeError(f"{argument} must be {{modality: {wanted}}}, found {values!r}.")
    for argument in ("residual_timescales", "powers", "run_offsets"):
        for modality in getattr(model, argument) or ():
            if modality not in model.responses:
                raise ValueError(f"{argument} names {modality!r}; responses has {', '.join(model.responses)}.")
    for modality, power in (model.powers or {}).items():
        if not _is_positive(power):
            raise ValueError(f"powers[{modality!r}] must be a positive number, found {power!r}.")
    for modality, timescale in (model.residual_timescales or {}).items():
        if not (isinstance(timescale, Free) or _is_positive(timescale)):
            raise ValueError(
                f"residual_timescales[{modality!r}] must be positive seconds or Free, found {timescale!r}."
            )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number and bool(np.isfinite(value)) and value > 0.0


def length_scale_of(value: float | Free | Prior) -> float | FreeLengthScale:
    """Seconds, or what a free length scale starts from and its prior.

    Raises
    ------
    ValueError
        For anything else, or a prior or bounds that reach below zero.
    """
    if isinstance(value, Free):
        if not value.bounds[0] > 0.0:
            raise ValueError(f"length_scale: bounds must be positive seconds, found {value.bounds}.")
        return FreeLengthScale(value.start, value.bounded_prior)
    if isinstance(value, Prior):
        if value.lower < 0.0:
            raise ValueError(f"length_scale: {value} reaches below zero; use LogNormal, or .bounded(lower, upper).")
        return FreeLengthScale(float(value.quantile(0.5)), value)
    if not (isinstance(value, int | float) and np.isfinite(value) and value > 0.0):
        raise ValueError(f"length_scale must be positive seconds, Free or a prior, found {value!r}.")
    return float(value)
