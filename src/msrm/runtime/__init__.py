"""The machine under a fit (DESIGN 6): usable cores, BLAS thread limits, progress bars, and what was running.

`blas_threads` limits threads around our own factorizations only; `available_cores` counts what affinity and
container quota leave; `progress` draws a bar on a terminal and nothing elsewhere; `describe` is what every archive
stores; `guard` warns once about each setting that costs speed or precision; `diagnose` is ``msrm doctor``.
"""

from msrm.runtime.bar import progress
from msrm.runtime.blas import blas_libraries, blas_threads
from msrm.runtime.cores import affinity_cores, available_cores, cgroup_cores
from msrm.runtime.facts import describe, nvidia_gpus
from msrm.runtime.probe import jax_facts, probe_jax
from msrm.runtime.warn import GuardWarning, guard

__all__ = [
    "GuardWarning",
    "affinity_cores",
    "available_cores",
    "blas_libraries",
    "blas_threads",
    "cgroup_cores",
    "describe",
    "guard",
    "jax_facts",
    "nvidia_gpus",
    "probe_jax",
    "progress",
]
