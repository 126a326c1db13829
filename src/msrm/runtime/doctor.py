"""``msrm doctor``: what this machine offers a fit, what is wrong with it, and the line to type for each problem.

`diagnose` collects the facts, JAX's in a child process; every check is a function of plain facts, so each condition
can be simulated. A device that was asked for and is not there is an error, never a silent run on the CPU (DESIGN 11).
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import scipy.linalg  # noqa: F401  (loads its own BLAS, to be counted with NumPy's)
import xarray as xr
from packaging.requirements import Requirement

from msrm import archive
from msrm.runtime.facts import THREAD_VARIABLES, describe
from msrm.runtime.folders import OTHER_CACHE, whose_else
from msrm.runtime.warn import findings

__all__ = ["Finding", "diagnose"]

# The oldest driver that runs CUDA's major version (NVIDIA's release notes, CUDA toolkit and driver table).
_OLDEST_DRIVER = {"13": 580, "12": 525}
_CARD_FIELDS = ("name", "driver_version", "memory.total", "memory.free", "memory.used")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes
    ----------
    topic : str
        What was looked at.
    level : {"ok", "warning", "error"}
        A warning costs speed or memory, an error stops something that was asked for.
    found : str
        What was found.
    line : str
        What to type, empty when there is nothing to do.
    """

    topic: str
    level: Literal["ok", "warning", "error"]
    found: str
    line: str = ""


def diagnose(*, probe: bool = True) -> list[Finding]:
    """Look at packages, cores, BLAS, archives, and JAX with its devices.

    Parameters
    ----------
    probe : bool
        Start JAX in a child process to see its devices; without it only what is installed is looked at.

    Returns
    -------
    list of Finding
    """
    facts = describe(probe=probe)
    machine = Finding("machine", "ok", f"{facts['processor']}, {facts['platform']}, Python {facts['python']}")
    return [
        machine,
        *package_findings(_requirements(), _installed),
        *core_findings(facts),
        archive_finding(),
        *jax_findings(facts, cards(), probed=probe),
    ]


def package_findings(requirements: list[str], installed: Any) -> Iterator[Finding]:
    """Versions against the package's own requirements; `installed` gives a package's version or None."""
    missing: dict[str, list[str]] = {}
    for requirement in map(Requirement, requirements):
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        group = extra[1] if extra else ""
        missing.setdefault(group, [])
        if requirement.name == "msrm":
            continue
        version = installed(requirement.name)
        # jax[cuda13] means a plugin package of its own.
        plugins = [f"jax-{name}-plugin" for name in requirement.extras if name.startswith("cuda")]
        missing[group] += [f"{name} is missing" for name in plugins if installed(name) is None]
        if version is None:
            missing[group].append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            missing[group].append(f"{requirement.name} {version} does not fit {requirement.specifier}")
    for group, problems in missing.items():
        if group in ("dev", "docs"):
            continue
        topic = f"extra {group}" if group else "packages"
        line = f"pip install --upgrade 'msrm[{group}]'" if group else "pip install --upgrade msrm"
        absent = any(problem.endswith("is missing") for problem in problems)
        if not problems:
            yield Finding(topic, "ok", "complete")
        elif not (group and absent):
            yield Finding(topic, "error", "; ".join(problems), line)
        else:
            yield Finding(topic, "ok", f"not installed ({'; '.join(problems)})", line)


