"""Posterior draws of GP-MSRM: one result for every sampler, as a DataTree for ArviZ and as answers about the model.

What draws hold and their raw features are :mod:`msrm.gp.raw_draws`; predictions average over an
:class:`~msrm.gp.ensemble.Ensemble` (DESIGN 5).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import msrm
from msrm import archive
from msrm.asking import Targets, Times, takes_recording
from msrm.diagnostics import Summary, summary
from msrm.gp import prediction
from msrm.gp.arguments import check_count
from msrm.gp.checks import predictive_check
from msrm.gp.draws_tree import draws_parts, draws_tree
from msrm.gp.ensemble import Ensemble, with_densities
from msrm.gp.fitted import FittedGP
from msrm.gp.loo import Loo, held_out_densities, leave_one_out
from msrm.gp.paths import latent_paths, with_latent_times
from msrm.gp.raw_draws import RawDraws
from msrm.gp.updating import MODES, calibrated_draws, conditioned, reweighted, with_both
from msrm.recording import Recording

__all__ = ["Draws"]


@dataclass(frozen=True, eq=False)
class Draws(RawDraws):
    __doc__ = (RawDraws.__doc__ or "").replace("and their raw features", "and what is asked of them")

    def summary(self, **options: Any) -> Summary:
        """Convergence of every quantity and a verdict; see `msrm.diagnostics.summary`."""
        return summary(self.tree, **options)

    @takes_recording
    def predict(
        self, recording: Recording, *, noise: bool = False, truth: Recording | None = None, **asked: Any
    ) -> xr.DataTree:
        """As :meth:`msrm.GPMSRM.predict`, averaged over the ensemble: variances include the parameters' uncertainty.

        Parameters
        ----------
        recording, noise
            As there.
        truth : Recording, optional
            Values at the predicted times; each gets ``log_density``, averaged over the members' densities, and
            ``probability``, that of a smaller value (time, feature). Nothing is predicted from them.
        asked
            ``targets``, ``source``, ``times`` and ``joint``, as there.
        """

        def answer(member: FittedGP) -> xr.DataTree:
            tree = prediction.predict(member, recording, noise=noise, **asked)
            return tree if truth is None else with_densities(tree, truth)

        return self.ensemble.average(answer)

    @takes_recording
    def infer_latent(
        self, recording: Recording | None = None, *, times: Any = None, joint: str | None = None
    ) -> xr.DataTree:
        """As :meth:`msrm.GPMSRM.infer_latent`, averaged over the ensemble with factors aligned to the MAP."""
        at = with_latent_times(self.ensemble.base, recording, times)
        return self.ensemble.average(partial(prediction.infer_latent, recording=recording, times=at, joint=joint))

    @takes_recording
    def transform(self, recording: Recording, *, times: Any = None) -> xr.DataTree:
        """As :meth:`msrm.GPMSRM.transform`, averaged over the ensemble."""
        nodes = {}
        for participant in recording.participants:
            own = recording.select(participants=[participant])
            at = with_latent_times(self.ensemble.base, own, times)
            answer = self.ensemble.average(partial(prediction.transform, recording=own, times=at))
            nodes[participant] = answer.children[participant]
        return xr.DataTree(children=nodes)

    @takes_recording
    def sample_latent(
        self, recording: Recording | None = None, *, times: Any = None, per_member: int = 1, seed: int = 0
    ) -> xr.DataTree:
        """Joint draws of latent paths and parameters, factors aligned to the MAP.

        Parameters
        ----------
        recording, times
            As in `infer_latent`.
        per_member : int
            Paths for each member of the ensemble.
        seed : int

        Returns
        -------
        DataTree by run
            ``latent`` (sample, time, factor), with the `chain` and `draw` of each sample's parameters.
        """
        check_count("per_member", per_member)
        at = with_latent_times(self.ensemble.base, recording, times)
        rng = np.random.default_rng(seed)
        with prediction.shared_data():
            parts = [latent_paths(member, recording, at, per_member, rng) for member in self.ensemble]
        chain, draw = np.repeat(self.ensemble.members, per_member, axis=0).T
        names = {"chain": ("sample", chain), "draw": ("sample", draw)}
        return xr.DataTree.from_dict(
            {run: xr.concat([part[run] for part in parts], "sample").assign_coords(names) for run in parts[0]}
        )

    @takes_recording
    def condition(
        self,
        recording: Recording,
        *,
        targets: Targets = None,
        source: str = "both",
        times: Times = None,
        noise: bool = False,
        mode: str = "joint",
        training: Recording | None = None,
        **sampling: Any,
    ) -> xr.DataTree:
        """New runs: latents under ``latent``, predictions under ``predicted``, averaged over the ensemble.

        Parameters
        ----------
        recording : Recording
            Runs that the draws were not made from.
        targets, source, times, noise
            As in `predict`; targets inform neither parameters nor latents.
        mode : {"joint", "frozen"}
            Let the new runs move the parameters (`update`), or hold them at each member.
        training : Recording, optional
            With ``"joint"``: what the draws were made from; chains then sample both, else members are weighted.
        sampling
            Options of :meth:`msrm.GPMSRM.sample`, with `training`.

        Raises
        ------
        ValueError
            For another mode, or weights that degenerate; the message says what to do.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be 'joint' or 'frozen', found {mode!r}.")
        if mode == "frozen" and (training is not None or sampling):
            raise ValueError("mode='frozen' samples nothing; leave out training and sampling options.")
        draws = self
        if mode == "joint":
            seen = recording if targets is None else recording.drop(targets=targets)
            draws = self.update(seen, training=training, **sampling)
        return conditioned(draws.ensemble, recording, targets, source, times, noise=noise)

    @takes_recording
    def update(self, recording: Recording, *, training: Recording | None = None, **sampling: Any) -> "Draws":
        """The posterior given new runs as well.

        Parameters
        ----------
        recording : Recording
            Runs that the draws were not made from.
        training : Recording, optional
            What the draws were made from: chains then sample both recordings, exact for any amount of new data. Without
            it the members of the ensemble are weighted by ``p(recording | member)``, Pareto-smoothed: exact for little
            new data, refused when k-hat exceeds 0.7. Weights act on predictions; `tree` stays that of the draws.
        sampling
            Options of :meth:`msrm.GPMSRM.sample`, with `training`.

        Raises
        ------
        ValueError
            For degenerate weights, another `training`, or run names that both recordings have.
        """
        if any(run in self.ensemble.base.runs for run in recording.runs):
            raise ValueError(f"The draws know {', '.join(self.ensemble.base.runs)}; give runs that are new by name.")
        if training is None and sampling:
            raise ValueError("Sampling both recordings needs training=<the recording of the draws>.")
        if training is None:
            return reweighted(self, recording)
        return with_both(self, recording, training, **sampling)

    @takes_recording
    def calibrate(self, recording: Recording, *, n_jobs: int = 1, progress: bool | None = None) -> "Draws":
        """Add participants measured in runs of the draws, their parameters at the mode given each member.

        Parameters
        ----------
        recording : Recording
            Only streams of new participants, in runs and modalities of the draws.
        n_jobs : int
            Processes over members; -1 for every usable core.
        progress : bool, optional

        Returns
        -------
        Draws
            Predicts the newcomers too. `tree` and raw loadings stay those of the participants that were sampled, and
            variances leave out what is not known of the newcomers' own parameters.
        """
        return calibrated_draws(self, recording, n_jobs=n_jobs, progress=progress)

    @takes_recording
    def loo(self, recording: Recording, *, size: int = 1000, n_jobs: int = -1, progress: bool | None = None) -> Loo:
        """Leave-one-block-out: how well each participant-modality-run is predicted from all others.

        Parameters
        ----------
        recording : Recording
            What the draws were made from.
        size : int
            Use about so many evenly spaced draws; each costs one factorization a block.
        n_jobs : int
            Processes; -1 for every usable core.
        progress : bool, optional

        Returns
        -------
        Loo
            elpd, se and k-hat, of the data in their own units and under the noise as it is, whatever the powers;
            ``loo.tree`` goes into ``arviz.compare``.
        """
        return leave_one_out(self, recording, size=size, n_jobs=n_jobs, progress=progress)

    @takes_recording
    def log_predictive_density(self, recording: Recording) -> xr.Dataset:
        """Log density of each participant-modality-run of new runs given the other streams of its run.

        Averaged over the members' densities, the latents integrated out: the joint density of a block's values, where
        :func:`msrm.score` takes one entry at a time.

        Returns
        -------
        Dataset by ``block``
            ``log_density`` (nats, of the data in their own units; powers concern the other streams) and ``entries``.
        """
        return held_out_densities(self, recording)

    @takes_recording
    def predictive_check(
        self, recording: Recording, *, latent: str = "posterior", per_member: int = 1, seed: int = 0
    ) -> xr.Dataset:
        """Statistics of replicated data against those of the data, for every stream and run.

        Parameters
        ----------
        recording : Recording
            Of fitted participants.
        latent : {"posterior", "prior"}
            Replicates see the paths that the data imply, or new ones.
        per_member : int
            Replicates for each member of the ensemble.
        seed : int

        Returns
        -------
        Dataset
            By ``stream_run`` and ``statistic`` (mean, sd, lag-one autocorrelation, min, max, intersubject correlation:
            with the mean of the other participants): ``observed``, ``replicated`` and ``p_value``, the share of
            replicates above the data; near 0 or 1 the model does not make such data.
        """
        return predictive_check(self, recording, latent=latent, per_member=per_member, seed=seed)

    def save(self, path: str | Path, *, bases: bool | None = None) -> Path:
        """Write the draws and their MAP to one archive file, which `msrm.open_fit` reads.

        Parameters
        ----------
        path : path-like
            The file to make or replace.
        bases : bool, optional
            Store the rotated bases, as large as the recording, so that raw features (`loading`, `offset`,
            `write_loadings`) need no recording after opening. By default up to 256 MB; everything else never needs it.

        Returns
        -------
        Path

        Raises
        ------
        OSError
            When the file cannot be written; an earlier one is intact.
        """
        return archive.write_tree(self.to_tree(bases=bases), path, kind="Draws")

    def to_tree(self, *, bases: bool | None = None) -> xr.DataTree:
        """The draws as plain numbers and text, ArviZ's groups at the top; `bases` as in `save`."""
        return draws_tree(self, bases=bases)

    @classmethod
    def from_tree(cls, tree: xr.DataTree) -> "Draws":
        """The draws of a tree made by :meth:`to_tree`."""
        parts = draws_parts(tree)
        model = msrm.GPMSRM.from_tree(parts.pop("map"))
        ensemble = Ensemble(model.model_, **parts.pop("ensemble"))
        return cls(model=model, ensemble=ensemble, **parts)
