"""The dense likelihood on a device: log evidence and its derivatives from node covariances, in JAX (DESIGN 4).

With C the covariance of the node functionals, ``D = R R'`` block diagonal, ``h = R q + p`` (p is rounding where h comes
from data) and ``M = I + R' (I (x) C) R``, everything follows from ``S = R M^-1 R'``, which is ``D - D P D`` for the
posterior covariance P, and ``u = M^-1 (q - R' C p)``:

    log evidence = (q' q + p' C p - (q - R' C p)' u - log|M|) / 2,    a = h - D E[g] = R u + p,
    d/dC = (a a' - S) / 2,    d/dh = E[g] = C a,    d/dD = -E[g g'] / 2,
    dS = (1 - C S)' dD (1 - C S) - S dC S,    da = (1 - S C) (dh - dD C a) - S dC a

so loadings of zero and D of any rank need no special case, and sharp data cancel in q, not in its square. Where S does
not fit beside the factor of M, its columns are solved for and used a panel at a time. Vectors over nodes and factors
are factor-major.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from msrm.gp.dense import RANK
from msrm.gp.jax_cholesky import cholesky, factor_inverse, solve_factor

__all__ = ["DenseGradient", "dense_evidence", "dense_evidence_by_panels"]


def _inner(covariance: Array, roots: Array) -> Array:
    """M, (K node, K node)."""
    count, size = roots.shape[:2]
    flat = roots.transpose(2, 0, 1).reshape(size * count, size)
    products = (flat @ flat.T).reshape(size, count, size, count) * covariance[:, None, :]
    return products.reshape(size * count, -1) + jnp.eye(size * count)


def _between(left: Array, matrix: Array, right: Array) -> Array:
    """``left matrix right'`` of a matrix (K, node, K, other): sums of K terms an element, no matrix products."""
    half = (left.transpose(1, 2, 0)[..., None, None] * matrix).sum(1)
    return (half[:, :, None] * right.transpose(1, 2, 0)).sum(3)


def _factored(covariance: Array, precision: Array, information: Array) -> tuple[Array, Array, Array, Array]:
    """The log evidence, a (node, K), R (node, K, K) of D of any rank, and the factor of M."""
    values, vectors = jnp.linalg.eigh(precision)
    scale = jnp.sqrt(jnp.where(values <= RANK * values[:, -1:], 0.0, values))
    inverse = jnp.where(scale == 0.0, 0.0, 1.0 / jnp.where(scale == 0.0, 1.0, scale))
    roots, data = vectors * scale[:, None, :], jnp.einsum("jka,jk->ja", vectors, information) * inverse
    rest = information - jnp.einsum("jka,ja->jk", roots, data)
    lower, prior = cholesky(_inner(covariance, roots)), covariance @ rest
    pulled = data - jnp.einsum("jka,jk->ja", roots, prior)
    half = solve_triangular(lower, pulled.T.reshape(-1, 1), lower=True)
    quadratic = (data**2).sum() + (rest * prior).sum() - (half**2).sum()
    solved = solve_triangular(lower, half, lower=True, trans=1).reshape(roots.shape[1], len(roots))
    log_determinant = 2.0 * jnp.log(jnp.diagonal(lower)).sum()
    return 0.5 * (quadratic - log_determinant), jnp.einsum("jka,aj->jk", roots, solved) + rest, roots, lower


@jax.custom_jvp
def _answers(covariance: Array, precision: Array, information: Array) -> tuple[Array, Array, Array]:
    """The log evidence, a (node, K), and S (K, node, K, node)."""
    value, score, roots, lower = _factored(covariance, precision, information)
    inverse = factor_inverse(lower).reshape(*roots.shape[1::-1], *roots.shape[1::-1])
    return value, score, _between(roots, inverse, roots)


@_answers.defjvp
def _answers_jvp(primals: Any, tangents: Any) -> Any:
    covariance, (d_covariance, d_precision, d_information) = primals[0], tangents
    value, score, middle = _answers(*primals)
    flat = middle.reshape(middle.shape[0] * middle.shape[1], -1)

    def seen(matrix: Array) -> Array:
        """(I (x) matrix) S."""
        return jnp.einsum("ji,kiln->kjln", matrix, middle).reshape(flat.shape)

    outside = jnp.eye(len(flat)) - seen(covariance)
    through = jnp.einsum("jkl,ljm->kjm", d_precision, outside.reshape(*middle.shape[:2], -1)).reshape(flat.shape)
    d_middle = (outside.T @ through - flat @ seen(d_covariance)).reshape(middle.shape)
    moved = d_information - jnp.einsum("jkl,jl->jk", d_precision, covariance @ score)
    d_score = moved - jnp.einsum("kjli,il->jk", middle, covariance @ moved + d_covariance @ score)
    return (value, score, middle), (_value_tangent(covariance, score, middle, tangents), d_score, d_middle)


