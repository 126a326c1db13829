"""Gibbs and NUTS chains of the card against chains of the CPU on invariants, and the card's draws read on the CPU."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import msrm
from msrm.diagnostics import block_statistics

pytestmark = pytest.mark.cuda

DRAW = """
import sys
import msrm
sampler, device, path = sys.argv[1:]
recording, _ = msrm.simulate(features=6, seconds=60.0, factors=1)
lag = msrm.Free(0.2, bounds=(-1.5, 1.5), prior=msrm.Normal(0.3, 0.5))
responses = {name: msrm.Identity() for name in recording.modalities} | {"rating": msrm.Gaussian(width=0.6, lag=lag)}
fit = msrm.GPMSRM(1, responses, likelihood="statespace", device="cpu", n_starts=1, progress=False).fit(recording)
fit.device = device
settings = {"chain_method": "vectorized"} if sampler == "nuts" else {}
counts = {"warmup": 200, "draws": 400} if sampler == "gibbs" else {"warmup": 150, "draws": 200}
draws = fit.sample(recording, sampler=sampler, chains=4, seed=3, progress=False, **counts, **settings)
draws.save(path)
"""
READ = """
import json, sys
import msrm
draws = msrm.open_fit(sys.argv[1])
print(json.dumps(draws.infer_latent()["run-1"]["mean"].values.ravel().tolist()))
"""


def alone(script, *arguments, cpu):
    """What a process of its own prints, with JAX on the CPU or as it comes."""
    environment = os.environ | ({"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if cpu else {})
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def invariants(draws):
    """What rotation and sign do not touch, (quantity, chain, draw); scales as logarithms."""
    posterior, found = draws.posterior, []
    for name in ("log_likelihood_marginal", "noise", "response", "offset", "loading_norm2"):
        values = posterior[name].values
        values = np.log(values) if name in ("noise", "loading_norm2") else values
        found.append(np.moveaxis(values.reshape(*values.shape[:2], -1), -1, 0))
    return np.concatenate(found)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sampler", ["gibbs", "nuts"])
def test_chains_agree_and_archives_travel(report, tmp_path, sampler):
    if jax.default_backend() == "cpu":
        pytest.skip("JAX runs on the CPU")
    draws = {}
    for device in ("cpu", "cuda"):
        path = tmp_path / f"{device}.nc"
        alone(DRAW, sampler, device, path, cpu=device == "cpu")
        draws[device] = msrm.open_fit(path)
    one, other = (invariants(draws[device]) for device in ("cpu", "cuda"))
    scores = []
    for power in (1, 2):
        centre = one.mean((1, 2), keepdims=True) if power == 2 else 0.0
        moments = [np.ascontiguousarray((values - centre) ** power) for values in (one, other)]
        errors = [x.var((1, 2)) / block_statistics(x)["ess_bulk"] for x in moments]
        scores.append((moments[0].mean((1, 2)) - moments[1].mean((1, 2))) / np.sqrt(sum(errors)))
    largest = float(np.abs(scores).max())
    # Some 120 scores: one in 10^3 such tests passes 4.5 standard errors.
    report[f"{sampler} chains: means and variances of invariants, standard errors"] = {
        "difference": largest,
        "tolerance": 4.5,
    }
    assert largest < 4.5
    read = json.loads(alone(READ, tmp_path / "cuda.nc", cpu=True))
    np.testing.assert_array_equal(read, draws["cuda"].infer_latent()["run-1"]["mean"].values.ravel())
