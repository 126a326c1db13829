"""Fits of R-MSRM: endpoints against the reference and alternation, options, refusals, and what a fit reports."""

import inspect

import numpy as np
import pytest

import msrm
from msrm.regularized import ConvergenceWarning
from msrm.regularized.alternation import alternate
from msrm.regularized.filters import Filters
from msrm.regularized.objective import Objective
from msrm.regularized.problem import build_problem
from msrm.regularized.settings import checked_settings
from msrm.regularized.starts import beginnings

RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
    "physiology": msrm.Gaussian(width=msrm.Free(0.6, bounds=(0.3, 1.0)), lag=msrm.Free(0.5, bounds=(-1.0, 2.0))),
}


def estimator(n_factors=2, **options):
    return msrm.RMSRM(n_factors, **({"latent_step": 0.9, "responses": RESPONSES} | options))


@pytest.fixture(scope="module")
def recording():
    return msrm.simulate(participants=3, features=5, factors=2, seconds=60.0, runs=2, seed=3)[0]


@pytest.fixture(scope="module")
def fitted(recording):
    return estimator().fit(recording)


def test_reference_objectives_are_reached(reference):
    for row in reference("rmsrm.json"):
        recording = msrm.Recording.from_dict(reference(f"{row['recording']}.npz"))
        fit = estimator(row["n_factors"]).fit(recording)
        assert fit.converged_
        assert fit.objective_ <= row["objective"] + 1e-9


def test_the_search_ends_where_alternation_ends(recording):
    settings = checked_settings(estimator().get_params())
    problem, _ = build_problem(recording, settings)
    objective = Objective(problem)
    start = beginnings(objective, 2, "spectral", 0, 0)[0]
    loading, vector, latents, history = alternate(objective, start.loading, start.vector, max_iter=400, tol=1e-12)
    fit = estimator().fit(recording)
    assert (np.diff(history) <= 1e-14).all()
    # Alternation stops short of the optimum, never below it.
    assert -1e-10 <= history[-1] - fit.objective_ <= 1e-6
    assert sum(objective.parts(loading, vector, latents).values()) == pytest.approx(history[-1], rel=1e-12)
    np.testing.assert_allclose(vector, list(fit.starts_[0].responses.values()), atol=5e-3)


def test_objectives_never_rise_and_parts_add_up(fitted):
    for start in fitted.starts_:
        assert (np.diff(start.objectives) <= 0).all()
    assert fitted.objective_ == pytest.approx(sum(fitted.objective_parts_.values()), rel=1e-14)
    assert fitted.objective_ == pytest.approx(fitted.starts_[0].objective, rel=1e-12)
    assert fitted.n_iter_ == len(fitted.starts_[0].objectives) - 1
    assert max(fitted.stationarity_.values()) < 1e-9
    # Balanced: at the optimum the loadings' penalty equals the latents'.
    parts = fitted.objective_parts_
    assert parts["loading"] == pytest.approx(parts["latent"] + parts["roughness"], rel=1e-4)


@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_raw_loadings_are_ridge_solutions(missing):
    """With more features than rows the fit runs in rotated features; the raw normal equations must hold as well."""
    recording, _ = msrm.simulate(participants=2, features=70, factors=2, seconds=45.0, missing=missing, seed=1)
    fit = estimator(loading_ridge=0.02).fit(recording)
    stream = recording.stream("p1", "run-1", "brain")
    data = (stream.values - fit.parameters_["offset/p1/brain"].values) / fit.parameters_["scale/p1/brain"].values
    path = np.stack(
        [
            np.interp(stream.times, *np.broadcast_arrays(fit.latents_["run-1"]["time"].values, z))
            for z in fit.latents_["run-1"]["mean"].values.T
        ],
        1,
    )
    cells = np.ones(len(data))
    cells[[0, -1]] = 0.5
    finite = np.isfinite(data)
    weights = finite * (cells / cells.sum() / finite.sum(1))[:, None] / 3 / 2
    ridge = 0.02 / len(recording.pairs)
    found = fit.parameters_["loading/p1/brain"].values
    for f in range(70):
        second = (path * weights[:, [f]]).T @ path + ridge * np.eye(2)
        expected = np.linalg.solve(second, path.T @ (weights[:, f] * np.nan_to_num(data[:, f])))
        # The search leaves a gradient of about sqrt(1e-10) of the objective.
        np.testing.assert_allclose(found[f], expected, atol=2e-4)


