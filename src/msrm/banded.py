"""Symmetric band matrices: rows with short temporal windows, Kronecker assembly, Cholesky, selected inverse.

Both models end in a banded normal matrix ``prior (x) I_K + sum_j (a_j a_j') (x) D_j`` (DESIGN 3.3): latent coordinates
are ordered by time and, within a time column, by factor. This module owns that algebra and nothing about what the
rows mean. Bands are LAPACK lower bands, ``band[o, l] = A[l + o, l]``, stored column-major.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided
from scipy.linalg import blas, lapack
from scipy.sparse import csr_array

from msrm.runtime import blas_threads

_SMALLEST_BLOCK = 48  # below it the interpreter, not the arithmetic, sets the time of the block recursion


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
    def _segments(self) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray]:
        """Row order by first column (None if sorted), segment starts (None if all distinct), distinct columns."""
        order = None if np.all(np.diff(self.first) >= 0) else np.argsort(self.first, kind="stable")
        ordered = self.first if order is None else self.first[order]
        starts = np.flatnonzero(np.r_[True, np.diff(ordered) > 0]) if len(ordered) else np.zeros(0, dtype=np.intp)
        return order, None if len(starts) == len(ordered) else starts, ordered[starts]

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
        order, starts, columns = self._segments
        sets = () if weights is None else weights.shape[1:]
        out = np.zeros((self.length, self.width, *sets))
        if len(self) == 0:
            return np.swapaxes(out, 0, 1)
        rows = self.weights if order is None else self.weights[order]
        scaled = rows
        if weights is not None:
            ordered = weights if order is None else weights[order]
            scaled = rows * ordered[:, None] if not sets else rows[:, :, None] * ordered[:, None]
        if sets:
            rows = rows[:, :, None]
        for a in range(self.width):
            product = rows[:, a, None] * scaled[:, a:]
            if starts is not None:
                product = np.add.reduceat(product, starts, axis=0)
            out[columns + a, : self.width - a] += product
        return np.swapaxes(out, 0, 1)

    def windows(self, band: np.ndarray) -> np.ndarray:
        """Each row's symmetric window of a band matrix times the row, (row, width) or (row, width, set).

        The adjoint of :meth:`gram`: ``(windows(T) * weights).sum(1)`` is ``w_n' T w_n``, and its product with the
        derivative of the weights is half the derivative of that form.
        """
        columns = np.swapaxes(band, 0, 1)
        sets = band.shape[2:]
        rows = self.weights if not sets else self.weights[:, :, None]
        out = np.zeros((len(self), self.width, *sets))
        for a in range(self.width):
            reach = min(self.width - a, band.shape[0])
            window = columns[self.first + a, :reach]
            out[:, a : a + reach] += window * rows[:, a, None]
            out[:, a] += (window[:, 1:] * rows[:, a + 1 : a + reach]).sum(axis=1)
        return out


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


def zero_band(bandwidth: int, order: int) -> np.ndarray:
    """An empty lower band (bandwidth + 1, order) in LAPACK's column-major layout."""
    return np.zeros((order, bandwidth + 1)).T


def kron_band(band: np.ndarray, matrix: np.ndarray, out: np.ndarray) -> None:
    """Add ``band (x) matrix`` into a symmetric lower band of order ``columns * K``, in place.

    Parameters
    ----------
    band : (width, column) or (width, column, set)
        Temporal lower band, or several.
    matrix : (K, K) or (set, K, K)
        Symmetric factor matrix, one per set.
    out : (bandwidth + 1, column * K)
        Time-major, factor within time; its bandwidth must be at least ``width * K - 1``.
    """
    size = matrix.shape[-1]
    temporal, target = np.swapaxes(band, 0, 1), out.T
    length, width = temporal.shape[:2]
    for i in range(size):
        for j in range(size):
            if not np.any(matrix[..., i, j]):
                continue
            term = temporal * matrix[i, j] if matrix.ndim == 2 else temporal @ matrix[:, i, j]
            skip = int(i < j)
            stop = (width - 1) * size + i - j + 1
            target[j : length * size : size, skip * size + i - j : stop : size] += term[:, skip:]