def core_findings(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Usable cores, BLAS libraries and their threads."""
    cores = facts["cores"]
    quota = "no container quota" if cores["quota"] is None else f"container quota {cores['quota']:g}"
    yield Finding("cores", "ok", f"{cores['available']} usable (affinity {cores['affinity']}, {quota})")
    for library in facts["blas"]:
        yield Finding(
            "BLAS",
            "ok",
            f"{library['library']} {library['version']} for {library['architecture']}, {library['threads']} threads "
            f"({library['file']})",
        )
    given = {name: value for name, value in facts["environment"].items() if name in THREAD_VARIABLES}
    yield Finding("thread variables", "ok", ", ".join(f"{k}={v}" for k, v in given.items()) or "none set")
    if "threads" in (found := findings()):
        message, line = found["threads"].rsplit(": ", 1)
        yield Finding("BLAS threads", "warning", message.removesuffix(". Before starting Python"), line)


def archive_finding() -> Finding:
    """Write and read a small archive in the temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = archive.write_tree(
                xr.DataTree(xr.Dataset({"x": 1.0 / 3})), Path(folder) / "doctor.nc", kind="doctor"
            )
            intact = float(archive.read_tree(path)["x"]) == 1.0 / 3
        except (OSError, ValueError, RuntimeError) as error:
            return Finding("archive", "error", f"could not write one: {error}", "export HDF5_USE_FILE_LOCKING=FALSE")
    if not intact:
        return Finding(
            "archive", "error", "a number came back changed", "pip install --upgrade --force-reinstall netCDF4"
        )
    return Finding("archive", "ok", "written, sealed and read back")


def jax_findings(facts: Mapping[str, Any], smi: list[dict[str, Any]], *, probed: bool = True) -> Iterator[Finding]:
    """JAX, its devices, precision and memory; `facts` is `describe`'s answer, `smi` that of `cards`."""
    versions, environment, jax = facts["versions"], facts["environment"], facts["jax"]
    if "jax" not in versions:
        yield Finding("JAX", "ok", "not installed: R-MSRM only", "pip install 'msrm[bayesian]'")
        if facts["gpus"]:
            yield Finding("GPU", "warning", f"{facts['gpus'][0]} is not used", "pip install 'msrm[bayesian-cuda]'")
        return
    yield from _plugin_findings(versions, smi)
    wanted = environment.get("JAX_PLATFORMS", "")
    if not probed:
        yield Finding("JAX", "ok", f"{versions['jax']}, devices not looked at")
    elif jax is None or "error" in jax:
        reason = "no answer" if jax is None else jax["error"]
        line = "unset JAX_PLATFORMS" if wanted else "pip install --upgrade --force-reinstall 'msrm[bayesian]'"
        line = "unset CUDA_VISIBLE_DEVICES" if wanted not in ("", "cpu") and _hidden(environment) else line
        yield Finding("JAX", "error", reason, line)
    else:
        yield from _device_findings(facts, smi)
    yield from _precision_findings(environment, jax or {})
    yield from _cache_findings(environment)


def _plugin_findings(versions: Mapping[str, str], smi: list[dict[str, Any]]) -> Iterator[Finding]:
    """CUDA plugin against jaxlib and driver."""
    for name, version in versions.items():
        match = re.fullmatch(r"jax-cuda(\d+)-plugin", name)
        if match is None:
            continue
        if version != versions.get("jaxlib"):
            found = f"{name} {version} does not match jaxlib {versions.get('jaxlib')}; it can crash on import"
            yield Finding("CUDA plugin", "error", found, "pip install --upgrade 'msrm[bayesian-cuda]'")
        else:
            yield Finding("CUDA plugin", "ok", f"{name} {version}")
        oldest = _OLDEST_DRIVER.get(match[1], 0)
        for card in smi[:1]:
            driver = card["driver_version"]
            if not driver[:1].isdigit():
                yield Finding("driver", "warning", f"nvidia-smi does not tell its version ({driver})", "nvidia-smi")
            elif int(driver.split(".")[0]) < oldest:
                found = f"driver {driver} is older than CUDA {match[1]} needs ({oldest})"
                line = f"update the NVIDIA driver to {oldest} or newer"
                yield Finding("driver", "error", found, line)
            else:
                yield Finding("driver", "ok", f"{driver} (CUDA {match[1]} needs {oldest})")


def _device_findings(facts: Mapping[str, Any], smi: list[dict[str, Any]]) -> Iterator[Finding]:
    """Devices JAX found against those asked for and those that are there."""
    jax, environment = facts["jax"], facts["environment"]
    names = ", ".join(sorted({device["kind"] for device in jax["devices"]}))
    found = f"{jax['version']} on {jax['platform']}: {len(jax['devices'])} x {names}"
    wanted = [name for name in environment.get("JAX_PLATFORMS", "").lower().split(",") if name]
    plugin = any(name.startswith("jax-cuda") for name in facts["versions"])
    on_gpu = jax["platform"] in ("gpu", "cuda")
    if not on_gpu and {"cuda", "gpu"} & set(wanted[:1]):
        asked = f"JAX_PLATFORMS={','.join(wanted)} asks for a GPU"
        yield Finding("JAX", "error", f"{found}, but {asked}", "unset JAX_PLATFORMS")
    elif on_gpu or not facts["gpus"]:
        yield Finding("JAX", "ok", found)
    elif wanted[:1] == ["cpu"]:
        yield Finding("JAX", "ok", f"{found} (asked for; {facts['gpus'][0]} is idle)", "unset JAX_PLATFORMS")
    elif _hidden(environment):
        yield Finding(
            "JAX", "ok", f"{found} (CUDA_VISIBLE_DEVICES hides {facts['gpus'][0]})", "unset CUDA_VISIBLE_DEVICES"
        )
    else:
        line = "python -c 'import jax; jax.devices(\"cuda\")'" if plugin else "pip install 'msrm[bayesian-cuda]'"
        told = f": {jax['warnings']}" if jax.get("warnings") else ""
        yield Finding("JAX", "warning", f"{found}, although {facts['gpus'][0]} is there{told}", line)
    if on_gpu:
        yield from _memory_findings(environment, smi)
    yield Finding("XLA threads", "ok", f"{facts['xla_threads']} on the CPU (NPROC sets them)")


def _hidden(environment: Mapping[str, str]) -> bool:
    """Whether the user hid every NVIDIA card from this process."""
    return environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")


def _memory_findings(environment: Mapping[str, str], smi: list[dict[str, Any]]) -> Iterator[Finding]:
    """Free memory of the cards against what JAX takes at its start."""
    takes = environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() not in ("false", "0")
    told = environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75")
    try:
        share = float(told)
    except ValueError:
        found = f"XLA_PYTHON_CLIENT_MEM_FRACTION={told} is not a number, and JAX does not start with it"
        yield Finding("GPU memory", "error", found, "unset XLA_PYTHON_CLIENT_MEM_FRACTION")
        return
    share = share if share <= 1 else share / 100
    for number, card in enumerate(smi):
        free, total = card["memory.free"], card["memory.total"]
        found = f"card {number}: {free / 1024:.1f} of {total / 1024:.1f} GiB free"
        if not total > 0:
            yield Finding("GPU memory", "warning", f"card {number}: nvidia-smi does not tell its memory", "nvidia-smi")
        elif takes and free < share * total:
            found += f"; JAX takes {share:.0%} at its start, which is not there"
            yield Finding("GPU memory", "warning", found, "export XLA_PYTHON_CLIENT_PREALLOCATE=false")
        elif takes:
            found += f"; JAX takes {share:.0%} at its start (on a shared card, take it as needed instead)"
            yield Finding("GPU memory", "ok", found, "export XLA_PYTHON_CLIENT_PREALLOCATE=false")
        else:
            yield Finding("GPU memory", "ok", f"{found}; JAX takes it as needed")


def _precision_findings(environment: Mapping[str, str], jax: Mapping[str, Any]) -> Iterator[Finding]:
    """Settings that let float32, TF32 or bfloat16 enter."""
    if environment.get("JAX_ENABLE_X64", "1").lower() in ("0", "false", "off", "no"):
        yield Finding("float64", "warning", "JAX_ENABLE_X64 switches it off", "unset JAX_ENABLE_X64")
    else:
        yield Finding("float64", "ok", "on in every msrm computation")
    precision = environment.get("JAX_DEFAULT_MATMUL_PRECISION") or jax.get("matmul_precision")
    if precision and precision not in ("highest", "float32"):
        found = f"JAX_DEFAULT_MATMUL_PRECISION={precision} rounds float32 products"
        yield Finding("matrix products", "warning", found, "unset JAX_DEFAULT_MATMUL_PRECISION")
    elif environment.get("NVIDIA_TF32_OVERRIDE") == "1":
        yield Finding("matrix products", "warning", "NVIDIA_TF32_OVERRIDE=1 lets TF32 in", "unset NVIDIA_TF32_OVERRIDE")
    else:
        yield Finding("matrix products", "ok", "full precision")


def _cache_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """A compilation cache that others can write is code execution: JAX's own, or those of `msrm.gp.devices`."""
    given = environment.get("JAX_COMPILATION_CACHE_DIR")
    own = Path.home() / ".cache" / "msrm"
    for folder in [Path(given)] if given else [own, *sorted(own.glob("xla-*"))]:
        if not folder.exists():
            continue
        if not folder.is_dir():
            yield Finding("compilation cache", "error", f"{folder} is no folder", OTHER_CACHE)
        elif others := whose_else(folder):
            found, line = others
            yield Finding("compilation cache", "error", f"{found}, and what lies there is run as code", line)
        elif folder != own:
            yield Finding("compilation cache", "ok", str(folder))


def cards() -> list[dict[str, Any]]:
    """Name, driver and memory (MiB) of every NVIDIA card, by nvidia-smi; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_CARD_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in answer.strip().splitlines():
        card: dict[str, Any] = dict(zip(_CARD_FIELDS, (cell.strip() for cell in line.split(",")), strict=False))
        for name in _CARD_FIELDS[2:]:
            card[name] = float(card[name]) if card[name].replace(".", "").isdigit() else float("nan")
        found.append(card)
    return found


def _requirements() -> list[str]:
    """The package's own requirements; none for a source folder that was never installed."""
    try:
        return metadata.requires("msrm") or []
    except metadata.PackageNotFoundError:
        return []


def _installed(name: str) -> str | None:
    """The installed version of a package, None when it is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
