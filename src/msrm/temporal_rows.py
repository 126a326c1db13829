"""Sparse rows whose nonzeros fill one short window of columns each: their products, Grams and windows of bands.

A functional of a latent path on a grid sees the few columns within its response's support. This module owns such rows
and nothing about what they mean; the band matrices that they make are :mod:`msrm.banded`.
"""

from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided
from scipy.sparse import csr_array

__all__ = ["TemporalRows", "block_bands", "difference_rows", "pair_windows"]

_SMALLEST_PACK = 16  # order of packed blocks: below it the interpreter, not the arithmetic, sets the time
_NARROW = 8  # up to this width rows are gathered entry by entry, without packing


class TemporalRows:
    """Sparse rows whose nonzeros fill one short window of columns each.

    Row ``n`` touches columns ``first[n]`` to ``first[n] + width - 1``. Windows that reach outside ``[0, length)`` are
    moved inside; their weights there must be zero.

    Parameters
    ----------
    first : (row,) int
        First column of each window.
    weights : (row, width)
        Weights of the window's columns, zero-padded.
    length : int
        Number of columns.

    Raises
    ------
    ValueError
        If a nonzero weight lies outside the columns.
    """

    def __init__(self, first: np.ndarray, weights: np.ndarray, length: int) -> None:
        first, weights = np.asarray(first, dtype=np.intp), np.asarray(weights, dtype=float)
        width = min(weights.shape[1], length)
        moved = np.clip(first, 0, length - width)
        if weights.shape[1] != width or np.any(moved != first):
            weights = _moved_windows(first, weights, moved, width, length)
        self.first, self.weights, self.length = moved, weights, int(length)

    @property
    def width(self) -> int:
        """Columns of a window."""
        return self.weights.shape[1]

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def matrix(self) -> csr_array:
        """The rows as a sparse matrix, (row, column)."""
        indices = self.first[:, None] + np.arange(self.width)
        pointer = np.arange(len(self) + 1) * self.width
        return csr_array((self.weights.ravel(), indices.ravel(), pointer), shape=(len(self), self.length))

    @cached_property
    def _packed(self) -> "_Packed | _Narrow":
        kind = _Narrow if self.width <= _NARROW else _Packed
        return kind(self.first, self.weights, self.length)

    def apply(self, columns: np.ndarray) -> np.ndarray:
        """Row values (row, ...) of column values (column, ...)."""
        return (self.matrix @ columns.reshape(self.length, -1)).reshape(len(self), *columns.shape[1:])

    def adjoint(self, rows: np.ndarray) -> np.ndarray:
        """Column values (column, ...): the transpose applied to row values (row, ...)."""
        return (self.matrix.T @ rows.reshape(len(self), -1)).reshape(self.length, *rows.shape[1:])

    def gram(self, weights: np.ndarray | None = None) -> np.ndarray:
        """Lower band of ``sum_n d_n w_n w_n'``.

        Parameters
        ----------
        weights : (row,) or (row, set), optional
            Row weights d; ones if absent. Several sets give several bands at once.

        Returns
        -------
        (width, column) or (width, column, set)
        """
        if weights is None or weights.ndim == 1:
            return self._packed.gram(weights)
        bands = [self._packed.gram(one).T for one in weights.T]
        return np.array(bands).reshape(len(bands), self.length, self.width).T

    def windows(self, band: np.ndarray) -> np.ndarray:
        """Each row's symmetric window of a band matrix times the row, (row, width) or (row, width, set).

        The adjoint of :meth:`gram`: ``(windows(T) * weights).sum(1)`` is ``w_n' T w_n``, and its product with the
        derivative of the weights is half the derivative of that form.
        """
        if band.ndim == 2:
            return self._packed.windows(band)
        return np.stack([self._packed.windows(one.T) for one in band.T], axis=-1)


class _Narrow:
    """Rows of a few columns, such as Identity's: Grams and windows by gathering the entries of the band."""

    def __init__(self, first: np.ndarray, weights: np.ndarray, length: int) -> None:
        self.first, self.weights, self.length = first, weights, length
        self.transposed = np.ascontiguousarray(weights.T)

    def gram(self, weights: np.ndarray | None) -> np.ndarray:
        width = len(self.transposed)
        scaled = self.transposed if weights is None else self.transposed * weights
        out = np.zeros((self.length, width))
        for column in range(width):
            at = self.first + column
            for offset in range(width - column):
                product = self.transposed[column] * scaled[column + offset]
                out[:, offset] += np.bincount(at, product, self.length)
        return out.T

    def windows(self, band: np.ndarray) -> np.ndarray:
        width, reach = len(self.transposed), min(len(self.transposed), band.shape[0])
        columns = np.ascontiguousarray(band[:reach])
        out = np.zeros_like(self.transposed)
        for column in range(width):
            at = self.first + column
            for offset in range(min(reach, width - column)):
                entry = columns[offset, at]
                out[column + offset] += entry * self.transposed[column]
                if offset:
                    out[column] += entry * self.transposed[column + offset]
        return out.T


