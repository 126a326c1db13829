"""Symmetric band matrices: rows with short temporal windows, Kronecker assembly, Cholesky, selected inverse.

Both models end in a banded normal matrix ``prior (x) I_K + sum_j (a_j a_j') (x) D_j`` (DESIGN 3.3): latent coordinates
are ordered by time and, within a time column, by factor. This module owns that algebra and nothing about what the
rows mean. Bands are LAPACK lower bands, ``band[o, l] = A[l + o, l]``, stored column-major.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided
from scipy.linalg import lapack
from scipy.sparse import csr_array

from msrm.runtime import blas_threads

_SMALLEST_BLOCK = 32  # below it the interpreter, not the arithmetic, sets the time of the block recursion
_SMALLEST_PACK = 16  # the same for the batched products of packed rows
_NARROW = 8  # up to this width rows are gathered entry by entry, without packing
_CACHED = 2**15  # entries of the bands that are combined at a time
_WINDOW_STEPS = 4  # blocks that enter the moving window of the inverse before it is copied back


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
        upper = _block_bands(product, self.width)
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
        view = _block_bands(upper, reach)
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


def zero_band(bandwidth: int, order: int) -> np.ndarray:
    """An empty lower band (bandwidth + 1, order) in LAPACK's column-major layout."""
    return np.zeros((order, bandwidth + 1)).T


