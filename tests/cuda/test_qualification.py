"""The qualification of DESIGN 7: the same numbers on the CPU and on the GPU, within tolerances set by conditioning."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrm
from msrm.gp.blocks import log_evidence
from msrm.gp.cyclic import Parallel
from msrm.gp.dense import Dense
from msrm.gp.jax_backend import NativeStateSpace
from msrm.gp.jax_cholesky import cholesky, diagnose, log_determinant_and_solve
from msrm.gp.native_dense import NativeDense
from msrm.gp.statespace import StateSpace
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.responses import Bateman, DoubleGamma, Free, Gamma, Gaussian, Identity, Sampled

pytestmark = pytest.mark.cuda

FAMILIES = {
    "identity": Identity(),
    "gaussian": Gaussian(Free(0.8, (0.3, 1.5)), Free(1.0, (-1.0, 2.0))),
    "gamma": Gamma(Free(3.0, (2.0, 5.0)), Free(0.4, (0.3, 0.6)), Free(0.2, (0.0, 0.5))),
    "double gamma": DoubleGamma(6.0, Free(0.3, (0.25, 0.4)), 12.0, 0.3, Free(0.2, (0.0, 0.4)), 0.0),
    "bateman": Bateman(Free(0.7, (0.5, 1.0)), Free(2.0, (1.0, 3.0)), 0.0),
    "sampled": Sampled((0.0, 0.5, 1.5), (0.0, 1.0, 0.0)),
}


def spd(order, condition, seed=0):
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.standard_normal((order, order)))[0]
    matrix = (vectors * np.geomspace(1 / condition, 1, order)) @ vectors.T
    return (matrix + matrix.T) / 2


def close(report, name, one, other, tolerance):
    """Compare relative to the largest entry, and keep the difference for the report."""
    one, other = np.asarray(one), np.asarray(other)
    assert np.isfinite(one).all()
    difference = float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-300))
    report[name] = {"difference": difference, "tolerance": tolerance}  # plain numbers: workers send them as text
    assert difference <= tolerance, f"{name}: {difference:.2e}, wanted {tolerance:.0e}"


@pytest.mark.parametrize("order", [1, 2, 33, 300, 1000, 4000])
def test_factorizations(both, report, order):
    matrix, right = spd(order, 1e3), np.random.default_rng(1).standard_normal((order, 2))
    one, other = both(lambda: jax.jit(log_determinant_and_solve)(jnp.asarray(matrix), jnp.asarray(right)))
    # The solution carries the condition, 1e3.
    close(report, f"log determinant, order {order}", 1.0 + one[0], 1.0 + other[0], 1e-12)
    close(report, f"solution, order {order}", one[1], other[1], 1e-12 * 1e3)


@pytest.mark.parametrize("order", [50, 1000])
def test_ill_conditioned_factorizations_have_small_backward_errors(both, report, order):
    matrix = spd(order, 1e13)
    for platform, lower in zip(("cpu", "gpu"), both(lambda: cholesky(jnp.asarray(matrix))), strict=True):
        error = np.linalg.norm(lower @ lower.T - matrix) / np.linalg.norm(matrix)
        report[f"backward error, order {order}, {platform}"] = {"difference": float(error), "tolerance": 1e-14 * order}
        assert error < 1e-14 * order


@pytest.mark.parametrize("order", [3, 300])
def test_failures_are_nan_and_named_on_both(both, order):
    indefinite = spd(order, 10.0) - 2.0 * np.eye(order)
    for matrix, status in ((indefinite, 2), (np.full((order, order), np.nan), 1)):

        def failed(matrix=matrix):
            lower = cholesky(jnp.asarray(matrix))
            return lower, diagnose(jnp.asarray(matrix), lower)

        for lower, found in both(failed):
            assert np.isnan(lower).all()
            assert found == status


def problem(names, factors, seed=0):
    """Nodes of one run with random statistics; every node of the first modality its own D, as masks make them."""
    rng = np.random.default_rng(seed)
    groups, statistics = {}, {}
    for place, name in enumerate(names):
        times = np.arange(0.1 * place, 40.0, 1.8 - 0.3 * place)
        distinct = len(times) if place == 0 else 1
        roots = rng.standard_normal((distinct, 6, factors))
        index = np.arange(len(times)) if place == 0 else np.zeros(len(times), int)
        groups[name] = NodeGroup(name, times, FAMILIES[name])
        precision = np.einsum("pfk,pfl->pkl", roots, roots)
        statistics[name] = GroupStatistics(precision, index, 2.0 * rng.standard_normal((len(times), factors)))
    values = {name: {key: free.start for key, free in FAMILIES[name].free.items()} for name in names}
    return {"run": groups}, statistics, values


CASES = [(family, 3) for family in list(FAMILIES)[1:]] + [("gaussian", 1), ("gaussian", 5)]


@pytest.mark.parametrize(("family", "factors"), CASES)
@pytest.mark.parametrize("likelihood", ["dense", "statespace"])
def test_evidence_and_gradient(both, report, likelihood, family, factors):
    groups, statistics, values = problem(("identity", family), factors)

    def evidence():
        if likelihood == "dense":
            native = NativeDense(Dense(groups, factors))
        else:
            native = NativeStateSpace(StateSpace(groups, factors, 0.9, residual=frozenset({"identity"})))
        found = native.evidence("run", values, 3.0, statistics)
        assert found.ok, found.diagnostic
        slopes = [found.length_scale_gradient, *found.response_gradient[family].values()]
        return found.log_evidence, found.mean, found.second_moment, np.array(slopes)

    one, other = both(evidence)
    name = f"{likelihood}, {family}, K = {factors}"
    close(report, f"{name}: value", one[0], other[0], 1e-12 if likelihood == "dense" else 1e-10)
    for modality in one[1]:
        close(report, f"{name}: mean of {modality}", one[1][modality], other[1][modality], 1e-8)
        close(report, f"{name}: second moment of {modality}", one[2][modality], other[2][modality], 1e-8)
    close(report, f"{name}: parameters", one[3], other[3], 1e-8)


def chain(count, order):
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((count, order, order)) / np.sqrt(order)
    diagonal = 4.0 * np.eye(order) + 0.25 * (noise + np.swapaxes(noise, 1, 2))
    return (
        diagonal,
        0.5 * rng.standard_normal((count - 1, order, order)) / np.sqrt(order),
        rng.standard_normal((count, order)),
    )


@pytest.mark.parametrize(("count", "order"), [(1, 5), (40, 24), (57, 162)])
def test_blocks_selected_inverse_and_draws(both, report, count, order):
    diagonal, lower, right = chain(count, order)
    normals = np.random.default_rng(1).standard_normal((count, order, 1))
    solver = Parallel()

    def everything():
        factor = solver.forward(jnp.asarray(diagonal), jnp.asarray(lower), jnp.asarray(right)[..., None])
        return factor.log_determinant, *solver.backward(factor)[:2], solver.sample(factor, jnp.asarray(normals))

    one, other = both(lambda: jax.jit(everything)())
    for name, a, b in zip(("log determinant", "mean", "inverse", "draw"), one, other, strict=True):
        close(report, f"blocks {count} of order {order}: {name}", a, b, 1e-10)


def test_second_derivatives(both, report):
    diagonal, lower, right = (jnp.asarray(np.asarray(part)) for part in chain(12, 6))

    def along(t):
        return log_evidence(Parallel(), diagonal * jnp.exp(t[0]), lower * jnp.exp(t[1]), right * t[2])

    one, other = both(lambda: jax.jit(jax.hessian(along))(jnp.asarray([0.1, 0.05, 1.0])))
    close(report, "Hessian of the block log evidence", one, other, 1e-8)


READ = """
import json, sys
import msrm
fit = msrm.open_fit(sys.argv[1])
mean = fit.infer_latent()["run-1"]["mean"].values
print(json.dumps([fit.backend_["device"], fit.objective_, mean.ravel().tolist()]))
"""


def test_map_endpoints_and_archives(both, report, tmp_path):
    """The same optimum on both, and the card's archive read where JAX sees no card."""
    if jax.default_backend() == "cpu":
        pytest.skip("JAX runs on the CPU")
    recording, _ = msrm.simulate(features=6, seconds=40.0, factors=1)
    lag = msrm.Free(0.2, bounds=(-1.5, 1.5), prior=msrm.Normal(0.3, 0.5))
    responses = {name: msrm.Identity() for name in recording.modalities} | {"rating": msrm.Gaussian(width=0.6, lag=lag)}
    fits = {
        device: msrm.GPMSRM(1, responses, likelihood="statespace", device=device, n_starts=1, tol=1e-8).fit(recording)
        for device in ("cpu", "cuda")
    }
    # Both stop within the Newton decrement of one optimum, on grids within one tolerance of the likelihood's limit.
    one, other = (fits[device].objective_ for device in ("cpu", "cuda"))
    difference = abs(one - other)
    report["MAP objective, nats"] = {"difference": difference, "tolerance": 0.1}
    assert difference < 0.1
    assert fits["cuda"].backend_["device"] == "cuda"
    assert fits["cuda"].converged_
    path = fits["cuda"].save(tmp_path / "fit.nc")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", READ, str(path)]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=True)
    device, objective, mean = json.loads(answer.stdout.splitlines()[-1])
    assert (device, objective) == ("cuda", other)
    np.testing.assert_array_equal(mean, fits["cuda"].infer_latent()["run-1"]["mean"].values.ravel())
