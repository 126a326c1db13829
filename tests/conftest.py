"""Shared fixtures: where the reference answers and recordings lie, and small recordings made on the spot."""

import importlib.util
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


def shared_path(*parts: str) -> Path:
    """The path of a file beside the checkout; skips the test, by name, when it is not there."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared/{'/'.join(parts)} is not beside this checkout")
    return path


def streams_of(archive: Path) -> dict[str, dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]]:
    """{participant: {run: {modality: (values, times)}}} of a workload or reference .npz."""
    data: dict[str, dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]] = {}
    with np.load(archive) as file:
        for key in file.files:
            if key.startswith("values/"):
                _, participant, run, modality = key.split("/")
                pair = (file[key], file["times/" + key.removeprefix("values/")])
                data.setdefault(participant, {}).setdefault(run, {})[modality] = pair
    return data


@pytest.fixture(scope="session")
def reference():
    """Call with a file name of shared/reference: JSON is parsed, .npz gives nested (values, times)."""

    def load(name: str):
        path = shared_path("reference", name)
        return json.loads(path.read_text()) if path.suffix == ".json" else streams_of(path)

    return load


@pytest.fixture(scope="session")
def workload() -> ModuleType:
    """The module shared/workload/recording.py, the generator of every quoted figure."""
    path = shared_path("workload", "recording.py")
    spec = importlib.util.spec_from_file_location("workload_recording", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def forrest() -> Path:
    """The BIDS folder shared/recordings/forrest."""
    return shared_path("recordings", "forrest")


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """A process that hears Ctrl-C: background jobs of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
