"""Joint draws of a run's latents, seen through responses at any times (DESIGN 5).

On the grid: states by banded simulation smoothing, then what they leave open. For Identity that is drawn with its
covariance over the times in one cell, so that paths are as smooth inside a cell as across cells; for filtered responses
it is the residual variance of each functional, as in the likelihood. The dense posterior has a joint covariance.
"""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.asking import Times, check_runs, run_times
from msrm.gp import prediction
from msrm.gp.backends import LatentPosterior
from msrm.gp.fitted import FittedGP
from msrm.gp.moments import latent_posterior
from msrm.gp.posterior import Posterior
from msrm.latent_grid import Functionals
from msrm.recording import Recording
from msrm.responses import Identity, Response

__all__ = ["functional_draws", "latent_paths", "with_latent_times"]

Array = NDArray[np.float64]


def functional_draws(
    posterior: LatentPosterior,
    queries: Sequence[tuple[Response, Array]],
    rng: np.random.Generator,
    size: int,
) -> list[Array]:
    """Joint draws of functionals of one run.

    Parameters
    ----------
    posterior : LatentPosterior
        Reaching over the queries.
    queries : sequence of (response, (time,))
        Seconds, increasing.
    rng : Generator
    size : int
        Draws.

    Returns
    -------
    list of (draw, time, K)
    """
    made = [posterior.functionals(response, None, times) for response, times in queries]
    if not isinstance(posterior, Posterior):
        mean = np.concatenate([posterior.mean_of(one) for one in made])
        covariance = posterior.joint_covariance(made).reshape(mean.size, mean.size)
        values = mean + (rng.standard_normal((size, mean.size)) @ _root(covariance).T).reshape(size, *mean.shape)
        return np.split(values, np.cumsum([len(times) for _, times in queries])[:-1], axis=1)
    states = posterior.draw(rng, size)
    seen = [np.array([one.rows.apply(state) for state in states]) for one in made]
    return [values + _left_open(one, rng.standard_normal(values.shape)) for values, one in zip(seen, made, strict=True)]


def _left_open(made: Functionals, standard: Array) -> Array:
    """What grid states leave open of functionals, (draw, time, K), from standard normals."""
    out = np.sqrt(made.residual)[:, None] * standard
    for cells in made.shared:
        roots = np.array([_root(covariance) for covariance in cells.covariance])
        out[:, cells.nodes] = np.einsum("cts,dcsk->dctk", roots, standard[:, cells.nodes])
    return out


def _root(covariance: Array) -> Array:
    """A square root of a covariance that rounding may have left slightly indefinite."""
    values, vectors = np.linalg.eigh(0.5 * (covariance + covariance.T))
    return vectors * np.sqrt(np.maximum(values, 0.0))


def latent_paths(
    fitted: FittedGP, recording: Recording | None, times: Times, size: int, rng: np.random.Generator
) -> dict[str, xr.Dataset]:
    """Joint draws of the latents of every run, ``latent`` (sample, time, factor), by run.

    Parameters
    ----------
    fitted : FittedGP
    recording : Recording, optional
        Without one the training runs.
    times : array or {run: array}
        Seconds.
    size : int
    rng : Generator
    """
    runs = tuple(fitted.runs) if recording is None else recording.runs
    check_runs(times, runs)
    out = {}
    for run in runs:
        if recording is None:
            sources = prediction.training_sources(fitted, run)
        else:
            sources = prediction.sources_of(fitted, recording, run, list(recording.streams(run=run)))
        given = run_times(times, run)
        at = prediction.latent_node(fitted, sources, run, None, joint=None)["time"].values if given is None else given
        distinct, place = np.unique(at, return_inverse=True)
        query = [(Identity(), distinct)]
        posterior = latent_posterior(fitted, run, sources.groups, sources.statistics, query)
        values = functional_draws(posterior, query, rng, size)[0][:, place]
        factors = np.arange(1, values.shape[2] + 1)
        out[run] = xr.Dataset(
            {"latent": (("sample", "time", "factor"), values)},
            {"time": ("time", at, {"units": "s"}), "factor": factors},
        )
    return out


def with_latent_times(fitted: FittedGP, recording: Recording | None, times: Times) -> Times:
    """The times asked for, or those that the MAP answers at: members with other length scales must agree on them."""
    if times is not None:
        return times
    answer = prediction.infer_latent(fitted, recording, None, joint=None)
    return {run: node["time"].values for run, node in answer.children.items()}
