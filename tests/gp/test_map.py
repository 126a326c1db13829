"""The MAP: a stationary point of an objective written elsewhere, the same from every start, bounds and interrupts."""

import warnings
from functools import lru_cache

import numpy as np
import pytest
from gp_oracles import IMPULSE, finite_difference, functional_covariance, gaussian_functional, normal_log_density
from scipy.stats import lognorm, norm

import msrm
from msrm.gp import GPMSRM
from msrm.gp.map import maximize
from msrm.gp.starts import Start, component_starts
from msrm.regularized import ConvergenceWarning

LENGTH_SCALE = 3.0
TIMES = {"brain": np.arange(0.0, 24.0, 1.8), "rating": np.arange(0.3, 24.0, 1.2)}
RATING = msrm.Gaussian(
    width=msrm.Free(0.7, bounds=(0.3, 1.5), prior=msrm.LogNormal(-0.4, 0.5)),
    lag=msrm.Free(0.0, bounds=(-1.5, 1.5), prior=msrm.Normal(0.4, 0.8)),
)
RESPONSES = {"brain": msrm.Identity(), "rating": RATING}


def made(
    seed: int = 0, *, runs: int = 1, features: int = 4, factors: int = 2, missing: float = 0.0, lag: float = 0.5
) -> msrm.Recording:
    """Two participants, brain and rating on two clocks, from smooth sums of sines."""
    rng = np.random.default_rng(seed)
    data: dict = {}
    loading = {
        p: {"brain": rng.normal(size=(features, factors)), "rating": rng.normal(size=(2, factors))} for p in "ab"
    }
    for run in range(runs):
        waves = rng.uniform(0.25, 0.9, factors), rng.uniform(0.0, 6.0, factors)
        for p in "ab":
            for modality, times in TIMES.items():
                at = times[:, None] - (lag if modality == "rating" else 0.0)
                values = 1.3 * np.sin(waves[0] * at + waves[1]) @ loading[p][modality].T + 0.3
                values += 0.4 * rng.standard_normal(values.shape)
                values[rng.uniform(size=values.shape) < missing] = np.nan
                data.setdefault(p, {}).setdefault(f"run-{run + 1}", {})[modality] = values, times
    return msrm.Recording.from_dict(data)


def objective(recording: msrm.Recording, parameters, priors=None, *, length_scale=LENGTH_SCALE, scale=None, **terms):
    """-(log likelihood + log prior) in raw features by brute force; `scale` maps (p, m) to (mean, sd)."""
    plain = {name: np.asarray(value) for name, value in parameters.items()}
    width = float(plain.get("response/rating/width", 0.6))
    functionals = {"brain": IMPULSE, "rating": gaussian_functional(width, float(plain["response/rating/lag"]))}
    total = 0.0
    for run in recording.runs:
        streams = recording.streams(run=run)
        total += run_log_likelihood(streams, functionals, plain, length_scale, scale, **terms)
    for name, value in plain.items():
        kind = name.split("/")[0]
        if kind in ("loading", "offset"):
            total += norm.logpdf(value).sum()
        elif kind == "run_offset":
            total += norm.logpdf(value, scale=0.7).sum()
        elif kind == "noise":
            total += lognorm.logpdf(value, 1.0, scale=np.exp(-0.5))
    log_width = norm.logpdf(np.log(width), -0.4, 0.5) - np.log(width)
    mass = np.diff(norm.cdf(np.log([0.3, 1.5]), -0.4, 0.5))[0]
    lag, reach = float(plain["response/rating/lag"]), np.diff(norm.cdf([-1.5, 1.5], 0.4, 0.8))[0]
    return -(total + log_width - np.log(mass) + norm.logpdf(lag, 0.4, 0.8) - np.log(reach))


@lru_cache(maxsize=4)
def covariance_of(nodes, length_scale, smoothness):
    """Most differences leave the latent's covariance as it is."""
    return functional_covariance(nodes, length_scale, smoothness)


