"""Brute force in plain NumPy and SciPy: what the models compute, written out entry by entry from DESIGN.

Nothing here imports the package. Slow on purpose; recordings of a few hundred entries only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from scipy.special import erf

Key = tuple[str, str, str]


def gaussian_curve(u: np.ndarray, width: float, lag: float) -> np.ndarray:
    """exp(-(u - lag)^2 / (2 width^2)) on lag +- 6 width, unit energy there."""
    energy = width * np.sqrt(np.pi) * erf(6.0)
    inside = np.abs(u - lag) <= 6 * width
    return np.where(inside, np.exp(-0.5 * ((u - lag) / width) ** 2), 0.0) / np.sqrt(energy)


def hat_matrix(curve: Callable | None, support: tuple[float, float], times: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """H[n, l], the integral of curve(u) hat_l(t_n - u) du, by Gauss rules on smooth pieces; None is an impulse."""
    step = grid[1] - grid[0]
    nodes, weights = np.polynomial.legendre.leggauss(40)
    out = np.zeros((len(times), len(grid)))
    for n, t in enumerate(times):
        if curve is None:
            out[n] = np.clip(1 - np.abs(t - grid) / step, 0, None)
            continue
        low, high = t - support[1], t - support[0]
        inner = grid[(grid > low) & (grid < high)]
        edges = np.concatenate([[low], inner, [high]])
        for a, b in pairwise(edges):
            s = 0.5 * (b - a) * nodes + 0.5 * (a + b)
            hats = np.clip(1 - np.abs(s[:, None] - grid) / step, 0, None)
            out[n] += (0.5 * (b - a) * weights * curve(t - s)) @ hats
    return out


@dataclass
class RegularizedOracle:
    """R-MSRM's objective by loops over streams, rows and features.

    Parameters
    ----------
    data : {(participant, run, modality): (values, times)}
    curves : {(participant, modality): (curve or None, support, envelope)}
    """

    data: dict[Key, tuple[np.ndarray, np.ndarray]]
    curves: dict[tuple[str, str], tuple[Callable | None, tuple[float, float], tuple[float, float]]]
    step: float
    loading_ridge: float
    latent_ridge: float
    roughness: float
    edges: str = "trim"
    scaling: str = "pair"
    weights: dict[str, float] = field(default_factory=dict)
    pooling: str = "shared"
    population_strength: float = 0.0
    absent: set[tuple[str, str, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pairs = list(dict.fromkeys((p, m) for p, _, m in self.data))
        self.runs = list(dict.fromkeys(r for _, r, _ in self.data))
        self.people = {r: list(dict.fromkeys(p for p, q, _ in self.data if q == r)) for r in self.runs}
        self.standard: dict[Key, np.ndarray] = {}
        for p, m in self.pairs:
            own = [key for key in self.data if (key[0], key[2]) == (p, m)]
            stacked = np.concatenate([self.data[key][0] for key in own])
            present = [f for f in range(stacked.shape[1]) if (p, m, f) not in self.absent]
            for key in own:
                values = np.full_like(self.data[key][0], np.nan)
                for f in present:
                    column = stacked[np.isfinite(stacked[:, f]), f]
                    sd = np.sqrt(np.mean((column - column.mean()) ** 2))
                    values[:, f] = (self.data[key][0][:, f] - column.mean()) / sd
                self.standard[key] = values
        self.grids = {r: self._grid(r) for r in self.runs}
        self.entry_weights = {key: self._entry_weights(key) for key in self.data}
        self.operators = {
            key: hat_matrix(*self.curves[key[0], key[2]][:2], self.data[key][1][self._usable(key)], self.grids[key[1]])
            for key in self.data
        }

    def _domain(self, run: str) -> tuple[float, float]:
        seen = [
            t
            for (p, r, m), (_, times) in self.data.items()
            if r == run
            for t, row in zip(times, self.standard[p, r, m], strict=True)
            if np.isfinite(row).any()
        ]
        return min(seen), max(seen)

    def _usable(self, key: Key) -> np.ndarray:
        first, last = self._domain(key[1])
        low, high = self.curves[key[0], key[2]][2]
        times = self.data[key][1]
        seen = np.isfinite(self.standard[key]).any(1)
        if self.edges == "extend":
            return seen
        return seen & (times - high >= first - 1e-9) & (times - low <= last + 1e-9)

    def _grid(self, run: str) -> np.ndarray:
        first, last = self._domain(run)
        if self.edges == "extend":
            for key in self.data:
                if key[1] == run:
                    low, high = self.curves[key[0], key[2]][2]
                    used = self.data[key][1][self._usable(key)]
                    first, last = min(first, used[0] - high), max(last, used[-1] - low)
        count = 1 + int(np.ceil((last - first) / self.step - 1e-9))
        return first + self.step * np.arange(count)

    def _entry_weights(self, key: Key) -> np.ndarray:
        """c_nf on usable rows."""
        participant, run, modality = key
        usable = self._usable(key)
        times, finite = self.data[key][1][usable], np.isfinite(self.standard[key][usable])
        if len(times) == 1:
            cells = np.ones(1)
        else:
            intervals = np.diff(times)
            median = np.median(intervals)
            cells = np.zeros(len(times))
            alone = np.ones(len(times), bool)
            for i, gap in enumerate(intervals):
                if gap <= 2 * (1 + 1e-9) * median:
                    cells[i] += gap / 2
                    cells[i + 1] += gap / 2
                    alone[i] = alone[i + 1] = False
            cells[alone] = median
        cells = cells / cells.sum()
        present = [m for p, r, m in self.data if (p, r) == (participant, run)]
        share = self.weights.get(modality, 1.0) / sum(self.weights.get(m, 1.0) for m in present)
        n_participant_runs = sum(len(people) for people in self.people.values())
        return finite * (cells / finite.sum(1))[:, None] * share / n_participant_runs

    def objective(self, loadings: dict, latents: dict) -> float:
        """At loadings {(participant, modality): (feature, K)} and latents {(participant, run): (time, K)}."""
        total = 0.0
        for key in self.data:
            participant, run, modality = key
            model = self.operators[key] @ latents[participant, run] @ loadings[participant, modality].T
            residual = np.nan_to_num(self.standard[key][self._usable(key)]) - np.nan_to_num(model)
            total += float(np.sum(self.entry_weights[key] * residual**2))
        for pair, loading in loadings.items():
            kept = [f for f in range(len(loading)) if (*pair, f) not in self.absent]
            size = float(np.sum(loading[kept] ** 2)) / (len(kept) if self.scaling == "feature" else 1)
            total += self.loading_ridge * size / len(loadings)
        paths = [
            (p, r) for r in self.runs for p in (self.people[r][:1] if self.pooling == "shared" else self.people[r])
        ]
        for participant, run in paths:
            total += self._path_penalty(latents[participant, run], run) / len(paths)
            if self.pooling == "population":
                mean = np.mean([latents[p, run] for p in self.people[run]], axis=0)
                away = np.sum((latents[participant, run] - mean) ** 2, axis=1)
                total += self.population_strength * float(self._shares(run) @ away) / len(paths)
        return total

    def _shares(self, run: str) -> np.ndarray:
        shares = np.ones(len(self.grids[run]))
        shares[[0, -1]] = 0.5
        return shares / shares.sum()

    def _path_penalty(self, path: np.ndarray, run: str) -> float:
        duration = self.step * (len(path) - 1)
        rough = float(np.sum(np.diff(path, axis=0) ** 2)) / (self.step * duration)
        return self.latent_ridge * float(self._shares(run) @ np.sum(path**2, axis=1)) + self.roughness * rough

    def latents(self, loadings: dict, n_factors: int) -> dict:
        """Minimizing latents, from the dense Hessian and gradient of the quadratic by exact differences."""
        owners = {r: self.people[r] if self.pooling != "shared" else ["everyone"] for r in self.runs}
        places = [(p, r) for r in self.runs for p in owners[r]]
        sizes = [len(self.grids[r]) * n_factors for _, r in places]

        def unpack(x: np.ndarray) -> dict:
            pieces = np.split(x, np.cumsum(sizes)[:-1])
            paths = {place: piece.reshape(-1, n_factors) for place, piece in zip(places, pieces, strict=True)}
            return {
                (p, r): paths[(p if self.pooling != "shared" else "everyone", r)]
                for r in self.runs
                for p in self.people[r]
            }

        n = sum(sizes)
        basis = np.eye(n)
        zero = self.objective(loadings, unpack(np.zeros(n)))
        plus = np.array([self.objective(loadings, unpack(e)) for e in basis])
        minus = np.array([self.objective(loadings, unpack(-e)) for e in basis])
        hessian = np.diag(plus + minus - 2 * zero)
        for i in range(n):
            for j in range(i):
                both = self.objective(loadings, unpack(basis[i] + basis[j]))
                hessian[i, j] = hessian[j, i] = both - plus[i] - plus[j] + zero
        return unpack(np.linalg.solve(hessian, -(plus - minus) / 2))
