"""Independent pieces of one computation in threads of this process, where the user lets BLAS have more than one.

Each piece then runs with one BLAS thread, so results do not depend on the number of threads. Inside `blas_threads(1)`,
in worker processes and under ``OPENBLAS_NUM_THREADS=1`` everything stays in the calling thread.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msrm.runtime.blas import blas_libraries, blas_threads

__all__ = ["in_threads"]


def in_threads[T](jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Results of `jobs`, in order; as many at a time as BLAS may use threads here.

    Parameters
    ----------
    jobs : sequence of callable
        Spend their time outside the interpreter's lock (LAPACK, BLAS, large NumPy operations).

    Examples
    --------
    >>> in_threads([lambda: 1, lambda: 2])
    [1, 2]
    """
    if len(jobs) > 1:
        count = min([len(jobs), *(library.get_num_threads() or 1 for library in blas_libraries())])
        if count > 1:
            with blas_threads(1), ThreadPoolExecutor(count) as pool:
                return list(pool.map(lambda job: job(), jobs))
    return [job() for job in jobs]
