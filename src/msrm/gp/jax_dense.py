"""The dense likelihood on a device: log evidence and its derivatives from node covariances, in JAX (DESIGN 4).

With C the covariance of the node functionals, ``D = R R'`` block diagonal and ``M = I + R' (I (x) C) R``, everything
follows from log|M| and ``S = R M^-1 R'``, which is ``D - D P D`` for the posterior covariance P:

    log evidence = h' C h / 2 - (C h)' S (C h) / 2 - log|M| / 2,    d/dC = (a a' - S) / 2 with a = h - S C h,
    d/dh = E[g] = C a,    d/dD = -E[g g'] / 2,    dS = (1 - C S)' dD (1 - C S) - S dC S

so loadings of zero and D of any rank need no special case. Where S does not fit beside the factor of M, its columns are
solved for and used a panel at a time. Vectors over nodes and factors are factor-major.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from msrm.gp.jax_cholesky import cholesky, factor_inverse, solve_factor

__all__ = ["DenseGradient", "dense_evidence", "dense_evidence_by_panels"]


def _roots(precision: Array) -> Array:
    """R (node, K, K) with ``R R' = D``, of any rank; never differentiated."""
    values, vectors = jnp.linalg.eigh(jax.lax.stop_gradient(precision))
    return vectors * jnp.sqrt(jnp.maximum(values, 0.0))[..., None, :]


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


def _log_determinant(lower: Array) -> Array:
    return 2.0 * jnp.log(jnp.diagonal(lower)).sum()


@jax.custom_jvp
def _middle(covariance: Array, precision: Array) -> tuple[Array, Array]:
    """log|M| and S (K, node, K, node)."""
    roots = _roots(precision)
    count, size = roots.shape[:2]
    lower = cholesky(_inner(covariance, roots))
    inverse = factor_inverse(lower).reshape(size, count, size, count)
    return _log_determinant(lower), _between(roots, inverse, roots)


@_middle.defjvp
def _middle_jvp(primals: Any, tangents: Any) -> Any:
    (covariance, precision), (d_covariance, d_precision) = primals, tangents
    logs, middle = _middle(covariance, precision)
    flat = middle.reshape(middle.shape[0] * middle.shape[1], -1)

    def seen(matrix: Array) -> Array:
        """(I (x) matrix) S."""
        return jnp.einsum("ji,kiln->kjln", matrix, middle).reshape(flat.shape)

    outside = jnp.eye(len(flat)) - seen(covariance)
    through = jnp.einsum("jkl,ljm->kjm", d_precision, outside.reshape(*middle.shape[:2], -1)).reshape(flat.shape)
    d_middle = outside.T @ through - flat @ seen(d_covariance)
    d_logs = (jnp.einsum("kjki->ji", middle) * d_covariance).sum() + (
        _posterior_blocks(covariance, middle) * d_precision
    ).sum()
    return (logs, middle), (d_logs, d_middle.reshape(middle.shape))


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
    roots = _roots(precision)
    lower = cholesky(_inner(covariance, roots))
    return _value(covariance, roots, information, lower)[0]


def _value(covariance: Array, roots: Array, information: Array, lower: Array) -> tuple[Array, Array]:
    """The log evidence and M^-1 R' C h (K node,)."""
    prior_mean = covariance @ information
    projected = jnp.einsum("jka,jk->aj", roots, prior_mean).reshape(-1, 1)
    solved = solve_factor(lower, projected)
    quadratic = (information * prior_mean).sum() - (projected * solved).sum()
    return 0.5 * (quadratic - _log_determinant(lower)), solved[:, 0]


@dense_evidence.defjvp
def _dense_evidence_jvp(primals: Any, tangents: Any) -> Any:
    covariance, precision, information = primals
    logs, middle = _middle(covariance, precision)
    prior_mean = covariance @ information
    taken = jnp.einsum("kjli,il->jk", middle, prior_mean)
    value = 0.5 * ((information * prior_mean).sum() - (prior_mean * taken).sum() - logs)
    score = information - taken
    mean = covariance @ score
    on_covariance = 0.5 * (score @ score.T - jnp.einsum("kjki->ji", middle))
    second = _posterior_blocks(covariance, middle) + mean[:, :, None] * mean[:, None, :]
    tangent = (on_covariance * tangents[0]).sum() - 0.5 * (second * tangents[1]).sum() + (mean * tangents[2]).sum()
    return value, tangent


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
    roots = _roots(precision)
    count, size = roots.shape[:2]
    lower = cholesky(_inner(covariance, roots))
    value, solved = _value(covariance, roots, information, lower)
    score = information - jnp.einsum("jka,aj->jk", roots, solved.reshape(size, count))
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
