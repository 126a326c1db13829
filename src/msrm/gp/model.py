"""The GP-MSRM estimator: arguments, data and parameters in, log density and gradient out (DESIGN 2, 9).

This module turns constructor arguments into a :class:`~msrm.gp.parameters.Specification`, a recording into a
:class:`~msrm.gp.likelihood.Likelihood`, and evaluates both at any point. The fit is :mod:`msrm.gp.map`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from msrm.asking import takes_recording
from msrm.estimator import Estimator
from msrm.gp.arguments import MATERNS, check_arguments, length_scale_of
from msrm.gp.backends import Choice, select_likelihood
from msrm.gp.data import Key, NodeLayout, PairData, pair_data
from msrm.gp.devices import evaluation_placement, on_device
from msrm.gp.fitted import Standardization
from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import FreeLengthScale, Layout, Parameters, Specification
from msrm.gp.refinement import LikelihoodError, resolved
from msrm.gp.terms import OrnsteinUhlenbeck, Residual
from msrm.nodes import usable_rows
from msrm.priors import Prior, Priors
from msrm.recording import Recording
from msrm.regularized.scaling import pair_scale
from msrm.responses import Free, Response
from msrm.warned import warn_caller

_UNIT_RANGE = 0.1, 10.0  # stream sds, in prior sds, that draw no warning


class UnitsWarning(UserWarning):
    """Data whose units do not meet the priors."""


class GPDensity(Estimator):
    """Gaussian-process multimodal shared response model.

    Factors are independent Matern processes in each run, streams see them through their modality's response, and
    ``y = b + W g(t) + e`` (DESIGN 2).

    Parameters
    ----------
    n_factors : int
    responses : {modality: Response}
    length_scale : float, Free or Prior
        Seconds; fixed, or learned under a prior.
    edges : {"extend", "trim"}
        Keep all rows, or those whose response lies inside the run's observed domain.
    standardize : bool
        Scale each feature by its training mean and sd first; parameters are then those of the standardized data.
    priors : Priors
    smoothness : {1.5, 0.5, 2.5}
        Order of the Matern processes.
    residual_timescales : {modality: float or Free}, optional
        Seconds; Ornstein-Uhlenbeck residuals for these modalities, white ones for the others.
    run_offsets : tuple of str
        Modalities whose offsets vary from run to run.
    powers : {modality: float}, optional
        Exponents of the modalities' likelihoods.
    likelihood : {"auto", "dense", "statespace"}
    likelihood_tolerance : float
        Largest error of the log likelihood, nats.
    device : {"auto", "cpu", "cuda"}
        Where likelihoods and samplers run: ``"auto"`` takes an NVIDIA card where it is estimated to be faster,
        compilation included, and records why; ``"cuda"`` without a working card is an error.
    n_starts : int
        Starts of the MAP: principal components with a grid over responses, the translated R-MSRM fit, then prior draws.
    max_iter : int
        Accepted steps of one start, at most.
    tol : float
        Converged when the Newton decrement of the projected gradient is below it, nats.
    seed : int
    progress : bool, optional
        A progress bar; by default on a terminal only.

    Examples
    --------
    >>> from msrm.responses import Identity
    >>> GPDensity(2, {"rating": Identity()})
    GPDensity(n_factors=2, responses={'rating': Identity()})
    """

    def __init__(
        self,
        n_factors: int,
        responses: Mapping[str, Response],
        *,
        length_scale: float | Free | Prior = 3.0,
        edges: str = "extend",
        standardize: bool = False,
        priors: Priors = Priors(),  # noqa: B008  frozen
        smoothness: float = 1.5,
        residual_timescales: Mapping[str, float | Free] | None = None,
        run_offsets: tuple[str, ...] = (),
        powers: Mapping[str, float] | None = None,
        likelihood: str = "auto",
        likelihood_tolerance: float = 0.05,
        device: str = "auto",
        n_starts: int = 3,
        max_iter: int = 500,
        tol: float = 1e-4,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.n_factors = n_factors
        self.responses = responses
        self.length_scale = length_scale
        self.edges = edges
        self.standardize = standardize
        self.priors = priors
        self.smoothness = smoothness
        self.residual_timescales = residual_timescales
        self.run_offsets = run_offsets
        self.powers = powers
        self.likelihood = likelihood
        self.likelihood_tolerance = likelihood_tolerance
        self.device = device
        self.n_starts = n_starts
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed
        self.progress = progress

    @property
    def specification(self) -> Specification:
        """The model apart from its data, checked.

        Raises
        ------
        ValueError, TypeError
            Naming the argument, what was found and what is wanted.
        """
        check_arguments(self)
        residuals: dict[str, Residual] = {
            modality: OrnsteinUhlenbeck(timescale) for modality, timescale in (self.residual_timescales or {}).items()
        }
        return Specification(
            self.n_factors,
            dict(self.responses),
            length_scale_of(self.length_scale),
            self.priors,
            MATERNS[float(self.smoothness)],
            residuals,
            {modality: float(power) for modality, power in (self.powers or {}).items()},
            frozenset(self.run_offsets),
        )

    def log_prior(self, parameters: Mapping[str, Any]) -> float:
        """Log prior density of the physical parameters; minus infinity outside the bounds.

        Parameters
        ----------
        parameters : {name: array}
            As in DESIGN 9, in raw features.

        Returns
        -------
        float

        Raises
        ------
        ValueError
            For unknown names or shapes that do not fit each other.
        """
        layout = Layout.named(self.specification, parameters)
        return layout.log_prior(layout.checked(parameters, bounded=False))

    @takes_recording
    def log_likelihood(self, recording: Recording, parameters: Mapping[str, Any]) -> float:
        """Latent-marginal log likelihood at any point, within ``likelihood_tolerance``.

        Parameters
        ----------
        recording : Recording
        parameters : {name: array}
            As in DESIGN 9, in raw features; no fit is needed.

        Returns
        -------
        float
            NaN where a factorization fails; :meth:`likelihood_error` says how precise it is.

        Raises
        ------
        ValueError
            For parameters that do not fit the recording or lie outside their bounds.
        """
        likelihood, checked, error, device = self._at(recording, parameters)
        # Grids are chosen by the host's values.
        compiled = device == "cuda" and error.step > 0.0
        return likelihood.value_and_gradient(checked)[0] if compiled else error.log_likelihood

    @takes_recording
    def log_likelihood_and_gradient(
        self, recording: Recording, parameters: Mapping[str, Any]
    ) -> tuple[float, Parameters]:
        """Log likelihood and its derivatives in every parameter.

        Parameters and errors are those of :meth:`log_likelihood`.

        Returns
        -------
        float, {name: array}
            The gradient is that of the value returned, at the same grid spacing.
        """
        likelihood, checked, *_ = self._at(recording, parameters)
        return likelihood.value_and_gradient(checked)

    @takes_recording
    def likelihood_error(self, recording: Recording, parameters: Mapping[str, Any]) -> LikelihoodError:
        """The log likelihood, its value for a vanishing grid spacing, and the spacing (zero where exact)."""
        return self._at(recording, parameters)[2]

    def _at(
        self, recording: Recording, parameters: Mapping[str, Any]
    ) -> tuple[Likelihood, Parameters, LikelihoodError, str]:
        likelihood, choice = self.prepared(recording, reduce=False)
        checked = likelihood.layout.checked(parameters)
        backend, error = resolved(
            likelihood.backend,
            lambda backend: likelihood.with_backend(backend).value(checked),
            self.likelihood_tolerance,
            extrapolate=True,
        )
        if error.error > self.likelihood_tolerance:
            self._warn_error(error.error)
        return likelihood.with_backend(backend), checked, error, choice.device

    def _warn_error(self, error: float) -> None:
        warn_caller(
            f"The log likelihood's error of {error:.3g} nats exceeds likelihood_tolerance="
            f"{self.likelihood_tolerance:g} on the finest grid tried; use likelihood='dense' to check.",
            UserWarning,
        )

    def prepared(
        self,
        recording: Recording,
        *,
        reduce: bool,
        standardization: Mapping[Key, Standardization] | None = None,
    ) -> tuple[Likelihood, Choice]:
        """The likelihood of a recording as a function of parameters, on the first grid spacing.

        Parameters
        ----------
        recording : Recording
        reduce : bool
            In rotated features (DESIGN 3.2), which hold all the data and no iteration pays for the others.
        standardization : {(participant, modality): Standardization}, optional
            Of a fitted model; by default that of the recording where ``standardize`` is set.

        Returns
        -------
        Likelihood, Choice
            With the backend, its name and the reason for it, its device and the reason for that.
        """
        specification = self.specification
        usable = usable_rows(recording, specification.responses, edges=self.edges)
        if standardization is None:
            standardization = self.standardization(recording)
        pairs = []
        for participant, modality in recording.pairs:
            scaling = standardization.get((participant, modality))
            made = pair_data(
                recording,
                usable,
                participant,
                modality,
                mean=None if scaling is None else scaling.mean,
                scale=None if scaling is None else scaling.scale,
                reduce=reduce,
            )
            if made is not None:
                pairs.append(made)
        likelihood, choice = likelihood_of(specification, pairs, self.likelihood)
        placement = evaluation_placement(self.device, choice.backend)
        choice = replace(choice, device=placement.platform, device_reason=placement.reason)
        if placement.platform == "cuda":
            choice = replace(choice, backend=on_device(choice.backend))
        return likelihood.with_backend(choice.backend), choice

    def standardization(self, recording: Recording) -> dict[Key, Standardization]:
        """Mean and sd of each feature where ``standardize`` is set, else nothing.

        Warns
        -----
        UnitsWarning
            Without ``standardize``, for streams whose units do not meet the priors.
        """
        out = {}
        for participant, modality in recording.pairs:
            streams = recording.streams(participant, modality=modality)
            scale = pair_scale(streams)
            if not self.standardize:
                _warn_units(participant, modality, scale.mean, scale.sd, self.priors)
                continue
            lowest = np.fmin.reduce([stream.summary.minimum for stream in streams])
            constant = np.nan_to_num(lowest, nan=0.0)
            out[participant, modality] = Standardization(
                np.where(scale.present, scale.mean, constant), np.where(scale.present, scale.sd, 1.0)
            )
        return out


def likelihood_of(specification: Specification, pairs: list[PairData], name: str) -> tuple[Likelihood, Choice]:
    """The likelihood of some pairs with the backend of a name."""
    layout = NodeLayout.of(
        pairs, specification.responses, {pair.modality: specification.residual(pair.modality) for pair in pairs}
    )
    scale = specification.length_scale
    choice = select_likelihood(
        name,
        layout.groups,
        specification.n_factors,
        matern=specification.matern,
        length_scale=scale.start if isinstance(scale, FreeLengthScale) else scale,
        length_scale_slope=isinstance(scale, FreeLengthScale),
    )
    return Likelihood(specification, layout, choice.backend), choice


def _warn_units(participant: str, modality: str, mean: np.ndarray, sd: np.ndarray, priors: Priors) -> None:
    if not np.isfinite(sd).any():
        return
    spread = float(np.nanmedian(sd)) / priors.loading_sd
    level = float(np.nanmedian(np.abs(mean))) / priors.offset_sd
    low, high = _UNIT_RANGE
    if low <= spread <= high and level <= high:
        return
    warn_caller(
        f"{modality!r} of {participant}: features have a median sd of {spread:.3g} prior sds of a loading and a median "
        f"level of {level:.3g} prior sds of an offset. Use standardize=True, rescale the data, or widen Priors.",
        UnitsWarning,
    )
