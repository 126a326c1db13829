"""The compiled Gibbs sampler: every step against the NumPy sampler or the joint density, and chains against chains."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gibbs_problems import problem
from scipy import stats

from msrm.diagnostics import block_statistics
from msrm.gp.cyclic import Parallel
from msrm.gp.gibbs import native as native_module
from msrm.gp.gibbs.chains import record
from msrm.gp.gibbs.compiled import unsupported
from msrm.gp.gibbs.marginal import prior_blocks
from msrm.gp.gibbs.native import NativeGibbsRun
from msrm.gp.gibbs.native_data import ChainState, Stack
from msrm.gp.gibbs.native_moves import _bartlett, draw_noise, draw_rows, haar, scale_density, stretched
from msrm.gp.gibbs.native_proposals import ROOM, Tuning, suggested
from msrm.gp.gibbs.native_sweep import NativeSweeper
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.storage import DrawStore
from msrm.latent_grid import GridPrior
from msrm.priors import LogNormal


@pytest.fixture(scope="module", params=["plain", "two runs, residual variances, powers"])
def made(request):
    """A problem, its compiled sweeper, the state in the sweeper's form, and the marginal density there."""
    plain = request.param == "plain"
    arguments = {"residual": False} if plain else {"residual": True, "runs": 2, "powers": True}
    given = problem(rows=(6, 7), **arguments)
    sweeper, state = native(given)
    return given, sweeper, state, sweeper.current(sweeper.data, state)


def native(given):
    sweeper = NativeSweeper(
        given.specification, given.layout, given.backend, Parallel(), values=given.state.responses, room=1.25
    )
    places = list(given.state.rows.values())
    rows = {
        modality: tuple(jnp.stack([jnp.asarray(places[place]) for place in stack.places]) for stack in of.stacks)
        for modality, of in sweeper.stacks.items()
    }
    responses = {m: {k: jnp.asarray(v) for k, v in of.items()} for m, of in given.state.responses.items() if of}
    return sweeper, ChainState(rows, jnp.asarray(list(given.state.noise.values())), responses)


@pytest.mark.slow
def test_density_and_proposals_agree_with_the_numpy_sampler(made):
    given, sweeper, _, current = made
    expected = given.sweeper.start(given.state)
    np.testing.assert_allclose(current.value, expected.log_likelihood, rtol=1e-12)
    for block in sweeper.blocks:
        there = block.coordinates(given.state) + 0.05
        moved, change = sweeper.propose(sweeper.data, current, block, jnp.asarray(there))
        wanted, prior = given.sweeper.marginal._moved(expected, block, block.values(there))
        # Gains, which only decide how far loadings go along, are those of the density's own functionals.
        exact = bool(given.backend.residual)
        np.testing.assert_allclose(moved.value, wanted.log_likelihood, rtol=1e-12 if exact else 1e-4)
        np.testing.assert_allclose(change, prior, rtol=1e-9 if exact else 1e-2)


@pytest.mark.slow
def test_latents_have_the_posterior_moments(made):
    given, sweeper, _, current = made
    draws = 4000
    keys = jax.random.split(jax.random.key(0), draws)
    _, functionals = jax.vmap(lambda key: sweeper.latents(key, current))(keys)
    expected = given.sweeper.start(given.state)
    for modality, found in functionals.items():
        parts = [
            given.backend.evidence(run, given.state.responses, given.state.length_scale, expected.statistics[run])
            for run, groups in given.layout.groups.items()
            if modality in groups
        ]
        mean = np.concatenate([one.mean[modality] for one in parts])
        error = np.asarray(found).std(0) / np.sqrt(draws)
        assert np.abs((np.asarray(found).mean(0) - mean) / error).max() < 5.0
        second = sum(one.second_moment[modality].sum(0) for one in parts)
        sums = np.einsum("djk,djl->dkl", found, found)
        assert np.abs((sums.mean(0) - second) / (sums.std(0) / np.sqrt(draws))).max() < 5.0


