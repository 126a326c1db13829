"""The state-space backend against a dense Gaussian of its own, its order of convergence, and every derivative."""

from dataclasses import replace

import numpy as np
import pytest
from gp_oracles import IMPULSE, finite_difference, functional_covariance, gaussian_functional

from msrm.gp.chain import chain_of
from msrm.gp.dense import Dense
from msrm.gp.refinement import measured_error, resolved
from msrm.gp.statespace import StateSpace, covering_grid, filtered_period, identity_period
from msrm.latent_grid import Matern12, Matern32, Matern52
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.responses import Free, Gaussian, Identity

LENGTH_SCALE = 3.0
VALUES = {"rating": {"lag": 0.23}, "physiology": {"width": 0.61, "lag": 0.5}}
SMOOTHNESS = {1: 0.5, 2: 1.5, 3: 2.5}
SCANNERS = (0.0, 0.37, 0.81, 1.13)  # s, of four participants' clocks
EVERY = frozenset({"brain", "rating", "physiology"})


def problem(
    size: int, distinct: int, *, pairs: bool = False, shifts: tuple[float, ...] = (0.0,)
) -> tuple[dict[str, NodeGroup], dict[str, GroupStatistics]]:
    """Nodes of three clocks, one irregular, with ``distinct`` values of D each; optionally differenced.

    ``shifts`` are those of several scanners' clocks behind the Identity stream.
    """
    rng = np.random.default_rng(size + 10 * distinct)
    groups = {
        "brain": NodeGroup("brain", np.sort(np.add.outer(np.arange(0.0, 19.0, 1.8), shifts).ravel()), Identity()),
        "rating": NodeGroup(
            "rating", np.sort(rng.uniform(3.0, 17.0, 13)), Gaussian(width=0.6, lag=Free(0.1, bounds=(-1.0, 1.0)))
        ),
        "physiology": NodeGroup(
            "physiology",
            np.arange(2.0, 18.0, 1.5),
            Gaussian(width=Free(0.7, bounds=(0.3, 1.0)), lag=Free(0.4, bounds=(-1.0, 1.0))),
        ),
    }
    statistics = {}
    for name, group in list(groups.items()):
        count, coefficients = len(group.times), None
        if pairs and name != "brain":
            before = np.stack([np.arange(count), np.maximum(np.arange(count) - 1, 0)], axis=1)
            before[3] = 3, 1  # over a gap
            coefficients = np.stack([np.ones(count), -rng.uniform(0.2, 0.7, count)], axis=1)
            coefficients[0] = 1.0, 0.0
            groups[name] = replace(group, pairs=before)
        loading = rng.standard_normal((distinct, 4, size))
        statistics[name] = GroupStatistics(
            np.einsum("pfi,pfk->pik", loading, loading),
            rng.integers(0, distinct, count),
            2.0 * rng.standard_normal((count, size)),
            coefficients,
        )
    return groups, statistics


def dense_log_evidence(
    groups: dict[str, NodeGroup], statistics: dict[str, GroupStatistics], smoothness: float, length_scale: float
) -> float:
    """log of the integral of exp(-g'Dg/2 + h'g) N(g; 0, C) by one determinant and one solve."""
    points = {
        "brain": IMPULSE,
        "rating": gaussian_functional(0.6, VALUES["rating"]["lag"]),
        "physiology": gaussian_functional(VALUES["physiology"]["width"], VALUES["physiology"]["lag"]),
    }
    nodes = [(points[name], time) for name, group in groups.items() for time in group.times]
    mix = np.zeros((sum(group.n_nodes for group in groups.values()), len(nodes)))
    row = column = 0
    for name, group in groups.items():
        for j in range(group.n_nodes):
            pair = [j] if group.pairs is None else group.pairs[j]
            weight = [1.0] if group.pairs is None else statistics[name].coefficients[j]
            for k, w in zip(pair, weight, strict=True):
                mix[row + j, column + k] += w
        row, column = row + group.n_nodes, column + len(group.times)
    covariance = mix @ functional_covariance(nodes, length_scale, smoothness) @ mix.T
    size = statistics["brain"].precision.shape[-1]
    every = np.concatenate([one.precision[one.index] for one in statistics.values()])
    information = np.concatenate([one.information for one in statistics.values()]).ravel()
    precision = np.zeros((len(information), len(information)))
    for j, block in enumerate(every):
        precision[j * size : (j + 1) * size, j * size : (j + 1) * size] = block
    full = np.kron(covariance, np.eye(size))
    system = np.eye(len(information)) + full @ precision
    return -0.5 * np.linalg.slogdet(system)[1] + 0.5 * information @ np.linalg.solve(system, full @ information)


