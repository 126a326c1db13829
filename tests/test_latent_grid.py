"""Matern states on a uniform grid against matrix exponentials, textbook kernels and dense conditioning."""

import numpy as np
import pytest
from gp_oracles import IMPULSE, finite_difference, functional_covariance, gaussian_functional, matern_covariance
from scipy.linalg import expm

from msrm.banded import TemporalRows
from msrm.latent_grid import (
    GridPrior,
    Matern12,
    Matern32,
    Matern52,
    UniformGrid,
    cell_basis,
    difference_rows,
    functionals,
)
from msrm.responses import Free, Gaussian, Identity

MATERNS = [Matern12(), Matern32(), Matern52()]
SMOOTHNESS = {1: 0.5, 2: 1.5, 3: 2.5}
# Stationary covariance of (f, f'/rate, f''/rate^2), from the kernels' derivatives at lag zero.
STATIONARY = {
    1: np.eye(1),
    2: np.eye(2),
    3: np.array([[1.0, 0.0, -1 / 3], [0.0, 1 / 3, 0.0], [-1 / 3, 0.0, 1.0]]),
}
COMPANION = {
    1: np.array([[-1.0]]),
    2: np.array([[0.0, 1], [-1, -2]]),
    3: np.array([[0.0, 1, 0], [0, 0, 1], [-1, -3, -3]]),
}


def state_covariance(dimension: int, places: np.ndarray) -> np.ndarray:
    """Covariance of the states at scaled times, from matrix exponentials."""
    gaps = places[:, None] - places
    lags, index = np.unique(np.abs(gaps), return_inverse=True)
    later = (expm(COMPANION[dimension] * lags[:, None, None]) @ STATIONARY[dimension])[index.reshape(gaps.shape)]
    full = np.where((gaps >= 0.0)[..., None, None], later, np.swapaxes(later, -1, -2))
    return np.swapaxes(full, 1, 2)


def of_band(band: np.ndarray) -> np.ndarray:
    return sum(
        np.diag(row[: len(row) - o], -o) + (np.diag(row[: len(row) - o], o) if o else 0) for o, row in enumerate(band)
    )


@pytest.mark.parametrize("matern", MATERNS)
def test_kernel_transition_and_noise(matern):
    s = matern.dimension
    lags = np.array([0.0, 0.3, 1.0, 7.0])
    np.testing.assert_allclose(matern.covariance(lags, 2.0), matern_covariance(lags, 2.0, SMOOTHNESS[s]), rtol=1e-14)
    for x in (0.1, 1.0, 5.0, 15.0, 60.0):
        transition = expm(COMPANION[s] * x)
        np.testing.assert_allclose(matern.transition(x), transition, rtol=1e-12, atol=1e-15)
        noise = STATIONARY[s] - transition @ STATIONARY[s] @ transition.T
        np.testing.assert_allclose(matern.noise(x), noise, atol=1e-15)
    np.testing.assert_array_equal(matern.stationary, STATIONARY[s])


@pytest.mark.parametrize("matern", MATERNS)
def test_noise_keeps_its_digits_on_short_steps(matern):
    # For small x the process noise of f is q x^(2 s - 1) / ((s - 1)!^2 (2 s - 1)) (1 - 2 x (2 s - 1) / (2 s) + ...).
    s, x = matern.dimension, 1e-4
    leading = {1: 2.0, 2: 4.0 / 3.0, 3: 16.0 / 3.0 / 20.0}[s] * x ** (2 * s - 1)
    np.testing.assert_allclose(matern.noise(x)[0, 0], leading, rtol=3 * x)
    assert np.linalg.eigvalsh(matern.noise(x) / np.sqrt(np.outer(*[np.diag(matern.noise(x))] * 2))).min() > 1e-4


