"""Where a model computes: ``"auto"``, ``"cpu"`` or ``"cuda"`` becomes a placement here, once (DESIGN 4).

``"auto"`` takes the card when the CUDA plugin is installed, JAX's default platform is a GPU, and the times measured on
one H200 say that compiling pays. ``"cuda"`` without a device that works is an error, never a silent run on the CPU.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msrm.gp.backends import LatentBackend, band_seconds, dense_seconds
from msrm.gp.dense import Dense
from msrm.gp.statespace import StateSpace
from msrm.runtime import available_cores
from msrm.runtime.facts import nvidia_driver, versions
from msrm.runtime.folders import whose_else
from msrm.runtime.probe import jax_facts, probe_jax
from msrm.runtime.warn import visible_gpus
from msrm.sealed import replacing

__all__ = ["DEVICES", "Placement", "evaluation_placement", "on_device", "start_jax", "sweep_placement"]

DEVICES = ("auto", "cpu", "cuda")
_GPU = ("gpu", "cuda")
_SETTINGS = ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "XLA_FLAGS", "LD_LIBRARY_PATH")  # that change how JAX starts
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
_INSTALL = "pip install 'msrm[bayesian-cuda]'"
# Measured on one H200 (benchmarks/cuda.json): seconds to compile a fit's or a sampler's functions, and to evaluate.
_COMPILE = 20.0  # 5 s for each grid
_COMPILE_SWEEPS = 25.0  # of whole sweeps at 3,600 features, on eight cores
_EVALUATIONS = 150  # values and gradients of a usual fit
_EVALUATION = 0.004  # launches and transfers; sums over the data are the host's either way
_DENSE_SPEEDUP = 200.0  # over one core as `msrm.gp.backends` estimates it: 1.4 s for order 2,730 take 6 ms
_SWEEP = 2.0  # sweeps' time over that of a gradient
_LAUNCHES, _CHAIN_SPEEDUP = 0.007, 80.0  # of a sweep of all chains; of each chain's arithmetic over one core


@dataclass(frozen=True)
class Placement:
    """Where something runs and why.

    Attributes
    ----------
    platform : {"cpu", "cuda"}
    reason : str
    """

    platform: str
    reason: str


def evaluation_placement(device: str, backend: LatentBackend) -> Placement:
    """Where a fit and single evaluations run.

    Parameters
    ----------
    device : {"auto", "cpu", "cuda"}
    backend : Dense or StateSpace

    Raises
    ------
    ValueError
        For an unknown device.
    RuntimeError
        When CUDA is asked for and cannot be used; the message says what to do.
    """
    if device == "auto" and not isinstance(backend, Dense) and visible_gpus():
        return Placement("cpu", "a fit on a latent grid is not faster on the card: the CPU's cells have moments")
    one = evaluation_seconds(backend)
    on_card = _COMPILE + _EVALUATIONS * (_EVALUATION + one / _DENSE_SPEEDUP)
    return _placed(device, "a fit", _EVALUATIONS * one, on_card)


def sweep_placement(device: str, backend: StateSpace, counts: Mapping[str, int], missing: str) -> Placement:
    """Where Gibbs chains run; ``missing`` names what the compiled sampler lacks. Otherwise as `evaluation_placement`.

    Raises
    ------
    NotImplementedError
        When CUDA is asked for and the compiled sampler lacks something.
    """
    sweeps, chains = counts["warmup"] + counts["draws"], counts["chains"]
    if missing and device == "cuda":
        raise NotImplementedError(
            f'the compiled Gibbs sampler does not have {missing}. Sample with device="cpu", which has.'
        )
    if missing and device == "auto":
        return Placement("cpu", f"the compiled Gibbs sampler does not have {missing}")
    sweep = _SWEEP * band_seconds(backend)
    at_once = min(chains, available_cores())
    on_card = _COMPILE_SWEEPS + sweeps * (_LAUNCHES + chains * sweep / _CHAIN_SPEEDUP)
    return _placed(device, "sampling", sweeps * sweep * -(-chains // at_once), on_card)


def evaluation_seconds(backend: LatentBackend) -> float:
    """Estimated time of a value and gradient on one core."""
    if isinstance(backend, Dense):
        return dense_seconds(backend.groups, backend.n_factors)
    return band_seconds(backend) if isinstance(backend, StateSpace) else 0.0


def _placed(device: str, what: str, on_cpu: float, on_card: float) -> Placement:
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(map(repr, DEVICES))}, found {device!r}.")
    if device == "cpu":
        return Placement("cpu", "device='cpu' was asked for")
    if device == "cuda":
        problem = cuda_problem(probe=True)
        if problem:
            raise RuntimeError(
                f"device='cuda' cannot be used: {problem}. msrm doctor says more; device='cpu' always works."
            )
        return Placement("cuda", "device='cuda' was asked for")
    if not visible_gpus():
        return Placement("cpu", "no NVIDIA card is visible to this process")
    told = f"{what} is estimated to take {on_cpu:.0f} s on the CPU, {on_card:.0f} s on the card with its compilation"
    if on_cpu <= on_card:
        return Placement("cpu", told)
    problem = cuda_problem(probe=False)
    return Placement("cpu", problem) if problem else Placement("cuda", told)


def cuda_problem(*, probe: bool) -> str:
    """Why CUDA cannot be used, with the line to type; empty where it can. ``probe`` starts JAX in a child first."""
    if find_spec("jax") is None:
        return f"JAX is not installed. Run: {_INSTALL}"
    plugins = [name for name in _PLUGINS if find_spec(name) is not None]
    if not plugins:
        return f"JAX's CUDA plugin is not installed. Run: {_INSTALL}"
    if not visible_gpus():
        return "no NVIDIA card is visible to this process. Look at: nvidia-smi, CUDA_VISIBLE_DEVICES, JAX_PLATFORMS"
    facts = jax_facts()
    if facts is None:
        plugin, library = version(plugins[0].replace("_", "-")), version("jaxlib")
        if plugin != library:
            return f"the CUDA plugin {plugin} does not match jaxlib {library}. Run: {_INSTALL} --upgrade"
        found = _started() if probe else None
        if found is not None and "error" in found:
            return f"JAX does not start ({found['error']})"
        facts = found or {"platform": import_module("jax").default_backend()}
    if facts["platform"] not in _GPU:
        return f"JAX runs on {facts['platform']}. Run: unset JAX_PLATFORMS"
    return ""


def on_device(backend: LatentBackend) -> Any:
    """The backend evaluated by JAX on its default device."""
    use_compilation_cache()
    if isinstance(backend, Dense):
        return import_module("msrm.gp.native_dense").NativeDense(backend)
    return import_module("msrm.gp.native_grid").NativeGrid.of(backend)


def cache_folder(home: Path | None = None) -> Path | None:
    """This user's folder for what is compiled, made where there is none; None where anybody else could write it.

    What lies there is run as code: it is the user's alone, with versions and processor in its name.
    """
    kind = hashlib.sha256(f"{platform.processor()} {platform.machine()} {sys.version}".encode()).hexdigest()[:8]
    try:
        parent = (home or Path.home()) / ".cache" / "msrm"
        folder = parent / f"xla-{version('jaxlib')}-{kind}"
        for one in (parent, folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
        return None if whose_else(parent) or whose_else(folder) else folder
    except (OSError, RuntimeError):  # a full disk, or no home
        return None


def use_compilation_cache(home: Path | None = None) -> Path | None:
    """Let JAX keep what it compiles, unless the user set a folder or switched it off; the folder."""
    jax = import_module("jax")
    if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
        return None
    folder = cache_folder(home)
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        # Small functions too: a sampler's first sweep compiles dozens.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _started() -> dict[str, Any] | None:
    """What JAX runs on: tried in a child process, unless it has started well here under the same conditions."""
    folder, driver = cache_folder(), nvidia_driver()
    path = None if folder is None or driver is None else folder / "started.json"
    settings = {name: os.environ.get(name) for name in _SETTINGS}
    same = [platform.node(), visible_gpus(), driver, versions(), settings]
    if path is not None and _record(path) == same:
        # A start that ends this process leaves no record, so that the next is tried in a child again.
        path.unlink(missing_ok=True)
        try:
            found: dict[str, Any] | None = {"platform": import_module("jax").default_backend()}
        except RuntimeError as problem:
            return {"error": str(problem)}
    else:
        found = probe_jax()
    if path is not None and found is not None and found.get("platform") in _GPU:
        with suppress(OSError), replacing(path) as aside:
            aside.write_text(json.dumps(same))
    return found


def start_jax() -> None:
    """Start JAX's devices in this process.

    Raises
    ------
    RuntimeError
        When they do not start, with what to do; JAX itself may say nothing.
    """
    jax = import_module("jax")
    try:
        jax.devices()
    except Exception as problem:
        asked, said = os.environ.get("JAX_PLATFORMS"), str(problem) or type(problem).__name__
        where, line = (f" with JAX_PLATFORMS={asked}", "unset JAX_PLATFORMS") if asked else ("", "msrm doctor")
        raise RuntimeError(f"JAX does not start{where}: {said}. Run: {line}") from problem


def _record(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
