"""What draws answer: joint paths, conditioning on new runs, new participants, densities of held-out data, scores."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm

import msrm
from msrm.gp import prediction
from msrm.gp.backends import select_likelihood
from msrm.gp.moments import latent_posterior
from msrm.gp.paths import functional_draws
from msrm.gp.psis import smoothed
from msrm.gp.sampling import sample
from msrm.responses import Gaussian, Identity

SAMPLING = {"chains": 2, "warmup": 40, "draws": 20, "seed": 1, "n_jobs": 1, "progress": False}


def recording_of(runs: tuple[str, ...], seconds: float = 15.0, people: str = "ab", seed: int = 0) -> msrm.Recording:
    rng = np.random.default_rng(seed)
    loadings = {(p, m): np.random.default_rng(7 + ord(p)).standard_normal((1, 2)) for p in "abc" for m in ("x", "y")}
    data: dict = {}
    for run in runs:
        for p in people:
            for modality, step in (("x", 1.5), ("y", 1.2)):
                times = np.arange(0.0, seconds, step)
                values = np.sin(times / 2.0 + 0.1 * len(run))[:, None] @ loadings[p, modality]
                noisy = values + 0.5 * rng.standard_normal(values.shape), times
                data.setdefault(p, {}).setdefault(run, {})[modality] = noisy
    return msrm.Recording.from_dict(data)


def model_of(**settings) -> msrm.GPMSRM:
    lag = msrm.Free(0.2, bounds=(-1.0, 1.0), prior=msrm.Normal(0.0, 0.5))
    settings = {"n_starts": 1, "tol": 1e-2, "progress": False, "likelihood": "statespace"} | settings
    return msrm.GPMSRM(1, {"x": Identity(), "y": Gaussian(width=0.6, lag=lag)}, **settings)


@pytest.fixture(scope="module")
def recording():
    return recording_of(("r1", "r2"))


@pytest.fixture(scope="module")
def draws(recording):
    length_scale = msrm.Free(3.0, bounds=(1.0, 9.0), prior=msrm.LogNormal(1.0, 0.3))
    return sample(model_of(length_scale=length_scale).fit(recording), recording, **SAMPLING)


@pytest.mark.parametrize("backend", ["dense", "statespace"])
def test_joint_functional_draws_have_the_joint_covariance(backend):
    recording = recording_of(("r1",), seconds=7.0)
    fitted = model_of(likelihood=backend, likelihood_tolerance=1e-3).fit(recording).model_
    sources = prediction.training_sources(fitted, "r1")
    # Several times inside one grid cell: a path must not be rougher there.
    times = np.array([1.0, 1.01, 1.1, 4.0])
    queries = [(Identity(), times), (fitted.responses["y"], np.array([2.0, 5.0]))]
    posterior = latent_posterior(fitted, "r1", sources.groups, sources.statistics, queries)
    size = 40_000
    found = functional_draws(posterior, queries, np.random.default_rng(0), size)
    values = np.concatenate([part[:, :, 0] for part in found], axis=1)
    dense = select_likelihood(
        "dense", {"r1": sources.groups}, 1, matern=fitted.specification.matern, length_scale=fitted.length_scale
    ).backend.posterior("r1", {}, fitted.length_scale, sources.statistics)
    made = [dense.functionals(response, None, at) for response, at in queries]
    mean = np.concatenate([dense.mean_of(one)[:, 0] for one in made])
    covariance = dense.joint_covariance(made)[:, 0, :, 0]
    sd = np.sqrt(np.diag(covariance))
    # Monte Carlo: 5 standard errors; the grid's own error is 1e-3 of an sd at this spacing.
    np.testing.assert_allclose((values.mean(axis=0) - mean) / sd, 0.0, atol=5 / np.sqrt(size) + 2e-3)
    correlation = np.cov(values.T) / np.outer(sd, sd)
    np.testing.assert_allclose(correlation, covariance / np.outer(sd, sd), atol=5 * np.sqrt(2 / size) + 2e-3)
    # Differences inside a cell are as small as the process makes them.
    step = values[:, 1] - values[:, 0]
    expected = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    assert np.var(step) == pytest.approx(expected, rel=0.05)


def test_sample_latent_gives_aligned_paths_of_every_member_and_of_the_map(draws, recording):
    paths = draws.sample_latent(per_member=3, seed=2)["r1"].to_dataset()
    assert paths["latent"].dims == ("sample", "time", "factor")
    assert paths.sizes["sample"] == 3 * len(draws.ensemble)
    np.testing.assert_array_equal(np.stack([paths["chain"], paths["draw"]], 1)[::3], draws.ensemble.members)
    moments = draws.infer_latent()["r1"].to_dataset()
    error = (paths["latent"].mean("sample") - moments["mean"]) / np.sqrt(moments["variance"])
    # 3 paths of each of 40 members around the mixture's mean.
    assert float(np.abs(error).max()) < 5 / np.sqrt(120)
    ratio = paths["latent"].var("sample") / moments["variance"]
    assert 0.5 < float(ratio.mean()) < 1.5
    of_map = draws.model.sample_latent(recording, times={"r2": [1.0, 2.0], "r1": [0.5]}, samples=4000, seed=0)
    node, known = of_map["r2"].to_dataset(), draws.model.infer_latent(recording, times={"r2": [1.0, 2.0], "r1": [0.5]})
    wanted = known["r2"].to_dataset()
    error = (node["latent"].mean("sample") - wanted["mean"]) / np.sqrt(wanted["variance"])
    np.testing.assert_allclose(error, 0.0, atol=5 / np.sqrt(4000))
    assert of_map["r1"]["latent"].shape == (4000, 1, 1)


def test_frozen_conditioning_holds_each_member(draws):
    new = recording_of(("new",), seed=4)
    answer = draws.condition(new, targets={"a": ["y"]}, mode="frozen", noise=True)
    predicted = draws.predict(new, targets={"a": ["y"]}, noise=True)
    xr.testing.assert_identical(
        answer["predicted/a/new/y"].to_dataset(inherit=False), predicted["a/new/y"].to_dataset(inherit=False)
    )
    assert answer["latent/new/mean"].dims == ("time", "factor")
    with pytest.raises(ValueError, match="mode must be 'joint' or 'frozen', found 'both'"):
        draws.condition(new, mode="both")
    with pytest.raises(ValueError, match="frozen' samples nothing"):
        draws.condition(new, mode="frozen", warmup=3)


def test_little_new_data_weighs_the_members_by_its_likelihood(draws):
    new = recording_of(("new",), seconds=2.0, people="a", seed=4).select(modalities=["y"])
    updated = draws.update(new)
    values = []
    for member in draws.ensemble:
        model = model_of(length_scale=member.length_scale)
        known = {f"response/y/{n}": v for n, v in member.responses["y"].start.items() if n == "lag"}
        own = {k: v for k, v in member.parameters.items() if k.split("/")[1:] == ["a", "y"]} | known
        values.append(model.log_likelihood(new, own))
    expected, k_hat = smoothed(np.array(values))
    # The oracle refines its grid to 0.05 nats.
    np.testing.assert_allclose(np.log(updated.ensemble.weights), expected, atol=0.15)
    assert updated.tree.attrs["update_k_hat"] == pytest.approx(k_hat, abs=0.2)
    weights = updated.ensemble.weights
    asked = {"targets": {"b": ["x"]}, "times": np.array([2.0, 4.0])}
    single = [
        prediction.predict(one, new, asked["targets"], "both", asked["times"], noise=False, joint=None)["b/new/x"]
        for one in draws.ensemble
    ]
    mean = np.tensordot(weights, [one["mean"].values for one in single], 1)
    np.testing.assert_allclose(updated.predict(new, **asked)["b/new/x/mean"], mean, rtol=1e-10)


def test_much_new_data_is_refused_with_advice_and_sampled_with_the_training_recording(draws, recording):
    new = recording_of(("n1", "n2", "n3"), seconds=30.0, seed=4)
    with pytest.raises(ValueError, match=r"k-hat is .*, wanted at most .* training=.*mode='frozen'"):
        draws.condition(new, mode="joint")
    with pytest.raises(ValueError, match="give runs that are new by name"):
        draws.update(recording)
    with pytest.raises(ValueError, match="made from the recording with digest"):
        draws.update(new, training=new)
    updated = draws.update(new.select(runs=["n1"]), training=recording, **SAMPLING)
    both = msrm.concat_runs([recording, new.select(runs=["n1"])])
    assert updated.tree.attrs["recording_digest"] == both.digest()
    assert set(updated.infer_latent().children) == {"r1", "r2", "n1"}
    assert not updated.model.converged_


def test_new_participants_are_calibrated_at_every_member(draws):
    newcomer = recording_of(("r1", "r2"), people="c", seed=5)
    known = draws.calibrate(newcomer.select(runs=["r1"]))
    assert known.ensemble.parameters["loading/c/y"].shape == (len(draws.ensemble), 2, 1)
    # Loadings follow each member's latents: the same sign everywhere, spread over members.
    loading = known.ensemble.parameters["loading/c/x"][:, 0, 0]
    assert abs(loading.mean()) > 2 * loading.std() > 0
    held = recording_of(("r2",), people="ab")
    truth = newcomer.select(runs=["r2"])
    at = truth.stream("c", "r2", "x")
    predicted = known.predict(held, targets={"c": ["x"]}, times={"r2": {"x": at.times}})["c/r2/x"]
    assert np.corrcoef(predicted["mean"].values[:, 0], at.data.values[:, 0])[0, 1] > 0.3


def test_log_density_and_probability_of_draws_are_averages_over_members(draws, recording):
    target = {"a": ["y"]}
    tree = draws.predict(recording, targets=target, noise=True, truth=recording)["a/r1/y"].to_dataset()
    truth = recording.stream("a", "r1", "y").data.values
    density, below = [], []
    for member in draws.ensemble:
        one = prediction.predict(member, recording, target, "both", None, noise=True, joint=None)["a/r1/y"]
        sd = np.sqrt(one["variance"].values)
        density.append(norm.pdf(truth, one["mean"].values, sd))
        below.append(norm.cdf(truth, one["mean"].values, sd))
    np.testing.assert_allclose(tree["log_density"], np.log(np.mean(density, axis=0)), rtol=1e-10)
    np.testing.assert_allclose(tree["probability"], np.mean(below, axis=0), rtol=1e-10)
    with pytest.raises(ValueError, match="truth is needed at the predicted times"):
        draws.predict(recording, targets=target, times=np.array([1.0]), truth=recording)


def test_score_takes_draws_and_evaluate_a_sampling_estimator(draws, recording):
    new = recording_of(("new",), seed=4)
    report = msrm.score(draws, new, training=recording, targets={"a": ["y"]}, n_shifts=20)
    tree = draws.predict(new, targets={"a": ["y"]}, noise=True, truth=new)["a/new/y"].to_dataset()
    rows = tree["supported"].values
    before = np.concatenate([s.data.values for s in recording.streams("a", modality="y")])
    expected = (tree["log_density"].values + np.log(before.std(axis=0)))[rows].mean()
    own = report.sel(stream="a/y", predictor="fit")
    assert float(own["log_density"]) == pytest.approx(expected, rel=1e-10)
    inside = np.abs(2 * tree["probability"].values[rows] - 1)
    np.testing.assert_allclose(own["coverage"], [np.mean(inside <= level) for level in (0.5, 0.8, 0.95)])
    assert "ridge" in report["predictor"]
    options = SAMPLING | {"warmup": 10, "draws": 8}
    estimator = msrm.SampledGPMSRM(model_of(), **options)
    found = msrm.evaluate(estimator, recording, targets={"a": ["y"]}, baselines=["training_mean"], n_shifts=0)
    parts = []
    for run, other in (("r1", "r2"), ("r2", "r1")):
        fold, rest = recording.select(runs=[run]), recording.select(runs=[other])
        fit = model_of().fit(rest).sample(rest, **options)
        node = fit.predict(fold, targets={"a": ["y"]}, noise=True, truth=fold)[f"a/{run}/y"].to_dataset()
        sd = rest.stream("a", other, "y").data.values.std(axis=0)
        parts.append((node["log_density"].values + np.log(sd))[node["supported"].values])
    assert float(found["log_density"].sel(predictor="fit")[0]) == pytest.approx(np.concatenate(parts).mean(), rel=1e-8)
    assert not hasattr(estimator, "draws_")
    with pytest.raises(ValueError, match="not fitted yet"):
        estimator.predict(recording)
