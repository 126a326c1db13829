"""Predictions and latents against conditioning of the joint normal of all scalars, for both backends."""

import numpy as np
import pytest
from gp_oracles import IMPULSE, functional_covariance, gaussian_functional

import msrm
from msrm.gp import GPMSRM, prediction

LENGTH_SCALE = 2.5
CURVES = {"brain": IMPULSE, "rating": gaussian_functional(0.6, 0.4), "face": gaussian_functional(0.4, 0.1)}
RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=0.4),
    "face": msrm.Gaussian(width=0.4, lag=0.1),
}
CLOCKS = {"brain": 1.8, "rating": 1.2, "face": 1.0}
# What a grid may leave in posterior means and covariances, relative to the prior's unit variance.
CLOSE = {"dense": 1e-7, "statespace": 2e-3}


def made(seed: int = 0, runs: int = 2, seconds: float = 22.0) -> msrm.Recording:
    rng = np.random.default_rng(seed)
    data: dict = {}
    for run in range(runs):
        for p in ("a", "b"):
            for modality, period in CLOCKS.items():
                if (p, modality) == ("b", "face"):
                    continue
                times = np.arange(0.0, seconds, period)
                at = times[:, None] - {"brain": 0.0, "rating": 0.4, "face": 0.1}[modality]
                latent = np.concatenate([np.sin(0.5 * at + run), np.cos(0.8 * at)], axis=1)
                values = latent @ rng.normal(size=(2, 3 if modality == "brain" else 2))
                values += 0.3 + 0.4 * rng.standard_normal(values.shape)
                values[rng.uniform(size=values.shape) < 0.1] = np.nan
                data.setdefault(p, {}).setdefault(f"run-{run + 1}", {})[modality] = values, times
    return msrm.Recording.from_dict(data)


@pytest.fixture(scope="module")
def recording():
    return made()


SETTINGS = {
    "dense": {"likelihood": "dense"},
    "statespace": {"likelihood": "statespace"},
    "coloured, dense": {"likelihood": "dense", "residual_timescales": {"rating": 0.7}},
    "coloured, statespace": {"likelihood": "statespace", "residual_timescales": {"rating": 0.7}},
    "standardized": {"likelihood": "dense", "standardize": True},
}


@pytest.fixture(scope="module", params=SETTINGS)
def fit(request, recording):
    settings = {"length_scale": LENGTH_SCALE, "n_starts": 1, "progress": False, **SETTINGS[request.param]}
    model = GPMSRM(2, RESPONSES, **settings)
    return model.fit(recording)


def close(fit) -> float:
    return CLOSE[fit.backend_["name"]]


def conditioned(fit, streams, query, times, *, timescale=None):
    """E and Cov of the query's K functionals at times given the streams of one run, (time * K,) and square."""
    plain = {name: np.asarray(value) for name, value in fit.parameters_.items()}
    size = fit.n_factors
    nodes, rows, values, labels, variances, moments = [], [], [], [], [], []
    for number, s in enumerate(streams):
        name = f"{s.participant}/{s.modality}"
        scaling = fit.model_.standardization.get((s.participant, s.modality))
        centre, sd = (0.0, 1.0) if scaling is None else (scaling.mean, scaling.scale)
        data = (s.values - centre) / sd - plain[f"offset/{name}"]
        for n, t in enumerate(s.times):
            nodes.append((CURVES[s.modality], t))
            for f in np.flatnonzero(np.isfinite(data[n])):
                rows.append((len(nodes) - 1, plain[f"loading/{name}"][f]))
                values.append(data[n, f])
                variances.append(float(plain[f"noise/{name}"]))
                labels.append((number, f) if s.modality == "rating" else (number, f, n))
                moments.append(t)
    nodes += [(CURVES[query], t) for t in times]
    covariance = functional_covariance(nodes, LENGTH_SCALE)
    count = len(nodes) - len(times)
    design = np.zeros((len(rows), count * size))
    for i, (node, loading) in enumerate(rows):
        design[i, node * size : (node + 1) * size] = loading
    prior = np.kron(covariance[:count, :count], np.eye(size))
    cross = np.kron(covariance[count:, :count], np.eye(size)) @ design.T
    t, v = np.array(moments), np.array(variances)
    same = np.array([[a == b for b in labels] for a in labels])
    noise = np.where(same, v * np.exp(-np.abs(t[:, None] - t) / timescale), 0.0) if timescale else np.diag(v)
    total = design @ prior @ design.T + noise
    mean = cross @ np.linalg.solve(total, np.array(values))
    within = np.kron(covariance[count:, count:], np.eye(size))
    return mean, within - cross @ np.linalg.solve(total, cross.T)


