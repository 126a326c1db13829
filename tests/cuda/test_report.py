"""The report of a qualification, rehearsed on the CPU against itself: whole at every moment, whoever kills the run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("jax")


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_killed_qualification_leaves_what_it_found(tmp_path, workers):
    path = tmp_path / "report.json"
    environment = os.environ | {"MSRM_CUDA_REPORT": str(path), "MSRM_CUDA_REHEARSAL": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    tests = Path(__file__).parent / "test_qualification.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", workers, str(tests)]
    with subprocess.Popen([*command, "-k", "factorizations"], env=environment, stdout=subprocess.DEVNULL) as run:
        until = time.monotonic() + 120.0
        while not path.exists() and run.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        run.kill()
    found = json.loads(path.read_text())
    assert found["rehearsal"] is True
    assert found["runtime"]["jax"]["platform"] == "cpu"
    assert found["differences"]
    for name, one in found["differences"].items():
        assert 0.0 <= one["difference"] <= one["tolerance"], name
