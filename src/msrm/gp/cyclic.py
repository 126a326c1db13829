"""Block cyclic reduction: block tridiagonal systems solved in parallel over time (DESIGN 7).

A level factorizes blocks 0, 2, 4, ... at once and folds them into their neighbours 1, 3, 5, ..., so n blocks take
log2(n) levels. On an accelerator the time goes into the number of kernels, not into the arithmetic: a level is one
batched Cholesky, one batched triangular inverse and three batched products, and the last blocks are one dense
factorization. With F = L^-1 [A_il, A_ir] for an eliminated block i between the kept l and r, and S the inverse:

    A'_ll, A'_rl, A'_rr  -=  F' F,      [S_il, S_ir] = -L^-T F [[S_ll, S_lr], [S_rl, S_rr]],
    S_ii = L^-T L^-1 - [S_il, S_ir] (L^-T F)',      x_i = L^-T (y_i - F [x_l; x_r])
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from msrm.gp.blocks import inverse_factor, pad, transposed

__all__ = ["CyclicFactor", "Parallel"]


_System = tuple[Array, Array, Array]  # diagonal, lower, right-hand sides


class _Level(NamedTuple):
    """What the eliminated blocks of a level leave (the last blocks too, as one block without a coupling)."""

    inverse: Array  # (e, b, b) L^-1
    coupling: Array  # (e, b, 2b) L^-1 [A_il, A_ir], zero where there is no neighbour
    whitened: Array  # (e, b, m) L^-1 right


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CyclicFactor:
    """A factorized system.

    Attributes
    ----------
    log_determinant : ()
    quadratic : (m,)
        ``right' A^-1 right`` of each right-hand side.
    """

    levels: tuple[_Level, ...]
    root: _Level
    log_determinant: Array
    quadratic: Array
    order: int = field(metadata={"static": True})  # of a block


def _interleave(even: Array, odd: Array) -> Array:
    """even[0], odd[0], even[1], ...; as many or one more even than odd."""
    pairs = jnp.stack([even, pad(odd, 0, even.shape[0] - odd.shape[0])], axis=1)
    return pairs.reshape(-1, *even.shape[1:])[: even.shape[0] + odd.shape[0]]


def _around(kept: Array, eliminated: int) -> tuple[Array, Array]:
    """Left and right neighbour of each eliminated block, zero where there is none."""
    return pad(kept, 1, 0)[:eliminated], pad(kept, 0, eliminated - kept.shape[0])


def _eliminate(
    diagonal: Array, lower: Array, right: Array, leaf: int | None, triangle: int | None
) -> tuple[_System, _Level, Array]:
    """The system of the kept blocks, what the eliminated ones leave, and their log determinant."""
    count, order = diagonal.shape[:2]
    kept = count // 2
    inverse, logs = inverse_factor(diagonal[0::2], leaf, triangle)
    couplings = jnp.concatenate([pad(lower[1::2], 1, 0), pad(transposed(lower[0::2]), 0, count % 2)], -1)
    coupling, whitened = inverse @ couplings, inverse @ right[0::2]
    schur, shift = transposed(coupling) @ coupling, transposed(coupling) @ whitened
    open_end = 1 - count % 2  # the last kept block then has no eliminated block to its right
    next_diagonal = diagonal[1::2] - schur[:kept, order:, order:] - pad(schur[1:, :order, :order], 0, open_end)
    next_right = right[1::2] - shift[:kept, order:] - pad(shift[1:, :order], 0, open_end)
    return (next_diagonal, -schur[1:kept, order:, :order], next_right), _Level(inverse, coupling, whitened), logs.sum()


def _expand(level: _Level, kept: Array, normals: Array) -> Array:
    """Solutions of all blocks of a level from those of the kept ones."""
    around = jnp.concatenate(_around(kept, level.inverse.shape[0]), axis=-2)
    return _interleave(transposed(level.inverse) @ (level.whitened + normals - level.coupling @ around), kept)


def _expand_inverse(level: _Level, diagonal: Array, lower: Array) -> tuple[Array, Array]:
    """Selected inverse of all blocks of a level from that of the kept ones."""
    eliminated, order = level.inverse.shape[:2]
    left, right = _around(diagonal, eliminated)
    cross = pad(lower, 1, eliminated - diagonal.shape[0])
    around = jnp.concatenate([jnp.concatenate([left, transposed(cross)], -1), jnp.concatenate([cross, right], -1)], -2)
    gain = transposed(level.inverse) @ level.coupling
    outer = -(gain @ around)
    own = transposed(level.inverse) @ level.inverse - outer @ transposed(gain)
    between = _interleave(transposed(outer[: diagonal.shape[0], :, order:]), outer[1:, :, :order])
    return _interleave((own + transposed(own)) / 2, diagonal), between


def _dense(diagonal: Array, lower: Array) -> Array:
    """A few blocks as one matrix."""
    count, order = diagonal.shape[:2]
    rows = []
    for i in range(count):
        row = [jnp.zeros((order, order))] * count
        row[i] = diagonal[i]
        if i:
            row[i - 1] = lower[i - 1]
        if i + 1 < count:
            row[i + 1] = transposed(lower[i])
        rows.append(jnp.concatenate(row, -1))
    return jnp.concatenate(rows, -2)


@dataclass(frozen=True)
class Parallel:
    """Block cyclic reduction (a `msrm.gp.blocks.Solver`).

    Parameters
    ----------
    root : int
        At most this many blocks are left to one dense factorization.
    leaf : int or None
        Blocks of a larger order are factorized by halves; None factorizes whole.
    triangle : int or None
        Triangular factors of a larger order are inverted by pieces (`msrm.gp.blocks.triangular_inverse`).
    """

    root: int = 3
    leaf: int | None = 192
    triangle: int | None = 36

    def __post_init__(self) -> None:
        if self.root < 1:
            raise ValueError(f"root must be at least 1, found {self.root}.")

    def forward(self, diagonal: Array, lower: Array, right: Array) -> CyclicFactor:
        """Factorize and whiten; see `msrm.gp.blocks.Solver`."""
        levels = []
        log_determinant, quadratic = jnp.zeros(()), jnp.zeros(right.shape[-1])
        while len(diagonal) > self.root:
            (diagonal, lower, right), level, logs = _eliminate(diagonal, lower, right, self.leaf, self.triangle)
            levels.append(level)
            log_determinant, quadratic = log_determinant + logs, quadratic + (level.whitened**2).sum((0, 1))
        inverse, logs = inverse_factor(_dense(diagonal, lower), None, self.triangle)
        whitened = inverse @ right.reshape(-1, right.shape[-1])
        root = _Level(inverse[None], jnp.zeros((1, len(inverse), 0)), whitened[None])
        order = diagonal.shape[-1]
        return CyclicFactor(tuple(levels), root, log_determinant + logs, quadratic + (whitened**2).sum(0), order)

    def backward(self, factor: CyclicFactor) -> tuple[Array, Array, Array]:
        """Solution and selected inverse; see `msrm.gp.blocks.Solver`."""
        inverse, order = factor.root.inverse[0], factor.order
        count = len(inverse) // order
        blocks = (inverse.T @ inverse).reshape(count, order, count, order).swapaxes(1, 2)
        own, below = jnp.arange(count), jnp.arange(1, count)
        diagonal, lower = blocks[own, own], blocks[below, below - 1]
        for level in reversed(factor.levels):
            diagonal, lower = _expand_inverse(level, diagonal, lower)
        zeros = jnp.zeros((*diagonal.shape[:2], factor.root.whitened.shape[-1]))
        return self.sample(factor, zeros), diagonal, lower

    def sample(self, factor: CyclicFactor, normals: Array) -> Array:
        """Draws, or the solution with zero normals; see `msrm.gp.blocks.Solver`."""
        by_level = []
        for _ in factor.levels:
            by_level.append(normals[0::2])
            normals = normals[1::2]
        root = factor.root
        flat = root.inverse[0].T @ (root.whitened[0] + normals.reshape(root.inverse.shape[1], -1))
        solution = flat.reshape(-1, factor.order, flat.shape[-1])
        for level, normal in zip(reversed(factor.levels), reversed(by_level), strict=True):
            solution = _expand(level, solution, normal)
        return solution
