"""Two grids combined against the dense likelihood of the same recording, and how they are chosen."""

from dataclasses import fields

import numpy as np
import pytest

import msrm
from msrm.gp.extrapolation import Extrapolated, extrapolation_weight
from msrm.gp.refinement import coarse_backend, measured_error, resolved
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Matern12, Matern32, Matern52

RESPONSES = {
    "brain": msrm.Identity(),
    "rating": msrm.Gaussian(width=0.9, lag=msrm.Free(0.4, bounds=(-1.0, 1.0))),
    "skin": msrm.Gamma(shape=3.0, scale=msrm.Free(0.5, bounds=(0.3, 1.0)), lag=0.2),
}


@pytest.fixture(scope="module")
def recording():
    rng = np.random.default_rng(3)
    clocks = {"brain": 1.8 * np.arange(15), "rating": 1.2 * np.arange(22) + 0.3, "skin": 1.5 * np.arange(18)}
    path = {name: np.cumsum(rng.standard_normal((len(times), 2)), 0) / 3 for name, times in clocks.items()}
    streams = {
        name: (path[name] @ rng.standard_normal((2, 4)) + 0.2 * rng.standard_normal((len(times), 4)), times)
        for name, times in clocks.items()
    }
    return msrm.Recording.from_dict({p: {"run-1": streams, "run-2": streams} for p in ("p1", "p2")})


def _model(likelihood, **options):
    return msrm.GPMSRM(2, RESPONSES, length_scale=3.0, likelihood=likelihood, **options)


@pytest.fixture(scope="module")
def sharp(recording):
    """A likelihood, parameters that make it sharp, and its exact value and gradient."""
    likelihood, _ = _model("statespace").prepared(recording, reduce=False)
    rng = np.random.default_rng(4)
    parameters = {name: rng.standard_normal(shape) for name, shape in likelihood.layout.shapes.items()}
    for name in parameters:
        if name.startswith("noise/"):
            parameters[name] = np.asarray(0.02)
    parameters |= {"response/rating/lag": np.asarray(0.33), "response/skin/scale": np.asarray(0.55)}
    exact = _model("dense").log_likelihood_and_gradient(recording, parameters)
    return likelihood, parameters, exact


def test_value_and_gradient_are_closer_to_dense_than_those_of_the_finer_grid(sharp):
    likelihood, parameters, (value, gradient) = sharp
    grid = likelihood.backend
    coarse, fine = grid.at_step(0.6), grid.at_step(0.3)
    both = likelihood.with_backend(Extrapolated(coarse, fine)).value_and_gradient(parameters)
    finer = likelihood.with_backend(fine).value_and_gradient(parameters)
    assert abs(finer[0] - value) > 1e-3  # otherwise nothing is shown
    assert abs(both[0] - value) < 0.1 * abs(finer[0] - value)
    off = {name: np.abs(both[1][name] - gradient[name]).max() for name in gradient}
    assert max(off.values()) < 0.2 * max(np.abs(finer[1][name] - gradient[name]).max() for name in gradient)


def test_the_gradient_is_that_of_the_value(sharp):
    likelihood, parameters, _ = sharp
    combined = likelihood.with_backend(Extrapolated(likelihood.backend.at_step(0.9), likelihood.backend.at_step(0.6)))
    gradient = combined.value_and_gradient(parameters)[1]
    for name in ("response/skin/scale", "noise/p1/brain", "loading/p2/rating"):
        place = np.unravel_index(0, np.shape(parameters[name]) or (1,))
        step = 1e-5 * max(1.0, float(np.ravel(parameters[name])[0]))
        ends = []
        for sign in (1.0, -1.0):
            moved = {key: np.array(value) for key, value in parameters.items()}
            moved[name].reshape(-1)[0] += sign * step
            ends.append(combined.value(moved))
        slope = np.reshape(gradient[name], -1)[0] if np.ndim(gradient[name]) else gradient[name]
        # Central differences of a value near 1e4 with rounding 1e-11 relative.
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float(slope), rel=1e-4, abs=0.05), (name, place)


def test_the_reported_error_bounds_the_distance_to_dense(sharp):
    likelihood, parameters, (value, _) = sharp

    def at(backend):
        return likelihood.with_backend(backend).value(parameters)

    for tolerance in (1.0, 0.02):
        backend, error = resolved(likelihood.backend, at, tolerance, extrapolate=True)
        assert error.error <= tolerance
        assert abs(at(backend) - value) <= 2.0 * tolerance
        assert error.log_likelihood == pytest.approx(at(backend), abs=1e-9)
        assert measured_error(backend, at).error <= tolerance
    assert backend.moments > 0
    single, _ = resolved(backend, at, 0.02, extrapolate=False)
    assert single.moments == 0
    assert single.step < backend.step
    pair = Extrapolated(*(likelihood.backend.at_step(step) for step in (0.45, 0.3)))
    assert abs(at(pair) - value) <= 2.0 * measured_error(pair, at).error


