"""A thread limit around our own factorizations that costs microseconds and is always given back.

Many small LAPACK calls are ten times slower with several threads (DESIGN 11). Scanning the process for BLAS
libraries costs milliseconds, so the scan is kept and repeated only when modules were imported since.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threadpoolctl import ThreadpoolController

__all__ = ["blas_libraries", "blas_threads"]

_lock = threading.RLock()
_libraries: list[Any] = []
_scanned_modules = -1
_active: list[tuple[object, int]] = []
_original: dict[str, int] = {}


def blas_libraries() -> list[Any]:
    """threadpoolctl's controllers of the BLAS libraries loaded now, scanned again only after new imports."""
    global _libraries, _scanned_modules
    # Shared libraries arrive with extension modules; comparing a length costs 50 ns, a scan 1 ms or more.
    modules = len(sys.modules)
    if modules != _scanned_modules:
        with _lock:
            scan = ThreadpoolController()
            _libraries = [library for library in scan.lib_controllers if library.user_api == "blas"]
            _scanned_modules = modules
    return _libraries


@contextmanager
def blas_threads(n: int = 1) -> Iterator[None]:
    """Limit every loaded BLAS library to `n` threads inside the block, and restore what was set before.

    Blocks nest (the innermost wins) and may overlap between Python threads: the counts of before the first
    block come back when the last one ends, in whatever order they end.

    Parameters
    ----------
    n : int
        Threads per BLAS library, at least 1.

    Raises
    ------
    ValueError
        When `n` is below 1.

    Examples
    --------
    >>> with blas_threads(1):
    ...     pass
    """
    if n < 1:
        raise ValueError(f"blas_threads needs at least 1 thread, found {n}")
    token = (object(), n)
    with _lock:
        for library in blas_libraries():
            if library.filepath not in _original:
                _original[library.filepath] = library.get_num_threads()
        _active.append(token)
        _apply()
    try:
        yield
    finally:
        with _lock:
            _active.remove(token)
            _apply()


def _apply() -> None:
    """Set the latest open block's limit, or the original counts when no block is open."""
    for library in _libraries:
        before = _original.get(library.filepath)
        if before is not None:
            library.set_num_threads(_active[-1][1] if _active else before)
    if not _active:
        _original.clear()