def test_a_wrong_lag_basin_is_left():
    """A periodic latent: from a start half a period away plain descent would stay."""
    times = np.arange(0, 90, 0.5)
    rng = np.random.default_rng(0)
    path = np.stack([np.cos(2 * np.pi * times / 8), np.sin(2 * np.pi * times / 11)], 1)
    seen = np.stack([np.cos(2 * np.pi * (times - 2.0) / 8), np.sin(2 * np.pi * (times - 2.0) / 11)], 1)
    make = lambda z: z @ rng.standard_normal((2, 4)) + 0.1 * rng.standard_normal((len(z), 4))  # noqa: E731
    recording = msrm.Recording.from_dict(
        {"p1": {"run-1": {"brain": (make(path), times), "rating": (make(seen), times)}}}
    )
    response = msrm.Gaussian(width=0.5, lag=msrm.Free(-2.5, bounds=(-5.0, 5.0)))
    fit = estimator(latent_step=0.5, responses={"brain": msrm.Identity(), "rating": response}).fit(recording)
    assert fit.responses_["rating"].lag == pytest.approx(2.0, abs=0.05)


def test_rival_lags_are_raced(reference):
    recording = msrm.Recording.from_dict(reference("masked.npz"))
    fit = estimator(1, n_init=2, seed=1).fit(recording)
    assert len(fit.starts_) >= 2
    assert {start.label.split(",")[0] for start in fit.starts_} == {"spectral", "random"}
    assert fit.objective_ == pytest.approx(min(start.objective for start in fit.starts_), rel=1e-12)


@pytest.mark.parametrize("kind", ["spectral", "random"])
def test_every_init_finds_the_same_optimum(recording, fitted, kind):
    fit = estimator(init=kind, seed=7).fit(recording)
    assert fit.objective_ == pytest.approx(fitted.objective_, rel=1e-8)


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_processes(recording):
    one, two = (estimator(n_init=3, n_jobs=n).fit(recording) for n in (1, 2))
    for name, value in one.parameters_.items():
        np.testing.assert_array_equal(value, two.parameters_[name])
    assert [s.objective for s in one.starts_] == [s.objective for s in two.starts_]


class TestStops:
    def test_an_iteration_limit_is_no_convergence(self, recording):
        with pytest.warns(ConvergenceWarning, match=r"after 2 iterations: the iteration limit.*max_iter"):
            fit = estimator(max_iter=2).fit(recording)
        assert not fit.converged_
        assert "iteration limit" in fit.stop_reason_

    def test_an_interrupt_keeps_the_best_point(self, recording, monkeypatch):
        calls, plain = iter(range(8)), Objective.evaluate

        def evaluate(self, *args, **options):
            if next(calls, None) is None:
                raise KeyboardInterrupt
            return plain(self, *args, **options)

        monkeypatch.setattr(Objective, "evaluate", evaluate)
        with pytest.warns(ConvergenceWarning, match="interrupted. It is the best point so far"):
            fit = estimator(n_init=3).fit(recording)
        assert not fit.converged_
        assert len(fit.starts_[0].objectives) > 1
        assert {start.label.split(",")[0] for start in fit.starts_} == {"spectral"}
        assert fit.predict(recording)["p1/run-1/brain"]["supported"].any()


