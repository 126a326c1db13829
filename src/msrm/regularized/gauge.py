"""What the data leave free in a fit: the scale shared by loadings and latents, and the rotation of the factors.

W -> W A, Z -> Z A^-T leaves every prediction unchanged. With S = sum ridge_c w_c w_c' and C = Z'QZ (Q the latent
penalty) the penalties become tr(S A A') + tr(C (A A')^-1), least at the geometric mean X = A A' of C and S^-1,
X S X = C, which leaves S = C (closed-form balance). What remains is a rotation; the eigenvectors of S = C fix it, and
with it the order of the factors.
"""

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.problem import Problem

Array = NDArray[np.float64]
Latents = tuple[Array, ...]

_SMALLEST_SHARE = 1e-12


def balanced(problem: Problem, loading: Array, latents: Latents) -> tuple[Array, Latents]:
    """Loadings (column, K) and latents with the same products and the smallest penalties."""
    loading, paths = loading.copy(), list(latents)
    for pairs, systems in problem.gauges:
        columns = _columns(problem, pairs)
        ridge = problem.ridge[columns]
        size = np.einsum("c,ck,cl->kl", ridge, loading[columns], loading[columns])
        root, inverse = _roots(size)
        middle, _ = _roots(root @ _latent_size(problem, paths, systems) @ root)
        turn, back = _roots(inverse @ middle @ inverse)
        loading[columns] = loading[columns] @ turn
        for s in systems:
            paths[s] = paths[s] @ back
    return loading, tuple(paths)


def principal(problem: Problem, loading: Array, latents: Latents) -> tuple[Array, Latents]:
    """Loadings and latents rotated to the principal axes of the loadings' penalty, the largest first."""
    loading, paths = loading.copy(), list(latents)
    for pairs, systems in problem.gauges:
        columns = _columns(problem, pairs)
        _, axes = np.linalg.eigh(np.einsum("c,ck,cl->kl", problem.ridge[columns], loading[columns], loading[columns]))
        loading[columns] = loading[columns] @ axes[:, ::-1]
        for s in systems:
            paths[s] = paths[s] @ axes[:, ::-1]
    return loading, tuple(paths)


def _columns(problem: Problem, pairs: tuple[int, ...]) -> NDArray[np.intp]:
    return np.concatenate([np.arange(problem.columns[i].start, problem.columns[i].stop) for i in pairs])


def _latent_size(problem: Problem, latents: list[Array], systems: tuple[int, ...]) -> Array:
    """C = Z'QZ (K, K) summed over systems and paths."""
    return np.asarray(
        sum(np.einsum("lpk,lpm->km", latents[s], problem.systems[s].pressed(latents[s])) for s in systems)
    )


def _roots(matrix: Array) -> tuple[Array, Array]:
    """Symmetric square root and its inverse; directions of vanishing size are held at a tiny share of the largest."""
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    values = np.maximum(values, max(_SMALLEST_SHARE * values[-1], np.finfo(float).tiny))
    root = np.sqrt(values)
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T