def log_joint(sweeper, state, path, functionals):
    """Log density of paths, loadings, offsets and data, up to a constant; functionals with residuals are held apart."""
    gone, precision = sweeper.paths.innovations(sweeper.data, path)
    total = -0.5 * jnp.einsum("pik,pij,pjk->", gone, precision, gone)
    priors = sweeper.specification.priors
    for modality, stacks in sweeper.stacks.items():
        given = sweeper.data["observed"][modality]
        total += sum(
            x.sum() for x in stacks.conditional(given, state.rows[modality], state.noise, functionals[modality])
        )
        for rows in state.rows[modality]:
            total += -0.5 * (rows[..., :-1] ** 2).sum() / priors.loading_sd**2
            total += -0.5 * (rows[..., -1] ** 2).sum() / priors.offset_sd**2
    return float(total)


def at_a_draw(made):
    given, sweeper, state, current = made
    path, functionals = sweeper.latents(jax.random.key(3), current)
    statistics = {
        m: of.statistics(sweeper.data["observed"][m], state.rows[m], state.noise) for m, of in sweeper.stacks.items()
    }
    return given, sweeper, state, current.system, path, functionals, statistics


def scale_terms(sweeper, level, system, state, path, functionals, statistics):
    gram = sum(jnp.einsum("pfk,pfl->kl", r[..., :-1], r[..., :-1]) for of in state.rows.values() for r in of)
    coarse = jax.tree.map(lambda one: one[level], sweeper.data["coarse"])
    return sweeper.paths.scale_terms(coarse, system, path, functionals, statistics, gram, jnp.eye(2))