def _value_tangent(covariance: Array, score: Array, middle: Array, tangents: Any) -> Array:
    """Derivative of the log evidence along tangents of C, D and h."""
    mean = covariance @ score
    on_covariance = 0.5 * (score @ score.T - jnp.einsum("kjki->ji", middle))
    second = _posterior_blocks(covariance, middle) + mean[:, :, None] * mean[:, None, :]
    return (on_covariance * tangents[0]).sum() - 0.5 * (second * tangents[1]).sum() + (mean * tangents[2]).sum()


def _posterior_blocks(covariance: Array, middle: Array) -> Array:
    """Cov(g_j given the data), (node, K, K)."""
    size = middle.shape[0]
    taken = jnp.einsum("ji,kilj->jkl", covariance, jnp.einsum("kilm,mj->kilj", middle, covariance))
    return jnp.diagonal(covariance)[:, None, None] * jnp.eye(size) - taken


@jax.custom_jvp
def dense_evidence(covariance: Array, precision: Array, information: Array) -> Array:
    """``log integral exp(sum_j -g_j' D_j g_j / 2 + h_j' g_j) p(g) dg`` for factors of node covariance C.

    Parameters
    ----------
    covariance : (node, node)
        C, positive semidefinite.
    precision : (node, K, K)
        D of each node, positive semidefinite.
    information : (node, K)
        h.

    Returns
    -------
    ()
        NaN where the factorization fails. Differentiable to any order in every mode.
    """
    return _factored(covariance, precision, information)[0]


@dense_evidence.defjvp
def _dense_evidence_jvp(primals: Any, tangents: Any) -> Any:
    value, score, middle = _answers(*primals)
    return value, _value_tangent(primals[0], score, middle, tangents)


class DenseGradient(NamedTuple):
    """Log evidence and its derivatives.

    Attributes
    ----------
    value : ()
    covariance : (node, node)
    precision : (node, K, K)
    information : (node, K)
    """

    value: Array
    covariance: Array
    precision: Array
    information: Array


@partial(jax.jit, static_argnames="panel")
def dense_evidence_by_panels(covariance: Array, precision: Array, information: Array, panel: int) -> DenseGradient:
    """`dense_evidence` and its first derivatives without S: panels of its columns by solves, used as they come.

    Parameters
    ----------
    covariance, precision, information
        As in `dense_evidence`.
    panel : int
        Nodes of a panel; beside M's factor lie ``4 K^2 node panel`` numbers.
    """
    value, score, roots, lower = _factored(covariance, precision, information)
    count, size = roots.shape[:2]
    mean = covariance @ score

    def step(taken: Array, start: Array) -> tuple[Array, Array]:
        # The last panel starts earlier, so that all are of one shape; columns it shares count once.
        begin = jnp.minimum(start, count - panel)
        column = begin + jnp.arange(panel)
        rows = size * count
        unit = (jnp.arange(rows)[:, None] == (jnp.arange(size)[:, None] * count + column).reshape(-1)).astype(float)
        inverse = solve_factor(lower, unit).reshape(size, count, size, panel)
        middle = _between(roots, inverse, roots[column])
        here = jnp.where(column >= start, 1.0, 0.0)
        against = covariance[:, column]
        taken = taken + jnp.einsum("ji,kjli->jkl", against * here, jnp.einsum("jm,kmli->kjli", covariance, middle))
        return taken, jnp.einsum("kjki->ij", middle)

    starts = jnp.arange(0, count, panel)
    taken, columns = jax.lax.scan(step, jnp.zeros((count, size, size)), starts)
    traces = jnp.zeros((count, count))
    for place, start in enumerate(range(0, count, panel)):
        begin = min(start, count - panel)
        traces = traces.at[begin : begin + panel].set(columns[place])
    second = jnp.diagonal(covariance)[:, None, None] * jnp.eye(size) - taken + mean[:, :, None] * mean[:, None, :]
    return DenseGradient(value, 0.5 * (score @ score.T - traces), -0.5 * second, mean)
