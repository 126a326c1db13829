"""Moves of the Gibbs sampler along directions that the likelihood hardly sees (DESIGN 5).

Each leaves the joint density of parameters, grid states and functionals invariant. *Scale*: the coarse component of
every path is stretched along a random direction of factor space and all loadings are shrunk by its inverse. *Shift*: a
constant is added to every path and taken from the offsets; exact Gaussian. *Rotation*: Haar, always accepted.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import Key
from msrm.gp.gibbs.latents import CoarseComponent, band_product
from msrm.gp.gibbs.state import Current
from msrm.nodes import GroupStatistics

__all__ = ["rotate", "scale", "shift"]

Array = NDArray[np.float64]


def scale(
    rng: np.random.Generator, current: Current, coarse: Mapping[str, CoarseComponent], step: float, count: int
) -> list[float]:
    """Metropolis steps of the scale move with ``log c ~ N(0, step^2)``; changes `current`.

    Paths become ``f + coarse(f) (A - 1)`` with ``A = 1 + (c - 1) u u'``, u uniform on the sphere, loadings
    ``W A^-1``. The Jacobian is ``c^(points - feature rows)``, points of all runs, null rows counted.

    Parameters
    ----------
    rng : Generator
    current : Current
        With latents drawn.
    coarse : {run: CoarseComponent}
    step : float
    count : int
        Steps, each along a new direction.

    Returns
    -------
    list of float
        Acceptance probabilities.
    """
    size = current.design.specification.n_factors
    sd = current.design.specification.priors.loading_sd
    split = {run: component.split(current.states[run]) for run, component in coarse.items()}
    components = {run: component for run, (component, _) in split.items()}
    quadratic = np.sum([form for _, form in split.values()], axis=0)
    parts = {
        (run, modality): terms.rows.apply(component)
        for run, component in components.items()
        for modality, terms in current.posteriors[run].nodes.items()
    }
    dimension = sum(len(c.held) for c in coarse.values()) - sum(current.design.feature_rows.values())
    probabilities = []
    for _ in range(count):
        direction = rng.standard_normal(size)
        direction /= np.linalg.norm(direction)
        log_c = step * rng.standard_normal()
        loadings = sum(np.square(rows[:, :size] @ direction).sum() for rows in current.state.rows.values())
        log_ratio = dimension * log_c - 0.5 * np.expm1(2 * log_c) * (direction @ quadratic @ direction)
        log_ratio -= 0.5 * np.expm1(-2 * log_c) * loadings / sd**2
        log_ratio += _misfit(current, parts, direction, np.expm1(-log_c))
        probabilities.append(float(np.exp(min(0.0, log_ratio))))
        if rng.uniform() < probabilities[-1]:
            outer = np.outer(direction, direction)
            more = np.expm1(log_c) * outer
            _stretch(current, components, parts, more)
            turn_loadings(current, np.eye(size) + np.expm1(-log_c) * outer)
            quadratic = (np.eye(size) + more) @ quadratic @ (np.eye(size) + more)
    return probabilities


def _misfit(current: Current, parts: Mapping[tuple[str, str], Array], direction: Array, shrink: float) -> float:
    """Change of the log likelihood under a scale move: what is not coarse in a functional is not stretched."""
    total = 0.0
    for (run, modality), part in parts.items():
        functionals, given = current.functionals[run][modality], current.statistics[run][modality]
        along = (functionals - part) @ direction
        pulled = (given.precision @ direction)[given.index]
        score = given.information @ direction - np.einsum("jk,jk->j", pulled, functionals)
        total += shrink * (along @ score) - 0.5 * shrink**2 * (along**2 @ (pulled @ direction))
    return float(total)


def _stretch(current: Current, components: dict[str, Array], parts: dict[tuple[str, str], Array], more: Array) -> None:
    """Add ``component @ more`` to every path and functional, and to the components themselves."""
    for run, component in components.items():
        added = component @ more
        current.states[run] = current.states[run] + added
        components[run] = component + added
    for (run, modality), part in parts.items():
        added = part @ more
        current.functionals[run][modality] = current.functionals[run][modality] + added
        parts[run, modality] = part + added


def turn_loadings(current: Current, right: Array) -> None:
    """Replace every loading W by ``W right`` and D, h accordingly; latents are the caller's."""
    size = len(right)
    for key, rows in current.state.rows.items():
        turned = np.array(rows)
        turned[:, :size] = rows[:, :size] @ right
        current.state.rows[key] = turned
    for groups in current.statistics.values():
        for modality, given in groups.items():
            groups[modality] = GroupStatistics(
                right.T @ given.precision @ right, given.index, given.information @ right, given.coefficients
            )


