"""The compiled Gibbs sampler's exact conditionals and moves: rows, null block, noise, scale, shift, rotation.

The traced twins of `msrm.gp.gibbs.conditionals` and `msrm.gp.gibbs.moves`, written without data-dependent loops: an
accelerator would return to the host in each. Where a rejection sampler ends without a draw, with a probability below
1e-12, the value stays what it was, which keeps the density invariant as well.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.blocks import inverse_factor
from msrm.gp.gibbs.native_data import Stack, design_matrix
from msrm.gp.jax_statespace import NodeStatistics
from msrm.priors import LogNormal

__all__ = [
    "ScaleTerms",
    "draw_noise",
    "draw_rows",
    "haar",
    "scale_density",
    "scale_step",
    "slice_points",
    "sliced",
    "stretched",
]

_TRIES = 16  # of a rejection sampler that accepts 88 %
_MODE_STEPS = 16
_SHRINKS = 24  # of a slice; each halves the interval on average
_TANGENT = float(np.sqrt(2.0))


def draw_rows(
    key: Array, stack: Stack, given: dict[str, Any], functionals: Array, noise: Array, precisions: Array
) -> Array:
    """Rows (pair, coordinate, k) given the functionals: N(P^-1 X'y / v, P^-1), and a factor of the null rows' Gram.

    Parameters
    ----------
    key : PRNG key
    stack, given
        Pairs and their arrays.
    functionals : (node, K)
    noise : (pair,)
        Of all pairs.
    precisions : (k,)
        Prior precisions.
    """
    matrix, weight = design_matrix(given, functionals), stack.weights(noise)[:, None, None]
    across = jnp.swapaxes(matrix, 1, 2)
    inverse = inverse_factor(weight * (across @ matrix) + jnp.diag(precisions), None)[0]
    cross = weight * (jnp.swapaxes(given["values"], 1, 2) @ matrix)
    normal, null = jax.random.split(key)
    half = cross @ jnp.swapaxes(inverse, 1, 2) + jax.random.normal(normal, cross.shape)
    rows = half @ inverse
    if not stack.has_null:
        return rows
    # F = L^-T B with B B' Wishart: the rows of F' stand for the null features.
    stands = jnp.swapaxes(_bartlett(null, stack.null, len(precisions)), 1, 2) @ inverse
    return jnp.concatenate([rows, stands], 1)


def _bartlett(key: Array, counts: tuple[int, ...], k: int) -> Array:
    """Factors B (pair, k, k) of Wishart matrices of identity scale; normal columns where there are fewer than k."""
    below, within = jax.random.split(key)
    normals = jax.random.normal(below, (len(counts), k, k))
    # Sums of squared normals, for their exactness: a gamma sampler loops until it accepts.
    squares = jax.random.normal(within, (len(counts), k, max(counts))) ** 2
    degrees = np.maximum(np.array(counts)[:, None] - np.arange(k), 0)
    spread = jnp.sqrt((squares * (np.arange(max(counts)) < degrees[..., None])).sum(-1))
    triangle = jnp.tril(normals, -1) + spread[:, :, None] * jnp.eye(k)
    few = normals * (np.arange(k) < np.array(counts)[:, None, None])
    return jnp.where((np.array(counts) >= k)[:, None, None], triangle, few)


def draw_noise(key: Array, counts: Array, squares: Array, prior: LogNormal, current: Array) -> Array:
    """Noise variances given residuals: exact rejection under tangents of the log-concave density of log v.

    Parameters
    ----------
    counts, squares : (stream,)
        Residuals and their sums of squares, times powers.
    prior : LogNormal
    current : (stream,)
        Kept where no try is accepted.
    """
    mean, variance = prior.mean, prior.sd**2

    def density(u: Array) -> Array:
        return -0.5 * counts * u - 0.5 * squares * jnp.exp(-u) - 0.5 * (u - mean) ** 2 / variance

    def first(u: Array) -> Array:
        return -0.5 * counts + 0.5 * squares * jnp.exp(-u) - (u - mean) / variance

    def second(u: Array) -> Array:
        return -0.5 * squares * jnp.exp(-u) - 1.0 / variance

    mode = jnp.log(jnp.maximum(squares, 1e-300) / counts)
    for _ in range(_MODE_STEPS):
        # The slope is convex: from the left Newton's steps are never too long.
        mode = mode + jnp.clip(-first(mode) / second(mode), -1.0, 1.0)
    top, width = density(mode), _TANGENT / jnp.sqrt(-second(mode))
    left, right = mode - width, mode + width
    rise, fall = first(left), first(right)
    a, b = left + (top - density(left)) / rise, right + (top - density(right)) / fall
    areas = 1.0 / rise, b - a, -1.0 / fall
    picks, along, accept = jax.random.uniform(key, (3, _TRIES, len(counts)), minval=1e-300)
    pick = picks * sum(areas)
    u = jnp.where(
        pick < areas[0],
        a + jnp.log(along) / rise,
        jnp.where(pick < areas[0] + areas[1], a + along * (b - a), b + jnp.log(along) / fall),
    )
    height = jnp.where(u < a, top + rise * (u - a), jnp.where(u > b, top + fall * (u - b), top))
    accepted = jnp.log(accept) < density(u) - height
    chosen = jnp.take_along_axis(u, jnp.argmax(accepted, 0)[None], 0)[0]
    return jnp.where(accepted.any(0), jnp.exp(chosen), current)


def haar(key: Array, size: int) -> Array:
    """A Haar-distributed orthogonal matrix: Gram-Schmidt, twice, of normals."""
    normals = jax.random.normal(key, (size, size))
    columns: list[Array] = []
    for place in range(size):
        column = normals[place]
        for _ in range(2):
            for other in columns:
                column = column - (other @ column) * other
            column = column / jnp.linalg.norm(column)
        columns.append(column)
    return jnp.stack(columns)


class ScaleTerms(NamedTuple):
    """What the density of a scale move depends on.

    Attributes
    ----------
    path : (block, K, point state)
        The grid states.
    functionals : {modality: (node, K)}
    statistics : {modality: NodeStatistics}
    component : (block, K, point state)
        The coarse component of the path.
    parts : {modality: (node, K)}
        What it is at the nodes.
    quadratic : (K, K)
        Its prior's quadratic form.
    gram : (K, K)
        Sum of w w' over all rows.
    turn : (K, K)
        What the loadings have been multiplied by so far.
    """

    path: Array
    functionals: dict[str, Array]
    statistics: dict[str, NodeStatistics]
    component: Array
    parts: dict[str, Array]
    quadratic: Array
    gram: Array
    turn: Array


def scale_step(
    direction: Array, points: Array, terms: ScaleTerms, dimension: Array, width: Array, sd: float
) -> ScaleTerms:
    """One step of `msrm.gp.gibbs.moves.scale` along a direction of any length, log c drawn by a slice without stepping
    out; ``points`` are of `slice_points`."""
    direction = direction / jnp.linalg.norm(direction)
    return stretched(terms, direction, sliced(points, scale_density(terms, direction, dimension, sd), width))


def scale_density(terms: ScaleTerms, direction: Array, dimension: Array | int, sd: float) -> Callable[[Array], Array]:
    """Log density of log c along a direction, 0 where nothing moves (`msrm.gp.gibbs.moves.scale_density`)."""
    prior, loadings = direction @ terms.quadratic @ direction, direction @ terms.gram @ direction / sd**2
    slope, curvature = jnp.zeros(()), jnp.zeros(())
    for modality, part in terms.parts.items():
        functionals, one = terms.functionals[modality], terms.statistics[modality]
        along = (functionals - part) @ direction
        pulled = one.precision @ direction
        slope = slope + along @ (one.information @ direction - (pulled * functionals).sum(-1))
        curvature = curvature + (along**2 * (pulled @ direction)).sum()

    def density(log_c: Array) -> Array:
        # One exponential: what its rounding loses of these sums is far below a nat.
        stretch = jnp.exp(log_c)
        shrink = 1.0 / stretch - 1.0
        log_prior = -0.5 * ((stretch * stretch - 1.0) * prior + shrink * (shrink + 2.0) * loadings)
        return dimension * log_c + log_prior + shrink * slope - 0.5 * shrink**2 * curvature

    return density


def stretched(terms: ScaleTerms, direction: Array, log_c: Array) -> ScaleTerms:
    """Coarse components times c along a direction, loadings times 1 / c."""
    size = len(direction)
    outer = jnp.outer(direction, direction)
    more, less = jnp.expm1(log_c) * outer, jnp.eye(size) + jnp.expm1(-log_c) * outer
    added = jnp.einsum("nkp,kl->nlp", terms.component, more)
    parts = {modality: part @ more for modality, part in terms.parts.items()}
    whole = jnp.eye(size) + more
    return ScaleTerms(
        terms.path + added,
        {modality: terms.functionals[modality] + part for modality, part in parts.items()},
        {modality: turned(one, less) for modality, one in terms.statistics.items()},
        terms.component + added,
        {modality: terms.parts[modality] + part for modality, part in parts.items()},
        whole @ terms.quadratic @ whole,
        less.T @ terms.gram @ less,
        terms.turn @ less,
    )


def turned(one: NodeStatistics, right: Array) -> NodeStatistics:
    """D and h where every loading W is replaced by ``W right``."""
    return NodeStatistics(right.T @ one.precision @ right, one.information @ right)


def slice_points(key: Array, count: int) -> Array:
    """What ``count`` slices are made of, (count, 1 + tries): the logarithm of the level below the density where x is 0,
    and the points that shrinkage of an interval of length 1 around 0 tries while none of them is met.

    An interval shrinks to the last point whatever the density there, so that all points are known beforehand.
    """
    uniforms = jax.random.uniform(key, (_SHRINKS + 2, count), minval=1e-300)
    low, points = -uniforms[1], []
    high = low + 1.0
    for place in range(2, _SHRINKS + 2):
        x = low + (high - low) * uniforms[place]
        low, high = jnp.where(x < 0.0, x, low), jnp.where(x < 0.0, high, x)
        points.append(x)
    return jnp.stack([jnp.log(uniforms[0]), *points], -1)


def sliced(points: Array, density: Callable[[Array], Array], width: Array) -> Array:
    """A draw of x from where x is 0 (Neal 2003, figures 3 to 5 with one interval): shrinkage, a fixed number of times.

    Where no point of the slice is met x stays 0; every other transition is as likely backwards.
    """
    tried = width * points[1:]
    inside = density(tried) >= density(jnp.zeros(())) + points[0]
    return jnp.where(inside.any(), tried[jnp.argmax(inside)], 0.0)