@pytest.mark.slow
def test_the_coarse_component_is_independent_of_the_rest(made):
    given, sweeper, state, system, path, functionals, statistics = at_a_draw(made)
    terms = scale_terms(sweeper, 0, system, state, path, functionals, statistics)
    matern = given.backend.matern
    component, whole = (np.asarray(sweeper.paths.states(part)) for part in (terms.component, path))
    form = np.zeros((2, 2))
    for first, count in zip(sweeper.paths.grid.first, sweeper.paths.grid.counts, strict=True):
        band = GridPrior.on(matern, matern.rate(given.state.length_scale) * given.backend.step, int(count)).band()
        full = np.zeros((band.shape[1], band.shape[1]))
        for offset, diagonal in enumerate(band):
            here = np.arange(band.shape[1] - offset)
            full[here + offset, here] = full[here, here + offset] = diagonal[: len(here)]
        a, b = (part[first : first + count].reshape(-1, 2) for part in (component, whole))
        form += a.T @ full @ a
        np.testing.assert_allclose(a.T @ full @ (b - a), 0.0, atol=1e-8 * np.abs(form).max())
    np.testing.assert_allclose(terms.quadratic, form, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("log_c", [0.2, -0.1])
def test_the_scale_move_has_the_ratio_of_joint_densities(made, log_c):
    _, sweeper, state, system, path, functionals, statistics = at_a_draw(made)
    terms = scale_terms(sweeper, -1, system, state, path, functionals, statistics)
    direction = jnp.asarray([0.6, 0.8])
    dimension = 2 * int(sweeper.data["coarse"]["count"][-1]) - sum(of.feature_rows for of in sweeper.stacks.values())
    density = scale_density(terms, direction, dimension, sweeper.specification.priors.loading_sd)
    moved = stretched(terms, direction, jnp.asarray(log_c))
    rows = {
        m: tuple(jnp.concatenate([r[..., :2] @ moved.turn, r[..., 2:]], -1) for r in of) for m, of in state.rows.items()
    }
    after = log_joint(sweeper, state._replace(rows=rows), moved.path, moved.functionals)
    before = log_joint(sweeper, state, path, functionals)
    np.testing.assert_allclose(density(jnp.asarray(log_c)), after - before + dimension * log_c, rtol=1e-8, atol=1e-8)
    for modality, one in moved.statistics.items():
        again = sweeper.stacks[modality].statistics(sweeper.data["observed"][modality], rows[modality], state.noise)
        np.testing.assert_allclose(one.information, again.information, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(one.precision, again.precision, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_the_shift_has_its_exact_normal_conditional(made):
    _, sweeper, state, system, path, functionals, statistics = at_a_draw(made)
    precision, pull, shifted = sweeper.paths.shift(sweeper.data, system, state, path, functionals, statistics)
    before = log_joint(sweeper, state, path, functionals)
    for delta in (jnp.asarray([0.3, -0.2]), jnp.asarray([-0.5, 0.4])):
        moved, there, seen = shifted(delta)
        expected = pull @ delta - 0.5 * delta @ precision @ delta
        np.testing.assert_allclose(log_joint(sweeper, moved, there, seen) - before, expected, rtol=1e-8, atol=1e-8)


def test_rows_have_their_exact_conditional():
    rng, draws = np.random.default_rng(0), 20_000
    matrix, values = rng.standard_normal((1, 9, 2)), jnp.asarray(rng.standard_normal((1, 9, 4)))
    given = {"values": values, "node": jnp.arange(9)[None]}
    precisions, noise = jnp.asarray([1.2, 1.2, 0.6]), jnp.asarray([0.7])
    stack = Stack((0,), 4, (50,), 0.8)
    keys = jax.random.split(jax.random.key(0), draws)
    rows = np.asarray(
        jax.vmap(lambda key: draw_rows(key, stack, given, jnp.asarray(matrix[0]), noise, precisions))(keys)
    )
    design = np.column_stack([matrix[0], np.ones(9)])
    covariance = np.linalg.inv(design.T @ design * 0.8 / 0.7 + np.diag(precisions))
    mean = (covariance @ design.T @ np.asarray(values[0])).T * 0.8 / 0.7
    own, null = rows[:, 0, :4], rows[:, 0, 4:]
    assert np.abs((own.mean(0) - mean) / (own.std(0) / np.sqrt(draws))).max() < 5.0
    for place in range(4):
        np.testing.assert_allclose(np.cov(own[:, place].T), covariance, atol=0.05 * covariance.max())
    gram = np.einsum("dfk,dfl->dkl", null, null)
    assert np.abs((gram.mean(0) - 50 * covariance) / (gram.std(0) / np.sqrt(draws))).max() < 5.0


@pytest.mark.parametrize("count", [1, 2, 40])
def test_the_null_factor_is_wishart(count):
    draws = 20_000
    made = jax.vmap(lambda key: _bartlett(key, (count, 7), 3))(jax.random.split(jax.random.key(count), draws))
    gram = np.einsum("dij,dkj->dik", made[:, 0], made[:, 0])
    assert np.abs((gram.mean(0) - count * np.eye(3)) / (gram.std(0) / np.sqrt(draws))).max() < 5.0
    # Any diagonal entry of a Wishart matrix is chi-square, and of the first column too where the rank is full.
    for place in range(3):
        assert stats.kstest(gram[:, place, place], "chi2", (count,)).pvalue > 1e-4


@pytest.mark.parametrize(("count", "squares"), [(6.0, 2.0), (4000.0, 9000.0), (50.0, 1e-6)])
def test_noise_has_its_exact_conditional(count, squares):
    prior, draws = LogNormal(-0.5, 0.6), 20_000
    one = partial(draw_noise, counts=jnp.asarray([count]), squares=jnp.asarray([squares]), prior=prior)
    keys = jax.random.split(jax.random.key(1), draws)
    found = np.log(np.asarray(jax.vmap(lambda key: one(key, current=jnp.asarray([-1.0])))(keys)))[:, 0]
    assert np.isfinite(found).all()
    u = np.linspace(found.min() - 1.0, found.max() + 1.0, 200_001)
    logs = -0.5 * count * u - 0.5 * squares * np.exp(-u) - 0.5 * ((u + 0.5) / 0.6) ** 2
    cumulative = np.cumsum(np.exp(logs - logs.max()))
    assert stats.kstest(np.interp(found, u, cumulative / cumulative[-1]), "uniform").pvalue > 1e-4


def test_rotations_are_orthogonal_and_haar():
    turns = np.asarray(jax.vmap(lambda key: haar(key, 3))(jax.random.split(jax.random.key(0), 4000)))
    np.testing.assert_allclose(turns @ turns.transpose(0, 2, 1), np.broadcast_to(np.eye(3), turns.shape), atol=1e-14)
    # An entry of a Haar matrix of order 3 is uniform on [-1, 1].
    for i in range(3):
        assert stats.kstest(turns[:, i, 2 - i], "uniform", (-1.0, 2.0)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"run_offsets": True}, "run offsets"),
        ({"ou": True}, "Ornstein-Uhlenbeck residuals"),
        ({"missing": 0.2}, "missing entries"),
        ({"free_length_scale": True}, "a free length scale"),
    ],
)
def test_what_is_not_covered_is_named(arguments, said):
    given = problem(**arguments)
    assert said in unsupported(given.specification, given.layout)
    with pytest.raises(NotImplementedError, match=f'does not have {said}.*device="cpu"'):
        NativeGibbsRun(given.specification, given.layout, given.backend, given.state)


