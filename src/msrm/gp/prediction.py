"""Predictions with variances and inferred latents of a fitted GP-MSRM, parameters held (DESIGN 5).

Targets are removed by name before any value is read. For each target participant the sources are chosen (``within``,
``across``, ``both``), the posterior of the target's functionals is taken from them alone, and passed through the
target's loadings: mean ``b + W E[g]``, variance ``w' Cov(g) w``, plus v with ``noise=True``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from msrm.asking import SOURCES, Targets, Times, check_features, chosen_pairs, run_times, wanted_times
from msrm.coverage import Interval, inside, merged, seen
from msrm.gp.data import Key, NodeLayout, pair_data
from msrm.gp.fitted import FittedGP
from msrm.gp.likelihood import Likelihood
from msrm.gp.moments import Moments, Query, functional_moments
from msrm.gp.run_offsets import with_run_offsets
from msrm.nodes import GroupStatistics, NodeGroup, usable_rows
from msrm.recording import Recording, Stream
from msrm.responses import Identity, Response

_LATENT_STEP = 0.25  # of the length scale: times of an inferred latent, unless given


@dataclass(frozen=True, eq=False)
class Sources:
    """What some streams of one run say: node groups, their statistics, and the latent time they see.

    Attributes
    ----------
    groups : {modality: NodeGroup}
    statistics : {modality: GroupStatistics}
    covered : tuple of (start, stop)
        Seconds, disjoint and increasing.
    domain : (first, last) or None
        Seconds with data.
    """

    groups: dict[str, NodeGroup]
    statistics: dict[str, GroupStatistics]
    covered: tuple[Interval, ...]
    domain: tuple[float, float] | None

    def supported(self, times: np.ndarray, response: Response) -> np.ndarray:
        """Times (time,) whose response lies inside one stretch that data see."""
        return inside(times, response, self.covered)


def sources_of(fitted: FittedGP, recording: Recording | None, run: str, streams: Sequence[Stream]) -> Sources:
    """The likelihood of one run's streams at the fitted parameters.

    Raises
    ------
    ValueError
        For a stream that the fit does not know.
    """
    for stream in streams:
        check_stream(fitted, stream)
    if not streams or recording is None:
        return Sources({}, {}, (), None)
    names = {(s.participant, s.modality) for s in streams}
    part = _only(recording, run, names)
    usable = usable_rows(part, fitted.specification.responses, edges=fitted.edges)
    pairs = []
    for participant, modality in part.pairs:
        scaling = fitted.standardization.get((participant, modality))
        mean, scale = (None, None) if scaling is None else (scaling.mean, scaling.scale)
        made = pair_data(part, usable, participant, modality, mean=mean, scale=scale, reduce=False)
        if made is not None:
            pairs.append(made)
    if not pairs:
        return Sources({}, {}, (), None)
    held = fitted.held
    nodes = NodeLayout.of(pairs, held.responses, {m: held.residual(m) for m in held.responses})
    likelihood = Likelihood(held, nodes, fitted.backend_for(nodes.groups))
    parameters = {name: fitted.parameters[name] for name in likelihood.layout.shapes if name in fitted.parameters}
    parameters = with_run_offsets(likelihood, parameters)
    covered = merged(
        piece
        for s in part.streams()
        for piece in seen(s.times[usable.rows[s.participant, run, s.modality]], fitted.responses[s.modality])
    )
    return Sources(nodes.groups[run], likelihood.statistics(parameters)[run], covered, usable.domains[run])


def training_sources(fitted: FittedGP, run: str) -> Sources:
    """What the training data say of one of their runs."""
    groups, statistics = fitted.training_groups()[run], fitted.training_statistics()[run]
    covered = merged(piece for m, group in groups.items() for piece in seen(group.times, fitted.responses[m]))
    return Sources(groups, statistics, covered, fitted.domains[run])


def check_stream(fitted: FittedGP, stream: Stream) -> None:
    """Refuse streams that the fit does not know.

    Raises
    ------
    ValueError
        Naming the stream and what the fit knows.
    """
    key = stream.participant, stream.modality
    if key not in fitted.features:
        known = ", ".join(f"{p}/{m}" for p, m in fitted.features)
        raise ValueError(
            f"{stream.label}: not in the fit, which has {known}. Calibrate the participant first, or drop the stream."
        )
    check_features(stream, fitted.features[key])


def predict(
    fitted: FittedGP,
    recording: Recording,
    targets: Targets,
    source: str,
    times: Times,
    *,
    noise: bool,
    joint: bool,
) -> xr.DataTree:
    """Predictions of every target in every run; see :meth:`msrm.GPMSRM.predict`."""
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, got {source!r}.")
    chosen = chosen_pairs(list(fitted.features), recording, targets)
    removed = set() if targets is None else set(chosen)
    streams = [s for s in recording.streams() if (s.participant, s.modality) not in removed]
    asked: dict[tuple[str, tuple[Key, ...]], dict[str, tuple[Key, np.ndarray]]] = {}
    for pair in chosen:
        for run, at in wanted_times(recording, *pair, times).items():
            own = tuple((s.participant, s.modality) for s in streams if s.run == run and _allowed(s, pair[0], source))
            asked.setdefault((run, own), {})[f"{pair[0]}/{run}/{pair[1]}"] = pair, at
    if not asked:
        raise ValueError("None of the targets is measured in any run of the recording. Say when to predict: times=...")
    nodes = {}
    for (run, own), wanted in asked.items():
        used = [s for s in streams if s.run == run and (s.participant, s.modality) in own]
        sources = sources_of(fitted, recording, run, used)
        for path, (pair, at) in wanted.items():
            nodes[path] = _predicted(fitted, sources, run, pair, at, noise=noise, joint=joint)
    return xr.DataTree.from_dict(nodes)


def infer_latent(fitted: FittedGP, recording: Recording | None, times: Times, *, joint: bool) -> xr.DataTree:
    """Latents of every run; see :meth:`msrm.GPMSRM.infer_latent`."""
    runs = tuple(fitted.runs) if recording is None else recording.runs
    nodes = {}
    for run in runs:
        if recording is None:
            sources = training_sources(fitted, run)
        else:
            sources = sources_of(fitted, recording, run, list(recording.streams(run=run)))
        nodes[run] = latent_node(fitted, sources, run, run_times(times, run), joint=joint)
    return xr.DataTree.from_dict(nodes)


def transform(fitted: FittedGP, recording: Recording, times: Times) -> xr.DataTree:
    """Latents of every participant alone; see :meth:`msrm.GPMSRM.transform`."""
    nodes = {}
    for participant in recording.participants:
        for run in recording.runs:
            streams = list(recording.streams(participant, run=run))
            if streams:
                sources = sources_of(fitted, recording, run, streams)
                at = run_times(times, run)
                nodes[f"{participant}/{run}"] = latent_node(fitted, sources, run, at, joint=False)
    return xr.DataTree.from_dict(nodes)


def latent_node(fitted: FittedGP, sources: Sources, run: str, times: np.ndarray | None, *, joint: bool) -> xr.Dataset:
    """Mean and variance (time, factor) of a run's latent."""
    if times is None:
        if sources.domain is None:
            raise ValueError(f"{run}: no usable row of any stream; say at which times the latent is wanted.")
        first, last = sources.domain
        step = _LATENT_STEP * fitted.length_scale
        times = first + step * np.arange(int(np.floor((last - first) / step + 1e-9)) + 1)
    moments = _at(fitted, sources, run, Identity(), times)
    variance = np.diagonal(moments.covariance, axis1=1, axis2=2)
    variables: dict[str, Any] = {
        "mean": (("time", "factor"), moments.mean),
        "variance": (("time", "factor"), variance),
        "supported": ("time", sources.supported(times, Identity())),
    }
    if joint:
        variables["covariance"] = (("time", "factor", "other_factor"), moments.covariance)
    factors = np.arange(1, moments.mean.shape[1] + 1)
    coords: dict[str, Any] = {"time": ("time", times, {"units": "s"}), "factor": factors}
    return xr.Dataset(variables, coords | ({"other_factor": factors} if joint else {}))


