"""The state-space likelihood: latent states on a uniform grid, banded posterior precision (DESIGN 3.3, 4).

A run's posterior precision is ``prior (x) I_K + sum_j (a_j a_j') (x) D_j`` over grid points times states, factor within
state, with D shrunk where a node's residual variance rho is used. Log evidence, moments and derivatives follow from its
band Cholesky factor and the band of its inverse (Fisher's identity); no reverse pass. NumPy and LAPACK only: compiled
JAX was no faster on a CPU and costs its compilation.

This module owns the backend over runs and its grids; one run's algebra is :mod:`msrm.gp.posterior`, spacing, error and
the use of rho :mod:`msrm.gp.refinement`, the weights of functionals :mod:`msrm.latent_grid`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from msrm.gp.node_terms import node_terms
from msrm.gp.posterior import Posterior
from msrm.latent_grid import MOST_MOMENTS, GridPrior, Matern, Matern32, UniformGrid, functionals
from msrm.nodes import Evidence, GroupStatistics, NodeGroup

__all__ = ["Posterior", "StateSpace", "covering_grid", "filtered_period", "identity_period"]

Values = Mapping[str, Mapping[str, float]]
_PARTS = 16  # of the shortest interval: clocks without a longer common one are left alone
_ON_GRID = 1e-6  # of a step: clocks given in decimals miss grid points by rounding


@dataclass(frozen=True, eq=False)
class StateSpace:
    """The state-space backend: node groups by run on uniform grids of one spacing.

    Attributes
    ----------
    groups : {run: {modality: NodeGroup}}
    n_factors : int
    step : float
        Grid spacing, seconds.
    matern : Matern
    residual : frozenset of str
        Modalities whose residual variances rho are used, in every evaluation.
    length_scale_slope : bool
        Whether :class:`Evidence` carries the length scale's derivative.
    reach : {run: (first, last)}
        Seconds that a run's grid must cover beyond its data, for predictions.
    moments : int
        Of each cell, as coordinates beside the states (:mod:`msrm.latent_grid`).
    """

    groups: Mapping[str, Mapping[str, NodeGroup]]
    n_factors: int
    step: float
    matern: Matern = field(default_factory=Matern32)
    residual: frozenset[str] = frozenset()
    length_scale_slope: bool = True
    reach: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    moments: int = 0

    @cached_property
    def grids(self) -> dict[str, UniformGrid]:
        """The grid of each run: covers every support over the parameter bounds, and ``reach``."""
        return {run: covering_grid(groups, self.step, self.reach.get(run)) for run, groups in self.groups.items()}

    @classmethod
    def on(
        cls,
        groups: Mapping[str, Mapping[str, NodeGroup]],
        n_factors: int,
        step: float,
        *,
        matern: Matern | None = None,
        length_scale_slope: bool = True,
    ) -> "StateSpace":
        """A backend at a spacing up to ``step`` that suits the clocks, with residual variances for Identity off it."""
        made = cls(groups, n_factors, step, matern or Matern32(), length_scale_slope=length_scale_slope).at_step(step)
        return made.with_residual(made.off_grid[0])

    def at_step(self, step: float) -> "StateSpace":
        """The same at the largest spacing up to ``step`` that puts a regular Identity clock on grid points.

        With moments and without such a clock, rows of the other clocks then fall on few places of a cell.
        """
        period = identity_period(self.groups)
        if period is None and self.moments:
            period = filtered_period(self.groups)
        if period is not None:
            step = period * np.floor(step / period + 1e-9) if step >= period else period / np.ceil(period / step - 1e-9)
        return replace(self, step=float(step))

    def with_residual(self, modalities: frozenset[str]) -> "StateSpace":
        """The same with residual variances used in the given modalities."""
        return replace(self, residual=frozenset(modalities))

    def with_moments(self, moments: int) -> "StateSpace":
        """The same with some moments of each cell as coordinates, so that a coarser grid does.

        Raises
        ------
        ValueError
            For a number outside 0 to 6.
        """
        if not 0 <= moments <= MOST_MOMENTS:
            raise ValueError(f"moments must lie between 0 and {MOST_MOMENTS}, found {moments}.")
        return replace(self, moments=moments)

    @property
    def off_grid(self) -> tuple[frozenset[str], frozenset[str]]:
        """Modalities with residual variances: those seen through Identity off the grid points, and the filtered ones.

        Differenced nodes have none: their residuals would be correlated.
        """
        identity, filtered = set(), set()
        for run, groups in self.groups.items():
            for modality, group in groups.items():
                if group.pairs is None and not group.response.is_identity:
                    filtered.add(modality)
                elif group.pairs is None:
                    place = (group.times - self.grids[run].start) / self.step
                    if np.any(np.abs(place - np.round(place)) > _ON_GRID):
                        identity.add(modality)
        return frozenset(identity), frozenset(filtered)

    def posterior(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        *,
        slopes: bool = False,
    ) -> "Posterior":
        """The states of one run given the data.

        Parameters
        ----------
        run : str
        response_values : {modality: {name: float}}
        length_scale : float
            Seconds.
        statistics : {modality: GroupStatistics}
        slopes : bool
            Prepare what :meth:`Posterior.evidence` needs for derivatives.
        """
        grid = self.grids[run]
        prior = GridPrior.on(self.matern, self.matern.rate(length_scale) * grid.step, grid.count, self.moments)
        nodes = {}
        for modality, group in self.groups[run].items():
            made = functionals(
                grid,
                self.matern,
                length_scale,
                group.response,
                response_values.get(modality),
                group.times,
                length_scale_slope=slopes and self.length_scale_slope,
                moments=self.moments,
            )
            nodes[modality] = node_terms(group, made, statistics[modality], residual=modality in self.residual)
        return Posterior.of(grid, self.n_factors, length_scale, prior, nodes)

    def evidence(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run and its derivatives (:class:`msrm.nodes.Backend`)."""
        posterior = self.posterior(run, response_values, length_scale, statistics, slopes=gradient)
        return posterior.evidence(gradient)


