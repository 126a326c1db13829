"""Posterior predictive checks: what is counted, where replicates come from, and a model that is wrong is found out."""

import numpy as np
import pytest

import msrm
from msrm.gp.checks import STATISTICS
from msrm.gp.sampling import sample

SAMPLING = {"chains": 2, "warmup": 60, "draws": 60, "seed": 1, "n_jobs": 1, "progress": False}


def recording_of(shock: float = 0.0) -> msrm.Recording:
    rng = np.random.default_rng(0)
    times = 1.5 * np.arange(30)
    data: dict = {}
    for p in ("a", "b", "c"):
        values = np.sin(times / 2.0)[:, None] * rng.normal(1.0, 0.3, size=(1, 3)) + 0.6 * rng.standard_normal((30, 3))
        if p == "b":
            values[3, 1] = np.nan
        if p == "a":
            values[10] += shock
        data[p] = {"r": {"x": (values, times)}}
    return msrm.Recording.from_dict(data)


def draws_of(recording: msrm.Recording, **settings) -> msrm.Draws:
    model = msrm.GPMSRM(1, {"x": msrm.Identity()}, n_starts=1, tol=1e-2, progress=False, **settings)
    return sample(model.fit(recording), recording, **SAMPLING)


@pytest.fixture(scope="module")
def draws():
    return draws_of(recording_of())


def test_observed_statistics_are_those_of_the_data(draws):
    recording = recording_of()
    check = draws.predictive_check(recording)
    assert check["replicated"].dims == ("replicate", "stream_run", "statistic")
    values = recording.stream("b", "r", "x").data.values
    own = check["observed"].sel(stream_run="b/r/x")
    assert float(own.sel(statistic="mean")) == pytest.approx(np.nanmean(values))
    assert float(own.sel(statistic="max")) == np.nanmax(values)
    assert float(own.sel(statistic="sd")) == pytest.approx(np.sqrt(np.mean(np.nanvar(values, axis=0))))
    others = np.nanmean([recording.stream(p, "r", "x").data.values for p in "ac"], axis=0)
    expected = []
    for k in range(3):
        kept = np.isfinite(values[:, k]) & np.isfinite(others[:, k])
        expected.append(np.corrcoef(values[kept, k], others[kept, k])[0, 1])
    assert float(own.sel(statistic="intersubject")) == pytest.approx(np.mean(expected))
    full = values[:, 0] - values[:, 0].mean()
    lag = np.mean(full[1:] * full[:-1]) / np.mean(full**2)
    assert STATISTICS["autocorrelation"](values[:, :1]) == pytest.approx(lag)


def test_p_values_are_shares_of_replicates_and_a_right_model_passes(draws):
    check = draws.predictive_check(recording_of())
    above = (check["replicated"] > check["observed"]).mean("replicate")
    np.testing.assert_allclose(check["p_value"], above)
    assert check.sizes["replicate"] == len(draws.ensemble)
    # 18 p-values; the path was drawn as the model says but for its shape.
    assert float(((check["p_value"] > 0.01) & (check["p_value"] < 0.99)).mean()) > 0.85
    # Given the data, replicates keep the shape that all participants share.
    prior = draws.predictive_check(recording_of(), latent="prior")
    spread = [float(c["replicated"].sel(statistic="mean").std("replicate").mean()) for c in (check, prior)]
    assert spread[1] > 1.5 * spread[0]
    with pytest.raises(ValueError, match="latent must be 'posterior' or 'prior', found 'none'"):
        draws.predictive_check(recording_of(), latent="none")


def test_a_shock_that_the_model_does_not_make_is_found():
    recording = recording_of(shock=9.0)
    check = draws_of(recording).predictive_check(recording, per_member=2)
    assert float(check["p_value"].sel(stream_run="a/r/x", statistic="max")) < 0.02
    assert 0.02 < float(check["p_value"].sel(stream_run="b/r/x", statistic="max")) < 0.98


def test_coloured_residuals_and_units_are_replicated():
    recording = recording_of()
    draws = draws_of(recording, residual_timescales={"x": 4.0}, standardize=True, run_offsets=("x",))
    check = draws.predictive_check(recording)
    # Fixed, slow residuals that the data do not have show in replicates as autocorrelation.
    assert float(check["replicated"].sel(statistic="autocorrelation").mean()) > float(
        check["observed"].sel(statistic="autocorrelation").mean()
    )
    ratio = check["replicated"].sel(statistic="sd").mean("replicate") / check["observed"].sel(statistic="sd")
    np.testing.assert_allclose(ratio, 1.0, atol=0.35)
