"""NUTS of GP-MSRM: its density against brute force, its prior against its definition, chains that are stopped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gibbs_problems import Problem, problem
from gp_oracles import IMPULSE, finite_difference, gaussian_functional, gp_log_likelihood
from nuts_problems import interrupted_after, tiny
from scipy import stats

import msrm
from msrm.gp import programs
from msrm.gp.dense import Dense
from msrm.gp.gibbs.start import state_of
from msrm.gp.nuts import chains as chains_module
from msrm.gp.nuts import sampler as sampler_module
from msrm.gp.nuts import start as start_module
from msrm.gp.nuts.chains import STATISTICS, NutsJob, run_chain
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.density import Density
from msrm.gp.nuts.gauge import pivot_rows
from msrm.gp.nuts.sampler import NutsRun
from msrm.gp.nuts.settings import NutsSettings
from msrm.gp.nuts.transforms import Scalars
from msrm.gp.storage import DrawStore

CASES: dict[str, dict[str, Any]] = {
    "one factor": {"n_factors": 1},
    "two factors, null rows": {"n_factors": 2, "wide": 11},
    "three factors, null rows": {"n_factors": 3, "wide": 14},
    "few null rows": {"n_factors": 3, "wide": 7},
    "masked": {"n_factors": 2, "missing": 0.25},
    "two runs, run offsets": {"n_factors": 2, "runs": 2, "run_offsets": True, "wide": 20},
    "residuals, powers": {"n_factors": 2, "ou": True, "powers": True},
    "free length scale": {"n_factors": 2, "free_length_scale": True},
}


def density_of(small: Problem, backend: Any = None) -> Density:
    coordinates = Coordinates.of(small.specification, small.layout, small.state)
    return Density(coordinates, small.backend if backend is None else backend, compiled=False)


def random_point(density: Density, small: Problem, seed: int) -> np.ndarray:
    x = density.coordinates.point(small.state)
    return x + 0.1 * np.random.default_rng(seed).standard_normal(len(x))


def brute_log_likelihood(small: Problem, parameters: dict[str, np.ndarray]) -> float:
    """The likelihood with every null row spelled out: n rows with the Gram matrix of the stand-ins, data of zeros."""
    specification, size = small.specification, small.specification.n_factors
    streams, full = {}, dict(parameters)
    rng = np.random.default_rng(0)
    for pair in small.layout.pairs:
        key = f"{pair.participant}/{pair.modality}"
        names = [f"offset/{key}"]
        if pair.modality in specification.run_offsets:
            names += [f"run_offset/{pair.participant}/{run}/{pair.modality}" for run in pair.rows]
        rows = np.column_stack([parameters[f"loading/{key}"], *(parameters[name] for name in names)])
        values = np.concatenate([block for _, block in pair], axis=1)
        data = np.where(pair.patterns[pair.pattern].T, values, np.nan)
        parts, columns, start = [rows[: pair.n_coordinates]], [data], pair.n_coordinates
        for pattern in np.flatnonzero(pair.null_counts):
            count = int(pair.null_counts[pattern])
            width = min(count, rows.shape[1])
            turn = np.linalg.qr(rng.standard_normal((count, width)))[0]
            parts.append(turn @ rows[start : start + width])
            columns.append(np.where(pair.patterns[pattern][:, None], np.zeros((len(values), count)), np.nan))
            start += width
        assert start == len(rows)
        rows, data = np.concatenate(parts), np.hstack(columns)
        full[f"loading/{key}"] = rows[:, :size]
        full |= {name: rows[:, size + i] for i, name in enumerate(names)}
        for run, span in pair.rows.items():
            streams[pair.participant, run, pair.modality] = data[span], pair.times[span]
    width = float(full["response/rating/width"])
    functionals = {"brain": IMPULSE, "rating": gaussian_functional(width, float(full["response/rating/lag"]))}
    ou = "rating" in specification.residuals
    return gp_log_likelihood(
        streams,
        functionals,
        full,
        length_scale=float(full.get("length_scale", 2.0)),
        timescales={"rating": float(full["residual_timescale/rating"])} if ou else None,
        powers=specification.powers or None,
    )


def brute_log_prior(small: Problem, density: Density, x: np.ndarray) -> float:
    """Term by term: normal rows, chi diagonals, scalars, each with a Jacobian by differences."""
    coordinates, priors, total = density.coordinates, small.specification.priors, 0.0
    layout, size = coordinates.layout, small.specification.n_factors
    sds = {"loading": priors.loading_sd, "offset": priors.offset_sd, "run_offset": priors.run_offset_sd}
    packed = density.parts(x[None])[0][0]
    value = layout.unpacked(packed)
    degrees = {}
    for place, (key, row) in enumerate(coordinates.pivots):
        degrees[f"loading/{key[0]}/{key[1]}", row, place] = size - place
    zero = {(name, row, col) for name, row, place in degrees for col in range(place + 1, size)}
    for pair in small.layout.pairs:
        key, start = f"{pair.participant}/{pair.modality}", pair.n_coordinates
        names = [(f"loading/{key}", k) for k in range(size)] + [(f"offset/{key}", None)]
        if pair.modality in small.specification.run_offsets:
            names += [(f"run_offset/{pair.participant}/{run}/{pair.modality}", None) for run in pair.rows]
        for count in pair.null_counts[pair.null_counts > 0]:
            if count >= len(names):
                for j in range(len(names)):
                    name, k = names[j]
                    degrees[name, start + j, k] = int(count) - j
                    zero |= {(name, start + j, k) for name, k in names[:j]}
            start += min(int(count), len(names))
    steps = 1e-6 * np.eye(len(x))
    moved, behind = density.parts(x + steps)[0], density.parts(x - steps)[0]
    jacobian = (moved - behind) / 2e-6
    assert (np.count_nonzero(jacobian, axis=1) == 1).all()  # every coordinate moves one parameter
    used = np.zeros(layout.size, bool)
    for name, array in value.items():
        kind, span = name.split("/")[0], layout.slices[name]
        for flat, at in enumerate(range(span.start, span.stop)):
            row, col = (flat // size, flat % size) if array.ndim == 2 else (flat, None)
            if kind not in sds:
                total += float(layout.scalar_priors[name].log_density(packed[at]))
            elif (name, row, col) in zero:
                assert packed[at] == 0.0
                continue
            elif (name, row, col) in degrees:
                assert packed[at] > 0.0
                sd = sds[kind]
                total += stats.chi(degrees[name, row, col]).logpdf(packed[at] / sd) - np.log(sd)
            else:
                total += stats.norm(0.0, sds[kind]).logpdf(packed[at])
            used[at] = True
    assert used.sum() == len(x)
    return total + float(np.sum(np.log(np.abs(jacobian[:, used]).sum(axis=1))))


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def case(request) -> tuple[Problem, Density]:
    """A small problem and its exact density."""
    small = problem(**{"skin": False} | request.param)
    return small, density_of(small, Dense(small.layout.groups, small.specification.n_factors))


def test_the_density_is_the_brute_force_one(case):
    small, density = case
    for seed in (0, 1):
        x = random_point(density, small, seed)
        parameters = density.coordinates.layout.unpacked(density.parts(x[None])[0][0])
        found, prior = density.value_and_gradient(x)[0], density.parts(x[None])[1][0]
        # Jacobians by differences of 1e-6 are good to 1e-9 each.
        assert prior == pytest.approx(brute_log_prior(small, density, x), abs=1e-6)
        # Responses are cut at 6 widths, 2e-9 of the variance, in the package alone.
        assert found - prior == pytest.approx(brute_log_likelihood(small, parameters), abs=2e-6, rel=1e-7)


def test_the_gradient_is_that_of_differences(case):
    small, density = case
    x = random_point(density, small, 2)
    gradient = density.value_and_gradient(x)[1]
    # One direction at a time: all coordinates enter the random ones.
    rng = np.random.default_rng(3)
    for direction in [*rng.standard_normal((3, len(x))), *np.eye(len(x))[list(density.coordinates.places.values())]]:
        slope = finite_difference(
            lambda t, along=direction: density.value_and_gradient(x + t[0] * along)[0], np.zeros(1), (0,), 1e-4
        )
        # Rounding of values near 1e3 over steps of 1e-4.
        assert slope == pytest.approx(gradient @ direction, rel=2e-6, abs=2e-5)


@pytest.mark.slow
def test_both_likelihoods_give_the_same_density_and_gradient():
    small = problem(n_factors=2, wide=11, missing=0.1)
    host = density_of(small)
    compiled = Density(host.coordinates, small.backend, compiled=True)
    x = random_point(host, small, 4)
    (one, slope), (other, other_slope) = host.value_and_gradient(x), compiled.value_and_gradient(x)
    assert one == pytest.approx(other, rel=1e-9)
    np.testing.assert_allclose(slope, other_slope, rtol=1e-6, atol=1e-6 * np.abs(slope).max())


def test_a_state_comes_back_with_its_invariants(case):
    small, density = case
    coordinates = density.coordinates
    back = coordinates.state(density.parts(coordinates.point(small.state)[None])[0][0], small.state)
    size = small.specification.n_factors
    for pair in small.layout.pairs:
        one, other, own = small.state.rows[pair.key], back.rows[pair.key], pair.n_coordinates
        assert one.shape == other.shape
        np.testing.assert_allclose(one[:own, size:], other[:own, size:], atol=1e-12)
        np.testing.assert_allclose(one[:own, :size] @ one[:own, :size].T, other[:own, :size] @ other[:own, :size].T)
        np.testing.assert_allclose(one[own:, size:].T @ one[own:, size:], other[own:, size:].T @ other[own:, size:])
        assert back.noise[pair.key] == pytest.approx(small.state.noise[pair.key], rel=1e-12)
    found, before = small.sweeper.start(back).log_likelihood, small.sweeper.start(small.state).log_likelihood
    assert found == pytest.approx(before, rel=1e-10)


# Sampling


@pytest.mark.parametrize(
    "prior",
    [
        msrm.LogNormal(-0.5, 1.0),
        msrm.LogNormal(0.3, 0.5).bounded(0.5, 4.0),
        msrm.LogNormal(0.0, 0.4).bounded(0.7, np.inf),
        msrm.Normal(0.5, 1.0).bounded(-1.0, 2.0),
        msrm.Normal(0.5, 1.0).bounded(-np.inf, 1.0),
        msrm.Normal(0.5, 1.0),
        msrm.Uniform(-1.0, 3.0),
    ],
    ids=str,
)
def test_a_scalar_keeps_its_prior_on_the_whole_line(prior):
    """Probabilities of x are those of the value: quadrature of the transformed density against the prior's cdf."""
    scalars = Scalars.of([prior])
    x = np.linspace(-40.0, 40.0, 80001)
    weights = np.full(len(x), 1e-3)
    value = np.asarray(jax.vmap(scalars.value)(jnp.asarray(x)[:, None]))[:, 0]
    logs = jax.vmap(lambda at: (scalars.log_density(scalars.value(at)) + scalars.log_slope(at))[0])
    density = np.exp(np.asarray(logs(jnp.asarray(x)[:, None])))
    assert weights @ density == pytest.approx(1.0, abs=1e-7)
    for at in prior.quantile(np.array([0.1, 0.5, 0.9])):
        # A step function is integrated to the spacing of the points.
        inside = value <= at if value[-1] > value[0] else value < at
        assert weights @ (density * inside) == pytest.approx(float(prior.cdf(at)), abs=1e-3)
    mean = weights @ (density * value)
    grid = prior.quantile((np.arange(20000) + 0.5) / 20000)
    assert mean == pytest.approx(grid.mean(), abs=2e-3 * (1.0 + grid.std()))
    middle = prior.quantile(np.array([0.3]))
    np.testing.assert_allclose(np.asarray(scalars.value(jnp.asarray(scalars.coordinate(middle)))), middle, rtol=1e-9)


