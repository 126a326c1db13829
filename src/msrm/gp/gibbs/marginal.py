"""Steps on the latent-marginal density: response parameters, length scale and residual timescales (DESIGN 5, step 1).

A block of scalars theta is proposed together with the scale of the loadings it trades against: W_m becomes
``kappa W_m`` with ``kappa = gain_m(theta) / gain_m(theta')``, gain^2 the prior variance of a functional of modality m.
The Jacobian is ``kappa^(feature rows x K)``, null rows counted.

A residual timescale tau takes the noise variances of its modality along, so that the variance between neighbouring
rows, ``v (1 - exp(-2 gap / tau))`` at the median gap, stays: data with small gaps hardly tell v and tau apart.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import Key, NodeLayout
from msrm.gp.gibbs.design import Design
from msrm.gp.gibbs.proposals import BlockProposal
from msrm.gp.gibbs.state import Current, State
from msrm.gp.node_terms import NodeTerms, node_terms
from msrm.gp.parameters import FreeLengthScale, Specification
from msrm.gp.posterior import Posterior
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Functionals, GridPrior, functionals
from msrm.nodes import GroupStatistics
from msrm.priors import Prior

__all__ = ["Block", "Marginal", "prior_blocks"]

Array = NDArray[np.float64]
_KEPT = 4  # responses whose functionals are kept: the current one, a proposal, and room for other blocks
_FIRST_SPREAD = 0.05  # of the prior's interquartile range: small against the prior, and it grows within sweeps


@dataclass(frozen=True)
class Block:
    """Scalars proposed together.

    Attributes
    ----------
    names : tuple of str
        As in :meth:`State.with_parameter`.
    priors : tuple of Prior
    logarithmic : tuple of bool
        Coordinates that are logarithms.
    modalities : tuple of str
        Whose nodes change.
    scaled : tuple of str
        Whose loadings are scaled along.
    """

    names: tuple[str, ...]
    priors: tuple[Prior, ...]
    logarithmic: tuple[bool, ...]
    modalities: tuple[str, ...]
    scaled: tuple[str, ...]

    @property
    def label(self) -> str:
        """The block's name in records of acceptance: ``response/m``, ``residual_timescale/m`` or ``length_scale``."""
        return "/".join(self.names[0].split("/")[:2])

    def coordinates(self, state: State) -> Array:
        """Where the block is, unbounded coordinates (d,)."""
        values = [state.parameter(name) for name in self.names]
        return np.array([np.log(v) if log else v for v, log in zip(values, self.logarithmic, strict=True)])

    def values(self, coordinates: Array) -> list[float]:
        """Physical values of coordinates."""
        return [float(np.exp(x)) if log else float(x) for x, log in zip(coordinates, self.logarithmic, strict=True)]

    def log_density(self, coordinates: Array) -> float:
        """Log prior density of the coordinates, minus infinity outside the bounds."""
        total = 0.0
        for value, x, log, prior in zip(
            self.values(coordinates), coordinates, self.logarithmic, self.priors, strict=True
        ):
            inside = prior.lower < value < prior.upper
            total += (float(prior.log_density(value)) if inside else -np.inf) + (x if log else 0.0)
        return total

    def first_proposal(self) -> BlockProposal:
        """The walk that tuning starts from."""
        quartiles = [prior.quantile(np.array([0.25, 0.75])) for prior in self.priors]
        spread = [
            float(np.diff(np.log(q) if log else q)[0]) for q, log in zip(quartiles, self.logarithmic, strict=True)
        ]
        return BlockProposal(_FIRST_SPREAD * np.array(spread))


def prior_blocks(specification: Specification, modalities: tuple[str, ...]) -> tuple[Block, ...]:
    """One block for each modality's free response parameters, each residual timescale and the length scale."""
    blocks = []
    for modality in modalities:
        response = specification.responses[modality]
        if response.free:
            names = tuple(f"response/{modality}/{name}" for name in response.free)
            priors = tuple(free.bounded_prior for free in response.free.values())
            logs = tuple(name in response.positive for name in response.free)
            blocks.append(Block(names, priors, logs, (modality,), (modality,)))
        timescale = specification.residual(modality).free
        if timescale is not None:
            names = (f"residual_timescale/{modality}",)
            blocks.append(Block(names, (timescale.bounded_prior,), (True,), (modality,), ()))
    if isinstance(specification.length_scale, FreeLengthScale):
        filtered = tuple(m for m in modalities if not specification.responses[m].is_identity)
        blocks.append(Block(("length_scale",), (specification.length_scale.prior,), (True,), modalities, filtered))
    return tuple(blocks)


