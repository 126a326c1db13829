"""Priors against SciPy's distributions and against their own integrals."""

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from msrm.priors import LogNormal, Normal, Priors, Uniform

CASES = [
    Normal(0.5, 1.3),
    Normal(0.5, 1.3).bounded(-1.0, 2.0),
    Normal(0.0, 1.0).bounded(9.0, 9.5),
    Normal(0.0, 1.0).bounded(-40.0, -38.0),
    LogNormal(-0.5, 1.0),
    LogNormal(np.log(0.6), 0.5).bounded(0.3, 1.0),
    LogNormal(0.0, 0.5).bounded(8.0, 20.0),
    Uniform(-2.0, 5.0),
    Uniform(-2.0, 5.0).bounded(0.0, 9.0),
]


def interior(prior, n=7):
    """Points spread over the central mass."""
    return prior.quantile(np.linspace(0.02, 0.98, n))


@pytest.mark.parametrize("prior", CASES, ids=repr)
def test_density_integrates_to_one_and_to_the_cdf(prior):
    points = interior(prior)
    low, high = prior.quantile(np.array([1e-14, 1 - 1e-14]))

    def density(x):
        return float(np.exp(prior.log_density(x)))

    # 1e-9: adaptive quadrature's own tolerance and the 2e-14 cut off at the ends.
    assert quad(density, low, high, epsabs=1e-11, epsrel=1e-11, limit=200)[0] == pytest.approx(1.0, abs=1e-9)
    for x in points:
        assert quad(density, low, x, epsabs=1e-11, epsrel=1e-11, limit=200)[0] == pytest.approx(prior.cdf(x), abs=1e-9)


@pytest.mark.parametrize("prior", CASES, ids=repr)
def test_quantile_inverts_cdf_and_gradient_is_the_slope(prior):
    p = np.linspace(0.01, 0.99, 9)
    x = prior.quantile(p)
    np.testing.assert_allclose(prior.cdf(x), p, rtol=0, atol=1e-11)
    h = 1e-5 * (x[-1] - x[0])
    slope = (prior.log_density(x + h) - prior.log_density(x - h)) / (2 * h)
    np.testing.assert_allclose(prior.log_density_gradient(x), slope, rtol=1e-6, atol=1e-6 / (x[-1] - x[0]))


def test_matches_scipy():
    x = np.array([-0.7, 0.0, 1.9])
    np.testing.assert_allclose(Normal(0.5, 1.3).log_density(x), stats.norm(0.5, 1.3).logpdf(x), rtol=1e-14)
    truncated = stats.truncnorm((-1 - 0.5) / 1.3, (2 - 0.5) / 1.3, 0.5, 1.3)
    np.testing.assert_allclose(Normal(0.5, 1.3).bounded(-1, 2).log_density(x), truncated.logpdf(x), rtol=1e-12)
    y = np.array([0.1, 0.9, 4.0])
    lognormal = stats.lognorm(s=0.8, scale=np.exp(-0.3))
    np.testing.assert_allclose(LogNormal(-0.3, 0.8).log_density(y), lognormal.logpdf(y), rtol=1e-13)
    np.testing.assert_allclose(LogNormal(-0.3, 0.8).cdf(y), lognormal.cdf(y), rtol=1e-12)


def test_outside_the_bounds_there_is_no_density():
    for prior in (Normal(0.0, 1.0).bounded(-1, 1), Uniform(-1.0, 1.0)):
        assert prior.log_density(1.5) == -np.inf
        assert np.isnan(prior.log_density_gradient(1.5))
    assert LogNormal(0.0, 1.0).log_density(0.0) == -np.inf
    assert LogNormal(0.0, 1.0).log_density(-1.0) == -np.inf


def test_samples_follow_the_cdf():
    for seed, prior in enumerate(CASES):
        draws = prior.sample(np.random.default_rng(seed), 2000)
        assert draws.min() >= prior.lower
        assert draws.max() <= prior.upper
        # One in 10,000 such tests fails by chance; the seeds are fixed.
        assert stats.kstest(prior.cdf(draws), "uniform").pvalue > 1e-4
    assert np.shape(CASES[0].sample(np.random.default_rng(0))) == ()


def test_bounding_twice_keeps_the_tighter_bounds():
    assert Normal(0, 1).bounded(-1, 2).bounded(0, 5) == Normal(0, 1).bounded(0, 2)
    assert LogNormal(0, 1).bounded(-3, 2).lower == 0.0
    assert repr(Normal(0.0, 1.0)) == "Normal(0.0, 1.0)"
    assert eval(repr(LogNormal(0.0, 1.0).bounded(0.3, 2.0))) == LogNormal(0.0, 1.0).bounded(0.3, 2.0)


def test_refusals():
    with pytest.raises(ValueError, match="sd a positive finite"):
        Normal(0.0, -1.0)
    with pytest.raises(ValueError, match="no mass between 3 and 2"):
        Uniform(0.0, 2.0).bounded(3.0, 4.0)
    with pytest.raises(ValueError, match="lower and upper must be finite"):
        Uniform(0.0, np.inf)
    with pytest.raises(ValueError, match="lives above 0"):
        LogNormal(0.0, 1.0, lower=-1.0)
    with pytest.raises(TypeError, match="noise must be a prior"):
        Priors(noise=1.0)
    with pytest.raises(ValueError, match="noise is a variance"):
        Priors(noise=Normal(0.0, 1.0))
    with pytest.raises(ValueError, match="loading_sd must be a positive"):
        Priors(loading_sd=0.0)
