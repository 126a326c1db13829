"""One sweep of the Gibbs sampler (DESIGN 5): its order, its tuning and the state that survives it.

(1) response parameters, residual timescales and length scale on the latent-marginal density, then at once (2) the
latent states of every run and the node functionals; (3) rows [w b c...] of every pair with its null block; (4) noise
variances; (5) scale, shift and rotation moves. Step (2) must follow (1) before anything that depends on the latents
is drawn: (1) leaves the marginal density invariant, not the density given the old paths.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import NodeLayout
from msrm.gp.gibbs import moves
from msrm.gp.gibbs.conditionals import draw_noise, draw_null_factor, draw_rows
from msrm.gp.gibbs.latents import CoarseComponent, draw_functionals, draw_states
from msrm.gp.gibbs.marginal import Marginal, prior_blocks
from msrm.gp.gibbs.state import Current, State
from msrm.gp.parameters import FreeLengthScale, Specification
from msrm.gp.statespace import StateSpace

__all__ = ["Sweeper"]

Array = NDArray[np.float64]
_DIRECTIONS = 4  # of the scale move, a level and sweep; each costs a few products of K numbers a node
_LEVELS = 3  # coarse grids, each half as dense as the one before
_FEWEST_POINTS = 4


class Sweeper:
    """The transition of one chain and its tuning.

    Parameters
    ----------
    specification : Specification
    layout : NodeLayout
    backend : StateSpace
        Its spacing and its use of residual variances define the density that is sampled.
    """

    def __init__(self, specification: Specification, layout: NodeLayout, backend: StateSpace) -> None:
        self.specification, self.layout = specification, layout
        self.marginal = Marginal(specification, layout, backend)
        self.blocks = prior_blocks(specification, tuple(dict.fromkeys(pair.modality for pair in layout.pairs)))
        self.proposals = [block.first_proposal() for block in self.blocks]
        self.levels = _coarse_points(backend, specification)
        self._coarse: list[dict[str, CoarseComponent]] | None = None

    def start(self, state: State) -> Current:
        """Everything the first sweep needs."""
        return self.marginal.current(state)

    def sweep(self, rng: np.random.Generator, current: Current, *, tune: bool) -> Current:
        """One sweep.

        Parameters
        ----------
        rng : Generator
        current : Current
            Of :meth:`start` or the sweep before.
        tune : bool
            Let proposals learn; never after warm-up.

        Returns
        -------
        Current
            With latents drawn, before :meth:`start` is called on its state for the next sweep.
        """
        for block, proposal in zip(self.blocks, self.proposals, strict=True):
            current = self.marginal.step(rng, current, block, proposal, tune=tune)
        # The latents follow at once: see the module's first lines.
        self.draw_latents(rng, current)
        self.draw_rows(rng, current)
        self.draw_noise(rng, current)
        self.move(rng, current)
        return current

    def draw_latents(self, rng: np.random.Generator, current: Current) -> None:
        """Step 2: grid states and functionals of every run."""
        for run, posterior in current.posteriors.items():
            current.states[run] = draw_states(rng, posterior)
            current.functionals[run] = draw_functionals(rng, posterior, current.states[run])

    def matrices(self, current: Current) -> dict[tuple[str, str], Array]:
        """The design matrix of every pair, given the functionals."""
        return {
            key: pair.matrix({run: current.functionals[run][key[1]] for run in pair.nodes})
            for key, pair in current.design.pairs.items()
        }

    def draw_rows(self, rng: np.random.Generator, current: Current) -> None:
        """Step 3: [w b c...] of every coordinate, and the factors that stand for null rows."""
        priors = self.specification.priors
        matrices = self.matrices(current)
        for key, pair in current.design.pairs.items():
            precisions = np.full(matrices[key].shape[1], priors.run_offset_sd**-2.0)
            size = self.specification.n_factors
            precisions[:size], precisions[size] = priors.loading_sd**-2.0, priors.offset_sd**-2.0
            noise = current.state.noise[key] / pair.power
            grams, own = pair.grams(matrices[key]), pair.pair.n_coordinates
            rows = np.empty((pair.values.shape[1], len(precisions)))
            gram = grams[0] if len(grams) == 1 or pair.complete else grams[pair.pattern[:own]]
            rows[:own] = draw_rows(rng, gram, pair.values[:, :own].T @ matrices[key], precisions, noise)
            for pattern, span in pair.null.items():
                count = int(pair.pair.null_counts[pattern])
                rows[span] = draw_null_factor(rng, grams[pattern], precisions, noise, count).T
            current.state.rows[key] = rows

    def draw_noise(self, rng: np.random.Generator, current: Current) -> None:
        """Step 4: noise variances, and with them D and h for the moves."""
        matrices, state = self.matrices(current), current.state
        for key, pair in current.design.pairs.items():
            squares = pair.power * sum(pair.squares(matrices[key], state.rows[key]).values())
            count = pair.power * sum(pair.scalars.values())
            state.noise[key] = draw_noise(rng, count, squares, self.specification.priors.noise, state.noise[key])
        for modality in current.design.modalities:
            for run, given in current.design.statistics(modality, state.rows, state.noise).items():
                current.statistics[run][modality] = given

    def move(self, rng: np.random.Generator, current: Current) -> None:
        """Step 5: scale at every level, shift against offsets and run offsets, rotation."""
        priors, pairs = self.specification.priors, current.design.pairs
        for coarse in self.coarse(current):
            moves.scale(rng, current, coarse, _DIRECTIONS)
        moves.shift(rng, current, tuple(self.layout.groups), dict.fromkeys(pairs, 0), priors.offset_sd)
        for run in self.layout.groups:
            column = {
                key: 1 + list(pair.pair.rows).index(run)
                for key, pair in pairs.items()
                if key[1] in self.specification.run_offsets and run in pair.pair.rows
            }
            if column:
                moves.shift(rng, current, (run,), column, priors.run_offset_sd)
        moves.rotate(rng, current)

    def coarse(self, current: Current) -> list[dict[str, CoarseComponent]]:
        """Coarse components by level and run; kept while the length scale is fixed."""
        if self._coarse is not None:
            return self._coarse
        made = [
            {run: CoarseComponent.of(current.posteriors[run].prior, places) for run, places in level.items()}
            for level in self.levels
        ]
        if not isinstance(self.specification.length_scale, FreeLengthScale):
            self._coarse = made
        return made

    def log_likelihoods(self, current: Current) -> dict[tuple[str, str, str], float]:
        """Log likelihood given the latents, by participant, modality and run."""
        matrices = self.matrices(current)
        return {
            (*key, run): value
            for key in current.design.pairs
            for run, value in current.design.conditional(
                key, matrices[key], current.state.rows[key], current.state.noise[key]
            ).items()
        }

    def end_window(self) -> None:
        """Fit the block proposals to the draws since the last window."""
        for proposal in self.proposals:
            proposal.fit()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The tuning, for storage."""
        out: dict[str, NDArray[Any]] = {}
        for i, proposal in enumerate(self.proposals):
            out |= {f"block.{i}.{name}": value for name, value in proposal.arrays().items()}
        return out

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Undo :meth:`arrays`."""
        for i, proposal in enumerate(self.proposals):
            proposal.load(_below(arrays, f"block.{i}."))


def _below(arrays: Mapping[str, NDArray[Any]], prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}


def _coarse_points(backend: StateSpace, specification: Specification) -> list[dict[str, NDArray[np.intp]]]:
    """Grid points of the coarse levels by run: an Identity clock where there is one, and every second, fourth of it."""
    finest = {}
    for run, groups in backend.groups.items():
        grid = backend.grids[run]
        identity = [group for group in groups.values() if group.response.is_identity]
        if identity:
            times = max(identity, key=lambda group: len(group.times)).times
            places = np.unique(np.clip(np.round((times - grid.start) / grid.step), 0, grid.count - 1).astype(np.intp))
        else:
            stride = max(1, round(0.5 * _typical_length_scale(specification) / grid.step))
            places = np.arange(0, grid.count, stride)
        finest[run] = places
    levels = [{run: places[:: 2**level] for run, places in finest.items()} for level in range(_LEVELS)]
    return [level for i, level in enumerate(levels) if i == 0 or min(map(len, level.values())) >= _FEWEST_POINTS]


def _typical_length_scale(specification: Specification) -> float:
    given = specification.length_scale
    return given.start if isinstance(given, FreeLengthScale) else float(given)