def timescale_of(fit):
    return (fit.residual_timescales or {}).get("rating")


def test_latents_are_the_conditional_normal(recording, fit):
    times = np.array([-6.0, 0.0, 0.9, 4.321, 10.8, 21.0, 30.0])
    found = fit.infer_latent(recording, times=times, joint="time")["run-2"]
    mean, covariance = conditioned(fit, recording.streams(run="run-2"), "brain", times, timescale=timescale_of(fit))
    np.testing.assert_allclose(found["mean"].values.ravel(), mean, atol=3 * close(fit))
    joint = found["covariance"].values.reshape(covariance.shape)
    np.testing.assert_allclose(joint, covariance, atol=close(fit))
    np.testing.assert_allclose(found["variance"].values.ravel(), np.diag(covariance), atol=close(fit))
    assert list(found["supported"].values) == [False, True, True, True, True, True, False]
    each = fit.infer_latent(recording, times=times, joint="factor")["run-2"]
    for place in range(len(times)):
        np.testing.assert_allclose(
            each["covariance"].values[place], joint.reshape(7, 2, 7, 2)[place, :, place], atol=1e-10
        )


@pytest.mark.parametrize("source", ["within", "across", "both"])
def test_predictions_are_conditional_normals_of_the_target_given_its_sources(recording, fit, source):
    target = {"a": ["rating"]}
    found = fit.predict(recording, targets=target, source=source, joint="time")["a/run-1/rating"]
    times = recording.stream("a", "run-1", "rating").times
    streams = [s for s in recording.streams(run="run-1") if (s.participant, s.modality) != ("a", "rating")]
    if source != "both":
        streams = [s for s in streams if (s.participant == "a") == (source == "within")]
    mean, covariance = conditioned(fit, streams, "rating", times, timescale=timescale_of(fit))
    scaling = fit.model_.standardization.get(("a", "rating"))
    centre, sd = (0.0, np.ones(2)) if scaling is None else (scaling.mean, scaling.scale)
    loading = np.asarray(fit.parameters_["loading/a/rating"])
    wanted = (mean.reshape(-1, 2) @ loading.T + np.asarray(fit.parameters_["offset/a/rating"])) * sd + centre
    np.testing.assert_allclose(found["mean"], wanted, atol=5 * close(fit))
    joint = (
        np.einsum("fk,tkul,fl->ftu", loading, covariance.reshape(len(times), 2, -1, 2), loading)
        * (sd**2)[:, None, None]
    )
    np.testing.assert_allclose(found["covariance"], joint, atol=3 * close(fit))
    np.testing.assert_allclose(found["variance"], np.diagonal(joint, axis1=1, axis2=2).T, atol=3 * close(fit))


def test_noise_is_added_to_variances_and_covariances(recording, fit):
    target = {"a": ["rating"]}
    ask = {"targets": target, "source": "across"}
    plain, noisy = (fit.predict(recording, **ask, noise=n, joint="time")["a/run-1/rating"] for n in (False, True))
    scaling = fit.model_.standardization.get(("a", "rating"))
    v = fit.parameters_["noise/a/rating"] * (1.0 if scaling is None else scaling.scale**2)
    np.testing.assert_allclose(noisy["variance"] - plain["variance"], np.broadcast_to(v, noisy["variance"].shape))
    times, timescale = plain["time"].values, timescale_of(fit)
    apart = np.abs(times[:, None] - times)
    shape = np.exp(-apart / timescale) if timescale else np.eye(len(times))
    added = (noisy["covariance"] - plain["covariance"]).values
    np.testing.assert_allclose(added, np.broadcast_to(v, 2)[:, None, None] * shape, atol=1e-12)
    features = fit.predict(recording, **ask, noise=True, joint="feature")["a/run-1/rating"]
    whole = features["covariance"].values
    np.testing.assert_allclose(np.diagonal(whole, axis1=1, axis2=2), features["variance"], rtol=1e-12)
    np.testing.assert_allclose(whole, np.swapaxes(whole, 1, 2), atol=1e-15)
    assert (np.linalg.eigvalsh(whole) > 0.0).all()


