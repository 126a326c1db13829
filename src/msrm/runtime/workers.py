"""Independent jobs in parallel processes, with one BLAS thread each and results that do not depend on their number."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from msrm.runtime.bar import progress as progress_bar
from msrm.runtime.blas import blas_threads
from msrm.runtime.cores import available_cores

__all__ = ["parallel_map", "worker_count"]


def worker_count(n_jobs: int, jobs: int) -> int:
    """Processes for `jobs` jobs: `n_jobs`, or every core that this process may use for -1, never more than the jobs.

    Raises
    ------
    ValueError
        When `n_jobs` is neither -1 nor at least 1.

    Examples
    --------
    >>> worker_count(4, 3)
    3
    """
    if n_jobs != -1 and n_jobs < 1:
        raise ValueError(f"n_jobs must be -1 (every usable core) or at least 1, found {n_jobs}.")
    return max(1, min(available_cores() if n_jobs == -1 else n_jobs, jobs))


def parallel_map(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    *,
    n_jobs: int = 1,
    shared: tuple[Any, ...] = (),
    desc: str = "",
    progress: bool | None = None,
) -> list[Any]:
    """``[function(*shared, *job) for job in jobs]``, in worker processes when `n_jobs` allows more than one.

    Parameters
    ----------
    function : callable
        Importable by name (of a module, not of the running script).
    jobs : sequence of tuples
        Arguments of each job.
    n_jobs : int
        Processes; -1 for every core that this process may use.
    shared : tuple
        Leading arguments of every job, sent to each process once.
    desc, progress
        As in :func:`msrm.runtime.progress`.

    Returns
    -------
    list
        In the order of `jobs`, equal to the last bit for any `n_jobs`: every job runs with one BLAS thread.
    """
    workers = worker_count(n_jobs, len(jobs))
    if workers == 1:
        with blas_threads(1):
            return [function(*shared, *job) for job in progress_bar(jobs, desc=desc, enabled=progress)]
    with _main_hidden(), ProcessPoolExecutor(workers, _CONTEXT, _start, (function, shared)) as pool:
        results = []
        with progress_bar(len(jobs), desc=desc, enabled=progress) as bar:
            for result in pool.map(_work, jobs):
                results.append(result)
                bar.update()
        return results


# A forked child of a process with BLAS or JAX threads can deadlock; a spawned one starts clean.
_CONTEXT = multiprocessing.get_context("spawn")
_job: Callable[..., Any]


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep workers from running the user's script again: they import functions by name and need no script."""
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__}
    main.__dict__.update(dict.fromkeys(kept))
    try:
        yield
    finally:
        main.__dict__.update(kept)


def _start(function: Callable[..., Any], shared: tuple[Any, ...]) -> None:
    global _job

    def _job(job: tuple[Any, ...]) -> Any:
        with blas_threads(1):
            return function(*shared, *job)


def _work(job: tuple[Any, ...]) -> Any:
    return _job(job)
