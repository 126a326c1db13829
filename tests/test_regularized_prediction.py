"""Predictions, inferred latents, calibration and archives of R-MSRM."""

import pickle

import numpy as np
import pytest
import xarray as xr
from oracles import gaussian_curve, hat_matrix

import msrm
from msrm.stream import make_stream

RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
    "physiology": msrm.Gaussian(width=0.8, lag=1.0),
}
RIDGE, LATENT, ROUGH = 0.01, 2e-3, 0.05


def estimator(**options):
    chosen = {"latent_step": 0.9, "loading_ridge": RIDGE, "latent_ridge": LATENT, "roughness": ROUGH}
    return msrm.RMSRM(2, **({"responses": RESPONSES} | chosen | options))


@pytest.fixture(scope="module")
def recording():
    return msrm.simulate(participants=3, features=5, factors=2, seconds=60.0, runs=2, missing=0.03, seed=3)[0]


@pytest.fixture(scope="module")
def fitted(recording):
    return estimator().fit(recording)


def same(a, b):
    """Whether two trees hold the same bits."""
    nodes = [node.path for node in a.leaves]
    return nodes == [node.path for node in b.leaves] and all(
        np.array_equal(a[n][v].values, b[n][v].values, equal_nan=a[n][v].dtype.kind == "f")
        for n in nodes
        for v in a[n].data_vars
    )


def altered(recording, participant, modality):
    """The recording with one pair's values replaced by garbage."""
    rng = np.random.default_rng(0)
    return msrm.Recording.from_streams(
        [
            make_stream(s.participant, s.run, s.modality, (1e9 * rng.standard_normal(s.values.shape), s.times))
            if (s.participant, s.modality) == (participant, modality)
            else s
            for s in recording.streams()
        ]
    )