def run_log_likelihood(
    streams, functionals, plain, length_scale, scale, *, smoothness=1.5, timescale=None, power=1.0
) -> float:
    """log N of all finite scalars of one run; `timescale` is the rating's, `power` the brain's."""
    values, kinds, times, loadings, variances, labels = [], [], [], [], [], []
    for number, s in enumerate(streams):
        name = f"{s.participant}/{s.modality}"
        centre, sd = (0.0, 1.0) if scale is None else scale[s.participant, s.modality]
        level = plain[f"offset/{name}"] + plain.get(f"run_offset/{s.participant}/{s.run}/{s.modality}", 0.0)
        row, feature = np.nonzero(np.isfinite(s.values))
        values.append(((s.values - centre) / sd - level)[row, feature])
        times.append(s.times[row])
        kinds += [s.modality] * len(row)
        loadings.append(plain[f"loading/{name}"][feature])
        variances.append(np.full(len(row), plain[f"noise/{name}"]))
        labels.append(100 * number + feature)
    y, t, w = np.concatenate(values), np.concatenate(times), np.concatenate(loadings)
    v, label, brain = np.concatenate(variances), np.concatenate(labels), np.array(kinds) == "brain"
    nodes = sorted(set(zip(kinds, t, strict=True)))
    place = {node: number for number, node in enumerate(nodes)}
    index = np.array([place[node] for node in zip(kinds, t, strict=True)])
    covariance = covariance_of(
        tuple((functionals[kind], float(time)) for kind, time in nodes), length_scale, smoothness
    )
    noise = np.diag(np.where(brain, v / power, v))
    if timescale is not None:
        same = (label[:, None] == label) & ~brain[:, None]
        noise = np.where(same, v * np.exp(-np.abs(t[:, None] - t) / timescale), noise)
    out = normal_log_density(y, (w @ w.T) * covariance[np.ix_(index, index)] + noise)
    # A density to the power a is that of variance v/a times (2 pi v)^(-a/2) (2 pi v/a)^(1/2).
    return out + 0.5 * np.sum(np.log(2 * np.pi * v[brain] / power) - power * np.log(2 * np.pi * v[brain]))


def gradient_at(recording: msrm.Recording, parameters, **terms) -> dict[str, float]:
    """Central differences of the brute-force objective, in log noise and every other scalar, a few loadings."""
    plain = {name: np.asarray(value, float) for name, value in parameters.items()}
    out = {}
    for name, value in plain.items():
        for index in [()] if value.ndim == 0 else [(1,) * value.ndim]:

            def at(x, name=name):
                return objective(recording, plain | {name: x}, **terms)

            step = 1e-3 * (float(value) if value.ndim == 0 and value > 0 else 1.0)
            slope = finite_difference(at, value, index, step)
            out[f"{name}{list(index)}"] = slope * (float(value) if name.startswith("noise/") else 1.0)
    return out


@pytest.fixture(scope="module")
def recording():
    return made()


@pytest.fixture(scope="module")
def fit(recording):
    return GPMSRM(2, RESPONSES, likelihood="dense", tol=1e-8, progress=False).fit(recording)


def test_the_optimum_is_stationary_for_an_objective_written_elsewhere(recording, fit):
    assert fit.converged_
    # The oracle's responses are not cut at six widths: 1e-6 of a nat.
    assert objective(recording, fit.parameters_) == pytest.approx(fit.objective_, abs=1e-4)
    for name, slope in gradient_at(recording, fit.parameters_).items():
        # A decrement of 1e-8 nats leaves slopes of sqrt(2e-8 x curvature); curvatures here are up to a few thousand.
        assert abs(slope) < 2e-2, name


def test_reported_parts_add_up_and_can_be_evaluated_at_the_reported_parameters(recording, fit):
    assert fit.log_prior(fit.parameters_) == pytest.approx(fit.log_prior_, abs=1e-9)
    assert fit.log_likelihood(recording, fit.parameters_) == pytest.approx(fit.log_likelihood_, abs=1e-8)
    assert fit.objective_ == -(fit.log_likelihood_ + fit.log_prior_)
    assert fit.likelihood_error_ == 0.0


