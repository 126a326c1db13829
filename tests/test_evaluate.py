"""Scores, baselines and held-out folds against brute force, and the promise that held-out samples change nothing."""

import numpy as np
import pytest
import xarray as xr
from scipy.stats import norm

import msrm
from msrm.evaluation.baselines import _interpolated
from msrm.evaluation.crossvalidation import select_penalties
from msrm.evaluation.holdout import make_folds
from msrm.evaluation.matching import Matched, Segments
from msrm.evaluation.question import resampled
from msrm.evaluation.ridge import LAGS, STRENGTHS
from msrm.evaluation.scores import LEVELS, pool, score_sums

# FFT sums of a few hundred entries of order one.
ROUNDING = 1e-10


class Echo:
    """A stand-in for a model: every target is its training mean plus `gain` training sds of the mean source."""

    def __init__(self, gain=0.5, spread=1.0):
        self.gain, self.spread = gain, spread

    def get_params(self, deep=True):
        return {"gain": self.gain, "spread": self.spread}

    def fit(self, recording):
        self.digest_ = recording.digest()
        self.moments_ = {
            pair: (np.nanmean(values, 0), np.nanstd(values, 0))
            for pair in recording.pairs
            for values in [np.concatenate([s.values for s in recording.streams(participant=pair[0], modality=pair[1])])]
        }
        return self

    def calibrate(self, recording):
        new = Echo(self.gain, self.spread).fit(recording)
        new.moments_ = self.moments_ | new.moments_
        return new

    def predict(self, recording, *, targets=None, source="both", times=None, noise=False):
        asked = {(p, m) for p, names in (targets or {}).items() for m in names}
        nodes = {}
        for stream in recording.streams():
            pair = (stream.participant, stream.modality)
            if targets is not None and pair not in asked:
                continue
            seen = [
                self._signal(other, stream.times)
                for other in recording.streams(run=stream.run)
                if (other.participant, other.modality) not in asked | {pair}
                and (source == "both" or (other.participant == pair[0]) == (source == "within"))
            ]
            mean, sd = self.moments_[pair]
            signal = np.mean(seen, axis=0)[:, None] * np.ones(len(mean))
            supported = np.ones(len(signal), bool)
            supported[:2] = False
            nodes[f"{stream.participant}/{stream.run}/{stream.modality}"] = xr.Dataset(
                {
                    "mean": (("time", "feature"), mean + self.gain * sd * signal),
                    "variance": (("time", "feature"), np.broadcast_to(self.spread * sd**2, signal.shape)),
                    "supported": ("time", supported),
                }
            )
        return xr.DataTree.from_dict(nodes)

    def _signal(self, stream, at):
        mean, sd = self.moments_[stream.participant, stream.modality]
        values = np.nan_to_num((stream.values - mean) / np.where(sd > 0, sd, np.nan)).mean(1)
        return np.interp(at, stream.times, values)


def make(runs=3, participants=("a", "b", "c"), missing=0.05, seed=0, n=60):
    """Participants with a shared sine in two modalities, on their own clocks."""
    rng = np.random.default_rng(seed)
    data = {}
    for i, p in enumerate(participants):
        for r in range(runs):
            streams = {}
            for m, period, width in (("face", 1.01, 3), ("skin", 0.7, 2)):
                times = 0.1 * i + np.arange(0.0, n, period)
                values = np.sin(times / 4.0 + r)[:, None] * (1.0 + np.arange(width))
                values += rng.normal(0, 0.7, values.shape)
                values = 5.0 * i + values
                values[rng.uniform(size=values.shape) < missing] = np.nan
                streams[m] = (values, times)
            data.setdefault(p, {})[f"run-{r + 1}"] = streams
    return msrm.Recording.from_dict(data)