class TestPredict:
    def test_against_dense_algebra(self, recording, fitted):
        """One target from one source stream: grid, operators, normal equations and output written out."""
        part = recording.select(runs=["run-2"]).drop(
            modalities=["physiology"], targets={"p1": ["rating"], "p2": ["brain", "rating"], "p3": ["rating"]}
        )
        stream = recording.stream("p1", "run-2", "brain")
        assert [s.label for s in part.streams()] == [stream.label]
        at = np.arange(8.0, 50.0, 0.7)
        node = fitted.predict(part, targets={"p1": "rating"}, source="within", times=at)["p1/run-2/rating"]
        data = (stream.values - fitted.parameters_["offset/p1/brain"].values) / fitted.parameters_[
            "scale/p1/brain"
        ].values
        grid = 0.9 * np.arange(1 + int(np.ceil(stream.times[-1] / 0.9 - 1e-9)))
        h = hat_matrix(None, (0, 0), stream.times, grid)
        loading = fitted.parameters_["loading/p1/brain"].values
        cells = np.ones(len(data))
        cells[[0, -1]] = 0.5
        # In training the stream is one of three of p1, one of six participant-runs.
        weights = np.isfinite(data) * (cells / cells.sum() / np.isfinite(data).sum(1))[:, None] / 3 / 6
        normal, right = np.zeros((2 * len(grid), 2 * len(grid))), np.zeros(2 * len(grid))
        for n, f in zip(*np.nonzero(np.isfinite(data)), strict=True):
            row = np.kron(h[n], loading[f])
            normal += weights[n, f] * np.outer(row, row)
            right += weights[n, f] * data[n, f] * row
        shares = np.ones(len(grid))
        shares[[0, -1]] = 0.5
        step = np.diff(np.eye(len(grid)), axis=0)
        penalty = LATENT * np.diag(shares / shares.sum()) + ROUGH * step.T @ step / (0.9 * 0.9 * (len(grid) - 1))
        path = np.linalg.solve(normal + np.kron(penalty, np.eye(2)) / 2, right).reshape(-1, 2)
        lag = fitted.responses_["rating"].lag
        seen = hat_matrix(lambda u: gaussian_curve(u, 0.6, lag), (lag - 3.6, lag + 3.6), at, grid) @ path
        expected = seen @ fitted.parameters_["loading/p1/rating"].values.T
        expected = (
            expected * fitted.parameters_["scale/p1/rating"].values + fitted.parameters_["offset/p1/rating"].values
        )
        np.testing.assert_allclose(node["mean"], expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("source", ["within", "across", "both"])
    def test_targets_are_removed_before_anything_is_computed(self, recording, fitted, source):
        targets = {"p1": ["rating"], "p2": ["rating"]}
        found = fitted.predict(recording, targets=targets, source=source)
        assert same(found, fitted.predict(altered(recording, "p1", "rating"), targets=targets, source=source))
        times = {run: {"rating": recording.stream("p1", run, "rating").times} for run in recording.runs}
        gone = recording.drop(targets=targets)
        assert same(found, fitted.predict(gone, targets=targets, source=source, times=times))

    def test_sources(self, recording, fitted):
        targets = {"p1": ["rating"]}
        found = {s: fitted.predict(recording, targets=targets, source=s) for s in ("within", "across", "both")}
        own = recording.select(participants=["p1"])
        others = recording.drop(participants=["p1"])
        times = {run: recording.stream("p1", run, "rating").times for run in recording.runs}
        assert same(found["within"], fitted.predict(own, targets=targets))
        assert same(found["across"], fitted.predict(others, targets=targets, times=times))
        assert not same(found["both"], found["within"])

    def test_runs_do_not_depend_on_each_other(self, recording, fitted):
        both = fitted.predict(recording, targets={"p1": ["rating"]})
        one = fitted.predict(recording.select(runs=["run-2"]), targets={"p1": ["rating"]})
        np.testing.assert_array_equal(both["p1/run-2/rating"]["mean"], one["p1/run-2/rating"]["mean"])

    def test_every_stream_without_targets(self, recording, fitted):
        found = fitted.predict(recording)
        assert {node.path for node in found.leaves} == {
            f"/{s.participant}/{s.run}/{s.modality}" for s in recording.streams()
        }
        left_out = fitted.predict(recording, source="across")["p2/run-1/brain"]
        assert same(
            xr.DataTree(left_out.to_dataset()),
            xr.DataTree(
                fitted.predict(altered(recording, "p2", "brain"), source="across")["p2/run-1/brain"].to_dataset()
            ),
        )

    def test_it_predicts(self, recording, fitted):
        """A held-out rating from brain and physiology: most of the signal in simulated data is shared."""
        stream = recording.stream("p1", "run-1", "rating")
        node = fitted.predict(recording, targets={"p1": ["rating"]})["p1/run-1/rating"]
        kept = node["supported"].values
        error = np.nansum((stream.values - node["mean"].values)[kept] ** 2)
        assert error < 0.6 * np.nansum((stream.values - np.nanmean(stream.values, 0))[kept] ** 2)

    def test_support(self, recording, fitted):
        times = np.array([-5.0, 0.0, 2.0, 30.0, 58.0, 70.0])
        node = fitted.predict(recording, targets={"p1": ["brain", "rating"]}, times=times)
        assert node["p1/run-1/brain"]["supported"].values.tolist() == [False, True, True, True, True, False]
        assert node["p1/run-1/rating"]["supported"].values.tolist() == [False, False, False, True, False, False]
        assert np.isnan(node["p1/run-1/brain"]["mean"].values[[0, 5]]).all()
        assert np.isfinite(node["p1/run-1/brain"]["mean"].values[1:5]).all()

    def test_a_gap_in_every_source_is_not_supported(self, recording, fitted):
        part = recording.select(modalities=["brain"], runs=["run-1"])
        gap = []
        for s in part.streams():
            values = s.values.copy()
            values[(s.times > 20) & (s.times < 40)] = np.nan
            gap.append(make_stream(s.participant, s.run, s.modality, (values, s.times)))
        node = fitted.predict(
            msrm.Recording.from_streams(gap), targets={"p1": ["rating"]}, times=np.array([10.0, 30.0, 50.0])
        )
        assert node["p1/run-1/rating"]["supported"].values.tolist() == [True, False, True]
        assert np.isfinite(node["p1/run-1/rating"]["mean"]).all()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"targets": {"p9": ["rating"]}}, "No participant 'p9' in the fit; there are p1, p2, p3"),
            ({"targets": {"p1": ["pulse"]}}, "Participant p1 has no modality 'pulse' in the fit; it has"),
            ({"targets": {}}, "targets is empty"),
            ({"targets": ["p1"]}, "targets must be a dict"),
            ({"source": "all"}, "source must be one of 'within', 'across', 'both', got 'all'"),
            ({"times": [np.nan]}, "times for run-1 must be a non-empty list of finite seconds"),
            (
                {"targets": {"p1": ["brain", "rating", "physiology"]}, "source": "within"},
                r"No run has a usable row of a source stream \(source='within'\)",
            ),
        ],
    )
    def test_refusals(self, recording, fitted, options, message):
        with pytest.raises((TypeError, ValueError), match=message):
            fitted.predict(recording, **options)

    def test_a_run_without_sources_is_not_supported(self, recording, fitted):
        lonely = [s for s in recording.streams() if s.run == "run-1" or (s.participant, s.modality) == ("p1", "rating")]
        node = fitted.predict(msrm.Recording._trusted(lonely), targets={"p1": ["rating"]})
        assert node["p1/run-1/rating"]["supported"].any()
        assert not node["p1/run-2/rating"]["supported"].any()
        assert np.isnan(node["p1/run-2/rating"]["mean"]).all()

    def test_times_are_needed_for_what_was_not_measured(self, recording, fitted):
        part = recording.drop(targets={"p1": ["rating"]})
        with pytest.raises(ValueError, match=r"None of the targets is measured.*times="):
            fitted.predict(part, targets={"p1": ["rating"]})

    def test_unknown_sources_are_refused(self, recording, fitted):
        stranger = make_stream("p7", "run-1", "brain", recording.stream("p1", "run-1", "brain"))
        more = msrm.Recording.from_streams([*recording.select(runs=["run-1"]).streams(), stranger])
        with pytest.raises(ValueError, match=r"'brain' of p7 in run-1: not in the fit.*Calibrate"):
            fitted.predict(more, targets={"p1": ["rating"]})
        narrow = make_stream(
            "p1", "run-1", "brain", (np.random.default_rng(0).standard_normal((20, 2)), np.arange(20.0))
        )
        with pytest.raises(ValueError, match="'brain' of p1 in run-1: 2 features; the fit has 5"):
            fitted.predict(msrm.Recording.from_streams([narrow]), targets={"p1": ["rating"]}, times=[5.0])

    def test_absent_features_stay_missing(self, recording):
        streams = []
        for s in recording.streams():
            values = s.values.copy()
            if (s.participant, s.modality) == ("p1", "brain"):
                values[:, 2] = 4.0
            streams.append(make_stream(s.participant, s.run, s.modality, (values, s.times)))
        with pytest.warns(msrm.recording.RecordingWarning, match="constant"):
            constant = msrm.Recording.from_streams(streams)
        fit = estimator().fit(constant)
        assert np.isnan(fit.parameters_["loading/p1/brain"].values[2]).all()
        mean = fit.predict(constant)["p1/run-1/brain"]["mean"].values
        assert np.isnan(mean[:, 2]).all()
        assert np.isfinite(np.delete(mean, 2, 1)).all()