@pytest.mark.slow
def test_pivots_and_null_factors_have_the_law_of_free_loadings():
    """Rows under NUTS's prior, turned at random, against normal rows: moments of what no rotation touches."""
    small = problem(n_factors=3, wide=14, skin=False)
    coordinates = density_of(small).coordinates
    diagonal, rng, n = coordinates.degrees > 0.0, np.random.default_rng(0), 20000
    x = coordinates.sd * rng.standard_normal((n, coordinates.size))
    x[:, diagonal] = np.log(np.sqrt(rng.chisquare(coordinates.degrees[diagonal], (n, diagonal.sum()))))
    packed, _ = density_of(small).parts(x)
    priors, size = small.specification.priors, 3
    pair = next(pair for pair in small.layout.pairs if pair.null_counts.any())
    own, name = pair.n_coordinates, f"{pair.participant}/{pair.modality}"
    layout = coordinates.layout
    loading = packed[:, layout.slices[f"loading/{name}"]].reshape(n, -1, size)
    offset = packed[:, layout.slices[f"offset/{name}"]]
    count = int(pair.null_counts.sum())
    # Entries of W W' among the first rows, the Gram matrix of null loadings by its rotation invariants, and of offsets.
    products = np.einsum("dik,djk->dij", loading[:, :3], loading[:, :3])
    free = priors.loading_sd * rng.standard_normal((n, 3, size))
    null = np.concatenate([loading[:, own:], offset[:, own:, None]], axis=2)
    grams = null.swapaxes(1, 2) @ null
    rows = rng.standard_normal((n, count, size + 1)) * np.r_[np.full(size, priors.loading_sd), priors.offset_sd]
    wanted = rows.swapaxes(1, 2) @ rows

    def invariants_of(gram: np.ndarray) -> np.ndarray:
        w = gram[:, :size, :size]
        across = gram[:, :size, size]
        return np.column_stack(
            [np.trace(w, axis1=1, axis2=2), np.linalg.det(w), gram[:, size, size], (across**2).sum(1)]
        )

    pairs = [(products[:, i, j], (free @ free.swapaxes(1, 2))[:, i, j]) for i in range(3) for j in range(i + 1)]
    pairs += list(zip(invariants_of(grams).T, invariants_of(wanted).T, strict=True))
    for found, expected in pairs:
        # Ten comparisons at a thousandth each.
        assert stats.ks_2samp(found, expected).pvalue > 1e-3