def test_no_accepted_step_raises_the_objective(fit):
    assert len(fit.history_) > 5
    assert np.all(np.diff(fit.history_) <= 0.0)


def test_every_start_and_seed_ends_at_the_same_optimum(recording, fit):
    assert len(fit.starts_) >= 3
    other = GPMSRM(2, RESPONSES, likelihood="dense", n_starts=4, seed=1, tol=1e-8, progress=False).fit(recording)
    assert other.objective_ == pytest.approx(fit.objective_, abs=1e-5)
    for name, value in fit.parameters_.items():
        # sqrt(1e-8 nats / curvature), with the convention for factors fixing directions and signs.
        np.testing.assert_allclose(other.parameters_[name], value, atol=5e-3, err_msg=name)


@pytest.mark.parametrize("seed", range(3))
def test_a_single_random_start_reaches_it_too(recording, fit, seed):
    model = GPMSRM(2, RESPONSES, likelihood="dense", progress=False)
    likelihood, _ = model.prepared(recording, reduce=True)
    rng = np.random.default_rng(seed)
    first = next(component_starts(likelihood)).parameters
    start = {name: value + 0.5 * rng.standard_normal(np.shape(value)) for name, value in first.items()}
    start |= {name: np.asarray(np.exp(rng.normal())) for name in start if name.startswith("noise/")}
    result = maximize(
        likelihood, [lambda: [Start("random", start)]], tolerance=1e-6, likelihood_tolerance=0.05, max_iter=500
    )
    assert result.converged
    assert result.point.value == pytest.approx(fit.objective_, abs=1e-3)


def test_the_state_space_optimum_is_the_dense_one_within_its_reported_error(recording, fit):
    other = GPMSRM(2, RESPONSES, likelihood="statespace", progress=False).fit(recording)
    assert other.backend_["name"] == "statespace"
    assert 0.0 < other.likelihood_error_ <= 0.05
    # Twice the reported error, and what the search's tolerance leaves.
    assert abs(other.objective_ - fit.objective_) < 2.0 * other.likelihood_error_ + 1e-3


def test_features_that_carry_no_data_count_in_the_objective():
    wide = made(features=31)
    fit = GPMSRM(2, RESPONSES, likelihood="dense", progress=False).fit(wide)
    assert fit.model_.parameters["loading/a/brain"].shape == (31, 2)
    assert objective(wide, fit.parameters_) == pytest.approx(fit.objective_, abs=1e-4)


CASES = {
    "masked": ({"missing": 0.15}, {}, {}),
    "two runs with offsets": (
        {"runs": 2},
        {"run_offsets": ("brain", "rating"), "priors": msrm.Priors(run_offset_sd=0.7)},
        {},
    ),
    "powers": ({}, {"powers": {"brain": 0.4}}, {"power": 0.4}),
    "coloured residuals": (
        {"missing": 0.1},
        {"residual_timescales": {"rating": 0.8}},
        {"timescale": 0.8},
    ),
    "matern": ({}, {"smoothness": 2.5}, {"smoothness": 2.5}),
}


@pytest.mark.parametrize("case", CASES)
def test_options_reach_stationary_points_of_their_own_objective(case):
    shape, arguments, terms = CASES[case]
    data = made(3, **shape)
    fit = GPMSRM(2, RESPONSES, likelihood="dense", tol=1e-8, n_starts=1, progress=False, **arguments).fit(data)
    assert fit.converged_
    # Powers and residual timescales have closed normalizers; 1e-4 is the oracle's uncut tails.
    assert objective(data, fit.parameters_, **terms) == pytest.approx(fit.objective_, abs=2e-4)
    for name, slope in gradient_at(data, fit.parameters_, **terms).items():
        assert abs(slope) < 3e-2, name