# Scores


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_every_shift_equals_rolling_the_truth(missing):
    rng = np.random.default_rng(1)
    truth, mean = rng.normal(0.3, 1, (37, 4)), rng.normal(-0.2, 1, (37, 4))
    variance = rng.uniform(0.5, 2, (37, 4))
    for array in (truth, mean):
        array[rng.uniform(size=array.shape) < missing] = np.nan
    sums = score_sums(truth, mean, variance)
    for shift in range(37):
        y = np.roll(truth, -shift, axis=0)
        ok = np.isfinite(y) & np.isfinite(mean)
        assert sums.entries[shift] == ok.sum()
        np.testing.assert_allclose(sums.sse[shift], np.sum((y - mean)[ok] ** 2), rtol=ROUNDING)
        np.testing.assert_allclose(sums.sst[shift], np.sum(y[ok] ** 2), rtol=ROUNDING)
        r = [np.corrcoef(y[o, f], mean[o, f])[0, 1] for f, o in enumerate(ok.T)]
        np.testing.assert_allclose(sums.correlation[shift], np.sum(r), atol=ROUNDING)
        density = norm.logpdf(y, mean, np.sqrt(variance))[ok].sum()
        np.testing.assert_allclose(sums.log_density[shift], density, rtol=ROUNDING)
    ok = np.isfinite(truth) & np.isfinite(mean)
    inside = norm.cdf(np.abs(truth - mean)[ok] / np.sqrt(variance[ok])) - 0.5
    np.testing.assert_array_equal(sums.hits, [np.sum(2 * inside <= level) for level in LEVELS])


def test_sums_without_a_null_are_those_of_no_shift():
    rng = np.random.default_rng(2)
    truth, mean = rng.normal(size=(2, 30, 3))
    truth[4, 1] = np.nan
    one, all_shifts = score_sums(truth, mean, null=False), score_sums(truth, mean)
    assert one.sse.shape == (1,)
    for name in ("entries", "sse", "sst", "correlation", "correlated"):
        np.testing.assert_allclose(getattr(one, name)[0], getattr(all_shifts, name)[0], rtol=ROUNDING)


def test_r2_is_pooled_over_pieces_and_features_and_nan_without_variation():
    rng = np.random.default_rng(3)
    pieces = [(rng.normal(size=(n, f)), rng.normal(size=(n, f))) for n, f in ((20, 2), (31, 4))]
    scores = pool([score_sums(y, p) for y, p in pieces], n_shifts=0)
    error = sum(np.sum((y - p) ** 2) for y, p in pieces)
    np.testing.assert_allclose(scores.r2, 1 - error / sum(np.sum(y**2) for y, _ in pieces), rtol=1e-14)
    assert np.isnan(scores.r2_p)
    flat = pool([score_sums(np.zeros((9, 2)), np.ones((9, 2)))], n_shifts=10)
    assert np.isnan(flat.r2)
    assert np.isnan(flat.correlation)
    assert np.isnan(flat.r2_p)


def test_p_values_are_small_for_signal_and_uniform_for_none():
    rng = np.random.default_rng(4)
    truth = rng.normal(size=(200, 3))
    real = pool([score_sums(truth, 0.5 * truth + rng.normal(size=truth.shape))], n_shifts=999)
    assert real.r2_p == real.correlation_p == 1 / 1000
    chance = [
        pool([score_sums(rng.normal(size=(50, 1)), rng.normal(size=(50, 1)))], n_shifts=200).r2_p for _ in range(300)
    ]
    # Standard error of the mean of 300 uniforms is 0.017.
    assert abs(np.mean(chance) - 0.5) < 0.07
    assert 0.02 < np.mean(np.array(chance) <= 0.1) < 0.2


def test_a_variance_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="not positive"):
        score_sums(np.ones((3, 1)), np.ones((3, 1)), np.zeros((3, 1)))


# Resampling and baselines