CASES = [(1, 1, False), (3, 1, False), (2, 2, False), (2, 8, False), (2, 1, True), (2, 8, True)]


@pytest.mark.parametrize(("size", "distinct", "pairs"), CASES)
@pytest.mark.parametrize("matern", [Matern12(), Matern32(), Matern52()])
@pytest.mark.parametrize("residual", [frozenset(), EVERY])
def test_log_evidence_converges_to_the_dense_one(size, distinct, pairs, matern, residual):
    groups, statistics = problem(size, distinct, pairs=pairs)
    smoothness = SMOOTHNESS[matern.dimension]
    exact = dense_log_evidence(groups, statistics, smoothness, LENGTH_SCALE)
    backend = StateSpace({"run": groups}, size, 0.9, matern, residual)

    def value(one: StateSpace) -> float:
        return one.evidence("run", VALUES, LENGTH_SCALE, statistics, False).log_evidence

    errors = [value(backend.at_step(step)) - exact for step in (0.9, 0.45, 0.225)]
    # Half the stated order, step^(2 dimension): its leading term can change sign. The floor is the oracle's own error.
    floor = 1e-8
    order = matern.dimension
    assert abs(errors[2]) < 1.5 * max(abs(errors[0]) / 4**order, abs(errors[1]) / 2**order) + floor
    assert abs(errors[2]) < {1: 0.2, 2: 2e-3, 3: 1e-5}[matern.dimension]
    # The reported error covers the true one twice over.
    assert abs(errors[1]) <= 2.0 * measured_error(backend.at_step(0.45), value).error + floor


@pytest.mark.parametrize(("size", "distinct", "pairs"), CASES)
@pytest.mark.parametrize("residual", [frozenset(), EVERY])
@pytest.mark.parametrize(("shifts", "moments"), [((0.3,), 0), (SCANNERS, 0), (SCANNERS, 2)])
def test_every_derivative_of_the_log_evidence(size, distinct, pairs, residual, shifts, moments):
    groups, statistics = problem(size, distinct, pairs=pairs, shifts=shifts)
    backend = StateSpace({"run": groups}, size, 0.7, Matern32(), residual).with_moments(moments)
    evidence = backend.evidence("run", VALUES, LENGTH_SCALE, statistics)

    def value(values=VALUES, length_scale=LENGTH_SCALE, given=statistics) -> float:
        return backend.evidence("run", values, length_scale, given, False).log_evidence

    close = {"rtol": 1e-6, "atol": 1e-7}
    assert evidence.log_evidence == value()
    for modality, names in VALUES.items():
        for name, at in names.items():
            found = finite_difference(
                lambda x, m=modality, n=name: value({**VALUES, m: {**VALUES[m], n: x[0]}}), np.array([at]), (0,), 1e-3
            )
            np.testing.assert_allclose(evidence.response_gradient[modality][name], found, **close)
    found = finite_difference(lambda x: value(length_scale=x[0]), np.array([LENGTH_SCALE]), (0,), 1e-3)
    np.testing.assert_allclose(evidence.length_scale_gradient, found, **close)

    rng = np.random.default_rng(0)
    without = backend.evidence("run", VALUES, LENGTH_SCALE, statistics, False)
    for modality, one in statistics.items():
        np.testing.assert_array_equal(without.mean[modality], evidence.mean[modality])
        direction = rng.standard_normal(one.information.shape)
        found = finite_difference(
            lambda x, m=modality, o=one, d=direction: value(
                given={**statistics, m: replace(o, information=o.information + x[0] * d)}
            ),
            np.zeros(1),
            (0,),
            1e-2,
        )
        np.testing.assert_allclose(np.sum(evidence.mean[modality] * direction), found, **close)
        direction = rng.standard_normal(one.precision.shape)
        direction = direction + np.swapaxes(direction, 1, 2)
        found = finite_difference(
            lambda x, m=modality, o=one, d=direction: value(
                given={**statistics, m: replace(o, precision=o.precision + x[0] * d)}
            ),
            np.zeros(1),
            (0,),
            1e-3,
        )
        np.testing.assert_allclose(-0.5 * np.sum(evidence.second_moment[modality] * direction), found, **close)
        if one.coefficients is not None:
            direction = rng.standard_normal(one.coefficients.shape)
            found = finite_difference(
                lambda x, m=modality, o=one, d=direction: value(
                    given={**statistics, m: replace(o, coefficients=o.coefficients + x[0] * d)}
                ),
                np.zeros(1),
                (0,),
                1e-3,
            )
            np.testing.assert_allclose(np.sum(evidence.coefficient_gradient[modality] * direction), found, **close)


