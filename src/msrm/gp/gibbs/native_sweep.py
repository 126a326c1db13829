"""Gibbs sweeps compiled: the steps of `msrm.gp.gibbs.sweep` as pure functions, many sweeps in one dispatch (DESIGN 5).

(1) response parameters with their loadings on the latent-marginal density; (2) grid states and node functionals from
the factor of the accepted point; (3) rows and null block; (4) noise variances; (5) scale, shift and rotation. A sweep
is a function of its state, its tuning and its number alone, so that the length of a dispatch changes no bit.

What the scale move stretches follows from the *states* at every q-th grid point (`msrm.gp.gibbs.native_geometry`);
`msrm.gp.gibbs.latents` takes values at an Identity clock. Both leave the density invariant.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import solve_triangular

from msrm.gp.blocks import Solver
from msrm.gp.data import NodeLayout
from msrm.gp.gibbs.design import Design
from msrm.gp.gibbs.marginal import Block, prior_blocks
from msrm.gp.gibbs.native_data import ChainState, entry_squares, log_prior, modality_stacks
from msrm.gp.gibbs.native_geometry import GridPoints
from msrm.gp.gibbs.native_moves import draw_noise, draw_rows, haar
from msrm.gp.gibbs.native_paths import Paths
from msrm.gp.jax_cholesky import cholesky
from msrm.gp.jax_statespace import BlockSystem, NodeStatistics, StateSpaceChain
from msrm.gp.parameters import Specification
from msrm.gp.statespace import StateSpace

__all__ = ["NativeSweeper", "Tuning"]

_DEGREES = 5
_TARGET = 0.35
_DECAY = 0.6


class Tuning(NamedTuple):
    """The proposal of one block (`msrm.gp.gibbs.proposals.BlockProposal`).

    Attributes
    ----------
    root, inverse : (d, d)
        Of the covariance, and its inverse.
    mean : (d,)
    fitted : () bool
    log_size, seen : ()
        Of the walk.
    """

    root: Array
    inverse: Array
    mean: Array
    fitted: Array
    log_size: Array
    seen: Array


class _Current(NamedTuple):
    """A state and what its latent-marginal density was computed from."""

    state: ChainState
    statistics: dict[str, NodeStatistics]
    system: BlockSystem
    factor: Any
    constant: Array
    value: Array


class NativeSweeper:
    """The transition of a chain, compiled.

    Parameters
    ----------
    specification, layout, backend
        As of `msrm.gp.gibbs.sweep.Sweeper`; `msrm.gp.gibbs.native_data.unsupported` says what is not covered.
    solver : Solver
    values : {modality: {name: float}}
        Free response parameters where supports are measured.
    room : float
        How much longer than there supports may become.

    Attributes
    ----------
    data : pytree of arrays
        First argument of `sweeps`.
    blocks : tuple of Block
    """

    def __init__(
        self,
        specification: Specification,
        layout: NodeLayout,
        backend: StateSpace,
        solver: Solver,
        *,
        values: Mapping[str, Mapping[str, float]],
        room: float,
    ) -> None:
        self.specification, self.layout = specification, layout
        length_scale = float(specification.length_scale)  # type: ignore[arg-type]
        self.chain = StateSpaceChain(backend, solver, length_scale=length_scale, values=values, room=room)
        timescales = {pair.modality: np.nan for pair in layout.pairs}
        self.design = Design.of(specification, layout, timescales)
        self.stacks, observed = modality_stacks(self.design, layout)
        self.blocks = prior_blocks(specification, self.design.modalities)
        priors, size = specification.priors, specification.n_factors
        self._row_precisions = jnp.asarray([*[priors.loading_sd**-2.0] * size, priors.offset_sd**-2.0])
        self._counts = jnp.asarray([pair.power * sum(pair.scalars.values()) for pair in self.design.pairs.values()])
        grid = GridPoints(self.chain.chain, backend.matern, backend.matern.rate(length_scale) * backend.step)
        self.paths = Paths(specification, self.chain, self.stacks, grid)
        self.data = {
            "observed": observed,
            "rows": self.chain.data,
            "coarse": grid.levels(),
            "covariance": grid.window_covariance(),
            "step": grid.steps(),
            "inside": jnp.asarray(_shares([one.count for one in backend.grids.values()], grid.counts)),
        }

    # --- the latent-marginal density ---

    def current(self, data: Any, state: ChainState) -> _Current:
        """Statistics, factor and value of a state."""
        statistics = {
            modality: stacks.statistics(data["observed"][modality], state.rows[modality], state.noise)
            for modality, stacks in self.stacks.items()
        }
        constants = [
            stacks.constant(data["observed"][modality], state.rows[modality], state.noise)
            for modality, stacks in self.stacks.items()
        ]
        return self._evaluated(data, state, statistics, jnp.stack(constants).sum())

    def _evaluated(
        self, data: Any, state: ChainState, statistics: dict[str, NodeStatistics], constant: Array
    ) -> _Current:
        system = self.chain.system(data["rows"], state.responses, None, statistics)
        factor = self.chain.solver.forward(system.diagonal, system.lower, system.right[..., None])
        value = 0.5 * (factor.quadratic[0] - factor.log_determinant) + system.constant + constant
        return _Current(state, statistics, system, factor, constant, jnp.where(system.fits, value, jnp.nan))

    def _gain(self, data: Any, current: _Current, modality: str) -> Array:
        """Prior sd of the functional of a modality's first node."""
        system = current.system
        here = jnp.where(system.nodes[modality] == 0, 1.0, 0.0)
        row = (here[..., None] * system.rows[modality]).sum((0, 1))
        variance = row @ data["covariance"] @ row
        if modality in system.residual:
            variance = variance + (here * system.residual[modality]).sum()
        return jnp.sqrt(variance)

    def propose(self, data: Any, current: _Current, block: Block, coordinates: Array) -> tuple[_Current, Array]:
        """The state at other coordinates of a block, loadings scaled along, and the change of prior plus Jacobian."""
        modality = block.modalities[0]
        names = [name.rsplit("/", 1)[1] for name in block.names]
        values = {
            name: jnp.exp(x) if log else x for name, x, log in zip(names, coordinates, block.logarithmic, strict=True)
        }
        state = current.state._replace(responses=current.state.responses | {modality: values})
        rows = self.chain.rows[modality](data["rows"][modality], values, self._x())
        moved = current.system._replace(
            rows=current.system.rows | {modality: rows.terms[:, :, 0]},
            nodes=current.system.nodes | {modality: rows.nodes},
            residual=current.system.residual | ({} if rows.residual is None else {modality: rows.residual}),
        )
        kappa = self._gain(data, current, modality) / self._gain(data, current._replace(system=moved), modality)
        size, sd = self.specification.n_factors, self.specification.priors.loading_sd
        scaled = jnp.ones(size + 1).at[:size].set(kappa)
        squares = sum((one[..., :size] ** 2).sum() for one in current.state.rows[modality])
        state = state._replace(
            rows=state.rows | {modality: tuple(one * scaled for one in current.state.rows[modality])}
        )
        old = current.statistics[modality]
        statistics = current.statistics | {modality: NodeStatistics(old.precision * kappa**2, old.information * kappa)}
        change = -0.5 * (kappa**2 - 1.0) * squares / sd**2
        change = change + self.stacks[modality].feature_rows * size * jnp.log(kappa)
        return self._evaluated(data, state, statistics, current.constant), change

    def _x(self) -> Array:
        length_scale: Any = self.chain.length_scale
        return jnp.asarray(self.chain.matern.rate(length_scale) * self.chain.chain.step)

    def step(
        self, data: Any, key: Array, current: _Current, block: Block, tuning: Tuning, tune: Array
    ) -> tuple[_Current, Tuning, Array]:
        """Step 1 for one block: the state, its tuning, and (acceptance probability, whether the proposal fitted)."""
        kind, normals, heavy, accept = jax.random.split(key, 4)
        modality = block.modalities[0]
        names = [name.rsplit("/", 1)[1] for name in block.names]
        values = [current.state.responses[modality][name] for name in names]
        here = jnp.stack([jnp.log(v) if log else v for v, log in zip(values, block.logarithmic, strict=True)])
        standard = jax.random.normal(normals, here.shape)
        spread = jnp.sqrt((jax.random.normal(heavy, (_DEGREES,)) ** 2).sum() / _DEGREES)
        independent = tuning.fitted & (jax.random.uniform(kind) < 0.5)
        walked = here + jnp.exp(tuning.log_size) * (tuning.root @ standard)
        there = jnp.where(independent, tuning.mean + tuning.root @ standard / spread, walked)
        ratio = jnp.where(independent, _heavy(tuning, here) - _heavy(tuning, there), 0.0)
        ratio = ratio + _block_prior(block, there) - _block_prior(block, here)
        allowed = jnp.isfinite(ratio)
        moved, change = self.propose(data, current, block, jnp.where(allowed, there, here))
        total = ratio + change + moved.value - current.value
        probability = jnp.where(allowed & jnp.isfinite(total), jnp.exp(jnp.minimum(0.0, total)), 0.0)
        accepted = jax.random.uniform(accept) < probability
        out = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), moved, current)
        seen = tuning.seen + 1.0
        learned = tuning.log_size + (probability - _TARGET) / seen**_DECAY
        learns = tune & ~independent
        tuning = tuning._replace(
            log_size=jnp.where(learns, learned, tuning.log_size), seen=jnp.where(learns, seen, tuning.seen)
        )
        return out, tuning, jnp.stack([probability, jnp.where(allowed & ~moved.system.fits, 1.0, 0.0)])

    # --- the sweep ---

    def sweeps(
        self, data: Any, key: Array, state: ChainState, tunings: list[Tuning], first: Array, tune: Array, count: int
    ) -> dict[str, Any]:
        """What is kept of sweeps number ``first`` on, stacked; ``tune`` lets walks learn, ``count`` is static."""

        def once(carry: Any, number: Array) -> Any:
            current, tunings = carry
            current, tunings, record = self.sweep(data, jax.random.fold_in(key, number), current, tunings, tune)
            walks = (
                jnp.stack([jnp.stack([one.log_size, one.seen]) for one in tunings]) if tunings else jnp.zeros((0, 2))
            )
            return (current, tunings), record | {"walks": walks}

        return jax.lax.scan(once, (self.current(data, state), tunings), first + jnp.arange(count))[1]

    def sweep(
        self, data: Any, key: Array, current: _Current, tunings: Sequence[Tuning], tune: Array
    ) -> tuple[_Current, list[Tuning], dict[str, Any]]:
        """One sweep: where the next one starts, tuning, and what is kept of this one."""
        keys = jax.random.split(key, len(self.blocks) + 4)
        learned, told = [], []
        for block, tuning, own in zip(self.blocks, tunings, keys[4:], strict=True):
            current, tuning, one = self.step(data, own, current, block, tuning, tune)
            learned.append(tuning)
            told.append(one)
        path, functionals = self.latents(keys[0], current)
        state = self.draw_rows(data, keys[1], current.state, functionals)
        state = self.draw_noise(data, keys[2], state, functionals)
        state, path, functionals = self.move(data, keys[3], current.system, state, path, functionals)
        following = self.current(data, state)
        told_blocks = jnp.stack(told) if told else jnp.zeros((0, 2))
        record = {
            "state": state,
            "value": following.value,
            "conditional": {
                modality: stacks.conditional(
                    data["observed"][modality], state.rows[modality], state.noise, functionals[modality]
                )
                for modality, stacks in self.stacks.items()
            },
            "latent_power": (data["inside"] @ self.paths.values(path) ** 2).mean(),
            "acceptance": told_blocks[:, 0],
            "outgrown": told_blocks[:, 1].sum(),
        }
        return following, learned, record

    def latents(self, key: Array, current: _Current) -> tuple[Array, dict[str, Array]]:
        """Step 2: the grid states (block, K, point state) and the functionals (node, K) of every modality."""
        states, *residuals = jax.random.split(key, 1 + len(self.stacks))
        normals = jax.random.normal(states, (*current.system.right.shape, 1))
        drawn = self.chain.solver.sample(current.factor, normals)[..., 0]
        path = drawn.reshape(len(drawn), self.specification.n_factors, -1)
        functionals = {}
        for modality, own in zip(self.stacks, residuals, strict=True):
            seen = self.paths.seen(current.system, modality, path)
            if modality in current.system.residual:
                rho = self.paths.by_node(current.system, modality, current.system.residual[modality][..., None])
                seen = seen + _residuals(own, rho[..., None], current.statistics[modality], seen)
            functionals[modality] = seen
        return path, functionals

    def draw_rows(self, data: Any, key: Array, state: ChainState, functionals: dict[str, Array]) -> ChainState:
        """Step 3."""
        rows: dict[str, tuple[Array, ...]] = {}
        for modality, stacks in self.stacks.items():
            key, *own = jax.random.split(key, 1 + len(stacks.stacks))
            rows[modality] = tuple(
                draw_rows(one, stack, given, functionals[modality], state.noise, self._row_precisions)
                for one, stack, given in zip(own, stacks.stacks, data["observed"][modality]["stacks"], strict=True)
            )
        return state._replace(rows=rows)

    def draw_noise(self, data: Any, key: Array, state: ChainState, functionals: dict[str, Array]) -> ChainState:
        """Step 4."""
        squares = jnp.zeros_like(state.noise)
        for modality, stacks in self.stacks.items():
            given = data["observed"][modality]["stacks"]
            for stack, one, rows in zip(stacks.stacks, given, state.rows[modality], strict=True):
                found = entry_squares(stack, one, rows, functionals[modality]).sum(1)
                squares = squares.at[jnp.asarray(stack.places)].set(stack.power * found)
        prior = self.specification.priors.noise
        return state._replace(noise=draw_noise(key, self._counts, squares, prior, state.noise))  # type: ignore[arg-type]

    def move(
        self,
        data: Any,
        key: Array,
        system: BlockSystem,
        state: ChainState,
        path: Array,
        functionals: dict[str, Array],
    ) -> tuple[ChainState, Array, dict[str, Array]]:
        """Step 5: scale at every level, shift, rotation."""
        statistics = {
            modality: stacks.statistics(data["observed"][modality], state.rows[modality], state.noise)
            for modality, stacks in self.stacks.items()
        }
        *scales, shifting, turning = jax.random.split(key, len(data["coarse"]) + 2)
        for own, coarse in zip(scales, data["coarse"], strict=True):
            path, functionals, statistics, turn = self.paths.scaled(
                own, coarse, system, state, path, functionals, statistics
            )
            state = _turned(state, turn)
        state, path, functionals = self.paths.shifted(shifting, data, system, state, path, functionals, statistics)
        turn = haar(turning, self.specification.n_factors)
        return (
            _turned(state, turn),
            jnp.einsum("nkp,kl->nlp", path, turn),
            {modality: seen @ turn for modality, seen in functionals.items()},
        )