class TestLatent:
    @pytest.mark.parametrize("pooling", ["shared", "population", "separate"])
    def test_the_training_recording_gives_back_the_training_latents(self, recording, pooling):
        unbalanced = recording.drop(targets={"p3": ["physiology"]})
        fit = estimator(latent_pooling=pooling).fit(unbalanced)
        name = "mean" if pooling == "shared" else "path"
        for run, node in fit.infer_latent(unbalanced).children.items():
            np.testing.assert_allclose(node[name], fit.latents_[run][name], rtol=0, atol=1e-11)

    def test_between_grid_points_it_is_linear(self, recording, fitted):
        grid = fitted.infer_latent(recording)["run-1"]["mean"]
        at = np.array([-1.0, 0.3, 10.0, 44.44, 99.0])
        node = fitted.infer_latent(recording, times={"run-1": at})["run-1"]
        expected = np.stack([np.interp(at, grid["time"].values, z) for z in grid.values.T], 1)
        np.testing.assert_allclose(node["mean"].values[1:4], expected[1:4], atol=1e-12)
        assert np.isnan(node["mean"].values[[0, 4]]).all()
        assert node["supported"].values.tolist() == [False, True, True, True, False]

    def test_transform_is_the_latent_on_its_grid(self, recording, fitted):
        found = fitted.transform(recording)
        np.testing.assert_array_equal(found["run-2"], fitted.infer_latent(recording)["run-2"]["mean"])
        assert found["run-2"].dims == ("time", "factor")

    def test_population_predicts_a_participant_without_data_by_the_mean(self, recording):
        fit = estimator(latent_pooling="population", population_strength=1.0).fit(recording)
        found = fit.predict(recording, targets={"p1": ["rating"]}, source="across")["p1/run-1/rating"]
        assert np.isfinite(found["mean"].values[found["supported"].values]).all()
        assert np.std(found["mean"].values[found["supported"].values]) > 0.05
        assert not found["supported"].values.any() or found["supported"].dtype == bool

    def test_separate_latents_predict_within_only(self, recording):
        fit = estimator(latent_pooling="separate").fit(recording)
        within = fit.predict(recording, targets={"p1": ["rating"]}, source="within")
        assert same(within, fit.predict(recording, targets={"p1": ["rating"]}, source="both"))
        with pytest.raises(ValueError, match="separate' shares no latent across participants"):
            fit.predict(recording, source="across")