@pytest.fixture(scope="module")
def fitted() -> tuple[Any, Any]:
    """A fit and its recording."""
    return tiny()


@pytest.fixture(scope="module")
def finished(fitted, tmp_path_factory) -> NutsJob:
    """A chain run to its end, compiled for the tests that run it again."""
    gp, recording = fitted
    likelihood, _ = gp.prepared(recording, reduce=True)
    start = state_of(likelihood.specification, likelihood.nodes, gp.model_.parameters)
    run = NutsRun.of(gp, likelihood, likelihood.backend.at_step(gp.model_.step), start, NutsSettings())
    store = DrawStore.create(tmp_path_factory.mktemp("nuts") / "whole", {})
    job = run.job(store, chains=1, warmup=6, draws=5, seed=7)
    assert run_chain(job, 0) == 5
    return job


def once_more(job: NutsJob, folder: Path) -> NutsJob:
    """The same run in another folder, by the same compiled functions."""
    again = replace(job, folder=DrawStore.create(folder, {}).folder)
    again.__dict__["kernel"] = job.kernel
    return again


def test_an_interrupted_chain_continues_bit_for_bit(finished, tmp_path):
    wanted, job = DrawStore(finished.folder).chain(0).read(), once_more(finished, tmp_path / "parts")
    for steps in (3, 5, 2):  # in warm-up, across its end, among draws
        with interrupted_after(steps):
            run_chain(job, 0)
    assert run_chain(job, 0) == 5
    found = DrawStore(job.folder).chain(0).read()
    assert found.keys() == wanted.keys() > set(STATISTICS)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value)


