"""Independent jobs in parallel processes, with one BLAS thread each and results that do not depend on their number."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from msrm.runtime.bar import progress as progress_bar
from msrm.runtime.blas import blas_threads
from msrm.runtime.cores import available_cores

__all__ = ["Workers", "accept_interrupts", "clean_start", "parallel_map", "uninterrupted", "worker_count"]


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
    if isinstance(n_jobs, bool) or not isinstance(n_jobs, int | np.integer) or (n_jobs != -1 and n_jobs < 1):
        raise ValueError(f"n_jobs must be -1 (every usable core) or an integer of at least 1, found {n_jobs!r}.")
    return max(1, min(available_cores() if n_jobs == -1 else n_jobs, jobs))


class Workers:
    """Runs ``function(*shared, *job)`` for lists of jobs, in worker processes when there may be more than one.

    Parameters
    ----------
    function : callable
        Importable by name (of a module, not of the running script).
    n_jobs : int
        Processes; -1 for every core that this process may use.
    shared : tuple
        Leading arguments of every job, sent to each process once.

    Notes
    -----
    A context manager: processes start with the first list that needs them and end with the block. Results are equal to
    the last bit for any number of processes: every job runs with one BLAS thread.
    """

    def __init__(self, function: Callable[..., Any], *, n_jobs: int = 1, shared: tuple[Any, ...] = ()) -> None:
        self._function, self._shared, self._n_jobs = function, shared, n_jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def map(self, jobs: Sequence[tuple[Any, ...]], *, desc: str = "", progress: bool | None = None) -> list[Any]:
        """Results in the order of `jobs`; `desc` and `progress` as in :func:`msrm.runtime.progress`."""
        if worker_count(self._n_jobs, len(jobs)) == 1:
            with blas_threads(1):
                return [self._function(*self._shared, *job) for job in progress_bar(jobs, desc=desc, enabled=progress)]
        if self._pool is None:
            most = worker_count(self._n_jobs, available_cores() if self._n_jobs == -1 else self._n_jobs)
            self._pool = ProcessPoolExecutor(most, _CONTEXT, _start, (self._function, self._shared))
        results = []
        # Processes are started while jobs are handed in.
        with clean_start():
            handed_in = self._pool.map(_work, jobs)
            # The pool watches a process from the next job on: without one, nobody would notice the last one's death.
            self._pool.submit(int)
        try:
            with progress_bar(len(jobs), desc=desc, enabled=progress) as bar:
                for result in handed_in:
                    results.append(result)
                    bar.update()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "a worker process was ended from outside, as systems do that run out of memory. Ask for fewer "
                "processes with n_jobs, or free memory, and start again"
            ) from error
        return results


def parallel_map(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    *,
    n_jobs: int = 1,
    shared: tuple[Any, ...] = (),
    desc: str = "",
    progress: bool | None = None,
    stop: Callable[[], None] | None = None,
) -> list[Any]:
    """``[function(*shared, *job) for job in jobs]`` by :class:`Workers` that end with it.

    ``stop`` tells jobs to end when one of them failed or this process was interrupted: all are waited for.
    """
    with Workers(function, n_jobs=worker_count(n_jobs, len(jobs)), shared=shared) as workers:
        try:
            return workers.map(jobs, desc=desc, progress=progress)
        except BaseException:
            if stop is not None:
                stop()
            raise


# A forked child of a process with BLAS or JAX threads can deadlock; a spawned one starts clean.
_MASKS = hasattr(signal, "pthread_sigmask")  # not on Windows
_INTERRUPTED = 130
_CONTEXT = multiprocessing.get_context("spawn")
_job: Callable[..., Any]


@contextmanager
def clean_start() -> Iterator[None]:
    """Processes started in the block do not run the user's script again, and meet Ctrl-C in `accept_interrupts` only.

    They import functions by name and need no script; an interrupt of their imports would print a traceback each.
    """
    main = sys.modules["__main__"]
    kept: dict[str, Any] = {name: main.__dict__[name] for name in ("__spec__", "__file__") if name in main.__dict__}
    main.__dict__.update(dict.fromkeys(kept))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if _MASKS else None
    try:
        yield
    finally:
        main.__dict__.update(kept)
        if before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def accept_interrupts() -> None:
    """In a process of `clean_start`: from here on Ctrl-C interrupts; one that came before ends the process."""
    try:
        if _MASKS:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    except KeyboardInterrupt:
        os._exit(_INTERRUPTED)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """A block whose changes belong together: Ctrl-C within is heard at its end."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    heard: list[Any] = []
    signal.signal(signal.SIGINT, lambda _, frame: heard.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        before(signal.SIGINT, heard[0])


def _start(function: Callable[..., Any], shared: tuple[Any, ...]) -> None:
    global _job
    accept_interrupts()

    def _job(job: tuple[Any, ...]) -> Any:
        with blas_threads(1):
            return function(*shared, *job)


def _work(job: tuple[Any, ...]) -> Any:
    return _job(job)