def test_standardizing_is_fitting_standardized_data():
    data = made(1)
    scale, streams = {}, {}
    for s in data.streams():
        scale[s.participant, s.modality] = s.values.mean(0), s.values.std(0)
        values = (s.values - s.values.mean(0)) / s.values.std(0)
        streams.setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = values, s.times
    settings = {"likelihood": "dense", "tol": 1e-8, "n_starts": 1, "progress": False}
    inside = GPMSRM(2, RESPONSES, standardize=True, **settings).fit(data)
    outside = GPMSRM(2, RESPONSES, **settings).fit(msrm.Recording.from_dict(streams))
    assert inside.objective_ == pytest.approx(outside.objective_, abs=1e-6)
    assert objective(data, inside.parameters_, scale=scale) == pytest.approx(inside.objective_, abs=1e-4)
    first = inside.predict(data)["a/run-1/brain"]
    second = outside.predict(msrm.Recording.from_dict(streams))["a/run-1/brain"]
    mean, sd = scale["a", "brain"]
    np.testing.assert_allclose(first["mean"], second["mean"] * sd + mean, atol=1e-4)
    np.testing.assert_allclose(first["variance"], second["variance"] * sd**2, atol=1e-4)


def test_a_free_length_scale_and_a_free_timescale_are_stationary():
    data = made(4)
    fit = GPMSRM(
        2,
        RESPONSES,
        length_scale=msrm.LogNormal(1.0, 0.4),
        residual_timescales={"rating": msrm.Free(0.8, bounds=(0.1, 6.0), prior=msrm.LogNormal(0.0, 0.3))},
        likelihood="dense",
        tol=1e-8,
        n_starts=1,
        progress=False,
    ).fit(data)
    assert fit.length_scale_ == fit.parameters_["length_scale"] != 3.0
    plain = dict(fit.parameters_)
    scalars = {name: plain.pop(name) for name in ("length_scale", "residual_timescale/rating")}
    assert not fit.at_bounds_

    def at(x):
        value = objective(data, plain, length_scale=x[0], timescale=x[1])
        mass = np.diff(lognorm.cdf([0.1, 6.0], 0.3))[0]
        return value - lognorm.logpdf(x[0], 0.4, scale=np.e) - lognorm.logpdf(x[1], 0.3) + np.log(mass)

    x = np.array(list(scalars.values()))
    assert at(x) == pytest.approx(fit.objective_, abs=1e-4)
    for index in range(2):
        assert abs(finite_difference(at, x, (index,), 1e-3)) < 2e-2


def test_bounds_are_kept_and_named():
    data = made(2, lag=1.2)
    responses = RESPONSES | {"rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-0.4, 0.4)))}
    priors = msrm.Priors(noise=msrm.LogNormal(-0.5, 1.0).bounded(0.3, 9.0))
    fit = GPMSRM(2, responses, likelihood="dense", priors=priors, n_starts=1, progress=False).fit(data)
    assert fit.converged_
    assert fit.parameters_["response/rating/lag"] == 0.4
    assert "response/rating/lag at its upper bound 0.4" in fit.at_bounds_
    low = [name for name in fit.parameters_ if name.startswith("noise/") and fit.parameters_[name] == 0.3]
    assert low
    assert {f"{name} at its lower bound 0.3" for name in low} < set(fit.at_bounds_)


def test_an_interrupt_keeps_the_best_point_so_far(recording, monkeypatch):
    from msrm.gp.map import _Search

    seen = []

    def interrupting(self, name, point):
        seen.append(point.value)
        if len(seen) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Search, "show", interrupting)
    model = GPMSRM(2, RESPONSES, progress=False)
    with pytest.warns(ConvergenceWarning, match="it was interrupted"):
        model.fit(recording)
    assert not model.converged_
    assert model.objective_ == min(seen)
    assert np.isnan(model.likelihood_error_)
    assert np.isfinite(model.predict(recording)["a/run-1/rating"]["mean"]).all()


def test_an_interrupt_of_the_r_msrm_start_ends_the_search(recording, monkeypatch):
    from msrm.quasi_newton import INTERRUPTED
    from msrm.regularized import RMSRM

    whole = RMSRM.fit

    def interrupted(self, data):
        whole(self, data)
        self.stop_reason_ = INTERRUPTED
        return self

    monkeypatch.setattr(RMSRM, "fit", interrupted)
    model = GPMSRM(2, RESPONSES, likelihood="dense", progress=False)
    with pytest.warns(ConvergenceWarning, match="it was interrupted"):
        model.fit(recording)
    assert {start.name.split(",")[0] for start in model.starts_} == {"components"}


