"""A reopened fit is the fit: predictions, settings, evidence and starts, for every option."""

import numpy as np
import pytest

import msrm
from msrm.gp import GPMSRM

FREE = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(
        width=msrm.Free(0.6, bounds=(0.3, 1.2), prior=msrm.LogNormal(-0.5, 0.5)),
        lag=msrm.Free(0.0, bounds=(-1.0, 1.0), prior=msrm.Normal(0.3, 1.0)),
    ),
}
OPTIONS = {
    "dense": {"likelihood": "dense"},
    "statespace": {"likelihood": "statespace"},
    "standardized": {"standardize": True},
    "free length scale": {"length_scale": msrm.Free(2.5, bounds=(1.0, 6.0), prior=msrm.LogNormal(0.9, 0.3))},
    "length scale prior": {"length_scale": msrm.LogNormal(0.9, 0.3), "likelihood": "statespace"},
    "coloured": {"residual_timescales": {"rating": msrm.Free(0.8, bounds=(0.2, 4.0)), "brain": 1.1}},
    "coloured statespace": {"residual_timescales": {"rating": 0.8}, "likelihood": "statespace"},
    "run offsets": {"run_offsets": ("rating", "brain"), "priors": msrm.Priors(run_offset_sd=0.6)},
    "powers": {"powers": {"brain": 0.5}, "smoothness": 2.5},
    "trimmed": {"edges": "trim", "priors": msrm.Priors(noise=msrm.LogNormal(-0.5, 1.0).bounded(0.01, 9.0))},
    "other families": {
        "responses": {
            "brain": msrm.Sampled([0.0, 1.0, 2.0], [0.2, 1.0, 0.3]),
            "rating": msrm.Gamma(shape=3.0, scale=msrm.Free(0.4, bounds=(0.2, 0.9)), lag=0.0),
        }
    },
}


def made(seed: int = 0) -> msrm.Recording:
    rng = np.random.default_rng(seed)
    data: dict = {}
    for p in ("p 1", "ö.2"):
        for run in ("run-1", "2nd run"):
            for modality, period, features in (("brain", 1.6, 3), ("rating", 1.2, 2)):
                times = np.arange(0.0, 20.0, period)
                values = np.sin(0.6 * times + len(run))[:, None] * rng.normal(size=features)
                values = values + 0.5 * rng.standard_normal(values.shape)
                values[rng.uniform(size=values.shape) < 0.1] = np.nan
                data.setdefault(p, {}).setdefault(run, {})[modality] = values, times
    return msrm.Recording.from_dict(data)


@pytest.fixture(scope="module")
def recording():
    return made()


@pytest.mark.parametrize("option", OPTIONS)
def test_a_reopened_fit_answers_identically(recording, option, tmp_path):
    arguments = {"length_scale": 2.5, "n_starts": 1, "progress": False, "responses": FREE, **OPTIONS[option]}
    fit = GPMSRM(1, arguments.pop("responses"), **arguments).fit(recording)
    fit.save(tmp_path / "fit.nc")
    again = msrm.open_fit(tmp_path / "fit.nc")
    assert isinstance(again, GPMSRM)
    assert repr(again) == repr(fit)
    for ask in (
        {"targets": {"p 1": ["rating"]}, "source": "across", "joint": "feature", "noise": True},
        {"targets": {"ö.2": ["brain"]}, "joint": "time", "times": np.array([3.3, 1.0])},
    ):
        for run in recording.runs:
            one, other = (model.predict(recording, **ask)[next(iter(ask["targets"]))][run] for model in (fit, again))
            assert one.identical(other)
    assert again.infer_latent().identical(fit.infer_latent())
    assert again.infer_latent(recording, joint="time").identical(fit.infer_latent(recording, joint="time"))
    assert again.transform(recording).identical(fit.transform(recording))


def test_evidence_settings_and_starts_survive(recording, tmp_path):
    fit = GPMSRM(1, FREE, length_scale=2.5, likelihood="statespace", seed=3, progress=False).fit(recording)
    fit.save(tmp_path / "fit.nc")
    again = msrm.open_fit(tmp_path / "fit.nc")
    assert sorted(vars(again)) == sorted(vars(fit))
    for name in [
        "objective_",
        "log_likelihood_",
        "log_prior_",
        "likelihood_error_",
        "n_iter_",
        "n_evaluations_",
        "converged_",
        "stop_reason_",
        "decrement_",
        "at_bounds_",
        "backend_",
        "starts_",
        "recording_digest_",
        "responses_",
        "length_scale_",
    ]:
        assert getattr(again, name) == getattr(fit, name), name
        assert type(getattr(again, name)) is type(getattr(fit, name)), name
    np.testing.assert_array_equal(again.history_, fit.history_)
    assert again.explained_variance_.identical(fit.explained_variance_)
    assert again.latent_power_.identical(fit.latent_power_)
    assert again.parameters_.keys() == fit.parameters_.keys()
    for name, value in fit.parameters_.items():
        assert value.identical(again.parameters_[name]) if hasattr(value, "dims") else value == again.parameters_[name]
    # The same arguments fit to the same bits.
    assert type(again)(**again.get_params()).fit(recording).objective_ == fit.objective_


def test_a_calibrated_fit_is_archived_too(recording, tmp_path):
    fit = GPMSRM(1, FREE, length_scale=2.5, n_starts=1, progress=False).fit(recording.select(participants=["p 1"]))
    joined = fit.calibrate(recording.select(participants=["ö.2"]))
    joined.save(tmp_path / "fit.nc")
    again = msrm.open_fit(tmp_path / "fit.nc")
    one, other = (m.predict(recording, targets={"ö.2": ["rating"]}, source="across") for m in (joined, again))
    assert one.identical(other)


def test_a_fit_can_be_copied_and_pickled(recording):
    import copy
    import pickle

    fit = GPMSRM(1, FREE, length_scale=2.5, n_starts=1, progress=False).fit(recording)
    for other in (copy.deepcopy(fit), pickle.loads(pickle.dumps(fit))):
        assert other.infer_latent().identical(fit.infer_latent())


def test_features_without_data_stay_apart_from_zeros(tmp_path):
    rng, times = np.random.default_rng(2), np.arange(20.0)
    values = np.sin(times / 3.0)[:, None] * [1.0, 0.5, 1.0] + 0.2 * rng.standard_normal((20, 3))
    values[:, 2] = np.nan
    with pytest.warns(msrm.RecordingWarning, match="missing in all runs"):
        data = msrm.Recording.from_dict({"a": {"r": {"rating": (values, times)}}})
    fit = GPMSRM(1, {"rating": msrm.Identity()}, n_starts=1, progress=False).fit(data)
    fit.save(tmp_path / "fit.nc")
    again = msrm.open_fit(tmp_path / "fit.nc")
    assert again.predict(data).identical(fit.predict(data))
    assert np.isnan(again.predict(data)["a/r/rating"]["mean"][:, 2]).all()
    assert float(again.parameters_["loading/a/rating"][2, 0]) == 0.0
