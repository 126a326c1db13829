"""The objective, its gradient and the eliminated latents against brute force over entries (tests/oracles.py)."""

import itertools

import numpy as np
import pytest
from oracles import RegularizedOracle, gaussian_curve

import msrm
from msrm.regularized.domain import cell_weights, latent_grid
from msrm.regularized.latents import LatentFailure
from msrm.regularized.objective import Objective
from msrm.regularized.problem import build_problem
from msrm.regularized.settings import checked_settings

WIDTH, LAG = 0.7, 0.4
RATING = msrm.Gaussian(width=msrm.Free(WIDTH, bounds=(0.5, 0.9)), lag=msrm.Free(LAG, bounds=(-0.5, 1.0)))
ENVELOPE = (-0.5 - 6 * 0.9, 1.0 + 6 * 0.9)
RESPONSES = {"brain": msrm.Identity(), "rating": RATING}


def make_data(*, missing=0.0, features=4, seed=0):
    """Three participants, two runs, two clocks; a gap, a missing run and a run without ratings."""
    rng = np.random.default_rng(seed)
    data = {}
    for participant, run in itertools.product(("p1", "p2", "p3"), ("run-1", "run-2")):
        if (participant, run) == ("p3", "run-2"):
            continue
        end = 24.0 if run == "run-1" else 21.5
        brain = np.arange(0.5, end, 1.6)
        rating = (
            np.delete(np.arange(0.0, end + 0.1, 0.9), [11, 12, 13]) if participant == "p1" else np.arange(0.0, end, 1.1)
        )
        data[participant, run, "brain"] = (rng.standard_normal((len(brain), features)) * 2 + 5, brain)
        if (participant, run) != ("p2", "run-2"):
            data[participant, run, "rating"] = (rng.standard_normal((len(rating), 3)), rating)
    for values, _ in data.values():
        values[rng.uniform(size=values.shape) < missing] = np.nan
    return data


def recording_of(data):
    nested = {}
    for (participant, run, modality), pair in data.items():
        nested.setdefault(participant, {}).setdefault(run, {})[modality] = pair
    with pytest.warns(msrm.recording.RecordingWarning):  # participants without runs, runs without modalities
        return msrm.Recording.from_dict(nested)


def both(data, *, values=(WIDTH, LAG), absent=(), **options):
    """The package's objective and the oracle's, for the same settings."""
    chosen = {"latent_step": 1.7, "loading_ridge": 0.3, "latent_ridge": 0.02, "roughness": 0.4} | options
    recording = recording_of(data)
    settings = checked_settings(msrm.RMSRM(2, responses=RESPONSES, **chosen).get_params())
    problem, training = build_problem(recording, settings)
    width, lag = values
    curve = (lambda u: gaussian_curve(u, width, lag), (lag - 6 * width, lag + 6 * width), ENVELOPE)
    oracle = RegularizedOracle(
        data,
        {pair: (None, (0.0, 0.0), (0.0, 0.0)) if pair[1] == "brain" else curve for pair in recording.pairs},
        chosen["latent_step"],
        chosen["loading_ridge"],
        chosen["latent_ridge"],
        chosen["roughness"],
        edges=chosen.get("edges", "trim"),
        scaling=chosen.get("loading_scaling", "pair"),
        weights=chosen.get("modality_weights") or {},
        pooling=chosen.get("latent_pooling", "shared"),
        population_strength=chosen.get("population_strength", 1.0),
        absent=set(absent),
    )
    vector = problem.filters.vector({("rating", None): {"width": width, "lag": lag}})
    return problem, training, Objective(problem), oracle, vector


def random_loadings(problem, training, rng):
    """Reduced loadings and the same on raw features."""
    loading = rng.standard_normal((problem.n_columns, 2)) * 0.5
    raw = {
        pair: np.nan_to_num(training.reduced[pair].to_features(loading[columns]))
        for pair, columns in zip(problem.pairs, problem.columns, strict=True)
    }
    return loading, raw


