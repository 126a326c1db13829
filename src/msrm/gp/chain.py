"""Runs end to end as blocks of grid points, and the windows that hold nodes: the geometry of `msrm.gp.jax_statespace`.

A *window* is a block and the next one; window s holds the nodes whose first cell lies in block s, so a node fits when
its cells are fewer than the points of a block. NumPy only; everything here is fixed before anything is compiled.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from msrm.gp.statespace import StateSpace
from msrm.nodes import NodeGroup
from msrm.responses import Response

__all__ = ["Chain", "chain_of", "in_slots", "most_in_window", "node_times", "runs_of"]

_LEAST_ORDER = 48  # of a block: below it more blocks cost more time than smaller ones save
_SLACK = 1e-9  # of a cell, for times that are multiples of it


@dataclass(frozen=True)
class Chain:
    """Blocks of all runs.

    Attributes
    ----------
    step : float
        Grid spacing, seconds.
    points : int
        Grid points of a block.
    blocks : tuple of int
        Blocks of each run.
    """

    step: float
    points: int
    blocks: tuple[int, ...]

    @property
    def count(self) -> int:
        """Blocks of all runs."""
        return sum(self.blocks)

    @property
    def cells(self) -> int:
        """Cells of a window."""
        return 2 * self.points - 1

    @property
    def first(self) -> np.ndarray:
        """First block of each run, (run,) int."""
        return np.concatenate([[0], np.cumsum(self.blocks)[:-1]])

    @property
    def starts(self) -> np.ndarray:
        """Start of each window from the start of its run's grid, (block,), seconds."""
        return np.concatenate([self.step * self.points * np.arange(count) for count in self.blocks])

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Whether a block is the first, and the last, of its run, (block,) bool each."""
        last = np.zeros(self.count, bool)
        last[np.cumsum(self.blocks) - 1] = True
        return np.roll(last, 1), last


def chain_of(
    backend: StateSpace,
    values: Mapping[str, Mapping[str, float]] | None = None,
    room: float = 1.0,
    *,
    least_points: int = 1,
) -> Chain:
    """The chain whose windows hold every node with supports ``room`` times as long as at ``values``.

    Parameters
    ----------
    backend : StateSpace
    values : {modality: {name: float}}, optional
        Free response parameters; their starts by default.
    room : float
        At least 1, for responses with free parameters; what their bounds allow is never exceeded.
    least_points : int
        Grid points that a block has at least.

    Raises
    ------
    ValueError
        If ``room`` is below 1, or the backend's cells have moments.
    """
    if backend.moments:
        raise ValueError("cells with moments have no compiled form; use backend.with_moments(0) on a finer grid.")
    if not room >= 1.0:
        raise ValueError(f"room must be at least 1, found {room!r}.")
    points = max(least_points, -(-_LEAST_ORDER // (backend.n_factors * backend.matern.dimension)))
    for groups in backend.groups.values():
        for modality, group in groups.items():
            low, high = group.response.support(dict((values or {}).get(modality) or {}))
            length = high - low
            if group.response.free:
                length = min(room * length, longest_support(group.response))
            reach = length + float(np.ptp(node_times(group), axis=1).max(initial=0.0))
            points = max(points, int(np.ceil(reach / backend.step - _SLACK)) + 2)
    return Chain(backend.step, points, tuple(-(-grid.count // points) for grid in backend.grids.values()))


def longest_support(response: Response) -> float:
    """The longest support over the bounds of the free parameters, seconds."""
    corners = product(*(free.bounds for free in response.free.values()))
    edges = [response.support(dict(zip(response.free, corner, strict=True))) for corner in corners]
    return max(high - low for low, high in edges)


def node_times(group: NodeGroup) -> np.ndarray:
    """Times of the functionals of each node, (node, 1), or (node, 2) where nodes are differences."""
    return group.times[:, None] if group.pairs is None else group.times[group.pairs]


def runs_of(backend: StateSpace, modality: str) -> Iterator[tuple[int, str, NodeGroup]]:
    """Place in the chain, name and node group of the runs that have a modality."""
    for place, (run, groups) in enumerate(backend.groups.items()):
        if modality in groups:
            yield place, run, groups[modality]


def most_in_window(times: np.ndarray, length: float) -> int:
    """The most of some sorted times that lie within a length."""
    until = np.searchsorted(times, times + length * (1.0 + _SLACK), side="left")
    return int((until - np.arange(len(times))).max(initial=1))


def in_slots(window: np.ndarray, count: int) -> np.ndarray:
    """Items by their window, (window, slot) int: which item a slot holds, the number of items where it is empty."""
    order = np.argsort(window, kind="stable")
    sizes = np.bincount(window, minlength=count)
    slots = np.full((count, int(sizes.max(initial=1))), len(window))
    rank = np.arange(len(window)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    slots[window[order], rank] = order
    return slots
