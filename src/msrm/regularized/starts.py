"""Where a search begins: spectral or random latents, and a look over lags and widths (DESIGN 2).

Spectral: the leading principal components of all streams, each interpolated linearly to the latent grid at the times
its rows see (their response's centroid), weighted as in the objective; found by block power iteration, so that neither
features nor grid enter a matrix of their own size. Then ridge loadings and the eliminated latents, twice, balanced.

Wrong lags are a trap of every such fit: the objective has one basin per half period of the latent. With latents at hand
the best loadings for any response are a ridge solve of order K, so each free parameter is scanned over its bounds;
every local minimum of a lag's profile that explains enough becomes a start of its own.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msrm.regularized.filters import Values
from msrm.regularized.gauge import Latents, balanced
from msrm.regularized.objective import Objective
from msrm.regularized.statistics import Operator, RowGroup
from msrm.temporal_rows import TemporalRows

Array = NDArray[np.float64]

_OVERSAMPLING = 6
_POWER_STEPS = 4
_SWEEPS = 2
_MOST_LAGS = 25
_OTHER_VALUES = 3
# A lag's local minimum becomes a start when its response explains this share of what the best one does.
_RIVAL_SHARE = 0.7
_MOST_RIVALS = 3


@dataclass(frozen=True)
class Beginning:
    """A start of the search.

    Attributes
    ----------
    label : str
        How it was made, in words.
    loading : (column, K)
    vector : (parameter,)
    """

    label: str
    loading: Array
    vector: Array


def beginnings(objective: Objective, n_factors: int, kind: str, number: int, seed: int) -> list[Beginning]:
    """The starts of one initialization, the most promising first.

    Parameters
    ----------
    kind : {"spectral", "random"}
        Random ones also draw the response parameters between their bounds, but for number 0.
    number : int
        Which initialization; spectral ones after the first are random.
    """
    filters = objective.problem.filters
    rng = np.random.default_rng([seed, number])
    vector = filters.start if number == 0 else rng.uniform(filters.lower, filters.upper)
    if kind == "spectral" and number == 0:
        latents = spectral_latents(objective, n_factors, vector)
    else:
        kind = "random"
        drawn = rng.standard_normal((objective.problem.n_columns, n_factors))
        latents = _unit(objective.latents(drawn, vector))
    loading = objective.loadings(vector, latents)
    for step in range(_SWEEPS + 1):
        latents = objective.latents(loading, vector)
        loading, latents = balanced(objective.problem, loading, latents)
        if step < _SWEEPS:
            loading = objective.loadings(vector, latents)
    return _with_lags(objective, Beginning(kind, loading, vector), latents)


def spectral_latents(objective: Objective, n_factors: int, vector: Array) -> Latents:
    """Leading principal components of the interpolated streams, of unit mean square, one for all paths."""
    problem, out = objective.problem, [np.zeros(0)] * len(objective.problem.systems)
    for _, systems in problem.gauges:
        views = [view for s in systems for view in _views(objective, s, vector)]
        edges = np.cumsum([0, *(problem.systems[s].grid.count for s in systems)])
        spans = {s: slice(edges[i], edges[i + 1]) for i, s in enumerate(systems)}
        components = _components(views, spans, int(edges[-1]), problem.n_columns, n_factors)
        for s in systems:
            path = components[spans[s], None]
            out[s] = np.repeat(path, problem.systems[s].n_paths, axis=1)
    return _unit(tuple(out))


@dataclass(frozen=True)
class _View:
    """A group's weighted rows, and their interpolation to the grid of its system."""

    system: int
    onto_grid: TemporalRows
    values: Array
    columns: slice | NDArray[np.intp]


def _views(objective: Objective, s: int, vector: Array) -> list[_View]:
    system, values = objective.problem.systems[s], objective.problem.filters.values(vector)
    views = []
    for group, columns in zip(objective.problem.groups[s], objective.group_columns[s], strict=True):
        response = objective.problem.filters.response(group.owner)
        rows = group.operator(response, values[group.owner], system.grid).rows
        views.append(
            _View(s, _interpolation(system.grid.times, _seen(rows, system.grid.times, group)), group.view(), columns)
        )
    return views


def _seen(rows: TemporalRows, grid_times: Array, group: RowGroup) -> Array:
    """The latent time that each row sees on average; its own time where the response has no mass."""
    mass = rows.apply(np.ones(len(grid_times)))
    centre = rows.apply(grid_times)
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = centre / mass
    inside = np.isfinite(seen) & (seen >= grid_times[0]) & (seen <= grid_times[-1])
    return seen if inside.all() and (np.diff(seen) > 0).all() else group.times


def _interpolation(at: Array, times: Array) -> TemporalRows:
    """Linear interpolation from increasing times, constant beyond them."""
    if len(times) == 1:
        return TemporalRows(np.zeros(len(at), np.intp), np.ones((len(at), 1)), 1)
    left = np.clip(np.searchsorted(times, at, side="right") - 1, 0, len(times) - 2)
    share = np.clip((at - times[left]) / (times[left + 1] - times[left]), 0.0, 1.0)
    return TemporalRows(left, np.stack([1 - share, share], axis=1), len(times))