def test_running_out_of_iterations_is_told(recording):
    model = GPMSRM(2, RESPONSES, likelihood="dense", n_starts=1, max_iter=2, progress=False)
    with pytest.warns(ConvergenceWarning, match="the iteration limit was reached"):
        model.fit(recording)
    assert not model.converged_
    assert all(start.n_iter <= 2 for start in model.starts_)


def test_a_start_that_is_not_finite_names_the_term():
    data = {"a": {"run-1": {"brain": (1e153 * np.random.default_rng(0).standard_normal((9, 2)), np.arange(9.0))}}}
    with (
        np.errstate(over="ignore", invalid="ignore"),
        pytest.warns(msrm.gp.UnitsWarning, match="prior sds"),
        pytest.raises(ValueError, match=r"not finite at any of \d+ starts. At 'components': .*not finite"),
    ):
        GPMSRM(1, {"brain": msrm.Identity()}, likelihood="dense", progress=False).fit(msrm.Recording.from_dict(data))


def test_another_basin_within_ten_nats_draws_a_warning():
    # A periodic latent seen at two lags half a period apart, with a loading of either sign.
    rng, times = np.random.default_rng(5), np.arange(0.0, 40.0, 1.0)
    wave = np.sin(2 * np.pi * times / 4.0)[:, None]
    data = {
        "a": {
            "run-1": {
                "brain": (wave * [1.0, -0.7, 0.5] + 0.3 * rng.standard_normal((40, 3)), times),
                "rating": (wave + 0.5 * rng.standard_normal((40, 1)), times),
            }
        }
    }
    responses = {"brain": msrm.Identity(), "rating": msrm.Gaussian(width=0.4, lag=msrm.Free(0.0, bounds=(-4.5, 4.5)))}
    model = GPMSRM(1, responses, length_scale=1.5, likelihood="dense", progress=False)
    with pytest.warns(UserWarning, match=r"ends in another basin, within 10 nats of the best \(response/rating/lag"):
        model.fit(msrm.Recording.from_dict(data))
    lags = [
        start.scalars["response/rating/lag"] for start in model.starts_ if start.status in ("best", "another basin")
    ]
    assert max(lags) - min(lags) > 1.5
    assert model.converged_


@pytest.mark.filterwarnings("ignore:n_factors=3 exceeds:UserWarning")
def test_one_factor_and_tiny_recordings():
    times = np.arange(20.0)
    values = np.sin(times / 3.0)[:, None] * [1.0, 0.5] + 0.2 * np.random.default_rng(1).standard_normal((20, 2))
    for rows in (20, 3):
        data = msrm.Recording.from_dict({"a": {"r": {"rating": (values[:rows], times[:rows])}}})
        for factors in (1, 3):
            fit = GPMSRM(factors, {"rating": msrm.Identity()}, progress=False).fit(data)
            assert fit.converged_
            value = fit.log_likelihood(data, fit.parameters_) + fit.log_prior(fit.parameters_)
            assert -value == pytest.approx(fit.objective_, abs=1e-8)


def test_no_identity_and_every_response_free():
    data = made(6).select(modalities=["rating"])
    fit = GPMSRM(1, {"rating": RATING}, likelihood="dense", tol=1e-8, progress=False).fit(data)
    assert fit.converged_
    assert objective(data, fit.parameters_) == pytest.approx(fit.objective_, abs=1e-4)


def test_missing_runs_and_modalities():
    whole, data = made(7, runs=3), {}
    for s in whole.streams():
        if (s.participant, s.run) != ("b", "run-2") and (s.run, s.modality) != ("run-3", "rating"):
            data.setdefault(s.participant, {}).setdefault(s.run, {})[s.modality] = s.values, s.times
    with pytest.warns(msrm.RecordingWarning, match="without some"):
        ragged = msrm.Recording.from_dict(data)
    fit = GPMSRM(2, RESPONSES, likelihood="dense", n_starts=1, progress=False).fit(ragged)
    assert fit.converged_
    assert objective(ragged, fit.parameters_) == pytest.approx(fit.objective_, abs=1e-4)