def native_chains(given, folder, *, chains, warmup, draws, stop=None):
    """All draws of a compiled run, {name: (chain, draw, ...)}; with ``stop``, made in two pieces."""
    run, counts = NativeGibbsRun(given.specification, given.layout, given.backend, given.state), {"chains": chains}
    for length in (draws,) if stop is None else (stop, draws):
        store = DrawStore.resume(folder, {})
        with store.running():
            assert run.run(store, **counts, warmup=warmup, draws=length, seed=1, n_jobs=1) == [length] * chains
    parts = [DrawStore(folder).chain(index).read() for index in range(chains)]
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def stand_in(self):
    """Sweeps that follow from their number alone: what the host does around dispatches needs no compilation."""

    def sweeps(data, keys, state, tunings, walks, first, tune):
        numbers = int(first) + np.arange(native_module._SWEEPS)
        wave = np.sin(numbers[None] + np.arange(len(keys))[:, None])

        def over_sweeps(values):
            values = np.asarray(values)[:, None]
            return np.abs(values) + 0.1 * wave.reshape(*wave.shape, *(1,) * (values.ndim - 2))

        made = jax.tree.map(over_sweeps, jax.tree.map(lambda x: np.ones_like(np.asarray(x)), state))
        return {
            "state": made,
            "value": wave,
            "conditional": {
                modality: [
                    np.zeros((*wave.shape, len(stack.places), len(self.job.layout.groups))) for stack in of.stacks
                ]
                for modality, of in self.sweeper.stacks.items()
            },
            "latent_power": wave,
            "acceptance": np.repeat(wave[..., None], len(tunings), axis=-1),
            "independent": np.zeros((*wave.shape, len(tunings)), bool),
            "outgrown": np.full(wave.shape, float(self.room < 1.7 * ROOM and int(first) >= 30)),
            "walks": np.stack([np.stack([wave, numbers + 0 * wave], -1)] * len(tunings), axis=2),
        }

    return sweeps


def test_independence_proposals_stay_within_the_first_windows_to_and_from():
    block = prior_blocks(problem().specification, ("brain", "skin", "rating"))[-1]
    assert block.names == ("response/rating/width", "response/rating/lag")
    at = float(np.exp(-0.5))
    spread = jnp.array([0.3, 0.01])
    mean, fitted, share = jnp.array([-0.5, 0.0]), jnp.asarray(True), jnp.asarray(0.5)
    tuning = Tuning(jnp.diag(spread), jnp.diag(1.0 / spread), mean, fitted, share)

    def length(responses):
        return responses["rating"]["width"] / at

    def found(width):
        here = {"rating": {"width": jnp.asarray(width), "lag": jnp.asarray(0.0)}}
        keys = jax.random.split(jax.random.key(2), 4000)
        there, ratio, independent = jax.vmap(lambda key: suggested(block, length, key, here, tuning, 0.0))(keys)
        made = np.isfinite(ratio)
        return np.asarray(there["rating"]["width"])[made], np.asarray(independent), made

    there, independent, made = found(at)
    assert there[independent[made]].max() <= ROOM * at < there[~independent[made]].max()
    # Turned down are those above the windows, and those below the prior's bound.
    expected = stats.t(5).sf(np.log(ROOM) / 0.3) + stats.t(5).cdf((np.log(0.3) + 0.5) / 0.3)
    assert abs((~made[independent]).mean() - expected) < 5.0 * np.sqrt(expected / independent.sum())
    # From outside nothing of the kind is made: the way back would be missing. Walks are.
    there, independent, made = found(1.1 * ROOM * at)
    assert not made[independent].any()
    assert made[~independent].mean() > 0.5