def test_resampling_is_linear_inside_and_nan_in_gaps_and_beside_missing_values():
    times = np.array([0.0, 1.0, 2.0, 7.0, 8.0])
    values = np.array([[0.0, 1.0], [2.0, np.nan], [4.0, 3.0], [5.0, 5.0], [6.0, 6.0]])
    out = resampled(values, times, np.array([-0.1, 0.0, 0.5, 1.0, 2.0, 4.0, 7.5, 8.0, 8.1]))
    np.testing.assert_allclose(out[:, 0], [np.nan, 0, 1, 2, 4, np.nan, 5.5, 6, np.nan])
    np.testing.assert_allclose(out[:, 1], [np.nan, 1, np.nan, np.nan, 3, np.nan, 5.5, 6, np.nan])


def test_interpolation_skips_each_features_own_gaps():
    values = np.array([[0.0, np.nan], [np.nan, 1.0], [2.0, np.nan], [np.nan, 3.0]])
    out = _interpolated(values, np.arange(4.0), np.array([0.5, 1.0, 2.0, 3.0]))
    np.testing.assert_allclose(out, [[0.5, 1.0], [1.0, 1.0], [2.0, 2.0], [2.0, 3.0]])


def ridge_by_hand(recording, train, test, target, strengths, lags):
    """Normal equations from the documentation, one feature at a time (complete target rows only)."""

    def design(run):
        at, columns = recording.stream(*target[:1], run, target[1]).times, []
        for p, m in recording.pairs:
            if (p, m) == target:
                continue
            stack = np.concatenate([recording.stream(p, r, m).values for r in train])
            stream = recording.stream(p, run, m)
            z = (stream.values - np.nanmean(stack, 0)) / np.nanstd(stack, 0)
            for lag in lags:
                columns.append(np.nan_to_num(resampled(z, stream.times, at - lag)))
        return np.concatenate(columns, 1)

    raw = {run: recording.stream(target[0], run, target[1]).values for run in (*train, test)}
    mean, sd = (f(np.concatenate([raw[r] for r in train]), axis=0) for f in (np.mean, np.std))
    y = {run: (v - mean) / sd for run, v in raw.items()}
    x = {run: design(run) for run in raw}

    def fit_predict(runs, at, strength):
        a, b = np.concatenate([x[r] for r in runs]), np.concatenate([y[r] for r in runs])
        ca, cb = a - a.mean(0), b - b.mean(0)
        rows = sum(len(x[r]) for r in train)
        weights = np.linalg.solve(ca.T @ ca + strength * rows * np.eye(a.shape[1]), ca.T @ cb)
        return b.mean(0) + (x[at] - a.mean(0)) @ weights

    def error(strength):
        return sum(np.sum((y[r] - fit_predict([q for q in train if q != r], r, strength)) ** 2) for r in train)

    best = min(strengths, key=error)
    residual = 1 - np.sum((y[test] - fit_predict(train, test, best)) ** 2) / np.sum(y[test] ** 2)
    return residual


class Everywhere(Echo):
    """An Echo that claims support for every row."""

    def predict(self, recording, **options):
        tree = super().predict(recording, **options)
        return tree.map_over_datasets(lambda node: node.assign(supported=node["supported"] | True) if node else node)


@pytest.mark.parametrize("n", [60, 9])
def test_ridge_equals_its_normal_equations_with_more_rows_or_more_columns(n):
    recording = make(missing=0.0, n=n)
    training, held_out = recording.select(runs=["run-1", "run-2"]), recording.select(runs=["run-3"])
    fit = Everywhere().fit(training)
    report = msrm.score(fit, held_out, training=training, targets={"a": ["face"]}, n_shifts=0, baselines=["ridge"])
    expected = ridge_by_hand(recording, ["run-1", "run-2"], "run-3", ("a", "face"), STRENGTHS, LAGS)
    np.testing.assert_allclose(report["r2"].sel(stream="a/face", predictor="ridge"), expected, rtol=1e-9)