def test_spacings_of_states_that_agree_by_chance_are_not_believed(sharp):
    grid = sharp[0].backend

    def value(backend):
        order = 2 * (backend.matern.dimension + getattr(backend, "moments", 0))
        return 10.0 * backend.step**order if backend.moments else -1.0

    backend, error = resolved(grid, value, 0.05, extrapolate=True)
    assert backend.moments > 0
    assert 0.0 < error.log_likelihood <= 2.0 * error.error


def test_moments_of_sharp_matern_half_factors_are_precise():
    # Integrals across the kink of the bridge's covariance once left half a nat with any number of moments.
    rng = np.random.default_rng(4)
    clocks = {"brain": 2.0 * np.arange(7), "rating": 0.11 + 0.5 * np.arange(28)}
    recording = msrm.Recording.from_dict(
        {
            f"p{i}": {"run-1": {m: (rng.standard_normal((len(t), 2)), t + 0.37 * i) for m, t in clocks.items()}}
            for i in range(2)
        }
    )
    responses = {"brain": msrm.Identity(), "rating": msrm.Gaussian(width=0.6, lag=0.3)}
    options = {"smoothness": 0.5, "length_scale": 7.0}
    parameters = {
        f"{kind}/p{i}/{m}": values
        for i in range(2)
        for m in clocks
        for kind, values in {"loading": np.array([[0.5], [0.3]]), "offset": np.zeros(2), "noise": 0.004}.items()
    }
    exact = msrm.GPMSRM(1, responses, likelihood="dense", **options).log_likelihood(recording, parameters)
    likelihood, _ = msrm.GPMSRM(1, responses, likelihood="statespace", **options).prepared(recording, reduce=False)
    grid = likelihood.backend.with_moments(5).at_step(0.7)
    found = likelihood.with_backend(grid.with_residual(grid.off_grid[0])).value(parameters)
    assert found == pytest.approx(exact, abs=0.05)


@pytest.mark.parametrize("matern", [Matern12(), Matern32(), Matern52()])
def test_the_weights_cancel_the_leading_term(matern):
    power = 2 * matern.dimension
    weight = extrapolation_weight(0.9, 0.6, matern)
    assert weight * 0.6**power + (1.0 - weight) * 0.9**power == pytest.approx(0.0, abs=1e-12)


class StatesOnly(StateSpace):
    """A grid without moments, as compiled ones are."""

    def with_moments(self, moments: int) -> "StatesOnly":
        return self


def test_grids_without_moments_evaluate_each_spacing_once(sharp):
    # On a device every spacing has shapes of its own, compiled for ten seconds and more.
    likelihood, parameters, (value, _) = sharp
    grid = StatesOnly(**{one.name: getattr(likelihood.backend, one.name) for one in fields(StateSpace)})
    asked = []

    def evaluated(backend):
        asked.append((backend.step, backend.residual))
        return likelihood.with_backend(backend).value(parameters)

    assert coarse_backend(grid) is grid
    backend, error = resolved(grid, evaluated, 0.05, extrapolate=True)
    assert len(asked) == len(set(asked))
    assert max(step for step, _ in asked) == grid.step
    assert error.error <= 0.05
    assert abs(likelihood.with_backend(backend).value(parameters) - value) < 0.1


def test_equal_spacings_are_refused(sharp):
    grid = sharp[0].backend
    with pytest.raises(ValueError, match="spacings must differ"):
        Extrapolated(grid, grid)


def test_a_fit_records_both_spacings_and_reopens(recording, tmp_path):
    fit = _model("statespace", n_starts=1, tol=1e-2, progress=False).fit(recording)
    fit.save(tmp_path / "fit.nc")
    again = msrm.open_fit(tmp_path / "fit.nc")
    assert again.model_.coarse_step == fit.model_.coarse_step or np.isnan(fit.model_.coarse_step)
    assert fit.likelihood_error_ <= 0.05
    exact = _model("dense")
    objective = -(exact.log_likelihood(recording, fit.parameters_) + exact.log_prior(fit.parameters_))
    assert objective == pytest.approx(fit.objective_, abs=0.1)
