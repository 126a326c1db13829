"""Feature rotation: a stream's features turned so that no iteration depends on how many there are (DESIGN 3.2).

Loading, offset and noise terms are isotropic over the features of a participant-modality, so the
data `X (row, feature)` may be replaced by `X V` with any orthonormal `V (feature, R)` that spans the
rows of X; the remaining features are exactly zero. This module owns V. It never stores it: with
`A = [X; mean]` it keeps `C (row, R)` of `V = A' C`, and maps coordinates back by another pass over
the data. Features are grouped by mask pattern and rotated within a group only where that shrinks it;
the others stay as they are, side by side, with their mask.

How C is found is in :mod:`msrm.rotation_bases`; standardization and the choice of rows belong to the callers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.rotation_bases import bases
from msrm.runtime import available_cores, blas_threads
from msrm.stream import BLOCK_BYTES, CHUNK_BYTES, Stream, chunk_width

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Multiplications of one Gram above which several BLAS threads pay for their spinning beside other work.
_THREADED_WORK = 1e10


def feature_blocks(streams: Sequence[Stream]) -> Iterator[tuple[slice, list[Array]]]:
    """A slice of features and its values (time, feature) in each of the runs, read one block at a time."""
    size = chunk_width(sum(stream.n_times for stream in streams)) * (BLOCK_BYTES // CHUNK_BYTES)
    for pieces in zip(*(stream.blocks(size) for stream in streams), strict=True):
        yield pieces[0][0], [block for _, block in pieces]


@dataclass(frozen=True)
class PairBlocks:
    """The data of one participant-modality, `(Y - mean) / scale` over the kept rows of all runs, in feature blocks.

    Attributes
    ----------
    streams : tuple of Stream
        One per run.
    rows : tuple of (time,) bool
        Kept rows of each run.
    mean, scale : (feature,)
        Subtracted from, then divided out of, each feature; data units.
    """

    streams: tuple[Stream, ...]
    rows: tuple[Mask, ...]
    mean: Array
    scale: Array

    def __iter__(self) -> Iterator[tuple[slice, Array]]:
        """Pairs of a feature slice and the data (row, feature in the slice), read one block at a time."""
        for span, pieces in feature_blocks(self.streams):
            kept = [block if keep.all() else block[keep] for block, keep in zip(pieces, self.rows, strict=True)]
            data = (np.concatenate(kept) if len(kept) > 1 else kept[0]) - self.mean[span]
            data /= self.scale[span]
            yield span, data


@dataclass(frozen=True)
class MaskGroup:
    """Features that share one pattern of missing rows and are rotated together, or (one group) the unrotated rest.

    Attributes
    ----------
    features : (feature of the group,) int
        Their positions among the pair's features, increasing.
    columns : slice
        Their coordinates among the pair's R.
    rows : (row,) bool
        Rows, over all runs, where the group is observed; of the rest, where any of it is.
    coefficients : (group row + 1, coordinate) or None
        C of `V = [X - centre; centre]' C`; None where features are their own coordinates.
    centre : (feature of the group,)
        Column means over the rows (zeros unless the mean is kept), in the units of the reduced data.
    """

    features: NDArray[np.intp]
    columns: slice
    rows: Mask
    coefficients: Array | None
    centre: Array

    def block(self, span: slice, data: Array) -> tuple[slice, Array]:
        """Which of the group's features lie in a block, and their centred data (group row, feature)."""
        low, high = np.searchsorted(self.features, (span.start, span.stop))
        local = self.features[low:high] - span.start
        own = data if len(local) == data.shape[1] else data[:, local]
        own = own if self.rows.all() else own[self.rows]
        centre = self.centre[low:high]
        return slice(low, high), own - centre if centre.any() else own

    @property
    def n_null(self) -> int:
        """Rotated features that are exactly zero: features of the group less its coordinates."""
        return len(self.features) - (self.columns.stop - self.columns.start)

    @property
    def n_rows(self) -> int:
        """Rows, over all runs, in which a null feature of the group would be counted."""
        return int(self.rows.sum())