def test_across_participants_is_the_mean_of_the_others_in_their_own_units():
    recording = make(missing=0.0)
    training, held_out = recording.select(runs=["run-1", "run-2"]), recording.select(runs=["run-3"])
    report = msrm.score(Echo().fit(training), held_out, training=training, targets={"a": ["face"]}, n_shifts=0)
    stacks = {p: np.concatenate([s.values for s in training.streams(p, modality="face")]) for p in "abc"}
    z = {p: (held_out.stream(p, "run-3", "face").values - v.mean(0)) / v.std(0) for p, v in stacks.items()}
    times = {p: held_out.stream(p, "run-3", "face").times for p in "abc"}
    others = np.array([[np.interp(times["a"], times[p], c, np.nan, np.nan) for c in z[p].T] for p in "bc"])
    known = np.isfinite(others)
    predicted = (np.where(known, others, 0.0).sum(0) / np.maximum(known.sum(0), 1)).T
    y, p = z["a"][2:], predicted[2:]
    expected = 1 - np.sum((y - p) ** 2) / np.sum(y**2)
    np.testing.assert_allclose(report["r2"].sel(stream="a/face", predictor="across_participants"), expected, rtol=1e-12)


# The report


def test_score_reports_every_stream_and_predictor_with_training_sd_units():
    recording = make()
    training, held_out = recording.select(runs=["run-1", "run-2"]), recording.select(runs=["run-3"])
    fit = Echo(gain=0.8, spread=0.5).fit(training)
    report = msrm.score(fit, held_out, training=training, n_shifts=50)
    assert list(report["stream"].values) == [f"{p}/{m}" for p, m in recording.pairs]
    assert list(report["predictor"].values) == ["fit", "training_mean", "across_participants", "ridge"]
    assert "interpolation needs held-out blocks" in report.attrs["notes"]
    np.testing.assert_array_equal(report["r2"].sel(predictor="training_mean"), 0.0)
    stream = held_out.stream("b", "run-3", "skin")
    node = fit.predict(held_out, targets={"b": ["skin"]})["b/run-3/skin"]
    mean, sd = fit.moments_["b", "skin"]
    y, p = ((v - mean) / sd for v in (stream.values[2:], node["mean"].values[2:]))
    ok = np.isfinite(y)
    row = report.sel(stream="b/skin", predictor="fit")
    assert report["entries"].sel(stream="b/skin") == ok.sum()
    np.testing.assert_allclose(row["r2"], 1 - np.sum((y - p)[ok] ** 2) / np.sum(y[ok] ** 2), rtol=1e-12)
    np.testing.assert_allclose(row["log_density"], norm.logpdf(y, p, np.sqrt(0.5))[ok].mean(), rtol=1e-12)
    np.testing.assert_allclose(row["r2_by_run"].sel(run="run-3"), row["r2"])
    assert (report["overall_r2"].sel(predictor="ridge") > 0.2).all()
    # Gaussian noise: the ridge's intervals cover what they say, within binomial error of about 1,000 entries.
    coverage = report["coverage"].sel(predictor="ridge").mean("stream")
    np.testing.assert_allclose(coverage, report["level"], atol=0.08)


def test_features_constant_in_training_are_not_scored():
    recording = make(runs=2, missing=0.0)
    data = {}
    for stream in recording.streams():
        values = stream.values.copy()
        if (stream.run, stream.modality) == ("run-1", "face"):
            values[:, 1] = 3.0
        data.setdefault(stream.participant, {}).setdefault(stream.run, {})[stream.modality] = (values, stream.times)
    with pytest.warns(msrm.recording.RecordingWarning):
        recording = msrm.Recording.from_dict({p: {"run-1": runs["run-1"]} for p, runs in data.items()})
    held_out = msrm.Recording.from_dict({p: {"run-2": runs["run-2"]} for p, runs in data.items()})
    report = msrm.score(Echo().fit(recording), held_out, training=recording, targets={"a": ["face"]}, n_shifts=0)
    assert report["entries"].item() == 2 * 58


