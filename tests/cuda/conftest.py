"""Both platforms in one process, and the report that a qualification leaves."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from msrm import runtime
from msrm.gp import jax_settings  # noqa: F401  float64 before the first array

# MSRM_CUDA_REHEARSAL=1 compares the CPU with itself, to try the tests where there is no GPU.
REHEARSAL = bool(os.environ.get("MSRM_CUDA_REHEARSAL"))


def _accelerator() -> Any:
    try:
        return jax.devices("cpu" if REHEARSAL else "cuda")[0]
    except RuntimeError:
        return None


@pytest.fixture(scope="session")
def both() -> Callable[[Callable[[], Any]], tuple[Any, Any]]:
    """Call with a function: its results as NumPy arrays on the CPU and on the GPU."""
    accelerator = _accelerator()
    if accelerator is None:
        pytest.skip("no NVIDIA GPU is visible to JAX")

    def run(function: Callable[[], Any]) -> tuple[Any, Any]:
        results = []
        for device in (jax.devices("cpu")[0], accelerator):
            with jax.default_device(device):
                results.append(jax.tree.map(np.asarray, function()))
        return results[0], results[1]

    return run


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Every difference by name; all workers' are written to MSRM_CUDA_REPORT at the end, where that is set."""
    return _differences(pytestconfig)


def _differences(config: Any) -> dict[str, Any]:
    """Of this process; a worker of pytest-xdist hands its own over when it ends."""
    store = getattr(config, "workeroutput", None)
    if store is None:
        store = config.__dict__.setdefault("_msrm_cuda", {})
    return store.setdefault("differences", {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """Collect a worker's differences, and what it ran on."""
    output = getattr(node, "workeroutput", {})
    _differences(node.config).update(output.get("differences", {}))
    if "runtime" in output:
        node.config._msrm_runtime = output["runtime"]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the report, once, from the process that sees everything."""
    config: Any = session.config
    if not _differences(config):
        return
    described = json.loads(json.dumps(runtime.describe(), default=str))
    if hasattr(config, "workeroutput"):
        config.workeroutput["runtime"] = described
    elif path := os.environ.get("MSRM_CUDA_REPORT"):
        made = {
            "runtime": getattr(config, "_msrm_runtime", described),
            "rehearsal": REHEARSAL,
            "differences": dict(sorted(_differences(config).items())),
        }
        Path(path).write_text(json.dumps(made, indent=1) + "\n")
