"""msrm.score and msrm.evaluate of a GP-MSRM: variances of new observations, densities and coverage beside baselines."""

import numpy as np
import pytest
from scipy.stats import norm

import msrm

TARGETS = {"p1": ["rating"]}
RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.6, lag=0.0),
    "physiology": msrm.Gaussian(width=0.6, lag=0.5),
}
LEVELS = (0.5, 0.8, 0.95)


def estimator(**settings):
    return msrm.GPMSRM(
        1, RESPONSES, standardize=True, n_starts=1, tol=1e-2, likelihood_tolerance=0.5, progress=False, **settings
    )


@pytest.fixture(scope="module")
def recording():
    return msrm.simulate(features=6, factors=1, runs=3, seconds=72.0, participants=2, seed=3)[0]


@pytest.fixture(scope="module")
def scored(recording):
    training, held_out = recording.drop(runs=["run-3"]), recording.select(runs=["run-3"])
    fitted = estimator().fit(training)
    return fitted, held_out, training, msrm.score(fitted, held_out, training=training, targets=TARGETS)


def test_score_of_a_gp_is_that_of_its_noisy_predictions(scored):
    fitted, held_out, training, report = scored
    node = fitted.predict(held_out, targets=TARGETS, noise=True)["p1/run-3/rating"]
    rows = node["supported"].values
    before = training.streams("p1", modality="rating")
    past = np.concatenate([stream.values for stream in before])
    mean, sd = past.mean(axis=0), past.std(axis=0)
    truth = ((held_out.stream("p1", "run-3", "rating").values - mean) / sd)[rows]
    predicted = ((node["mean"].values - mean) / sd)[rows]
    spread = (np.sqrt(node["variance"].values) / sd)[rows]
    mine = report.sel(stream="p1/rating", predictor="fit")
    # Sums of a few hundred terms: rounding only.
    np.testing.assert_allclose(mine["r2"], 1 - np.sum((truth - predicted) ** 2) / np.sum(truth**2), rtol=1e-10)
    np.testing.assert_allclose(mine["log_density"], norm.logpdf(truth, predicted, spread).mean(), rtol=1e-10)
    inside = [np.mean(np.abs(truth - predicted) <= norm.ppf(0.5 + level / 2) * spread) for level in LEVELS]
    np.testing.assert_allclose(mine["coverage"], inside, rtol=1e-12)


def test_a_gp_on_data_of_its_model_beats_doing_nothing_and_covers(scored):
    report = scored[-1].sel(stream="p1/rating")
    fit, nothing = report.sel(predictor="fit"), report.sel(predictor="training_mean")
    assert fit["r2"] > nothing["r2"] + 0.1
    assert fit["log_density"] > nothing["log_density"] + 0.05
    # Some 300 entries, five neighbouring features each: the binomial sd at 0.5 is about 0.05 with 100 independent ones.
    np.testing.assert_allclose(fit["coverage"], LEVELS, atol=0.15)
    assert set(report["predictor"].values) >= {"fit", "training_mean", "ridge"}


@pytest.mark.parametrize(
    ("hold_out", "settings"),
    [("runs", {}), ("runs", {"residual_timescales": {"rating": 1.0}}), ("blocks", {}), ("participants", {})],
    ids=["runs", "runs, OU residuals", "blocks", "participants"],
)
def test_evaluate_gives_densities_and_coverage_of_a_gp(recording, hold_out, settings):
    folds = None if hold_out == "participants" else 2
    targets = {"p1": ["rating"]}
    report = msrm.evaluate(
        estimator(**settings), recording, hold_out=hold_out, folds=folds, targets=targets, n_shifts=0, progress=False
    )
    own = report.sel(stream="p1/rating")
    for predictor in ("fit", "training_mean"):
        assert np.isfinite(own["log_density"].sel(predictor=predictor))
        coverage = own["coverage"].sel(predictor=predictor).values
        assert np.all(np.diff(coverage) >= 0.0)
        assert 0.0 < coverage[0] < coverage[-1] <= 1.0
