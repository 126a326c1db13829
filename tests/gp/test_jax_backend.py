"""The compiled likelihoods against the NumPy ones: every family and option, both solvers, gradients, limits."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrm.gp import GPMSRM, UnitsWarning
from msrm.gp import native_dense as native_dense_module
from msrm.gp.blocks import Sequential
from msrm.gp.chain import Chain, chain_of, in_slots
from msrm.gp.cyclic import Parallel
from msrm.gp.dense import Dense
from msrm.gp.extrapolation import Extrapolated
from msrm.gp.jax_backend import NativeLikelihood, NativeStateSpace
from msrm.gp.jax_dense import dense_evidence, dense_evidence_by_panels
from msrm.gp.native_dense import NativeDense
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Matern12, Matern32, Matern52
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.priors import LogNormal
from msrm.recording import Recording, RecordingWarning
from msrm.responses import DoubleGamma, Free, Gamma, Gaussian, Identity, Sampled

FAMILIES = {
    "brain": Identity(),
    "staggered": Identity(),
    "rating": Gaussian(0.6, Free(0.4, (-1.5, 1.5))),
    "physiology": Gaussian(Free(0.8, (0.3, 1.5)), Free(1.0, (-1.0, 2.0))),
    "fixed": Gaussian(0.5, 0.1),
    "pulse": Gamma(Free(3.0, (2.0, 5.0)), Free(0.4, (0.3, 0.6)), Free(0.2, (0.0, 0.5))),
    "haemodynamic": DoubleGamma(6.0, Free(0.3, (0.25, 0.4)), 12.0, 0.3, Free(0.2, (0.0, 0.4)), 0.0),
    "measured": Sampled((0.0, 0.5, 1.5), (0.0, 1.0, 0.0)),
}
PERIODS = dict(zip(FAMILIES, (1.8, 1.7, 1.2, 1.5, 1.1, 1.3, 1.6, 2.1), strict=True))


def run_problem(names, *, factors=2, seconds=(25.0, 16.0), scale=1.0, seed=0):
    """Node groups of two runs, the second without the last modality, and random statistics with two distinct D."""
    rng = np.random.default_rng(seed)
    groups: dict = {}
    statistics: dict = {}
    for run, length in zip(("first", "second"), seconds, strict=True):
        for name in names if run == "first" else names[:-1] or names:
            times = np.arange(0.0, length, PERIODS[name]) + (0.37 if name == "staggered" else 0.0)
            roots = scale * rng.standard_normal((2, 4, factors))
            precision = np.einsum("pfk,pfl->pkl", roots, roots)
            index = rng.integers(0, 2, len(times))
            information = 3.0 * scale * rng.standard_normal((len(times), factors))
            groups.setdefault(run, {})[name] = NodeGroup(name, times, FAMILIES[name])
            statistics.setdefault(run, {})[name] = GroupStatistics(precision, index, information)
    return groups, statistics


def start_values(names):
    return {name: {k: free.start for k, free in FAMILIES[name].free.items()} for name in names}


def assert_same_evidence(found, expected, *, value, gradient):
    """Relative to the value, and to the largest entry of each kind of derivative."""
    assert found.ok, found.diagnostic
    np.testing.assert_allclose(found.log_evidence, expected.log_evidence, rtol=value, atol=value)
    assert found.mean.keys() == expected.mean.keys()
    for name in expected.mean:
        for kind in ("mean", "second_moment"):
            one, other = getattr(found, kind)[name], getattr(expected, kind)[name]
            np.testing.assert_allclose(one, other, rtol=0, atol=gradient * np.abs(other).max())
        assert found.response_gradient[name].keys() == expected.response_gradient[name].keys()
        for parameter, slope in expected.response_gradient[name].items():
            np.testing.assert_allclose(
                found.response_gradient[name][parameter], slope, rtol=gradient, atol=gradient * 10
            )
    np.testing.assert_allclose(
        found.length_scale_gradient, expected.length_scale_gradient, rtol=gradient, atol=gradient
    )


CASES = {
    "impulses and a lag": (("brain", "rating"), {"solver": "parallel"}, {}),
    "residual variances": (("staggered", "rating", "physiology"), {"solver": "parallel"}, {"residual": True}),
    "fixed and sampled": (("brain", "fixed", "measured"), {"solver": "sequential"}, {"residual": True}),
    "gammas": (("brain", "pulse", "haemodynamic"), {"solver": "parallel"}, {}),
    "Matern-1/2": (("brain", "physiology"), {"solver": "sequential"}, {"matern": Matern12()}),
    "Matern-5/2": (("brain", "physiology"), {"solver": "parallel"}, {"matern": Matern52()}),
    "five factors": (("brain", "rating"), {"solver": Parallel(root=1)}, {"factors": 5}),
    "one factor": (("rating", "physiology"), {"solver": Sequential(chunk=2)}, {"factors": 1}),
}
QUICK = {"impulses and a lag", "residual variances"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def test_statespace_evidence_agrees_with_the_band(case):
    names, arguments, given = CASES[case]
    factors = given.get("factors", 2)
    groups, statistics = run_problem(names, factors=factors)
    residual = frozenset(names) if given.get("residual") else frozenset()
    band = StateSpace(groups, factors, 0.9, given.get("matern", Matern32()), residual)
    native, values = NativeStateSpace(band, **arguments), start_values(names)
    # Every run compiles anew: both only where that is quick.
    for run in list(groups)[: 2 if case == "impulses and a lag" else 1]:
        expected = band.evidence(run, values, 3.0, statistics[run])
        found = native.evidence(run, values, 3.0, statistics[run])
        # Both do the same sums in float64; Matern-5/2's conditional weights lose 1e-3 of their digits' last places.
        assert_same_evidence(found, expected, value=1e-10, gradient=1e-8)
        np.testing.assert_allclose(
            native.evidence(run, values, 3.0, statistics[run], gradient=False).log_evidence,
            found.log_evidence,
            rtol=1e-13,
        )


def test_a_moving_lag_compiles_nothing_and_stays_exact():
    names = ("brain", "rating")
    groups, statistics = run_problem(names)
    band = StateSpace({"first": groups["first"]}, 2, 0.9)
    native = NativeStateSpace(band)
    compiled = native._function("first", True)
    for lag in (-1.5, -0.31, 0.0, 0.9, 1.5):
        values = {"brain": {}, "rating": {"lag": lag}}
        expected = band.evidence("first", values, 2.5, statistics["first"])
        assert_same_evidence(
            native.evidence("first", values, 2.5, statistics["first"]), expected, value=1e-10, gradient=1e-7
        )
    assert compiled.count == 1


def test_an_outgrown_window_is_nan_and_says_so():
    names = ("brain", "physiology")
    groups, statistics = run_problem(names)
    native = NativeStateSpace(StateSpace({"first": groups["first"]}, 2, 0.3), room=1.2)
    inside = {"brain": {}, "physiology": {"width": 0.9, "lag": 1.0}}
    assert native.evidence("first", inside, 3.0, statistics["first"], gradient=False).ok
    found = native.evidence(
        "first", inside | {"physiology": {"width": 1.4, "lag": 1.0}}, 3.0, statistics["first"], False
    )
    assert not found.ok
    assert np.isnan(found.log_evidence)
    assert "make the likelihood again at these parameters, or with more room" in found.diagnostic


def test_failures_are_nan_and_named():
    groups, statistics = run_problem(("brain", "rating"))
    one, values = statistics["first"]["brain"], start_values(("brain", "rating"))
    native = NativeStateSpace(StateSpace({"first": groups["first"]}, 2, 0.9))
    for said, bad in {
        "not positive definite": GroupStatistics(-100.0 * one.precision, one.index, one.information),
        "not finite": GroupStatistics(one.precision, one.index, one.information * np.nan),
    }.items():
        found = native.evidence("first", values, 3.0, {**statistics["first"], "brain": bad}, gradient=False)
        assert not found.ok
        assert said in found.diagnostic


def test_extreme_data_degrade_gracefully():
    """No data, faint data and noise variances of 1e-6: agreement within the conditioning."""
    names = ("brain", "rating")
    groups, _ = run_problem(names)
    band = StateSpace({"first": groups["first"]}, 2, 0.9)
    native = NativeStateSpace(band)
    for scale in (0.0, 1e-3, 1e3):
        statistics = run_problem(names, scale=scale)[1]["first"]
        expected = band.evidence("first", start_values(names), 3.0, statistics)
        found = native.evidence("first", start_values(names), 3.0, statistics)
        # D up to 1e7 beside prior precisions of order 1: seven digits of the float's sixteen.
        assert_same_evidence(found, expected, value=1e-9, gradient=1e-6)


# --- dense ---


def dense_problem(nodes=11, factors=2, seed=0):
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0.0, 15.0, nodes))
    covariance = Matern32().covariance(times[:, None] - times, 3.0)
    loadings = rng.standard_normal((nodes, 3, factors))
    loadings[2], loadings[4, 1:] = 0.0, 0.0  # no data, rank one
    return covariance, np.einsum("jfk,jfl->jkl", loadings, loadings), rng.standard_normal((nodes, factors))


def brute_force(covariance, precision, information):
    """The same integral by the matrices of all nodes and factors."""
    nodes, factors = information.shape
    prior = jnp.kron(covariance, jnp.eye(factors))
    both = jnp.eye(nodes * factors) + prior @ jax.scipy.linalg.block_diag(*precision)
    flat = information.ravel()
    return 0.5 * flat @ jnp.linalg.solve(both, prior @ flat) - 0.5 * jnp.linalg.slogdet(both)[1]


def symmetric(matrix):
    return (matrix + np.swapaxes(matrix, -1, -2)) / 2


def test_dense_evidence_and_gradient_agree_with_brute_force():
    problem = [jnp.asarray(part) for part in dense_problem()]
    value, gradient = jax.jit(jax.value_and_grad(dense_evidence, argnums=(0, 1, 2)))(*problem)
    expected, slopes = jax.jit(jax.value_and_grad(brute_force, argnums=(0, 1, 2)))(*problem)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for one, other in zip(gradient[:2], slopes[:2], strict=True):
        np.testing.assert_allclose(symmetric(one), symmetric(other), rtol=0, atol=1e-11 * np.abs(other).max())
    np.testing.assert_allclose(gradient[2], slopes[2], rtol=1e-10, atol=1e-11)
    for panel in (4, 11):
        made = dense_evidence_by_panels(*problem, panel=panel)
        np.testing.assert_allclose(made.value, value, rtol=1e-13)
        np.testing.assert_allclose(made.covariance, symmetric(gradient[0]), rtol=0, atol=1e-11)
        np.testing.assert_allclose(made.precision, symmetric(gradient[1]), rtol=0, atol=1e-11)
        np.testing.assert_allclose(made.information, gradient[2], rtol=0, atol=1e-11)


@pytest.mark.slow
def test_dense_second_derivatives_agree_with_brute_force():
    covariance, precision, information = (jnp.asarray(part) for part in dense_problem(6))
    rng = np.random.default_rng(1)
    moves = [0.1 * symmetric(rng.standard_normal(part.shape)) for part in (covariance, precision)]
    moves.append(rng.standard_normal(information.shape))

    def along(function, t):
        return function(
            covariance + t * moves[0] + t * t * covariance, precision + t * moves[1], information + t * moves[2]
        )

    expected = jax.jit(jax.grad(jax.grad(lambda t: along(brute_force, t))))(0.0)
    for outer in (jax.grad, jax.jacfwd):
        found = jax.jit(outer(jax.grad(lambda t: along(dense_evidence, t))))(0.0)
        np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_native_dense_agrees_with_dense(monkeypatch):
    names = ("brain", "rating", "physiology")
    groups, statistics = run_problem(names, seconds=(15.0, 9.0))
    exact, values = Dense(groups, 2), start_values(names)
    native = NativeDense(exact)
    expected = exact.evidence("first", values, 3.0, statistics["first"])
    assert_same_evidence(
        native.evidence("first", values, 3.0, statistics["first"]), expected, value=1e-12, gradient=1e-8
    )
    monkeypatch.setattr(native_dense_module, "device_memory", lambda device=None: (10_000, "a small device"))
    monkeypatch.setattr(native_dense_module, "guard", lambda order, copies: None)
    assert native_dense_module._panel_of(60, 2, True) == 30
    by_panels = native.evidence("first", values, 3.0, statistics["first"])
    assert_same_evidence(by_panels, expected, value=1e-12, gradient=1e-8)


def test_native_dense_refuses_before_allocating(monkeypatch):
    monkeypatch.setattr(native_dense_module, "device_memory", lambda device=None: (10**9, "cuda:0"))
    with pytest.raises(MemoryError, match=r"order 40,000 is above 32,768.*statespace"):
        native_dense_module._panel_of(40_000, 2, True)


# --- the whole likelihood ---

RESPONSES = {name: FAMILIES[name] for name in ("brain", "rating", "physiology")}
OPTIONS = {
    "masked": ({}, True, 1),
    "differenced": ({"residual_timescales": {"brain": Free(1.5, (0.5, 4.0)), "rating": 1.0}}, True, 2),
    "run offsets and powers": ({"run_offsets": ("brain",), "powers": {"rating": 0.5}}, False, 2),
    "length scale": ({"length_scale": LogNormal(1.0, 0.3), "smoothness": 0.5}, False, 1),
}


def small_recording(*, masked, runs):
    """Two participants, staggered and irregular clocks, 20 s."""
    rng = np.random.default_rng(0)
    data: dict = {}
    for run in range(runs):
        for participant, shift in (("p1", 0.0), ("p2", 0.45)):
            clocks = {
                "brain": np.arange(shift, 20.0, 1.8),
                "rating": np.arange(0.2, 20.0, 1.2),
                "physiology": np.sort(rng.uniform(0.0, 20.0, 10)),
            }
            for modality, features in (("brain", 4), ("rating", 2), ("physiology", 1)):
                values = rng.standard_normal((len(clocks[modality]), features))
                if masked:
                    values[rng.uniform(size=values.shape) < 0.15] = np.nan
                if (participant, modality) != ("p2", "physiology"):
                    data.setdefault(participant, {}).setdefault(f"run-{run + 1}", {})[modality] = (
                        values,
                        clocks[modality],
                    )
    return Recording.from_dict(data)


def some_parameters(layout, seed=1):
    rng, out = np.random.default_rng(seed), {}
    for name, shape in layout.shapes.items():
        lower, upper = layout.bounds.get(name, (-np.inf, np.inf))
        if name.startswith("noise/"):
            out[name] = rng.uniform(0.4, 1.5, shape)
        elif name == "length_scale":
            out[name] = np.array(2.5)
        elif np.isfinite(upper):
            out[name] = rng.uniform(0.7 * lower + 0.3 * upper, 0.3 * lower + 0.7 * upper, shape)
        else:
            out[name] = rng.standard_normal(shape)
    return out


def prepared(option, *, reduce=True):
    arguments, masked, runs = OPTIONS[option]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecordingWarning)
        warnings.simplefilter("ignore", UnitsWarning)
        gp = GPMSRM(2, RESPONSES, likelihood="statespace", **arguments)
        return gp.prepared(small_recording(masked=masked, runs=runs), reduce=reduce)[0]


@pytest.mark.parametrize("option", ["masked", *(pytest.param(o, marks=pytest.mark.slow) for o in list(OPTIONS)[1:])])
def test_whole_likelihood_agrees_with_numpy(option):
    likelihood = prepared(option)
    parameters = some_parameters(likelihood.layout)
    native = NativeLikelihood(likelihood, parameters=parameters)
    value, gradient = native.value_and_gradient(parameters)
    expected, slopes = likelihood.value_and_gradient(parameters)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    size = max(np.abs(slope).max() for slope in slopes.values())
    assert gradient.keys() == slopes.keys()
    for name, slope in slopes.items():
        np.testing.assert_allclose(gradient[name], slope, rtol=0, atol=1e-11 * size)
    np.testing.assert_allclose(native.value(parameters), value, rtol=1e-13)
    assert native.diagnostic(parameters) == ""


def test_getting_ready_compiles_nothing(caplog):
    """Every operation that JAX ran by itself there was a function to compile, a hundred of them at a start."""
    likelihood = prepared("masked").with_backend(prepared("masked").backend.at_step(0.36))  # shapes of no other test
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        native = NativeLikelihood(likelihood)
        native._packed(some_parameters(likelihood.layout))
        assert "Compiling" not in caplog.text
        jax.block_until_ready(jax.numpy.arange(7.0).at[3].set(0.1))  # what is compiled is seen
        assert "Compiling" in caplog.text


@pytest.mark.slow
def test_two_spacings_extrapolate_value_and_gradient():
    likelihood = prepared("masked")
    parameters, backend = some_parameters(likelihood.layout), likelihood.backend
    fine, coarse = likelihood.with_backend(backend.at_step(0.45)), likelihood.with_backend(backend.at_step(0.9))
    both = likelihood.with_backend(Extrapolated(coarse.backend, fine.backend))
    native = NativeLikelihood(both, parameters=parameters, room=1.0)
    value, gradient = native.value_and_gradient(parameters)
    (a, on_a), (b, on_b) = fine.value_and_gradient(parameters), coarse.value_and_gradient(parameters)
    # The error falls as the fourth power of the spacing; 16 is that of their ratio.
    np.testing.assert_allclose(value, (16 * a - b) / 15, rtol=1e-12)
    for name, slope in gradient.items():
        np.testing.assert_allclose(slope, (16 * on_a[name] - on_b[name]) / 15, rtol=0, atol=1e-9)


def test_whole_likelihood_says_why_it_is_nan():
    likelihood = prepared("masked")
    parameters = some_parameters(likelihood.layout)
    native = NativeLikelihood(likelihood, room=1.0)
    assert np.isnan(native.value(parameters | {"response/physiology/width": np.array(1.5)}))
    assert "more room" in native.diagnostic(parameters | {"response/physiology/width": np.array(1.5)})
    assert "not finite" in native.diagnostic(parameters | {"noise/p1/brain": np.array(np.nan)})


def test_needs_a_state_space_and_a_known_solver():
    likelihood = prepared("masked")
    with pytest.raises(
        TypeError, match='needs the state-space backend, found Dense; prepare it with likelihood="statespace"'
    ):
        NativeLikelihood(likelihood.with_backend(Dense(likelihood.nodes.groups, 2)))
    with pytest.raises(ValueError, match="solver must be one of parallel, sequential or a Solver, found 'fast'"):
        NativeLikelihood(likelihood, solver="fast")


# --- geometry ---


def test_chain_covers_every_run_and_support():
    groups, _ = run_problem(("brain", "physiology"))
    backend = StateSpace(groups, 2, 0.3)
    chain = chain_of(backend, {"physiology": {"width": 1.0, "lag": 0.0}}, room=1.1)
    assert chain.points >= 1.1 * 12.0 / 0.3 + 1
    for blocks, grid in zip(chain.blocks, backend.grids.values(), strict=True):
        assert blocks * chain.points >= grid.count
    widest = chain_of(backend, room=100.0)
    assert widest.points == int(np.ceil(18.0 / 0.3)) + 2  # the longest support that the bounds allow, and two points
    with pytest.raises(ValueError, match=r"room must be at least 1, found 0\.5"):
        chain_of(backend, room=0.5)


def test_chain_knows_where_runs_begin_and_end():
    chain = Chain(0.5, 4, (2, 1, 3))
    assert chain.count == 6
    assert chain.cells == 7
    first, last = chain.ends
    assert first.tolist() == [True, False, True, True, False, False]
    assert last.tolist() == [False, True, True, False, False, True]
    assert chain.first.tolist() == [0, 2, 3]
    assert chain.starts.tolist() == [0.0, 2.0, 0.0, 0.0, 2.0, 4.0]


def test_items_by_window():
    assert in_slots(np.array([2, 0, 2, 2]), 4).tolist() == [[1, 4, 4], [4, 4, 4], [0, 2, 3], [4, 4, 4]]