@pytest.mark.parametrize("standardize", [False, True])
def test_constant_and_absent_features(standardize):
    rng, times = np.random.default_rng(2), np.arange(30.0)
    values = np.sin(times / 3.0)[:, None] * [1.0, 0.5, 0.0, 1.0] + 0.2 * rng.standard_normal((30, 4))
    values[:, 2], values[:, 3] = 1.5, np.nan
    with pytest.warns(msrm.RecordingWarning, match="constant|missing in all runs"):
        data = msrm.Recording.from_dict({"a": {"r": {"rating": (values, times)}}})
    fit = GPMSRM(1, {"rating": msrm.Identity()}, standardize=standardize, progress=False).fit(data)
    assert fit.converged_
    value = fit.log_likelihood(data, fit.parameters_) + fit.log_prior(fit.parameters_)
    assert -value == pytest.approx(fit.objective_, abs=1e-8)
    predicted = fit.predict(data)["a/r/rating"]["mean"].values
    assert np.isnan(predicted[:, 3]).all()
    assert np.isfinite(predicted[:, :3]).all()
    np.testing.assert_allclose(predicted[:, 2], 1.5, atol=0.3)


def test_a_stream_without_variation_is_refused():
    data = {"a": {"r": {"rating": (np.random.default_rng(0).normal(size=(9, 1)), np.arange(9.0))}}}
    data["a"]["r"]["brain"] = np.full((9, 2), 3.0), np.arange(9.0)
    with pytest.warns(msrm.RecordingWarning, match="constant over all runs"):
        recording = msrm.Recording.from_dict(data)
    with pytest.raises(ValueError, match="'brain' of a: none of its 2 features varies"):
        GPMSRM(1, {"rating": msrm.Identity(), "brain": msrm.Identity()}, progress=False).fit(recording)


def test_factors_follow_the_convention(fit):
    total, sums = np.zeros((2, 2)), np.zeros(2)
    for name, value in fit.parameters_.items():
        if name.startswith("loading/"):
            rows = len(TIMES[name.split("/")[2]])
            total += rows * value.values.T @ value.values / fit.parameters_[name.replace("loading", "noise")]
            sums += value.values.sum(axis=0)
    np.testing.assert_allclose(total[0, 1], 0.0, atol=1e-8 * total[0, 0])
    assert total[0, 0] > total[1, 1]
    assert (sums > 0).all()
    assert fit.explained_variance_.sum() < 1.0
    assert (fit.latent_power_ > 0.0).all()


def test_the_estimator_keeps_scikit_learns_contract(recording):
    params = {"n_factors": 1, "responses": RESPONSES, "likelihood": "dense", "n_starts": 1, "progress": False}
    model = GPMSRM(**params)
    before = model.get_params()
    assert {name: before[name] for name in params} == params
    assert all(before[name] is value for name, value in params.items())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.fit(recording) is model
    assert all(model.get_params()[name] is value for name, value in before.items())
    assert {name for name in vars(model) if name not in before} == {n for n in vars(model) if n.endswith("_")}
    clone = type(model)(**model.get_params())
    assert not [name for name in vars(clone) if name.endswith("_")]
    assert clone.set_params(n_factors=2) is clone
    assert clone.n_factors == 2
    with pytest.raises(ValueError, match="has no argument 'factors'"):
        clone.set_params(factors=2)
    with pytest.raises(ValueError, match="not fitted yet"):
        clone.predict(recording)


def test_fit_refuses_what_it_cannot_use(recording):
    with pytest.raises(TypeError, match="fit takes a Recording"):
        GPMSRM(1, RESPONSES).fit({})
    with pytest.raises(ValueError, match="n_starts must be a positive integer"):
        GPMSRM(1, RESPONSES, n_starts=0).fit(recording)
    with pytest.raises(ValueError, match="'rating' has no response"):
        GPMSRM(1, {"brain": msrm.Identity()}).fit(recording)