def test_means_of_the_dense_backend_need_no_gradient():
    groups, statistics = problem(2, 2, pairs=True)
    backend = Dense({"run": groups}, 2)
    means = [backend.evidence("run", VALUES, LENGTH_SCALE, statistics, slopes).mean for slopes in (False, True)]
    for modality in groups:
        np.testing.assert_array_equal(means[0][modality], means[1][modality])


def test_no_information_is_the_prior():
    groups, statistics = problem(2, 1)
    empty = {
        name: replace(one, precision=0.0 * one.precision, information=0.0 * one.information)
        for name, one in statistics.items()
    }
    for residual in (frozenset(), EVERY):
        evidence = StateSpace({"run": groups}, 2, 0.6, Matern32(), residual).evidence("run", VALUES, 3.0, empty)
        assert evidence.log_evidence == pytest.approx(0.0, abs=1e-9)
        np.testing.assert_allclose(evidence.mean["rating"], 0.0, atol=1e-12)
        # Each factor's functional has its prior variance: 1 where the stream sees the latent itself.
        brain = evidence.second_moment["brain"].sum(axis=0)
        np.testing.assert_allclose(brain, groups["brain"].n_nodes * np.eye(2), rtol=2e-3, atol=1e-9)


def test_one_node():
    groups = {"brain": NodeGroup("brain", np.array([2.0]), Identity())}
    statistics = {"brain": GroupStatistics(np.array([[[3.0]]]), np.array([0]), np.array([[0.7]]))}
    evidence = StateSpace({"run": groups}, 1, 0.9).evidence("run", {}, 3.0, statistics)
    assert evidence.log_evidence == pytest.approx(-0.5 * np.log(4.0) + 0.5 * 0.7**2 / 4.0, abs=1e-12)
    np.testing.assert_allclose(evidence.mean["brain"], [[0.7 / 4.0]], rtol=1e-12)
    np.testing.assert_allclose(evidence.second_moment["brain"], [[[0.25 + (0.7 / 4.0) ** 2]]], rtol=1e-12)


def test_statistics_that_are_not_finite_or_indefinite_are_named():
    groups, statistics = problem(2, 1)
    backend = StateSpace({"run": groups}, 2, 0.9)
    bad = {**statistics, "rating": replace(statistics["rating"], precision=np.full((1, 2, 2), np.nan))}
    evidence = backend.evidence("run", VALUES, 3.0, bad)
    assert not evidence.ok
    assert np.isnan(evidence.log_evidence)
    assert "not finite" in evidence.diagnostic
    bad = {**statistics, "rating": replace(statistics["rating"], precision=-1e6 * np.eye(2)[None])}
    assert "not positive definite" in backend.evidence("run", VALUES, 3.0, bad).diagnostic
    bad = {**statistics, "rating": replace(statistics["rating"], information=np.full((13, 2), np.nan))}
    assert "not finite" in backend.evidence("run", VALUES, 3.0, bad).diagnostic


