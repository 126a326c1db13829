"""Predictions with variances and inferred latents of a fitted GP-MSRM, parameters held (DESIGN 5).

Targets are removed by name before any value is read. For each target participant the sources are chosen (``within``,
``across``, ``both``), the posterior of the target's functionals is taken from them alone, and passed through the
target's loadings: mean ``b + W E[g]``, variance ``w' Cov(g) w``, plus v with ``noise=True``.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from msrm.asking import SOURCES, Targets, Times, check_features, check_runs, chosen_pairs, run_times, wanted_times
from msrm.coverage import Interval, inside, merged, seen
from msrm.gp.backends import LatentPosterior
from msrm.gp.data import Key, NodeLayout, PairData, pair_data
from msrm.gp.fitted import FittedGP
from msrm.gp.likelihood import Likelihood
from msrm.gp.moments import latent_posterior
from msrm.gp.parameters import Parameters
from msrm.gp.run_offsets import with_run_offsets
from msrm.gp.terms import OrnsteinUhlenbeck
from msrm.nodes import GroupStatistics, NodeGroup, UsableRows, usable_rows
from msrm.recording import Recording, Stream
from msrm.responses import Identity, Response

_LATENT_STEP = 0.25  # of the length scale: times of an inferred latent, unless given
LATENT_JOINTS = (None, "factor", "time")
STREAM_JOINTS = (None, "feature", "time")


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
    run_offsets : {name: (feature,)}
        Of the streams, at their mode where the fit does not have them.
    """

    groups: dict[str, NodeGroup]
    statistics: dict[str, GroupStatistics]
    covered: tuple[Interval, ...]
    domain: tuple[float, float] | None
    run_offsets: Parameters = field(default_factory=dict)

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
    part, usable, pairs = _data_of(fitted, recording, run, frozenset((s.participant, s.modality) for s in streams))
    if not pairs:
        return Sources({}, {}, (), None)
    held = fitted.held
    nodes = NodeLayout.of(pairs, held.responses, {m: held.residual(m) for m in held.responses})
    likelihood = Likelihood(held, nodes, fitted.backend_for(nodes.groups))
    # Features that took no part in the fit are zero in loading and offset: they say nothing.
    known = {n: np.nan_to_num(fitted.parameters[n]) for n in likelihood.layout.shapes if n in fitted.parameters}
    parameters = with_run_offsets(likelihood, known)
    covered = merged(
        piece
        for s in part.streams()
        for piece in seen(s.times[usable.rows[s.participant, run, s.modality]], fitted.responses[s.modality])
    )
    offsets = {name: value for name, value in parameters.items() if name.startswith("run_offset/")}
    return Sources(nodes.groups[run], likelihood.statistics(parameters)[run], covered, usable.domains[run], offsets)


@contextmanager
def shared_data() -> Iterator[None]:
    """Arrange the data of a recording once while the block asks many fits that differ in their parameters alone."""
    token = _shared.set({})
    try:
        yield
    finally:
        _shared.reset(token)


_shared: ContextVar[dict[Any, Any] | None] = ContextVar("_shared", default=None)