def _predicted(
    fitted: FittedGP, sources: Sources, run: str, pair: Key, times: np.ndarray, *, noise: bool, joint: bool
) -> xr.Dataset:
    participant, modality = pair
    response = fitted.responses[modality]
    moments = _at(fitted, sources, run, response, times)
    loading = fitted.parameters[f"loading/{participant}/{modality}"]
    scaling = fitted.standardization.get(pair)
    centre, scale = (0.0, np.ones(len(loading))) if scaling is None else (scaling.mean, scaling.scale)
    mean = (fitted.offset_of(participant, run, modality) + moments.mean @ loading.T) * scale + centre
    loading = loading * scale[:, None]
    variance = np.einsum("fk,tkl,fl->tf", loading, moments.covariance, loading, optimize=True)
    floor = scale**2 * float(fitted.parameters[f"noise/{participant}/{modality}"])
    if (
        f"run_offset/{participant}/{run}/{modality}" not in fitted.parameters
        and modality in fitted.specification.run_offsets
    ):
        variance = variance + (scale * fitted.specification.priors.run_offset_sd) ** 2
    if noise:
        variance = variance + floor
    features = fitted.features[pair]
    variables: dict[str, Any] = {
        "mean": (("time", "feature"), mean),
        "variance": (("time", "feature"), variance),
        "supported": ("time", sources.supported(times, response)),
    }
    coords: dict[str, Any] = {"time": ("time", times, {"units": "s"}), "feature": features}
    if joint:
        covariance = np.einsum("fk,tkl,gl->tfg", loading, moments.covariance, loading, optimize=True)
        if noise:
            covariance = covariance + np.diag(floor)
        variables["covariance"] = (("time", "feature", "other_feature"), covariance)
        coords["other_feature"] = features
    return xr.Dataset(variables, coords)


def _at(fitted: FittedGP, sources: Sources, run: str, response: Response, times: np.ndarray) -> Moments:
    """Posterior of functionals at times in any order."""
    distinct, place = np.unique(times, return_inverse=True)
    found = functional_moments(fitted, run, sources.groups, sources.statistics, {"at": Query(response, distinct)})["at"]
    return Moments(found.mean[place], found.covariance[place])


def _allowed(stream: Stream, participant: str, source: str) -> bool:
    return source == "both" or (stream.participant == participant) == (source == "within")


def _only(recording: Recording, run: str, names: set[Key]) -> Recording:
    """The named streams of one run."""
    part = recording.select(runs=[run], participants=list(dict.fromkeys(p for p, _ in sorted(names))))
    unwanted: dict[str, list[str]] = {}
    for participant, modality in part.pairs:
        if (participant, modality) not in names:
            unwanted.setdefault(participant, []).append(modality)
    return part.drop(targets=unwanted) if unwanted else part
