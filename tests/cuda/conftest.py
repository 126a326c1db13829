"""Both platforms in one process, and the report that a qualification leaves."""

import json
import os
from collections.abc import Callable
from functools import cache
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


@pytest.fixture
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A test's differences by name; with its outcome they travel into MSRM_CUDA_REPORT, where that is set."""
    made: dict[str, Any] = {}
    request.node.user_properties.append(("differences", made))
    return made


@cache
def _described() -> dict[str, Any]:
    """What this process computes on, as plain numbers and texts: workers of pytest-xdist send them."""
    return json.loads(json.dumps(runtime.describe(), default=str))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Say with a test's differences what they were found on."""
    if call.when == "call" and dict(item.user_properties).get("differences"):
        item.user_properties.append(("runtime", _described()))
    return (yield)


_found: dict[str, Any] = {"runtime": None, "rehearsal": REHEARSAL, "differences": {}}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write all differences anew after every test, aside and renamed: a run that is killed leaves what it found."""
    path, told = os.environ.get("MSRM_CUDA_REPORT"), dict(report.user_properties)
    if not path or "PYTEST_XDIST_WORKER" in os.environ or report.when != "call" or "runtime" not in told:
        return
    _found["runtime"] = told["runtime"]
    _found["differences"] = dict(sorted((_found["differences"] | told["differences"]).items()))
    aside = Path(f"{path}.part")
    aside.write_text(json.dumps(_found, indent=1) + "\n")
    aside.replace(path)
