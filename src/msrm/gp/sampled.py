"""A GP-MSRM whose fit is a posterior: the MAP and chains from it, for what takes an estimator (``msrm.evaluate``)."""

from collections.abc import Mapping
from typing import Any, Self

import xarray as xr

from msrm.estimator import Estimator
from msrm.evaluation.report import clone
from msrm.gp.draws import Draws
from msrm.gp.estimator import GPMSRM
from msrm.recording import Recording
from msrm.regularized import NotFittedError

__all__ = ["SampledGPMSRM"]


class SampledGPMSRM(Estimator):
    """Fit by sampling.

    Parameters
    ----------
    gp : GPMSRM
        The model; left as it is.
    sampler, chains, warmup, draws, seed, n_jobs
        As in :meth:`msrm.GPMSRM.sample`.
    progress : bool, optional
        A bar; by default on a terminal only.
    settings : dict, optional
        Of the sampler.

    Attributes
    ----------
    gp_ : GPMSRM
        The MAP.
    draws_ : Draws

    Examples
    --------
    >>> from msrm.responses import Identity
    >>> SampledGPMSRM(GPMSRM(2, {"rating": Identity()}), chains=2)
    SampledGPMSRM(gp=GPMSRM(n_factors=2, responses={'rating': Identity()}), chains=2)
    """

    def __init__(
        self,
        gp: GPMSRM,
        *,
        sampler: str = "gibbs",
        chains: int = 4,
        warmup: int = 1000,
        draws: int = 1000,
        seed: int = 0,
        n_jobs: int = -1,
        progress: bool | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.gp = gp
        self.sampler = sampler
        self.chains = chains
        self.warmup = warmup
        self.draws = draws
        self.seed = seed
        self.n_jobs = n_jobs
        self.progress = progress
        self.settings = settings

    def fit(self, recording: Recording) -> Self:
        """Find the MAP and sample from it; returns itself."""
        self.gp_ = clone(self.gp).fit(recording)
        options = {name: value for name, value in self.get_params().items() if name not in ("gp", "settings")}
        self.draws_ = self.gp_.sample(recording, **options, **(self.settings or {}))
        self.recording_digest_ = self.gp_.recording_digest_
        return self

    def predict(self, recording: Recording, *, noise: bool = False, truth: Any = None, **asked: Any) -> xr.DataTree:
        """As :meth:`Draws.predict`."""
        return self._drawn.predict(recording, noise=noise, truth=truth, **asked)

    def infer_latent(self, recording: Recording | None = None, **asked: Any) -> xr.DataTree:
        """As :meth:`Draws.infer_latent`."""
        return self._drawn.infer_latent(recording, **asked)

    def calibrate(self, recording: Recording) -> "SampledGPMSRM":
        """A copy that knows new participants, as :meth:`Draws.calibrate`."""
        out = type(self)(**self.get_params())
        out.draws_ = self._drawn.calibrate(recording, n_jobs=self.n_jobs, progress=self.progress)
        out.gp_, out.recording_digest_ = out.draws_.model, self.recording_digest_
        return out

    @property
    def _drawn(self) -> Draws:
        if not hasattr(self, "draws_"):
            raise NotFittedError("This SampledGPMSRM is not fitted yet; call fit(recording) first.")
        return self.draws_