@dataclass(frozen=True)
class ReducedPair:
    """One participant-modality in R rotated coordinates: the same model, free of the number of features.

    Attributes
    ----------
    values : tuple of (row, R)
        `(Y - mean) / scale` of the kept rows of each run, times V; 0 where missing. The kept mean is included.
    mask : tuple of (row, R) bool, or None
        Present entries; None when every entry of every kept row is present.
    counts : tuple of (row,) int
        Raw finite entries of each kept row, over the features that take part.
    mean_row : (R,)
        The column means in reduced coordinates where `keep_mean`, else zeros.
    n_features : int
        Raw features F, absent ones included.
    groups : tuple of MaskGroup
    blocks : PairBlocks
        The data, read again by `to_features` and `to_reduced`.
    """

    values: tuple[Array, ...]
    mask: tuple[Mask, ...] | None
    counts: tuple[NDArray[np.int64], ...]
    mean_row: Array
    n_features: int
    groups: tuple[MaskGroup, ...]
    blocks: PairBlocks

    @property
    def n_coordinates(self) -> int:
        """R, the number of reduced coordinates."""
        return len(self.mean_row)

    @property
    def n_present(self) -> int:
        """Features that take part: neither fully missing nor excluded."""
        return sum(len(group.features) for group in self.groups)

    @property
    def n_null(self) -> int:
        """Rotated features that are exactly zero in every row."""
        return sum(group.n_null for group in self.groups)

    @property
    def null_scalars(self) -> int:
        """Observations of null features: sum over groups of null features x rows."""
        return sum(group.n_null * group.n_rows for group in self.groups)

    def to_features(self, coordinates: Array) -> Array:
        """Raw features `V x` of reduced coordinates; NaN for features that take no part.

        Parameters
        ----------
        coordinates : (R, ...)
            For example a loading (R, factor).

        Returns
        -------
        (feature, ...) in the units of the reduced data.
        """
        flat = coordinates.reshape(len(coordinates), -1)
        out = np.full((self.n_features, flat.shape[1]), np.nan)
        for group in self.groups:
            if group.coefficients is None:
                out[group.features] = flat[group.columns]
        for group, combined in self._combined(flat):
            out[group.features] = np.multiply.outer(group.centre, combined[-1])
        for span, data in self._rotated_blocks():
            for group, combined in self._combined(flat):
                inside, block = group.block(span, data)
                out[group.features[inside]] += block.T @ combined[:-1]
        return out.reshape(self.n_features, *coordinates.shape[1:])

    def to_reduced(self, features: Array) -> Array:
        """Reduced coordinates `V' x` of raw features; what lies outside the span, and absent features, are dropped.

        Parameters
        ----------
        features : (feature, ...)
            In the units of the reduced data.

        Returns
        -------
        (R, ...)
        """
        flat = features.reshape(self.n_features, -1)
        out = np.zeros((self.n_coordinates, flat.shape[1]))
        for group in self.groups:
            own = flat[group.features]
            out[group.columns] = (
                own if group.coefficients is None else np.outer(group.coefficients[-1], group.centre @ own)
            )
        for span, data in self._rotated_blocks():
            for group in self.groups:
                if group.coefficients is not None:
                    inside, block = group.block(span, data)
                    out[group.columns] += group.coefficients[:-1].T @ (block @ flat[group.features[inside]])
        return out.reshape(self.n_coordinates, *features.shape[1:])

    def _combined(self, flat: Array) -> Iterator[tuple[MaskGroup, Array]]:
        for group in self.groups:
            if group.coefficients is not None:
                yield group, group.coefficients @ flat[group.columns]

    def _rotated_blocks(self) -> Iterator[tuple[slice, Array]]:
        return iter(self.blocks) if any(group.coefficients is not None for group in self.groups) else iter(())


def reduce_pair(
    streams: Sequence[Stream],
    rows: Sequence[Mask],
    mean: Array,
    scale: Array,
    *,
    keep_mean: bool,
    present: Mask | None = None,
) -> ReducedPair:
    """Rotate one participant-modality so that at most one coordinate per kept row is left.

    Parameters
    ----------
    streams : sequence of Stream
        One participant and modality, one stream per run.
    rows : sequence of (time,) bool
        Kept rows of each run.
    mean, scale : (feature,)
        The data are `(Y - mean) / scale`: training mean and sd (R-MSRM), or zeros and ones (GP-MSRM in its own units).
    keep_mean : bool
        Keep the column means inside the span, so that a feature outside it is zero in data *and* offset (GP-MSRM),
        and make V orthonormal to rounding, at one more pass over the data.
    present : (feature,) bool, optional
        Features that take part; fully missing ones never do.

    Returns
    -------
    ReducedPair
    """
    blocks = PairBlocks(tuple(streams), tuple(rows), np.asarray(mean, float), np.asarray(scale, float))
    taking_part = np.ones(len(blocks.mean), bool) if present is None else np.asarray(present, bool)
    total = sum(int(keep.sum()) for keep in rows)
    patterns = [(np.flatnonzero(taking_part), np.ones(total, bool))]
    with blas_threads(1 if len(taking_part) * total**2 < _THREADED_WORK else available_cores()):
        reduced = _reduce(blocks, patterns, np.empty(0, np.intp), keep_mean)
        if reduced is None:
            reduced = _reduce(blocks, *_mask_patterns(blocks, taking_part), keep_mean)
            assert reduced is not None
    return reduced


