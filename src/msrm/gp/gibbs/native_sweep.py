"""Gibbs sweeps compiled: the steps of `msrm.gp.gibbs.sweep` as pure functions, many sweeps in one dispatch (DESIGN 5).

(1) response parameters with their loadings on the latent-marginal density; (2) grid states and node functionals from
the factor of the accepted point; (3) rows and null block; (4) noise variances; (5) scale, shift and rotation. A sweep
is a function of its state, its tuning and its number alone, so that the length of a dispatch changes no bit.

What the scale move stretches follows from the *states* at every q-th grid point (`msrm.gp.gibbs.native_geometry`);
`msrm.gp.gibbs.latents` takes values at an Identity clock. Both leave the density invariant.
"""

from collections.abc import Callable, Mapping, Sequence
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
from msrm.gp.gibbs.native_data import ChainState, entry_squares, modality_stacks
from msrm.gp.gibbs.native_geometry import GridPoints
from msrm.gp.gibbs.native_moves import draw_noise, draw_rows, haar
from msrm.gp.gibbs.native_paths import Paths
from msrm.gp.gibbs.native_proposals import Step, Tuning, at_coordinates, learned, suggested
from msrm.gp.jax_cholesky import cholesky
from msrm.gp.jax_rows import CurveRows, WindowRows
from msrm.gp.jax_statespace import BlockSystem, NodeStatistics, StateSpaceChain
from msrm.gp.parameters import Specification
from msrm.gp.statespace import StateSpace

__all__ = ["NativeSweeper"]