def _components(views: list[_View], spans: dict[int, slice], total: int, n_columns: int, n_factors: int) -> Array:
    """Leading left singular vectors (grid time, K) of the interpolated data, by block power iteration."""
    width = min(n_factors + _OVERSAMPLING, total)
    right = np.random.default_rng(0).standard_normal((n_columns, width))
    left = np.zeros((total, width))
    for _ in range(_POWER_STEPS):
        left = np.zeros((total, width))
        for view in views:
            left[spans[view.system]] += view.onto_grid.apply(view.values @ right[view.columns])
        left, _ = np.linalg.qr(left)
        right = np.zeros((n_columns, width))
        for view in views:
            right[view.columns] += view.values.T @ view.onto_grid.adjoint(left[spans[view.system]])
    _, axes = np.linalg.eigh(right.T @ right)
    found = left @ axes[:, ::-1][:, :n_factors]
    # More factors than grid points: the rest start at zero, where the penalties keep them.
    return np.pad(found, ((0, 0), (0, n_factors - found.shape[1])))


def _unit(latents: Latents) -> Latents:
    """Latents scaled to unit mean square."""
    power = sum(float(np.einsum("lpk,lpk->", z, z)) for z in latents) / sum(z.size for z in latents)
    return tuple(z / np.sqrt(power) for z in latents) if power > 0 else latents


def _with_lags(objective: Objective, base: Beginning, latents: Latents) -> list[Beginning]:
    """The base at the scanned best parameters, then with each rival lag, loadings solved for anew."""
    filters = objective.problem.filters
    vector, rivals = base.vector.copy(), []
    for owner in range(len(filters.owners)):
        if filters.slots(owner):
            scan = _Scan(objective, owner, latents)
            found, others = scan.best(filters.values(vector)[owner])
            for name, slot in filters.slots(owner).items():
                vector[slot] = found[name]
            rivals += [(explained, owner, values) for explained, values in others]
    vectors = [(base.label, vector)]
    for _, owner, values in sorted(rivals, key=lambda rival: -rival[0])[:_MOST_RIVALS]:
        other = vector.copy()
        for name, slot in filters.slots(owner).items():
            other[slot] = values[name]
        modality, participant = filters.owners[owner]
        where = modality if participant is None else f"{modality} of {participant}"
        vectors.append((f"{base.label}, {where} at lag {values['lag']:.3g} s", other))
    return [replace(base, label=label, loading=objective.loadings(v, latents), vector=v) for label, v in vectors]


class _Scan:
    """What a response explains of its streams at given latents, loadings solved for."""

    def __init__(self, objective: Objective, owner: int, latents: Latents) -> None:
        self.filters, self.owner = objective.problem.filters, owner
        self.response = self.filters.response(owner)
        self.problem, self.latents = objective.problem, latents
        self.members = [
            (s, group) for s, groups in enumerate(objective.problem.groups) for group in groups if group.owner == owner
        ]

    def best(self, start: Values) -> tuple[Values, list[tuple[float, Values]]]:
        """The best values found, lags first, and rival lags with what they explain."""
        found, rivals = dict(start), []
        names = sorted(self.filters.slots(self.owner), key=lambda name: name != "lag")
        for name in names:
            tried = self._grid(name, start[name])
            explained = np.array([self.explained({**found, name: value}) for value in tried])
            if name == "lag":
                rivals = _peaks(tried, explained)
            found[name] = float(tried[int(np.argmax(explained))])
        return found, [(e, {**found, "lag": lag}) for e, lag in rivals]

    def explained(self, values: Values) -> float:
        """Energy explained less the loadings' penalty."""
        size = self.latents[0].shape[-1]
        second: dict[int, Array] = {}
        cross: dict[int, Array] = {}
        trace: dict[int, Array] = {}
        for s, group in self.members:
            operator: Operator = group.operator(self.response, values, self.problem.systems[s].grid)
            moments = group.moments(operator.rows.apply(self.latents[s][:, group.path]))
            for block in group.blocks:
                mean, own = moments.of_block(block)
                second[block.pair] = second.get(block.pair, np.zeros((size, size))) + mean
                trace[block.pair] = trace.get(block.pair, np.zeros(len(own))) + own
                cross[block.pair] = cross.get(block.pair, 0.0) + moments.cross[block.own]
        total = 0.0
        for pair, matrix in second.items():
            stretch, axes = np.linalg.eigh(matrix)
            share = trace[pair] / max(float(stretch.sum()), np.finfo(float).tiny)
            ridge = self.problem.ridge[self.problem.columns[pair]]
            total += float(((cross[pair] @ axes) ** 2 / (np.outer(share, stretch) + ridge[:, None])).sum())
        return total

    def _grid(self, name: str, start: float) -> Array:
        """Values to try: lags a latent step apart, others spread (in ratio where positive) between their bounds."""
        low, high = self.response.free[name].bounds
        if name == "lag":
            step = min(system.grid.step for system in self.problem.systems)
            tried = np.linspace(low, high, int(np.clip(np.ceil((high - low) / step) + 1, 3, _MOST_LAGS)))
        elif name in self.response.positive:
            tried = np.geomspace(low, high, _OTHER_VALUES)
        else:
            tried = np.linspace(low, high, _OTHER_VALUES)
        return np.unique([*tried, start])


def _peaks(tried: Array, explained: Array) -> list[tuple[float, float]]:
    """Local maxima other than the best that explain enough to deserve a start."""
    best = int(np.argmax(explained))
    padded = np.concatenate([[-np.inf], explained, [-np.inf]])
    local = (padded[1:-1] > padded[:-2]) & (padded[1:-1] > padded[2:])
    keep = local & (explained >= _RIVAL_SHARE * explained[best])
    return [(float(explained[i]), float(tried[i])) for i in np.flatnonzero(keep) if i != best]
