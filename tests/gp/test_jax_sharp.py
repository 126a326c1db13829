"""The native backends where noise variances are 1e-6, loadings zero or of rank one, and times tied or nearly so.

The oracle is a textbook Gaussian in 60 decimal digits. docs/cuda.md quotes the differences that are allowed here.
"""

import decimal
from decimal import Decimal

import numpy as np
import pytest

from msrm.gp.dense import Dense
from msrm.gp.jax_backend import NativeStateSpace
from msrm.gp.native_dense import NativeDense
from msrm.gp.statespace import StateSpace
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.responses import Identity

NOISE, SCALE, FACTORS = 1e-6, 3.0, 2
BACKENDS = {
    "dense": lambda groups: NativeDense(Dense(groups, FACTORS)),
    "statespace": lambda groups: NativeStateSpace(StateSpace(groups, FACTORS, 0.9, residual=frozenset(groups["run"]))),
}
to_decimals = np.vectorize(lambda value: Decimal(float(value)), otypes=[object])


@pytest.fixture(scope="module")
def problem():
    """Streams that share times to the last bit, or to 1e-7 s; one of rank one, one that says nothing."""
    rng, base = np.random.default_rng(0), 1.8 * np.arange(6)
    times = {"brain": base, "twin": base + 1e-7 * (base > 4.0), "silent": base[:4]}
    loadings = {
        "brain": 2.0 * rng.standard_normal((3, 2)),
        "twin": rng.standard_normal((1, 2)),
        "silent": np.zeros((2, 2)),
    }
    latent = rng.standard_normal((len(base), FACTORS)).cumsum(axis=0)
    values = {
        name: latent[: len(t)] @ loadings[name].T + np.sqrt(NOISE) * rng.standard_normal((len(t), len(loadings[name])))
        for name, t in times.items()
    }
    statistics = {
        name: GroupStatistics((w.T @ w / NOISE)[None], np.zeros(len(times[name]), int), values[name] @ w / NOISE)
        for name, w in loadings.items()
    }
    groups = {"run": {name: NodeGroup(name, t, Identity()) for name, t in times.items()}}
    with decimal.localcontext(prec=60):
        return groups, statistics, answers(times, loadings, values)


def answers(times, loadings, values):
    """Log evidence, E[g] (node, K), sum of E[g g'] by stream, and the log evidence's slope in the length scale."""
    scale, step = Decimal(SCALE), Decimal("1e-15")
    value, mean, covariance = gaussian(times, loadings, values, scale)
    ahead, behind = (gaussian(times, loadings, values, scale + sign * step)[0] for sign in (1, -1))
    seconds, start = {}, 0
    for name, t in times.items():
        seconds[name] = np.zeros((FACTORS, FACTORS))
        for j in range(start, start := start + len(t)):
            own = slice(j * FACTORS, (j + 1) * FACTORS)
            seconds[name] += (covariance[own, own] + np.outer(mean[own], mean[own])).astype(float)
    return float(value), mean.astype(float).reshape(-1, FACTORS), seconds, float((ahead - behind) / (2 * step))


def gaussian(times, loadings, values, scale):
    """Log evidence, mean and covariance of all functionals, node-major, by a Cholesky factor of all scalars."""
    when = to_decimals(np.concatenate(list(times.values())))
    x = Decimal(3).sqrt() * abs(when[:, None] - when) / scale
    kernel = np.kron(
        (1 + x) * np.vectorize(lambda value: (-value).exp(), otypes=[object])(x), np.eye(FACTORS, dtype=int)
    )
    rows = [(name, w) for name, t in times.items() for _ in t for w in [loadings[name]]]
    design = to_decimals(np.zeros((sum(len(w) for _, w in rows), len(kernel))))
    start = 0
    for node, (_, w) in enumerate(rows):
        design[start : start + len(w), node * FACTORS : (node + 1) * FACTORS] = to_decimals(w)
        start += len(w)
    y, noise = to_decimals(np.concatenate([values[name].ravel() for name in times])), Decimal(NOISE)
    seen = design @ kernel
    covariance = seen @ design.T + noise * np.eye(len(y), dtype=int)
    lower, right = 0 * covariance, np.column_stack([y, seen])
    for i in range(len(y)):
        for j in range(i):
            lower[i, j] = (covariance[i, j] - lower[i, :j] @ lower[j, :j]) / lower[j, j]
        lower[i, i] = (covariance[i, i] - (lower[i, :i] ** 2).sum()).sqrt()
        right[i] = (right[i] - lower[i, :i] @ right[:i]) / lower[i, i]
    white, logs = right[:, 0], 2 * sum(entry.ln() for entry in lower.diagonal())
    # What the likelihood adds to the log evidence, (y'y / v + n log v) / 2 but for 2 pi, comes off again.
    evidence = (y @ y / noise + len(y) * noise.ln() - white @ white - logs) / 2
    return evidence, right[:, 1:].T @ white, kernel - right[:, 1:].T @ right[:, 1:]


@pytest.mark.parametrize("backend", BACKENDS)
def test_sharp_data_lose_no_more_digits_than_documented(backend, problem):
    groups, statistics, (value, mean, seconds, slope) = problem
    native = BACKENDS[backend](groups)
    found = native.evidence("run", {name: {} for name in statistics}, SCALE, statistics)
    assert found.ok
    # h' D^-1 h, 1e8 here, is a sum in float64: its last place is what is left of the value, nothing of it cancels.
    assert abs(found.log_evidence - value) < 8 * np.spacing(value)
    # The mean's digits stay. Posterior covariances of 1e-7 are differences from priors of 1, which costs moments and
    # slopes of the dense likelihood seven of sixteen digits; the state-space one factorizes precisions and keeps more.
    joined = np.concatenate([found.mean[name] for name in statistics])
    np.testing.assert_allclose(joined, mean, rtol=0, atol=1e-11 * np.abs(mean).max())
    for name, second in seconds.items():
        np.testing.assert_allclose(found.second_moment[name][0], second, rtol=0, atol=1e-10 * np.abs(second).max())
    assert found.length_scale_gradient == pytest.approx(slope, rel=1e-9)
