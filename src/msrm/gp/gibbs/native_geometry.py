"""Grid points of the compiled Gibbs sampler: coarse points and how the grid follows from them, fixed on the host.

The coarse component of a path is what its *states* at every q-th grid point determine, interpolated gap by gap by the
Markov property (DESIGN 3.3, 5). NumPy makes everything once; JAX arrays come out.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from msrm.gp.chain import Chain
from msrm.latent_grid import Matern

__all__ = ["GridPoints"]

_STRIDES = (4, 8, 16)  # grid points from one coarse point to the next
_FEWEST = 4  # coarse points of a run


@dataclass(frozen=True)
class GridPoints:
    """The grid points of all runs, one after the other.

    Attributes
    ----------
    chain : Chain
    matern : Matern
    x : float
        Rate times spacing.
    """

    chain: Chain
    matern: Matern
    x: float

    @property
    def counts(self) -> NDArray[np.intp]:
        """Grid points of each run, whole blocks of them."""
        return self.chain.points * np.array(self.chain.blocks)

    @property
    def first(self) -> NDArray[np.intp]:
        """First grid point of each run among all."""
        return np.concatenate([[0], np.cumsum(self.counts)[:-1]])

    def levels(self) -> dict[str, Array]:
        """The coarse points of every level, stacked: filled up to one number by points without a precision."""
        shortest = int(self.counts.min())
        enough = max(1, sum(shortest // stride >= _FEWEST for stride in _STRIDES))
        made = [self.level(stride) for stride in _STRIDES[:enough]]
        most = max(len(one["at"]) for one in made)
        for one in made:
            own = len(one["at"])
            one["count"] = np.asarray(own)
            for name in ("at", "transition", "precision"):
                one[name] = np.concatenate([one[name], np.zeros((most - own, *one[name].shape[1:]), one[name].dtype)])
        return {name: jnp.asarray(np.stack([one[name] for one in made])) for name in made[0]}

    def steps(self) -> dict[str, Array]:
        """Transition and precision from one grid point to the next, and the stationary precision."""
        matern = self.matern
        return {
            "transition": jnp.asarray(matern.transition(self.x)),
            "precision": jnp.asarray(np.linalg.inv(matern.noise(self.x))),
            "start": jnp.asarray(np.linalg.inv(matern.stationary)),
        }

    def level(self, stride: int) -> dict[str, NDArray[Any]]:
        """Coarse points of every run, the last grid point one of them; gaps differ before it only."""
        matern, x, chosen, gaps, first = self.matern, self.x, [], [], []
        for start, count in zip(self.first, self.counts, strict=True):
            places = np.unique(np.r_[np.arange(0, count, stride), count - 1])
            chosen.append(start + places)
            gaps.append(np.r_[0, np.diff(places)])
            first.append(np.r_[True, np.zeros(len(places) - 1, bool)])
        at, gap, first_of = np.concatenate(chosen), np.concatenate(gaps), np.concatenate(first)
        every = np.arange(int(self.counts.sum()))
        before = np.searchsorted(at, every, side="right") - 1
        after = np.minimum(before + ~np.isin(every, at), len(at) - 1)
        early, late = np.zeros((2, len(every), matern.dimension, matern.dimension))
        made: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        for place, (left, right) in enumerate(zip(before, after, strict=True)):
            key = int(every[place] - at[left]), int(at[right] - at[left])
            if key not in made:
                made[key] = _bridge(matern, x, *key)
            early[place], late[place] = made[key]
        safe = np.maximum(gap, 1)
        steps = {
            int(one): (matern.transition(one * x), np.linalg.inv(matern.noise(one * x))) for one in np.unique(safe)
        }
        return {
            "at": at,
            "before": before,
            "after": after,
            "early": early,
            "late": late,
            "transition": np.where(first_of[:, None, None], 0.0, np.array([steps[int(one)][0] for one in safe])),
            "precision": np.where(
                first_of[:, None, None],
                np.linalg.inv(matern.stationary),
                np.array([steps[int(one)][1] for one in safe]),
            ),
        }

    def window_covariance(self) -> Array:
        """Prior covariance of the states of a window, (2 points s, 2 points s)."""
        matern, points = self.matern, 2 * self.chain.points
        s = matern.dimension
        out = np.zeros((points, s, points, s))
        forward = [matern.transition(lag * self.x) @ matern.stationary for lag in range(points)]
        for i in range(points):
            for j in range(i + 1):
                out[i, :, j, :], out[j, :, i, :] = forward[i - j], forward[i - j].T
        return jnp.asarray(out.reshape(points * s, points * s))


def _bridge(matern: Any, x: float, place: int, gap: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of the states at both ends of a gap in the mean of those in between."""
    if place == 0:
        return np.eye(matern.dimension), np.zeros((matern.dimension, matern.dimension))
    rest = matern.transition((gap - place) * x)
    late = matern.noise(place * x) @ rest.T @ np.linalg.inv(matern.noise(gap * x))
    return matern.transition(place * x) - late @ matern.transition(gap * x), late
