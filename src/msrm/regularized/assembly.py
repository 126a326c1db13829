"""From the best point of a search to the fitted model: factors in a fixed order and orientation, raw loadings."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msrm.recording import Recording
from msrm.regularized.filters import Pair
from msrm.regularized.gauge import Latents, principal
from msrm.regularized.model import Model, PairModel, RunPaths
from msrm.regularized.objective import Objective
from msrm.regularized.problem import Problem, Training
from msrm.regularized.settings import Settings
from msrm.runtime import blas_threads

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Assembled:
    """A model with what the fit says about itself.

    Attributes
    ----------
    model : Model
    parts : dict from str to float
        Every term of the objective.
    explained : dict from pair to (factor,)
        Share of the pair's standardized variance that each factor alone explains.
    total : (factor,)
        The same over all pairs, weighted as in the objective.
    """

    model: Model
    parts: dict[str, float]
    explained: dict[Pair, Array]
    total: Array


def assembled(
    problem: Problem, training: Training, recording: Recording, settings: Settings, loading: Array, vector: Array
) -> Assembled:
    """The fitted model at the best loadings (column, K) and response parameters found."""
    objective = Objective(problem)
    with blas_threads(1):
        loading, latents = principal(problem, loading, objective.latents(loading, vector))
        _, energy = objective.column_sums(loading, vector, latents)
        loading, latents = _ordered(problem, loading, latents, energy)
    raw = {pair: training.reduced[pair].to_features(loading[c]) for pair, c in _pairs(problem)}
    signs = _signs(problem, raw)
    loading, latents = _turned(problem, loading, latents, signs)
    with blas_threads(1):
        errors, energy = objective.column_sums(loading, vector, latents)
        parts = objective.parts(loading, vector, latents)
    shares = _pair_energies(problem)
    values = problem.filters.values(vector)
    pairs, explained = {}, {}
    for i, (pair, columns) in enumerate(_pairs(problem)):
        weight = sum(f for (p, _, m), f in training.factors.items() if (p, m) == pair)
        pairs[pair] = PairModel(
            recording.features(*pair),
            raw[pair] * signs[i],
            training.scales[pair].mean,
            training.scales[pair].sd,
            settings.responses[pair[1]].with_values(values[problem.filters.of_pair[pair]]),
            float(errors[columns].sum()) / weight,
        )
        explained[pair] = energy[columns].sum(0) / shares[i]
    # Participants first, as recordings list them.
    pairs = {pair: pairs[pair] for pair in recording.pairs if pair in pairs}
    model = Model(
        settings,
        pairs,
        _runs(problem, training, latents),
        training.factors,
        len({(p, r) for p, r, _ in training.factors}),
        problem.systems[0].weight,
        training.ridges,
    )
    return Assembled(model, parts, explained, energy.sum(0) / problem.energy)


def _pairs(problem: Problem) -> list[tuple[Pair, slice]]:
    return list(zip(problem.pairs, problem.columns, strict=True))


def _ordered(problem: Problem, loading: Array, latents: Latents, energy: Array) -> tuple[Array, Latents]:
    """Factors of each gauge by the energy they explain, the largest first."""
    loading, paths = loading.copy(), list(latents)
    for pairs, systems in problem.gauges:
        order = np.argsort(-sum(energy[problem.columns[i]].sum(0) for i in pairs), kind="stable")
        for i in pairs:
            loading[problem.columns[i]] = loading[problem.columns[i]][:, order]
        for s in systems:
            paths[s] = paths[s][..., order]
    return loading, tuple(paths)


def _signs(problem: Problem, raw: dict[Pair, Array]) -> Array:
    """Signs (pair, factor) that make the largest loading of each factor of each gauge positive."""
    signs = np.ones((len(problem.pairs), next(iter(raw.values())).shape[1]))
    for pairs, _ in problem.gauges:
        stacked = np.concatenate([np.nan_to_num(raw[problem.pairs[i]]) for i in pairs])
        largest = stacked[np.abs(stacked).argmax(0), np.arange(stacked.shape[1])]
        signs[list(pairs)] = np.where(largest < 0, -1.0, 1.0)
    return signs


def _turned(problem: Problem, loading: Array, latents: Latents, signs: Array) -> tuple[Array, Latents]:
    loading, paths = loading.copy(), list(latents)
    for pairs, systems in problem.gauges:
        for i in pairs:
            loading[problem.columns[i]] *= signs[i]
        for s in systems:
            paths[s] = paths[s] * signs[pairs[0]]
    return loading, tuple(paths)


def _pair_energies(problem: Problem) -> Array:
    """sum c y^2 of each pair."""
    out = np.zeros(len(problem.pairs))
    for groups in problem.groups:
        for group in groups:
            columns = group.column_energies()
            for block in group.blocks:
                out[block.pair] += columns[block.own].sum()
    return out


def _runs(problem: Problem, training: Training, latents: Latents) -> dict[str, RunPaths]:
    """Paths by run; the systems of one run side by side."""
    out: dict[str, RunPaths] = {}
    for system, paths in zip(problem.systems, latents, strict=True):
        if system.run in out:
            before = out[system.run]
            paths = np.concatenate([before.paths, paths], axis=1)
            out[system.run] = replace(before, participants=(*before.participants, *system.participants), paths=paths)
        else:
            out[system.run] = RunPaths(system.participants, system.grid, training.limits[system.run], paths)
    return out