class Marginal:
    """The density of the parameters with the latents integrated out.

    What depends on a modality's response and not on its loadings is kept for the last few values of the response.

    Parameters
    ----------
    specification : Specification
    layout : NodeLayout
    backend : StateSpace
    """

    def __init__(self, specification: Specification, layout: NodeLayout, backend: StateSpace) -> None:
        self.specification, self.layout, self.backend = specification, layout, backend
        self._kept: dict[tuple[str, str], dict[tuple[float, ...], _Kept]] = {}
        self._priors: dict[tuple[str, float], GridPrior] = {}

    def current(self, state: State, design: Design | None = None) -> Current:
        """Everything a sweep needs to start from a state, which is left as it is.

        Parameters
        ----------
        state : State
        design : Design, optional
            One at the state's residual timescales.
        """
        state = replace(state, rows=dict(state.rows), noise=dict(state.noise))
        design = Design.of(self.specification, self.layout, state.timescales) if design is None else design
        by_modality = {m: design.statistics(m, state.rows, state.noise) for m in design.modalities}
        statistics = {run: {m: by_modality[m][run] for m in groups} for run, groups in self.layout.groups.items()}
        posteriors = {run: self.posterior(run, state, given) for run, given in statistics.items()}
        return Current(state, design, statistics, posteriors, design.constant(state.rows, state.noise), {}, {})

    def posterior(self, run: str, state: State, statistics: Mapping[str, GroupStatistics]) -> Posterior:
        """Latent states of one run given the parameters: :meth:`StateSpace.posterior`, from kept parts."""
        backend, grid, nodes = self.backend, self.backend.grids[run], {}
        for modality, group in backend.groups[run].items():
            kept = self._parts(run, modality, state)
            terms = node_terms(group, kept.made, statistics[modality], residual=modality in backend.residual)
            # Nodes with few distinct D have a temporal Gram that only the response and the timescale change.
            if type(terms) is NodeTerms:
                kept.gram = terms.gram if kept.gram is None else kept.gram
                terms.__dict__["gram"] = kept.gram
            nodes[modality] = terms
        if (run, state.length_scale) not in self._priors:
            self._priors = {key: prior for key, prior in self._priors.items() if key[0] != run}
            rate = backend.matern.rate(state.length_scale)
            self._priors[run, state.length_scale] = GridPrior.on(backend.matern, rate * grid.step, grid.count)
        prior = self._priors[run, state.length_scale]
        return Posterior.of(grid, backend.n_factors, state.length_scale, prior, nodes)

    def _parts(self, run: str, modality: str, state: State) -> "_Kept":
        values = state.responses.get(modality, {})
        timescale = state.timescales[modality]
        # NaN, the timescale of white residuals, is not equal to itself.
        key = (*values.values(), state.length_scale, -1.0 if np.isnan(timescale) else timescale)
        kept = self._kept.setdefault((run, modality), {})
        if key not in kept:
            backend, group = self.backend, self.backend.groups[run][modality]
            made = functionals(
                backend.grids[run], backend.matern, state.length_scale, group.response, values, group.times
            )
            while len(kept) >= _KEPT:
                del kept[next(iter(kept))]
            kept[key] = _Kept(made)
        return kept[key]

    def step(
        self, rng: np.random.Generator, current: Current, block: Block, proposal: BlockProposal, *, tune: bool
    ) -> Current:
        """One Metropolis-Hastings step of a block and the loadings that go with it."""
        here = block.coordinates(current.state)
        there, log_ratio, walked = proposal.propose(rng, here)
        log_ratio += block.log_density(there) - block.log_density(here)
        moved, probability = current, 0.0
        if np.isfinite(log_ratio):
            moved, change = self._moved(current, block, block.values(there))
            change += moved.log_likelihood - current.log_likelihood
            # A failed factorization gives NaN: the proposal is refused.
            probability = float(np.exp(min(0.0, log_ratio + change))) if np.isfinite(change) else 0.0
        accepted = rng.uniform() < probability
        if tune:
            proposal.learn(there if accepted else here, probability, walked)
        out = moved if accepted else current
        out.acceptance = current.acceptance | {block.label: probability}
        return out

    def _moved(self, current: Current, block: Block, values: list[float]) -> tuple[Current, float]:
        """The sweep at other values of a block, and the log prior and Jacobian of what went along."""
        state = current.state
        for name, value in zip(block.names, values, strict=True):
            state = state.with_parameter(name, value)
        design, constant = current.design, current.constant
        statistics = {run: dict(groups) for run, groups in current.statistics.items()}
        change = 0.0
        timescales = [m for m in block.modalities if state.timescales[m] != current.state.timescales[m]]
        for modality in (m for m in timescales if np.isfinite(state.timescales[m])):
            constant -= design.constant(state.rows, state.noise, modality)
            design = design.at(modality, state.timescales[modality])
            noise, change = self._noise_along(current.state, state, modality)
            state = replace(state, noise=noise)
            constant += design.constant(state.rows, state.noise, modality)
            for run, given in design.statistics(modality, state.rows, state.noise).items():
                statistics[run][modality] = given
        rows = dict(state.rows)
        for modality in block.scaled:
            kappa = self._gain(current.state, modality) / self._gain(state, modality)
            change += self._scaled(rows, statistics, design, modality, kappa)
        state = replace(state, rows=rows)
        posteriors = {
            run: self.posterior(run, state, groups) if set(groups) & set(block.modalities) else current.posteriors[run]
            for run, groups in statistics.items()
        }
        return Current(state, design, statistics, posteriors, constant, {}, {}), change

    def _noise_along(self, before: State, after: State, modality: str) -> tuple[dict[Key, float], float]:
        """Noise variances at another timescale, and the change of their log prior plus the log Jacobian."""
        gaps = [gap for (_, name), gap in self.layout.gaps.items() if name == modality]
        typical = np.concatenate([gap[np.isfinite(gap) & (gap > 0.0)] for gap in gaps])
        if not len(typical):
            return before.noise, 0.0
        old, new = (-np.expm1(-2.0 * np.median(typical) / state.timescales[modality]) for state in (before, after))
        noise, change, prior = dict(before.noise), 0.0, self.specification.priors.noise
        for key in (key for key in noise if key[1] == modality):
            noise[key] = float(before.noise[key] * old / new)
            change += float(prior.log_density(noise[key]) - prior.log_density(before.noise[key]) + np.log(old / new))
        return noise, change

    def _scaled(
        self,
        rows: dict[Key, Array],
        statistics: dict[str, dict[str, GroupStatistics]],
        design: Design,
        modality: str,
        kappa: float,
    ) -> float:
        """Scale a modality's loadings by kappa; the change of their log prior plus the log Jacobian."""
        size, squares = self.specification.n_factors, 0.0
        for key in [key for key in rows if key[1] == modality]:
            squares += float(np.square(rows[key][:, :size]).sum())
            rows[key] = rows[key] * np.where(np.arange(rows[key].shape[1]) < size, kappa, 1.0)
        for groups in statistics.values():
            if modality in groups:
                given = groups[modality]
                groups[modality] = replace(
                    given, precision=given.precision * kappa**2, information=given.information * kappa
                )
        prior = -0.5 * (kappa**2 - 1.0) * squares / self.specification.priors.loading_sd**2
        return prior + design.feature_rows[modality] * size * float(np.log(kappa))

    def _gain(self, state: State, modality: str) -> float:
        """Prior sd of a functional of a modality, at its first node on the grid."""
        backend, matern = self.backend, self.backend.matern
        run = next(run for run, groups in self.layout.groups.items() if modality in groups)
        made = self._parts(run, modality, state).made
        weights = made.rows.weights[0].reshape(-1, matern.dimension)
        lags = matern.rate(state.length_scale) * backend.step * np.arange(len(weights))
        forward = matern.transition(lags) @ matern.stationary
        total = float(made.residual[0])
        for i, late in enumerate(weights.T):
            for j, early in enumerate(weights.T):
                products = np.correlate(late, early, "full")[len(weights) - 1 :]
                total += float(2.0 * products @ forward[:, i, j] - products[0] * forward[0, i, j])
        return float(np.sqrt(total))


@dataclass(eq=False)
class _Kept:
    """Functionals of one run and modality at one response, and their temporal Gram once it is made."""

    made: Functionals
    gram: Array | None = None