class TestReport:
    def test_factors_are_ordered_and_oriented(self, fitted):
        shares = fitted.explained_variance_.values
        assert (np.diff(shares) <= 0).all()
        stacked = np.concatenate([v.values for name, v in fitted.parameters_.items() if name.startswith("loading/")])
        assert (stacked[np.abs(stacked).argmax(0), range(2)] > 0).all()

    def test_explained_variance_is_that_of_each_factor_alone(self, recording, fitted):
        stream = recording.stream("p1", "run-1", "brain")
        other = recording.stream("p1", "run-2", "brain")
        loading = fitted.parameters_["loading/p1/brain"].values
        cells = np.ones(stream.n_times)
        cells[[0, -1]] = 0.5
        total, alone = 0.0, np.zeros(2)
        for s in (stream, other):
            latent = fitted.latents_[s.run]["mean"]
            path = np.stack([np.interp(s.times, latent["time"].values, z) for z in latent.values.T], 1)
            data = (s.values - fitted.parameters_["offset/p1/brain"].values) / fitted.parameters_[
                "scale/p1/brain"
            ].values
            total += cells @ (data**2).sum(1)
            alone += (cells @ path**2) * (loading**2).sum(0)
        np.testing.assert_allclose(fitted.stream_explained_variance_.sel(stream="p1/brain"), alone / total, rtol=1e-9)

    def test_residual_variance(self, recording, fitted):
        errors, weights = 0.0, 0.0
        predicted = fitted.predict(recording)
        for run in recording.runs:
            stream, node = recording.stream("p2", run, "rating"), predicted[f"p2/{run}/rating"]
            kept = node["supported"].values
            inner = (stream.times >= 0.6 * 6 + 1.5) & (stream.times <= stream.times[-1] - 0.6 * 6 - 1.5 + 1e-9)
            assert (kept[inner]).all()
            residual = (stream.values - node["mean"].values)[inner] / fitted.parameters_["scale/p2/rating"].values
            cells = np.ones(inner.sum())
            cells[[0, -1]] = 0.5
            errors += cells @ (residual**2).mean(1)
            weights += cells.sum()
        assert fitted.residual_variance_.sel(stream="p2/rating") == pytest.approx(errors / weights, rel=1e-9)

    def test_parameters_have_the_names_of_the_design(self, recording, fitted):
        names = {f"{kind}/{p}/{m}" for kind in ("loading", "offset", "scale") for p, m in recording.pairs}
        free = {"response/rating/lag", "response/physiology/width", "response/physiology/lag"}
        assert set(fitted.parameters_) == names | free
        assert fitted.parameters_["loading/p1/brain"].dims == ("feature", "factor")
        assert fitted.responses_["physiology"].width == fitted.parameters_["response/physiology/width"]


