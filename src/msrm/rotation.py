"""Feature rotation: a stream's features turned so that no iteration depends on how many there are (DESIGN 3.2).

Loading, offset and noise terms are isotropic over the features of a participant-modality, so the
data `X (row, feature)` may be replaced by `X V` with any orthonormal `V (feature, R)` that spans the
rows of X; the remaining features are exactly zero. This module owns V. It never stores it: with
`A = [X; mean]` it keeps `C (row, R)` of `V = A' C`, and maps coordinates back by another pass over
the data. Features are grouped by mask pattern and rotated within a group only where that shrinks it;
the others stay as they are, side by side, with their mask.

C comes from a pivoted Cholesky factor of the Gram `X X' = L L'` (centred first when the mean matters:
a Gram loses orthogonality with large means), followed by one pass of Cholesky QR when `keep_mean` asks for an
orthonormal basis. Standardization and the choice of rows belong to the callers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

from msrm.stream import BLOCK_BYTES, CHUNK_BYTES, Stream, chunk_width

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Pivots of a T x T Gram below this many T eps of its largest are rounding noise.
_RANK_MARGIN = 16.0
# A mean this close (relative) to the span of the centred rows is taken to lie in it.
_MEAN_MARGIN = 1e-9


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
                inside, block = _group_block(group, span, data)
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
                    inside, block = _group_block(group, span, data)
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
        inside, block = _group_block(self.group, span, data)
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
    factors, coefficients = _bases(blocks, wide, keep_mean)
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


def _bases(blocks: PairBlocks, wide: list[_GroupWork], keep_mean: bool) -> tuple[list[Array], list[Array]]:
    """For each group the data in its basis, L of `[X; mean] = L V'`, and C of `V = [X; mean]' C`."""
    factors, coefficients = [], []
    for work in wide:
        factor, coefficient = _semidefinite_factor(work.gram)
        factors.append(np.vstack([factor, np.zeros(factor.shape[1])]))
        coefficients.append(np.vstack([coefficient, np.zeros(factor.shape[1])]))
    if not (keep_mean and wide):
        return factors, coefficients
    for i, (gram, projected) in enumerate(_overlaps(blocks, wide, coefficients)):
        # Cholesky QR a second time: V'V - 1 falls from eps cond(X)^2 to eps, and X V is taken directly.
        inverse = np.linalg.inv(np.linalg.cholesky(gram)).T
        factors[i][:-1] = projected @ inverse
        coefficients[i] = coefficients[i] @ inverse
    along = [np.zeros(coefficient.shape[1]) for coefficient in coefficients]
    for _ in range(2):  # Gram-Schmidt twice is enough
        outside = _beyond_span(blocks, wide, coefficients, along)
    for i, (work, length) in enumerate(zip(wide, outside, strict=True)):
        factors[i][-1] = along[i]
        if length > _MEAN_MARGIN * np.linalg.norm(work.group.centre):
            factors[i], coefficients[i] = _with_mean(factors[i], coefficients[i], length)
    return factors, coefficients


def _with_mean(factor: Array, coefficient: Array, length: float) -> tuple[Array, Array]:
    """Append the direction of the mean outside the basis, `(mean - V V' mean) / length`."""
    direction = np.append(-coefficient[:-1] @ factor[-1], 1.0) / length
    factor = np.pad(factor, ((0, 0), (0, 1)))
    factor[-1, -1] = length
    return factor, np.column_stack([coefficient, direction])


def _overlaps(blocks: PairBlocks, wide: list[_GroupWork], coefficients: list[Array]) -> list[tuple[Array, Array]]:
    """V'V and X V of every group, from one pass over the data."""
    sums = [(np.zeros((c.shape[1], c.shape[1])), np.zeros((len(c) - 1, c.shape[1]))) for c in coefficients]
    for span, data in blocks:
        for (gram, projected), work, coefficient in zip(sums, wide, coefficients, strict=True):
            _, block = _group_block(work.group, span, data)
            basis = block.T @ coefficient[:-1]
            gram += basis.T @ basis
            projected += block @ basis
    return sums


def _beyond_span(
    blocks: PairBlocks, wide: list[_GroupWork], coefficients: list[Array], along: list[Array]
) -> list[float]:
    """Length of `mean - V along` of every group; `along` is corrected in place by its coordinates in V."""
    squares, corrections = np.zeros(len(wide)), [np.zeros_like(a) for a in along]
    for span, data in blocks:
        for i, (work, coefficient) in enumerate(zip(wide, coefficients, strict=True)):
            inside, block = _group_block(work.group, span, data)
            rest = work.group.centre[inside] - block.T @ (coefficient[:-1] @ along[i])
            squares[i] += rest @ rest
            corrections[i] += coefficient[:-1].T @ (block @ rest)
    lengths = []
    for i, correction in enumerate(corrections):
        along[i] += correction
        lengths.append(float(np.sqrt(max(squares[i] - correction @ correction, 0.0))))
    return lengths


def _group_block(group: MaskGroup, span: slice, data: Array) -> tuple[slice, Array]:
    """Which features of the group lie in this block, and their centred data (group row, feature)."""
    low, high = np.searchsorted(group.features, (span.start, span.stop))
    local = group.features[low:high] - span.start
    block = data if len(local) == data.shape[1] else data[:, local]
    block = block if group.rows.all() else block[group.rows]
    centre = group.centre[low:high]
    return slice(low, high), block - centre if centre.any() else block


def _semidefinite_factor(gram: Array) -> tuple[Array, Array]:
    """L (row, rank) and C (row, rank) of `X X' = L L'` and `V = X' C`, by Cholesky with complete pivoting."""
    size = len(gram)
    tolerance = _RANK_MARGIN * size * np.finfo(float).eps * float(np.diagonal(gram).max(initial=0.0))
    packed, pivots, rank, _ = lapack.dpstrf(gram, tol=tolerance, lower=1)
    order = pivots - 1
    factor, coefficient = np.zeros((size, rank)), np.zeros((size, rank))
    factor[order] = np.tril(packed)[:, :rank]
    if rank:
        inverse, _ = lapack.dtrtri(packed[:rank, :rank], lower=1)
        coefficient[order[:rank]] = np.tril(inverse).T
    return factor, coefficient


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
