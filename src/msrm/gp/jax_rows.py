"""Weights of a modality's nodes in the windows of the chain, traced: one class for each way they can depend on
parameters (DESIGN 3.3).

A node is a sum of functionals (one, or two where residuals are differenced), each ``a . states + e``. `ConstantRows`
depend on nothing, `ImpulseRows` (Identity) and `FixedRows` on the length scale, `CurveRows` on the response's free
parameters too. Arrays that are data, not code, live in a dictionary passed to every call, so that compiled code holds
no constants of the recording's size. All that is known beforehand is made by NumPy: every operation that JAX runs by
itself would be compiled by itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.chain import Chain, in_slots, most_in_window, node_times, runs_of
from msrm.gp.jax_matern import cell_covariance, cell_means, namespace
from msrm.gp.jax_responses import RULE, Curve, cell_weights, traced_curve
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Matern
from msrm.responses import quadrature

__all__ = ["ConstantRows", "Rows", "WindowRows", "window_rows"]

Data = dict[str, Any]


class WindowRows(NamedTuple):
    """Nodes in the slots of their windows.

    Attributes
    ----------
    nodes : (window, slot) int
        Place of the node among those of all runs; their number where a slot is empty.
    terms : (window, slot, term, point state)
        a of each functional over the grid points and states of the window.
    residual : (window, slot) or None
        rho, where it is used.
    fits : () bool
        Whether every node's cells lie in its window and on the grid.
    """

    nodes: Array
    terms: Array
    residual: Array | None
    fits: Array | np.bool


class Rows(Protocol):
    """How a modality's nodes depend on parameters."""

    def __call__(self, data: Data, values: Mapping[str, Any], x: Any) -> WindowRows:
        """The rows at free response parameters ``values`` and scaled grid spacing ``x = rate * step``."""


@dataclass(frozen=True)
class ConstantRows:
    """Rows that were computed beforehand."""

    def __call__(self, data: Data, values: Mapping[str, Any], x: Any) -> WindowRows:
        return WindowRows(data["nodes"], data["terms"], data.get("residual"), np.True_)


def _on_points(ends: Any, states: int) -> Any:
    """Weights (..., cell, 2 state) of both ends of every cell as weights of the grid points (..., point * state)."""
    xp = namespace(ends)
    none = xp.zeros((*ends.shape[:-2], 1, states))
    points = xp.concatenate([ends[..., :states], none], -2) + xp.concatenate([none, ends[..., states:]], -2)
    return points.reshape(*points.shape[:-2], -1)


