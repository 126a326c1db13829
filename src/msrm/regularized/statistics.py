"""Row groups: streams of one run that share a clock and a response, and every sum the objective needs of them.

With g_n = (H Z)_n the latent that row n sees, a group enters the objective as

    sum_nc C_nc (y_nc - w_c' g_n)^2  =  energy - 2 sum_n h_n' g_n + sum_n g_n' D_n g_n,
    h_n = sum_c C_nc y_nc w_c,   D_n = sum_c C_nc w_c w_c',

c over the reduced features of all its participants (DESIGN 3.2). Two kinds supply the same sums: `CompleteRows`, where
C_nc = cell_n omega_c and D_n = cell_n P with one K x K matrix P, so the temporal Gram is weighted once;
`MaskedRows`, where C is a full matrix and D_n, M_c are single matrix products with it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.domain import Grid
from msrm.regularized.filters import Values
from msrm.responses import Response, hat_rows
from msrm.temporal_rows import TemporalRows

Array = NDArray[np.float64]
Band = tuple[Array, Array]


@dataclass(frozen=True)
class Operator:
    """H of a group at given response values, its derivatives, and the weighted temporal Gram (width, column)."""

    rows: TemporalRows
    slopes: dict[str, TemporalRows]
    gram: Array | None


@dataclass(frozen=True)
class Block:
    """Where one participant-modality's reduced features lie: among the group's columns and among all loadings."""

    pair: int
    own: slice
    columns: slice


class RowGroup(Protocol):
    """What the objective asks of a group; shapes as in the module's equation."""

    owner: int
    path: int
    times: Array
    blocks: tuple[Block, ...]

    @property
    def energy(self) -> float: ...

    def column_energies(self) -> Array: ...

    def view(self) -> Array: ...

    def operator(self, response: Response, values: Values, grid: Grid) -> Operator: ...

    def precision(self, loading: Array) -> Array: ...

    def bands(self, operator: Operator, precision: Array) -> Iterator[Band]: ...

    def pull(self, loading: Array) -> Array: ...

    def curved(self, path: Array, precision: Array) -> Array: ...

    def moments(self, path: Array) -> "Moments": ...

    def squared_errors(self, path: Array, loading: Array) -> Array: ...

    def factor_energies(self, path: Array, loading: Array) -> Array: ...


class Moments(Protocol):
    """Sums over rows for given g: M_c = sum_n C_nc g_n g_n', B_c = sum_n C_nc y_nc g_n."""

    @property
    def cross(self) -> Array: ...

    def times(self, loading: Array) -> Array:
        """M_c w_c of every column, (column, K)."""
        ...

    def of_block(self, block: Block) -> tuple[Array, Array]:
        """Mean M_c over a block (K, K), and every column's trace (column,)."""
        ...

    def columns_of(self, block: Block) -> Array:
        """M_c of a block's columns, (column, K, K)."""
        ...


class _Rows:
    """What both kinds share: the clock, the columns, and the operator kept at its last response values."""

    def __init__(self, times: Array, weighted: Array, blocks: Sequence[Block], owner: int, path: int) -> None:
        self.times, self.weighted, self.blocks = times, weighted, tuple(blocks)
        self.owner, self.path = owner, path
        self._kept: tuple[Values, Operator] | None = None

    def operator(self, response: Response, values: Values, grid: Grid) -> Operator:
        """H at these values; recomputed only when they change."""
        if self._kept is None or self._kept[0] != values:
            rows, slopes = hat_rows(response, values, self.times, grid.start, grid.step, grid.count)
            self._kept = (dict(values), Operator(rows, slopes, self._gram(rows)))
        return self._kept[1]

    def _gram(self, rows: TemporalRows) -> Array | None:
        return None

    def pull(self, loading: Array) -> Array:
        """h_n (row, K)."""
        return self.weighted @ loading

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"} | {"_kept": None}


class CompleteRows(_Rows):
    """Rows with every entry present: C_nc = cell_n omega_c.

    Parameters
    ----------
    times : (row,), seconds
    cell : (row,)
    values : (row, column)
    omega : (column,), constant within a block
    """

    def __init__(
        self, times: Array, cell: Array, values: Array, omega: Array, blocks: Sequence[Block], owner: int, path: int = 0
    ) -> None:
        super().__init__(times, cell[:, None] * values * omega, blocks, owner, path)
        self.cell, self.omega = cell, omega
        self.energy = float(np.einsum("nc,nc->", self.weighted, values))

    def column_energies(self) -> Array:
        """sum_n C y^2 of each column."""
        return np.einsum("nc,nc,n->c", self.weighted, self.weighted, 1 / self.cell) / self.omega

    def _gram(self, rows: TemporalRows) -> Array:
        return rows.gram(self.cell)

    def view(self) -> Array:
        """Values (row, column) times the roots of their weights, which sum to the stream's share on any clock."""
        return self.weighted / np.sqrt(self.cell[:, None] * self.omega / len(self.cell))

    def precision(self, loading: Array) -> Array:
        """P (K, K) of D_n = cell_n P."""
        return (loading * self.omega[:, None]).T @ loading

    def bands(self, operator: Operator, precision: Array) -> Iterator[Band]:
        """Temporal bands and the factor matrices they multiply."""
        assert operator.gram is not None
        yield operator.gram, precision

    def curved(self, path: Array, precision: Array) -> Array:
        """D_n g_n (row, K)."""
        return (self.cell[:, None] * path) @ precision

    def moments(self, path: Array) -> Moments:
        """M_c and B_c at g = path (row, K)."""
        second = path.T @ (self.cell[:, None] * path)
        return _CompleteMoments(self.weighted.T @ path, second, float(second.trace()), self.omega)

    def squared_errors(self, path: Array, loading: Array) -> Array:
        """sum_n C (y - g'w)^2 of each column, entry by entry, without cancellation."""
        residual = self.weighted / (self.cell[:, None] * self.omega) - path @ loading.T
        return self.omega * np.einsum("n,nc,nc->c", self.cell, residual, residual)

    def factor_energies(self, path: Array, loading: Array) -> Array:
        """sum_n C (g_k w_k)^2 of each column and factor, (column, K)."""
        return self.omega[:, None] * loading**2 * (self.cell @ path**2)


