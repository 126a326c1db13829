"""Responses against reference curves, and against contour integrals whose derivatives are complex steps.

The oracle shares no code with the package: curves are written out again, normalized by quadrature, and integrated in
the variable (u - onset)^(1/9), which resolves any onset. Every formula is analytic in its parameters, so a parameter
moved by 1e-30 i, moving edges included, yields derivatives without cancellation.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.special import gamma as gamma_function
from scipy.special import gammainccinv, loggamma

from msrm.priors import LogNormal, Normal, Uniform
from msrm.responses import (
    Bateman,
    DoubleGamma,
    Free,
    Gamma,
    Gaussian,
    Identity,
    Sampled,
    hat_rows,
    quadrature,
)

GRID = dict(start=-130.0, step=0.9, count=400)
TIMES = np.array([4.0, 11.13, 30.62, 30.6200001, 57.77])
X, W = np.polynomial.legendre.leggauss(160)
POWER = 9


def wide(value, reach=0.45):
    return Free(value, bounds=(value * (1 - reach), value * (1 + reach)))


def lag(value):
    return Free(value, bounds=(value - 3, value + 3))


RESPONSES = {
    "gaussian": Gaussian(width=wide(0.6), lag=lag(0.35)),
    "narrow gaussian": Gaussian(width=wide(0.1), lag=lag(-1.2)),
    "gamma 3": Gamma(shape=wide(3.0), scale=wide(1.0), lag=lag(0.0)),
    "gamma 1.6": Gamma(shape=wide(1.6), scale=wide(0.8), lag=lag(0.7)),
    "exponential": Gamma(shape=wide(1.0), scale=wide(1.1), lag=lag(0.2)),
    "gamma 0.8": Gamma(shape=wide(0.8, 0.2), scale=wide(1.1), lag=lag(0.0)),
    "narrow gamma": Gamma(shape=wide(1.3), scale=wide(0.08), lag=lag(0.2)),
    "late gamma": Gamma(shape=wide(20.0), scale=wide(0.4), lag=lag(-2.0)),
    "double gamma": DoubleGamma(wide(6.0), wide(0.9), wide(16.0), wide(0.9), wide(1 / 6), lag(0.1)),
    "onset double gamma": DoubleGamma(wide(1.4), wide(1.5), wide(5.0), wide(1.1), wide(0.3), lag(0.5)),
    "bateman": Bateman(rise=wide(0.7), decay=wide(3.0), lag=lag(-0.13)),
    "equal bateman": Bateman(rise=wide(1.0), decay=wide(1.0), lag=lag(0.4)),
    "nearly equal bateman": Bateman(rise=wide(1.0), decay=wide(1.051), lag=lag(0.4)),
    "slow bateman": Bateman(rise=wide(6.0), decay=wide(28.0), lag=lag(0.4)),
}


# ---------------------------------------------------------------- oracle


def cut(shape, scale):
    """Support of a gamma; beyond real arguments by its slope (the cut matters to 1e-8, a slope to 1e-7 is plenty)."""
    k = np.real(shape)
    slope = (gammainccinv(k * (1 + 1e-4), 1e-8) - gammainccinv(k * (1 - 1e-4), 1e-8)) / (2e-4 * k)
    return scale * (gammainccinv(k, 1e-8) + slope * (shape - k))


def density(s, shape, scale):
    return s ** (shape - 1) * np.exp(-s / scale - loggamma(shape)) / scale**shape


def oracle(response, p):
    """Unscaled curve of s = u - onset, onset and support length, for complex parameters."""
    if isinstance(response, Gaussian):
        return lambda s: np.exp(-0.5 * (s / p["width"] - 6) ** 2), p["lag"] - 6 * p["width"], 12 * p["width"]
    if isinstance(response, Gamma):
        return lambda s: density(s, p["shape"], p["scale"]), p["lag"], cut(p["shape"], p["scale"])
    if isinstance(response, DoubleGamma):
        peak, under = (p["peak_shape"], p["peak_scale"]), (p["undershoot_shape"], p["undershoot_scale"])
        length = max(cut(*peak), cut(*under), key=np.real)
        return lambda s: density(s, *peak) - p["undershoot_ratio"] * density(s, *under), p["lag"], length
    rise, decay = p["rise"], p["decay"]
    # The divided difference as a mean of slopes between the constants, exact however close they are.
    x, w = np.polynomial.legendre.leggauss(16)
    tau = (rise + decay) / 2 + (decay - rise) / 2 * x

    def difference(s):
        if abs(rise - decay) > 0.3:
            return (np.exp(-s / decay) - np.exp(-s / rise)) / (decay - rise)
        return s * np.sum(w / 2 * np.exp(-s[:, None] / tau) / tau**2, axis=1)

    return difference, p["lag"], 90.0


def integral(function, lower, upper):
    """Of function(s) from complex ``lower`` to ``upper``, along s = y^POWER."""
    a, b = (complex(end) ** (1 / POWER) for end in (lower, upper))
    y = (a + b) / 2 + (b - a) / 2 * X
    return np.sum(W * (b - a) / 2 * POWER * y ** (POWER - 1) * function(y**POWER))


def filtered(response, p, functions, t, breaks=()):
    """Integral of h(u) f(t - u) du of unit energy; functions(time) is f as an analytic function between the breaks."""
    h, onset, length = oracle(response, p)
    pieces = [0.0, *np.linspace(0.02, 1, 30) * length] if not len(breaks) else [0.0, length]
    energy = sum(integral(lambda s: h(s) ** 2, a, b) for a, b in pairwise(pieces))
    inner = sorted(t - b - onset for b in breaks if 0 < np.real(t - b - onset) < np.real(length))
    ends = [0.0, *inner, length] if len(breaks) else pieces
    total = 0.0
    for a, b in pairwise(ends):
        f = functions(t - np.real(onset + (a + b) / 2))
        total += integral(lambda s, f=f: h(s) * f(t - onset - s), a, b)
    return total / np.sqrt(energy)


def value_and_slopes(response, functions, t, breaks=()):
    value = np.real(filtered(response, response.start, functions, t, breaks))
    slopes = {}
    for name in response.free:
        p = {**response.start, name: response.start[name] + 1e-30j}
        slopes[name] = np.imag(filtered(response, p, functions, t, breaks)) / 1e-30
    return value, slopes


def smooth(time):
    """A latent that is analytic everywhere."""
    return lambda s: np.sin(0.8 * s) + np.exp(-0.01 * s) * np.cos(0.3 * s)


def piecewise(levels):
    """The piecewise linear latent with the given values at the grid points, as an analytic function per cell."""
    start, step = GRID["start"], GRID["step"]

    def functions(time):
        cell = int(np.floor((time - start) / step))
        slope = (levels[cell + 1] - levels[cell]) / step
        return lambda s: levels[cell] + slope * (s - (start + step * cell))

    return functions


def integrated(rule, weights, f):
    nodes = GRID["start"] + rule.step * rule.first[:, None, None] + rule.nodes[rule.phase]
    return np.sum(weights[rule.phase] * f(nodes), axis=(1, 2))


# ---------------------------------------------------------------- integrals


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_quadrature_and_its_gradient_match_contour_integrals(response):
    rule = quadrature(response, None, TIMES, **GRID)
    values = integrated(rule, rule.weights, smooth(0))
    slopes = {name: integrated(rule, weights, smooth(0)) for name, weights in rule.gradient.items()}
    assert list(slopes) == list(response.free)
    for n, t in enumerate(TIMES):
        value, expected = value_and_slopes(response, smooth, t)
        # 1e-12 of the largest possible value; the oracle's own rounding is 1e-14.
        assert values[n] == pytest.approx(value, abs=1e-12 * max(1, response.gain()))
        for name, slope in expected.items():
            assert slopes[name][n] == pytest.approx(slope, rel=1e-10, abs=1e-11), name


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_hat_rows_and_their_gradient_match_contour_integrals(response):
    levels = np.random.default_rng(0).normal(size=GRID["count"])
    rows, slopes = hat_rows(response, None, TIMES, **GRID)
    breaks = GRID["start"] + GRID["step"] * np.arange(GRID["count"])
    for n, t in enumerate(TIMES[:4]):
        value, expected = value_and_slopes(response, piecewise(levels), t, breaks)
        assert rows.apply(levels)[n] == pytest.approx(value, abs=1e-12 * max(1, response.gain()))
        for name, slope in expected.items():
            assert slopes[name].apply(levels)[n] == pytest.approx(slope, rel=1e-10, abs=1e-10), name


@pytest.mark.parametrize("step", [0.9, 0.3])
@pytest.mark.parametrize("name", ["gaussian", "gamma 1.6", "exponential", "double gamma", "bateman"])
def test_results_are_smooth_in_the_lag_through_every_crossing(name, step):
    # Filtering a sinusoid with a shifted response is a sinusoid in the shift: amplitude and phase from two lags
    # give all others, whatever cell edges the support passes.
    response = RESPONSES[name]
    frequency, t = 0.7, 20.0
    lags = response.start["lag"] + np.linspace(-1.3, 1.3, 53)

    def along(lag, phase):
        rule = quadrature(response, {"lag": lag}, np.array([t]), -130.0, step, 600)
        nodes = -130.0 + step * rule.first[:, None, None] + rule.nodes[rule.phase]
        wave = np.cos(frequency * nodes + phase)
        return np.sum(rule.weights * wave), np.sum(rule.gradient["lag"] * wave)

    cosine, sine = (along(lags[0], phase)[0] for phase in (0.0, -np.pi / 2))
    turned = frequency * (lags - lags[0])
    values, slopes = np.array([along(lag, 0.0) for lag in lags]).T
    np.testing.assert_allclose(values, cosine * np.cos(turned) + sine * np.sin(turned), rtol=0, atol=2e-12)
    expected = frequency * (sine * np.cos(turned) - cosine * np.sin(turned))
    np.testing.assert_allclose(slopes, expected, rtol=0, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(RESPONSES)),
    shift=st.floats(-1.0, 1.0),
    time=st.floats(0.0, 50.0),
    step=st.floats(0.2, 3.0),
)
def test_hat_functions_sum_to_the_gain(name, shift, time, step):
    response = RESPONSES[name]
    values = {"lag": response.start["lag"] + shift}
    rows, slopes = hat_rows(response, values, np.array([time, time + 0.37 * step]), -140.0, step, int(320 / step))
    gain, gain_slopes = response.gain(values), response.gain_gradient(values)
    # Rounding of 500 cells; slopes carry the differences of neighbouring cells, 1 / step each.
    np.testing.assert_allclose(rows.weights.sum(axis=1), gain, rtol=0, atol=2e-12 * max(1, gain))
    for parameter, slope in slopes.items():
        np.testing.assert_allclose(slope.weights.sum(axis=1), gain_slopes[parameter], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("step", [0.07, 0.9, 4.0])
@pytest.mark.parametrize("order", [4, 12, 16])
def test_cell_size_and_order_change_nothing_for_low_polynomials(step, order):
    for name in ("gaussian", "narrow gamma", "gamma 0.8", "bateman"):
        response = RESPONSES[name]
        rule = quadrature(response, None, TIMES, -130.0, step, int(300 / step) + 2, order=order)
        nodes = -130.0 + step * rule.first[:, None, None] + rule.nodes[rule.phase]
        cubic = np.sum(rule.weights[rule.phase] * ((nodes - TIMES[:, None, None]) / 10) ** 3, axis=(1, 2))
        expected = [filtered(response, response.start, lambda _: lambda x: ((x - t) / 10) ** 3, t) for t in TIMES]  # noqa: B023
        np.testing.assert_allclose(cubic, np.real(expected), rtol=1e-11, atol=1e-13)


def test_identity_interpolates():
    rows, slopes = hat_rows(Identity(), None, np.array([0.0, 0.25, 3.0]), 0.0, 0.5, 7)
    assert slopes == {}
    np.testing.assert_allclose(rows.matrix.toarray()[:, [0, 1, 6]], [[1, 0, 0], [0.5, 0.5, 0], [0, 0, 1]], atol=1e-15)
    rule = quadrature(Identity(), None, np.array([0.1, 0.6, 2.9]), 0.0, 0.5, 7)
    np.testing.assert_array_equal(rule.first, [0, 1, 5])
    np.testing.assert_allclose(0.5 * rule.first + rule.nodes[rule.phase][:, 0, 0], [0.1, 0.6, 2.9], rtol=1e-15)
    np.testing.assert_array_equal(rule.weights, 1.0)


def test_sampled_is_linear_between_knots_and_keeps_its_sign():
    lags, heights = np.array([-0.4, 0.3, 0.5, 2.2]), np.array([1.0, -2.0, 0.5, -1.0])
    response = Sampled(lags, heights)
    energy = sum(quad(lambda u: np.interp(u, lags, heights) ** 2, a, b, epsabs=1e-14)[0] for a, b in pairwise(lags))
    u = np.linspace(-0.4, 2.2, 11)
    np.testing.assert_allclose(response.curve(u), np.interp(u, lags, heights) / np.sqrt(energy), rtol=1e-12)
    assert response.curve(2.3) == response.curve(-0.5) == 0
    times = np.array([5.0, 9.37, 9.3])
    levels = np.random.default_rng(1).normal(size=20)
    grid = 0.7 * np.arange(20)
    rows, _ = hat_rows(response, None, times, 0.0, 0.7, 20)
    rule = quadrature(response, None, times, 0.0, 0.7, 20)
    nodes = 0.7 * rule.first[:, None, None] + rule.nodes[rule.phase]
    smooth_values = np.sum(rule.weights[rule.phase] * np.sin(nodes), axis=(1, 2))
    for n, t in enumerate(times):
        cuts = np.sort(np.concatenate([lags, t - grid[(t - grid > lags[0]) & (t - grid < lags[-1])]]))
        for f, found in ((lambda s: np.interp(s, grid, levels), rows.apply(levels)[n]), (np.sin, smooth_values[n])):
            expected = sum(
                quad(lambda u, f=f, t=t: response.curve(u) * f(t - u), a, b, epsabs=1e-14)[0] for a, b in pairwise(cuts)
            )
            assert found == pytest.approx(expected, abs=1e-13)


# ---------------------------------------------------------------- curves, gains, supports


def built(record):
    families = {"Gaussian": Gaussian, "Gamma": Gamma, "DoubleGamma": DoubleGamma, "Bateman": Bateman}
    return families[record["family"]](**record["parameters"])


def test_curves_match_the_reference(reference):
    for record in reference("responses.json"):
        response = built(record)
        np.testing.assert_allclose(response.curve(record["lags"]), record["values"], rtol=0, atol=1e-13)
        # The reference cuts gammas at 1 - 1e-8, whose rounding moves the cut by 1e-8 s.
        np.testing.assert_allclose(response.support(), record["support"], rtol=0, atol=1e-8)


def test_operator_rows_match_the_reference_within_its_quadrature_error(reference):
    stated = {"Gaussian": 2e-9, "Bateman": 2e-9, "DoubleGamma": 3e-7, "Gamma": 6e-7}
    for record in reference("responses.json"):
        operator = record["operator"]
        start, step, count = operator["grid"]
        rows, _ = hat_rows(built(record), None, np.array(operator["times"]), start, step, count)
        expected = np.zeros((len(operator["times"]), count))
        for n, row in enumerate(operator["rows"]):
            expected[n, [int(column) for column in row]] = list(row.values())
        tolerance = 2e-3 if record["parameters"].get("shape") == 1.6 else stated[record["family"]]
        np.testing.assert_allclose(rows.matrix.toarray(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_energy_is_one_and_gain_is_the_area(response):
    low, high = response.support()
    ends = [0, *np.geomspace(1e-4, 1, 40) * (high - low)]

    def area(power):
        pieces = pairwise(ends)
        return sum(integral(lambda s: response.curve(low + np.real(s)) ** power, a, b).real for a, b in pieces)

    # A curve infinite at its onset is evaluated at u = lag + s, which rounds s near zero.
    tolerance = 1e-11 if response.start.get("shape", 1) >= 1 else 1e-7
    assert area(2) == pytest.approx(1.0, abs=tolerance)
    assert area(1) == pytest.approx(response.gain(), abs=tolerance * 10)


@pytest.mark.parametrize("response", RESPONSES.values(), ids=RESPONSES)
def test_curve_and_gain_gradients_are_slopes(response):
    low, high = response.support()
    u = low + (high - low) * np.linspace(0.013, 0.9, 23)
    slopes, gain_slopes = response.curve_gradient(u), response.gain_gradient()
    for name, at in response.start.items():
        h = 1e-3 * max(abs(at), 0.1)
        offsets, weights = np.array([-3, -2, -1, 1, 2, 3]), np.array([-1, 9, -45, 45, -9, 1]) / 60
        values = [(response.curve(u, {name: at + k * h}), response.gain({name: at + k * h})) for k in offsets]
        numeric = sum(w * curve for w, (curve, _) in zip(weights, values, strict=True)) / h
        # Sixth-order differences: rounding 1e-16 / h, truncation (h / scale)^6.
        np.testing.assert_allclose(slopes[name], numeric, rtol=1e-6, atol=1e-8)
        assert gain_slopes[name] == pytest.approx(
            sum(w * g for w, (_, g) in zip(weights, values, strict=True)) / h, abs=1e-8
        )


def test_supports_and_envelopes():
    assert Gaussian(0.5, Free(0.0, bounds=(-1.0, 2.0))).envelope() == (-4.0, 5.0)
    assert Gaussian(Free(0.5, bounds=(0.3, 1.0)), 1.0).envelope() == (-5.0, 7.0)
    assert Identity().envelope() == (0.0, 0.0)
    assert Bateman(Free(1, bounds=(0.5, 2)), 3.0, Free(0, bounds=(-1, 1))).envelope() == (-1.0, 91.0)
    low, high = Gamma(Free(3.0, bounds=(2.0, 4.0)), Free(1.0, bounds=(0.5, 1.5)), 0.5).envelope()
    assert (low, high) == (0.5, pytest.approx(0.5 + 1.5 * gammainccinv(4.0, 1e-8), rel=1e-14))
    longer = DoubleGamma(6.0, 3.0, 8.0, 0.5, 0.2, 0.0)
    assert longer.support()[1] == pytest.approx(3 * gammainccinv(6.0, 1e-8), rel=1e-14)
    assert gamma_function(3.0) == 2.0


def test_bateman_is_symmetric_and_continuous_at_equal_constants():
    u = np.linspace(0, 30, 40)
    np.testing.assert_allclose(Bateman(1.0, 3.0, 0.0).curve(u), Bateman(3.0, 1.0, 0.0).curve(u), rtol=1e-13)
    equal = Bateman(1.0, 1.0, 0.0).curve(u)
    np.testing.assert_allclose(equal, 2 * u * np.exp(-u), rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(Bateman(1.0, 1.0 + 1e-9, 0.0).curve(u), equal, rtol=0, atol=1e-8)


# ---------------------------------------------------------------- objects


def test_parameters_and_values():
    response = Gaussian(width=0.6, lag=Free(0.0, bounds=(-1.5, 1.5), prior=Normal(0.5, 1.0)))
    assert list(response.parameters) == ["width", "lag"]
    assert list(response.free) == ["lag"]
    assert response.start == {"width": 0.6, "lag": 0.0}
    assert response.with_values({"lag": 0.25}) == Gaussian(0.6, 0.25)
    assert response.free["lag"].bounded_prior == Normal(0.5, 1.0).bounded(-1.5, 1.5)
    assert Free(1.0, bounds=(0.5, 2.0)).bounded_prior == Uniform(0.5, 2.0)
    assert hash(response) == hash(Gaussian(width=0.6, lag=Free(0.0, bounds=(-1.5, 1.5), prior=Normal(0.5, 1.0))))
    pooled = Gaussian(0.6, Free(0.0, bounds=(-1, 1)), pooling="partial", pooling_strength=2.0)
    assert (pooled.pooling, pooled.pooling_strength) == ("partial", 2.0)
    assert pooled.with_values().pooling == "shared"
    assert eval(repr(pooled)) == pooled
    assert repr(response) == "Gaussian(width=0.6, lag=Free(start=0.0, bounds=(-1.5, 1.5), prior=Normal(0.5, 1.0)))"


def test_rows_of_one_phase_share_their_weights():
    rule = quadrature(Gaussian(0.6, 0.1), None, 100 + 0.5 * np.arange(300), 0.0, 0.9, 400)
    # 0.9 / 0.1 phases on a clock of 0.5 s; rounding may split one.
    assert 9 <= len(rule.weights) <= 10


def test_refusals():
    with pytest.raises(ValueError, match=r"start 2.0 must lie within the bounds"):
        Free(2.0, bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match="two finite increasing"):
        Free(0.0, bounds=(0.0, np.inf))
    with pytest.raises(TypeError, match="prior must be Normal"):
        Free(0.0, bounds=(-1.0, 1.0), prior=(0.5, 1.0))
    with pytest.raises(ValueError, match="no density in a part of the bounds"):
        Free(0.5, bounds=(-1.0, 1.0), prior=LogNormal(0.0, 1.0))
    with pytest.raises(ValueError, match="Gaussian: width must be finite and exceed 0"):
        Gaussian(width=0.0, lag=0.0)
    with pytest.raises(ValueError, match="Gaussian: width must exceed 0; its bounds"):
        Gaussian(width=Free(0.5, bounds=(0.0, 1.0)), lag=0.0)
    with pytest.raises(ValueError, match=r"Gamma: shape must be finite and exceed 0.5"):
        Gamma(shape=0.5, scale=1.0, lag=0.0)
    with pytest.raises(ValueError, match="undershoot_ratio must be finite and exceed"):
        DoubleGamma(6.0, 1.0, 16.0, 1.0, -0.1, 0.0)
    with pytest.raises(TypeError, match="lag must be a number or Free"):
        Gaussian(width=1.0, lag="0.5")
    with pytest.raises(ValueError, match="pooling must be one of"):
        Gaussian(1.0, Free(0.0, bounds=(-1, 1)), pooling="none")
    with pytest.raises(ValueError, match="needs a Free parameter"):
        Gaussian(1.0, 0.0, pooling="separate")
    with pytest.raises(ValueError, match="pooling_strength goes with"):
        Gaussian(1.0, Free(0.0, bounds=(-1, 1)), pooling="partial")
    with pytest.raises(ValueError, match="pooling_strength goes with"):
        Gaussian(1.0, Free(0.0, bounds=(-1, 1)), pooling_strength=1.0)
    with pytest.raises(ValueError, match="pooling_strength must be a positive"):
        Gaussian(1.0, Free(0.0, bounds=(-1, 1)), pooling="partial", pooling_strength=-1.0)
    with pytest.raises(ValueError, match="no parameter"):
        Gaussian(1.0, 0.0).support({"delay": 1.0})
    with pytest.raises(ValueError, match="lags must increase"):
        Sampled([0.0, 2.0, 1.0], [1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="not all zero"):
        Sampled([0.0, 2.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="two sequences of one length"):
        Sampled([0.0, 2.0], [0.0])
    with pytest.raises(TypeError, match="no curve"):
        Identity().curve(0.0)
    for function in (quadrature, hat_rows):
        with pytest.raises(ValueError, match=r"outside the grid from 0 to 9 s"):
            function(Gaussian(1.0, 0.0), None, np.array([5.0, 8.0]), 0.0, 0.9, 11)