class _Packed:
    """Rows packed into dense chunks, so that Grams and windows are batched products of small matrices.

    Columns are cut into blocks of order ``b`` at least the width; a chunk holds up to ``slots`` rows that start in one
    block, as a dense (slots, 2 b) matrix.
    """

    def __init__(self, first: np.ndarray, weights: np.ndarray, length: int) -> None:
        self.width, self.length = weights.shape[1], length
        self.first = first
        self.b = max(self.width, _SMALLEST_PACK)
        self.blocks = -(-length // self.b)
        block = first // self.b
        counts = np.bincount(block, minlength=self.blocks)
        typical = int(np.ceil(len(first) / max(int(np.count_nonzero(counts)), 1)))
        largest = int(counts.max(initial=0))
        slots = max(1, largest if largest <= 2 * typical else typical)
        chunks = np.maximum(-(-counts // slots), 1)
        self.starts = np.cumsum(chunks) - chunks
        self.owner = np.repeat(np.arange(self.blocks), chunks)
        order = np.argsort(block, kind="stable")
        rank = np.empty(len(first), dtype=np.intp)
        rank[order] = np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.position = (self.starts[block] + rank // slots) * slots + rank % slots
        self.columns = (first - block * self.b)[:, None] + np.arange(self.width)
        self.dense = np.zeros((len(self.owner), slots, 2 * self.b))
        self.dense.reshape(-1, 2 * self.b)[self.position[:, None], self.columns] = weights

    def gram(self, weights: np.ndarray | None) -> np.ndarray:
        scaled = self.dense
        if weights is not None:
            spread = np.zeros(self.dense.shape[0] * self.dense.shape[1])
            spread[self.position] = weights
            scaled = self.dense * spread.reshape(*self.dense.shape[:2], 1)
        product = np.zeros((len(self.owner), 2 * self.b, 3 * self.b))
        np.matmul(self.dense.swapaxes(1, 2), scaled, out=product[:, :, : 2 * self.b])
        if len(self.owner) > self.blocks:
            product = np.add.reduceat(product, self.starts, axis=0)
        upper = block_bands(product, self.width)
        out = np.zeros((self.blocks + 1, self.b, self.width))
        out[:-1] += upper[:, : self.b]
        out[1:] += upper[:, self.b :]
        return out.reshape(-1, self.width)[: self.length].T

    def windows(self, band: np.ndarray) -> np.ndarray:
        reach = min(self.width, band.shape[0])
        padded = np.zeros(((self.blocks + 1) * self.b, reach))
        padded[: self.length] = band[:reach].T
        columns = padded.reshape(self.blocks + 1, self.b, reach)
        upper = np.zeros((self.blocks, 2 * self.b, 3 * self.b))
        view = block_bands(upper, reach)
        view[:, : self.b], view[:, self.b :] = columns[:-1], columns[1:]
        upper = upper[:, :, : 2 * self.b]
        diagonal = np.einsum("bll->bl", upper).copy()
        if len(self.owner) > self.blocks:
            upper, diagonal = upper[self.owner], diagonal[self.owner]
        out = self.dense @ upper + self.dense @ upper.swapaxes(1, 2) - self.dense * diagonal[:, None]
        return out.reshape(-1, 2 * self.b)[self.position[:, None], self.columns]


def _moved_windows(first: np.ndarray, weights: np.ndarray, moved: np.ndarray, width: int, length: int) -> np.ndarray:
    columns = first[:, None] + np.arange(weights.shape[1])
    inside = (columns >= 0) & (columns < length)
    if np.any(weights[~inside]):
        bad = int(np.flatnonzero(np.any((weights != 0) & ~inside, axis=1))[0])
        raise ValueError(f"row {bad} has a nonzero weight outside its {length} columns (window starts at {first[bad]})")
    out = np.zeros((len(first), width))
    row, old = np.nonzero(inside)
    target = columns[row, old] - moved[row]
    kept = (target >= 0) & (target < width)
    out[row[kept], target[kept]] = weights[row[kept], old[kept]]
    if np.any(weights[row[~kept], old[~kept]]):
        raise ValueError(f"windows of {weights.shape[1]} columns do not fit {length} columns")
    return out


def block_bands(work: np.ndarray, depth: int) -> np.ndarray:
    """View (block, l, offset) of dense blocks (block, row, column): the entries ``[l, l + offset]``."""
    blocks, rows, columns = work.shape
    step = work.itemsize
    return as_strided(work, (blocks, rows, depth), (rows * columns * step, (columns + 1) * step, step))


def difference_rows(rows: TemporalRows, pairs: np.ndarray, coefficients: np.ndarray) -> TemporalRows:
    """Rows ``sum_k coefficients[j, k] rows[pairs[j, k]]`` (node, ...), each in the window that holds both."""
    first, offsets, width = pair_windows(rows, pairs)
    weights = np.zeros((len(pairs), width))
    index = np.arange(len(pairs))[:, None]
    for k in range(2):
        span = offsets[:, k, None] + np.arange(rows.width)
        weights[index, span] += coefficients[:, k, None] * rows.weights[pairs[:, k]]
    return TemporalRows(first, weights, rows.length)


def pair_windows(rows: TemporalRows, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """First columns (pair,), offsets (pair, 2) of the members in them and the width of windows that hold pairs."""
    members = rows.first[pairs]
    first = members.min(axis=1)
    width = int((members.max(axis=1) - first).max(initial=0)) + rows.width
    first = np.minimum(first, rows.length - width)
    return first, members - first[:, None], width