def shift(
    rng: np.random.Generator, current: Current, runs: Sequence[str], column: Mapping[Key, int], sd: float
) -> None:
    """Draw the common level of the paths of some runs against one offset column of each pair; changes `current`.

    ``states + psi (x) delta`` with psi = 1 for the values and 0 for the derivatives, ``b - gain_m w . delta``. The
    gain is the best single number for what the constant becomes at the nodes of modality m on the grid; the rest of it
    stays in the likelihood, so delta has an exact normal conditional.

    Parameters
    ----------
    rng : Generator
    current : Current
        With latents drawn.
    runs : sequence of str
    column : {(participant, modality): int}
        The offset column (0 the offset, then run offsets) that takes the level; pairs without one are held.
    sd : float
        Its prior sd.
    """
    design, size = current.design, current.design.specification.n_factors
    precision, pull = np.zeros((size, size)), np.zeros(size)
    patterns, seen = {}, {}
    for run in runs:
        posterior = current.posteriors[run]
        pattern = np.zeros(len(current.states[run]))
        pattern[:: posterior.prior.matern.dimension] = 1.0
        patterns[run] = pattern
        weighed = band_product(posterior.prior.band(), pattern)
        precision += (pattern @ weighed) * np.eye(size)
        pull -= weighed @ current.states[run]
        for modality, terms in posterior.nodes.items():
            seen[run, modality] = terms.rows.apply(pattern)
    gains = _gains(current, seen, column)
    for (run, modality), level in seen.items():
        given = current.statistics[run][modality]
        missed = level - gains[modality] * design.node_offsets(run, modality)
        score = given.information - np.einsum(
            "jik,jk->ji", given.precision[given.index], current.functionals[run][modality]
        )
        pull += missed @ score
        precision += np.einsum("j,jik->ik", missed**2, given.precision[given.index])
    for key, place in column.items():
        rows, gain = current.state.rows[key], gains[key[1]]
        loading, offset = rows[:, :size], rows[:, size + place]
        precision += (gain / sd) ** 2 * loading.T @ loading
        pull += gain / sd**2 * (offset @ loading)
    root = np.linalg.cholesky(precision)
    delta = np.linalg.solve(root.T, np.linalg.solve(root, pull) + rng.standard_normal(size))
    _raise(current, patterns, seen, gains, column, delta)


def _gains(current: Current, seen: Mapping[tuple[str, str], Array], column: Mapping[Key, int]) -> dict[str, float]:
    """By modality, the multiple of the offset that fits what a constant path becomes at its nodes."""
    products: dict[str, Array] = {}
    for (run, modality), level in seen.items():
        offsets = current.design.node_offsets(run, modality)
        products[modality] = products.get(modality, np.zeros(2)) + [level @ offsets, offsets @ offsets]
    taken = {modality for _, modality in column}
    return {m: float(top / bottom) if m in taken else 0.0 for m, (top, bottom) in products.items()}


def _raise(
    current: Current,
    patterns: Mapping[str, Array],
    seen: Mapping[tuple[str, str], Array],
    gains: Mapping[str, float],
    column: Mapping[Key, int],
    delta: Array,
) -> None:
    """Apply a shift of the paths by `delta`."""
    size = len(delta)
    for run, pattern in patterns.items():
        current.states[run] = current.states[run] + pattern[:, None] * delta
    for (run, modality), level in seen.items():
        current.functionals[run][modality] = current.functionals[run][modality] + level[:, None] * delta
        given = current.statistics[run][modality]
        moved = (given.precision @ delta)[given.index] * current.design.node_offsets(run, modality)[:, None]
        current.statistics[run][modality] = GroupStatistics(
            given.precision, given.index, given.information + gains[modality] * moved, given.coefficients
        )
    for key, place in column.items():
        rows = np.array(current.state.rows[key])
        rows[:, size + place] -= gains[key[1]] * (rows[:, :size] @ delta)
        current.state.rows[key] = rows


def rotate(rng: np.random.Generator, current: Current) -> None:
    """Turn factors by a Haar-distributed orthogonal matrix; changes `current`."""
    size = current.design.specification.n_factors
    turn, upper = np.linalg.qr(rng.standard_normal((size, size)))
    turn *= np.sign(np.diag(upper))
    for run, states in current.states.items():
        current.states[run] = states @ turn
        for modality, functionals in current.functionals[run].items():
            current.functionals[run][modality] = functionals @ turn
    turn_loadings(current, turn)
