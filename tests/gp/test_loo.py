"""Leave-one-block-out: densities given the other blocks against dense algebra, smoothing against ArviZ, and refits."""

import arviz_stats
import numpy as np
import pytest
from arviz_stats.base import array_stats
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

import msrm
from msrm.gp.psis import good_k, smoothed
from msrm.gp.sampling import sample

LENGTH = 3.0


def recording_of(seed: int = 0, features: int = 9) -> msrm.Recording:
    rng = np.random.default_rng(seed)
    data: dict = {}
    for run, count in (("r1", 5), ("r2", 4)):
        times = 1.5 * np.arange(count)
        for p in ("a", "b"):
            path = np.sin(times / 1.7 + count)[:, None]
            values = path @ rng.standard_normal((1, features)) + 0.6 * rng.standard_normal((count, features))
            if p == "b":
                values[1, 0] = np.nan
            data.setdefault(p, {})[run] = {"x": (values, times)}
    return msrm.Recording.from_dict(data)


@pytest.fixture(scope="module")
def recording():
    return recording_of()


def model_of(**settings) -> msrm.GPMSRM:
    given = {"length_scale": LENGTH, "likelihood": "statespace", "likelihood_tolerance": 1e-6, "n_starts": 1}
    return msrm.GPMSRM(1, {"x": msrm.Identity()}, progress=False, **given, **settings)


@pytest.fixture(scope="module")
def draws(recording):
    options = {"chains": 2, "warmup": 100, "draws": 150, "seed": 3, "n_jobs": 1, "progress": False}
    return sample(model_of().fit(recording), recording, **options)


@pytest.fixture(scope="module")
def loo(draws, recording):
    return draws.loo(recording, n_jobs=1)


def marginal(
    recording: msrm.Recording, run: str, people: list[str], rows: dict, noise_over: dict | None = None
) -> float:
    """Log density of some participants' values in a run: a dense normal, the latent integrated out by hand.

    `noise_over` divides participants' noise variances.
    """
    values, means, loadings, times, noise = [], [], [], [], []
    for p in people:
        stream = recording.stream(p, run, "x")
        data, (loading, offset, v) = stream.data.values, rows[p]
        row, feature = np.nonzero(np.isfinite(data))
        values.append(data[row, feature])
        means.append(offset[feature])
        loadings.append(loading[feature])
        times.append(stream.times[row])
        noise.append(np.full(len(row), v / (noise_over or {}).get(p, 1.0)))
    y, m, w, t, v = map(np.concatenate, (values, means, loadings, times, noise))
    x = np.sqrt(3.0) * np.abs(t[:, None] - t) / LENGTH
    covariance = np.outer(w, w) * (1 + x) * np.exp(-x) + np.diag(v)
    return float(multivariate_normal(m, covariance).logpdf(y))


def test_densities_of_standardized_models_are_those_of_the_data(recording):
    found = []
    for scale in (1.0, 10.0):
        data: dict = {}
        for s in recording.streams():
            data.setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = (scale * s.values, s.times)
        scaled = msrm.Recording.from_dict(data)
        model = msrm.GPMSRM(1, {"x": msrm.Identity()}, standardize=True, n_starts=1, progress=False).fit(scaled)
        draws = sample(model, scaled, chains=1, warmup=5, draws=8, seed=3, n_jobs=1, progress=False)
        held = draws.log_predictive_density(scaled)
        found.append((held["log_density"].values, draws.loo(scaled, n_jobs=1).pointwise["elpd"].values))
    # Entries ten times as large have a tenth of the density; draws are the same to rounding.
    expected = np.log(10.0) * held["entries"].values
    for one, ten in zip(*found, strict=True):
        np.testing.assert_allclose(one - ten, expected, rtol=1e-6)


def rows_of(draws, chain: int, draw: int) -> dict:
    """Loadings, offsets and noise variance of a draw, by participant."""
    return {
        p: (
            draws.loading(p, "x").values[chain, draw, :, 0],
            draws.offset(p, "x").values[chain, draw],
            float(draws.posterior["noise"].sel(stream=f"{p}/x")[chain, draw]),
        )
        for p in ("a", "b")
    }


def test_powers_weight_draws_and_leave_the_noise_of_the_block_as_it_is(recording):
    power = 0.3
    model = model_of(powers={"x": power}).fit(recording)
    draws = sample(model, recording, chains=1, warmup=30, draws=40, seed=3, n_jobs=1, progress=False)
    loo, held = draws.loo(recording, n_jobs=1), draws.log_predictive_density(recording.select(runs=["r1"]))
    rows = rows_of(draws, 0, 17)
    for block in loo.log_likelihood["block"].values:
        p, run, _ = str(block).split("/")
        other = "b" if p == "a" else "a"
        without = marginal(recording, run, [other], rows, {other: power})
        predicted = marginal(recording, run, ["a", "b"], rows, {other: power}) - without
        tempered = marginal(recording, run, ["a", "b"], rows, {"a": power, "b": power}) - without
        v, entries = rows[p][2], np.isfinite(recording.stream(p, run, "x").values).sum()
        # The power of a normal density is a normal density times a constant.
        tempered += 0.5 * entries * (np.log(2 * np.pi * v / power) - power * np.log(2 * np.pi * v))
        assert float(loo.log_likelihood.sel(block=block)[0, 17]) == pytest.approx(predicted, abs=1e-4)
        assert float(loo.log_share.sel(block=block)[0, 17]) == pytest.approx(tempered, abs=1e-4)
        weights, k_hat = smoothed(-loo.log_share.sel(block=block).values[0])
        expected = logsumexp(weights + loo.log_likelihood.sel(block=block).values[0])
        assert float(loo.pointwise["elpd"].sel(block=block)) == pytest.approx(expected, abs=1e-12)
        assert float(loo.pointwise["k_hat"].sel(block=block)) == k_hat
    # All draws are members: held-out densities are the same numbers, averaged alike.
    mean = logsumexp(loo.log_likelihood.sel(block="a/r1/x")) - np.log(40)
    assert float(held["log_density"].sel(block="a/r1/x")) == pytest.approx(float(mean), abs=1e-6)
    with pytest.raises(ValueError, match=r"The model has powers.*loo\.pointwise"):
        loo.tree  # noqa: B018


