"""Symmetric band matrices: Kronecker assembly, Cholesky, selected inverse.

Both models end in a banded normal matrix ``prior (x) I_K + sum_j (a_j a_j') (x) D_j`` (DESIGN 3.3): latent coordinates
are ordered by time and, within a time column, by factor. This module owns that algebra and nothing about what the
rows mean. Bands are LAPACK lower bands, ``band[o, l] = A[l + o, l]``, stored column-major.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import lapack

from msrm.runtime import blas_threads
from msrm.temporal_rows import TemporalRows, block_bands

__all__ = [
    "BandCholesky",
    "FactorPairs",
    "TemporalRows",
    "add_blocks",
    "band_cholesky",
    "kron_sum",
    "zero_band",
]

_SMALLEST_BLOCK = 32  # below it the interpreter, not the arithmetic, sets the time of the block recursion
_CACHED = 2**15  # entries of the bands that are combined at a time
_WINDOW_STEPS = 4  # blocks that enter the moving window of the inverse before it is copied back


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
    view = block_bands(columns[None], depth)[0]
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