def test_the_host_loop_tunes_writes_grows_and_resumes(tmp_path, monkeypatch):
    build, rooms = native_module._Chains._build, []

    def built(self):
        build(self)
        rooms.append(self.room)
        self.compiled = stand_in(self)

    monkeypatch.setattr(native_module._Chains, "_build", built)
    given = problem(residual=False, skin=False, rows=(6, 7))
    whole = native_chains(given, tmp_path / "whole", chains=2, warmup=41, draws=60)
    # The window was too short from sweep 30 on: made again with more room, nothing of it kept.
    assert rooms == [ROOM, ROOM * 1.5, ROOM * 1.5**2]
    assert whole["noise"].shape == (2, 60, len(given.state.noise))
    assert {f"rows.{place}" for place in range(len(given.state.rows))} < whole.keys()
    np.testing.assert_array_equal(whole["log_likelihood_marginal"][1], np.sin(41 + np.arange(60) + 1))
    pieces = native_chains(given, tmp_path / "pieces", chains=2, warmup=41, draws=60, stop=23)
    for name, values in whole.items():
        np.testing.assert_array_equal(pieces[name], values, err_msg=name)
    run = NativeGibbsRun(given.specification, given.layout, given.backend, given.state)
    assert run.read(DrawStore(tmp_path / "whole"), 2).stat_labels == {"acceptance": ["response/rating"]}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_resumed_run_changes_no_bit(tmp_path):
    given = problem(residual=False, skin=False, rows=(6, 7))
    whole = native_chains(given, tmp_path / "whole", chains=2, warmup=30, draws=60)
    pieces = native_chains(given, tmp_path / "pieces", chains=2, warmup=30, draws=60, stop=20)
    for name, values in whole.items():
        np.testing.assert_array_equal(pieces[name], values, err_msg=name)


def invariants(draws, factors):
    """What rotation does not touch, {name: (chain, draw)}."""
    out = {name: draws[name] for name in ("log_likelihood_marginal", "latent_power")}
    for name in ("noise", "scalars", "log_likelihood"):
        for place in range(draws[name].shape[-1]):
            values = draws[name][..., place]
            if np.isfinite(values).all() and np.ptp(values) > 0.0:
                out[f"{name} {place}"] = np.log(values) if name == "noise" else values
    for place in range(draws["noise"].shape[-1]):
        rows = draws[f"rows.{place}"]
        loading, offset = rows[..., :factors], rows[..., factors]
        out[f"loadings {place}"], out[f"offsets {place}"] = np.log((loading**2).sum((-1, -2))), (offset**2).sum(-1)
        out[f"first row {place}"] = (loading[..., 0, :] ** 2).sum(-1)
        out[f"last row {place}"] = (rows[..., -1, :] ** 2).sum(-1)
    return out


def numpy_chain(given, seed, warmup, draws):
    rng, sweeper = np.random.default_rng(seed), Sweeper(given.specification, given.layout, given.backend)
    current, kept = sweeper.start(given.state), []
    for number in range(warmup + draws):
        finished = sweeper.sweep(rng, current, tune=number < warmup)
        current = sweeper.marginal.current(finished.state, finished.design)
        if number in (warmup // 4, warmup // 2):
            sweeper.end_window()
        if number >= warmup:
            kept.append(record(sweeper, finished, current))
    return {name: np.array([one[name] for one in kept]) for name in kept[0]}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("factors", [1, 2])
def test_chains_have_the_moments_of_the_numpy_sampler(tmp_path, factors):
    """Means and variances of every invariant, null rows included, within Monte Carlo error."""
    arguments = {"residual": factors == 2, "runs": factors, "skin": False, "step": 0.9, "rows": (9, 10)}
    given = problem(n_factors=factors, **arguments)
    found = invariants(native_chains(given, tmp_path, chains=8, warmup=500, draws=2000), factors)
    parts = [numpy_chain(given, seed, 300, 3000) for seed in range(2)]
    expected = invariants({name: np.stack([part[name] for part in parts]) for name in parts[0]}, factors)
    assert found.keys() == expected.keys()
    scores = {}
    for name in found:
        centre = expected[name].mean()
        for kind, of in (("mean", lambda x: x), ("variance", lambda x, c=centre: (x - c) ** 2)):
            one, other = of(found[name]), of(expected[name])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sizes = [block_statistics(np.ascontiguousarray(x[None]))["ess_bulk"][0] for x in (one, other)]
            error = np.sqrt(one.var() / sizes[0] + other.var() / sizes[1])
            scores[f"{kind} of {name}"] = float((one.mean() - other.mean()) / error)
    # About a hundred scores; 4.5 standard errors are passed by one in 10^5.
    assert max(map(abs, scores.values())) < 4.5, {name: z for name, z in scores.items() if abs(z) > 3.0}