def test_densities_given_the_other_blocks_are_those_of_dense_algebra(draws, loo, recording):
    for chain, draw in ((0, 3), (1, 140)):
        rows = rows_of(draws, chain, draw)
        for block in loo.log_likelihood["block"].values:
            p, run, _ = str(block).split("/")
            other = "b" if p == "a" else "a"
            expected = marginal(recording, run, ["a", "b"], rows) - marginal(recording, run, [other], rows)
            found = float(loo.log_likelihood.sel(block=block)[chain, draw])
            # The grid's likelihood_tolerance is 1e-6 nats at the MAP; draws are elsewhere.
            assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.filterwarnings("ignore:Estimated shape parameter:UserWarning")
def test_elpd_and_k_hat_are_arviz_s(loo):
    theirs = arviz_stats.loo(loo.tree, pointwise=True, reff=1.0)
    assert loo.elpd == pytest.approx(theirs.elpd, rel=1e-10)
    assert loo.se == pytest.approx(theirs.se, rel=1e-10)
    assert loo.p == pytest.approx(theirs.p, rel=1e-8)
    np.testing.assert_allclose(loo.pointwise["k_hat"], theirs.pareto_k, rtol=1e-8)
    assert set(arviz_stats.compare({"one": loo.tree, "two": loo.tree}).index) == {"one", "two"}


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("count", [100, 2000])
def test_smoothed_weights_are_arviz_s(spread, count):
    log_weights = spread * np.random.default_rng(1).standard_normal(count)
    found, k_hat = smoothed(log_weights)
    expected, theirs = array_stats.psislw(-log_weights)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    assert k_hat == pytest.approx(theirs, abs=1e-10)
    assert logsumexp(found) == pytest.approx(0.0, abs=1e-12)


def test_few_or_equal_weights_are_judged():
    assert smoothed(np.zeros(200))[1] == -np.inf
    assert smoothed(np.random.default_rng(0).standard_normal(12))[1] == np.inf
    assert good_k(2000) == pytest.approx(1 - 1 / np.log10(2000))
    assert good_k(100_000) == 0.7


def test_a_verdict_names_blocks_that_cannot_be_left_out(loo, draws, recording):
    bad = loo.pointwise["k_hat"] > good_k(loo.log_likelihood.sizes["chain"] * loo.log_likelihood.sizes["draw"])
    assert ("reliable" in loo.verdict) == (not bad.any())
    with pytest.raises(ValueError, match="made from the recording with digest"):
        draws.loo(recording_of(seed=2))
    thinner = draws.loo(recording, size=60, n_jobs=1)
    assert thinner.log_likelihood.sizes == {"chain": 2, "draw": 30, "block": 4}
    np.testing.assert_array_equal(thinner.log_likelihood, loo.log_likelihood[:, ::5])


def test_held_out_densities_are_those_of_dense_algebra_averaged(draws):
    new = recording_of(seed=5).select(runs=["r1"])
    found = draws.log_predictive_density(new)
    values = {"a": [], "b": []}
    for member in draws.ensemble:
        get = member.parameters
        rows = {p: (get[f"loading/{p}/x"][:, 0], get[f"offset/{p}/x"], float(get[f"noise/{p}/x"])) for p in values}
        for p, other in (("a", "b"), ("b", "a")):
            values[p].append(marginal(new, "r1", ["a", "b"], rows) - marginal(new, "r1", [other], rows))
    for p in values:
        expected = logsumexp(values[p]) - np.log(len(values[p]))
        assert float(found["log_density"].sel(block=f"{p}/r1/x")) == pytest.approx(expected, abs=1e-4)
    assert list(found["entries"].values) == [45, 44]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::msrm.RecordingWarning")
def test_elpd_is_what_refits_without_the_block_give():
    recording = recording_of(features=2)
    model = msrm.GPMSRM(
        1, {"x": msrm.Identity()}, length_scale=LENGTH, likelihood="statespace", n_starts=1, progress=False
    )
    options = {"chains": 4, "warmup": 150, "draws": 500, "seed": 3, "progress": False}
    loo = model.fit(recording).sample(recording, **options).loo(recording, size=2000)
    part = recording.drop(runs=["r2"])
    without = msrm.concat_runs([part, recording.select(runs=["r2"]).drop(participants=["a"])])
    draws = msrm.GPMSRM(**model.get_params()).fit(without).sample(without, **options)
    both = recording.select(runs=["r2"])
    refit = float(draws.log_predictive_density(both)["log_density"].sel(block="a/r2/x"))
    # Means of 200 members' densities (sd of the log about 0.7) and of smoothed weights: 0.15 is three standard errors.
    assert float(loo.pointwise["elpd"].sel(block="a/r2/x")) == pytest.approx(refit, abs=0.25)