@pytest.mark.parametrize("matern", MATERNS)
def test_prior_precision_is_the_inverse_of_the_states_covariance(matern):
    count, x = 6, 0.4
    s = matern.dimension
    covariance = state_covariance(s, x * np.arange(count)).reshape(count * s, count * s)
    prior = GridPrior.on(matern, x, count)
    np.testing.assert_allclose(of_band(prior.band()) @ covariance, np.eye(count * s), atol=1e-9)
    np.testing.assert_allclose(prior.log_determinant, -np.linalg.slogdet(covariance)[1], rtol=1e-10)


@pytest.mark.parametrize("matern", MATERNS)
def test_prior_slope(matern):
    count, x, s = 5, 0.4, matern.dimension
    states = np.random.default_rng(0).standard_normal((count, s, 2))
    moments = tuple(
        np.einsum("lik,ljk->ij", a, b)
        for a, b in ((states[:-1], states[:-1]), (states[1:], states[:-1]), (states[1:], states[1:]))
    )

    def density(at: np.ndarray) -> float:
        prior = GridPrior.on(matern, float(at[0]), count)
        flat = states.reshape(-1, 2)
        return prior.log_determinant - 0.5 * np.einsum("ik,ij,jk->", flat, of_band(prior.band()), flat)

    found = GridPrior.on(matern, x, count).slope(moments, 2)
    np.testing.assert_allclose(found, finite_difference(density, np.array([x]), (0,), 1e-4), rtol=1e-8)


@pytest.mark.parametrize("matern", MATERNS)
def test_cell_basis_is_dense_conditioning_on_the_two_ends(matern):
    s, x = matern.dimension, 0.7
    fractions = np.array([[0.1, 0.5, 0.93], [0.0, 0.3, 1.0]])
    basis = cell_basis(matern, x, fractions)
    for row, part in enumerate(fractions):
        covariance = state_covariance(s, x * np.array([0.0, 1.0, *part]))
        ends = covariance[:2, :, :2].reshape(2 * s, 2 * s)
        across = covariance[2:, 0, :2].reshape(3, 2 * s)
        mean = np.linalg.solve(ends, across.T).T
        np.testing.assert_allclose(basis.mean[row], mean, atol=1e-10)
        left = covariance[2:, 0, 2:, 0] - mean @ across.T
        np.testing.assert_allclose(basis.covariance[row], left, atol=1e-11)
    for name in ("mean", "covariance"):
        ahead, behind = (getattr(cell_basis(matern, x + h, fractions), name) for h in (1e-5, -1e-5))
        np.testing.assert_allclose(getattr(basis, f"{name}_slope"), (ahead - behind) / 2e-5, atol=1e-8)


