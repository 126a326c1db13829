"""Posterior predictive checks: data replicated from draws against the data, by statistics of each stream and run.

A replicate has its own parameters (a member of the ensemble), latent path and residuals:
``y = b + W g(t) + e``, observed where the data are. Paths are drawn given the data (does the model describe these
runs?) or from their prior (does it describe runs like these?).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.gp import prediction
from msrm.gp.arguments import check_count
from msrm.gp.data import Key
from msrm.gp.fitted import FittedGP
from msrm.gp.moments import latent_posterior
from msrm.gp.paths import functional_draws
from msrm.gp.terms import OrnsteinUhlenbeck
from msrm.recording import Recording, Stream

if TYPE_CHECKING:
    from msrm.gp.draws import Draws

__all__ = ["LATENTS", "STATISTICS", "predictive_check"]

Array = NDArray[np.float64]
LATENTS = ("posterior", "prior")


def _lag_one(values: Array) -> float:
    """Autocorrelation of adjacent rows, mean over features."""
    centred = values - np.nanmean(values, axis=0)
    both = np.isfinite(centred[1:]) & np.isfinite(centred[:-1])
    products = np.where(both, centred[1:] * centred[:-1], 0.0).sum(axis=0) / np.maximum(both.sum(axis=0), 1)
    variance = np.nanmean(centred**2, axis=0)
    varies = variance > 0.0
    return float(np.mean(products[varies] / variance[varies])) if varies.any() else np.nan


STATISTICS: dict[str, Callable[[Array], float]] = {
    "mean": lambda values: float(np.nanmean(values)),
    "sd": lambda values: float(np.sqrt(np.nanmean(np.nanvar(values, axis=0)))),
    "autocorrelation": _lag_one,
    "min": lambda values: float(np.nanmin(values)),
    "max": lambda values: float(np.nanmax(values)),
}


def predictive_check(draws: "Draws", recording: Recording, *, latent: str, per_member: int, seed: int) -> xr.Dataset:
    """See :meth:`msrm.gp.draws.Draws.predictive_check`."""
    if latent not in LATENTS:
        raise ValueError(f"latent must be 'posterior' or 'prior', found {latent!r}.")
    check_count("per_member", per_member)
    for stream in recording.streams():
        prediction.check_stream(draws.ensemble.base, stream)
    rng = np.random.default_rng(seed)
    groups = [
        (run, m) for run in recording.runs for m in recording.modalities if recording.streams(run=run, modality=m)
    ]
    streams = {place: list(recording.streams(run=place[0], modality=place[1])) for place in groups}
    known = {place: [_observed(draws.ensemble.base, s) for s in own] for place, own in streams.items()}
    observed = np.concatenate([_statistics(streams[place], known[place]) for place in groups])
    replicated = []
    with prediction.shared_data():
        for member in [member for member in draws.ensemble for _ in range(per_member)]:
            made = _replicate(member, recording, streams, latent, rng)
            rows = []
            for place in groups:
                masked = [np.where(np.isfinite(y), r, np.nan) for y, r in zip(known[place], made[place], strict=True)]
                rows.append(_statistics(streams[place], masked))
            replicated.append(np.concatenate(rows))
    values = np.array(replicated)
    weights = draws.ensemble.weights
    share = np.full(len(draws.ensemble), 1.0 / len(draws.ensemble)) if weights is None else weights
    share = np.repeat(share / per_member, per_member)
    beyond = np.tensordot(share, (values > observed) + 0.5 * (values == observed), 1)
    names = [s for place in groups for s in streams[place]]
    coords = {
        "stream_run": [f"{s.participant}/{s.run}/{s.modality}" for s in names],
        "participant": ("stream_run", [s.participant for s in names]),
        "modality": ("stream_run", [s.modality for s in names]),
        "run": ("stream_run", [s.run for s in names]),
        "statistic": [*STATISTICS, "intersubject"],
    }
    dims = ("stream_run", "statistic")
    return xr.Dataset(
        {
            "observed": (dims, observed),
            "replicated": (("replicate", *dims), values),
            "p_value": (dims, np.where(np.isfinite(observed), beyond, np.nan)),
            "weight": ("replicate", share),
        },
        coords,
        {"latent": latent, "seed": seed},
    )


def _observed(fitted: FittedGP, stream: Stream) -> Array:
    """Values, NaN for features that took no part in the fit."""
    took_part = np.isfinite(fitted.parameters[f"offset/{stream.participant}/{stream.modality}"])
    return np.where(took_part, np.asarray(stream.data.values, float), np.nan)


def _statistics(streams: list[Stream], values: list[Array]) -> Array:
    """(stream, statistic) of the streams of one run and modality."""
    seen = [y[:, np.isfinite(y).any(axis=0)] for y in values]
    own = [[statistic(y) if y.size else np.nan for statistic in STATISTICS.values()] for y in seen]
    shared = _intersubject(streams, values)
    return np.column_stack([np.array(own), shared])


def _intersubject(streams: list[Stream], values: list[Array]) -> Array:
    """Correlation of each participant with the mean of the others that share times and features, mean over features."""
    out = np.full(len(streams), np.nan)
    for place, stream in enumerate(streams):
        others = [
            y
            for other, y in zip(streams, values, strict=True)
            if other is not stream
            and np.array_equal(other.times, stream.times)
            and np.array_equal(other.features, stream.features)
        ]
        if others:
            counts = np.sum([np.isfinite(y) for y in others], axis=0)
            mean = np.where(counts > 0, np.nansum(others, axis=0) / np.maximum(counts, 1), np.nan)
            out[place] = _mean_correlation(values[place], mean)
    return out


def _mean_correlation(a: Array, b: Array) -> float:
    both = np.isfinite(a) & np.isfinite(b)
    count = np.maximum(both.sum(axis=0), 1)
    a, b = (np.where(both, x - np.where(both, x, 0.0).sum(axis=0) / count, 0.0) for x in (a, b))
    spread = np.sqrt(np.sum(a**2, axis=0) * np.sum(b**2, axis=0))
    varies = spread > 0.0
    return float(np.mean(np.sum(a * b, axis=0)[varies] / spread[varies])) if varies.any() else np.nan


def _replicate(
    member: FittedGP,
    recording: Recording,
    streams: dict[tuple[str, str], list[Stream]],
    latent: str,
    rng: np.random.Generator,
) -> dict[tuple[str, str], list[Array]]:
    """Values (time, feature) of every stream, data units, by run and modality."""
    out = {}
    for run in recording.runs:
        own = {m: found for (r, m), found in streams.items() if r == run}
        used = [s for found in own.values() for s in found] if latent == "posterior" else []
        sources = prediction.sources_of(member, recording, run, used)
        queries = [(member.responses[m], np.unique(np.concatenate([s.times for s in own[m]]))) for m in own]
        posterior = latent_posterior(member, run, sources.groups, sources.statistics, queries)
        paths = functional_draws(posterior, queries, rng, 1)
        for (modality, found), (_, times), values in zip(own.items(), queries, paths, strict=True):
            out[run, modality] = [
                _stream_values(member, sources, s, values[0][np.searchsorted(times, s.times)], rng) for s in found
            ]
    return out


def _stream_values(
    member: FittedGP, sources: prediction.Sources, stream: Stream, seen: Array, rng: np.random.Generator
) -> Array:
    key: Key = stream.participant, stream.modality
    name, parameters = "/".join(key), sources.run_offsets | member.parameters
    level = parameters[f"offset/{name}"]
    offset = f"run_offset/{stream.participant}/{stream.run}/{stream.modality}"
    if offset in parameters:
        level = level + parameters[offset]
    elif stream.modality in member.specification.run_offsets:
        level = level + member.specification.priors.run_offset_sd * rng.standard_normal(len(level))
    standard = rng.standard_normal((len(seen), len(level)))
    residual = member.held.residual(stream.modality)
    if isinstance(residual, OrnsteinUhlenbeck):
        kept = np.exp(-np.diff(stream.times) / residual.start)
        for row, share in enumerate(kept, start=1):
            standard[row] = share * standard[row - 1] + np.sqrt(1.0 - share**2) * standard[row]
    values = level + seen @ parameters[f"loading/{name}"].T + np.sqrt(float(parameters[f"noise/{name}"])) * standard
    scaling = member.standardization.get(key)
    return values if scaling is None else values * scaling.scale + scaling.mean
