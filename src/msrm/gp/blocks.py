"""Block tridiagonal positive definite systems in JAX: log evidence, posterior, draws, one block after another.

A system is ``diagonal (n, b, b)`` and ``lower (n - 1, b, b)``, A[i, i] = diagonal[i] and A[i + 1, i] = lower[i]: the
posterior precision of DESIGN 3.3 in blocks of grid points. Independent systems share one call by a zero block in
`lower`. Two solvers have one interface: `Sequential` here and `msrm.gp.cyclic.Parallel`, which is parallel in time.

`log_evidence` carries its own derivative, ``d log det A = tr(A^-1 dA)`` through the selected inverse (Fisher's
identity): no factorization is differentiated for a gradient, and the rule is made of functions that differentiate
again. A system that is not positive definite or not finite gives NaN; nothing is added to a diagonal.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from msrm.gp.jax_cholesky import cholesky

__all__ = [
    "Sequential",
    "Solver",
    "inverse_factor",
    "log_evidence",
    "pad",
    "pad_identity",
    "transposed",
    "triangular_inverse",
]


class Solver(Protocol):
    """What `log_evidence` and the samplers need: hashable settings and three pure functions."""

    def forward(self, diagonal: Array, lower: Array, right: Array) -> Any:
        """Factorize, and whiten right-hand sides.

        Parameters
        ----------
        diagonal : (n, b, b)
            Symmetric diagonal blocks.
        lower : (n - 1, b, b)
            Blocks below the diagonal.
        right : (n, b, m)
            Right-hand sides.

        Returns
        -------
        factor
            With `log_determinant` () and `quadratic` (m,), the values of ``right' A^-1 right``.
        """

    def backward(self, factor: Any) -> tuple[Array, Array, Array]:
        """Solution (n, b, m), diagonal blocks (n, b, b) and first lower blocks (n - 1, b, b) of the inverse."""

    def sample(self, factor: Any, normals: Array) -> Array:
        """Draws (n, b, m) of N(A^-1 right, A^-1) from standard normals (n, b, m); with zeros the solution."""


def transposed(matrix: Array) -> Array:
    """Last two axes exchanged."""
    return jnp.swapaxes(matrix, -1, -2)


def pad(blocks: Array, before: int, after: int) -> Array:
    """Zero blocks before and after along the first axis."""
    return jnp.pad(blocks, ((before, after), *((0, 0),) * (blocks.ndim - 1))) if before or after else blocks


def pad_identity(blocks: Array, count: int) -> Array:
    """Unit blocks at the end, up to ``count`` blocks."""
    missing = count - blocks.shape[0]
    identity = jnp.broadcast_to(jnp.eye(blocks.shape[-1]), (missing, *blocks.shape[1:]))
    return jnp.concatenate([blocks, identity]) if missing else blocks


def triangular_inverse(lower: Array, leaf: int | None) -> Array:
    """Inverses (..., b, b) of lower triangular matrices.

    With a leaf the diagonal blocks of that order are inverted at once, as one batch, and joined pairwise by products:
    log2(b / leaf) steps in place of the rows of one long substitution.
    """
    order = lower.shape[-1]
    if leaf is None or order <= leaf:
        return solve_triangular(lower, jnp.broadcast_to(jnp.eye(order), lower.shape), lower=True)
    count = 2 ** (-(-order // leaf) - 1).bit_length()
    size = -(-order // count)
    full = size * count
    none = ((0, 0),) * (lower.ndim - 2)
    blocks = jnp.pad(lower, (*none, (0, full - order), (0, full - order)))
    blocks = blocks + jnp.diag((jnp.arange(full) >= order).astype(float))

    def tiles(rows: int, below: int) -> Array:
        """Tiles on the diagonal, or those below it that join two of them."""
        starts = range(0, full, (1 + below) * rows)
        cuts = [blocks[..., i + below * rows : i + (1 + below) * rows, i : i + rows] for i in starts]
        return jnp.stack(cuts, -3)

    inverse = triangular_inverse(tiles(size, 0), None)
    while size < full:
        below = tiles(size, 1)
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        top = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        inverse = jnp.concatenate([top, jnp.concatenate([-(second @ (below @ first)), second], -1)], -2)
        size *= 2
    return inverse[..., 0, :order, :order]


def inverse_factor(matrix: Array, leaf: int | None, triangle: int | None = None) -> tuple[Array, Array]:
    """Inverse Cholesky factors and log determinants.

    Parameters
    ----------
    matrix : (..., b, b)
        Symmetric positive definite matrices.
    leaf : int or None
        Larger orders are factorized by halves joined by matrix products, which an accelerator does faster than the
        columns of a factorization; None factorizes whole.
    triangle : int or None
        Leaf of `triangular_inverse`.

    Returns
    -------
    inverse : (..., b, b)
        ``L^-1``, so that every later solve is a product.
    log_determinant : (...,)
    """
    order = matrix.shape[-1]
    if leaf is None or order <= leaf:
        lower = cholesky(matrix)
        logs = 2 * jnp.log(jnp.diagonal(lower, axis1=-2, axis2=-1)).sum(-1)
        return triangular_inverse(lower, triangle), logs
    half = 8 * -(-order // 16)
    first, first_logs = inverse_factor(matrix[..., :half, :half], leaf, triangle)
    cross = matrix[..., half:, :half] @ transposed(first)
    second, second_logs = inverse_factor(matrix[..., half:, half:] - cross @ transposed(cross), leaf, triangle)
    top = jnp.concatenate([first, jnp.zeros((*first.shape[:-1], order - half))], -1)
    bottom = jnp.concatenate([-(second @ (cross @ first)), second], -1)
    return jnp.concatenate([top, bottom], -2), first_logs + second_logs


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def log_evidence(solver: Solver, diagonal: Array, lower: Array, right: Array) -> Array:
    """``right' A^-1 right / 2 - log det A / 2``, differentiable to any order in every mode.

    Parameters
    ----------
    solver : Solver
        Static and hashable.
    diagonal : (n, b, b)
        Symmetric diagonal blocks.
    lower : (n - 1, b, b)
        Blocks below the diagonal.
    right : (n, b)
        Right-hand side.

    Returns
    -------
    ()
        NaN when the system is not finite or not positive definite.
    """
    factor = solver.forward(diagonal, lower, right[..., None])
    return 0.5 * (factor.quadratic[0] - factor.log_determinant)


@log_evidence.defjvp
def _log_evidence_jvp(solver: Solver, primals: Any, tangents: Any) -> Any:
    diagonal, lower, right = primals
    d_diagonal, d_lower, d_right = tangents
    factor = solver.forward(diagonal, lower, right[..., None])
    mean, within, below = solver.backward(factor)
    second = within + mean * transposed(mean)
    across = below + mean[1:] * transposed(mean[:-1])
    tangent = (mean[..., 0] * d_right).sum() - 0.5 * (second * d_diagonal).sum() - (across * d_lower).sum()
    return 0.5 * (factor.quadratic[0] - factor.log_determinant), tangent


class _SequentialFactor(NamedTuple):
    diagonal: Array  # (chunk, block in chunk, b, b), filled up with unit blocks
    lower: Array  # (chunk, block in chunk, b, b), the coupling to the next block, zero after the last
    whitened: Array  # (chunk, block in chunk, b, m)
    carried: Array  # (chunk, b, b), what earlier blocks subtract from the first of each chunk
    real: Array  # (n,), its shape says how many blocks are real
    log_determinant: Array
    quadratic: Array


@dataclass(frozen=True)
class Sequential:
    """The recursion over blocks, of which only the carried block of every chunk is kept.

    The backward sweep recomputes one chunk at a time, so that memory beyond input and output is n / chunk blocks and
    the factors of one chunk.

    Parameters
    ----------
    chunk : int
        Blocks between two carries that are kept.
    leaf : int or None
        As in `inverse_factor`.
    """

    chunk: int = 16
    leaf: int | None = 192

    def _factors(self, carried: Array, diagonal: Array, lower: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        """Inverse factors, couplings to the next block and log determinants of one chunk."""

        def step(carry: Array, blocks: Any) -> Any:
            inverse, logs = inverse_factor(blocks[0] - carry, self.leaf)
            coupling = inverse @ transposed(blocks[1])
            return transposed(coupling) @ coupling, (inverse, coupling, logs)

        return jax.lax.scan(step, carried, (diagonal, lower))

    def forward(self, diagonal: Array, lower: Array, right: Array) -> _SequentialFactor:
        """Factorize and whiten; see `Solver`."""
        count, order = diagonal.shape[:2]
        chunk = min(self.chunk, count)
        full = chunk * -(-count // chunk)

        def chunks(blocks: Array) -> Array:
            return blocks.reshape(full // chunk, chunk, *blocks.shape[1:])

        system = chunks(pad_identity(diagonal, full)), chunks(pad(lower, 0, full - count + 1))

        def step(carry: Any, blocks: Any) -> Any:
            end, (inverse, coupling, logs) = self._factors(carry[0], *blocks[:2])

            def whiten(shift: Array, block: Any) -> Any:
                white = block[0] @ (block[2] - shift)
                return transposed(block[1]) @ white, white

            shift, white = jax.lax.scan(whiten, carry[1], (inverse, coupling, blocks[2]))
            return (end, shift), (carry[0], white, logs.sum())

        start = jnp.zeros((order, order)), jnp.zeros((order, right.shape[-1]))
        blocks = (*system, chunks(pad(right, 0, full - count)))
        _, (carried, white, logs) = jax.lax.scan(step, start, blocks)
        return _SequentialFactor(*system, white, carried, jnp.zeros(count), logs.sum(), (white**2).sum((0, 1, 2)))

    def backward(self, factor: _SequentialFactor) -> tuple[Array, Array, Array]:
        """Solution and selected inverse; see `Solver`."""

        def block(carry: Any, blocks: Any) -> Any:
            after, inverse_after = carry
            inverse, coupling, white = blocks
            gain = transposed(inverse) @ coupling
            solution = transposed(inverse) @ white - gain @ after
            below = -inverse_after @ transposed(gain)
            own = transposed(inverse) @ inverse - gain @ below
            own = (own + transposed(own)) / 2
            return (solution, own), (solution, own, below)

        def chunk(carry: Any, blocks: Any) -> Any:
            _, (inverse, coupling, _) = self._factors(*blocks[:3])
            return jax.lax.scan(block, carry, (inverse, coupling, blocks[3]), reverse=True)

        order, columns = factor.whitened.shape[-2:]
        start = jnp.zeros((order, columns)), jnp.zeros((order, order))
        blocks = factor.carried, factor.diagonal, factor.lower, factor.whitened
        _, (solution, own, below) = jax.lax.scan(chunk, start, blocks, reverse=True)
        count = factor.real.shape[0]
        solution, own, below = (part.reshape(-1, *part.shape[2:]) for part in (solution, own, below))
        return solution[:count], own[:count], below[: count - 1]

    def sample(self, factor: _SequentialFactor, normals: Array) -> Array:
        """Draws, or the solution with zero normals; see `Solver`."""

        def block(after: Array, blocks: Any) -> Any:
            inverse, coupling, white = blocks
            solution = transposed(inverse) @ (white - coupling @ after)
            return solution, solution

        def chunk(after: Array, blocks: Any) -> Any:
            _, (inverse, coupling, _) = self._factors(*blocks[:3])
            return jax.lax.scan(block, after, (inverse, coupling, blocks[3]), reverse=True)

        full, count = factor.whitened.shape[0] * factor.whitened.shape[1], factor.real.shape[0]
        white = factor.whitened + pad(normals, 0, full - count).reshape(*factor.whitened.shape[:2], *normals.shape[1:])
        blocks = factor.carried, factor.diagonal, factor.lower, white
        _, solution = jax.lax.scan(chunk, jnp.zeros(white.shape[2:]), blocks, reverse=True)
        return solution.reshape(full, *solution.shape[2:])[:count]
