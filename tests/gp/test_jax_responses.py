"""Traced cell weights and Matern tables against the NumPy ones, values and derivatives, moving supports included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrm.gp.jax_matern import cell_covariance, cell_means, noise, prior_blocks, small_inverse
from msrm.gp.jax_responses import RULE, cell_weights, traced_curve
from msrm.latent_grid import GridPrior, Matern12, Matern32, Matern52, cell_basis
from msrm.responses import Bateman, DoubleGamma, Free, Gamma, Gaussian, Identity, quadrature

RESPONSES = {
    "gaussian": Gaussian(Free(0.6, (0.3, 1.5)), Free(0.5, (-1.0, 2.0))),
    "one parameter": Gaussian(0.5, Free(0.5, (-1.0, 2.0))),
    "gamma": Gamma(Free(3.0, (1.2, 8.0)), Free(0.5, (0.4, 2.0)), Free(0.3, (-1.0, 1.0))),
    "steep gamma": Gamma(Free(1.6, (1.2, 8.0)), Free(0.5, (0.4, 2.0)), Free(0.3, (-1.0, 1.0))),
    "double gamma": DoubleGamma(
        Free(6.0, (4.0, 9.0)), Free(0.4, (0.3, 1.0)), Free(12.0, (8.0, 16.0)), 0.4, Free(0.2, (0.0, 0.5)), 0.1
    ),
    "bateman": Bateman(Free(0.7, (0.3, 2.0)), Free(3.0, (1.0, 6.0)), Free(0.3, (0.0, 1.0))),
    "equal bateman": Bateman(Free(2.0, (0.3, 2.0)), Free(2.0, (1.0, 6.0)), Free(0.3, (0.0, 1.0))),
}


def placed(array, phase, cells):
    """The NumPy arrays (phase, cell, point) as windows that start one cell earlier."""
    out = np.zeros((len(phase), cells, RULE.order))
    some = min(array.shape[1], cells - 1)
    out[:, 1 : 1 + some] = array[phase][:, :some]
    return out


# Compiling takes the time: one smooth family and the hardest onset in every run.
CASES = [
    pytest.param(
        name, step, marks=[] if (name, step) in {("gaussian", 0.3), ("steep gamma", 0.9)} else pytest.mark.slow
    )
    for name in RESPONSES
    for step in (0.3, 0.9)
]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_weights_and_slopes_agree_with_numpy(name, step):
    response = RESPONSES[name]
    low, high = response.support()
    # Generic places in a cell, and onsets exactly on grid points.
    times = np.sort(np.append(np.random.default_rng(0).uniform(50.0, 60.0, 6), [53.0 + low, 55.7 + low]))
    made = quadrature(response, None, times, -100.0, step, int(260 / step))
    cells = int((high - low) / step) + 3
    ahead = jnp.asarray(times - (-100.0 + (made.first - 1) * step))
    curve = traced_curve(response, step)
    values = {name: jnp.asarray(value) if name in response.free else value for name, value in response.start.items()}

    def weights(free):
        return cell_weights(curve, step, cells, ahead, values | free)

    free = {name: values[name] for name in response.free}
    found, slopes = jax.jit(lambda free: (weights(free), jax.jacfwd(weights)(free)))(free)
    expected = placed(made.weights, made.phase, cells)
    # Summed over the points of a cell high Lagrange polynomials drop out: what a smooth functional sees.
    size = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9 * size)
    np.testing.assert_allclose(found.sum(-1), expected.sum(-1), rtol=0, atol=2e-12 * size)
    for name, slope in made.gradient.items():
        expected = placed(slope, made.phase, cells)
        # At an onset on a grid point the derivative is one-sided and 1e-8 of it may move to the next cell.
        np.testing.assert_allclose(
            slopes[name].sum((1, 2)), expected.sum((1, 2)), rtol=0, atol=1e-9 * np.abs(expected).max()
        )
        generic = np.isin(times, [53.0 + low, 55.7 + low], invert=True)
        size = np.abs(expected).max()
        np.testing.assert_allclose(slopes[name][generic].sum(-1), expected[generic].sum(-1), rtol=0, atol=1e-9 * size)


def test_reverse_and_second_derivatives():
    response = RESPONSES["gaussian"]
    curve, ahead = traced_curve(response, 0.5), jnp.asarray([6.23, 6.41])
    seen = jnp.asarray(np.random.default_rng(0).standard_normal((2, 20, RULE.order)))

    def value(theta):
        return (cell_weights(curve, 0.5, 20, ahead, {"width": theta[0], "lag": theta[1]}) * seen).sum()

    at, step = jnp.asarray([0.6, 0.5]), 1e-4
    np.testing.assert_allclose(jax.grad(value)(at), jax.jacfwd(value)(at), rtol=1e-12)
    hessian = jax.jit(jax.hessian(value))(at)
    for k in range(2):
        ahead_of, behind = (jax.grad(value)(at.at[k].add(sign * step)) for sign in (1, -1))
        # Central differences of step 1e-4: truncation 1e-8 relative.
        np.testing.assert_allclose(hessian[k], (ahead_of - behind) / (2 * step), rtol=1e-5, atol=1e-6)


def test_weights_are_smooth_where_the_support_leaves_a_cell():
    response = RESPONSES["gaussian"]
    curve = traced_curve(response, 0.5)

    def total(lag):
        weights = cell_weights(curve, 0.5, 40, jnp.asarray([10.0]), {"width": jnp.asarray(0.5), "lag": lag})
        return (weights * jnp.arange(40.0)[:, None]).sum()

    # The support's edge crosses a grid point at lag 0.5; its height is 1e-8 of the peak.
    slopes = [float(jax.grad(total)(lag)) for lag in (0.5 - 1e-9, 0.5, 0.5 + 1e-9)]
    np.testing.assert_allclose(slopes, slopes[1], rtol=1e-6)


def test_slopes_where_supports_end_on_grid_points_up_to_rounding():
    """Compiled code rounds a cell's edges differently in each place it computes them; no comparison may notice."""
    response = Gaussian(Free(0.8, (0.3, 1.5)), Free(1.0, (-1.0, 2.0)))
    times = np.arange(0.1, 20.0, 1.5)  # both ends of the support, -3.8 and 5.8 s, meet multiples of 0.9 s
    made = quadrature(response, None, times, -12.6, 0.9, 60)
    curve, ahead = traced_curve(response, 0.9), jnp.asarray(times + 12.6)

    def smooth(cells, weights):
        return (weights * np.cos(cells[..., None] + RULE.fractions)).sum((-2, -1))

    def seen(at):
        weights = cell_weights(curve, 0.9, 60, ahead, {"width": at[0], "lag": at[1]})
        return smooth(np.arange(60.0), weights)

    slopes = jax.jit(jax.jacfwd(seen))(jnp.asarray([0.8, 1.0]))
    for place, name in enumerate(("width", "lag")):
        weights = made.gradient[name][made.phase]
        expected = smooth(made.first[:, None] + np.arange(weights.shape[1]), weights)
        # Rounding alone; the height of the support's end, 1.5e-8, counted in one cell and not in the next was seen.
        np.testing.assert_allclose(slopes[:, place], expected, rtol=0, atol=1e-11)


