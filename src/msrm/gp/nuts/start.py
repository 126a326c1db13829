"""Where NUTS chains start and how their coordinates are whitened: a few Gibbs sweeps from the MAP of each basin.

A MAP is no typical point: with many features its loadings are small, its null rows zero (DESIGN 5). Every chain
starts from the MAP, or in turn from other optima within a few nats of it, spread out, then moved by a few Gibbs sweeps;
any start is right, these are near what is to be sampled. The whitening is made at the first chain's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrm.gp.gibbs.chains import dispersed
from msrm.gp.gibbs.state import Current, State
from msrm.gp.gibbs.sweep import Sweeper
from msrm.gp.map import StartRecord
from msrm.gp.nuts.coordinates import Coordinates
from msrm.gp.nuts.density import Density, runs_compiled
from msrm.gp.nuts.whitening import Whitening, whitening_at
from msrm.nodes import Backend
from msrm.runtime import blas_threads

__all__ = ["Beginning", "begin", "other_basins"]

_SWEEPS = 30
_TYPICAL = 4  # points that the Hessian is averaged over
_RIVAL = 10.0  # nats within which another optimum starts chains too
_SAME = 0.02  # of a scalar's range or value: closer optima are one


@dataclass(frozen=True, eq=False)
class Beginning:
    """What all chains of a run share.

    Attributes
    ----------
    coordinates : Coordinates
    whitening : Whitening
    points : (chain, coordinate)
        x where each chain starts.
    """

    coordinates: Coordinates
    whitening: Whitening
    points: NDArray[np.float64]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Whitening and starts, for storage; :meth:`from_arrays` undoes it."""
        return {"points": self.points, **{name: np.asarray(value) for name, value in self.whitening._asdict().items()}}

    @classmethod
    def from_arrays(cls, coordinates: Coordinates, arrays: dict[str, NDArray[Any]]) -> "Beginning":
        """The beginning of an earlier run."""
        whitening = Whitening(**{name: arrays[name] for name in Whitening._fields})
        return cls(coordinates, whitening, arrays["points"])


def begin(
    coordinates: Coordinates,
    sweeper: Sweeper,
    backend: Backend,
    starts: Sequence[State],
    *,
    chains: int,
    seed: int,
) -> Beginning:
    """Starting points and whitening.

    Parameters
    ----------
    coordinates : Coordinates
    sweeper : Sweeper
        On the fit's grid.
    backend : Backend
        Of the density.
    starts : sequence of State
        One for each basin; chains take them in turn.
    chains, seed : int
    """
    seeds = np.random.SeedSequence(seed).spawn(chains + 1)
    with blas_threads(1):
        currents = [
            _started(np.random.default_rng(own), sweeper, start)
            for own, start in zip(seeds[:chains], cycle(starts), strict=False)
        ]
        density = Density(coordinates, backend, compiled=runs_compiled(backend))
        typical, rng = [currents[0]], np.random.default_rng(seeds[chains])
        for _ in range(_TYPICAL - 1):
            typical.append(_moved(rng, sweeper, typical[-1].state))
        places = [coordinates.point(current.state) for current in typical]
        whitening = whitening_at(coordinates, sweeper, currents[0], places, lambda x: density.value_and_gradient(x)[1])
    points = np.array([coordinates.point(current.state) for current in currents])
    return Beginning(coordinates, whitening, points)


def _started(rng: np.random.Generator, sweeper: Sweeper, start: State) -> Current:
    return _moved(rng, sweeper, dispersed(rng, start, sweeper))


def _moved(rng: np.random.Generator, sweeper: Sweeper, state: State) -> Current:
    """A typical point near a state, latents drawn."""
    current = sweeper.start(state)
    for _ in range(_SWEEPS):
        current = sweeper.start(sweeper.sweep(rng, current, tune=False).state)
        if not np.isfinite(current.log_likelihood):
            raise FloatingPointError("the posterior precision cannot be factored near the MAP")
    sweeper.draw_latents(rng, current)
    return current


def other_basins(start: State, records: Sequence[StartRecord]) -> list[State]:
    """The start with the scalars of other optima that the fit's search ended in, within 10 nats of the best.

    Parameters
    ----------
    start : State
        At the MAP.
    records : sequence of StartRecord
    """
    best = min(record.last for record in records)
    found: list[State] = []
    for record in records:
        if not record.last <= best + _RIVAL:
            continue
        state = start
        for name, value in record.scalars.items():
            state = state.with_parameter(name, value)
        if all(_differ(record.scalars, other) for other in [start, *found]):
            found.append(state)
    return found


def _differ(scalars: dict[str, float], other: State) -> bool:
    return any(
        abs(value - other.parameter(name)) > _SAME * max(abs(value), abs(other.parameter(name)))
        for name, value in scalars.items()
    )