def test_the_targets_values_change_no_bit(recording, fit):
    streams: dict = {}
    for s in recording.streams():
        values = np.array(s.values)
        if (s.participant, s.modality) == ("a", "rating"):
            values[:] = 1e6 * np.random.default_rng(9).standard_normal(values.shape)
        streams.setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = values, s.times
    garbage = msrm.Recording.from_dict(streams)
    for source in ("within", "across", "both"):
        ask = {"targets": {"a": "rating"}, "source": source, "joint": "feature"}
        for run in recording.runs:
            one, other = (fit.predict(r, **ask)[f"a/{run}/rating"].to_dataset() for r in (recording, garbage))
            assert one.identical(other)
    one, other = (fit.condition(r, targets={"a": ["rating"]}) for r in (recording, garbage))
    assert one.identical(other)


def test_answers_do_not_depend_on_what_else_is_asked(recording, fit):
    whole = fit.predict(recording, targets={"a": ["rating", "brain"], "b": ["rating"]}, source="within")
    alone = fit.predict(recording, targets={"a": ["rating", "brain"]}, source="within")
    for name in ("mean", "variance"):
        np.testing.assert_array_equal(whole["a/run-1/rating"][name], alone["a/run-1/rating"][name])
    times = np.array([3.3, 9.1, 14.0])
    few = fit.predict(recording, targets={"a": ["rating", "brain"]}, source="within", times=times[:1])
    more = fit.predict(recording, targets={"a": ["rating", "brain"]}, source="within", times=times)
    np.testing.assert_allclose(more["a/run-1/rating"]["mean"][:1], few["a/run-1/rating"]["mean"], atol=1e-10)
    np.testing.assert_allclose(more["a/run-1/rating"]["variance"][:1], few["a/run-1/rating"]["variance"], atol=1e-10)


def test_training_runs_need_no_second_look_at_the_data(recording, fit):
    again, kept = fit.infer_latent(recording), fit.infer_latent()
    for run in recording.runs:
        for name in ("mean", "variance"):
            np.testing.assert_allclose(kept[run][name], again[run][name], atol=1e-9)
        np.testing.assert_array_equal(kept[run]["time"], again[run]["time"])
        np.testing.assert_array_equal(kept[run]["supported"], again[run]["supported"])


@pytest.fixture(scope="module")
def plain_fit(recording):
    model = GPMSRM(2, RESPONSES, length_scale=LENGTH_SCALE, likelihood="dense", n_starts=1, progress=False)
    return model.fit(recording)


def test_without_sources_the_answer_is_the_prior(recording, plain_fit):
    only = recording.select(runs=["run-1"], participants=["a"], modalities=["rating"])
    found = plain_fit.predict(only, targets={"a": ["rating"]})["a/run-1/rating"]
    loading = np.asarray(plain_fit.parameters_["loading/a/rating"])
    prior = functional_covariance([(CURVES["rating"], 0.0)], LENGTH_SCALE)[0, 0] * np.sum(loading**2, axis=1)
    np.testing.assert_allclose(found["mean"], np.broadcast_to(plain_fit.parameters_["offset/a/rating"], (19, 2)))
    np.testing.assert_allclose(found["variance"], np.broadcast_to(prior, (19, 2)), rtol=1e-6)
    assert not found["supported"].any()


