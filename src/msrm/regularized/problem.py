"""From a recording to the sums an R-MSRM fit iterates on: pairs, weights, path systems and row groups (DESIGN 2, 3.2).

Every entry of a usable row weighs

    c_nf = (modality weight / summed weights of the participant-run's modalities) x cell_n / (finite entries of the row)
           / (number of participant-runs),

and the ridge of a loading column is lambda_W / (pairs), divided by the features of the pair under "feature" scaling.
After `build_problem` nothing depends on the number of features or touches the recording.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from msrm.recording import Recording
from msrm.regularized.domain import Grid, cell_weights, latent_grid, usable_rows
from msrm.regularized.filters import Filters, Pair
from msrm.regularized.latents import PathSystem
from msrm.regularized.scaling import PairScale, pair_scale
from msrm.regularized.settings import Settings
from msrm.regularized.statistics import Block, CompleteRows, MaskedRows, RowGroup
from msrm.rotation import ReducedPair, reduce_pair
from msrm.stream import Stream

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Problem:
    """What the iterations of a fit see: small arrays, no features, picklable.

    Attributes
    ----------
    filters : Filters
    pairs : tuple of (participant, modality)
        Modality by modality.
    columns : tuple of slice
        Reduced features of each pair among the rows of the stacked loadings (column, K).
    ridge : (column,)
        Weight of the squared norm of each stacked loading row.
    systems : tuple of PathSystem
    groups : tuple of tuple of RowGroup
        Those of each system.
    gauges : tuple of (pair indices, system indices)
        Loadings and latents that share one rotation and scale: everything, or one participant's under separate pooling.
    """

    filters: Filters
    pairs: tuple[Pair, ...]
    columns: tuple[slice, ...]
    ridge: Array
    systems: tuple[PathSystem, ...]
    groups: tuple[tuple[RowGroup, ...], ...]
    gauges: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @cached_property
    def energy(self) -> float:
        """sum c y^2: the objective at zero loadings, less response penalties."""
        return sum(group.energy for groups in self.groups for group in groups)

    @property
    def n_columns(self) -> int:
        """Rows of the stacked loadings."""
        return len(self.ridge)


@dataclass(frozen=True)
class Training:
    """What a fit remembers of its recording beside the problem.

    Attributes
    ----------
    scales : dict from pair to PairScale
    factors : dict from (participant, run, modality) to float
        A stream's weight in the objective: c_nf = factor x cell / (finite entries of the row).
    reduced : dict from pair to ReducedPair
        Maps reduced loadings back to features; reads the recording.
    ridges : dict from pair to float
        Weight of each pair's squared loading norm.
    limits : dict from run to (first, last)
        Between which the response of a usable row must see: the observed domain, or the whole grid where edges extend.
    """

    scales: dict[Pair, PairScale]
    factors: dict[Key, float]
    reduced: dict[Pair, ReducedPair]
    ridges: dict[Pair, float]
    limits: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """A fit that new streams join: its latent grids and the numbers that normalize its objective.

    Attributes
    ----------
    grids : dict from run to Grid
    limits : dict from run to (first, last)
        Between which the responses of new rows must see, seconds.
    n_participant_runs, n_pairs : int
    """

    grids: dict[str, Grid]
    limits: dict[str, tuple[float, float]]
    n_participant_runs: int
    n_pairs: int


def build_problem(recording: Recording, settings: Settings, frame: Frame | None = None) -> tuple[Problem, Training]:
    """Scan, standardize, trim, rotate and group a recording.

    Parameters
    ----------
    frame : Frame, optional
        Of a fit whose latents these streams see; by default the recording stands alone.

    Raises
    ------
    ValueError
        For a stream without usable row, a pair without varying feature, or a run without duration.
    """
    settings.check_modalities(recording.modalities)
    streams = [stream for stream in recording.streams() if settings.weight(stream.modality) > 0]
    pairs = sorted({(s.participant, s.modality): None for s in streams}, key=lambda p: recording.modalities.index(p[1]))
    filters = Filters(settings.responses, pairs)
    by_pair = {pair: [s for s in streams if (s.participant, s.modality) == pair] for pair in pairs}
    scales = {pair: _scale(by_pair[pair]) for pair in pairs}
    observed = {
        key_of(s): count > 0 for pair in pairs for s, count in zip(by_pair[pair], scales[pair].counts, strict=True)
    }
    if frame is None:
        rows, grids, limits = rows_and_grids(streams, observed, settings)
    else:
        rows, grids, limits = _rows_inside(streams, observed, settings, frame.limits), frame.grids, frame.limits
    for stream in streams:
        if not rows[key_of(stream)].any():
            raise ValueError(_no_row(stream, observed, streams, settings))
    reduced = {
        pair: reduce_pair(
            by_pair[pair],
            [rows[key_of(s)] for s in by_pair[pair]],
            scales[pair].mean,
            scales[pair].sd,
            keep_mean=False,
            present=scales[pair].present,
        )
        for pair in pairs
    }
    n_pairs = len(pairs) if frame is None else frame.n_pairs
    ridges = {pair: pair_ridge(reduced[pair].n_present, n_pairs, settings) for pair in pairs}
    widths = [reduced[pair].n_coordinates for pair in pairs]
    edges = np.cumsum([0, *widths]).tolist()
    columns = tuple(slice(a, b) for a, b in pairwise(edges))
    factors = stream_factors(streams, settings, None if frame is None else frame.n_participant_runs)
    systems = path_systems(streams, grids, settings)
    pieces = [
        _Piece(s, r, rows[key_of(s)], reduced[pair], i, factors[key_of(s)])
        for i, pair in enumerate(pairs)
        for r, s in enumerate(by_pair[pair])
    ]
    groups = tuple(_row_groups(system, pieces, filters, columns, pairs) for system in systems)
    problem = Problem(
        filters,
        tuple(pairs),
        columns,
        np.repeat([ridges[pair] for pair in pairs], widths),
        systems,
        groups,
        _gauges(pairs, systems, settings),
    )
    return problem, Training(scales, factors, reduced, ridges, limits)


def key_of(stream: Stream) -> Key:
    """(participant, run, modality) of a stream."""
    return stream.participant, stream.run, stream.modality


def pair_ridge(n_features: int, n_pairs: int, settings: Settings) -> float:
    """lambda_W over the number of pairs, and over the pair's features under "feature" scaling."""
    return settings.loading_ridge / n_pairs / (n_features if settings.loading_scaling == "feature" else 1)