def identity_period(groups: Mapping[str, Mapping[str, NodeGroup]]) -> float | None:
    """The interval of which all Identity times are multiples within each run, None where there is no such clock."""
    clocks = [[group.times for group in run.values() if group.response.is_identity] for run in groups.values()]
    every = np.concatenate([np.diff(np.unique(np.concatenate(times))) for times in clocks if times] or [np.zeros(0)])
    if not len(every):
        return None
    period = float(every.min())
    multiples = np.round(every / period)
    period = float(every.sum() / multiples.sum())
    return period if np.all(np.abs(every - multiples * period) < _ON_GRID * period) else None


def filtered_period(groups: Mapping[str, Mapping[str, NodeGroup]]) -> float | None:
    """The largest interval of which those between the filtered nodes of a stream are multiples, None without one."""
    every = [
        np.diff(group.times) for run in groups.values() for group in run.values() if not group.response.is_identity
    ]
    intervals = np.concatenate([*every, np.zeros(0)])
    if not len(intervals):
        return None
    # Euclid's algorithm on all of them; clocks given in decimals leave zeros by rounding.
    least, left = float(intervals.min()) / _PARTS, np.unique(np.round(intervals, 9))
    while len(left) > 1:
        period = float(left[0])
        rest = np.abs(left - period * np.round(left / period))
        rest = rest[rest > _ON_GRID * least]
        if np.any(rest < least):
            return None
        left = np.unique(np.append(np.round(rest, 9), period))
    return float(intervals.sum() / np.round(intervals / left[0]).sum())


def covering_grid(
    groups: Mapping[str, NodeGroup], step: float, reach: tuple[float, float] | None = None
) -> UniformGrid:
    """The grid of a run: on the Identity clock with most nodes where there is one, else on the first node's time."""
    identity = [group for group in groups.values() if group.response.is_identity]
    main = max(identity or groups.values(), key=lambda group: len(group.times))
    first, last = reach or (np.inf, -np.inf)
    for group in groups.values():
        low, high = group.response.envelope()
        first, last = min(first, group.times[0] - high), max(last, group.times[-1] - low)
    return UniformGrid.covering(first, last, step, float(main.times[0]))