class _GroupWork:
    """What one rotated mask group gathers while the data go by: Gram and column means."""

    def __init__(self, features: NDArray[np.intp], rows: Mask) -> None:
        count = int(rows.sum())
        self.group = MaskGroup(features, slice(0, 0), rows, None, np.zeros(len(features)))
        self.gram = np.zeros((count, count))

    def add(self, span: slice, data: Array, *, centre: bool) -> bool:
        inside, block = self.group.block(span, data)
        if centre:
            self.group.centre[inside] = block.mean(0)
            block = block - self.group.centre[inside]
        self.gram += block @ block.T
        return bool(np.isfinite(np.diagonal(self.gram)).all())


def _reduce(
    blocks: PairBlocks,
    patterns: list[tuple[NDArray[np.intp], Mask]],
    loose: NDArray[np.intp],
    keep_mean: bool,
) -> ReducedPair | None:
    """Rotate the mask patterns with more features than rows; None as soon as one meets a missing entry."""
    total = sum(int(keep.sum()) for keep in blocks.rows)
    wide = [_GroupWork(features, rows) for features, rows in patterns if len(features) > rows.sum() + keep_mean]
    narrow = [features for features, rows in patterns if len(features) <= rows.sum() + keep_mean]
    rest = np.sort(np.concatenate([loose, *narrow]).astype(np.intp))
    columns = np.empty((total, len(rest)))
    for span, data in blocks:
        if not all(work.add(span, data, centre=keep_mean) for work in wide):
            return None
        low, high = np.searchsorted(rest, (span.start, span.stop))
        columns[:, low:high] = data[:, rest[low:high] - span.start]
    mask = np.isfinite(columns)
    if len(loose) == 0 and not mask.all():
        return None
    return _assemble(blocks, wide, rest, columns, mask, keep_mean)


def _assemble(
    blocks: PairBlocks, wide: list[_GroupWork], rest: NDArray[np.intp], columns: Array, mask: Mask, keep_mean: bool
) -> ReducedPair:
    factors, coefficients = bases(blocks, [work.group for work in wide], [work.gram for work in wide], keep_mean)
    width = len(rest) + sum(factor.shape[1] for factor in factors)
    values, present = np.zeros((len(columns), width)), np.zeros((len(columns), width), bool)
    counts, mean_row = mask.sum(1), np.zeros(width)
    groups, start = [], 0
    for work, factor, coefficient in zip(wide, factors, coefficients, strict=True):
        span = slice(start, start := start + factor.shape[1])
        rows = work.group.rows
        values[rows, span] = factor[:-1] + factor[-1]
        present[rows, span] = True
        mean_row[span] = factor[-1]
        counts = counts + rows * len(work.group.features)
        groups.append(MaskGroup(work.group.features, span, rows, coefficient, work.group.centre))
    if len(rest):
        span = slice(start, width)
        values[:, span], present[:, span] = np.where(mask, columns, 0.0), mask
        if keep_mean:
            mean_row[span] = values[:, span].sum(0) / np.maximum(mask.sum(0), 1)
        groups.append(MaskGroup(rest, span, mask.any(1), None, mean_row[span]))
    cuts = np.cumsum([int(keep.sum()) for keep in blocks.rows])[:-1]
    return ReducedPair(
        tuple(np.split(values, cuts)),
        None if present.all() else tuple(np.split(present, cuts)),
        tuple(np.split(counts.astype(np.int64), cuts)),
        mean_row,
        len(blocks.mean),
        tuple(groups),
        blocks,
    )


def _mask_patterns(
    blocks: PairBlocks, taking_part: Mask
) -> tuple[list[tuple[NDArray[np.intp], Mask]], NDArray[np.intp]]:
    """Features by pattern of missing rows: those worth rotating, one entry a pattern, and all the others."""
    total = sum(int(keep.sum()) for keep in blocks.rows)
    packed = np.zeros((len(taking_part), max(1, -(-total // 8))), np.uint8)
    for span, data in blocks:
        packed[span] = np.packbits(np.isfinite(data), axis=0).T
    features = np.flatnonzero(taking_part & packed.any(1))
    keys = packed[features].view(f"V{packed.shape[1]}").ravel()
    _, first, label, size = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    rows = [np.unpackbits(packed[features[i]])[:total].astype(bool) for i in first]
    worth = np.array([n > mask.sum() + 1 for n, mask in zip(size, rows, strict=True)], bool)
    patterns = [(features[label == i], rows[i]) for i in np.flatnonzero(worth)]
    return patterns, features[~worth[label]] if len(features) else features
