"""The data of a GP fit: kept rows of each participant-modality, raw or in rotated features, and the nodes they share.

Owns which observation enters at which node (DESIGN 3.1): rows, mask patterns, classes of nodes that share D. Nothing
here depends on parameters. Rotation is :mod:`msrm.rotation`, the sums over the data :mod:`msrm.gp.likelihood`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from msrm.gp.terms import Residual
from msrm.nodes import NodeGroup, UsableRows
from msrm.recording import Recording, Stream
from msrm.responses import Response
from msrm.rotation import PairBlocks, ReducedPair, reduce_pair

Key = tuple[str, str]
RESIDENT_BYTES = 2**30  # data up to here stay in memory, larger data are read again in every pass


@dataclass(frozen=True, eq=False)
class PairData:
    """One participant-modality: values (row, coordinate) over the kept rows of all runs.

    Attributes
    ----------
    participant, modality : str
    rows : {run: slice}
    times : (row,)
        Seconds.
    patterns : (pattern, row) bool
        Distinct sets of rows in which a coordinate is observed.
    pattern : (coordinate,) int
        Which of them each coordinate has.
    null_counts : (pattern,) int
        Rotated features that are zero in data, loading and offset, by the rows they count in.
    reduced : ReducedPair or None
        The rotation; None in raw features.
    blocks : PairBlocks
        The raw data.
    """

    participant: str
    modality: str
    rows: dict[str, slice]
    times: np.ndarray
    patterns: np.ndarray
    pattern: np.ndarray
    null_counts: np.ndarray
    reduced: ReducedPair | None
    blocks: PairBlocks

    @property
    def key(self) -> Key:
        """(participant, modality)."""
        return self.participant, self.modality

    @property
    def n_coordinates(self) -> int:
        """Features, or rotated features that carry data."""
        return len(self.pattern)

    @property
    def n_features(self) -> int:
        """Raw features."""
        return len(self.blocks.mean)

    @property
    def complete(self) -> bool:
        """Whether every coordinate is observed in every row."""
        return bool(self.patterns.all())

    def __iter__(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Blocks of coordinates: slice and values (row, coordinate), zero where missing."""
        if self._resident is None:
            for span, data in self.blocks:
                yield span, np.nan_to_num(data, nan=0.0)
        else:
            yield from self._resident

    @cached_property
    def _resident(self) -> list[tuple[slice, np.ndarray]] | None:
        if self.reduced is not None:
            return [(slice(0, self.n_coordinates), np.concatenate(self.reduced.values))]
        if 8 * len(self.times) * self.n_features > RESIDENT_BYTES:
            return None
        whole = np.concatenate([np.nan_to_num(data, nan=0.0) for _, data in self.blocks], axis=1)
        return [(slice(0, self.n_features), whole)]