def _factor_slices(band: np.ndarray, size: int, i: int, j: int, width: int) -> np.ndarray:
    """``out[l, o] = A[(l + o, i), (l, j)]`` of a band with factor within time, for o < width (view if i >= j)."""
    target = band.T
    length = target.shape[0] // size
    if i >= j:
        return target[j::size, i - j : (width - 1) * size + i - j + 1 : size]
    out = np.empty((length, width))
    out[:, 0] = target[i::size, j - i]
    out[:, 1:] = target[j::size, size + i - j : (width - 1) * size + i - j + 1 : size]
    return out


def kron_moment(band: np.ndarray, inverse: np.ndarray, size: int) -> np.ndarray:
    """``M[i, k] = sum_{l,l'} band[l, l'] inverse[(l, i), (l', k)]``, the adjoint of :func:`kron_band` in its matrix.

    Parameters
    ----------
    band : (width, column) or (width, column, set)
    inverse : (bandwidth + 1, column * size)

    Returns
    -------
    (size, size) or (set, size, size)
    """
    temporal = np.swapaxes(band, 0, 1)
    width, sets = band.shape[0], band.shape[2:]
    out = np.zeros((size, size, *sets))
    for i in range(size):
        for j in range(size):
            piece = _factor_slices(inverse, size, i, j, width)
            lower = np.einsum("lo...,lo->...", temporal, piece)
            diagonal = np.einsum("l...,l->...", temporal[:, 0], piece[:, 0])
            out[i, j] += lower
            out[j, i] += lower - diagonal
    return np.moveaxis(out, (0, 1), (-2, -1)) if sets else out