def test_times_that_were_not_measured(recording, plain_fit):
    new = recording.drop(targets={"a": ["face"]})
    with pytest.raises(ValueError, match=r"Say when to predict: times="):
        plain_fit.predict(new, targets={"a": ["face"]})
    times = np.array([12.0, 3.0, 3.0, 40.0])
    found = plain_fit.predict(new, targets={"a": ["face"]}, times={"run-2": times})
    assert set(found["a"].children) == {"run-2"}
    node = found["a/run-2/face"]
    np.testing.assert_array_equal(node["time"], times)
    np.testing.assert_array_equal(node["mean"][1], node["mean"][2])
    assert list(node["supported"].values) == [True, True, True, False]
    nested = plain_fit.predict(new, targets={"a": ["face"]}, times={"run-2": {"face": times[:2]}})
    np.testing.assert_allclose(nested["a/run-2/face"]["mean"], node["mean"][:2], atol=1e-12)
    together = plain_fit.condition(new, targets={"a": ["face"]}, times=times)
    np.testing.assert_allclose(together["predicted/a/run-2/face"]["mean"], node["mean"], atol=1e-12)
    assert set(together["latent"].children) == {"run-1", "run-2"}


def test_support_ends_in_gaps_longer_than_the_response(plain_fit):
    data = made(3, runs=1, seconds=60.0)
    streams: dict = {}
    for s in data.streams():
        kept = (s.times < 20.0) | (s.times > 40.0)
        streams.setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = s.values[kept], s.times[kept]
    gappy = msrm.Recording.from_dict(streams)
    times = np.array([10.0, 30.0, 50.0])
    found = plain_fit.predict(gappy, targets={"a": ["rating"]}, times=times)["a/run-1/rating"]
    assert list(found["supported"].values) == [True, False, True]
    assert found["variance"].values[1].min() > 3.0 * found["variance"].values[0].max()


def test_transform_sees_each_participant_alone(recording, plain_fit):
    found = plain_fit.transform(recording)
    assert set(found.children) == {"a", "b"}
    alone = plain_fit.infer_latent(recording.select(participants=["b"]))
    np.testing.assert_allclose(found["b/run-1"]["mean"], alone["run-1"]["mean"], atol=1e-12)


def test_data_of_features_that_took_no_part_say_nothing(recording):
    streams, complete = {}, {}
    for s in recording.streams():
        values = np.array(s.values)
        complete.setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = values, s.times
        if s.modality == "brain":
            values = values.copy()
            values[:, 1] = np.nan
        streams.setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = values, s.times
    with pytest.warns(msrm.RecordingWarning, match="missing in all runs"):
        train = msrm.Recording.from_dict(streams)
    fit = GPMSRM(2, RESPONSES, length_scale=LENGTH_SCALE, likelihood="dense", n_starts=1, progress=False).fit(train)
    one, other = (fit.infer_latent(r) for r in (train, msrm.Recording.from_dict(complete)))
    np.testing.assert_allclose(one["run-1"]["mean"], other["run-1"]["mean"], atol=1e-10)
    assert np.isnan(fit.predict(train)["a/run-1/brain"]["mean"].values[:, 1]).all()


def test_run_offsets_of_new_runs_are_inferred_or_uncertain():
    data, runs = made(1, runs=2), {}
    for s in data.streams():
        shifted = s.values + (2.0 if (s.run, s.modality) == ("run-2", "rating") else 0.0)
        runs.setdefault(s.run, {}).setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = shifted, s.times
    train, new = (msrm.Recording.from_dict(runs[name]) for name in ("run-1", "run-2"))
    model = GPMSRM(
        2,
        RESPONSES,
        length_scale=LENGTH_SCALE,
        likelihood="dense",
        n_starts=1,
        run_offsets=("rating",),
        priors=msrm.Priors(run_offset_sd=1.5),
        progress=False,
    ).fit(train)
    # Its own data tell a stream's offset in the run; of a target nothing does.
    seen = model.predict(new)["a/run-2/rating"]
    residual = np.nanmean(new.stream("a", "run-2", "rating").values - seen["mean"].values, axis=0)
    assert np.abs(residual).max() < 0.3
    unseen = model.predict(new, targets={"a": ["rating"]})["a/run-2/rating"]
    assert unseen["variance"].values.min() > 1.5**2
    joint = model.predict(new, targets={"a": ["rating"]}, joint="time")["a/run-2/rating"]["covariance"].values
    assert joint.min() > 1.0
    whole = model.predict(new, targets={"a": ["rating"]}, joint="feature")["a/run-2/rating"]
    np.testing.assert_allclose(np.diagonal(whole["covariance"].values, axis1=1, axis2=2), whole["variance"])


