"""The estimator of R-MSRM: settings in, a fitted model and its evidence out (DESIGN 2, 9)."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
import xarray as xr

from msrm.asking import check_training, takes_recording
from msrm.estimator import Estimator, Fit
from msrm.quasi_newton import INTERRUPTED
from msrm.recording import Recording
from msrm.regularized import labelled, prediction
from msrm.regularized.assembly import Assembled, assembled
from msrm.regularized.calibration import calibrated
from msrm.regularized.filters import Pair
from msrm.regularized.model import Model
from msrm.regularized.problem import build_problem
from msrm.regularized.search import Start, search
from msrm.regularized.settings import checked_settings
from msrm.regularized.tree import model_from_tree, model_tree, node, plain_number, starts_from_tree, starts_tree
from msrm.responses import Response
from msrm.warned import warn_caller

_PENALTIES = ("loading_ridge", "latent_ridge", "roughness")


class ConvergenceWarning(UserWarning):
    """A fit ended before it was stationary; `stop_reason_` says why."""


class RMSRM(Fit[Model], Estimator):
    """Regularized multimodal shared response model: a penalized least-squares fit, standardized inside.

    Each run has a latent path of `n_factors` values on a uniform grid, linearly interpolated; every stream sees it
    through its modality's response and its own loadings. The objective and its weights are those of docs/rmsrm.md.

    Parameters
    ----------
    n_factors : int
        K, the dimensions of the latent.
    latent_step : float
        Spacing of the latent grid, seconds.
    responses : dict from modality to Response
        `Identity()`, `Gaussian(width=..., lag=...)` and so on, parameters fixed or `Free`.
    edges : {"trim", "extend"}
        Leave out rows whose response, over the bounds of its parameters, would see beyond the run's data; or
        keep all rows and lengthen the latent grid.
    loading_ridge : float
        lambda_W, on the mean over participant-modalities of the squared norm of the loadings.
    loading_scaling : {"pair", "feature"}
        Take that norm as it is, or divided by the number of features.
    latent_ridge : float
        lambda_Z, on the mean squared latent.
    roughness : float
        lambda_T, on the mean squared slope of the latent (seconds squared).
    modality_weights : dict from modality to float, optional
        Of the squared errors; 1 unless given. Modalities of weight 0 take no part.
    latent_pooling : {"shared", "population", "separate"}
        One path for all participants; one each, drawn to their mean; or one each.
    population_strength : float
        lambda_P, on the mean squared distance of a participant's path from their mean, under population pooling.
    penalties : {"given", "cv"} or dict
        Take the three strengths as given, or choose them, and whatever a dict from argument to candidates names, by
        cross-validation inside the training recording.
    init : {"spectral", "random"}
        The first start; further ones are random.
    n_init : int
        Starts; each also looks over lags and widths.
    n_jobs : int
        Processes over starts and folds, -1 for every core; the result does not depend on it.
    max_iter : int
        Accepted steps of one start, at most.
    tol : float
        Converged when the projected gradient promises less than this share of the objective.
    seed : int
        Of random starts.
    progress : bool, optional
        A progress bar; by default on a terminal only.

    Attributes
    ----------
    objective_ : float
    objective_parts_ : dict from str to float
        reconstruction, loading, latent, roughness, population, response; they sum to `objective_`.
    parameters_ : dict from path to DataArray or float
        `loading/{participant}/{modality}` (feature, factor) in training sds per unit of latent; `offset/...` and
        `scale/...` (feature,), training mean and sd; `response/{modality}/{name}`, with the participant between where
        responses differ.
    responses_ : dict from modality to Response, or to {participant: Response}
    latents_ : DataTree by run
        `mean` (time, factor) on the latent grid, and `path` (time, participant, factor) unless paths are shared.
    explained_variance_ : DataArray (factor,)
        Share of the standardized variance that each factor alone explains, weighted as in the objective.
    stream_explained_variance_ : DataArray (stream, factor)
    residual_variance_ : DataArray (stream,)
        In squared training sds.
    n_iter_ : int
    converged_ : bool
    stop_reason_ : str
    stationarity_ : dict from str to float
        Of loadings, responses and latents.
    starts_ : tuple of Start
        The evidence of every start, the chosen one first.
    penalties_ : dict from str to float
        The three strengths used, and whatever else was chosen.
    cv_results_ : Dataset or None
    recording_digest_ : str

    Examples
    --------
    >>> import msrm
    >>> recording, truth = msrm.simulate(participants=2, features=6, seconds=60.0, seed=1)
    >>> responses = {"brain": msrm.Identity(), "rating": msrm.Gaussian(width=0.6, lag=0.4),
    ...              "physiology": msrm.Gaussian(width=0.8, lag=1.0)}
    >>> fit = msrm.RMSRM(n_factors=2, latent_step=0.9, responses=responses).fit(recording)
    >>> fit.converged_
    True
    """

    def __init__(
        self,
        n_factors: int = 3,
        *,
        latent_step: float = 1.0,
        responses: Mapping[str, Response],
        edges: str = "trim",
        loading_ridge: float = 1e-3,
        loading_scaling: str = "pair",
        latent_ridge: float = 1e-4,
        roughness: float = 1e-2,
        modality_weights: Mapping[str, float] | None = None,
        latent_pooling: str = "shared",
        population_strength: float = 1.0,
        penalties: str | Mapping[str, Any] = "given",
        init: str = "spectral",
        n_init: int = 1,
        n_jobs: int = 1,
        max_iter: int = 500,
        tol: float = 1e-10,
        seed: int = 0,
        progress: bool | None = None,
    ) -> None:
        self.n_factors = n_factors
        self.latent_step = latent_step
        self.responses = responses
        self.edges = edges
        self.loading_ridge = loading_ridge
        self.loading_scaling = loading_scaling
        self.latent_ridge = latent_ridge
        self.roughness = roughness
        self.modality_weights = modality_weights
        self.latent_pooling = latent_pooling
        self.population_strength = population_strength
        self.penalties = penalties
        self.init = init
        self.n_init = n_init
        self.n_jobs = n_jobs
        self.max_iter = max_iter
        self.tol = tol
        self.seed = seed
        self.progress = progress

    @takes_recording
    def fit(self, recording: Recording) -> Self:
        """Fit a recording.

        Parameters
        ----------
        recording : Recording

        Returns
        -------
        RMSRM
            Itself. An interrupt from the keyboard ends the search; the best point so far is kept, not converged.

        Raises
        ------
        TypeError, ValueError
            For arguments or recordings that cannot be used, saying what is wanted.

        Warns
        -----
        ConvergenceWarning
            When the chosen start did not converge.
        """
        check_training(self.n_factors, recording)
        params, results = self.get_params(), None
        chosen = {name: params[name] for name in _PENALTIES}
        if not (isinstance(self.penalties, str) and self.penalties == "given"):
            checked_settings(params)
            # Cross-validation fits and scores estimators: it is built on this module.
            from msrm.evaluation.crossvalidation import select_penalties

            picked, results = select_penalties(self, recording, n_jobs=self.n_jobs, progress=self.progress)
            params, chosen = params | picked, chosen | picked
        settings = checked_settings(params)
        problem, training = build_problem(recording, settings)
        loading, vector, starts = search(problem, settings, self.progress)
        self._keep(assembled(problem, training, recording, settings, loading, vector), starts)
        self.penalties_, self.cv_results_ = chosen, results
        self._recording: Recording | None = recording
        self._warn()
        return self

    @takes_recording
    def predict(
        self,
        recording: Recording,
        *,
        targets: Mapping[str, str | Sequence[str]] | None = None,
        source: str = "both",
        times: Any = None,
    ) -> xr.DataTree:
        """Predict streams from other streams of the same runs.

        Parameters
        ----------
        recording : Recording
            Of fitted participants, any runs.
        targets : dict from participant to modalities, optional
            Streams to predict; they are removed from the recording before anything is computed. By default every
            stream is predicted and none removed.
        source : {"within", "across", "both"}
            Predict from the target's participant's own streams, the other participants' streams, or both.
        times : array, {run: array} or {run: {modality: array}}, optional
            When to predict, seconds; by default where the target was measured. Needed for what was not measured.

        Returns
        -------
        DataTree participant / run / modality
            `mean` (time, feature) in data units, NaN where the response would see beyond the latent grid and for
            features that took no part in the fit; `supported` (time,), whether the response sees only stretches of
            latent that source data cover.

        Raises
        ------
        ValueError
            For unknown names, and where no source is left.
        """
        return prediction.predict(self._fitted, recording, targets, source, times)

    @takes_recording
    def infer_latent(self, recording: Recording, *, times: Any = None) -> xr.DataTree:
        """The latent paths of a recording's runs at the fitted parameters.

        Parameters
        ----------
        recording : Recording
        times : array or {run: array}, optional
            Seconds; by default the latent grid.

        Returns
        -------
        DataTree by run
            `mean` (time, factor), NaN outside the grid, and `supported` (time,); under population pooling `mean` is
            the mean over participants, whose own paths are `path` (time, participant, factor); separate ones have
            `path` only.
        """
        return prediction.infer_latent(self._fitted, recording, times)

    @takes_recording
    def transform(self, recording: Recording) -> dict[str, xr.DataArray]:
        """The latent of each run on its grid: {run: (time, factor)}, or (time, participant, factor) unless shared."""
        name = "mean" if self._fitted.settings.latent_pooling == "shared" else "path"
        return {run: node.to_dataset()[name] for run, node in self.infer_latent(recording).children.items()}

    @takes_recording
    def calibrate(self, recording: Recording) -> "RMSRM":
        """Add participants, or modalities of participants, measured in runs of the fit, whose latents stay as they are.

        Parameters
        ----------
        recording : Recording
            Only streams that the fit does not have, in runs that it has.

        Returns
        -------
        RMSRM
            A new fitted estimator with the loadings (and responses that participants do not share) of both.

        Raises
        ------
        ValueError
            For streams already in the fit, unknown runs, or separate latents.
        """
        out = self._copy()
        out._describe(calibrated(self._fitted, recording))
        return out

    def to_tree(self) -> xr.DataTree:
        """The fit as plain numbers and text."""
        nodes = model_tree(self._fitted) | starts_tree(self.starts_)
        nodes["/"] = xr.Dataset(
            attrs={
                "recording_digest": self.recording_digest_,
                "penalties": self.penalties if isinstance(self.penalties, str) else "chosen among candidates",
                "chosen": {name: plain_number(value) for name, value in self.penalties_.items()},
                "progress": self.progress,
                "objective_parts": self.objective_parts_,
            }
        )
        nodes["/explained"] = xr.Dataset(
            {"total": self.explained_variance_, "by_stream": self.stream_explained_variance_}
        )
        if self.cv_results_ is not None:
            nodes["/cv_results"] = self.cv_results_
        return xr.DataTree.from_dict(nodes)

    @classmethod
    def from_tree(cls, tree: xr.DataTree) -> "RMSRM":
        """The fit of a tree made by :meth:`to_tree`; it predicts identically."""
        model, attrs = model_from_tree(tree), tree.attrs
        params = {
            name: getattr(model.settings, name) for name in cls._argument_names() if hasattr(model.settings, name)
        }
        params["modality_weights"] = params["modality_weights"] or None
        out = cls(**params, progress=attrs["progress"])
        explained = node(tree, "explained")
        by_stream = explained["by_stream"].values
        shares = {pair: by_stream[i] for i, pair in enumerate(_pair_names(explained["stream"].values, model))}
        out._keep(
            Assembled(model, dict(attrs["objective_parts"]), shares, explained["total"].values), starts_from_tree(tree)
        )
        out.penalties_ = {name: plain_number(value) for name, value in attrs["chosen"].items()}
        out.cv_results_ = node(tree, "cv_results") if "cv_results" in tree.children else None
        out._recording, out._digest = None, str(attrs["recording_digest"])
        return out

    @property
    def recording_digest_(self) -> str:
        """SHA-256 of the training recording, computed when first asked for."""
        self._fitted  # noqa: B018 - refuses when not fitted
        if not hasattr(self, "_digest"):
            assert self._recording is not None
            self._digest = self._recording.digest()
        return self._digest

    def __getstate__(self) -> dict[str, Any]:
        if hasattr(self, "model_"):
            # A pickled fit must not carry its recording.
            return self.__dict__ | {"_digest": self.recording_digest_, "_recording": None}
        return self.__dict__

    def _keep(self, found: Assembled, starts: tuple[Start, ...]) -> None:
        best = starts[0]
        self.__dict__.pop("_digest", None)
        self.objective_parts_ = found.parts
        self.objective_ = float(sum(found.parts.values()))
        self.starts_ = starts
        self.n_iter_, self.converged_, self.stop_reason_ = best.n_iter, best.converged, best.reason
        self.stationarity_ = best.stationarity
        self.explained_variance_, self.stream_explained_variance_ = labelled.explained_variance(found)
        self._describe(found.model)

    def _describe(self, model: Model) -> None:
        """Set the model, and forget what was derived from the one before."""
        self.model_ = model
        for name in ("responses_", "parameters_", "latents_", "residual_variance_"):
            self.__dict__.pop(name, None)

    @cached_property
    def responses_(self) -> dict[str, Response | dict[str, Response]]:
        """Fitted responses by modality, by participant where they are not shared."""
        return labelled.responses(self._fitted)

    @cached_property
    def parameters_(self) -> dict[str, xr.DataArray | float]:
        """Loadings, training means and sds, and free response parameters, by path."""
        return labelled.parameters(self._fitted)

    @cached_property
    def latents_(self) -> xr.DataTree:
        """Latent paths of the training runs on their grids."""
        return labelled.latents(self._fitted)

    @cached_property
    def residual_variance_(self) -> xr.DataArray:
        """Weighted mean squared residual of each stream, in squared training sds."""
        return labelled.residual_variance(self._fitted)

    def _warn(self) -> None:
        if not self.converged_:
            advice = "It is the best point so far." if self.stop_reason_ == INTERRUPTED else "Raise max_iter or n_init."
            warn_caller(
                f"R-MSRM did not converge after {self.n_iter_} iterations: {self.stop_reason_}. {advice}",
                ConvergenceWarning,
            )


def _pair_names(streams: np.ndarray, model: Model) -> list[Pair]:
    names = {f"{p}/{m}": (p, m) for p, m in model.pairs}
    return [names[str(stream)] for stream in streams]