def test_a_draw_is_stored_with_its_own_likelihood(finished):
    draws = DrawStore(finished.folder).chain(0).read()
    for place in (0, -1):
        state = finished.start.from_arrays({name: draws[name][place] for name in finished.start.arrays()})
        # Turned at random since: the likelihood does not see it.
        found = finished.kernel.sweeper.start(state).log_likelihood
        assert found == pytest.approx(draws["log_likelihood_marginal"][place], rel=1e-9)
    size = finished.beginning.coordinates.specification.n_factors
    assert np.linalg.matrix_rank(draws["rows.0"][0, :, :size]) == size


def test_an_interrupt_inside_the_likelihood_uses_nothing_of_the_step(finished, tmp_path, monkeypatch):
    job = once_more(finished, tmp_path / "run")
    host, calls = job.kernel.density.host, [0]
    value = host.likelihood.value_and_gradient

    def interrupting(self: Any, parameters: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise KeyboardInterrupt
        return value(parameters)

    monkeypatch.setattr(type(host.likelihood), "value_and_gradient", interrupting)
    assert run_chain(job, 0) == 0
    assert host.interrupted
    host.interrupted = False
    last = DrawStore(job.folder).chain(0).last()
    assert last is not None
    assert all(np.isfinite(leaf).all() for leaf in last.state.values() if leaf.dtype.kind == "f")


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"metric": "full"}, ValueError, "metric must be one of diagonal, dense, found 'full'"),
        ({"chain_method": "parallel"}, ValueError, "sequential, vectorized, processes"),
        ({"target_accept": 1.0}, ValueError, "target_accept must lie between 0 and 1"),
        ({"max_tree_depth": 0}, ValueError, "max_tree_depth must be an integer from 1"),
        ({"step_size": 0.1}, TypeError, 'step_size: no setting of sampler="nuts", which has metric'),
    ],
)
def test_an_unusable_setting_is_refused_at_once(fitted, tmp_path, settings, error, told):
    gp, recording = fitted
    with pytest.raises(error, match=told):
        gp.sample(recording, sampler="nuts", path=tmp_path / "run", progress=False, **settings)
    assert not (tmp_path / "run").exists()


