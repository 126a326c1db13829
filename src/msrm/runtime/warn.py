"""Warnings about the machine that are worth a line, each given once with the line to type (DESIGN 6)."""

import os
import sys
import warnings
from pathlib import Path

from msrm.runtime.blas import blas_libraries
from msrm.runtime.cores import available_cores
from msrm.runtime.facts import nvidia_gpus
from msrm.runtime.probe import jax_facts

__all__ = ["GuardWarning", "findings", "guard"]

_THREAD_VARIABLE = {"openblas": "OPENBLAS_NUM_THREADS", "mkl": "MKL_NUM_THREADS", "blis": "BLIS_NUM_THREADS"}
_LOW_PRECISION = {"bfloat16", "tensorfloat32", "fastest", "default", "bfloat16_3x", "high", "F16_F16_F32"}
_given: set[str] = set()


class GuardWarning(UserWarning):
    """The machine is set up so that a fit runs slower or less precisely than it could."""


def findings() -> dict[str, str]:
    """What `guard` would warn about now, {condition: message}, whether it was said before or not."""
    found = {}
    cores = available_cores()
    for library in blas_libraries():
        if (threads := library.num_threads) > cores:
            variable = _THREAD_VARIABLE.get(library.internal_api, "OMP_NUM_THREADS")
            found["threads"] = (
                f"{library.internal_api} ({Path(library.filepath).name}) starts {threads} threads but this process may "
                f"use {cores} cores; many small factorizations then run ten times slower. "
                f"Before starting Python: export {variable}={cores}"
            )
    jax = jax_facts()
    if jax is not None and jax["platform"] == "cpu" and (gpus := visible_gpus()):
        found["gpu"] = (
            f"{gpus[0]} is visible but JAX computes on the CPU. Run: pip install 'msrm[bayesian-cuda]' (to keep the "
            "CPU: export JAX_PLATFORMS=cpu); msrm doctor says what is missing"
        )
    if jax is not None and not jax["x64"]:
        found["float32"] = (
            "JAX computes in float32, which loses the likelihood. "
            "Before any JAX array: jax.config.update('jax_enable_x64', True), or export JAX_ENABLE_X64=1"
        )
    if jax is not None and jax["matmul_precision"] in _LOW_PRECISION:
        found["tf32"] = (
            f"JAX multiplies matrices with precision {jax['matmul_precision']!r}: TF32 or bfloat16 can enter. "
            "Type: jax.config.update('jax_default_matmul_precision', 'highest')"
        )
    elif jax is not None and os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        found["tf32"] = "NVIDIA_TF32_OVERRIDE=1 lets TF32 enter matrix products. Type: unset NVIDIA_TF32_OVERRIDE"
    return found


def guard() -> None:
    """Warn, once in a process for each, about settings that cost speed or precision.

    The conditions: more BLAS threads than the cores this process may use, a GPU that is visible while JAX computes
    on the CPU, JAX in float32, and matrix products in TF32 or bfloat16. Nothing is changed.

    Warns
    -----
    GuardWarning
        Each with the line to type.
    """
    for condition, message in findings().items():
        if condition not in _given:
            _given.add(condition)
            warnings.warn(message, GuardWarning, stacklevel=3)


def visible_gpus() -> list[str]:
    """NVIDIA cards that this process may use: none where the user hid them or asked JAX for the CPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1") or sys.platform == "darwin":
        return []
    if os.environ.get("JAX_PLATFORMS", "").strip().lower() == "cpu":
        return []
    return nvidia_gpus()