def stream_factors(streams: Sequence[Stream], settings: Settings, number: int | None = None) -> dict[Key, float]:
    """Each stream's share of its participant-run's weight, over the number of participant-runs."""
    total: dict[tuple[str, str], float] = {}
    for stream in streams:
        owner = (stream.participant, stream.run)
        total[owner] = total.get(owner, 0.0) + settings.weight(stream.modality)
    number = len(total) if number is None else number
    return {key_of(s): settings.weight(s.modality) / total[s.participant, s.run] / number for s in streams}


def rows_and_grids(
    streams: Sequence[Stream], observed: dict[Key, Mask], settings: Settings
) -> tuple[dict[Key, Mask], dict[str, Grid], dict[str, tuple[float, float]]]:
    """Usable rows of each stream, and each run's latent grid and limits (see `Training`).

    Parameters
    ----------
    observed : dict of (time,) bool
        Rows with a finite entry.

    Raises
    ------
    ValueError
        When a run's data are at one time only.
    """
    rows, grids, limits = {}, {}, {}
    for run in dict.fromkeys(s.run for s in streams):
        own = [s for s in streams if s.run == run]
        first, last = run_domain(own, observed)
        if not last > first:
            raise ValueError(f"{run} has data at {first:g} s only; a run needs a duration. Drop it.")
        limits[run] = (first, last)
        if settings.edges == "extend":
            for stream in own:
                rows[key_of(stream)] = observed[key_of(stream)]
                low, high = settings.responses[stream.modality].envelope()
                used = stream.times[observed[key_of(stream)]]
                if len(used):
                    first, last = min(first, float(used[0] - high)), max(last, float(used[-1] - low))
        else:
            rows |= _rows_inside(own, observed, settings, limits)
        grids[run] = latent_grid(first, last, settings.latent_step)
        if settings.edges == "extend":
            limits[run] = (grids[run].start, grids[run].last)
    return rows, grids, limits


def _rows_inside(
    streams: Sequence[Stream], observed: dict[Key, Mask], settings: Settings, limits: dict[str, tuple[float, float]]
) -> dict[Key, Mask]:
    """Observed rows whose response, over the bounds of its parameters, sees only what is inside the run's limits."""
    return {
        key_of(s): usable_rows(s.times, observed[key_of(s)], settings.responses[s.modality].envelope(), limits[s.run])
        for s in streams
    }


def path_systems(streams: Sequence[Stream], grids: dict[str, Grid], settings: Settings) -> tuple[PathSystem, ...]:
    """The systems of latent paths, one per run, or one per participant and run under separate pooling."""
    owners: list[tuple[str, tuple[str, ...]]] = []
    for run in dict.fromkeys(s.run for s in streams):
        participants = tuple(dict.fromkeys(s.participant for s in streams if s.run == run))
        if settings.latent_pooling == "separate":
            owners += [(run, (participant,)) for participant in participants]
        else:
            owners.append((run, participants if settings.latent_pooling == "population" else ()))
    paths = sum(max(1, len(participants)) for _, participants in owners)
    coupling = settings.population_strength if settings.latent_pooling == "population" else 0.0
    return tuple(
        PathSystem(run, participants, grids[run], 1.0 / paths, settings.latent_ridge, settings.roughness, coupling)
        for run, participants in owners
    )


