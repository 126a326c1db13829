"""A thread limit around our own factorizations that costs microseconds and is always given back.

Many small LAPACK calls are ten times slower with several threads (DESIGN 11). Scanning the process for BLAS
libraries costs milliseconds, so the scan is kept and repeated only when modules were imported since.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from threadpoolctl import OpenBLASController, ThreadpoolController

__all__ = ["blas_libraries", "blas_threads"]

_lock = threading.RLock()
_libraries: list[Any] = []
_scanned_modules = -1
# Per library (and Python thread, where limits are per thread): the count before the first block, the open limits.
_before: dict[tuple[str, int], int] = {}
_open: dict[tuple[str, int], list[tuple[object, int]]] = {}


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
    held: list[tuple[Any, tuple[str, int]]] = []
    with _lock:
        libraries = blas_libraries()
        _release_control()
        for library in libraries:
            # OpenMP keeps one limit per Python thread; every other layer has one for the process.
            own = threading.get_ident() if getattr(library, "threading_layer", "") == "openmp" else 0
            key = (library.filepath, own)
            if key not in _open:
                _open[key] = []
                _before[key] = library.get_num_threads()
            _open[key].append(token)
            held.append((library, key))
            library.set_num_threads(n)
        _release_control()
    try:
        yield
    finally:
        with _lock:
            _release_control()
            for library, key in held:
                _open[key].remove(token)
                library.set_num_threads(_open[key][-1][1] if _open[key] else _before[key])
                if not _open[key]:
                    del _open[key], _before[key]
            _release_control()


def _release_control() -> None:
    """Let any Python thread set OpenBLAS: threadpoolctl >= 3.8 ignores all but the first; overlaps are settled here."""
    release = getattr(OpenBLASController, "clear_controlling_thread", None)
    if release is not None:
        release(force=True)