def test_score_refuses_what_it_cannot_do():
    recording = make(runs=2)
    fit = Echo().fit(recording)
    with pytest.raises(ValueError, match="no modality 'pulse'"):
        msrm.score(fit, recording, training=recording, targets={"a": ["pulse"]})
    with pytest.raises(ValueError, match="source must be one of 'within', 'across', 'both'"):
        msrm.score(fit, recording, training=recording, source="self")
    with pytest.raises(ValueError, match="No baseline 'lasso'; there are training_mean"):
        msrm.score(fit, recording, training=recording, baselines=["lasso"])
    everything = {p: ["face", "skin"] for p in "abc"}
    with pytest.raises(ValueError, match="Nothing is left"):
        msrm.score(fit, recording, training=recording, targets=everything)


# Folds


def _where(step):
    return step.truth.pairs, step.truth.runs


@pytest.mark.parametrize("hold_out", ["runs", "blocks", "participants"])
def test_held_out_samples_change_no_bit_of_what_is_trained_or_seen(hold_out):
    recording = make(runs=3)
    folds = make_folds(recording, hold_out, seed=3)
    for fold in folds[:2]:
        for step in fold.steps(recording, None):
            garbage = {}
            for stream in recording.streams():
                values = stream.values.copy()
                key = (stream.participant, stream.run, stream.modality)
                if step.truth.has(*key):
                    finite = np.isfinite(step.truth.stream(*key).values)
                    values[finite] = 1e6 * (1 + np.arange(finite.sum()) % 7)
                garbage.setdefault(key[0], {}).setdefault(key[1], {})[key[2]] = (values, stream.times)
            broken = msrm.Recording.from_dict(garbage)
            other = next(
                s
                for s in fold.steps(broken, None)
                if s.truth.pairs == step.truth.pairs and s.truth.runs == step.truth.runs
            )
            assert fold.training(broken).digest() == fold.training(recording).digest()
            assert other.learned.recording.digest() == step.learned.recording.digest()
            assert other.sources.digest() == step.sources.digest()


def test_blocks_hide_every_sample_once_and_streams_at_different_times():
    recording = make(runs=2, missing=0.0)
    folds = make_folds(recording, "blocks", folds=6)
    seen = {}
    for fold in folds:
        (step,) = fold.steps(recording, None)
        for stream in step.truth.streams():
            key = (stream.participant, stream.run, stream.modality)
            finite = np.isfinite(stream.values).all(1)
            seen[key] = seen.get(key, 0) + finite
            hidden = np.isnan(step.sources.stream(*key).values).all(1)
            np.testing.assert_array_equal(finite, hidden)
        a, b = (fold.hidden[p, "run-1", "face"] for p in "ab")
        assert not (a & b).any()
    assert all((count == 1).all() for count in seen.values())


def test_named_targets_alone_are_hidden_at_common_times():
    recording = make(runs=1, missing=0.0)
    for fold in make_folds(recording, "blocks", targets=[{"a": ["face"], "b": ["skin"]}]):
        (step,) = fold.steps(recording, None)
        assert set(step.truth.pairs) == {("a", "face"), ("b", "skin")}
        np.testing.assert_array_equal(
            step.sources.stream("c", "run-1", "face").values, recording.stream("c", "run-1", "face").values
        )


@pytest.mark.parametrize("hold_out", ["runs", "blocks", "participants"])
def test_evaluate_pools_folds_and_prefers_a_model_that_knows_something(hold_out):
    recording = make(runs=3, seed=5)
    report = msrm.evaluate(Echo(0.8, 0.6), recording, hold_out=hold_out, n_shifts=100)
    assert report.sizes["stream"] == 6
    assert (report["r2"].sel(predictor="fit") > 0.1).all()
    assert (report["r2_p"].sel(predictor="fit") < 0.1).all()
    assert ("interpolation" in report["predictor"].values) == (hold_out == "blocks")
    assert report.attrs["hold_out"] == hold_out
    if hold_out == "runs":
        # The whole against its parts: every run is a fold, so a run's R^2 is that of a fit to the others.
        training, held_out = recording.drop(runs=["run-2"]), recording.select(runs=["run-2"])
        one = msrm.score(Echo(0.8, 0.6).fit(training), held_out, training=training, n_shifts=0)
        np.testing.assert_array_equal(report["r2_by_run"].sel(run="run-2"), one["r2"])


