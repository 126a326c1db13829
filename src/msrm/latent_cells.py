"""The process inside a grid cell given the states at its ends and moments in it: conditional mean and covariance.

Given its two ends the process in a cell is a bridge, independent of all else. With ``b = L eps`` its first Legendre
moments ``integral P_k(u) (f - E[f | ends]) du`` and ``L L'`` their covariance, the coordinates eps are standard normal
and independent of the states a priori. Lengths are scaled, ``x = rate * step``, and derivatives are in x.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from msrm.matern import Matern
from msrm.responses.cells import legendre, unit_gauss

__all__ = ["MOMENT_ORDER", "MOST_MOMENTS", "CellBasis", "cell_basis", "inverse"]

MOMENT_ORDER = 16  # Gauss points with moments: kinks of Matern-3/2 and 5/2 leave 1e-6 and less of the variance
_PIECE_ORDER = 10  # either side of the kink of Matern-1/2: exponentials times polynomials
MOST_MOMENTS = 6  # of a cell: beyond it their variances on short cells are rounding
_DROPPED = 1e-13  # variance of a moment, of the prior's 1, below which it is rounding


def inverse(matrix: np.ndarray) -> np.ndarray:
    """Inverse of a positive definite matrix, scaled to unit diagonal first: the states differ by powers of x."""
    scale = 1.0 / np.sqrt(np.diag(matrix))
    inverse = np.linalg.inv(matrix * scale[:, None] * scale) * scale[:, None] * scale
    return 0.5 * (inverse + inverse.T)


@dataclass(frozen=True, eq=False)
class CellBasis:
    """The process inside a cell given the states at its two ends and the moments in it.

    Attributes
    ----------
    mean, mean_slope : (set, point, 2 state + moment)
        Weights of the start's and the end's states and of eps in the conditional mean, and d/dx.
    covariance, covariance_slope : (set, point, point)
        Conditional covariance between points of the cell, and d/dx.
    """

    mean: np.ndarray
    mean_slope: np.ndarray
    covariance: np.ndarray
    covariance_slope: np.ndarray


def cell_basis(matern: Matern, x: float, fractions: np.ndarray, moments: int = 0) -> CellBasis:
    """Conditional mean and covariance at ``fractions`` (set, point) of a cell of scaled length x, with derivatives."""
    return _cell_basis(matern, x, np.ascontiguousarray(fractions).tobytes(), fractions.shape, moments)


@lru_cache(maxsize=64)
def _cell_basis(matern: Matern, x: float, content: bytes, shape: tuple[int, int], moments: int) -> CellBasis:
    r = np.frombuffer(content).reshape(shape)
    return _bridge_basis(matern, x, r) if moments == 0 else _moment_basis(matern, x, r, moments)


def _moment_basis(matern: Matern, x: float, r: np.ndarray, moments: int) -> CellBasis:
    """The basis given the moments too.

    With C their covariance and R = L^-T, ``dR = -R (R' dC R) / 2`` is a derivative of R: any other differs by a
    rotation of eps, which no functional can tell.
    """
    nodes, weights = unit_gauss(MOMENT_ORDER)
    of_nodes = weights[:, None] * legendre(nodes, moments)
    found, found_slope = _moment_covariance(matern, x, np.concatenate([r.ravel(), nodes]), moments)
    covariance, slope = (of[: r.size].reshape(*r.shape, moments) for of in (found, found_slope))
    between, between_slope = of_nodes.T @ found[r.size :], of_nodes.T @ found_slope[r.size :]
    ends = _bridge_basis(matern, x, r)
    variances, directions = np.linalg.eigh(between)
    kept = variances > _DROPPED
    root = directions * np.where(kept, np.maximum(variances, _DROPPED) ** -0.5, 0.0)
    turned = root.T @ between_slope @ root
    loadings = covariance @ root
    loading_slopes = slope @ root - 0.5 * loadings @ turned
    crossed = loading_slopes @ np.swapaxes(loadings, 1, 2)
    return CellBasis(
        np.concatenate([ends.mean, loadings], axis=-1),
        np.concatenate([ends.mean_slope, loading_slopes], axis=-1),
        ends.covariance - loadings @ np.swapaxes(loadings, 1, 2),
        ends.covariance_slope - crossed - np.swapaxes(crossed, 1, 2),
    )


def _moment_covariance(matern: Matern, x: float, r: np.ndarray, moments: int) -> tuple[np.ndarray, np.ndarray]:
    """Covariance (point, moment) of the bridge at points and its Legendre moments, and d/dx.

    The covariance has a kink where its arguments meet. Sharp likelihoods feel that of Matern-1/2, so its integrals are
    split there: what comes of them is smooth in the point, and Gauss rules over cells integrate it.
    """
    at = r[..., None]
    if matern.dimension == 1:
        nodes, weights = unit_gauss(_PIECE_ORDER)
        u = np.concatenate([at * nodes, at + (1.0 - at) * nodes], axis=-1)
        weights = np.concatenate([at * weights, (1.0 - at) * weights], axis=-1)
    else:
        nodes, weights = unit_gauss(MOMENT_ORDER)
        u = nodes[None]
    of = weights[..., None] * legendre(u, moments)
    inside, inside_slope, g, g_slope = _toward_end(matern, x, u)
    here, here_slope, g_here, g_here_slope = _toward_end(matern, x, r)
    noise_inverse, noise_slope = inverse(matern.noise(x)), matern.noise_slope(x)
    late = g_here @ noise_inverse
    late_slope = (g_here_slope - late @ noise_slope) @ noise_inverse
    earlier = (u <= at)[..., None]
    column = np.where(earlier, inside[..., :, 0], here[..., None, :, 0])
    column_slope = np.where(earlier, inside_slope[..., :, 0], here_slope[..., None, :, 0])
    covariance, slope = _across(matern, x, np.abs(u - at), column, column_slope)
    covariance = covariance - np.sum(g * late[..., None, :], axis=-1)
    slope = slope - np.sum(g * late_slope[..., None, :] + g_slope * late[..., None, :], axis=-1)
    return (covariance[..., None, :] @ of)[..., 0, :], (slope[..., None, :] @ of)[..., 0, :]


def _toward_end(matern: Matern, x: float, r: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Covariance of the state at points, and of the process there and the state at the end, given the start; d/dx."""
    drift = matern.drift
    rest = matern.transition(x * (1.0 - r))
    rest_slope = (1.0 - r)[..., None, None] * (drift @ rest)
    inside, inside_slope = matern.noise(x * r), r[..., None, None] * matern.noise_slope(x * r)
    g = np.einsum("...j,...ij->...i", inside[..., 0, :], rest)
    g_slope = np.einsum("...j,...ij->...i", inside_slope[..., 0, :], rest)
    g_slope += np.einsum("...j,...ij->...i", inside[..., 0, :], rest_slope)
    return inside, inside_slope, g, g_slope


def _bridge_basis(matern: Matern, x: float, r: np.ndarray) -> CellBasis:
    drift = matern.drift
    ahead, ahead_slope = matern.transition(x), drift @ matern.transition(x)
    noise_inverse, noise_slope = inverse(matern.noise(x)), matern.noise_slope(x)
    start = matern.transition(x * r)
    start_slope = r[..., None, None] * (drift @ start)
    inside, inside_slope, g, g_slope = _toward_end(matern, x, r)
    late = g @ noise_inverse
    late_slope = (g_slope - late @ noise_slope) @ noise_inverse
    early = start[..., 0, :] - late @ ahead
    early_slope = start_slope[..., 0, :] - late_slope @ ahead - late @ ahead_slope
    covariance, covariance_slope = _cell_covariance(matern, x, r, inside, inside_slope)
    covariance = covariance - late @ np.swapaxes(g, -1, -2)
    covariance_slope = covariance_slope - late_slope @ np.swapaxes(g, -1, -2) - late @ np.swapaxes(g_slope, -1, -2)
    return CellBasis(
        np.concatenate([early, late], axis=-1),
        np.concatenate([early_slope, late_slope], axis=-1),
        covariance,
        covariance_slope,
    )


def _cell_covariance(
    matern: Matern, x: float, r: np.ndarray, inside: np.ndarray, inside_slope: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance of the process at two points given the state at the start of the cell, and d/dx."""
    gap = np.abs(r[:, :, None] - r[:, None, :])
    earlier = np.where(r[:, :, None] <= r[:, None, :], np.arange(r.shape[1])[:, None], np.arange(r.shape[1]))
    which = np.arange(r.shape[0])[:, None, None]
    column, column_slope = inside[..., :, 0][which, earlier], inside_slope[..., :, 0][which, earlier]
    return _across(matern, x, gap, column, column_slope)


def _across(
    matern: Matern, x: float, gap: np.ndarray, column: np.ndarray, column_slope: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Covariance given the start of the process a gap later and the process now, from the state's with it; d/dx."""
    after = matern.transition(x * gap)
    after_slope = gap[..., None] * (matern.drift @ after)[..., 0, :]
    after = after[..., 0, :]
    return np.sum(after * column, axis=-1), np.sum(after_slope * column + after * column_slope, axis=-1)