def test_what_the_other_sampler_or_the_size_forbids_is_refused(fitted):
    gp, recording = fitted
    with pytest.raises(TypeError, match='metric: no setting of sampler="gibbs"'):
        gp.sample(recording, metric="dense")
    with pytest.raises(ValueError, match=r"learn a 1001 x 1001 matrix .* the limit is 1000"):
        NutsSettings(metric="dense").check_size(1001)
    with pytest.raises(ValueError, match=r'3 loading rows, one a factor, but the streams have 2\. Use sampler="gibbs"'):
        pivot_rows({("p", "m"): np.ones((2, 3))}, {("p", "m"): 1.0})


@pytest.mark.slow
def test_compiled_chains_are_the_same_whichever_of_their_functions_came_compiled_from_elsewhere(fitted, monkeypatch):
    """NumPyro's step is traced by settings of a start: one that was found compiled has traced none."""
    for module in (chains_module, sampler_module, start_module):
        monkeypatch.setattr(module, "runs_compiled", lambda backend: True)
    monkeypatch.setattr(programs, "_ready", type(programs._ready)())
    model, recording = fitted
    options: dict[str, Any] = {"chains": 2, "warmup": 5, "draws": 3, "chain_method": "vectorized", "progress": False}
    first = model.sample(recording, sampler="nuts", **options)
    assert len(programs._ready) == 3
    programs._ready.popitem()  # the step of all chains, made last
    again = model.sample(recording, sampler="nuts", **options)
    assert len(programs._ready) == 3
    for name in ("noise", "response", "log_likelihood_marginal"):
        np.testing.assert_array_equal(first.posterior[name], again.posterior[name])
