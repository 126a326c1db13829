"""Draws and data that come later: new runs, with parameters held or moved, and new participants (DESIGN 5).

New runs move the parameters in one of two exact ways. Without the training recording the members of the ensemble are
weighted by ``p(new runs | member)``, Pareto-smoothed and refused where the weights degenerate. With it, chains sample
the posterior of both recordings.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xarray as xr

from msrm.asking import Targets, Times, chosen_pairs
from msrm.gp import prediction
from msrm.gp.calibration import calibrated
from msrm.gp.ensemble import Ensemble
from msrm.gp.fitted import training_nodes
from msrm.gp.loo import members_left_out
from msrm.gp.psis import good_k, smoothed
from msrm.nodes import usable_rows
from msrm.recording import Recording, concat_runs
from msrm.regularized import ConvergenceWarning
from msrm.runtime.workers import parallel_map, worker_count
from msrm.warned import warn_caller

if TYPE_CHECKING:
    from msrm.gp.draws import Draws

__all__ = ["MODES", "calibrated_draws", "conditioned", "reweighted", "with_both"]

MODES = ("frozen", "joint")


def conditioned(
    ensemble: Ensemble, recording: Recording, targets: Targets, source: str, times: Times, *, noise: bool
) -> xr.DataTree:
    """New runs at each member's parameters: latents under ``latent``, predictions under ``predicted``."""
    fitted = ensemble.base
    without = [] if targets is None else chosen_pairs(list(fitted.features), recording, targets)
    answer = prediction.infer_latent(fitted, recording, None, joint=None, without=without)
    at = {run: node["time"].values for run, node in answer.children.items()}
    nodes = {
        "latent": ensemble.average(
            lambda member: prediction.infer_latent(member, recording, at, joint=None, without=without)
        ),
        "predicted": ensemble.average(
            lambda member: prediction.predict(member, recording, targets, source, times, noise=noise, joint=None)
        ),
    }
    return xr.DataTree(children=nodes)


def reweighted(draws: "Draws", new: Recording) -> "Draws":
    """Draws whose ensemble is weighted by the likelihood of new runs.

    Raises
    ------
    ValueError
        Where the weights degenerate (k-hat too large).
    """
    left_out, states = members_left_out(draws, new)
    values = np.array([left_out.log_likelihood(state) for state in states])
    if draws.ensemble.weights is not None:
        values = values + np.log(np.maximum(draws.ensemble.weights, np.finfo(float).tiny))
    log_weights, k_hat = smoothed(values)
    limit = good_k(len(values))
    if not k_hat <= limit:
        raise ValueError(
            f"The new runs say too much for weights: k-hat is {k_hat:.2f}, wanted at most {limit:.2f} with "
            f"{len(values)} members. Sample both recordings, with training=<the recording of the draws>, or hold the "
            "parameters with mode='frozen'."
        )
    weights = np.exp(log_weights)
    tree = draws.tree.copy()
    tree.attrs |= {"updated_by": new.digest(), "update_k_hat": k_hat, "update_ess": float(1.0 / np.sum(weights**2))}
    return replace(draws, tree=tree, ensemble=replace(draws.ensemble, weights=weights))


def with_both(draws: "Draws", new: Recording, training: Recording, /, **sampling: Any) -> "Draws":
    """Draws from the posterior of the training recording and new runs together; chains start at the earlier MAP.

    Raises
    ------
    ValueError
        When `training` is not what the draws were made from, or runs share names.
    """
    draws.check_recording(training)
    both, model = concat_runs([training, new]), draws.model
    fitted = model.model_
    for stream in new.streams():
        prediction.check_stream(fitted, stream)
    likelihood, _ = model.prepared(both, reduce=False, standardization=fitted.standardization)
    shapes = likelihood.layout.shapes
    fresh = {name: np.zeros(shape) for name, shape in shapes.items() if name.startswith("run_offset/")}
    parameters = fresh | fitted.parameters
    known = {name: np.nan_to_num(parameters[name]) for name in shapes}
    usable = usable_rows(both, fitted.specification.responses, edges=fitted.edges)
    joined = replace(
        fitted,
        parameters=parameters,
        runs=training_nodes(likelihood, known),
        domains={run: usable.domains[run] for run in likelihood.nodes.groups},
    )
    out = type(model)(**model.get_params())
    out.__dict__.update({name: value for name, value in model.__dict__.items() if name.endswith("_")})
    out.recording_digest_ = both.digest()
    out.converged_, out.stop_reason_ = False, "the MAP of an earlier recording, where chains of both start"
    out._describe(joined)
    return out.sample(both, **sampling)


def calibrated_draws(draws: "Draws", recording: Recording, *, n_jobs: int, progress: bool | None) -> "Draws":
    """Draws that know new participants, whose parameters are at their mode given each member."""
    ensemble, model = draws.ensemble, draws.model
    standardization = model.standardization(recording)
    options = {"max_iter": model.max_iter, "tolerance": model.tol}
    shared = (ensemble, recording, standardization, options)
    jobs = [(member,) for member in range(len(ensemble))]
    found = parallel_map(
        _member, jobs, n_jobs=worker_count(n_jobs, len(jobs)), shared=shared, desc="calibrating", progress=progress
    )
    bad = [reason for _, converged, reason in found if not converged]
    if bad:
        warn_caller(
            f"The calibration of {len(bad)} of {len(found)} members did not converge: {bad[0]}.", ConvergenceWarning
        )
    names = [name for name in found[0][0] if name not in ensemble.parameters]
    added = {name: np.array([parameters[name] for parameters, _, _ in found]) for name in names}
    joined = model.calibrate(recording)
    parameters = ensemble.parameters | added
    return replace(draws, model=joined, ensemble=replace(ensemble, base=joined.model_, parameters=parameters))


def _member(
    ensemble: Ensemble, recording: Recording, standardization: Any, options: dict[str, Any], member: int
) -> tuple[dict[str, Any], bool, str]:
    fitted, converged, reason = calibrated(ensemble[member], recording, standardization, **options)
    return dict(fitted.parameters), converged, reason