@pytest.mark.parametrize("matern", MATERNS)
@pytest.mark.parametrize("moments", [1, 3])
def test_moments_of_a_cell_are_conditioned_on(matern, moments):
    s, x = matern.dimension, 0.7
    kink = {1: 1e-11, 2: 2e-6, 3: 1e-8}[s]  # the integrals of Matern-1/2 are split at it
    fractions = np.array([[0.1, 0.5, 0.93], [0.0, 0.3, 1.0]])
    basis = cell_basis(matern, x, fractions, moments)
    places, weights = (part / 2.0 for part in np.polynomial.legendre.leggauss(10))
    places = places + 0.5
    polynomials = np.polynomial.legendre.legvander(2.0 * places - 1.0, moments - 1) * weights[:, None]
    for row, part in enumerate(fractions):
        # The bridge's covariance with each point, integrated on both sides of the kink there.
        points = np.concatenate([part, places])
        pieces = np.concatenate([points[:, None] * places, points[:, None] + (1.0 - points[:, None]) * places], axis=1)
        shares = np.concatenate([points[:, None] * weights, (1.0 - points[:, None]) * weights], axis=1)
        at = np.array([0.0, 1.0, *points, *pieces.ravel()])
        full = state_covariance(s, x * at)
        ends = full[:2, :, :2].reshape(2 * s, 2 * s)
        across = full[2:, 0, :2].reshape(len(at) - 2, 2 * s)
        mean = np.linalg.solve(ends, across.T).T
        bridge = full[2:, 0, 2:, 0] - mean @ across.T
        to_pieces = bridge[: len(points), len(points) :].reshape(len(points), *pieces.shape)
        to_pieces = to_pieces[np.arange(len(points)), np.arange(len(points))] * shares
        of_moments = np.einsum("pq,pqk->pk", to_pieces, np.polynomial.legendre.legvander(2 * pieces - 1, moments - 1))
        gain = np.linalg.solve(polynomials.T @ of_moments[3:], of_moments[:3].T).T
        np.testing.assert_allclose(basis.mean[row, :, : 2 * s], mean[:3], atol=1e-10)
        np.testing.assert_allclose(basis.covariance[row], bridge[:3, :3] - gain @ of_moments[:3].T, atol=kink)
        loadings = basis.mean[row, :, 2 * s :]
        np.testing.assert_allclose(loadings @ loadings.T, gain @ of_moments[:3].T, atol=kink)

    def invariants(at: float) -> np.ndarray:
        found = cell_basis(matern, at, fractions, moments)
        loadings = found.mean[..., 2 * s :]
        return np.stack([found.covariance, loadings @ np.swapaxes(loadings, 1, 2)])

    crossed = basis.mean_slope[..., 2 * s :] @ np.swapaxes(basis.mean[..., 2 * s :], 1, 2)
    slopes = np.stack([basis.covariance_slope, crossed + np.swapaxes(crossed, 1, 2)])
    np.testing.assert_allclose(slopes, (invariants(x + 1e-5) - invariants(x - 1e-5)) / 2e-5, atol=1e-8)


@pytest.mark.parametrize("matern", MATERNS)
def test_prior_of_moments_is_independent_of_that_of_the_states(matern):
    count, x, s = 4, 0.4, matern.dimension
    precision = of_band(GridPrior.on(matern, x, count, 2).band())
    states = (np.arange(count)[:, None] * (s + 2) + np.arange(s)).ravel()
    np.testing.assert_array_equal(
        precision[np.ix_(states, states)], of_band(GridPrior.on(matern, x, count).band())[: len(states), : len(states)]
    )
    precision[np.ix_(states, states)] = np.eye(len(states))
    np.testing.assert_array_equal(precision, np.eye(count * (s + 2)))


@pytest.mark.parametrize("matern", MATERNS)
def test_moments_take_up_the_covariances_of_functionals(matern):
    grid = UniformGrid.covering(-6.0, 10.0, 0.9, anchor=0.0)
    times = np.array([0.17, 0.4, 1.9, 4.0, 4.3])
    nodes = [(gaussian_functional(0.5, 0.3), time) for time in times]
    exact = functional_covariance(nodes, 2.0, SMOOTHNESS[matern.dimension])
    rate, left = matern.rate(2.0), []
    for moments in range(4):
        made = functionals(grid, matern, 2.0, Gaussian(width=0.5, lag=0.3), None, times, moments=moments)
        prior = np.linalg.inv(of_band(GridPrior.on(matern, rate * grid.step, grid.count, moments).band()))
        weights = made.rows.matrix.toarray()
        covariance = weights @ prior @ weights.T
        # The residual is integrated across the kink, of order 2 s - 1, of the bridge's covariance.
        tolerance = {1: 2e-3, 2: 1e-6, 3: 5e-9}[matern.dimension]
        np.testing.assert_allclose(np.diag(covariance) + made.residual, np.diag(exact), atol=tolerance)
        left.append(np.abs(covariance - exact).max())
    assert left[1] < 0.1 * left[0]
    assert left[2] < 0.3 * left[1]
    assert left[3] < max(0.3 * left[2], {1: 0.0, 2: 1e-6, 3: 1e-8}[matern.dimension])  # integrals across the kink


