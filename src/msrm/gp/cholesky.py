"""The guarded symmetric factorization on the host: LAPACK POTRF and POTRI under a thread limit (DESIGN 4).

Every dense symmetric factorization of the package comes through here, called from NumPy or, through a callback, from
compiled code (`msrm.gp.jax_cholesky`, which adds the derivative rules and the native factorization of accelerators).
A matrix that is not finite or not positive definite gives NaN and a named diagnostic; nothing is ever added to a
diagonal. The guard refuses an order before anything is allocated, and names what to use instead.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.linalg import lapack

from msrm.runtime import available_cores, blas_libraries, blas_threads

__all__ = [
    "ACCELERATOR_ORDER",
    "DIAGNOSTICS",
    "LAPACK_ORDER",
    "Factor",
    "check_order",
    "factor_threads",
    "factorize",
    "host_memory",
    "inverse_of_factor",
    "lower_factor",
]

LAPACK_ORDER = 32_768  # 32-bit indices were seen to overflow from order 33,000 on, whatever the memory (DESIGN 11)
ACCELERATOR_ORDER = 46_340  # the largest order whose entries still have 32-bit indices
DIAGNOSTICS = (  # by status; traced code returns the index, so that it can say why without leaving the device
    "",
    "not finite; a parameter or an observation is not finite or overflows",
    "not positive definite; likely causes are a noise variance near zero, loadings or responses far out of range, "
    "or nodes that nearly coincide",
)
_GUARDED_ORDER = 2_048  # asking the system costs more than a smaller factorization can take
_THREADED_ORDER = 256  # below it threads cost more than they bring


def host_memory(root: Path = Path("/")) -> int | None:
    """Bytes this process may still allocate: free host memory, or what its control group leaves if that is less.

    Parameters
    ----------
    root : Path
        Where the file system with ``proc`` and ``sys`` is mounted.

    Returns
    -------
    int or None
        None where the system does not say.
    """
    found = []
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024 * int(line.split()[1]))
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            quota = (root / "sys/fs/cgroup" / limit).read_text().strip()
            if quota != "max":
                found.append(max(int(quota) - int((root / "sys/fs/cgroup" / used).read_text()), 0))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def check_order(
    order: int, *, copies: float, largest: int = LAPACK_ORDER, available: int | None = None, where: str = "the host"
) -> None:
    """Refuse a dense problem that cannot work, before anything of its size is allocated.

    Parameters
    ----------
    order : int
        Order of the matrix.
    copies : float
        Matrices of that order alive at once, the matrix itself included.
    largest : int
        The largest order whose routines do not overflow.
    available : int, optional
        Bytes that may be allocated; None when unknown, and then only the order is checked.
    where : str
        What holds the memory, for the message.

    Raises
    ------
    MemoryError
        Naming the order, the bytes needed and had, and the likelihood to use instead.
    """
    advice = 'Use likelihood="statespace", whose memory is linear in the recording.'
    if order > largest:
        raise MemoryError(
            f"a dense likelihood of order {order:,} is above {largest:,}, where the 32-bit indices of its "
            f"factorization overflow whatever the memory. {advice}"
        )
    needed = int(copies * order * order * 8)
    if available is not None and needed > available:
        raise MemoryError(
            f"a dense likelihood of order {order:,} needs {needed / 1e9:.2f} GB ({copies:g} matrices of float64), "
            f"{where} has {available / 1e9:.2f} GB left. {advice}"
        )


@contextmanager
def factor_threads(order: int) -> Iterator[None]:
    """The thread limit around one factorization: 1 when small, never more than are set now or than may be used."""
    if order < _THREADED_ORDER:
        threads = 1
    else:
        threads = min([available_cores(), *(library.get_num_threads() for library in blas_libraries())])
    with blas_threads(max(threads, 1)):
        yield


def _checked(matrix: np.ndarray) -> np.ndarray:
    matrix = np.asarray(matrix)
    if matrix.dtype != np.float64:
        raise TypeError(f"a factorization needs float64, found {matrix.dtype}; convert before the matrix is formed")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"a factorization needs a square matrix, found shape {matrix.shape}")
    return matrix


def lower_factor(matrix: np.ndarray, *, overwrite: bool = False) -> tuple[np.ndarray, str]:
    """Lower Cholesky factor by LAPACK POTRF, of a symmetric matrix of which the lower triangle is read.

    Parameters
    ----------
    matrix : (n, n) float64
        Symmetric matrix.
    overwrite : bool
        Work in the matrix's own memory (column-major, or row-major when exactly symmetric), which is then lost.

    Returns
    -------
    lower : (n, n)
        Column-major, zero above the diagonal; all NaN on failure.
    diagnostic : str
        Empty, or why there is no factor.

    Raises
    ------
    TypeError, ValueError
        If the matrix is not float64 or not square.
    """
    matrix = _checked(matrix)
    if overwrite and matrix.flags.c_contiguous:
        matrix = matrix.T
    order = len(matrix)
    # One pass over a sum is enough to see a NaN or an infinity, unless finite entries overflow: then look closer.
    with np.errstate(over="ignore", invalid="ignore"):
        total = matrix.sum()
    if not np.isfinite(total) and not np.isfinite(matrix).all():
        row, column = np.argwhere(~np.isfinite(matrix))[0]
        return np.full((order, order), np.nan, order="F"), (
            f"entry ({row}, {column}) of a matrix of order {order} is {matrix[row, column]}: {DIAGNOSTICS[1]}"
        )
    with factor_threads(order):
        lower, info = lapack.dpotrf(matrix, lower=1, clean=1, overwrite_a=overwrite)
    if info:
        return np.full((order, order), np.nan, order="F"), (
            f"leading minor {info} of a matrix of order {order} fails: {DIAGNOSTICS[2]}"
        )
    return lower, ""


def inverse_of_factor(lower: np.ndarray, *, overwrite: bool = False) -> np.ndarray:
    """Inverse of ``lower @ lower.T`` by LAPACK POTRI, both triangles filled: (n, n), NaN where the factor is NaN."""
    if not np.isfinite(lower.diagonal()).all():
        return np.full(lower.shape, np.nan)
    with factor_threads(len(lower)):
        inverse, info = lapack.dpotri(lower, lower=1, overwrite_c=overwrite)
    if info:
        return np.full(lower.shape, np.nan)
    for start in range(0, len(inverse), 256):
        stop = min(start + 256, len(inverse))
        inverse[start:stop, stop:] = inverse[stop:, start:stop].T
        block = inverse[start:stop, start:stop]
        block[:] = np.tril(block) + np.tril(block, -1).T
    return inverse


@dataclass(frozen=True)
class Factor:
    """A guarded Cholesky factor; every result is NaN when the factorization failed.

    Parameters
    ----------
    lower : (n, n)
        Column-major lower factor, NaN on failure.
    diagnostic : str
        Empty, or why there is no factor.
    """

    lower: np.ndarray
    diagnostic: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is a factor."""
        return not self.diagnostic

    @property
    def log_determinant(self) -> float:
        """Natural logarithm of the matrix's determinant."""
        return 2.0 * float(np.log(self.lower.diagonal()).sum())

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Solution of ``matrix @ x = right``, right (n,) or (n, m)."""
        if not self.ok:
            return np.full(right.shape, np.nan)
        with factor_threads(len(self.lower)):
            return lapack.dpotrs(self.lower, right, lower=1)[0]

    def whiten(self, right: np.ndarray, *, transpose: bool = False) -> np.ndarray:
        """Solution of ``lower @ x = right``, or of ``lower.T @ x = right``; right (n,) or (n, m)."""
        if not self.ok:
            return np.full(right.shape, np.nan)
        with factor_threads(len(self.lower)):
            return lapack.dtrtrs(self.lower, right, lower=1, trans=int(transpose))[0]

    def inverse(self) -> np.ndarray:
        """Inverse of the matrix (n, n), both triangles."""
        return inverse_of_factor(self.lower)


def factorize(matrix: np.ndarray, *, copies: float = 2.0, overwrite: bool = False) -> Factor:
    """Guarded Cholesky factorization of a symmetric matrix on the host.

    Parameters
    ----------
    matrix : (n, n) float64
        Symmetric; the lower triangle is read.
    copies : float
        Further matrices of this order the caller will hold at once, for the memory guard.
    overwrite : bool
        The matrix's memory may be used for the factor.

    Returns
    -------
    Factor
        With `diagnostic` set, and NaN everywhere, when the matrix is not finite or not positive definite.

    Raises
    ------
    MemoryError
        If the order overflows LAPACK's indices or the memory left; the message names ``"statespace"``.
    TypeError, ValueError
        If the matrix is not float64 or not square.

    Examples
    --------
    >>> factorize(np.diag([1.0, 4.0])).lower.diagonal()
    array([1., 2.])
    >>> factorize(np.diag([1.0, -4.0])).diagnostic  # doctest: +ELLIPSIS
    'leading minor 2 of a matrix of order 2 fails: not positive definite; ...'
    """
    matrix = _checked(matrix)
    available = host_memory() if len(matrix) > _GUARDED_ORDER else None
    check_order(len(matrix), copies=copies, available=available)
    return Factor(*lower_factor(matrix, overwrite=overwrite))
