"""NUTS of GP-MSRM: its density against brute force, its prior against its definition, its draws against Gibbs."""

from typing import Any

import numpy as np
import pytest
from gibbs_problems import Problem, problem
from gp_oracles import IMPULSE, finite_difference, gaussian_functional, gp_log_likelihood
from scipy import stats

from msrm.gp.dense import Dense
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.density import Density

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


def exact(small: Problem) -> Density:
    return density_of(small, Dense(small.layout.groups, small.specification.n_factors))


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
    packed = density.packed(x[None])[0]
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
    moved = np.array([density.packed((x + 1e-6 * unit)[None])[0] for unit in np.eye(len(x))])
    behind = np.array([density.packed((x - 1e-6 * unit)[None])[0] for unit in np.eye(len(x))])
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


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def small(request) -> Problem:
    return problem(**{"skin": False} | request.param)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_density_is_the_brute_force_one(small, seed):
    density = exact(small)
    x = random_point(density, small, seed)
    parameters = density.coordinates.layout.unpacked(density.packed(x[None])[0])
    found, prior = density.value_and_gradient(x)[0], density.log_prior(x[None])[0]
    # Jacobians by differences of 1e-6 are good to 1e-9 each.
    assert prior == pytest.approx(brute_log_prior(small, density, x), abs=1e-6)
    # Responses are cut at 6 widths, 2e-9 of the variance, in the package alone.
    assert found - prior == pytest.approx(brute_log_likelihood(small, parameters), abs=2e-6, rel=1e-7)


def test_the_gradient_is_that_of_differences(small):
    density = density_of(small)
    x = random_point(density, small, 2)
    gradient = density.value_and_gradient(x)[1]
    # Richardson in one random direction at a time: all coordinates enter each.
    rng = np.random.default_rng(3)
    for direction in [*rng.standard_normal((3, len(x))), *np.eye(len(x))[list(density.coordinates.scalars.values())]]:
        slope = finite_difference(
            lambda t, along=direction: density.value_and_gradient(x + t[0] * along)[0], np.zeros(1), (0,), 1e-4
        )
        assert slope == pytest.approx(gradient @ direction, rel=2e-6, abs=2e-5)


def test_both_likelihoods_give_the_same_density_and_gradient():
    small = problem(n_factors=2, wide=11, missing=0.1)
    host = density_of(small)
    compiled = Density(host.coordinates, small.backend, compiled=True)
    x = random_point(host, small, 4)
    (one, slope), (other, other_slope) = host.value_and_gradient(x), compiled.value_and_gradient(x)
    assert one == pytest.approx(other, rel=1e-9)
    np.testing.assert_allclose(slope, other_slope, rtol=1e-6, atol=1e-6 * np.abs(slope).max())


def test_a_state_comes_back_with_its_invariants(small):
    density = density_of(small)
    coordinates = density.coordinates
    back = coordinates.state(density.packed(coordinates.point(small.state)[None])[0], small.state)
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