@dataclass(frozen=True)
class ImpulseRows:
    """Identity: the process at points of cells that do not move."""

    chain: Chain
    matern: Matern
    residual: bool

    @staticmethod
    def data(backend: StateSpace, chain: Chain, modality: str) -> Data:
        """First cells and fractions of the nodes in their slots."""
        cells, fractions, windows = [], [], []
        for place, run, group in runs_of(backend, modality):
            grid = backend.grids[run]
            where = (node_times(group) - grid.start) / grid.step
            cell = np.clip(np.floor(where), 0, grid.count - 2).astype(int)
            window = np.minimum(cell.min(axis=1) // chain.points, chain.blocks[place] - 1)
            cells.append(cell - window[:, None] * chain.points)
            fractions.append(where - cell)
            windows.append(window + chain.first[place])
        slots = in_slots(np.concatenate(windows), chain.count)
        phases, phase = np.unique(np.round(np.concatenate(fractions), 12), return_inverse=True)
        return {
            "nodes": slots,
            "cell": _filled(np.concatenate(cells), slots),
            "phases": phases,
            "phase": _filled(phase.reshape(-1, cells[0].shape[1]), slots),
        }

    def __call__(self, data: Data, values: Mapping[str, Any], x: Any) -> WindowRows:
        mean, variance = cell_means(self.matern, x, data["phases"])
        xp, here = namespace(mean), data["cell"][..., None] == np.arange(self.chain.cells)
        ends = xp.where(here[..., None], mean[data["phase"]][..., None, :], 0.0)
        residual = xp.maximum(variance, 0.0)[data["phase"]][..., 0] if self.residual else None
        return WindowRows(data["nodes"], _on_points(ends, self.matern.dimension), residual, np.True_)


def _filled(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Values (node, ...) in their slots, zero in empty ones."""
    return np.concatenate([values, np.zeros_like(values[:1])])[slots]


@dataclass(frozen=True)
class FixedRows:
    """A response without free parameters: product-integration weights that do not move."""

    chain: Chain
    matern: Matern
    residual: bool

    @staticmethod
    def data(backend: StateSpace, chain: Chain, modality: str) -> Data:
        """Weights (window, slot, term, cell, point) of the nodes in their slots."""
        made, windows = [], []
        for place, run, group in runs_of(backend, modality):
            grid, times = backend.grids[run], node_times(group)
            cells = quadrature(group.response, None, times.ravel(), grid.start, grid.step, grid.count)
            first = cells.first.reshape(times.shape)
            window = np.clip(first.min(axis=1) // chain.points, 0, chain.blocks[place] - 1)
            local = (first - window[:, None] * chain.points).ravel()
            out = np.zeros((times.size, chain.cells, RULE.order))
            for c in range(cells.weights.shape[1]):
                inside = (local + c >= 0) & (local + c < chain.cells)
                out[inside, local[inside] + c] = cells.weights[cells.phase[inside], c]
            made.append(out.reshape(*times.shape, *out.shape[1:]))
            windows.append(window + chain.first[place])
        slots = in_slots(np.concatenate(windows), chain.count)
        return {"nodes": slots, "weights": _filled(np.concatenate(made), slots)}

    def __call__(self, data: Data, values: Mapping[str, Any], x: Any) -> WindowRows:
        terms, residual = _through_cells(data["weights"], self.matern, x, self.residual)
        return WindowRows(data["nodes"], terms, residual, np.True_)


def _through_cells(weights: Any, matern: Matern, x: Any, residual: bool) -> tuple[Any, Any]:
    """Rows and residual variances of weights (window, slot, term, cell, point)."""
    mean, _ = cell_means(matern, x, RULE.fractions)
    terms = _on_points(weights @ mean, matern.dimension)
    if not residual:
        return terms, None
    one = weights[:, :, 0]
    covariance = cell_covariance(matern, x, RULE.fractions)
    return terms, namespace(one).maximum(((one @ covariance) * one).sum((-2, -1)), 0.0)


@dataclass(frozen=True)
class CurveRows:
    """A response with free parameters: nodes move between windows, by gathers whose indices are data.

    Attributes
    ----------
    curve : Curve
    fixed : tuple of (name, value)
        Parameters that are not free.
    slots : int
        The most nodes a window can hold, wherever the response moves them.
    """

    chain: Chain
    matern: Matern
    residual: bool
    curve: Curve
    fixed: tuple[tuple[str, float], ...]
    slots: int

    @classmethod
    def of(cls, backend: StateSpace, chain: Chain, modality: str, residual: bool) -> tuple["CurveRows", Data]:
        """The rows and their data: nodes by the time of their earliest functional within each run."""
        orders, times, places, total, slots = [], [], [], 0, 1
        for place, run, group in runs_of(backend, modality):
            each = node_times(group) - backend.grids[run].start
            by_time = np.argsort(each.min(axis=1), kind="stable")
            slots = max(slots, most_in_window(each.min(axis=1)[by_time], chain.step * chain.points))
            orders.append(total + by_time)
            times.append(each[by_time])
            places.append(np.full(len(each), place))
            total += len(each)
        response, run_of = group.response, np.concatenate(places)
        fixed = tuple((name, value) for name, value in response.start.items() if name not in response.free)
        rows = cls(chain, backend.matern, residual, traced_curve(response, chain.step), fixed, slots)
        return rows, {
            "order": np.concatenate([*orders, [total]]),
            "times": np.concatenate(times),
            "first_block": chain.first[run_of],
            "last_block": (chain.first + np.array(chain.blocks) - 1)[run_of],
        }

    def support_length(self, values: Mapping[str, Any]) -> Array:
        """Seconds from the support's start to its end."""
        low, high = self.curve.support(dict(self.fixed) | dict(values))
        return high - low

    def __call__(self, data: Data, values: Mapping[str, Any], x: Any) -> WindowRows:
        values = dict(self.fixed) | dict(values)
        low, high = self.curve.support(values)
        chain, length = self.chain, self.chain.step * self.chain.points
        offset = jnp.floor((data["times"].min(-1) - high) / length).astype(int)
        window = jnp.clip(data["first_block"] + offset, data["first_block"], data["last_block"])
        starts = (window[:, None] < np.arange(chain.count + 1)).sum(0)
        slot = starts[:-1, None] + np.arange(self.slots)
        filled = slot < starts[1:, None]
        slot = jnp.where(filled, slot, data["times"].shape[0])
        ahead = jnp.take(data["times"], slot, axis=0, mode="fill", fill_value=0.0) - chain.starts[:, None, None]
        # Empty slots are put where they weigh nothing and slow nothing down.
        ahead = jnp.where(filled[..., None], ahead, high + 0.5 * length)
        weights = cell_weights(self.curve, chain.step, chain.cells, ahead, values)
        weights = jnp.where(filled[..., None, None, None], weights, 0.0)
        terms, residual = _through_cells(weights, self.matern, x, self.residual)
        inside = (ahead.min(-1) - high >= -_OVER * chain.step) & (
            ahead.max(-1) - low <= (chain.cells + _OVER) * chain.step
        )
        fits = (inside | ~filled).all() & (filled.sum() == data["times"].shape[0])
        return WindowRows(data["order"][slot], terms, residual, fits)


_OVER = 1e-6  # of a cell: what rounding may put outside a window


def window_rows(backend: StateSpace, chain: Chain, modality: str, length_scale: float | None) -> tuple[Rows, Data]:
    """How a modality's nodes depend on parameters, and the arrays that say so.

    Parameters
    ----------
    backend : StateSpace
    chain : Chain
    modality : str
    length_scale : float or None
        Seconds where fixed: rows without free parameters are then computed here, once.
    """
    response = next(group.response for _, _, group in runs_of(backend, modality))
    residual = modality in backend.residual and all(g.pairs is None for _, _, g in runs_of(backend, modality))
    if response.free:
        return CurveRows.of(backend, chain, modality, residual)
    kind = ImpulseRows if response.is_identity else FixedRows
    rows, data = kind(chain, backend.matern, residual), kind.data(backend, chain, modality)
    if length_scale is None:
        return rows, data
    made = rows(data, {}, backend.matern.rate(length_scale) * chain.step)
    constant = {"nodes": made.nodes, "terms": made.terms}
    return ConstantRows(), constant if made.residual is None else constant | {"residual": made.residual}
