"""Moves of the Gibbs sampler along directions that the likelihood hardly sees (DESIGN 5).

Each leaves the joint density of parameters, grid states and functionals invariant. *Scale*: the coarse component of
every path is stretched along a random direction of factor space and all loadings are shrunk by its inverse. *Shift*: a
constant is added to every path and taken from the offsets; exact Gaussian. *Rotation*: Haar, always accepted.
"""

from collections.abc import Callable, Mapping, Sequence
from math import expm1

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import Key
from msrm.gp.gibbs.latents import CoarseComponent, band_product
from msrm.gp.gibbs.state import Current
from msrm.nodes import GroupStatistics

__all__ = ["rotate", "scale", "scale_density", "shift", "slice_step"]

Array = NDArray[np.float64]


def scale(rng: np.random.Generator, current: Current, coarse: Mapping[str, CoarseComponent], count: int) -> None:
    """Draw the scale of paths against loadings along random directions; changes `current`.

    Paths become ``f + coarse(f) (A - 1)`` with ``A = 1 + (c - 1) u u'``, u uniform on the sphere, loadings ``W A^-1``;
    log c is drawn from its density by slice sampling.

    Parameters
    ----------
    rng : Generator
    current : Current
        With latents drawn.
    coarse : {run: CoarseComponent}
    count : int
        Directions, one after the other.
    """
    size = current.design.specification.n_factors
    split = {run: component.split(current.states[run]) for run, component in coarse.items()}
    components = {run: component for run, (component, _) in split.items()}
    quadratic = np.sum([form for _, form in split.values()], axis=0)
    parts = {
        (run, modality): terms.rows.apply(component)
        for run, component in components.items()
        for modality, terms in current.posteriors[run].nodes.items()
    }
    points, features = sum(len(c.held) for c in coarse.values()), sum(current.design.feature_rows.values())
    for _ in range(count):
        direction = rng.standard_normal(size)
        direction /= np.linalg.norm(direction)
        density = scale_density(current, quadratic, parts, direction, points - features)
        # About four standard deviations where the data pin neither paths nor loadings.
        log_c = slice_step(rng, density, 3.0 / np.sqrt(points + features))
        outer = np.outer(direction, direction)
        more = np.expm1(log_c) * outer
        _stretch(current, components, parts, more)
        turn_loadings(current, np.eye(size) + np.expm1(-log_c) * outer)
        quadratic = (np.eye(size) + more) @ quadratic @ (np.eye(size) + more)


def scale_density(
    current: Current,
    quadratic: Array,
    parts: Mapping[tuple[str, str], Array],
    direction: Array,
    dimension: int,
) -> Callable[[float], float]:
    """Log density of log c along a direction, 0 where nothing moves.

    Parameters
    ----------
    current : Current
    quadratic : (K, K)
        Of the coarse components under their prior.
    parts : {(run, modality): (node, K)}
        What they are at the nodes: the rest of a functional is not stretched, which is all that the likelihood sees.
    direction : (K,)
        u, of unit length.
    dimension : int
        Coarse points less feature rows, null rows counted: the Jacobian is ``c^dimension``.
    """
    specification = current.design.specification
    size, sd = specification.n_factors, specification.priors.loading_sd
    prior = direction @ quadratic @ direction
    loadings = sum(np.square(rows[:, :size] @ direction).sum() for rows in current.state.rows.values()) / sd**2
    slope = curvature = 0.0
    for (run, modality), part in parts.items():
        functionals, given = current.functionals[run][modality], current.statistics[run][modality]
        along = (functionals - part) @ direction
        pulled = (given.precision @ direction)[given.index]
        slope += along @ (given.information @ direction - np.einsum("jk,jk->j", pulled, functionals))
        curvature += along**2 @ (pulled @ direction)

    def density(log_c: float) -> float:
        shrink = expm1(-log_c)
        log_prior = -0.5 * (expm1(2 * log_c) * prior + expm1(-2 * log_c) * loadings)
        return float(dimension * log_c + log_prior + shrink * slope - 0.5 * shrink**2 * curvature)

    return density


def slice_step(rng: np.random.Generator, log_density: Callable[[float], float], width: float) -> float:
    """A draw of x from where x is 0 that leaves its density invariant: Neal (2003), stepping out and shrinkage.

    Parameters
    ----------
    rng : Generator
    log_density : callable
        Up to a constant.
    width : float
        Of the first interval; any, but the same wherever x starts.
    """
    level = log_density(0.0) - rng.standard_exponential()
    low = -width * rng.uniform()
    high = low + width
    while log_density(low) > level:
        low -= width
    while log_density(high) > level:
        high += width
    while True:
        x = low + (high - low) * rng.uniform()
        if log_density(x) >= level:
            return x
        low, high = (x, high) if x < 0 else (low, x)


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