def kron_trace(inverse: np.ndarray, matrix: np.ndarray, width: int) -> np.ndarray:
    """``T[o, l] = sum_ik matrix[i, k] inverse[(l + o, i), (l, k)]``, the adjoint of :func:`kron_band` in its band.

    Parameters
    ----------
    inverse : (bandwidth + 1, column * K)
    matrix : (K, K), symmetric
    width : int
        Temporal width of the result.

    Returns
    -------
    (width, column)
    """
    size = matrix.shape[0]
    out = np.zeros((inverse.shape[1] // size, width))
    for i in range(size):
        for j in range(size):
            if matrix[i, j] != 0:
                out += matrix[i, j] * _factor_slices(inverse, size, i, j, width)
    return out.T


@dataclass(frozen=True)
class BandCholesky:
    """Cholesky factor of a symmetric positive definite band matrix, or why there is none.

    Attributes
    ----------
    factor : (bandwidth + 1, order)
        Lower factor in band storage.
    ok : bool
        Whether the matrix was finite and positive definite. If not, use nothing else but ``diagnostic``.
    diagnostic : str
        Empty, or what was wrong and where.
    """

    factor: np.ndarray
    ok: bool = True
    diagnostic: str = ""
    _cache: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def log_determinant(self) -> float:
        """Log determinant of the matrix (NaN if it was not positive definite)."""
        return 2.0 * float(np.sum(np.log(self.factor[0]))) if self.ok else np.nan

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Solution of ``A x = right`` for right-hand sides (order,) or (order, ...)."""
        flat = np.asfortranarray(right.reshape(right.shape[0], -1))
        return lapack.dpbtrs(self.factor, flat, lower=1)[0].reshape(right.shape)

    def sample(self, standard: np.ndarray) -> np.ndarray:
        """Draws from N(0, A^-1), (order, ...), made from standard normals of that shape."""
        flat = np.asfortranarray(standard.reshape(standard.shape[0], -1))
        return lapack.dtbtrs(self.factor, flat, uplo="L", trans="T")[0].reshape(standard.shape)

    def inverse_blocks(self) -> tuple[np.ndarray, np.ndarray]:
        """Diagonal and subdiagonal blocks of the inverse, (block, b, b) and (block - 1, b, b).

        Blocks have order b, at least the bandwidth; the last is padded with the identity. With the block bidiagonal
        factor, ``S_ii = L_ii^-T L_ii^-1 + G' S_jj G`` and ``S_ji = -S_jj G`` for ``j = i + 1``,
        ``G = L_ji L_ii^-1`` (Takahashi et al. 1973).
        """
        work = self._inverse_columns()
        b = work.shape[1]
        diagonal = np.swapaxes(work[:, :, :b], 1, 2)
        return diagonal, np.swapaxes(work[:-1, :, b:], 1, 2)

    def inverse_band(self) -> np.ndarray:
        """The inverse's entries within the bandwidth, as a lower band (bandwidth + 1, order)."""
        work = self._inverse_columns()
        return _block_bands(work, self.factor.shape[0]).reshape(-1, self.factor.shape[0])[: self.factor.shape[1]].T

    def _inverse_columns(self) -> np.ndarray:
        if "inverse" not in self._cache:
            self._cache["inverse"] = _selected_inverse(self.factor)
        return self._cache["inverse"]


def _block_bands(work: np.ndarray, depth: int) -> np.ndarray:
    """View (block, column, offset) of block columns (block, b, 2 b): entries on and below the diagonal."""
    blocks, b, rows = work.shape
    step = work.itemsize
    return as_strided(work, (blocks, b, depth), (b * rows * step, (rows + 1) * step, step))


def _selected_inverse(factor: np.ndarray) -> np.ndarray:
    """Block columns (block, column, row of [S_ii; S_ji]) of the inverse."""
    depth, order = factor.shape
    b = min(max(depth - 1, _SMALLEST_BLOCK), max(order, depth))
    blocks = -(-order // b)
    padded = np.zeros((blocks * b, depth))
    padded[:order], padded[order:, 0] = factor.T, 1.0
    work = np.zeros((blocks, b, 2 * b))
    _block_bands(work, depth)[:] = padded.reshape(blocks, b, depth)
    following = np.empty((0, 0))
    with blas_threads(1):
        for block in range(blocks - 1, -1, -1):
            columns = work[block].T
            inverse = lapack.dtrtri(columns[:b], lower=1)[0]
            current = lapack.dlauum(inverse, lower=1)[0]
            current += np.tril(current, -1).T - np.triu(current, 1)
            if block < blocks - 1:
                gain = blas.dtrmm(1.0, inverse, columns[b:], side=1, lower=1)
                cross = following @ gain
                current += gain.T @ cross
                columns[b:] = -cross
            current = 0.5 * (current + current.T)
            columns[:b] = current
            following = current
    return work


def band_cholesky(band: np.ndarray, *, overwrite: bool = False) -> BandCholesky:
    """Cholesky factorization of a symmetric lower band (bandwidth + 1, order), never with a silent jitter.

    Parameters
    ----------
    band : (bandwidth + 1, order)
        Lower band, best column-major (:func:`zero_band`).
    overwrite : bool
        Let the factor take the place of the band.

    Returns
    -------
    BandCholesky
        With ``ok`` False and a ``diagnostic`` if the matrix is not finite or not positive definite.
    """
    if not np.isfinite(band[0].sum()) or not np.isfinite(band.sum()):
        column = int(np.flatnonzero(~np.isfinite(band).all(axis=0))[0])
        return BandCholesky(band, False, f"the matrix of order {band.shape[1]} is not finite in column {column}")
    with blas_threads(1):
        factor, info = lapack.dpbtrf(band, lower=1, overwrite_ab=int(overwrite))
    if info > 0:
        text = f"the matrix of order {band.shape[1]} is not positive definite: pivot {info} failed"
        return BandCholesky(factor, False, text)
    return BandCholesky(factor)