@dataclass(frozen=True)
class _CompleteMoments:
    cross: Array
    second: Array
    trace: float
    omega: Array

    def times(self, loading: Array) -> Array:
        return self.omega[:, None] * (loading @ self.second)

    def of_block(self, block: Block) -> tuple[Array, Array]:
        omega = self.omega[block.own]
        return self.second * omega[0], omega * self.trace

    def columns_of(self, block: Block) -> Array:
        return self.omega[block.own, None, None] * self.second


class MaskedRows(_Rows):
    """Rows with entries missing: a weight for every entry, 0 where missing.

    Parameters
    ----------
    times : (row,), seconds
    values : (row, column), 0 where missing
    weights : (row, column)
        C.
    """

    def __init__(
        self, times: Array, values: Array, weights: Array, blocks: Sequence[Block], owner: int, path: int = 0
    ) -> None:
        super().__init__(times, weights * values, blocks, owner, path)
        self.weights = weights
        self.energy = float(np.einsum("nc,nc->", self.weighted, values))

    def column_energies(self) -> Array:
        """sum_n C y^2 of each column."""
        safe = np.where(self.weights > 0, self.weights, 1.0)
        return np.einsum("nc,nc,nc->c", self.weighted, self.weighted, 1 / safe)

    def view(self) -> Array:
        """Values (row, column) times the roots of their weights, which sum to the stream's share on any clock."""
        scale = np.sqrt(self.weights / np.maximum((self.weights > 0).sum(0), 1))
        return np.divide(self.weighted, scale, out=np.zeros_like(self.weighted), where=scale > 0)

    def precision(self, loading: Array) -> Array:
        """D_n (row, K, K)."""
        return _square(self.weights @ _products(loading), loading.shape[1])

    def bands(self, operator: Operator, precision: Array) -> Iterator[Band]:
        """One temporal band for each pair of factors."""
        size = precision.shape[-1]
        upper = np.triu_indices(size)
        grams = operator.rows.gram(np.ascontiguousarray(precision[:, *upper]))
        for index, (i, j) in enumerate(zip(*upper, strict=True)):
            matrix = np.zeros((size, size))
            matrix[i, j] = matrix[j, i] = 1.0
            yield grams[:, :, index], matrix

    def curved(self, path: Array, precision: Array) -> Array:
        """D_n g_n (row, K)."""
        return np.einsum("nkl,nl->nk", precision, path)

    def moments(self, path: Array) -> Moments:
        """M_c and B_c at g = path (row, K)."""
        second = _square(self.weights.T @ _products(path), path.shape[1])
        return _MaskedMoments(self.weighted.T @ path, second)

    def squared_errors(self, path: Array, loading: Array) -> Array:
        """sum_n C (y - g'w)^2 of each column, entry by entry, without cancellation."""
        present = self.weights > 0
        values = np.divide(self.weighted, self.weights, out=np.zeros_like(self.weighted), where=present)
        residual = values - path @ loading.T
        return np.einsum("nc,nc,nc->c", self.weights, residual, residual)

    def factor_energies(self, path: Array, loading: Array) -> Array:
        """sum_n C (g_k w_k)^2 of each column and factor, (column, K)."""
        return loading**2 * (self.weights.T @ path**2)


@dataclass(frozen=True)
class _MaskedMoments:
    cross: Array
    second: Array

    def times(self, loading: Array) -> Array:
        return np.einsum("ckl,cl->ck", self.second, loading)

    def of_block(self, block: Block) -> tuple[Array, Array]:
        own = self.second[block.own]
        return own.mean(0), np.trace(own, axis1=1, axis2=2)

    def columns_of(self, block: Block) -> Array:
        return self.second[block.own]


def _products(vectors: Array) -> Array:
    """Products of entries i <= j of each row, (row, K (K + 1) / 2)."""
    i, j = np.triu_indices(vectors.shape[1])
    return vectors[:, i] * vectors[:, j]


def _square(packed: Array, size: int) -> Array:
    """Symmetric matrices (row, K, K) of their packed upper triangles."""
    i, j = np.triu_indices(size)
    out = np.empty((len(packed), size, size))
    out[:, i, j] = out[:, j, i] = packed
    return out
