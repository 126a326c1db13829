"""Orthonormal bases of the rows of wide data, known only through passes over blocks of features (DESIGN 3.2).

With X (row, feature) the centred rows, this module owns C of `V = [X; mean]' C` and the rows in that basis. C starts
as a pivoted Cholesky factor of the Gram `X X' = L L'` (centred first: a Gram loses orthogonality with large means).
Where the mean matters one step of Cholesky QR makes V orthonormal to rounding, and Gram-Schmidt adds the mean's own
direction.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack

Array = NDArray[np.float64]
Blocks = Iterable[tuple[slice, Array]]

# Pivots of a T x T Gram below this many T eps of its largest are rounding noise.
_RANK_MARGIN = 16.0
# A mean this close (relative) to the span of the centred rows is taken to lie in it.
_MEAN_MARGIN = 1e-9


class Group(Protocol):
    """Features rotated together: their column means, and their centred data in a block."""

    @property
    def centre(self) -> Array: ...

    def block(self, span: slice, data: Array) -> tuple[slice, Array]: ...


def bases(
    blocks: Blocks, groups: Sequence["Group"], grams: Sequence[Array], keep_mean: bool
) -> tuple[list[Array], list[Array]]:
    """For each group the data in its basis, L of `[X; mean] = L V'`, and C of `V = [X; mean]' C`.

    Parameters
    ----------
    blocks : iterable of (feature slice, data (row, feature))
        Read again as often as needed.
    groups : sequence of MaskGroup
        Without coefficients yet.
    grams : sequence of (row, row)
        X X' of each group's centred rows.
    keep_mean : bool
        Make V orthonormal to rounding, and add the direction of the mean where it lies outside.
    """
    factors, coefficients = [], []
    for gram in grams:
        factor, coefficient = _semidefinite_factor(gram)
        factors.append(np.vstack([factor, np.zeros(factor.shape[1])]))
        coefficients.append(np.vstack([coefficient, np.zeros(factor.shape[1])]))
    if not (keep_mean and groups):
        return factors, coefficients
    for i, (gram, projected) in enumerate(_overlaps(blocks, groups, coefficients)):
        # Cholesky QR a second time: V'V - 1 falls from eps cond(X)^2 to eps, and X V is taken directly.
        inverse = np.linalg.inv(np.linalg.cholesky(gram)).T
        factors[i][:-1] = projected @ inverse
        coefficients[i] = coefficients[i] @ inverse
    along = [np.zeros(coefficient.shape[1]) for coefficient in coefficients]
    for _ in range(2):  # Gram-Schmidt twice is enough
        outside = _beyond_span(blocks, groups, coefficients, along)
    for i, (group, length) in enumerate(zip(groups, outside, strict=True)):
        factors[i][-1] = along[i]
        if length > _MEAN_MARGIN * np.linalg.norm(group.centre):
            factors[i], coefficients[i] = _with_mean(factors[i], coefficients[i], length)
    return factors, coefficients


def _with_mean(factor: Array, coefficient: Array, length: float) -> tuple[Array, Array]:
    """Append the direction of the mean outside the basis, `(mean - V V' mean) / length`."""
    direction = np.append(-coefficient[:-1] @ factor[-1], 1.0) / length
    factor = np.pad(factor, ((0, 0), (0, 1)))
    factor[-1, -1] = length
    return factor, np.column_stack([coefficient, direction])


def _overlaps(blocks: Blocks, groups: Sequence["Group"], coefficients: list[Array]) -> list[tuple[Array, Array]]:
    """V'V and X V of every group, from one pass over the data."""
    sums = [(np.zeros((c.shape[1], c.shape[1])), np.zeros((len(c) - 1, c.shape[1]))) for c in coefficients]
    for span, data in blocks:
        for (gram, projected), group, coefficient in zip(sums, groups, coefficients, strict=True):
            _, block = group.block(span, data)
            basis = block.T @ coefficient[:-1]
            gram += basis.T @ basis
            projected += block @ basis
    return sums


def _beyond_span(
    blocks: Blocks, groups: Sequence["Group"], coefficients: list[Array], along: list[Array]
) -> list[float]:
    """Length of `mean - V along` of every group; `along` is corrected in place by its coordinates in V."""
    squares, corrections = np.zeros(len(groups)), [np.zeros_like(a) for a in along]
    for span, data in blocks:
        for i, (group, coefficient) in enumerate(zip(groups, coefficients, strict=True)):
            inside, block = group.block(span, data)
            rest = group.centre[inside] - block.T @ (coefficient[:-1] @ along[i])
            squares[i] += rest @ rest
            corrections[i] += coefficient[:-1].T @ (block @ rest)
    lengths = []
    for i, correction in enumerate(corrections):
        along[i] += correction
        lengths.append(float(np.sqrt(max(squares[i] - correction @ correction, 0.0))))
    return lengths


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
