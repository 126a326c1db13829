"""A linear map that makes the posterior nearly round, so that a diagonal metric is enough: ``x = centre + T z``.

Given the latents the posterior of a row [w b c...] is normal with precision ``P = X'X / v + 1/s^2``, X the
functionals and offset columns of its entries, and that of log v has precision N/2: B whitens these, block by block.
With the latents integrated out a few directions are softer, those that trade loadings, offsets and responses against
the latents of all streams. Lanczos steps on the whitened Hessian H, products by differences of the gradient, find them:

    T = B (1 + U (|theta|^-1/2 - 1) U'),    H U ~ U theta.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray
from scipy.sparse import csc_array
from scipy.sparse.linalg import spsolve

from msrm.gp.data import Key
from msrm.gp.gibbs.state import Current
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.nuts.coordinates import Coordinates

__all__ = ["Whitening", "whitening_at"]

Vector = NDArray[np.float64]
_LANCZOS = 60
_DIFFERENCE = 1e-2  # in whitened units: third derivatives and rounding both stay below 1e-3
_SCALAR_DIFFERENCE = 1e-4  # of a scalar's coordinate, which is of order 1 over its bounds
_SOFTEST = 1e-3  # |theta| below it is taken for it: no direction gets more than 30 times wider
_KEPT = 0.8  # directions of larger theta stay as they are


class Whitening(NamedTuple):
    """T and its centre (a pytree).

    Attributes
    ----------
    centre : (coordinate,)
    weights : (coordinate, k)
        Rows of B.
    columns : (coordinate, k) int
        The z that each weight is for.
    directions : (coordinate, q)
        U.
    stretch : (q,)
        ``|theta|^-1/2 - 1``.
    """

    centre: Any
    weights: Any
    columns: Any
    directions: Any
    stretch: Any

    def x(self, z: Array) -> Array:
        """x of z (traced)."""
        return self.centre + self.moved(z, jnp)

    def moved(self, z: Any, xp: Any = np) -> Any:
        """T z."""
        z = z + self.directions @ (self.stretch * (self.directions.T @ z))
        return xp.sum(self.weights * z[self.columns], 1)

    def pulled(self, gradient: Vector) -> Vector:
        """T' times a gradient in x."""
        out = np.zeros(len(gradient))
        np.add.at(out, self.columns, self.weights * gradient[:, None])
        return out + self.directions @ (self.stretch * (self.directions.T @ out))

    def inverse(self, x: Vector) -> Vector:
        """z of x."""
        rows = np.repeat(np.arange(len(x)), self.columns.shape[1])
        matrix = csc_array((self.weights.ravel(), (rows, self.columns.ravel())), shape=(len(x), len(x)))
        z = spsolve(matrix, x - self.centre)
        return z + self.directions @ ((1.0 / (1.0 + self.stretch) - 1.0) * (self.directions.T @ z))


def whitening_at(
    coordinates: Coordinates,
    sweeper: Sweeper,
    current: Current,
    points: Sequence[Vector],
    gradient: Callable[[Vector], Vector],
) -> Whitening:
    """The map for typical points of the posterior.

    Parameters
    ----------
    coordinates : Coordinates
    sweeper : Sweeper
    current : Current
        At one of them, latents drawn.
    points : sequence of (coordinate,)
        x of some: the Hessian is averaged over them, for its posterior mean is positive definite.
    gradient : callable
        Of the log density in x.
    """
    x = coordinates.point(current.state)
    blocks = _Blocks(coordinates, x)
    matrices = sweeper.matrices(current)
    turn = coordinates.turn(current.state)
    for key, pair in current.design.pairs.items():
        matrix = np.array(matrices[key])
        matrix[:, : len(turn)] = matrix[:, : len(turn)] @ turn
        grams = pair.grams(matrix) * pair.power / current.state.noise[key]
        blocks.rows(key, tuple(pair.pair.rows), grams)
        blocks.noise(key, pair.power * sum(pair.scalars.values()))
    for name, at in coordinates.places.items():
        if not name.startswith("noise/"):
            blocks.scalar(at, gradient)
    bare = blocks.made()
    return bare._replace(**_softened(bare, points, gradient))


def _softened(bare: Whitening, points: Sequence[Vector], gradient: Callable[[Vector], Vector]) -> Mapping[str, Vector]:
    """Soft directions of the whitened Hessian and their stretches."""

    def product(direction: Vector) -> Vector:
        step, total = _DIFFERENCE * bare.moved(direction), np.zeros(len(direction))
        for x in points:
            total += gradient(x - step) - gradient(x + step)
        return bare.pulled(total) / (2.0 * _DIFFERENCE * len(points))

    values, vectors = _lanczos(product, len(bare.centre))
    soft = values < _KEPT
    return {
        "directions": vectors[:, soft],
        "stretch": 1.0 / np.sqrt(np.maximum(np.abs(values[soft]), _SOFTEST)) - 1.0,
    }