def test_run_offsets_of_a_new_run_are_at_their_mode(monkeypatch):
    train, new = (made(1, runs=2).select(runs=[name]) for name in ("run-1", "run-2"))
    settings = {"likelihood": "dense", "n_starts": 1, "run_offsets": ("rating", "face"), "progress": False}
    model = GPMSRM(2, RESPONSES, length_scale=LENGTH_SCALE, **settings).fit(train)
    found, whole = [], prediction.with_run_offsets
    monkeypatch.setattr(
        prediction, "with_run_offsets", lambda *given: found.append((given[0], whole(*given))) or found[-1][1]
    )
    model.infer_latent(new)
    ((likelihood, at),) = found
    sd = likelihood.specification.priors.run_offset_sd

    def density(name, place, by):
        moved = at[name].copy()
        moved[place] += by
        return likelihood.value(at | {name: moved}) - 0.5 * (moved**2).sum() / sd**2

    names = [name for name in at if name.startswith("run_offset/")]
    assert len(names) > 2
    for name in names:
        for place in range(len(at[name])):
            # Values of a quadratic give its slope and curvature exactly, whatever the step.
            low, here, high = (density(name, place, by) for by in (-0.3, 0.0, 0.3))
            assert abs((high - low) / (high - 2.0 * here + low)) * 0.15 < 1e-7, name


def test_unknown_names_are_refused(recording, plain_fit):
    with pytest.raises(ValueError, match="No participant 'zoe' in the fit; there are a, b"):
        plain_fit.predict(recording, targets={"zoe": ["rating"]})
    with pytest.raises(ValueError, match="Participant b has no modality 'face' in the fit; it has brain, rating"):
        plain_fit.predict(recording, targets={"b": ["face"]})
    with pytest.raises(ValueError, match="targets is empty"):
        plain_fit.predict(recording, targets={})
    with pytest.raises(TypeError, match="targets must be a dict"):
        plain_fit.predict(recording, targets=["rating"])
    with pytest.raises(ValueError, match="source must be one of"):
        plain_fit.predict(recording, source="all")
    with pytest.raises(ValueError, match="joint must be one of None, 'feature', 'time'"):
        plain_fit.predict(recording, joint="factor")
    with pytest.raises(ValueError, match="joint must be one of None, 'factor', 'time'"):
        plain_fit.infer_latent(recording, joint="feature")
    with pytest.raises(ValueError, match="times names 'run-9'; there are run-1, run-2"):
        plain_fit.infer_latent(recording, times={"run-9": [1.0]})
    with pytest.raises(ValueError, match="times names 'run-9'"):
        plain_fit.predict(recording, targets={"a": ["face"]}, times={"run-9": [1.0]})
    with pytest.raises(ValueError, match="non-empty list of finite seconds"):
        plain_fit.infer_latent(recording, times=[np.nan])
    with pytest.raises(ValueError, match="mode must be 'frozen' for a MAP"):
        plain_fit.condition(recording, mode="updated")
    stranger = msrm.Recording.from_dict(
        {"zoe": {"run-1": {"rating": (np.ones((5, 2)) * [[1], [2], [3], [4], [5]], np.arange(5.0))}}}
    )
    with pytest.raises(ValueError, match=r"'rating' of zoe in run-1: not in the fit, which has a/brain"):
        plain_fit.infer_latent(stranger)
    wide = {"a": {"run-1": {"rating": (np.random.default_rng(0).normal(size=(5, 3)), np.arange(5.0))}}}
    with pytest.raises(ValueError, match="3 features; the fit has 2"):
        plain_fit.infer_latent(msrm.Recording.from_dict(wide))