def kron_sum(terms: Iterable[tuple[np.ndarray, np.ndarray]], size: int, length: int) -> np.ndarray:
    """Lower band of ``sum band (x) matrix``, time-major with the factor within time.

    Parameters
    ----------
    terms : (band, matrix) pairs
        Temporal lower bands (width, column) with symmetric matrices (K, K), or (width, column, set) with (set, K, K).
    size : int
        K.
    length : int
        Columns.

    Returns
    -------
    (widest * K, length * K)
    """
    bands, matrices = [], []
    for band, matrix in terms:
        sets = band.T if matrix.ndim == 3 else band.T[None]
        bands += list(sets)
        matrices += list(matrix.reshape(-1, size, size))
    width, weights = max(temporal.shape[1] for temporal in bands), np.array(matrices)
    step = max(1, _CACHED // (len(bands) * width))
    stacked, out = np.zeros((len(bands), step, width)), np.zeros((length, size, width * size))
    for start in range(0, length, step):
        part = stacked[:, : min(step, length - start)]
        for row, temporal in zip(part, bands, strict=True):
            row[:, : temporal.shape[1]] = temporal[start : start + step]
        flat = part.reshape(len(bands), -1).T
        for j in range(size):
            # All (offset, factor i) of the columns with factor j are one product, stored from the diagonal on.
            columns = (flat @ weights[:, :, j]).reshape(-1, width * size)
            out[start : start + step, j, : width * size - j] = columns[:, j:]
    return out.reshape(length * size, width * size).T


def add_blocks(band: np.ndarray, first: np.ndarray, blocks: np.ndarray) -> None:
    """Add symmetric diagonal blocks (block, order, order) that start at distinct columns ``first`` to a lower band."""
    target, order = band.T, blocks.shape[1]
    for column in range(order):
        target[first + column, : order - column] += blocks[:, column:, column]


class FactorPairs:
    """A symmetric band with the factor within time, as one temporal band for each pair of factors.

    The band of ``X_ik + X_ki`` for i > k and of ``X_ii``, with ``X_ik[l, l'] = A[(l, i), (l', k)]``: what is needed to
    contract it with ``sum band (x) matrix`` of :func:`kron_sum`.

    Parameters
    ----------
    band : (width * size, length * size)
        Lower band.
    size : int
    """

    def __init__(self, band: np.ndarray, size: int) -> None:
        width, length = band.shape[0] // size, band.shape[1] // size
        entries = band.T.reshape(length, size, width * size)
        self.size, self.band = size, band
        self.pairs = [(i, j) for i in range(size) for j in range(i + 1)]
        self.bands = np.empty((len(self.pairs), length, width))
        for out, (i, j) in zip(self.bands, self.pairs, strict=True):
            out[:] = entries[:, j, i - j :: size]
            if j < i:
                out[:, 1:] += entries[:, i, size + j - i :: size][:, : width - 1]
                out[:, 0] *= 2.0

    def blocks(self, first: np.ndarray, order: int) -> np.ndarray:
        """Diagonal blocks ``A[f : f + order, f : f + order]`` for each first column (block,), (block, order, order)."""
        lower = self.band.T[:, :order][first[:, None] + np.arange(order)]
        row, column = np.indices((order, order))
        return lower[:, np.minimum(row, column), np.abs(row - column)]

    def trace(self, matrix: np.ndarray, width: int) -> np.ndarray:
        """``T[o, l] = sum_ik matrix[i, k] A[(l + o, i), (l, k)]`` (width, length), for a symmetric matrix (K, K)."""
        weights = np.array([matrix[pair] for pair in self.pairs])
        return np.tensordot(weights, self.bands[:, :, :width], 1).T

    def moment(self, band: np.ndarray) -> np.ndarray:
        """``M[i, k] = sum_{l, l'} band[l, l'] A[(l, i), (l', k)]`` for one band or several.

        Parameters
        ----------
        band : (width, length) or (width, length, set)

        Returns
        -------
        (K, K) or (set, K, K)
        """
        temporal = band.T
        mine = self.bands[:, :, : band.shape[0]]
        summed = 2.0 * np.einsum("...lo,plo->...p", temporal, mine)
        summed -= np.einsum("...l,pl->...p", temporal[..., 0], mine[:, :, 0])
        out = np.empty((*summed.shape[:-1], self.size, self.size))
        for value, (i, j) in zip(np.moveaxis(summed, -1, 0), self.pairs, strict=True):
            out[..., i, j] = out[..., j, i] = value if i == j else 0.5 * value
        return out


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

    def inverse_band(self) -> np.ndarray:
        """The inverse's entries within the bandwidth, as a lower band (bandwidth + 1, order).

        Block recursion from the last column block to the first (Takahashi et al. 1973): with J the ``bandwidth`` rows
        after block i and ``G = L_Ji L_ii^-1``, ``S_Ji = -S_JJ G`` and ``S_ii = L_ii^-T L_ii^-1 + G' S_JJ G``.
        """
        if "inverse" not in self._cache:
            self._cache["inverse"] = _selected_inverse(self.factor)
        return self._cache["inverse"]


def _block_bands(work: np.ndarray, depth: int) -> np.ndarray:
    """View (block, l, offset) of dense blocks (block, row, column): the entries ``[l, l + offset]``."""
    blocks, rows, columns = work.shape
    step = work.itemsize
    return as_strided(work, (blocks, rows, depth), (rows * columns * step, (columns + 1) * step, step))


def _selected_inverse(factor: np.ndarray) -> np.ndarray:
    depth, order = factor.shape
    reach = depth - 1
    # Small blocks cost 2 n reach^2 operations where b = reach costs 5.7; multiples of 16 suit the kernels of BLAS.
    b = max(-(-reach // 64) * 16, _SMALLEST_BLOCK)
    blocks = -(-order // b)
    out = np.empty((blocks * b, depth))
    size = reach + _WINDOW_STEPS * b
    window = np.zeros((size, size))
    columns = np.zeros((b, b + reach))
    view = _block_bands(columns[None], depth)[0]
    top = size - reach
    window[top:, top:] = np.eye(reach)
    with blas_threads(1):
        for start in range((blocks - 1) * b, -1, -b):
            columns.fill(0.0)
            view[: order - start] = factor.T[start : start + b]
            if start + b + reach > order:
                columns[:, order - start :] = 0.0
                view[order - start :, 0] = 1.0
            if top < b:
                window[size - reach :, size - reach :] = window[top : top + reach, top : top + reach]
                top = size - reach
            inverse = lapack.dtrtri(columns[:, :b].T, lower=1)[0]
            gain = inverse.T @ columns[:, b:]
            cross = gain @ window[top : top + reach, top : top + reach]
            current = inverse.T @ inverse + cross @ gain.T
            columns[:, :b] = 0.5 * (current + current.T)
            np.negative(cross, out=columns[:, b:])
            window[top - b : top, top - b : top + reach] = columns
            window[top : top + reach, top - b : top] = columns[:, b:].T
            out[start : start + b] = view
            top -= b
    return out[:order].T


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
