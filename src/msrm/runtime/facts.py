"""What was running (DESIGN 6): the facts that every archive stores, cheap enough to collect at every save.

Nothing here imports JAX or starts its devices: a plugin that does not match its driver crashes the process that
loads it (DESIGN 11). What JAX says is read from the running process when its devices are already up, and from a
child process (`msrm.runtime.probe`) when asked for.
"""

import os
import platform
import re
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from msrm.runtime.blas import blas_libraries
from msrm.runtime.cores import affinity_cores, available_cores, cgroup_cores
from msrm.runtime.probe import jax_facts, probe_jax

__all__ = ["THREAD_VARIABLES", "describe", "nvidia_driver", "nvidia_gpus"]

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_JAX_VARIABLES = (
    "JAX_PLATFORMS",
    "JAX_ENABLE_X64",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_COMPILATION_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_TF32_OVERRIDE",
    "XLA_FLAGS",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "NPROC",
)
_PACKAGES = (
    "msrm",
    "numpy",
    "scipy",
    "xarray",
    "netCDF4",
    "threadpoolctl",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "numpyro",
    "arviz",
    "distributed",
)


def describe(*, probe: bool = False) -> dict[str, Any]:
    """Describe the machine, the libraries and the settings that this process computes with.

    Parameters
    ----------
    probe : bool
        Ask a child process what JAX finds when this process has not started JAX's devices. Takes seconds.

    Returns
    -------
    dict
        ``platform``, ``processor``, ``python``, ``versions`` {package: version}, ``dtype``, ``cores``
        {available, affinity, quota}, ``blas`` [{library, version, architecture, threads, layer, file}],
        ``environment`` {variable: value} of everything that sets threads, precision or devices, ``gpus`` (names of
        NVIDIA cards the system shows), ``driver`` (NVIDIA's version or None), ``jax`` (None when not in use, else
        {platform, devices, x64, matmul_precision, ...}), ``xla_threads`` (None when JAX is not in use) and ``git``
        {package, working_folder}, each {commit, modified} or None. Every value is plain (JSON).

    Examples
    --------
    >>> describe()["dtype"]
    'float64'
    """
    jax = probe_jax() if probe and jax_facts() is None else jax_facts()
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions(),
        "dtype": "float64",
        "cores": {"available": available_cores(), "affinity": affinity_cores(), "quota": cgroup_cores()},
        "blas": [_library(library) for library in blas_libraries()],
        "environment": {name: os.environ[name] for name in THREAD_VARIABLES + _JAX_VARIABLES if name in os.environ},
        "gpus": nvidia_gpus(),
        "driver": nvidia_driver(),
        "jax": jax,
        "xla_threads": None if jax is None else int(os.environ.get("NPROC", affinity_cores())),
        "git": {"package": _package_git(), "working_folder": _git(Path.cwd())},
    }


@cache
def versions() -> dict[str, str]:
    """Installed versions of the package and of what its numbers depend on."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def nvidia_gpus(root: Path = Path("/")) -> list[str]:
    """Models of the NVIDIA cards that the driver shows, without starting CUDA; those hidden from this process too."""
    models = []
    for card in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        lines = dict(line.split(":", 1) for line in card.read_text().splitlines() if ":" in line)
        models.append(lines.get("Model", "NVIDIA").strip())
    # Containers and Windows' Linux layer show a device file and no driver folder.
    return models or ["NVIDIA GPU" for _ in sorted((root / "dev").glob("nvidia[0-9]*"))]


def nvidia_driver(root: Path = Path("/")) -> str | None:
    """Version of the NVIDIA driver that is loaded, None without one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Module\s+(?:for \S+\s+)?(\d+(?:\.\d+)+)", text)
    return None if found is None else found[1]


def _library(library: Any) -> dict[str, Any]:
    """One BLAS library as plain facts."""
    return {
        "library": library.internal_api,
        "version": library.version,
        "architecture": getattr(library, "architecture", None),
        "threads": library.num_threads,
        "layer": getattr(library, "threading_layer", None),
        "file": Path(library.filepath).name,
    }


@cache
def _processor() -> str:
    """The processor's marketing name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _package_git() -> dict[str, Any] | None:
    """The package's own checkout; None for an installed package, whose folder may lie in a user's checkout."""
    folder = Path(__file__).parent
    return None if "site-packages" in folder.parts else _git(folder)


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the checkout that holds `folder`, None outside one."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    commit = next((line.split()[-1] for line in answer if line.startswith("# branch.oid")), None)
    return {"commit": commit, "modified": any(not line.startswith("#") for line in answer)}