def test_any_number_of_processes_gives_the_same_report():
    recording = make(runs=3)
    alone = msrm.evaluate(Echo(), recording, n_shifts=20, seed=2)
    together = msrm.evaluate(Echo(), recording, n_shifts=20, seed=2, n_jobs=2, progress=False)
    xr.testing.assert_identical(alone, together)


def test_the_estimator_is_left_untouched():
    estimator = Echo()
    msrm.evaluate(estimator, make(runs=2), n_shifts=0, baselines=[])
    assert not hasattr(estimator, "moments_")


def test_folds_that_the_recording_cannot_give_are_refused():
    one_run = make(runs=1)
    with pytest.raises(ValueError, match="needs at least 2 runs, the recording has 1; use 'blocks'"):
        msrm.evaluate(Echo(), one_run)
    with pytest.raises(ValueError, match="has only run-1; use hold_out='blocks'"):
        msrm.evaluate(Echo(), one_run, hold_out="participants")
    with pytest.raises(ValueError, match="hold_out must be one of 'runs', 'blocks', 'participants', found 'weeks'"):
        msrm.evaluate(Echo(), one_run, hold_out="weeks")
    with pytest.raises(ValueError, match="source='within' cannot be used"):
        msrm.evaluate(Echo(), make(runs=2), hold_out="participants", source="within")
    with pytest.raises(ValueError, match="folds must be at least 2"):
        msrm.evaluate(Echo(), make(runs=2), folds=1)


# Segment matching


def test_matching_finds_the_segment_with_the_largest_correlation():
    rng = np.random.default_rng(6)
    times, features = 0.5 * np.arange(203), 5
    truth, mean = rng.normal(size=(2, 203, features))
    mean += 0.6 * truth
    truth[40:45, 2] = np.nan
    segments = Segments(times, seconds=10.0)
    for span in (slice(0, 2), slice(2, 5)):
        segments.add(truth[:, span], mean[:, span])
    y, p = (np.nan_to_num(v[:200]).reshape(10, -1) for v in (truth, mean))
    best = [np.argmax([np.corrcoef(own, other)[0, 1] for other in p]) for own in y]
    assert segments.matched() == Matched(10, int(np.sum(np.array(best) == np.arange(10))), 1.0)


def test_matching_tries_nothing_where_predictions_or_data_are_missing():
    truth = np.random.default_rng(7).normal(size=(100, 2))
    flat = Segments(np.arange(100.0))
    flat.add(truth, np.zeros_like(truth))
    assert flat.matched() == Matched()
    truth[15:30] = np.nan
    gap = Segments(np.arange(100.0))
    gap.add(truth, np.random.default_rng(8).normal(size=(100, 2)))
    assert gap.matched().tried == 5


# Penalties by cross-validation