class TestCalibrate:
    def renamed(self, recording, name="p9"):
        return msrm.Recording.from_streams(
            [make_stream(name, s.run, s.modality, s) for s in recording.streams(participant="p1")]
        )

    @pytest.mark.parametrize("options", [{}, {"latent_pooling": "population", "population_strength": 1e4}])
    def test_a_twin_gets_the_same_loadings(self, recording, options):
        fit = estimator(tol=1e-13, **options).fit(recording)
        both = fit.calibrate(self.renamed(recording))
        for modality in recording.modalities:
            np.testing.assert_allclose(
                both.parameters_[f"loading/p9/{modality}"],
                both.parameters_[f"loading/p1/{modality}"],
                atol=2e-3 if options else 1e-5,
            )
            np.testing.assert_array_equal(
                both.parameters_[f"offset/p9/{modality}"], fit.parameters_[f"offset/p1/{modality}"]
            )
        assert "loading/p9/brain" not in fit.parameters_

    def test_the_newcomer_is_predicted_and_predicts(self, recording, fitted):
        twin = self.renamed(recording)
        both = fitted.calibrate(twin.select(runs=["run-1"]))
        sources = msrm.Recording.from_streams([*recording.select(runs=["run-2"]).streams(), *twin.streams(run="run-2")])
        node = both.predict(sources, targets={"p9": ["brain", "rating", "physiology"]}, source="across")[
            "p9/run-2/brain"
        ]
        truth = twin.stream("p9", "run-2", "brain").values
        error = np.nansum((truth - node["mean"].values) ** 2)
        assert error < np.nansum((truth - np.nanmean(truth, 0)) ** 2)

    @pytest.mark.parametrize("pooling", [{"pooling": "separate"}, {"pooling": "partial", "pooling_strength": 1e-3}])
    def test_responses_of_their_own_are_learned(self, recording, pooling):
        rating = msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5)), **pooling)
        fit = estimator(responses=RESPONSES | {"rating": rating}, tol=1e-13).fit(recording)
        both = fit.calibrate(self.renamed(recording))
        responses = both.responses_["rating"]
        assert responses["p9"].lag == pytest.approx(responses["p1"].lag, abs=0.02)

    def test_refusals(self, recording, fitted):
        with pytest.raises(ValueError, match="'brain' of p1 is in the fit already"):
            fitted.calibrate(recording)
        other = msrm.Recording.from_streams(
            [make_stream("p9", "run-8", "brain", recording.stream("p1", "run-1", "brain"))]
        )
        with pytest.raises(ValueError, match=r"run-8 is not a run of the fit.*run-1, run-2"):
            fitted.calibrate(other)
        separate = estimator(latent_pooling="separate").fit(recording)
        with pytest.raises(ValueError, match="nothing to calibrate on"):
            separate.calibrate(self.renamed(recording))


class TestArchive:
    @pytest.mark.parametrize("pooling", ["shared", "population"])
    def test_a_reopened_fit_is_the_fit(self, recording, tmp_path, pooling):
        rating = msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5)), pooling="separate")
        fit = estimator(latent_pooling=pooling, responses=RESPONSES | {"rating": rating}, n_init=2).fit(recording)
        fit.save(tmp_path / "fit.nc")
        again = msrm.open_fit(tmp_path / "fit.nc")
        assert again.get_params() == fit.get_params()
        assert again.objective_ == fit.objective_
        assert again.objective_parts_ == fit.objective_parts_
        assert again.responses_ == fit.responses_
        assert again.recording_digest_ == recording.digest()
        assert again.stationarity_ == fit.stationarity_
        assert [s.label for s in again.starts_] == [s.label for s in fit.starts_]
        np.testing.assert_array_equal(again.starts_[-1].objectives, fit.starts_[-1].objectives)
        xr.testing.assert_identical(again.explained_variance_, fit.explained_variance_)
        xr.testing.assert_identical(again.stream_explained_variance_, fit.stream_explained_variance_)
        assert same(again.latents_, fit.latents_)
        for source in ("within", "across", "both"):
            options = {"targets": {"p1": ["rating"], "p2": ["brain"]}, "source": source}
            assert same(again.predict(recording, **options), fit.predict(recording, **options))
        assert same(again.infer_latent(recording), fit.infer_latent(recording))
        again.save(tmp_path / "fit.nc")
        assert same(msrm.open_fit(tmp_path / "fit.nc").latents_, fit.latents_)

    def test_a_calibrated_fit_is_archived_too(self, recording, fitted, tmp_path):
        both = fitted.calibrate(TestCalibrate().renamed(recording))
        both.save(tmp_path / "fit.nc")
        again = msrm.open_fit(tmp_path / "fit.nc")
        assert set(again.parameters_) == set(both.parameters_)

    def test_pickling_leaves_the_recording_behind(self, recording, fitted):
        copy = pickle.loads(pickle.dumps(fitted))
        assert len(pickle.dumps(fitted)) < 200_000
        assert copy.recording_digest_ == recording.digest()
        assert same(copy.predict(recording), fitted.predict(recording))
