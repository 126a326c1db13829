"""The GP-MSRM estimator: the MAP fit, its evidence, and what is asked of it (DESIGN 2, 5, 9).

Arguments, density and gradient are :mod:`msrm.gp.model`; the search is :mod:`msrm.gp.map`; prediction and calibration
are functions of the plain :class:`~msrm.gp.fitted.FittedGP` that a fit ends in.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import xarray as xr

from msrm.asking import Targets, Times, check_training, check_variation, chosen_pairs, takes_recording
from msrm.estimator import Fit
from msrm.gp import prediction
from msrm.gp.arguments import check_count
from msrm.gp.backends import Choice, grid_facts
from msrm.gp.calibration import calibrated, raw_parameters
from msrm.gp.fitted import FittedGP, Standardization, training_nodes
from msrm.gp.likelihood import Likelihood
from msrm.gp.map import MapResult, StartRecord, maximize
from msrm.gp.model import GPDensity
from msrm.gp.paths import latent_paths
from msrm.gp.rotation import principal
from msrm.gp.sampling import sample as sampled_posterior
from msrm.gp.starts import Start, component_starts, prior_start
from msrm.gp.translation import translated_start
from msrm.gp.tree import fitted_from_tree, fitted_tree, starts_from_tree, starts_tree
from msrm.nodes import usable_rows
from msrm.recording import Recording
from msrm.regularized import ConvergenceWarning
from msrm.warned import warn_caller

_CONDITION_MODES = ("frozen",)


class GPMSRM(Fit[FittedGP], GPDensity):
    __doc__ = (
        (GPDensity.__doc__ or "").replace("GPDensity", "GPMSRM")
        + """
    Attributes
    ----------
    objective_ : float
        -(log likelihood + log prior) at the MAP, every constant included, on the fit's grid.
    log_likelihood_, log_prior_ : float
    likelihood_error_ : float
        Distance of the log likelihood from its value for a vanishing grid spacing, nats; 0 for the exact backend.
    parameters_ : {name: DataArray or float}
        As in DESIGN 9, in raw features; those of the standardized data with ``standardize=True``. Factors are rotated
        to the principal axes of the summed precision of the loadings, ordered by it, and signed so that loadings sum
        to a positive number: a convention, since the model does not know directions. Zero for features without data.
    responses_ : {modality: Response}
    length_scale_ : float
    explained_variance_ : DataArray (factor,)
        Share of the data's variance that each factor's posterior mean carries.
    latent_power_ : DataArray (factor,)
        Mean of E[z^2] over the training data's times; 1 a priori. The MAP with many features inflates it.
    n_iter_ : int
    converged_ : bool
    stop_reason_ : str
    decrement_ : float
        Newton decrement of the projected gradient where the search stopped, nats.
    starts_ : tuple of StartRecord
    at_bounds_ : tuple of str
    backend_ : dict
        Name, reason, grid spacing in seconds, that of the coarser grid where two are combined, moments of a cell
        where it has any, modalities with residual variances.
    recording_digest_ : str
    """
    )

    @takes_recording
    def fit(self, recording: Recording) -> Self:
        """Find the MAP.

        Parameters
        ----------
        recording : Recording

        Returns
        -------
        GPMSRM
            Itself. An interrupt from the keyboard ends the search; the best point so far is kept, not converged.

        Raises
        ------
        TypeError, ValueError
            For arguments or recordings that cannot be used, or an objective that is finite at no start.

        Warns
        -----
        ConvergenceWarning
            When the search did not converge.
        UserWarning
            When another basin ends within 10 nats, or the likelihood's error exceeds its tolerance.
        """
        self.specification  # noqa: B018 - refuses bad arguments before any data is read
        check_training(self.n_factors, recording)
        check_variation(recording)
        standardization = self.standardization(recording)
        likelihood, choice = self.prepared(recording, reduce=True, standardization=standardization)
        result = maximize(
            likelihood,
            self._starts(likelihood, recording, standardization),
            tolerance=self.tol,
            likelihood_tolerance=self.likelihood_tolerance,
            max_iter=self.max_iter,
            show=self.progress,
        )
        self._keep(recording, result, choice, standardization)
        self._warn(result.rivals)
        return self

    @takes_recording
    def predict(
        self,
        recording: Recording,
        *,
        targets: Mapping[str, str | Sequence[str]] | None = None,
        source: str = "both",
        times: Any = None,
        noise: bool = False,
        joint: str | None = None,
    ) -> xr.DataTree:
        """Predict streams from other streams of the same runs, with variances.

        Parameters
        ----------
        recording, targets, source, times
            As :meth:`msrm.RMSRM.predict`.
        noise : bool
            Variances of new observations instead of the signal: v is added.
        joint : {None, "feature", "time"}
            Also ``covariance``: over features at each time (time, feature, other_feature), or over times of each
            feature (feature, time, other_time).

        Returns
        -------
        DataTree participant / run / modality
            ``mean`` and ``variance`` (time, feature) in data units at the MAP's parameters, ``supported`` (time,):
            whether the response sees only stretches of latent that source data cover. Without sources the prior.
            Features that took no part in the fit are NaN.

        Raises
        ------
        ValueError
            For unknown names.
        """
        return prediction.predict(self._fitted, recording, targets, source, times, noise=noise, joint=joint)

    @takes_recording
    def infer_latent(
        self, recording: Recording | None = None, *, times: Any = None, joint: str | None = None
    ) -> xr.DataTree:
        """The latents of a recording's runs, or without one of the training runs, at the fitted parameters.

        Parameters
        ----------
        recording : Recording, optional
        times : array or {run: array}, optional
            Seconds; by default every quarter length scale over the run's data.
        joint : {None, "factor", "time"}
            Also ``covariance``: over factors at each time (time, factor, other_factor), or over everything (time,
            factor, other_time, other_factor).

        Returns
        -------
        DataTree by run
            ``mean`` and ``variance`` (time, factor), ``supported`` (time,). They depend on the convention for factors.
        """
        return prediction.infer_latent(self._fitted, recording, times, joint=joint)

    @takes_recording
    def sample_latent(
        self, recording: Recording | None = None, *, times: Any = None, samples: int = 100, seed: int = 0
    ) -> xr.DataTree:
        """Joint draws of the latent paths given the data, at the fitted parameters.

        Parameters
        ----------
        recording, times
            As in `infer_latent`.
        samples : int
        seed : int

        Returns
        -------
        DataTree by run
            ``latent`` (sample, time, factor).
        """
        check_count("samples", samples)
        rng = np.random.default_rng(seed)
        return xr.DataTree.from_dict(latent_paths(self._fitted, recording, times, samples, rng))

    @takes_recording
    def transform(self, recording: Recording, *, times: Any = None) -> xr.DataTree:
        """The latents of every participant from its own streams alone: participant / run, each as `infer_latent`."""
        return prediction.transform(self._fitted, recording, times)

    @takes_recording
    def condition(
        self,
        recording: Recording,
        *,
        targets: Targets = None,
        source: str = "both",
        times: Times = None,
        noise: bool = False,
        mode: str = "frozen",
    ) -> xr.DataTree:
        """New runs at the MAP's parameters: latents under ``latent``, predictions under ``predicted``.

        Parameters
        ----------
        recording : Recording
        targets, source, times, noise
            As in `predict`; targets enter neither latents nor predictions.
        mode : {"frozen"}
            Parameters held at the MAP.

        Raises
        ------
        ValueError
            For another mode, and as `predict`.
        """
        if mode not in _CONDITION_MODES:
            raise ValueError(
                f"mode must be 'frozen' for a MAP, found {mode!r}: to let new runs move the parameters, fit them "
                "together (msrm.concat_runs) or condition draws."
            )
        fitted = self._fitted
        without = [] if targets is None else chosen_pairs(list(fitted.features), recording, targets)
        nodes = {
            "latent": prediction.infer_latent(fitted, recording, None, joint=None, without=without),
            "predicted": prediction.predict(fitted, recording, targets, source, times, noise=noise, joint=None),
        }
        return xr.DataTree(children=nodes)

    @takes_recording
    def calibrate(self, recording: Recording) -> "GPMSRM":
        """Add participants measured in runs of the fit; responses, length scale and everyone else's parameters stay.

        Parameters
        ----------
        recording : Recording
            Only streams of new participants, in runs and modalities that the fit has.

        Returns
        -------
        GPMSRM
            A new fitted estimator with the loadings, offsets and noise of both.

        Raises
        ------
        ValueError
            For participants already in the fit, unknown runs or modalities.
        """
        fitted = self._fitted
        joined, converged, reason = calibrated(
            fitted, recording, self.standardization(recording), max_iter=self.max_iter, tolerance=self.tol
        )
        if not converged:
            warn_caller(f"The calibration did not converge: {reason}.", ConvergenceWarning)
        out = self._copy()
        out._describe(joined)
        return out

    sample = sampled_posterior

    def to_tree(self) -> xr.DataTree:
        """The fit as plain numbers and text."""
        nodes = fitted_tree(self, self._fitted) | starts_tree(self.starts_)
        nodes["/"] = xr.Dataset(
            {
                "explained_variance": self.explained_variance_,
                "latent_power": self.latent_power_,
                "history": ("iteration", self.history_),
            },
            attrs={name: getattr(self, f"{name}_") for name in _EVIDENCE},
        )
        return xr.DataTree.from_dict(nodes)

    @classmethod
    def from_tree(cls, tree: xr.DataTree) -> "GPMSRM":
        """The fit of a tree made by :meth:`to_tree`; it predicts identically."""
        arguments, fitted = fitted_from_tree(tree)
        out = cls(**arguments)
        for name in _EVIDENCE:
            setattr(out, f"{name}_", tree.attrs[name])
        out.at_bounds_ = tuple(out.at_bounds_)
        out.converged_ = bool(out.converged_)
        root = tree.to_dataset()
        out.explained_variance_, out.latent_power_ = root["explained_variance"], root["latent_power"]
        out.history_ = root["history"].values
        out.starts_ = starts_from_tree(tree)
        out._describe(fitted)
        return out

    def _starts(
        self, likelihood: Likelihood, recording: Recording, standardization: dict[tuple[str, str], Standardization]
    ) -> list[Callable[[], Sequence[Start]]]:
        rng = np.random.default_rng(self.seed)
        translated = partial(translated_start, likelihood, recording, standardization, edges=self.edges, seed=self.seed)
        makers: list[Callable[[], Sequence[Start]]] = [
            lambda: list(component_starts(likelihood)),
            lambda: [translated()],
        ]
        makers += [partial(_prior_starts, likelihood, rng, i + 1) for i in range(max(self.n_starts - 2, 0))]
        return makers[: self.n_starts]

    def _keep(
        self,
        recording: Recording,
        result: MapResult,
        choice: Choice,
        standardization: dict[tuple[str, str], Standardization],
    ) -> None:
        likelihood = result.likelihood
        parameters, explained, power = principal(likelihood, result.point.parameters)
        usable = usable_rows(recording, likelihood.specification.responses, edges=self.edges)
        self.objective_ = result.point.value
        self.log_prior_ = likelihood.layout.log_prior(parameters)
        self.log_likelihood_ = -self.objective_ - self.log_prior_
        self.likelihood_error_ = float(result.error.error)
        self.n_iter_, self.n_evaluations_ = result.n_iter, result.n_evaluations
        self.converged_, self.stop_reason_, self.decrement_ = result.converged, result.reason, result.decrement
        self.at_bounds_ = result.at_bounds
        self.history_ = result.history
        self.recording_digest_ = recording.digest()
        factor = {"factor": np.arange(1, self.n_factors + 1)}
        self.explained_variance_ = xr.DataArray(explained, factor, ("factor",), "explained_variance")
        self.latent_power_ = xr.DataArray(power, factor, ("factor",), "latent_power")
        self.starts_: tuple[StartRecord, ...] = result.starts
        grid = grid_facts(likelihood.backend)
        self.backend_ = {"name": choice.name, "reason": choice.reason, **grid}
        self.backend_ |= {"device": choice.device, "device_reason": choice.device_reason}
        self._describe(
            FittedGP(
                likelihood.specification,
                self.edges,
                choice.name,
                grid["step"],
                grid.get("coarse_step", np.nan),
                grid.get("moments", 0),
                frozenset(grid["residual"]),
                {pair.key: recording.features(*pair.key) for pair in likelihood.nodes.pairs},
                standardization,
                raw_parameters(likelihood, parameters),
                training_nodes(likelihood, parameters),
                {run: usable.domains[run] for run in likelihood.nodes.groups},
            )
        )

    def _describe(self, fitted: FittedGP) -> None:
        """Set what follows from the fitted model alone."""
        self.model_ = fitted
        self.responses_ = fitted.responses
        self.length_scale_ = fitted.length_scale
        self.parameters_ = fitted.labelled

    def _warn(self, rivals: tuple[StartRecord, ...]) -> None:
        for rival in rivals:
            scalars = ", ".join(f"{name} {value:.3g}" for name, value in rival.scalars.items())
            warn_caller(
                f"Start {rival.name!r} ends in another basin, within 10 nats of the best ({scalars}). Report both, or "
                "sample the posterior.",
                UserWarning,
            )
        if not self.converged_:
            warn_caller(
                f"The MAP did not converge after {self.n_iter_} iterations: {self.stop_reason_}. "
                "It is the best point so far; raise max_iter or n_starts.",
                ConvergenceWarning,
            )
        elif not self.likelihood_error_ <= self.likelihood_tolerance:
            self._warn_error(self.likelihood_error_)


_EVIDENCE = (
    "objective",
    "log_prior",
    "log_likelihood",
    "likelihood_error",
    "n_iter",
    "n_evaluations",
    "converged",
    "stop_reason",
    "decrement",
    "at_bounds",
    "backend",
    "recording_digest",
)


def _prior_starts(likelihood: Likelihood, rng: np.random.Generator, number: int) -> list[Start]:
    return [prior_start(likelihood, rng, f"prior draw {number}")]