def _scale(streams: Sequence[Stream]) -> PairScale:
    scale = pair_scale(streams)
    if not scale.present.any():
        runs = ", ".join(s.run for s in streams)
        raise ValueError(
            f"{streams[0].modality!r} of {streams[0].participant}: none of its {streams[0].n_features} features varies "
            f"in {runs}, so there is nothing to fit. Drop the stream."
        )
    return scale


def run_domain(streams: Sequence[Stream], observed: dict[Key, Mask]) -> tuple[float, float]:
    """First and last time of any row with a finite entry, over the streams of one run."""
    seen = [s.times[observed[key_of(s)]] for s in streams if observed[key_of(s)].any()]
    return float(min(t[0] for t in seen)), float(max(t[-1] for t in seen))


def _no_row(stream: Stream, observed: dict[Key, Mask], streams: Sequence[Stream], settings: Settings) -> str:
    low, high = settings.responses[stream.modality].envelope()
    first, last = run_domain([s for s in streams if s.run == stream.run], observed)
    if not observed[key_of(stream)].any():
        return f"{stream.label}: no row has a finite entry of a feature that varies. Drop the stream."
    return (
        f"{stream.label}: no row is usable. Over the bounds of its response's parameters a row at t sees the latent "
        f"from t - {high:g} s to t - ({low:g}) s, which never lies inside the run's data, {first:g} to {last:g} s. "
        'Use edges="extend", tighter bounds, or drop the stream.'
    )


@dataclass(frozen=True)
class _Piece:
    """One stream with what its rows need to join a group."""

    stream: Stream
    run_index: int
    rows: Mask
    reduced: ReducedPair
    pair: int
    factor: float

    @property
    def times(self) -> Array:
        return self.stream.times[self.rows]

    @property
    def mask(self) -> Mask | None:
        """Present reduced entries of this run, None when complete."""
        mask = None if self.reduced.mask is None else self.reduced.mask[self.run_index]
        return None if mask is None or mask.all() else mask


def _row_groups(
    system: PathSystem, pieces: Sequence[_Piece], filters: Filters, columns: Sequence[slice], pairs: Sequence[Pair]
) -> tuple[RowGroup, ...]:
    """Merge the streams of a system that share a response, a path, a clock and a kind."""
    merged: dict[tuple, list[_Piece]] = {}
    for piece in pieces:
        participant, run, _ = key_of(piece.stream)
        if run == system.run and (len(system.participants) != 1 or participant == system.participants[0]):
            complete = piece.mask is None
            # Rows missing altogether differ between participants: their union, weighted 0, keeps one group.
            clock = piece.times if complete else piece.stream.times
            key = (filters.of_pair[pairs[piece.pair]], system.path_of(participant), complete)
            merged.setdefault((*key, clock.tobytes()), []).append(piece)
    return tuple(
        (_complete_group if complete else _masked_group)(members, columns, owner, path)
        for (owner, path, complete, _), members in merged.items()
    )


def _blocks(members: Sequence[_Piece], columns: Sequence[slice]) -> list[Block]:
    edges = np.cumsum([0, *(piece.reduced.n_coordinates for piece in members)]).tolist()
    return [Block(p.pair, slice(a, b), columns[p.pair]) for p, (a, b) in zip(members, pairwise(edges), strict=True)]


def _complete_group(members: Sequence[_Piece], columns: Sequence[slice], owner: int, path: int) -> CompleteRows:
    times = members[0].times
    values = np.concatenate([piece.reduced.values[piece.run_index] for piece in members], axis=1)
    omega = np.concatenate([np.full(p.reduced.n_coordinates, p.factor / p.reduced.n_present) for p in members])
    return CompleteRows(times, cell_weights(times), values, omega, _blocks(members, columns), owner, path)


def _masked_group(members: Sequence[_Piece], columns: Sequence[slice], owner: int, path: int) -> MaskedRows:
    used = np.logical_or.reduce([piece.rows for piece in members])
    blocks = _blocks(members, columns)
    values, weights = np.zeros((2, int(used.sum()), blocks[-1].own.stop))
    for piece, block in zip(members, blocks, strict=True):
        rows = piece.rows[used]
        weight = piece.factor * cell_weights(piece.times) / piece.reduced.counts[piece.run_index]
        values[rows, block.own] = piece.reduced.values[piece.run_index]
        assert piece.mask is not None
        weights[rows, block.own] = np.where(piece.mask, weight[:, None], 0.0)
    return MaskedRows(members[0].stream.times[used], values, weights, blocks, owner, path)


def _gauges(
    pairs: Sequence[Pair], systems: Sequence[PathSystem], settings: Settings
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    if settings.latent_pooling != "separate":
        return ((tuple(range(len(pairs))), tuple(range(len(systems)))),)
    return tuple(
        (
            tuple(i for i, pair in enumerate(pairs) if pair[0] == participant),
            tuple(i for i, system in enumerate(systems) if system.participants == (participant,)),
        )
        for participant in dict.fromkeys(pair[0] for pair in pairs)
    )