def pair_data(
    recording: Recording,
    usable: UsableRows,
    participant: str,
    modality: str,
    *,
    mean: np.ndarray | None = None,
    scale: np.ndarray | None = None,
    reduce: bool,
) -> PairData | None:
    """The kept rows of one participant-modality, or None when there are none.

    Parameters
    ----------
    recording : Recording
    usable : UsableRows
    participant, modality : str
    mean, scale : (feature,), optional
        Standardization; zeros and ones by default.
    reduce : bool
        In rotated features (DESIGN 3.2) rather than raw ones.
    """
    streams = [s for s in recording.streams(participant, modality=modality) if usable.rows[_name(s)].any()]
    if not streams:
        return None
    kept = [usable.rows[_name(stream)] for stream in streams]
    features = streams[0].n_features
    mean = np.zeros(features) if mean is None else mean
    scale = np.ones(features) if scale is None else scale
    stops = np.cumsum([int(keep.sum()) for keep in kept])
    rows = {
        stream.run: slice(int(stop) - int(keep.sum()), int(stop))
        for stream, keep, stop in zip(streams, kept, stops, strict=True)
    }
    times = np.concatenate([stream.times[keep] for stream, keep in zip(streams, kept, strict=True)])
    blocks = PairBlocks(tuple(streams), tuple(kept), mean, scale)
    if not reduce:
        mask = np.concatenate([np.isfinite(data) for _, data in blocks], axis=1)
        patterns, pattern = _patterns(mask)
        none = np.zeros(len(patterns), dtype=int)
        return PairData(participant, modality, rows, times, patterns, pattern, none, None, blocks)
    reduced = reduce_pair(streams, kept, mean, scale, keep_mean=True)
    mask = np.ones((len(times), reduced.n_coordinates), bool)
    if reduced.mask is not None:
        mask = np.concatenate(reduced.mask)
    patterns, pattern = _patterns(mask)
    empty = [group for group in reduced.groups if group.n_null and group.columns.start == group.columns.stop]
    null_counts = np.zeros(len(patterns) + len(empty), dtype=int)
    for group in reduced.groups:
        if group.n_null and group.columns.start < group.columns.stop:
            null_counts[pattern[group.columns.start]] += group.n_null
    for place, group in enumerate(empty, start=len(patterns)):
        null_counts[place] = group.n_null
    patterns = np.concatenate([patterns, *(group.rows[None] for group in empty)])
    return PairData(participant, modality, rows, times, patterns, pattern, null_counts, reduced, blocks)


def _name(stream: Stream) -> tuple[str, str, str]:
    return stream.participant, stream.run, stream.modality