def test_grids_follow_a_regular_identity_clock_and_nest():
    groups, _ = problem(1, 1)
    backend = StateSpace.on({"run": groups}, 1, 1.0)
    assert identity_period(backend.groups) == pytest.approx(1.8)
    assert backend.step == pytest.approx(0.9)
    assert backend.at_step(0.7).step == pytest.approx(0.6)
    assert backend.at_step(4.0).step == pytest.approx(3.6)
    assert backend.residual == frozenset()
    assert backend.off_grid == (frozenset(), frozenset({"rating", "physiology"}))
    coarse, fine = backend.grids["run"].times, backend.at_step(0.45).grids["run"].times
    inside = coarse[(coarse >= fine[0]) & (coarse <= fine[-1])]
    assert np.all(np.min(np.abs(inside[:, None] - fine), axis=1) < 1e-9)
    shifted, _ = problem(1, 1, shifts=SCANNERS)
    irregular = StateSpace.on({"run": shifted}, 1, 1.0)
    assert identity_period(irregular.groups) is None
    assert irregular.step == 1.0
    assert irregular.residual == frozenset({"brain"})
    wide = covering_grid(groups, 0.9, (-40.0, 50.0)).times
    assert wide[0] <= -40.0
    assert wide[-1] >= 50.0


def test_refinement_stops_at_the_coarsest_spacing_within_the_tolerance():
    groups, statistics = problem(3, 1)
    exact = dense_log_evidence(groups, statistics, 1.5, LENGTH_SCALE)

    def value(backend) -> float:
        return backend.evidence("run", VALUES, LENGTH_SCALE, statistics, False).log_evidence

    steps = []
    for tolerance in (1.0, 1e-2, 1e-4, 1e-6):
        backend, error = resolved(StateSpace.on({"run": groups}, 3, 0.9), value, tolerance, extrapolate=False)
        assert error.error <= tolerance
        assert error.step == backend.step
        assert abs(error.log_likelihood - exact) <= 2.0 * error.error + 1e-7
        assert abs(error.extrapolated - exact) <= tolerance
        steps.append(backend.step)
    assert steps == sorted(steps, reverse=True)
    assert steps[0] == pytest.approx(0.9)
    assert steps[-1] < 0.3


@pytest.mark.parametrize("shifts", [(0.0,), SCANNERS])
def test_refinement_with_moments_reports_the_error_and_keeps_what_it_found(shifts):
    groups, statistics = problem(3, 1, shifts=shifts)
    exact = dense_log_evidence(groups, statistics, 1.5, LENGTH_SCALE)

    def value(backend) -> float:
        return backend.evidence("run", VALUES, LENGTH_SCALE, statistics, False).log_evidence

    for tolerance in (0.05, 1e-4):
        plain = StateSpace.on({"run": groups}, 3, 0.9)
        backend, error = resolved(plain, value, tolerance, extrapolate=True)
        assert error.error <= tolerance
        assert backend.moments > 0
        assert backend.residual == backend.off_grid[0]
        assert abs(value(backend) - exact) <= 2.0 * error.error + 1e-7
        assert measured_error(backend, value).error == pytest.approx(error.error, rel=0.5)
        again, _ = resolved(backend, value, tolerance, extrapolate=True)
        assert (again.step, again.moments) == (backend.step, backend.moments)
        columns = (2 + backend.moments) / backend.step
        assert columns < 2 / resolved(plain, value, tolerance, extrapolate=False)[0].step


def test_filtered_clocks_have_a_common_period():
    def period(*clocks: np.ndarray) -> float | None:
        response = Gaussian(width=0.6, lag=0.0)
        return filtered_period({"run": {str(i): NodeGroup(str(i), times, response) for i, times in enumerate(clocks)}})

    assert period(np.arange(0.0, 50.0, 1.2), np.arange(3.1, 90.0, 1.5)) == pytest.approx(0.3, rel=1e-12)
    assert period(np.array([0.0, 0.7, 2.1, 2.8])) == pytest.approx(0.7)
    assert period(np.arange(0.0, 50.0, 1.2), np.arange(0.0, 50.0, np.sqrt(2.0))) is None
    assert period(np.sort(np.random.default_rng(0).uniform(0.0, 9.0, 20))) is None
    assert period() is None
    groups, _ = problem(1, 1, shifts=SCANNERS)
    regular = {name: group for name, group in groups.items() if name != "rating"}
    backend = StateSpace.on({"run": regular}, 1, 0.9)
    assert backend.at_step(0.7).step == 0.7
    assert backend.with_moments(1).at_step(0.8).step == pytest.approx(0.75)