def _lanczos(product: Callable[[Vector], Vector], size: int) -> tuple[Vector, Vector]:
    """Ritz values and vectors of a symmetric operator, fully reorthogonalized, from a fixed start."""
    basis = [np.random.default_rng(0).standard_normal(size)]
    basis[0] /= np.linalg.norm(basis[0])
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        new = product(basis[-1])
        diagonal.append(float(new @ basis[-1]))
        made = np.array(basis)
        for _ in range(2):
            new -= made.T @ (made @ new)
        length = float(np.linalg.norm(new))
        # A product that is not finite ends the search; what was found before is good.
        if len(basis) == min(_LANCZOS, size) or not length > 1e-8 or not np.isfinite(length):
            break
        beside.append(length)
        basis.append(new / length)
    values, turn = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return values, made.T @ turn


class _Blocks:
    """B row by row: Cholesky factors of the conditional covariances."""

    def __init__(self, coordinates: Coordinates, x: Vector) -> None:
        self.coordinates, self.x = coordinates, x
        size = coordinates.size
        self.place = np.full(coordinates.layout.size, -1)
        self.place[coordinates.where] = np.arange(size)
        self.weights: list[Vector] = [np.ones(1) for _ in range(size)]
        scalars, at = coordinates.scalars, coordinates.scalar_places
        there = jnp.asarray(x[at])
        # d log value / d x
        rates = np.exp(np.asarray(scalars.log_slope(there))) / np.abs(np.asarray(scalars.value(there)))
        self.log_rates = dict(zip(at.tolist(), rates.tolist(), strict=True))
        self.columns: list[NDArray[np.intp]] = [np.array([i]) for i in range(size)]

    def rows(self, key: Key, runs: tuple[str, ...], grams: Vector) -> None:
        """Rows of a pair, X'X / v (pattern, k, k) of their mask patterns given."""
        coordinates = self.coordinates
        pair = next(pair for pair in coordinates.nodes.pairs if pair.key == key)
        roots: dict[tuple[int, ...], Vector] = {}
        for pattern, where in zip(pair.pattern, coordinates.row_places(key, runs), strict=True):
            own = self.place[where]
            free = np.flatnonzero(own >= 0)
            place = own[free]
            plain = not (coordinates.degrees[place] > 0.0).any()
            known = (int(pattern), *free.tolist())
            if plain and known in roots:
                root = roots[known]
            else:
                root = self._root(place, grams[pattern][np.ix_(free, free)])
                if plain:
                    roots[known] = root
            for i, at in enumerate(place):
                self.weights[at], self.columns[at] = root[i, : i + 1], place[: i + 1]

    def _root(self, place: NDArray[np.intp], gram: Vector) -> Vector:
        """Cholesky factor of the covariance of one row's coordinates."""
        coordinates = self.coordinates
        degrees, scale = coordinates.degrees[place], np.ones(len(place))
        diagonal = degrees > 0.0
        # d value / d x; for the logarithm u of a diagonal the mode balances n u, which adds n to the curvature.
        scale[diagonal] = coordinates.sd[place][diagonal] * np.exp(self.x[place][diagonal])
        precision = (gram + np.diag(coordinates.sd[place] ** -2.0)) * scale * scale[:, None] + np.diag(degrees)
        return np.linalg.cholesky(np.linalg.inv(precision))

    def noise(self, key: Key, scalars: float) -> None:
        """The noise variance of a pair: log v has precision N/2."""
        at = self.coordinates.places[f"noise/{key[0]}/{key[1]}"]
        self.weights[at] = np.array([1.0 / (self.log_rates[at] * np.sqrt(0.5 * scalars + 1.0))])

    def scalar(self, at: int, gradient: Callable[[Vector], Vector]) -> None:
        """Any other scalar: its own curvature, by a difference of the gradient."""
        step = np.zeros(len(self.x))
        step[at] = _SCALAR_DIFFERENCE
        curvature = (gradient(self.x - step)[at] - gradient(self.x + step)[at]) / (2.0 * _SCALAR_DIFFERENCE)
        if np.isfinite(curvature) and curvature != 0.0:
            self.weights[at] = np.array([min(1.0, 1.0 / np.sqrt(abs(curvature)))])

    def made(self) -> Whitening:
        """B as arrays, padded; no directions yet."""
        size, width = len(self.x), max(map(len, self.weights))
        weights, columns = np.zeros((size, width)), np.zeros((size, width), np.intp)
        for i, (values, places) in enumerate(zip(self.weights, self.columns, strict=True)):
            weights[i, : len(values)], columns[i, : len(values)] = values, places
        return Whitening(self.x, weights, columns, np.zeros((size, 0)), np.zeros(0))
