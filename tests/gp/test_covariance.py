"""Covariances of filtered nodes against nested integrals with every kink on a boundary, slopes against differences."""

from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from msrm.gp.covariance import cross_covariance
from msrm.latent_grid import Matern12, Matern32, Matern52
from msrm.responses import Bateman, DoubleGamma, Free, Gamma, Gaussian, Identity, Sampled

MATERNS = {1: Matern12(), 2: Matern32(), 3: Matern52()}
X, W = np.polynomial.legendre.leggauss(90)


def free(value, reach=0.3):
    return Free(value, bounds=(value - reach * max(abs(value), 1), value + reach * max(abs(value), 1)))


IDENTITY = Identity()
GAUSSIAN = Gaussian(free(0.6), free(0.3))
WIDE = Gaussian(free(1.1), free(-0.4))
NARROW = Gaussian(free(0.05, 0.02), free(-0.4))
GAMMA = Gamma(free(3.0), free(0.78), free(0.1))
ONSET = Gamma(free(1.6), free(0.8), free(0.7))
DOUBLE = DoubleGamma(6.0, 0.9, 16.0, 0.9, 1 / 6, free(-0.2))
BATEMAN = Bateman(free(0.72), free(2.1), free(-0.1))
SAMPLED = Sampled([0.0, 0.8, 2.0, 5.0], [0.0, 1.0, -0.3, 0.0])


def matern(y, length_scale, dimension):
    r = np.sqrt(2 * dimension - 1) * np.abs(y) / length_scale
    return np.exp(-r) * (1 + r * (dimension > 1) + r * r / 3 * (dimension > 2))


def graded(onset, lower, upper, power=8):
    """Nodes and weights from lower to upper (arrays) that resolve any power of the distance from the onset."""
    a, b = (np.maximum(np.asarray(end) - onset, 0.0)[..., None] ** (1 / power) for end in (lower, upper))
    y = (a + b) / 2 + (b - a) / 2 * X
    return onset + y**power, (b - a) / 2 * W * power * y ** (power - 1)


def weighed(response, u, w):
    """Weights times h at nodes; gammas of shape below 2 keep accuracy at nodes next to the onset."""
    if isinstance(response, Gamma):
        p = response.start
        s = np.maximum(u - p["lag"], 1e-300)
        shape = (p["shape"] - 1) * np.log(s / p["scale"]) - s / p["scale"]
        top, weights = graded(0.0, 0.0, response.support()[1] - p["lag"])
        energy = np.sum(weights * np.exp(2 * (p["shape"] - 1) * np.log(top / p["scale"]) - 2 * top / p["scale"]))
        return w * np.exp(shape) / np.sqrt(energy)
    return w * response.curve(u)


def pieces(response, breaks):
    """The support, cut at breaks (..., break), as a list of (lower, upper)."""
    low, high = response.support()
    cuts = np.sort(np.clip(breaks, low, high), axis=-1)
    ends = [np.full(cuts.shape[:-1], low), *np.moveaxis(cuts, -1, 0), np.full(cuts.shape[:-1], high)]
    return list(pairwise(ends))


def knots(response):
    return np.array(response.lags[1:-1]) if isinstance(response, Sampled) else np.zeros(0)


def brute(a, b, lag, length_scale, dimension):
    """Nested Gauss rules with every kink on a boundary."""

    def through_b(y):
        if b.is_identity:
            return matern(y, length_scale, dimension)
        fixed = np.broadcast_to(knots(b), (*y.shape, len(knots(b))))
        total = np.zeros_like(y)
        for lower, upper in pieces(b, np.concatenate([-y[..., None], fixed], axis=-1)):
            w, weights = graded(b.support()[0], lower, upper)
            total += np.sum(weighed(b, w, weights) * matern(y[..., None] + w, length_scale, dimension), axis=-1)
        return total

    if a.is_identity:
        return through_b(np.array(lag))
    edges = [0.0] if b.is_identity else [*b.support(), *knots(b)]
    total = 0.0
    for lower, upper in pieces(a, np.array([lag + edge for edge in edges] + list(knots(a)))):
        u, weights = graded(a.support()[0], lower, upper)
        total += np.sum(weighed(a, u, weights) * through_b(lag - u))
    return total


CLOSED = [
    (IDENTITY, GAUSSIAN),
    (GAUSSIAN, WIDE),
    (WIDE, WIDE),
    (NARROW, GAUSSIAN),
    (IDENTITY, IDENTITY),
]
CELLS = [
    (IDENTITY, GAMMA),
    (ONSET, IDENTITY),
    (GAMMA, GAUSSIAN),
    (ONSET, ONSET),
    (NARROW, BATEMAN),
    (DOUBLE, GAMMA),
    (BATEMAN, BATEMAN),
    (SAMPLED, GAUSSIAN),
    (IDENTITY, SAMPLED),
]


def named(pair):
    return "-".join(type(response).__name__ for response in pair)


