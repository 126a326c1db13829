"""What a newcomer gets wrong first is refused with the line that mends it."""

import inspect

import numpy as np
import pandas as pd
import pytest

import msrm
from msrm.regularized import NotFittedError

TIMES = 1.5 * np.arange(12)


def recording_of(runs: tuple[str, ...] = ("run-1", "run-2")) -> msrm.Recording:
    rng = np.random.default_rng(0)
    data = {p: {r: {"x": (rng.standard_normal((12, 2)), TIMES)} for r in runs} for p in ("a", "b")}
    return msrm.Recording.from_dict(data)


def gp(**settings) -> msrm.GPMSRM:
    return msrm.GPMSRM(1, {"x": msrm.Identity()}, **{"n_starts": 1, "tol": 1e-2, "progress": False} | settings)


def rmsrm(**settings) -> msrm.RMSRM:
    return msrm.RMSRM(**{"n_factors": 1, "latent_step": 1.5, "responses": {"x": msrm.Identity()}} | settings)


def test_a_frame_indexed_by_row_numbers_is_refused_and_the_clock_column_named():
    frame = pd.DataFrame({"left": np.sin(TIMES), "sec": TIMES})
    with pytest.raises(ValueError, match=r"counts rows 0, 1, 2, .*frame\.set_index\('sec'\)"):
        msrm.Recording.from_dict({"a": {"run-1": {"x": frame}}})
    kept = msrm.Recording.from_dict({"a": {"run-1": {"x": frame.set_index("sec")}}})
    np.testing.assert_array_equal(kept.stream("a", "run-1", "x").times, TIMES)
    each_second = frame.set_index(frame.index.astype(float))
    assert msrm.Recording.from_dict({"a": {"run-1": {"x": each_second}}}).stream("a", "run-1", "x").times[-1] == 11.0


def test_scores_of_what_was_fitted_and_swapped_arguments_are_refused():
    recording = recording_of()
    training, held_out = recording.select(runs=["run-1"]), recording.select(runs=["run-2"])
    fit = rmsrm().fit(training)
    with pytest.raises(ValueError, match="'x' of a in run-1 is in the training recording: it is not held out"):
        msrm.score(fit, training)
    with pytest.raises(ValueError, match="'x' of b in run-1 is in the training recording"):
        msrm.score(fit, recording, training=training, targets={"b": ["x"]})
    with pytest.raises(TypeError, match=r"score\(fitted, recording\); got Recording, RMSRM"):
        msrm.score(held_out, fit)
    assert msrm.score(fit, held_out, training=training, n_shifts=0)["r2"].notnull().all()


@pytest.mark.parametrize("make", [gp, rmsrm])
def test_fitted_attributes_before_fit_say_so(make):
    model = make()
    with pytest.raises(NotFittedError, match=f"{type(model).__name__} is not fitted yet; .* which sets parameters_"):
        model.parameters_  # noqa: B018
    assert not hasattr(model, "parameters_")
    with pytest.raises(AttributeError, match="has no attribute 'parameter'"):
        model.parameter  # noqa: B018
    fitted = make().fit(recording_of())
    with pytest.raises(AttributeError, match="has no attribute 'parameter_'"):
        fitted.parameter_  # noqa: B018


@pytest.mark.parametrize("make", [gp, rmsrm])
def test_more_factors_than_features_are_told(make):
    with pytest.warns(UserWarning, match="n_factors=5 exceeds the 4 features of all participants"):
        make().set_params(n_factors=5).fit(recording_of())


def test_priors_as_a_dict_are_told_how_to_be_written():
    with pytest.raises(TypeError, match=r"priors must be msrm\.Priors\(noise.*such as priors=msrm\.Priors\(loading_sd"):
        gp(priors={"loading_sd": 0.5}).fit(recording_of())


@pytest.mark.parametrize("make", [gp, rmsrm])
def test_times_of_an_unknown_run_are_refused(make):
    fit = make().fit(recording_of())
    with pytest.raises(ValueError, match="times names 'run-7'; there are run-1, run-2"):
        fit.predict(recording_of(), times={"run-7": [1.0]})


def test_a_dict_in_place_of_a_recording_is_refused_everywhere():
    recording = recording_of()
    fits = {"r": rmsrm().fit(recording), "gp": gp().fit(recording)}
    fits["draws"] = fits["gp"].sample(recording, warmup=2, draws=4, chains=1, progress=False)
    given = {"a": {"run-1": {"x": (np.zeros((12, 2)), TIMES)}}}
    asked = 0
    for fit in fits.values():
        for name in dir(fit):
            method = getattr(fit, name)
            if name.startswith("_") or not callable(method) or "recording" not in inspect.signature(method).parameters:
                continue
            if name in ("prepared", "standardization", "likelihood_error"):  # what samplers and benchmarks share
                continue
            rest = {"log_likelihood": ({},), "log_likelihood_and_gradient": ({},)}.get(name, ())
            with pytest.raises(TypeError, match=f"{name} takes a Recording, got dict. See msrm.Recording.from_dict"):
                method(given, *rest)
            asked += 1
    assert asked > 20
    with pytest.raises(TypeError, match="evaluate takes a Recording, got dict"):
        msrm.evaluate(gp(), recording=given)
    # What may be left out may be None; a path is no recording either.
    assert "run-1" in fits["gp"].infer_latent(None).children
    with pytest.raises(TypeError, match="predict takes a Recording, got str"):
        fits["gp"].predict("recording.nc")