class Tuned(Echo):
    """An Echo whose error is least at strength 0.03 and timescale 20 s, and larger the farther from there."""

    def __init__(
        self,
        loading_ridge=1e-3,
        latent_ridge=1e-4,
        roughness=1e-2,
        latent_step=2.0,
        n_factors=3,
        penalties="given",
        n_jobs=1,
        seed=0,
        tol=1e-8,
        progress=None,
        loading_scaling="feature",
    ):
        self.loading_ridge, self.latent_ridge, self.roughness = loading_ridge, latent_ridge, roughness
        self.latent_step, self.n_factors, self.penalties = latent_step, n_factors, penalties
        self.n_jobs, self.seed, self.tol, self.progress = n_jobs, seed, tol, progress
        self.loading_scaling = loading_scaling
        self.spread = 1.0

    def get_params(self, deep=True):
        settings = ["loading_ridge", "latent_ridge", "roughness", "latent_step", "n_factors"]
        return {
            name: getattr(self, name)
            for name in [*settings, "penalties", "n_jobs", "seed", "tol", "progress", "loading_scaling"]
        }

    def fit(self, recording):
        assert self.penalties == "given"
        strength = np.log10(np.sqrt(self.loading_ridge * self.latent_ridge) / 0.03)
        timescale = np.log10(np.sqrt(self.roughness / self.latent_ridge) / 20.0)
        self.gain = 0.8 - 0.2 * np.hypot(strength, timescale) - 0.1 * abs(self.n_factors - 2)
        return super().fit(recording)


def test_the_default_search_ends_near_the_best_strengths():
    settings, results = select_penalties(Tuned(penalties="cv"), make())
    assert set(settings) == {"loading_ridge", "latent_ridge", "roughness"}
    strength = np.sqrt(1.5 * settings["loading_ridge"] * settings["latent_ridge"])
    timescale = np.sqrt(settings["roughness"] / settings["latent_ridge"])
    assert abs(np.log10(strength / 0.03)) < 0.13
    assert abs(np.log10(timescale / 20.0)) < 0.13
    best = results.isel(candidate=results.attrs["best"])
    assert best["r2"] == results["r2"].max()
    assert best["roughness"] == settings["roughness"]
    # Every fold trains on two of three runs.
    np.testing.assert_allclose(settings["loading_ridge"], best["loading_ridge"] * 2 / 3)
    assert len(np.unique(results["loading_ridge"].values.round(9) + 1j * results["roughness"].values)) == len(
        results["r2"]
    )


def test_named_candidates_are_tried_in_every_combination_and_scored_as_evaluate_does():
    recording = make()
    candidates = {"n_factors": [2, 3], "roughness": [1e-2, 1.0], "targets": {"a": ["face"]}, "source": "across"}
    settings, results = select_penalties(Tuned(penalties=candidates, n_jobs=2), recording)
    assert settings["n_factors"] == 2
    assert results.sizes["candidate"] == 4
    for row in range(4):
        point = results.isel(candidate=row)
        tuned = Tuned(n_factors=point["n_factors"].item(), roughness=point["roughness"].item())
        report = msrm.evaluate(tuned, recording, targets={"a": ["face"]}, source="across", n_shifts=0, baselines=[])
        np.testing.assert_allclose(point["r2"], report["r2"].sel(predictor="fit").item(), rtol=1e-12)
        by_run = report["r2_by_run"].sel(predictor="fit").values[0]
        np.testing.assert_allclose(point["r2_by_fold"], by_run, rtol=1e-12)


def test_one_run_is_split_into_blocks():
    _, results = select_penalties(Tuned(penalties={"roughness": [1e-2]}), make(runs=1))
    assert results.sizes["fold"] == 5


def test_candidates_that_make_no_sense_are_refused():
    recording = make(runs=2)
    with pytest.raises(ValueError, match=r"penalties\['smoothness'\] is neither a constructor argument"):
        select_penalties(Tuned(penalties={"smoothness": [1.0]}), recording)
    with pytest.raises(ValueError, match=r"penalties\['roughness'\] must be a list of candidates, found 1.0"):
        select_penalties(Tuned(penalties={"roughness": 1.0}), recording)
    with pytest.raises(ValueError, match="penalties must be 'given', 'cv' or a dict of candidates, found 'best'"):
        select_penalties(Tuned(penalties="best"), recording)
    with pytest.raises(ValueError, match=r"penalties\['source'\] must be one of"):
        select_penalties(Tuned(penalties={"source": "self"}), recording)