@pytest.mark.parametrize("dimension", MATERNS)
@pytest.mark.parametrize("pair", CLOSED + CELLS, ids=named)
def test_values_match_nested_integrals(pair, dimension):
    a, b = pair
    lags = np.array([-9.3, -0.7, 0.0, 0.42, 3.9, 14.0])
    for length_scale in (3.0, 0.7):
        found, _ = cross_covariance(
            a, None, b, None, lags, length_scale=length_scale, matern=MATERNS[dimension], gradient=False
        )
        expected = [brute(a, b, lag, length_scale, dimension) for lag in lags]
        scale = max(1.0, abs(a.gain() * b.gain()))
        # Stated errors; the oracle keeps 1e-12.
        tolerance = 3e-12 if pair in CLOSED else 2e-11 if dimension > 1 else 1e-8
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    ("pair", "dimension"),
    [(pair, d) for pair in CLOSED for d in MATERNS]
    + [(pair, 2) for pair in CELLS]
    + [((ONSET, GAMMA), d) for d in (1, 3)],
    ids=lambda value: named(value) if isinstance(value, tuple) else str(value),
)
def test_slopes_match_differences(pair, dimension):
    a, b = pair
    lags = np.array([-9.3, -0.7, 0.0, 0.42, 3.9, 14.0])
    steps, weights = np.arange(1, 5), np.array([4 / 5, -1 / 5, 4 / 105, -1 / 280])

    def at(side="", name="", move=0.0, gradient=False):
        values = {"a": dict(a.start), "b": dict(b.start)}
        if side in values:
            values[side][name] += move
        length_scale = 3.0 + (move if side == "length_scale" else 0.0)
        return cross_covariance(
            a,
            values["a"],
            b,
            values["b"],
            lags,
            length_scale=length_scale,
            matern=MATERNS[dimension],
            gradient=gradient,
        )

    _, slopes = at(gradient=True)
    assert slopes.keys() == {("a", n) for n in a.free} | {("b", n) for n in b.free} | {("length_scale", "")}
    for (side, name), slope in slopes.items():
        start = {"a": a.start, "b": b.start}.get(side, {"": 3.0})[name]
        h = 2e-3 * min(1.0, abs(start) if name == "width" else 1.0)
        moved = [at(side, name, k * h)[0] - at(side, name, -k * h)[0] for k in steps]
        numeric = sum(w * m for w, m in zip(weights, moved, strict=True)) / h
        # Eighth-order differences: the values' own error over the step. Matern-1/2 has corners at the cells' edges.
        tolerance = 1e-10 if pair in CLOSED else 2e-9 if dimension > 1 else 2e-6
        np.testing.assert_allclose(slope, numeric, rtol=1e-9, atol=tolerance, err_msg=f"{side} {name}")


@pytest.mark.parametrize("pair", CLOSED + CELLS, ids=named)
def test_exchanging_the_responses_reverses_the_lag(pair):
    lags = np.linspace(-12, 15, 31)
    options = dict(length_scale=2.0, matern=Matern32())
    one, slopes = cross_covariance(pair[0], None, pair[1], None, lags, **options)
    two, swapped = cross_covariance(pair[1], None, pair[0], None, -lags, **options)
    np.testing.assert_allclose(one, two, rtol=0, atol=2e-11 * max(1, np.abs(one).max()))
    for (side, name), slope in slopes.items():
        other = swapped[{"a": "b", "b": "a"}.get(side, side), name]
        np.testing.assert_allclose(slope, other, rtol=0, atol=1e-9 * max(1, np.abs(slope).max()))


def test_joint_covariance_is_positive_definite():
    responses = [IDENTITY, GAUSSIAN, ONSET, BATEMAN, DOUBLE]
    times = [np.arange(0.0, 20, 2.0) + 0.3 * i for i in range(len(responses))]
    blocks = [
        [
            cross_covariance(
                a, None, b, None, (t[:, None] - s).ravel(), length_scale=3.0, matern=Matern32(), gradient=False
            )[0].reshape(len(t), len(s))
            for b, s in zip(responses, times, strict=True)
        ]
        for a, t in zip(responses, times, strict=True)
    ]
    joint = np.block(blocks)
    np.testing.assert_allclose(joint, joint.T, rtol=0, atol=1e-10)
    # The smallest eigenvalue of exact covariances is positive; errors of 1e-11 must not pull it far below zero.
    assert np.linalg.eigvalsh(joint).min() > -1e-9


def test_far_lags_are_uncorrelated_and_extremes_stay_finite():
    far = np.array([-4000.0, 4000.0])
    for pair in ((GAUSSIAN, WIDE), (GAMMA, BATEMAN), (IDENTITY, IDENTITY)):
        values, slopes = cross_covariance(*(pair[0], None), *(pair[1], None), far, length_scale=3.0, matern=Matern32())
        np.testing.assert_allclose(values, 0.0, atol=1e-15)
        assert all(np.isfinite(slope).all() for slope in slopes.values())
    lags = np.linspace(-20, 20, 9)
    # Widths of 40 length scales and of a thousandth: where e^(alpha^2 / 2) overflows and where alpha vanishes.
    for width, length_scale in ((4.0, 0.1), (0.003, 3.0)):
        response = Gaussian(Free(width, bounds=(width / 2, width * 2)), 0.0)
        values, slopes = cross_covariance(
            response, None, response, None, lags, length_scale=length_scale, matern=Matern52()
        )
        s = np.sqrt(2) * width
        for lag, value in zip(lags, values, strict=True):
            points = [z for z in lag / s + np.array([-0.5, -0.1, 0.0, 0.1, 0.5]) if abs(z) < 9]
            expected, _ = quad(
                lambda z, x=lag, s=s, scale=length_scale: matern(x - s * z, scale, 3) * norm.pdf(z),
                *(-9, 9),
                points=points or None,
                epsabs=1e-15,
                limit=300,
            )
            # The integral leaves out the cut at six widths: 4e-9 of the largest value.
            assert value == pytest.approx(response.gain() ** 2 * expected, rel=1e-8, abs=4e-9 * values.max())
        assert all(np.isfinite(slope).all() for slope in slopes.values())