def _residuals(key: Array, rho: Array, statistics: NodeStatistics, seen: Array) -> Array:
    """e (node, K) given the states: precision ``1 / rho + D``, written so that rho may be zero."""
    size = seen.shape[-1]
    root = cholesky(jnp.eye(size) + rho * jnp.broadcast_to(statistics.precision, (len(seen), size, size)))
    score = statistics.information - (statistics.precision @ seen[..., None])[..., 0]
    half = solve_triangular(root, rho * score[..., None], lower=True)
    half = half + jnp.sqrt(rho) * jax.random.normal(key, half.shape)
    return solve_triangular(root, half, lower=True, trans=1)[..., 0]


def _turned(state: ChainState, right: Array) -> ChainState:
    """The state with every loading W replaced by ``W right``."""
    size = right.shape[0]
    rows = {
        modality: tuple(jnp.concatenate([one[..., :size] @ right, one[..., size:]], -1) for one in of)
        for modality, of in state.rows.items()
    }
    return state._replace(rows=rows)


def _shares(real: list[int], filled: np.ndarray) -> np.ndarray:
    """Weights (point,) of a mean over the grids' own points: blocks reach beyond them, where the prior alone rules."""
    inside = np.concatenate([np.arange(count) < own for own, count in zip(real, filled, strict=True)])
    return inside / inside.sum()


def _heavy(tuning: Tuning, x: Array) -> Array:
    """Log density of the independence proposal up to a constant."""
    scaled = tuning.inverse @ (x - tuning.mean)
    return -0.5 * (_DEGREES + x.shape[0]) * jnp.log1p(scaled @ scaled / _DEGREES)


def _block_prior(block: Block, coordinates: Array) -> Array:
    """Log prior density of a block's coordinates, minus infinity outside the bounds."""
    total = jnp.zeros(())
    for x, log, prior in zip(coordinates, block.logarithmic, block.priors, strict=True):
        total = total + log_prior(prior, jnp.exp(x) if log else x) + (x if log else 0.0)
    return total