@pytest.mark.parametrize(("size", "distinct"), [(1, 1), (2, 5)])
@pytest.mark.parametrize("matern", [Matern12(), Matern32(), Matern52()])
@pytest.mark.parametrize("shifts", [SCANNERS, (0.0, 1e-9, 1e-4, 0.2, 0.9 - 1e-6, 0.9)])
def test_identity_alone_is_exact_on_any_clock(size, distinct, matern, shifts):
    groups, statistics = problem(size, distinct, shifts=shifts)
    groups, statistics = {"brain": groups["brain"]}, {"brain": statistics["brain"]}
    exact = dense_log_evidence(groups, statistics, SMOOTHNESS[matern.dimension], LENGTH_SCALE)
    for step in (0.5, 2.1):  # one to a cell or none, and up to eight
        for moments in (0, 1, 3):
            backend = StateSpace({"run": groups}, size, step, matern, EVERY, moments=moments)
            found = backend.evidence("run", {}, LENGTH_SCALE, statistics, False).log_evidence
            # Kernels at lags of 1e-9 s lose half their digits in the dense oracle of times that close.
            assert found == pytest.approx(exact, rel=1e-10, abs=1e-8)


@pytest.mark.parametrize(("size", "distinct", "pairs"), [(1, 1, False), (3, 1, False), (2, 8, False), (2, 1, True)])
@pytest.mark.parametrize("matern", [Matern12(), Matern32(), Matern52()])
@pytest.mark.parametrize("shifts", [(0.0,), SCANNERS])
def test_moments_make_a_coarse_grid_precise(size, distinct, pairs, matern, shifts):
    groups, statistics = problem(size, distinct, pairs=pairs, shifts=shifts)
    exact = dense_log_evidence(groups, statistics, SMOOTHNESS[matern.dimension], LENGTH_SCALE)
    backend = StateSpace.on({"run": groups}, size, 0.9, matern=matern)

    def error(one: StateSpace) -> float:
        return abs(one.evidence("run", VALUES, LENGTH_SCALE, statistics, False).log_evidence - exact)

    plain = error(backend)
    coarse, fine = (error(backend.with_moments(2).at_step(step)) for step in (0.9, 0.45))
    assert coarse < 0.1 * plain
    # Interpolation across the kink of a bridge's covariance remains, of order 2 dimension - 1.
    assert fine < {1: 1e-2, 2: 1e-5, 3: 1e-6}[matern.dimension]


def test_draws_of_nodes_have_their_posterior_moments():
    groups, statistics = problem(2, 2, shifts=SCANNERS)
    for residual, moments in ((frozenset(), 0), (EVERY, 0), (EVERY, 1)):
        backend = StateSpace({"run": groups}, 2, 0.9, Matern32(), residual).with_moments(moments)
        evidence = backend.evidence("run", VALUES, LENGTH_SCALE, statistics)
        posterior = backend.posterior("run", VALUES, LENGTH_SCALE, statistics)
        rng = np.random.default_rng(0)
        states = posterior.draw(rng, 4_000)
        for modality, terms in posterior.nodes.items():
            draws = np.array([terms.draw(rng, one) for one in states])
            spread = draws.std(axis=0)
            # Five standard errors of a mean over 4,000 independent draws, and of a sum of squares.
            np.testing.assert_array_less(
                np.abs(draws.mean(axis=0) - evidence.mean[modality]), 5.0 * spread / np.sqrt(4_000) + 1e-12
            )
            squares = np.einsum("djk,djk->d", draws, draws)
            total = np.trace(evidence.second_moment[modality], axis1=1, axis2=2).sum()
            assert abs(squares.mean() - total) < 5.0 * squares.std() / np.sqrt(4_000)