class TestOptions:
    def test_population_lies_between_shared_and_separate(self, recording):
        fits = {
            strength: estimator(latent_pooling="population", population_strength=strength).fit(recording)
            for strength in (1e-6, 1e3)
        }
        shared = estimator().fit(recording)
        # Drawn together hard, the paths are one path.
        assert fits[1e3].objective_ == pytest.approx(shared.objective_, rel=1e-3)
        path = fits[1e3].latents_["run-1"]["path"].values
        assert np.ptp(path, axis=1).max() < 0.02 * np.abs(path).max()
        separate = estimator(latent_pooling="separate").fit(recording)
        assert separate.objective_ < fits[1e-6].objective_ < shared.objective_
        assert "mean" not in separate.latents_["run-1"]
        assert list(separate.latents_["run-1"]["participant"].values) == ["p1", "p2", "p3"]

    def test_one_participant_alone_makes_pooling_irrelevant(self, recording):
        alone = recording.select(participants=["p1"])
        objectives = [
            estimator(latent_pooling=pooling).fit(alone).objective_ for pooling in ("shared", "population", "separate")
        ]
        np.testing.assert_allclose(objectives, objectives[0], rtol=1e-9)

    def test_responses_may_differ_between_participants(self, recording):
        def fit(**pooling):
            rating = msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5)), **pooling)
            return estimator(responses=RESPONSES | {"rating": rating}).fit(recording)

        separate, weak, strong = (
            fit(pooling="separate"),
            fit(pooling="partial", pooling_strength=0.01),
            fit(pooling="partial", pooling_strength=1e3),
        )
        shared = estimator().fit(recording)
        spread = [np.ptp([r.lag for r in f.responses_["rating"].values()]) for f in (separate, weak, strong)]
        assert spread[0] > spread[1] > spread[2]
        assert separate.objective_ < weak.objective_ < strong.objective_ < shared.objective_ + 1e-9
        assert strong.responses_["rating"]["p1"].lag == pytest.approx(shared.responses_["rating"].lag, abs=5e-3)
        assert separate.parameters_["response/rating/p2/lag"] == separate.responses_["rating"]["p2"].lag

    def test_priors_draw_response_parameters(self, recording, fitted):
        lag = msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(-0.8, 0.02))
        fit = estimator(responses=RESPONSES | {"rating": msrm.Gaussian(width=0.6, lag=lag)}).fit(recording)
        found = fit.responses_["rating"].lag
        assert -0.8 < found < fitted.responses_["rating"].lag
        assert fit.objective_parts_["response"] == pytest.approx(0.5 * ((found + 0.8) / 0.02) ** 2)

    def test_a_modality_of_weight_zero_takes_no_part(self, recording):
        weighted = estimator(modality_weights={"physiology": 0.0}).fit(recording)
        dropped = estimator().fit(recording.drop(modalities=["physiology"]))
        assert weighted.objective_ == dropped.objective_
        assert set(weighted.parameters_) == set(dropped.parameters_)

    def test_extended_edges_use_every_row(self, recording):
        fit = estimator(edges="extend").fit(recording)
        assert fit.latents_["run-1"]["time"].values[0] < 0
        predicted = fit.predict(recording)["p1/run-1/rating"]
        assert predicted["supported"].all()
        assert np.isfinite(predicted["mean"]).all()

    def test_one_factor_and_many(self, recording):
        objectives = [estimator(k).fit(recording).objective_ for k in (1, 2, 4)]
        assert objectives[0] > objectives[1] >= objectives[2]


def test_held_out_values_change_no_bit(recording):
    rng = np.random.default_rng(0)
    spoiled = msrm.Recording.from_streams(
        [
            s
            if s.run == "run-1"
            else msrm.stream.make_stream(
                s.participant, s.run, s.modality, (rng.standard_normal(s.values.shape) * 1e6, s.times)
            )
            for s in recording.streams()
        ]
    )
    clean, dirty = (estimator().fit(r.select(runs=["run-1"])) for r in (recording, spoiled))
    for name, value in clean.parameters_.items():
        np.testing.assert_array_equal(value, dirty.parameters_[name])
    assert clean.objective_ == dirty.objective_


PAIRS = [("p1", "rating"), ("p2", "rating"), ("p3", "rating")]


class TestFilters:
    @pytest.mark.parametrize("pooling", [{}, {"pooling": "separate"}, {"pooling": "partial", "pooling_strength": 0.7}])
    def test_penalty_gradient(self, pooling):
        response = msrm.Gaussian(
            width=msrm.Free(0.6, bounds=(0.3, 1.5), prior=msrm.LogNormal(-0.5, 0.3)),
            lag=msrm.Free(0.5, bounds=(-1.0, 2.0), prior=msrm.Normal(0.2, 0.4)),
            **pooling,
        )
        filters = Filters({"rating": response}, PAIRS)
        vector = np.random.default_rng(1).uniform(filters.lower, filters.upper)
        _, gradient, _ = filters.penalty(vector)
        for slot in range(len(vector)):
            step = 1e-6 * np.eye(len(vector))[slot]
            ahead = (filters.penalty(vector + step)[0] - filters.penalty(vector - step)[0]) / 2e-6
            assert gradient[slot] == pytest.approx(ahead, rel=1e-7, abs=1e-9)

    def test_partial_pooling_is_the_mean_squared_deviation(self):
        response = msrm.Gaussian(
            width=msrm.Free(0.6, bounds=(0.3, 1.5)), lag=0.0, pooling="partial", pooling_strength=2.0
        )
        filters = Filters({"rating": response}, PAIRS)
        vector = np.array([0.4, 0.6, 0.9])
        assert filters.penalty(vector)[0] == pytest.approx(2.0 * np.var(np.log(vector)))