def _patterns(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct columns of a mask (row, coordinate) as (pattern, row), and which of them each column is."""
    if mask.all():
        return np.ones((1, len(mask)), bool), np.zeros(mask.shape[1], dtype=np.intp)
    packed = np.packbits(mask.T, axis=1)
    _, first, index = np.unique(packed, axis=0, return_index=True, return_inverse=True)
    return mask.T[first], index.ravel()


@dataclass(frozen=True, eq=False)
class PairRows:
    """The observed rows of a pair, each with the row it is differenced with, and their nodes.

    Attributes
    ----------
    current, previous : (entry,) int
        Rows of the pair; equal where nothing is differenced.
    present : (pattern, entry) bool
    runs : {run: (entries as int array, node of each)}
    plain : bool
        Whether the entries are the pair's rows in order, not differenced.
    """

    current: np.ndarray
    previous: np.ndarray
    present: np.ndarray
    runs: dict[str, tuple[np.ndarray, np.ndarray]]
    plain: bool

    @cached_property
    def complete(self) -> bool:
        """Whether every pattern has every entry."""
        return bool(self.present.all())


@dataclass(frozen=True, eq=False)
class NodeClasses:
    """Nodes of one run and modality that have the same observations in every pair share D.

    Attributes
    ----------
    presence : (class, pattern)
        1 where the nodes of a class have a pattern's observations; patterns of all pairs of the modality in turn.
    index : (node,) int
    columns : {participant: slice}
        A pair's patterns.
    """

    presence: np.ndarray
    index: np.ndarray
    columns: dict[str, slice]


@dataclass(frozen=True, eq=False)
class NodeLayout:
    """Nodes of every run and modality, and where each pair's entries meet them.

    Attributes
    ----------
    pairs : tuple of PairData
    groups : {run: {modality: NodeGroup}}
    rows : {(participant, modality): PairRows}
    classes : {(run, modality): NodeClasses}
    gaps : {(run, modality): (node,)}
        Seconds between the times of differenced nodes.
    """

    pairs: tuple[PairData, ...]
    groups: dict[str, dict[str, NodeGroup]]
    rows: dict[Key, PairRows]
    classes: dict[tuple[str, str], NodeClasses]
    gaps: dict[tuple[str, str], np.ndarray]

    @classmethod
    def of(
        cls, pairs: Sequence[PairData], responses: Mapping[str, Response], residuals: Mapping[str, Residual]
    ) -> "NodeLayout":
        """The layout of the pairs' observations."""
        entries = {pair.key: _entries(pair, residuals[pair.modality]) for pair in pairs}
        groups: dict[str, dict[str, NodeGroup]] = {}
        rows = {
            key: PairRows(*made, {}, _is_plain(pair, made))
            for pair, (key, made) in zip(pairs, entries.items(), strict=True)
        }
        classes, gaps = {}, {}
        for run in dict.fromkeys(run for pair in pairs for run in pair.rows):
            for modality in dict.fromkeys(pair.modality for pair in pairs):
                members = [pair for pair in pairs if pair.modality == modality and run in pair.rows]
                if members:
                    group = _place(run, members, rows, responses[modality], residuals[modality])
                    groups.setdefault(run, {})[modality] = group
                    classes[run, modality] = _classes(run, members, rows, group.n_nodes)
                    gaps[run, modality] = _gaps(group)
        return cls(tuple(pairs), groups, rows, classes, gaps)


def _entries(pair: PairData, residual: Residual) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct (current, previous) rows over all patterns, and which patterns have them (pattern, entry)."""
    count = len(pair.times)
    codes = np.full(pair.patterns.shape, -1)
    for span in pair.rows.values():
        for pattern, present in enumerate(pair.patterns[:, span]):
            previous = residual.previous(present, pair.times[span]) + span.start
            codes[pattern, span] = np.where(present, np.arange(span.start, span.stop) * count + previous, -1)
    distinct = np.unique(codes)
    distinct = distinct[distinct >= 0]
    present = np.zeros((len(codes), len(distinct)), bool)
    which, row = np.nonzero(codes >= 0)
    present[which, np.searchsorted(distinct, codes[which, row])] = True
    return distinct // count, distinct % count, present


def _is_plain(pair: PairData, made: tuple[np.ndarray, np.ndarray, np.ndarray]) -> bool:
    return len(made[0]) == len(pair.times) and bool(np.all(made[0] == made[1]))


def _place(
    run: str,
    members: Sequence[PairData],
    rows: dict[Key, PairRows],
    response: Response,
    residual: Residual,
) -> NodeGroup:
    """The node group of one run and modality; records each member's nodes in its rows."""
    moments = []
    for pair in members:
        own, span = rows[pair.key], pair.rows[run]
        entry = np.flatnonzero((own.current >= span.start) & (own.current < span.stop))
        moments.append((entry, pair.times[own.current[entry]], pair.times[own.previous[entry]]))
    times = np.unique(np.concatenate([part for _, current, previous in moments for part in (current, previous)]))
    pairs, codes = None, [np.searchsorted(times, current) for _, current, _ in moments]
    if residual.differenced:
        wide = [
            code * len(times) + np.searchsorted(times, previous)
            for code, (_, _, previous) in zip(codes, moments, strict=True)
        ]
        distinct = np.unique(np.concatenate(wide))
        pairs = np.stack([distinct // len(times), distinct % len(times)], axis=1)
        codes = [np.searchsorted(distinct, code) for code in wide]
    for pair, code, (entry, _, _) in zip(members, codes, moments, strict=True):
        rows[pair.key].runs[run] = (entry, code)
    return NodeGroup(members[0].modality, times, response, pairs)


def _classes(run: str, members: Sequence[PairData], rows: dict[Key, PairRows], n_nodes: int) -> NodeClasses:
    total, columns = 0, {}
    for pair in members:
        columns[pair.participant] = slice(total, total := total + len(pair.patterns))
    presence = np.zeros((n_nodes, total), bool)
    for pair in members:
        entry, node = rows[pair.key].runs[run]
        presence[node, columns[pair.participant]] = rows[pair.key].present[:, entry].T
    _, first, index = np.unique(np.packbits(presence, axis=1), axis=0, return_index=True, return_inverse=True)
    return NodeClasses(presence[first].astype(float), index.ravel(), columns)


def _gaps(group: NodeGroup) -> np.ndarray:
    if group.pairs is None:
        return np.zeros(group.n_nodes)
    return group.times[group.pairs[:, 0]] - group.times[group.pairs[:, 1]]