@pytest.mark.parametrize(("residual", "step", "moments"), [(frozenset(), 0.3, 0), (EVERY, 0.3, 0), (EVERY, 0.9, 2)])
def test_functionals_of_the_posterior_at_any_times(residual, step, moments):
    groups, statistics = problem(2, 2)
    backend = StateSpace({"run": groups}, 2, step, Matern32(), residual, reach={"run": (-9.0, 30.0)}, moments=moments)
    posterior = backend.posterior("run", VALUES, LENGTH_SCALE, statistics)
    times = np.array([-8.0, 0.0, 0.77, 5.0, 18.1, 29.0])
    response = Gaussian(width=0.3, lag=-0.2)
    made = [posterior.functionals(Identity(), None, times), posterior.functionals(response, None, times[1:4])]
    points = {
        "brain": IMPULSE,
        "rating": gaussian_functional(0.6, 0.23),
        "physiology": gaussian_functional(0.61, 0.5),
        "asked": gaussian_functional(0.3, -0.2),
    }
    nodes = [(points[name], time) for name, group in groups.items() for time in group.times]
    asked = [(IMPULSE, time) for time in times] + [(points["asked"], time) for time in times[1:4]]
    covariance = functional_covariance(nodes + asked, LENGTH_SCALE)
    full = np.kron(covariance, np.eye(2))
    count = 2 * len(nodes)
    precision = np.zeros((count, count))
    every = np.concatenate([one.precision[one.index] for one in statistics.values()])
    for j, block in enumerate(every):
        precision[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = block
    information = np.concatenate([one.information for one in statistics.values()]).ravel()
    gain = full[count:, :count] @ np.linalg.inv(np.eye(count) + precision @ full[:count, :count])
    mean = (gain @ information).reshape(-1, 2)
    expected = full[count:, count:] - gain @ precision @ full[:count, count:]
    close = {"atol": 2e-4}  # of the grid
    np.testing.assert_allclose(np.concatenate([posterior.mean_of(one) for one in made]), mean, **close)
    blocks = expected.reshape(len(asked), 2, len(asked), 2)
    each = np.einsum("jajb->jab", blocks)
    np.testing.assert_allclose(np.concatenate([posterior.covariance_of(one) for one in made]), each, **close)
    np.testing.assert_allclose(posterior.joint_covariance(made), blocks, **close)
    wide = posterior.functionals(Gaussian(width=1.4, lag=0.0), None, np.array([9.0, 10.0]))
    joint = np.einsum("jajb->jab", posterior.joint_covariance([wide]))
    np.testing.assert_allclose(posterior.covariance_of(wide), joint, atol=1e-12)


def test_draws_have_the_posterior_moments():
    groups, statistics = problem(2, 1)
    posterior = StateSpace({"run": groups}, 2, 0.9).posterior("run", VALUES, LENGTH_SCALE, statistics)
    made = posterior.functionals(Identity(), None, np.array([3.6, 9.0]))
    draws = posterior.draw(np.random.default_rng(0), 20_000)
    values = np.array([made.rows.apply(draw) for draw in draws])
    spread = np.sqrt(np.einsum("jaa->ja", posterior.covariance_of(made)))
    # Five standard errors of a mean and of a variance over 20,000 independent draws.
    np.testing.assert_array_less(np.abs(values.mean(0) - posterior.mean_of(made)), 5.0 * spread / np.sqrt(20_000))
    np.testing.assert_allclose(values.std(0) / spread, 1.0, atol=5.0 / np.sqrt(2 * 20_000))
    assert posterior.draw(np.random.default_rng(0)).shape == posterior.mean.shape


def test_moments_are_checked():
    groups, _ = problem(1, 1)
    backend = StateSpace.on({"run": groups}, 1, 0.9)
    with pytest.raises(ValueError, match="moments must lie between 0 and 6, found 7"):
        backend.with_moments(7)
    with pytest.raises(ValueError, match="no compiled form"):
        chain_of(backend.with_moments(1))