def _data_of(
    fitted: FittedGP, recording: Recording, run: str, names: frozenset[Key]
) -> tuple[Recording, UsableRows, list[PairData]]:
    """The named streams of a run, their usable rows and raw data, standardized as the fit's."""
    kept = _shared.get()
    key = id(recording), run, names
    if kept is not None and key in kept:
        return kept[key]
    part = _only(recording, run, set(names))
    usable = usable_rows(part, fitted.specification.responses, edges=fitted.edges)
    pairs = []
    for participant, modality in part.pairs:
        scaling = fitted.standardization.get((participant, modality))
        mean, scale = (None, None) if scaling is None else (scaling.mean, scaling.scale)
        made = pair_data(part, usable, participant, modality, mean=mean, scale=scale, reduce=False)
        if made is not None:
            pairs.append(made)
    if kept is not None:
        kept[key] = part, usable, pairs
    return part, usable, pairs


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
    targets: Targets = None,
    source: str = "both",
    times: Times = None,
    *,
    noise: bool = False,
    joint: str | None = None,
) -> xr.DataTree:
    """Predictions of every target in every run; see :meth:`msrm.GPMSRM.predict`."""
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, got {source!r}.")
    if joint not in STREAM_JOINTS:
        raise ValueError(f"joint must be one of {', '.join(map(repr, STREAM_JOINTS))}, got {joint!r}.")
    check_runs(times, recording.runs)
    chosen = chosen_pairs(list(fitted.features), recording, targets)
    removed = set() if targets is None else set(chosen)
    streams = [s for s in recording.streams() if (s.participant, s.modality) not in removed]
    asked: dict[tuple[str, tuple[Key, ...]], dict[Key, np.ndarray]] = {}
    for pair in chosen:
        for run, at in wanted_times(recording, *pair, times).items():
            own = tuple((s.participant, s.modality) for s in streams if s.run == run and _allowed(s, pair[0], source))
            asked.setdefault((run, own), {})[pair] = at
    if not asked:
        raise ValueError("None of the targets is measured in any run of the recording. Say when to predict: times=...")
    nodes = {}
    for (run, own), wanted in asked.items():
        used = [s for s in streams if s.run == run and (s.participant, s.modality) in own]
        sources = sources_of(fitted, recording, run, used)
        queries = [(fitted.responses[modality], at) for (_, modality), at in wanted.items()]
        posterior = latent_posterior(fitted, run, sources.groups, sources.statistics, queries)
        for pair, at in wanted.items():
            target = _Target.of(fitted, sources, run, pair)
            nodes[f"{pair[0]}/{run}/{pair[1]}"] = target.predicted(sources, posterior, at, noise=noise, joint=joint)
    return xr.DataTree.from_dict(nodes)


def infer_latent(
    fitted: FittedGP,
    recording: Recording | None,
    times: Times,
    *,
    joint: str | None,
    without: Collection[Key] = (),
) -> xr.DataTree:
    """Latents of every run, from all streams but some pairs; see :meth:`msrm.GPMSRM.infer_latent`."""
    if joint not in LATENT_JOINTS:
        raise ValueError(f"joint must be one of {', '.join(map(repr, LATENT_JOINTS))}, got {joint!r}.")
    runs = tuple(fitted.runs) if recording is None else recording.runs
    check_runs(times, runs)
    nodes = {}
    for run in runs:
        if recording is None:
            sources = training_sources(fitted, run)
        else:
            streams = [s for s in recording.streams(run=run) if (s.participant, s.modality) not in without]
            sources = sources_of(fitted, recording, run, streams)
        nodes[run] = latent_node(fitted, sources, run, run_times(times, run), joint=joint)
    return xr.DataTree.from_dict(nodes)


def transform(fitted: FittedGP, recording: Recording, times: Times) -> xr.DataTree:
    """Latents of every participant alone; see :meth:`msrm.GPMSRM.transform`."""
    check_runs(times, recording.runs)
    nodes = {}
    for participant in recording.participants:
        for run in recording.runs:
            streams = list(recording.streams(participant, run=run))
            if streams:
                sources = sources_of(fitted, recording, run, streams)
                at = run_times(times, run)
                nodes[f"{participant}/{run}"] = latent_node(fitted, sources, run, at, joint=None)
    return xr.DataTree.from_dict(nodes)


def latent_node(
    fitted: FittedGP, sources: Sources, run: str, times: np.ndarray | None, *, joint: str | None
) -> xr.Dataset:
    """Mean and variance (time, factor) of a run's latent."""
    if times is None:
        if sources.domain is None:
            raise ValueError(f"{run}: no usable row of any stream; say at which times the latent is wanted: times=...")
        first, last = sources.domain
        step = _LATENT_STEP * fitted.length_scale
        times = first + step * np.arange(int(np.floor((last - first) / step + 1e-9)) + 1)
    response = Identity()
    posterior = latent_posterior(fitted, run, sources.groups, sources.statistics, [(response, times)])
    seen_at = _Seen.of(posterior, response, times)
    covariance = seen_at.covariance
    variables: dict[str, Any] = {
        "mean": (("time", "factor"), seen_at.mean),
        "variance": (("time", "factor"), np.diagonal(covariance, axis1=1, axis2=2)),
        "supported": ("time", sources.supported(times, response)),
    }
    factors = np.arange(1, covariance.shape[1] + 1)
    coords: dict[str, Any] = {"time": ("time", times, {"units": "s"}), "factor": factors}
    if joint is not None:
        coords["other_factor"] = factors
    if joint == "factor":
        variables["covariance"] = (("time", "factor", "other_factor"), covariance)
    elif joint == "time":
        variables["covariance"] = (("time", "factor", "other_time", "other_factor"), seen_at.joint)
        coords["other_time"] = ("other_time", times, {"units": "s"})
    return xr.Dataset(variables, coords)