OPTIONS = {
    "plain": {},
    "extend": {"edges": "extend"},
    "feature scaling": {"loading_scaling": "feature"},
    "weights": {"modality_weights": {"brain": 2.0, "rating": 0.5}},
    "population": {"latent_pooling": "population", "population_strength": 0.3},
    "separate": {"latent_pooling": "separate"},
}
DATA = {
    "complete": {},
    "masked": {"missing": 0.1},
    "many features": {"features": 60},
    "many masked": {"features": 60, "missing": 0.03},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_objective_is_the_sum_over_entries(data, options):
    problem, training, objective, oracle, vector = both(make_data(**data), **options)
    rng = np.random.default_rng(1)
    loading, raw = random_loadings(problem, training, rng)
    latents = tuple(rng.standard_normal((s.grid.count, s.n_paths, 2)) for s in problem.systems)
    paths = {}
    for system, z in zip(problem.systems, latents, strict=True):
        for p in system.participants or oracle.people[system.run]:
            paths[p, system.run] = z[:, system.path_of(p)]
    parts = objective.parts(loading, vector, latents)
    # Sums of a few thousand terms of order 1e-3, in different orders; rotations of condition 10.
    assert sum(parts.values()) == pytest.approx(oracle.objective(raw, paths), rel=1e-12)
    held = objective.evaluate(loading, vector, latents)
    assert held.value == pytest.approx(sum(parts.values()), rel=1e-12)


@pytest.mark.parametrize(
    ("missing", "options"),
    [(0.0, OPTIONS["plain"]), *((0.1, OPTIONS[name]) for name in ("plain", "extend", "population", "separate"))],
    ids=["complete", "masked", "extend", "population", "separate"],
)
def test_latents_solve_the_dense_quadratic(missing, options):
    data = {key: pair for key, pair in make_data(missing=missing).items() if key[1] == "run-1"}
    if options.get("latent_pooling"):
        data = {key: pair for key, pair in data.items() if key[0] != "p3"}
    problem, training, objective, oracle, vector = both_quiet(data, latent_step=3.9, **options)
    loading, raw = random_loadings(problem, training, np.random.default_rng(2))
    expected = oracle.latents(raw, 2)
    for system, z in zip(problem.systems, objective.latents(loading, vector), strict=True):
        for p in system.participants or oracle.people[system.run]:
            # The oracle's Hessian is made of differences of the objective: 1e-16 / its smallest eigenvalue 1e-4.
            np.testing.assert_allclose(z[:, system.path_of(p)], expected[p, system.run], rtol=0, atol=1e-9)


def both_quiet(data, **options):
    """As `both`, for recordings without anything to warn about."""
    nested = {}
    for (participant, run, modality), pair in data.items():
        nested.setdefault(participant, {}).setdefault(run, {})[modality] = pair
    recording = msrm.Recording.from_dict(nested)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "recording_of", lambda _: recording)
        return both(data, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("data", DATA.values(), ids=DATA)
def test_gradient_is_that_of_the_eliminated_objective(data, options):
    problem, training, objective, _, vector = both(make_data(**data), **options)
    rng = np.random.default_rng(3)
    loading, _ = random_loadings(problem, training, rng)
    vector = vector + np.array([0.05, 0.1])
    found = objective.evaluate(loading, vector)
    turn, step = rng.standard_normal(loading.shape), 1e-4

    def along(a, b):
        return objective.evaluate(loading + a * turn, vector + b).value

    # Fourth-order differences: error 1e-16 / step + step^4.
    ahead = (8 * (along(step, 0) - along(-step, 0)) - (along(2 * step, 0) - along(-2 * step, 0))) / (12 * step)
    assert np.sum(found.loading_gradient * turn) == pytest.approx(ahead, rel=1e-8, abs=1e-10)
    for slot in range(2):
        e = np.eye(2)[slot] * step
        ahead = (8 * (along(0, e) - along(0, -e)) - (along(0, 2 * e) - along(0, -2 * e))) / (12 * step)
        assert found.response_gradient[slot] == pytest.approx(ahead, rel=1e-6, abs=1e-10)


def test_no_cancellation_where_the_fit_is_nearly_exact():
    """Data made by the model itself: residual share 1e-12, still right to many digits."""
    data = {key: pair for key, pair in make_data().items() if key[1] == "run-1" and key[2] == "brain"}
    problem, _, objective, _, vector = both_quiet(data, loading_ridge=1e-13, latent_ridge=1e-13, roughness=1e-13)
    rng = np.random.default_rng(4)
    loading = rng.standard_normal((problem.n_columns, 2))
    path = rng.standard_normal((problem.systems[0].grid.count, 1, 2))
    group = problem.groups[0][0]
    operator = group.operator(problem.filters.response(0), {}, problem.systems[0].grid)
    group.weighted[:] = group.cell[:, None] * group.omega * (operator.rows.apply(path[:, 0]) @ loading.T)
    found = objective.evaluate(loading, vector)
    exact = sum(objective.parts(loading, vector, found.latents).values())
    assert found.value == pytest.approx(exact, rel=1e-9)
    assert found.value < 1e-9


def test_constant_and_missing_features_are_as_if_absent():
    data = make_data(missing=0.05)
    bare = {
        key: (np.delete(values, [1, 3], 1), times) if key[2] == "brain" else (values, times)
        for key, (values, times) in data.items()
    }
    for (_, _, modality), (values, _) in data.items():
        if modality == "brain":
            values[:, 1] = np.where(np.isnan(values[:, 1]), np.nan, 0.1)
            values[:, 3] = np.nan
    absent = {(p, "brain", f) for p in ("p1", "p2", "p3") for f in (1, 3)}
    problem, training, objective, oracle, vector = both(data, absent=absent)
    plain, _, other, _, _ = both(bare)
    loading = np.random.default_rng(5).standard_normal((problem.n_columns, 2))
    assert plain.n_columns == problem.n_columns
    found = objective.evaluate(loading, vector)
    assert found.value == other.evaluate(loading, vector).value
    raw = {
        pair: np.nan_to_num(training.reduced[pair].to_features(loading[columns]))
        for pair, columns in zip(problem.pairs, problem.columns, strict=True)
    }
    paths = {
        (p, s.run): z[:, 0] for s, z in zip(problem.systems, found.latents, strict=True) for p in oracle.people[s.run]
    }
    assert found.value == pytest.approx(oracle.objective(raw, paths), rel=1e-12)
    assert np.isnan(training.reduced["p1", "brain"].to_features(loading[problem.columns[0]])[[1, 3]]).all()


def test_reference_objectives_are_reproduced(reference):
    """DESIGN 2 promises 4e-16 at the peer's parameters; 1e-14 leaves room for another BLAS."""
    responses = {
        "brain": msrm.Identity(),
        "rating": msrm.Gaussian(width=0.6, lag=msrm.Free(0.0, bounds=(-1.5, 1.5))),
        "physiology": msrm.Gaussian(width=msrm.Free(0.6, bounds=(0.3, 1.0)), lag=msrm.Free(0.5, bounds=(-1.0, 2.0))),
    }
    for row in reference("rmsrm.json"):
        recording = msrm.Recording.from_dict(reference(f"{row['recording']}.npz"))
        estimator = msrm.RMSRM(row["n_factors"], latent_step=row["latent_step"], responses=responses)
        problem, training = build_problem(recording, checked_settings(estimator.get_params()))
        loading = np.concatenate(
            [training.reduced[pair].to_reduced(np.array(row["loadings"]["/".join(pair)])) for pair in problem.pairs]
        )
        vector = problem.filters.vector({(m, None): values for m, values in row["responses"].items()})
        latents = tuple(np.array(row["latents"][s.run])[:, None] for s in problem.systems)
        parts = Objective(problem).parts(loading, vector, latents)
        assert sum(parts.values()) == pytest.approx(row["objective"], abs=1e-14)
        assert parts["reconstruction"] == pytest.approx(row["components"]["reconstruction"], abs=1e-14)
        assert parts["loading"] == pytest.approx(row["components"]["loading_penalty"], abs=1e-14)
        assert parts["latent"] + parts["roughness"] == pytest.approx(row["components"]["latent_penalty"], abs=1e-14)


class TestDomain:
    def test_cells_split_at_gaps(self):
        np.testing.assert_allclose(
            cell_weights(np.array([0.0, 1.0, 2.0, 9.0, 20.0, 21.0])), np.array([0.5, 1, 0.5, 1, 0.5, 0.5]) / 4
        )

    def test_one_row_weighs_everything(self):
        assert cell_weights(np.array([3.0])) == [1.0]

    def test_a_gap_of_exactly_two_intervals_does_not_split(self):
        np.testing.assert_allclose(cell_weights(np.array([0.0, 1.0, 2.0, 4.0])), np.array([0.5, 1, 1.5, 1]) / 4)

    def test_grid_may_pass_the_last_time(self):
        grid = latent_grid(1.0, 5.3, 0.9)
        assert (grid.count, grid.last) == (6, pytest.approx(5.5))
        assert grid.shares.sum() == pytest.approx(1.0)

    def test_rounding_adds_no_grid_point(self):
        assert latent_grid(0.0, 0.1 + 0.2, 0.1).count == 4


def test_a_stream_without_usable_row_is_named():
    data = make_data()
    data["p1", "run-1", "rating"] = (np.random.default_rng(0).standard_normal((3, 3)), np.array([0.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match=r"'rating' of p1 in run-1: no row is usable.*0 to 23\.1.*edges=\"extend\""):
        both(data)


def test_an_impossible_latent_solve_names_the_run():
    problem, *_ = both(make_data())
    system = problem.systems[0]
    band = np.full((1, system.grid.count), -1e3)
    with pytest.raises(LatentFailure, match=r"latents of run-1 cannot be solved for: .* Raise latent_ridge"):
        system.solve([(0, band, np.eye(2))], np.zeros((system.grid.count, 1, 2)))