class _Current(NamedTuple):
    """A state and what its latent-marginal density was computed from.

    Attributes
    ----------
    state : ChainState
    gains : (modality,)
        Prior sd of the functional of each modality's first node.
    statistics : {modality: NodeStatistics}
    system : BlockSystem
    factor : CyclicFactor or the like
    value : ()
        Log likelihood.
    """

    state: ChainState
    gains: Array
    statistics: dict[str, NodeStatistics]
    system: BlockSystem
    factor: Any
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
        self._lengths = [self._length(block.modalities[0], values) for block in self.blocks]
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

    def _length(self, modality: str, start: Mapping[str, Mapping[str, float]]) -> Callable[[Any], Array]:
        """The length of a modality's support over the one at the start."""
        rows = self.chain.rows[modality]
        assert isinstance(rows, CurveRows)
        first = float(rows.support_length(start[modality]))
        return lambda responses: rows.support_length(responses[modality]) / first

    # --- the latent-marginal density ---

    def current(self, data: Any, state: ChainState) -> _Current:
        """Statistics, factor and value of a state."""
        return self._moved(data, state, jnp.zeros(len(self.stacks)))[0]

    def _moved(self, data: Any, state: ChainState, gains: Array) -> tuple[_Current, Array]:
        """A state whose loadings were scaled against the responses' change of gain, and the log of prior and Jacobian.

        ``gains`` are those that its loadings belong to, zero where loadings stay.
        """
        windows = self.chain.windows(data["rows"], state.responses, None)
        found = jnp.stack([_gain(data["covariance"], windows[modality]) for modality in self.stacks])
        kappa = jnp.where(gains > 0.0, gains / found, 1.0)
        size, sd = self.specification.n_factors, self.specification.priors.loading_sd
        rows, statistics, change, constant = {}, {}, jnp.zeros(()), jnp.zeros(())
        for (modality, stacks), scale in zip(self.stacks.items(), kappa, strict=True):
            given = data["observed"][modality]
            squares = sum((one[..., :size] ** 2).sum() for one in state.rows[modality])
            scaled = jnp.ones(size + 1).at[:size].set(scale)
            rows[modality] = tuple(one * scaled for one in state.rows[modality])
            statistics[modality] = stacks.statistics(given, rows[modality], state.noise)
            constant = constant + stacks.constant(given, rows[modality], state.noise)
            change = change - 0.5 * (scale**2 - 1.0) * squares / sd**2 + stacks.feature_rows * size * jnp.log(scale)
        system = self.chain.assembled(windows, None, statistics)
        factor = self.chain.solver.forward(system.diagonal, system.lower, system.right[..., None])
        value = 0.5 * (factor.quadratic[0] - factor.log_determinant) + system.constant + constant
        value = jnp.where(system.fits, value, jnp.nan)
        return _Current(state._replace(rows=rows), found, statistics, system, factor, value), change

    def propose(self, data: Any, current: _Current, block: Block, coordinates: Array) -> tuple[_Current, Array]:
        """The state at other coordinates of a block, loadings scaled along, and the change of prior plus Jacobian."""
        responses = at_coordinates(block, current.state.responses, coordinates)
        return self._moved(data, current.state._replace(responses=responses), current.gains)

    def step(
        self, data: Any, key: Array, current: _Current, place: Array, tunings: Sequence[Tuning], walks: Array
    ) -> tuple[_Current, Step]:
        """Step 1 for block number ``place - 1``; number 0 evaluates the state where it is.

        All go through one evaluation, so that it is compiled once.
        """
        suggesting, accepting = jax.random.split(key)

        def stays() -> Any:
            return current.state.responses, jnp.zeros(()), jnp.asarray(False)

        def suggests(which: int, tuning: Tuning) -> Any:
            block, length = self.blocks[which], self._lengths[which]
            return lambda: suggested(block, length, suggesting, current.state.responses, tuning, walks[which, 0])

        made = [stays, *(suggests(which, tuning) for which, tuning in enumerate(tunings))]
        responses, ratio, independent = jax.lax.switch(place, made)
        first, allowed = place == 0, jnp.isfinite(ratio)
        moved, change = self._moved(
            data, current.state._replace(responses=responses), jnp.where(first, 0.0, current.gains)
        )
        total = ratio + change + moved.value - current.value
        probability = jnp.where(allowed & jnp.isfinite(total), jnp.exp(jnp.minimum(0.0, total)), 0.0)
        accepted = first | (jax.random.uniform(accepting) < probability)
        out = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), moved, current)
        return out, Step(probability, independent, allowed & ~moved.system.fits, out.value)

    # --- the sweep ---

    def sweeps(
        self,
        data: Any,
        key: Array,
        state: ChainState,
        tunings: Sequence[Tuning],
        walks: Array,
        first: Array,
        tune: Array,
        count: int,
    ) -> dict[str, Any]:
        """What is kept of sweeps number ``first`` on, stacked; ``tune`` lets walks learn, ``count`` is static.

        ``walks (block, 2)`` are the logarithm of each walk's length and how many steps it has learned from. A sweep
        evaluates its state at its beginning: one more than ``count`` tells the log likelihood after the last.
        """

        def once(carry: tuple[ChainState, Array], number: Array) -> Any:
            own = jax.random.fold_in(key, number)
            state, walks, record = self.sweep(data, own, carry[0], tunings, carry[1], tune)
            return (state, walks), record

        record = jax.lax.scan(once, (state, walks), first + jnp.arange(count + 1))[1]
        kept: dict[str, Any] = jax.tree.map(lambda values: values[:count], record)
        return kept | {"value": record["value"][1:]}

    def sweep(
        self, data: Any, key: Array, state: ChainState, tunings: Sequence[Tuning], walks: Array, tune: Array
    ) -> tuple[ChainState, Array, dict[str, Any]]:
        """One sweep: the state after it, its walks, and what is kept of it; ``value`` is of the state before."""
        stepping, *keys = jax.random.split(key, 5)

        def stepped(carry: tuple[_Current, Array], at: tuple[Array, Array]) -> Any:
            (current, walks), (place, own) = carry, at
            current, told = self.step(data, own, current, place, tunings, walks)
            return (current, learned(walks, place, told, tune)), told

        places = jnp.arange(len(self.blocks) + 1)
        empty = jax.eval_shape(self.current, data, state)
        start = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), empty)._replace(state=state)
        (current, walks), told = jax.lax.scan(
            stepped, (start, walks), (places, jax.random.split(stepping, len(places)))
        )
        path, functionals = self.latents(keys[0], current)
        state = self.draw_rows(data, keys[1], current.state, functionals)
        state = self.draw_noise(data, keys[2], state, functionals)
        state, path, functionals = self.move(data, keys[3], current.system, state, path, functionals)
        record = {
            "state": state,
            "value": told.value[0],
            "conditional": {
                modality: stacks.conditional(
                    data["observed"][modality], state.rows[modality], state.noise, functionals[modality]
                )
                for modality, stacks in self.stacks.items()
            },
            "latent_power": (data["inside"] @ self.paths.values(path) ** 2).mean(),
            "acceptance": told.probability[1:],
            "independent": told.independent[1:],
            "outgrown": told.outgrown.any(),
            "walks": walks,
        }
        return state, walks, record

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
        scaling, shifting, turning = jax.random.split(key, 3)
        path, functionals, statistics, turn = self.paths.scaled(
            scaling, data["coarse"], system, state, path, functionals, statistics
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


def _gain(covariance: Array, windows: WindowRows) -> Array:
    """Prior sd of the functional of a modality's first node, from the prior covariance of a window's states."""
    here = jnp.where(windows.nodes == 0, 1.0, 0.0)
    row = (here[..., None] * windows.terms[:, :, 0]).sum((0, 1))
    variance = row @ covariance @ row
    return jnp.sqrt(variance if windows.residual is None else variance + (here * windows.residual).sum())
