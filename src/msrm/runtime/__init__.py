"""The machine under a fit (DESIGN 6): usable cores, BLAS thread limits, progress bars, and what was running.

`blas_threads` limits threads around our own factorizations only; `available_cores` counts what affinity and
container quota leave; `progress` draws a bar on a terminal and nothing elsewhere.
"""

from msrm.runtime.bar import progress
from msrm.runtime.blas import blas_libraries, blas_threads
from msrm.runtime.cores import affinity_cores, available_cores, cgroup_cores

__all__ = [
    "affinity_cores",
    "available_cores",
    "blas_libraries",
    "blas_threads",
    "cgroup_cores",
    "progress",
]