def test_only_families_with_parameters_are_traced():
    with pytest.raises(TypeError, match="Identity has no free parameters"):
        traced_curve(Identity(), 0.3)


@pytest.mark.parametrize("matern", [Matern12(), Matern32(), Matern52()], ids=["1/2", "3/2", "5/2"])
@pytest.mark.parametrize("x", [0.1, 1.0, 4.0])
def test_matern_tables_agree_with_numpy(matern, x):
    basis, prior = cell_basis(matern, x, RULE.fractions[None]), GridPrior.on(matern, x, 5)
    mean, variance = cell_means(matern, jnp.asarray(x), jnp.asarray(RULE.fractions))
    covariance = cell_covariance(matern, jnp.asarray(x), jnp.asarray(RULE.fractions))
    np.testing.assert_allclose(mean, basis.mean[0], rtol=0, atol=1e-12)
    # Conditional variances are differences of numbers up to 1/x^2 times larger for Matern-5/2.
    size = np.abs(basis.covariance).max()
    np.testing.assert_allclose(covariance, basis.covariance[0], rtol=0, atol=1e-9 * size)
    np.testing.assert_allclose(variance, np.diagonal(covariance), rtol=0, atol=1e-9 * size)
    blocks = prior_blocks(matern, jnp.asarray(x), 5)
    band, found = prior.band(), np.asarray(blocks.within + blocks.first + blocks.last)
    expected = sum(np.diag(row[: len(found) - o], -o) for o, row in enumerate(band) if o < len(found))
    np.testing.assert_allclose(np.tril(found), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    np.testing.assert_allclose(4 * blocks.log_step + blocks.log_start, prior.log_determinant, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_small_inverse(order):
    root = np.random.default_rng(order).standard_normal((4, order, 2 * order))
    scale = np.diag(10.0 ** -np.arange(order))
    matrix = scale @ root @ np.swapaxes(root, 1, 2) @ scale
    inverse, logs = small_inverse(jnp.asarray(matrix))
    np.testing.assert_allclose(inverse, np.linalg.inv(matrix), rtol=1e-10)
    np.testing.assert_allclose(logs, np.linalg.slogdet(matrix)[1], rtol=1e-12)


def test_noise_over_long_steps_is_stationary():
    for matern in (Matern12(), Matern32(), Matern52()):
        np.testing.assert_allclose(noise(matern, jnp.asarray(20.0)), matern.stationary, rtol=0, atol=1e-9)