@dataclass(frozen=True, eq=False)
class _Seen:
    """The latent seen through a response at times in any order, some perhaps repeated."""

    posterior: LatentPosterior
    made: Any
    place: np.ndarray

    @classmethod
    def of(cls, posterior: LatentPosterior, response: Response, times: np.ndarray) -> "_Seen":
        distinct, place = np.unique(times, return_inverse=True)
        return cls(posterior, posterior.functionals(response, None, distinct), place)

    @property
    def mean(self) -> np.ndarray:
        """(time, K)."""
        return self.posterior.mean_of(self.made)[self.place]

    @property
    def covariance(self) -> np.ndarray:
        """Over factors at each time, (time, K, K)."""
        return self.posterior.covariance_of(self.made)[self.place]

    @property
    def joint(self) -> np.ndarray:
        """Over times and factors, (time, K, time, K)."""
        return self.posterior.joint_covariance([self.made])[self.place][:, :, self.place]


@dataclass(frozen=True, eq=False)
class _Target:
    """A stream to predict, in data units.

    Attributes
    ----------
    response : Response
    features : (feature,) of str
    loading : (feature, factor)
    level : (feature,)
    noise : (feature,)
        Variance.
    timescale : float
        Of the noise, seconds; 0 where it is white.
    unknown : (feature,)
        Variance of the run's offset where nothing is known of it.
    """

    response: Response
    features: np.ndarray
    loading: np.ndarray
    level: np.ndarray
    noise: np.ndarray
    timescale: float
    unknown: np.ndarray

    @classmethod
    def of(cls, fitted: FittedGP, sources: Sources, run: str, pair: Key) -> "_Target":
        participant, modality = pair
        specification, parameters = fitted.specification, fitted.parameters
        loading = parameters[f"loading/{participant}/{modality}"]
        scaling = fitted.standardization.get(pair)
        centre, scale = (0.0, np.ones(len(loading))) if scaling is None else (scaling.mean, scaling.scale)
        name = f"run_offset/{participant}/{run}/{modality}"
        known = sources.run_offsets | parameters
        spread = specification.priors.run_offset_sd if modality in specification.run_offsets else 0.0
        residual = fitted.held.residual(modality)
        return cls(
            fitted.responses[modality],
            fitted.features[pair],
            loading * scale[:, None],
            (parameters[f"offset/{participant}/{modality}"] + known.get(name, 0.0)) * scale + centre,
            scale**2 * float(parameters[f"noise/{participant}/{modality}"]),
            residual.start if isinstance(residual, OrnsteinUhlenbeck) else 0.0,
            (scale * (0.0 if name in known else spread)) ** 2,
        )

    def predicted(
        self, sources: Sources, posterior: LatentPosterior, times: np.ndarray, *, noise: bool, joint: str | None
    ) -> xr.Dataset:
        seen_at, loading = _Seen.of(posterior, self.response, times), self.loading
        covariance = seen_at.covariance
        own = self.unknown + self.noise if noise else self.unknown
        variables: dict[str, Any] = {
            "mean": (("time", "feature"), seen_at.mean @ loading.T + self.level),
            "variance": (
                ("time", "feature"),
                np.einsum("fk,tkl,fl->tf", loading, covariance, loading, optimize=True) + own,
            ),
            "supported": ("time", sources.supported(times, self.response)),
        }
        coords: dict[str, Any] = {"time": ("time", times, {"units": "s"}), "feature": self.features}
        if joint == "feature":
            whole = np.einsum("fk,tkl,gl->tfg", loading, covariance, loading, optimize=True) + np.diag(own)
            variables["covariance"] = (("time", "feature", "other_feature"), whole)
            coords["other_feature"] = self.features
        elif joint == "time":
            whole = np.einsum("fk,tkul,fl->ftu", loading, seen_at.joint, loading, optimize=True)
            whole += self.unknown[:, None, None]
            if noise:
                whole += self.noise[:, None, None] * self._noise_correlation(times)
            variables["covariance"] = (("feature", "time", "other_time"), whole)
            coords["other_time"] = ("other_time", times, {"units": "s"})
        return xr.Dataset(variables, coords)

    def _noise_correlation(self, times: np.ndarray) -> np.ndarray:
        apart = np.abs(times[:, None] - times)
        return np.exp(-apart / self.timescale) if self.timescale else (apart == 0.0).astype(float)


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