class TestArguments:
    def test_constructor_stores_what_it_is_given(self):
        responses, weights = {"brain": msrm.Identity()}, {"brain": 2.0}
        made = msrm.RMSRM(4, responses=responses, modality_weights=weights, edges="extend")
        assert made.get_params()["responses"] is responses
        assert made.get_params()["modality_weights"] is weights
        assert list(made.get_params()) == [n for n in inspect.signature(msrm.RMSRM).parameters]
        clone = type(made)(**made.get_params())
        assert clone.get_params() == made.get_params()
        assert made.set_params(n_factors=2) is made
        assert made.n_factors == 2
        assert repr(msrm.RMSRM(2, responses={}, edges="extend")) == "RMSRM(n_factors=2, responses={}, edges='extend')"
        with pytest.raises(ValueError, match="RMSRM has no argument 'factors'"):
            made.set_params(factors=3)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"n_factors": 0}, "n_factors must be a whole number of at least 1, got 0"),
            ({"n_factors": 2.0}, r"n_factors must be a whole number of at least 1, got 2\.0"),
            ({"latent_step": 0.0}, r"latent_step must be above 0, got 0\.0"),
            ({"latent_step": np.nan}, "latent_step must be a finite number, got nan"),
            ({"loading_ridge": 0}, "loading_ridge must be above 0, got 0"),
            ({"latent_ridge": 0, "roughness": 0}, "latent_ridge and roughness are both 0"),
            ({"roughness": -1.0}, r"roughness must be at least 0, got -1\.0"),
            ({"edges": "cut"}, "edges must be one of 'trim', 'extend', got 'cut'"),
            ({"latent_pooling": "none"}, "latent_pooling must be one of 'shared', 'population', 'separate'"),
            ({"init": "pca"}, "init must be one of 'spectral', 'random'"),
            ({"n_jobs": 0}, "n_jobs must be a whole number of at least 1, got 0"),
            ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
            ({"modality_weights": {"brain": -1}}, r"modality_weights\['brain'\] must be at least 0"),
            ({"modality_weights": {"eeg": 1.0}}, "modality_weights names 'eeg'; the recording has"),
            ({"modality_weights": dict.fromkeys(RESPONSES, 0)}, "Every modality of the recording has weight 0"),
            ({"responses": {"brain": msrm.Identity()}}, "No response was given for modality 'rating'"),
            ({"responses": {"brain": 3}}, r"responses\['brain'\] must be a response"),
            ({"responses": 3}, "responses must be a dict"),
            ({"penalties": "aic"}, "penalties must be 'given', 'cv' or a dict of candidates"),
        ],
    )
    def test_wrong_arguments_are_refused(self, recording, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            estimator(**options).fit(recording)

    def test_only_recordings_are_fitted(self):
        with pytest.raises(TypeError, match="fit takes a Recording, got dict"):
            estimator().fit({})

    def test_nothing_to_ask_before_fitting(self, recording):
        with pytest.raises(ValueError, match="not fitted yet"):
            estimator().predict(recording)
        assert not hasattr(estimator(), "parameters_")

    def test_a_pair_without_variation_is_refused(self):
        times = np.arange(0, 30, 1.0)
        with pytest.warns(msrm.recording.RecordingWarning):
            flat = msrm.Recording.from_dict({"p1": {"run-1": {"brain": (np.ones((30, 2)), times)}}})
        with pytest.raises(ValueError, match="'brain' of p1: none of its 2 features varies in run-1"):
            estimator(responses={"brain": msrm.Identity()}).fit(flat)