@pytest.mark.parametrize("matern", MATERNS)
def test_functionals_and_residuals_are_the_conditional_moments(matern):
    grid = UniformGrid.covering(-5.0, 9.0, 0.6, anchor=0.0)
    assert grid.times[0] <= -5.6
    assert grid.times[-1] >= 9.6
    assert np.any(np.abs(grid.times) < 1e-12)
    response = Gaussian(width=0.5, lag=0.3)
    times = np.array([0.17, 1.9, 4.0])
    rate = matern.rate(2.0)
    nodes = [(gaussian_functional(0.5, 0.3), time) for time in times] + [(IMPULSE, time) for time in times]
    s = matern.dimension
    prior = np.linalg.inv(of_band(GridPrior.on(matern, rate * grid.step, grid.count).band()))
    smooth = functionals(grid, matern, 2.0, response, None, times)
    direct = functionals(grid, matern, 2.0, Identity(), None, times)
    weights = np.vstack([smooth.rows.matrix.toarray(), direct.rows.matrix.toarray()])
    residual = np.concatenate([smooth.residual, direct.residual])
    covariance = functional_covariance(nodes, 2.0, SMOOTHNESS[s])
    # Weighted states and the residual have the functionals' variances. Residuals are interpolated across the kink of
    # the conditional covariance, of order 2 s - 1.
    tolerance = {1: 4e-4, 2: 2e-8, 3: 2e-9}[s]
    np.testing.assert_allclose(
        np.einsum("ni,ij,nj->n", weights, prior, weights) + residual, np.diag(covariance), atol=tolerance
    )
    assert np.all(residual > 0.0)
    on_grid = functionals(grid, matern, 2.0, Identity(), None, grid.times[2:4])
    np.testing.assert_allclose(on_grid.residual, 0.0, atol=1e-14)


@pytest.mark.parametrize("matern", MATERNS)
def test_derivatives_of_functionals(matern):
    grid = UniformGrid.covering(-6.0, 8.0, 0.6, anchor=0.0)
    response = Gaussian(width=Free(0.5, bounds=(0.2, 1.0)), lag=Free(0.3, bounds=(-1.0, 1.0)))
    times, values = np.array([0.17, 1.93]), {"width": 0.55, "lag": 0.21}

    def at(moved: dict[str, float], length_scale: float = 2.0):
        made = functionals(grid, matern, length_scale, response, moved, times, length_scale_slope=True)
        return made, made.rows.matrix.toarray()

    made, _ = at(values)
    h = 1e-5
    shifts = {name: (at({**values, name: values[name] + h}), at({**values, name: values[name] - h})) for name in values}
    shifts["length_scale"] = at(values, 2.0 + h), at(values, 2.0 - h)
    for name, ((ahead, rows_ahead), (behind, rows_behind)) in shifts.items():
        np.testing.assert_allclose(
            made.row_slopes[name].matrix.toarray(), (rows_ahead - rows_behind) / (2 * h), atol=1e-8
        )
        np.testing.assert_allclose(made.residual_slopes[name], (ahead.residual - behind.residual) / (2 * h), atol=1e-8)


def test_difference_rows_combine_rows_in_one_window():
    rng = np.random.default_rng(1)
    rows = TemporalRows(np.array([0, 2, 5]), rng.standard_normal((3, 4)), 9)
    pairs = np.array([[0, 0], [1, 0], [2, 1], [2, 0]])
    coefficients = np.column_stack([rng.uniform(0.5, 1.0, 4), -rng.uniform(0.1, 0.5, 4)])
    dense = rows.matrix.toarray()
    expected = coefficients[:, :1] * dense[pairs[:, 0]] + coefficients[:, 1:] * dense[pairs[:, 1]]
    np.testing.assert_allclose(difference_rows(rows, pairs, coefficients).matrix.toarray(), expected, atol=1e-15)
