"""Paths of the compiled Gibbs sampler: what nodes see of them, and their scale and level (DESIGN 5).

*Scale*: the coarse component of every path is stretched along a random direction of factor space, loadings are shrunk.
*Shift*: a constant for all paths is taken from the offsets. Both as in `msrm.gp.gibbs.moves`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import solve_triangular

from msrm.gp.gibbs.native_data import ChainState, ModalityStacks
from msrm.gp.gibbs.native_geometry import GridPoints
from msrm.gp.gibbs.native_moves import ScaleTerms, scale_step, slice_points
from msrm.gp.jax_cholesky import cholesky
from msrm.gp.jax_statespace import BlockSystem, NodeStatistics, StateSpaceChain
from msrm.gp.parameters import Specification

__all__ = ["Paths"]

_DIRECTIONS = 4  # of the scale move, a level and sweep


class Paths:
    """Grid states (block, K, point state) of all runs, and the moves that change them.

    Parameters
    ----------
    specification : Specification
    chain : StateSpaceChain
    stacks : {modality: ModalityStacks}
    grid : GridPoints
    """

    def __init__(
        self,
        specification: Specification,
        chain: StateSpaceChain,
        stacks: dict[str, ModalityStacks],
        grid: GridPoints,
    ) -> None:
        self.specification, self.chain, self.stacks, self.grid = specification, chain, stacks, grid

    def seen(self, system: BlockSystem, modality: str, path: Array) -> Array:
        """``a . states`` of the nodes, (node, K)."""
        window = jnp.concatenate([path, jnp.concatenate([path[1:], jnp.zeros_like(path[:1])])], -1)
        return self.by_node(system, modality, jnp.einsum("nsq,nkq->nsk", system.rows[modality], window))

    def by_node(self, system: BlockSystem, modality: str, slots: Array) -> Array:
        """Values (block, slot, ...) in the order of the nodes."""
        count = self.chain.counts[modality]
        flat = slots.reshape(-1, slots.shape[-1])
        return jnp.zeros((count, slots.shape[-1])).at[system.nodes[modality].reshape(-1)].set(flat, mode="drop")

    def scaled(
        self,
        key: Array,
        levels: Any,
        system: BlockSystem,
        state: ChainState,
        path: Array,
        functionals: dict[str, Array],
        statistics: dict[str, NodeStatistics],
    ) -> tuple[Array, dict[str, Array], dict[str, NodeStatistics], Array]:
        """The scale move at every level in turn, and what all of them multiply the loadings by."""
        sd, size = self.specification.priors.loading_sd, self.specification.n_factors
        features = sum(stacks.feature_rows for stacks in self.stacks.values())
        gram = sum(
            jnp.einsum("pfk,pfl->kl", one[..., :size], one[..., :size]) for of in state.rows.values() for one in of
        )

        def at_level(carry: Any, at: tuple[Any, Array]) -> tuple[Any, None]:
            coarse, own = at
            terms = self.scale_terms(coarse, system, *carry)
            dimension = self.chain.matern.dimension * coarse["count"] - features
            width = 6.0 / jnp.sqrt(dimension + 2.0 * features)

            def once(terms: ScaleTerms, own: tuple[Array, Array]) -> tuple[ScaleTerms, None]:
                return scale_step(*own, terms, dimension, width, sd), None

            towards, slicing = jax.random.split(own)
            directions = jax.random.normal(towards, (_DIRECTIONS, size))
            terms, _ = jax.lax.scan(once, terms, (directions, slice_points(slicing, _DIRECTIONS)))
            return (terms.path, terms.functionals, terms.statistics, terms.gram, terms.turn), None

        start = path, functionals, statistics, jnp.asarray(gram), jnp.eye(size)
        keys = jax.random.split(key, len(levels["at"]))
        (path, functionals, statistics, _, turn), _ = jax.lax.scan(at_level, start, (levels, keys))
        return path, functionals, statistics, turn

    def scale_terms(
        self,
        coarse: Any,
        system: BlockSystem,
        path: Array,
        functionals: dict[str, Array],
        statistics: dict[str, NodeStatistics],
        gram: Array,
        turn: Array,
    ) -> ScaleTerms:
        """The coarse component of a path at one level, and all that a scale of it changes."""
        size, s = self.specification.n_factors, self.chain.matern.dimension
        points = self.states(path)
        at = points[coarse["at"]]
        component = jnp.einsum("pij,pjk->pik", coarse["early"], at[coarse["before"]])
        component = component + jnp.einsum("pij,pjk->pik", coarse["late"], at[coarse["after"]])
        gone = at - jnp.einsum("pij,pjk->pik", coarse["transition"], jnp.roll(at, 1, axis=0))
        quadratic = jnp.einsum("pik,pij,pjl->kl", gone, coarse["precision"], gone)
        blocks = jnp.moveaxis(component.reshape(len(path), -1, s, size), -1, 1).reshape(path.shape)
        parts = {modality: self.seen(system, modality, blocks) for modality in self.stacks}
        return ScaleTerms(path, functionals, statistics, blocks, parts, quadratic, gram, turn)

    def shifted(
        self,
        key: Array,
        data: Any,
        system: BlockSystem,
        state: ChainState,
        path: Array,
        functionals: dict[str, Array],
        statistics: dict[str, NodeStatistics],
    ) -> tuple[ChainState, Array, dict[str, Array]]:
        """A level for all paths against offsets, exact normal (`msrm.gp.gibbs.moves.shift`)."""
        precision, pull, at_level = self.shift(data, system, state, path, functionals, statistics)
        root = cholesky(precision)
        half = solve_triangular(root, pull, lower=True) + jax.random.normal(key, pull.shape)
        return at_level(solve_triangular(root, half, lower=True, trans=1))

    def shift(
        self,
        data: Any,
        system: BlockSystem,
        state: ChainState,
        path: Array,
        functionals: dict[str, Array],
        statistics: dict[str, NodeStatistics],
    ) -> tuple[Array, Array, Callable[[Array], tuple[ChainState, Array, dict[str, Array]]]]:
        """Precision, precision times mean of the level, and everything at a level."""
        size, sd = self.specification.n_factors, self.specification.priors.offset_sd
        pattern = jnp.zeros_like(path[:, :1]).at[:, :, :: self.chain.matern.dimension].set(1.0)
        gone, level = self.innovations(data, path), self.innovations(data, pattern)
        weighed = jnp.einsum("pij,pjk->pik", level[1], level[0])[..., 0]
        precision = (level[0][..., 0] * weighed).sum() * jnp.eye(size)
        pull = -jnp.einsum("pi,pik->k", weighed, gone[0])
        gains, seen = {}, {}
        for modality in self.stacks:
            seen[modality] = self.seen(system, modality, pattern)[:, 0]
            gains[modality] = seen[modality].mean()
            one, missed = statistics[modality], seen[modality] - gains[modality]
            score = one.information - (one.precision @ functionals[modality][..., None])[..., 0]
            pull = pull + missed @ score
            precision = precision + (missed[:, None, None] ** 2 * one.precision).sum(0)
            for rows in state.rows[modality]:
                loading, offset = rows[..., :size], rows[..., size]
                gram = jnp.einsum("pfk,pfl->kl", loading, loading)
                precision = precision + (gains[modality] / sd) ** 2 * gram
                pull = pull + gains[modality] / sd**2 * jnp.einsum("pf,pfk->k", offset, loading)

        def at_level(delta: Array) -> tuple[ChainState, Array, dict[str, Array]]:
            rows = {
                modality: tuple(
                    one.at[..., size].add(-gains[modality] * (one[..., :size] @ delta)) for one in state.rows[modality]
                )
                for modality in self.stacks
            }
            moved = {modality: functionals[modality] + seen[modality][:, None] * delta for modality in self.stacks}
            return state._replace(rows=rows), path + pattern * delta[:, None], moved

        return precision, pull, at_level

    def innovations(self, data: Any, path: Array) -> tuple[Array, Array]:
        """States less what the point before predicts, (point, s, K), and the prior precision of these (point, s, s)."""
        points, step = self.states(path), data["step"]
        first = jnp.zeros((len(points), 1, 1), bool).at[jnp.asarray(self.grid.first)].set(True)
        before = jnp.einsum("ij,pjk->pik", step["transition"], jnp.roll(points, 1, axis=0))
        return points - jnp.where(first, 0.0, before), jnp.where(first, step["start"], step["precision"])

    def states(self, path: Array) -> Array:
        """Path (block, K, point state) as (point, state, K) over all runs."""
        s = self.chain.matern.dimension
        split = path.reshape(path.shape[0], path.shape[1], -1, s)
        return jnp.moveaxis(split, 1, -1).reshape(-1, s, path.shape[1])

    def values(self, path: Array) -> Array:
        return self.states(path)[:, 0]
