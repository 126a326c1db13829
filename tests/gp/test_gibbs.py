"""Every step of the Gibbs sampler against brute-force dense algebra on tiny problems."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gibbs_problems import (
    Problem,
    Scripted,
    affine_moments,
    log_joint,
    log_normal,
    problem,
    residual_of,
    rows_matrix,
    state_covariance,
)
from scipy import stats

from msrm import LogNormal, Normal, Uniform
from msrm.gp.gibbs import moves, sweep
from msrm.gp.gibbs.conditionals import draw_noise, draw_null_factor, draw_rows
from msrm.gp.gibbs.latents import CoarseComponent, draw_functionals, draw_states
from msrm.gp.gibbs.state import Current
from msrm.gp.raw_rows import raw_rows

CASES = {
    "one run": {},
    "two runs": {"runs": 2},
    "one factor": {"n_factors": 1},
    "three factors": {"n_factors": 3},
    "masked": {"missing": 0.25},
    "no residual variances": {"residual": False},
    "run offsets": {"run_offsets": True, "runs": 2},
    "powers": {"powers": True},
    "wide": {"wide": 40},
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def small(request) -> Problem:
    return problem(**request.param)


def drawn(small: Problem, seed: int = 0) -> Current:
    """The start of a sweep with latents drawn."""
    current = small.sweeper.start(small.state)
    small.sweeper.draw_latents(np.random.default_rng(seed), current)
    return current


# Step 2: latents


def test_states_and_functionals_have_the_moments_of_dense_conditioning(small):
    current = small.sweeper.start(small.state)
    for run, posterior in current.posteriors.items():
        given, size = current.statistics[run], small.specification.n_factors
        names = list(posterior.nodes)
        # Prior of (states, functionals) of one factor, then conditioned on exp(-g'Dg/2 + h'g).
        prior = state_covariance(posterior.grid.times, small.state.length_scale)
        weights = np.concatenate([rows_matrix(posterior, name) for name in names])
        rho = np.concatenate([residual_of(posterior, name) for name in names])
        n = len(prior)
        joint = np.block([[prior, prior @ weights.T], [weights @ prior, weights @ prior @ weights.T + np.diag(rho)]])
        precision = np.concatenate([given[name].precision[given[name].index] for name in names])
        information = np.concatenate([given[name].information for name in names])
        nodes = len(weights)
        big = np.kron(joint, np.eye(size))
        pick = np.kron(np.eye(n + nodes)[n:], np.eye(size))
        block = np.zeros((nodes * size, nodes * size))
        for j in range(nodes):
            block[j * size : (j + 1) * size, j * size : (j + 1) * size] = precision[j]
        seen = big @ pick.T
        gain = seen @ np.linalg.inv(np.eye(nodes * size) + block @ pick @ seen)
        want_mean = gain @ information.ravel()
        want = big - gain @ block @ seen.T

        def draw(z, posterior=posterior, given=given, names=names, n=n, size=size, nodes=nodes):
            states = draw_states(Scripted([z[: n * size]]), posterior)
            parts, start = [], n * size
            for name in names:
                stop = start + len(posterior.nodes[name].rows) * size
                if hasattr(posterior.nodes[name], "shrink"):
                    parts.append(z[start:stop].reshape(-1, size))
                start = stop
            functionals = draw_functionals(Scripted(parts), posterior, states)
            return np.concatenate([states.ravel(), *(functionals[name].ravel() for name in names)])

        mean, covariance = affine_moments(draw, ((n + nodes) * size,))
        np.testing.assert_allclose(mean, want_mean, atol=2e-8)
        np.testing.assert_allclose(covariance, want, atol=2e-8)


def test_the_coarse_component_is_the_conditional_mean_and_its_prior_form(small):
    current = drawn(small)
    for run, posterior in current.posteriors.items():
        points = np.arange(1, posterior.grid.count, 3)
        component, form = CoarseComponent.of(posterior.prior, points).split(current.states[run])
        prior = state_covariance(posterior.grid.times, small.state.length_scale)
        held = 2 * points
        values = current.states[run][held]
        solved = np.linalg.solve(prior[np.ix_(held, held)], values)
        np.testing.assert_allclose(component, prior[:, held] @ solved, atol=1e-8)
        np.testing.assert_allclose(form, values.T @ solved, rtol=1e-7, atol=1e-8)


# Step 3: rows


def test_rows_have_the_moments_of_the_regression_of_each_feature(small):
    current = drawn(small)
    priors, size = small.specification.priors, small.specification.n_factors
    for key, pair in current.design.pairs.items():
        matrix = pair.matrix({run: current.functionals[run][key[1]] for run in pair.nodes})
        k = matrix.shape[1]
        prior = np.r_[np.full(size, priors.loading_sd), priors.offset_sd, np.full(k - size - 1, priors.run_offset_sd)]
        own, noise = pair.pair.n_coordinates, small.state.noise[key] / pair.power
        values = np.concatenate([block for _, block in pair.pair], axis=1)
        for pattern in range(len(pair.pair.patterns)):
            x = matrix[pair.pair.patterns[pattern]]
            covariance = np.linalg.inv(x.T @ x / noise + np.diag(prior**-2.0))
            for coordinate in np.flatnonzero(pair.pair.pattern == pattern)[:3]:
                y = values[pair.pair.patterns[pattern], coordinate]

                def draw(z, pair=pair, matrix=matrix, own=own, noise=noise, prior=prior, coordinate=coordinate):
                    normals = np.zeros((own, len(prior)))
                    normals[coordinate] = z
                    grams = pair.grams(matrix)
                    gram = grams[0] if pair.complete else grams[pair.pattern[:own]]
                    cross = pair.values[:, :own].T @ matrix
                    return draw_rows(Scripted([normals]), gram, cross, prior**-2.0, noise)[coordinate]

                mean, found = affine_moments(draw, (k,))
                np.testing.assert_allclose(mean, covariance @ x.T @ y / noise, atol=1e-10)
                np.testing.assert_allclose(found, covariance, atol=1e-10)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_the_null_factor_is_the_gram_matrix_of_so_many_rows(count):
    rng, k, n = np.random.default_rng(count), 3, 4000
    x = rng.standard_normal((6, k))
    prior, noise = np.array([1.0, 2.0, 0.5]), 0.7
    covariance = np.linalg.inv(x.T @ x / noise + np.diag(prior))
    grams = np.empty((n, k, k))
    for i in range(n):
        factor = draw_null_factor(rng, x.T @ x, prior, noise, count)
        grams[i] = factor @ factor.T
    # Wishart moments: E = count C, Var_ij = count (C_ij^2 + C_ii C_jj).
    spread = np.sqrt(count * (covariance**2 + np.outer(np.diag(covariance), np.diag(covariance))) / n)
    assert (np.abs(grams.mean(axis=0) - count * covariance) < 4.5 * spread).all()
    direction = np.array([0.3, -1.0, 2.0])
    scaled = np.einsum("i,nij,j->n", direction, grams, direction) / (direction @ covariance @ direction)
    assert stats.kstest(scaled, stats.chi2(count).cdf).pvalue > 1e-4
    assert np.linalg.matrix_rank(grams[0], tol=1e-10) == min(count, k)


# Step 4: noise


@pytest.mark.parametrize(
    ("count", "squares", "prior"),
    [
        (10.0, 7.0, LogNormal(-0.5, 1.0)),
        (0.0, 0.0, LogNormal(-0.5, 1.0)),
        (4e5, 3e5, LogNormal(-0.5, 1.0)),
        (5.0, 0.01, LogNormal(-0.5, 1.0).bounded(0.2, 0.5)),
        (2.0, 100.0, LogNormal(-0.5, 1.0).bounded(0.2, 0.5)),
        (3.0, 50.0, Uniform(0.1, 2.0)),
        (5.0, 5.0, Uniform(0.5, 9.0)),
        (1.0, 1.0, Normal(3.0, 0.5).bounded(0.01, 10.0)),
        (6.0, 0.3, Normal(3.0, 0.5).bounded(0.01, 10.0)),
    ],
)
def test_noise_has_its_exact_conditional(count, squares, prior):
    rng, v, draws = np.random.default_rng(7), prior.quantile(0.5), []
    for _ in range(6000):
        v = draw_noise(rng, count, squares, prior, float(v))
        draws.append(v)
    u = np.log(draws)
    low, high = u.min() - 2 * u.std(), u.max() + 2 * u.std()
    grid = np.linspace(max(low, np.log(max(prior.lower, 1e-300))), min(high, np.log(prior.upper)), 100_001)
    log_density = -0.5 * count * grid - 0.5 * squares * np.exp(-grid) + prior.log_density(np.exp(grid)) + grid
    log_density[~np.isfinite(log_density)] = -np.inf
    density = np.exp(log_density - log_density.max())
    cumulative = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    # Draws corrected by a Metropolis step repeat; every fifth is nearly independent.
    assert stats.kstest(np.interp(u[::5], grid, cumulative / cumulative[-1]), "uniform").pvalue > 1e-3


def test_the_noise_step_counts_null_features(small):
    current = drawn(small)
    for key, pair in current.design.pairs.items():
        want = sum(float(pair.pair.patterns[pattern].sum()) for pattern in pair.pair.pattern) + float(
            pair.pair.null_counts @ pair.pair.patterns.sum(axis=1)
        )
        assert sum(pair.scalars.values()) == want
        raw = sum(int(np.isfinite(stream.values).sum()) for stream in small.recording.streams(key[0], modality=key[1]))
        assert want == raw


def arguments_of(name: str, small: Problem, step: Any, current: Current) -> list[tuple[Any, ...]]:
    """What a step of the sweep calls a conditional with."""
    calls, real = [], getattr(sweep, name)

    def noted(rng, *rest):
        calls.append(rest)
        return real(rng, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, name, noted)
        step(np.random.default_rng(1), current)
    return calls


def plain_design(small: Problem, current: Current, pair: Any) -> np.ndarray:
    """[g 1] of every row of a pair, (row, K + 1)."""
    parts = []
    for run, span in pair.rows.items():
        times = small.layout.groups[run][pair.modality].times
        parts.append(current.functionals[run][pair.modality][np.searchsorted(times, pair.times[span])])
    g = np.concatenate(parts)
    return np.column_stack([g, np.ones(len(g))])


def test_the_sweep_draws_null_rows_given_the_functionals():
    small = problem(wide=40, runs=2)
    current = drawn(small)
    calls = iter(arguments_of("draw_null_factor", small, small.sweeper.draw_rows, current))
    priors, seen = small.specification.priors, 0
    for pair in small.layout.pairs:
        for pattern in np.flatnonzero(pair.null_counts):
            x = plain_design(small, current, pair)[pair.patterns[pattern]]
            gram, precisions, noise, count = next(calls)
            np.testing.assert_allclose(gram, x.T @ x, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(precisions, [priors.loading_sd**-2.0] * 2 + [priors.offset_sd**-2.0])
            assert (noise, count) == (small.state.noise[pair.key], pair.null_counts[pattern])
            seen += count
    assert seen > 0


def test_the_noise_step_sees_every_raw_residual():
    small = problem(wide=40, runs=2)
    current = drawn(small)
    small.sweeper.draw_rows(np.random.default_rng(2), current)
    rows = {key: np.array(value) for key, value in current.state.rows.items()}
    calls = arguments_of("draw_noise", small, small.sweeper.draw_noise, current)
    for (count, squares, *_), pair in zip(calls, small.layout.pairs, strict=True):
        streams = small.recording.streams(pair.participant, modality=pair.modality)
        values = np.concatenate([stream.values for stream in streams])
        raw = raw_rows(pair, rows[pair.key][None], [(0,)])[0]
        residual = values - plain_design(small, current, pair) @ raw.T
        assert count == values.size
        assert squares == pytest.approx(np.sum(residual**2), rel=1e-10)


# Step 5: moves


def scaled(small: Problem, current: Current, log_c: float, direction: np.ndarray) -> float:
    """Apply a scale move of a given size; the log density ratio that it is drawn by."""
    found = []

    def step(rng, density, width):
        found.append(density(log_c))
        return log_c

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "slice_step", step)
        moves.scale(Scripted([direction]), current, small.sweeper.coarse(current)[0], 1)
    return found[0]


@pytest.mark.parametrize("log_c", [0.3, -0.2])
def test_the_scale_move_has_the_ratio_of_joint_densities(small, log_c):
    current = drawn(small)
    before = log_joint(small, current)
    log_ratio = scaled(small, current, log_c, np.arange(1.0, small.specification.n_factors + 1))
    points = sum(len(places) for places in small.sweeper.levels[0].values())
    features = sum(len(pair.pattern) + int(pair.null_counts.sum()) for pair in small.layout.pairs)
    want = log_joint(small, current) - before + (points - features) * log_c
    assert log_ratio == pytest.approx(want, rel=1e-9, abs=1e-6)
    consistent(small, current)


def test_a_scale_move_can_be_taken_back(small):
    current = drawn(small)
    rows = {key: np.array(value) for key, value in current.state.rows.items()}
    states = {run: np.array(value) for run, value in current.states.items()}
    direction = np.ones(small.specification.n_factors)
    forth = scaled(small, current, 0.05, direction)
    assert scaled(small, current, -0.05, direction) == pytest.approx(-forth, abs=1e-7)
    for key, value in rows.items():
        np.testing.assert_allclose(current.state.rows[key], value, atol=1e-12)
    for run, value in states.items():
        np.testing.assert_allclose(current.states[run], value, atol=1e-10)


@pytest.mark.parametrize("width", [0.05, 1.0, 20.0])
def test_a_slice_step_keeps_its_density(width):
    # x is relative to where the chain is; the density is lopsided: log of a gamma variable.
    rng, here, draws = np.random.default_rng(8), 0.0, []
    for _ in range(9000):
        at = here
        here += moves.slice_step(rng, lambda x, at=at: 3.0 * (at + x) - np.exp(at + x), width)
        draws.append(np.exp(here))
    thinned = np.array(draws)[:: 60 if width < 0.1 else 6]
    assert stats.kstest(thinned, stats.gamma(3.0).cdf).pvalue > 1e-3


def consistent(small: Problem, current: Current) -> None:
    """D and h of the sweep are those of its rows."""
    for modality in current.design.modalities:
        fresh = current.design.statistics(modality, current.state.rows, current.state.noise)
        for run, given in fresh.items():
            held = current.statistics[run][modality]
            np.testing.assert_allclose(held.precision, given.precision, atol=1e-9)
            np.testing.assert_allclose(held.information, given.information, atol=1e-8)


def test_the_shift_has_its_exact_normal_conditional(small):
    runs, size = tuple(small.layout.groups), small.specification.n_factors
    column = dict.fromkeys(small.state.rows, 0)

    def shifted(z: np.ndarray) -> tuple[Current, np.ndarray]:
        current = drawn(small)
        before = {run: np.array(states) for run, states in current.states.items()}
        moves.shift(Scripted([z]), current, runs, column, small.specification.priors.offset_sd)
        return current, (current.states[runs[0]] - before[runs[0]])[0]

    start = drawn(small)
    base, mode = shifted(np.zeros(size))
    consistent(small, base)
    deltas = [shifted(unit)[1] - mode for unit in np.eye(size)]
    covariance = np.array(deltas).T @ np.array(deltas)
    origin = log_joint(small, start)
    # The log joint along the move is quadratic: its values at the mode and around it fix the conditional.
    precision = np.linalg.inv(covariance)
    assert log_joint(small, base) - origin == pytest.approx(0.5 * mode @ precision @ mode, abs=2e-6)
    for unit, delta in zip(np.eye(size), deltas, strict=True):
        moved, _ = shifted(2.0 * unit)
        assert log_joint(small, moved) - log_joint(small, base) == pytest.approx(
            -2.0 * delta @ precision @ delta, abs=2e-6
        )


def test_the_run_shift_has_its_exact_normal_conditional():
    small = problem(run_offsets=True, runs=2)
    size, run = 2, "run-2"
    column = {key: 1 + list(pair.pair.rows).index(run) for key, pair in drawn(small).design.pairs.items()}

    def shifted(z: np.ndarray) -> tuple[Current, np.ndarray]:
        current = drawn(small)
        before = np.array(current.states[run])
        moves.shift(Scripted([z]), current, (run,), column, small.specification.priors.run_offset_sd)
        return current, (current.states[run] - before)[0]

    base, mode = shifted(np.zeros(size))
    consistent(small, base)
    deltas = np.array([shifted(unit)[1] - mode for unit in np.eye(size)])
    precision = np.linalg.inv(deltas.T @ deltas)
    assert log_joint(small, base) - log_joint(small, drawn(small)) == pytest.approx(
        0.5 * mode @ precision @ mode, abs=2e-6
    )


def test_the_shift_moves_offsets_by_the_response_gain():
    small = problem(residual=False)
    current = drawn(small)
    before = {key: np.array(rows) for key, rows in current.state.rows.items()}
    level = {run: np.array(states) for run, states in current.states.items()}
    moves.shift(np.random.default_rng(0), current, ("run-1",), dict.fromkeys(before, 0), 1.3)
    delta = (current.states["run-1"] - level["run-1"])[0]
    for (participant, modality), rows in before.items():
        response = small.specification.responses[modality]
        gain = 1.0 if response.is_identity else response.gain(small.state.responses[modality])
        moved = current.state.rows[participant, modality][:, 2] - rows[:, 2]
        # The grid interpolates a constant to 1e-3 at this coarse spacing.
        np.testing.assert_allclose(moved, -gain * rows[:, :2] @ delta, rtol=5e-3, atol=1e-9)


def test_rotation_changes_no_density_and_is_orthogonal(small):
    current = drawn(small)
    before = log_joint(small, current)
    states = {run: np.array(value) for run, value in current.states.items()}
    moves.rotate(np.random.default_rng(3), current)
    assert log_joint(small, current) == pytest.approx(before, rel=1e-10)
    consistent(small, current)
    run = next(iter(states))
    np.testing.assert_allclose(current.states[run] @ current.states[run].T, states[run] @ states[run].T, atol=1e-8)


def test_rotation_is_haar():
    small = problem(n_factors=2)
    rng, angles, signs = np.random.default_rng(5), [], []
    current = drawn(small)
    for _ in range(800):
        before = current.states["run-1"]
        moves.rotate(rng, current)
        turn = np.linalg.lstsq(before, current.states["run-1"], rcond=None)[0]
        angles.append(np.arctan2(turn[1, 0], turn[0, 0]))
        signs.append(np.linalg.det(turn) > 0)
    assert stats.kstest((np.array(angles) + np.pi) / (2 * np.pi), "uniform").pvalue > 1e-3
    assert abs(np.mean(signs) - 0.5) < 4 * 0.5 / np.sqrt(800)


# Step 1: the marginal density


def dense_log_likelihood(small: Problem, current: Current) -> float:
    """Log density of all data with the latents integrated out, by one dense normal; white residuals, all powers 1.

    Null rows are explicit coordinates with data of zero, their number corrected in the constant.
    """
    state, size = current.state, small.specification.n_factors
    total = 0.0
    for run, posterior in current.posteriors.items():
        prior = state_covariance(posterior.grid.times, state.length_scale)
        y, mean, loads, noise, extra = [], [], [], [], 0.0
        for pair in small.layout.pairs:
            if run not in pair.rows:
                continue
            rows, v = state.rows[pair.key], state.noise[pair.key]
            span = pair.rows[run]
            values = np.concatenate([block for _, block in pair], axis=1)[span]
            spare = np.flatnonzero(pair.null_counts)
            pattern = np.concatenate([pair.pattern, np.repeat(spare, rows.shape[1])])
            data = np.hstack([values, np.zeros((len(values), rows.shape[1] * len(spare)))])
            times = small.layout.groups[run][pair.modality].times
            nodes = np.searchsorted(times, pair.times[span])
            weights, rho = rows_matrix(posterior, pair.modality), residual_of(posterior, pair.modality)
            missing_rows = int(pair.null_counts.sum()) - rows.shape[1] * len(spare)
            place = list(pair.rows).index(run)
            for f, row in enumerate(rows):
                kept = pair.patterns[pattern[f]][span]
                offset = row[size] + (row[size + 1 + place] if len(row) > size + 1 else 0.0)
                for n in np.flatnonzero(kept):
                    y.append(data[n, f])
                    mean.append(offset)
                    loads.append((pair.modality, nodes[n], weights[nodes[n]], rho[nodes[n]], row[:size]))
                    noise.append(v)
            extra += missing_rows * len(values) * np.log(2 * np.pi * v)
        latent = np.array([np.kron(weight, loading) for _, _, weight, _, loading in loads])
        covariance = latent @ np.kron(prior, np.eye(size)) @ latent.T + np.diag(noise)
        for i, (m, node, _, rho_i, w) in enumerate(loads):
            for j, (other, other_node, _, _, u) in enumerate(loads):
                if m == other and node == other_node:
                    covariance[i, j] += rho_i * (w @ u)
        total += log_normal(np.array(y) - np.array(mean), covariance) - 0.5 * extra
    return total


@pytest.mark.parametrize("name", ["one run", "two runs", "masked", "no residual variances", "run offsets"])
def test_a_response_step_accepts_with_the_ratio_of_marginal_densities(name):
    small = problem(**CASES[name] | {"wide": 7})
    start = small.sweeper.start(small.state)
    assert start.log_likelihood == pytest.approx(dense_log_likelihood(small, start), rel=1e-8)
    size, sd = small.specification.n_factors, small.specification.priors.loading_sd
    for block, proposal in zip(small.sweeper.blocks, small.sweeper.proposals, strict=True):
        modality = block.modalities[0]
        script = Scripted([np.full(len(block.names), 0.7)], [0.0])
        moved = small.sweeper.marginal.step(script, start, block, proposal, tune=False)
        here, there = block.coordinates(start.state), block.coordinates(moved.state)
        assert not np.allclose(here, there)
        key = next(key for key in start.state.rows if key[1] == modality)
        kappa = moved.state.rows[key][0, 0] / start.state.rows[key][0, 0]
        assert abs(kappa - 1) > 1e-3 or "lag" in block.names
        features = sum(
            len(pair.pattern) + pair.null_counts.sum() for pair in small.layout.pairs if pair.modality == modality
        )
        ratio = dense_log_likelihood(small, moved) - dense_log_likelihood(small, start)
        for one, sign in ((moved, 1.0), (start, -1.0)):
            for parameter in block.names:
                _, m, name_of = parameter.split("/")
                free = small.specification.responses[m].free[name_of]
                value = one.state.parameter(parameter)
                ratio += sign * float(free.bounded_prior.log_density(value))
                if name_of in small.specification.responses[m].positive:
                    ratio += sign * np.log(value)
            squares = sum(np.sum(rows[:, :size] ** 2) for k, rows in one.state.rows.items() if k[1] == modality)
            ratio -= sign * 0.5 * squares / sd**2
        ratio += features * size * np.log(kappa)
        just_below, just_above = np.exp(min(ratio, 0.0)) * (1 - 1e-6), np.exp(min(ratio, 0.0)) * (1 + 1e-6)
        for uniform, accepted in ((just_below, True), (just_above, False)):
            if uniform >= 1:
                continue
            script = Scripted([np.full(len(block.names), 0.7)], [uniform])
            result = small.sweeper.marginal.step(script, start, block, proposal, tune=False)
            assert (result is not start) == accepted


@pytest.mark.parametrize("free", ["length scale", "timescale"])
def test_the_other_blocks_accept_with_the_ratio_of_marginal_densities(free):
    small = problem(free_length_scale=free == "length scale", ou=free == "timescale", n_factors=1)
    start = small.sweeper.start(small.state)
    place = next(i for i, block in enumerate(small.sweeper.blocks) if not block.names[0].startswith("response"))
    block, proposal = small.sweeper.blocks[place], small.sweeper.proposals[place]
    moved = small.sweeper.marginal.step(Scripted([np.array([3.0])], [0.0]), start, block, proposal, tune=False)
    # What the step carries along must equal a fresh evaluation at the new state.
    fresh = small.sweeper.start(moved.state)
    assert moved.log_likelihood == pytest.approx(fresh.log_likelihood, rel=1e-11)
    change = moved.log_likelihood - start.log_likelihood
    value, before = moved.state.parameter(block.names[0]), start.state.parameter(block.names[0])
    prior = block.priors[0]
    change += float(prior.log_density(value) - prior.log_density(before)) + np.log(value / before)
    if free == "timescale":
        noise = small.specification.priors.noise
        for key in (key for key in start.state.noise if key[1] == block.modalities[0]):
            old, new = start.state.noise[key], moved.state.noise[key]
            assert old != new
            change += float(noise.log_density(new) - noise.log_density(old)) + np.log(new / old)
    for modality in block.scaled:
        keys = [key for key in start.state.rows if key[1] == modality]
        kappa = moved.state.rows[keys[0]][0, 0] / start.state.rows[keys[0]][0, 0]
        assert abs(kappa - 1) > 1e-4
        for key in keys:
            old, new = start.state.rows[key][:, :1], moved.state.rows[key][:, :1]
            pair = next(pair for pair in small.layout.pairs if pair.key == key)
            change -= 0.5 * (np.sum(new**2) - np.sum(old**2)) / small.specification.priors.loading_sd**2
            change += (len(pair.pattern) + pair.null_counts.sum()) * np.log(kappa)
    edge = np.exp(min(change, 0.0))
    script = Scripted([np.array([3.0])], [edge * (1 - 1e-6)])
    assert small.sweeper.marginal.step(script, start, block, proposal, tune=False) is not start
    if change < 0:
        script = Scripted([np.array([3.0])], [edge * (1 + 1e-6)])
        assert small.sweeper.marginal.step(script, start, block, proposal, tune=False) is start


def test_a_proposal_outside_its_bounds_is_refused_without_an_evaluation():
    small = problem()
    start = small.sweeper.start(small.state)
    block, proposal = small.sweeper.blocks[0], small.sweeper.proposals[0]
    script = Scripted([np.full(2, 1e3)], [0.0])
    assert small.sweeper.marginal.step(script, start, block, proposal, tune=False) is start


def test_rotated_and_raw_features_have_the_same_marginal_and_joint_moves():
    """The rotated problem with its null block stands for the raw one: same likelihood, same acceptance."""
    raw, rotated = problem(reduce=False, wide=12), problem(reduce=True, wide=12)
    rows = {}
    for pair in rotated.layout.pairs:
        own = raw.state.rows[pair.key]
        inside = pair.reduced.to_reduced(own)
        rest = own - pair.reduced.to_features(inside)
        gram = rest.T @ rest
        spare = int(np.count_nonzero(pair.null_counts))
        rows[pair.key] = np.vstack([inside, np.linalg.cholesky(gram).T]) if spare else inside
    state = replace(raw.state, rows=rows)
    one, other = raw.sweeper.start(raw.state), rotated.sweeper.start(state)
    assert one.log_likelihood == pytest.approx(other.log_likelihood, rel=1e-11)
    for block, proposal in zip(raw.sweeper.blocks, raw.sweeper.proposals, strict=True):
        script = [Scripted([np.full(len(block.names), 0.7)], [0.0]) for _ in range(2)]
        moved = raw.sweeper.marginal.step(script[0], one, block, proposal, tune=False)
        turned = rotated.sweeper.marginal.step(script[1], other, block, proposal, tune=False)
        assert moved.log_likelihood == pytest.approx(turned.log_likelihood, rel=1e-10)
