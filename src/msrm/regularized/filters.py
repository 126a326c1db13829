"""The free response parameters of a fit as one bounded vector, and their penalties (DESIGN 2).

A response is owned by its modality, or by each participant where its pooling is partial or separate. The vector holds
natural parameters (seconds, ratios) within their bounds. Penalties: half the squared standardized distance of
a normal or lognormal prior, and strength x mean over participants of squared deviations from their mean
(logarithms for positive parameters) where pooling is partial.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from msrm.priors import LogNormal, Normal
from msrm.responses import Free, Response

Array = NDArray[np.float64]
Pair = tuple[str, str]
Owner = tuple[str, str | None]
Values = dict[str, float]


class Filters:
    """Which response each participant-modality uses, and the vector of everything free in them.

    Parameters
    ----------
    responses : dict from modality to Response
    pairs : sequence of (participant, modality)

    Attributes
    ----------
    owners : tuple of (modality, participant or None)
        One per distinct response; None where all participants share it.
    names : tuple of (owner index, parameter name)
        What each entry of the vector is.
    start, lower, upper : (parameter,)
    """

    def __init__(self, responses: Mapping[str, Response], pairs: Sequence[Pair]) -> None:
        self.responses = {modality: responses[modality] for _, modality in pairs}
        owners = [self._owner(pair) for pair in pairs]
        self.owners: tuple[Owner, ...] = tuple(dict.fromkeys(owners))
        self.of_pair = {pair: self.owners.index(owner) for pair, owner in zip(pairs, owners, strict=True)}
        self.names = tuple((i, name) for i, (m, _) in enumerate(self.owners) for name in self.responses[m].free)
        free = [self._free(slot) for slot in range(len(self.names))]
        self.start = np.array([f.start for f in free], float)
        self.lower = np.array([f.bounds[0] for f in free], float)
        self.upper = np.array([f.bounds[1] for f in free], float)
        self._pools = self._partial_pools()

    def _owner(self, pair: Pair) -> Owner:
        participant, modality = pair
        return modality, None if self.responses[modality].pooling == "shared" else participant

    def _free(self, slot: int) -> Free:
        owner, name = self.names[slot]
        return self.response(owner).free[name]

    def _partial_pools(self) -> list[tuple[NDArray[np.intp], float, bool]]:
        """Slots drawn together, the strength, and whether on the log scale."""
        pools = []
        for modality, response in self.responses.items():
            if response.pooling_strength is None:
                continue
            for name in response.free:
                slots = [s for s, (i, n) in enumerate(self.names) if self.owners[i][0] == modality and n == name]
                pools.append((np.array(slots, np.intp), response.pooling_strength, name in response.positive))
        return pools

    def response(self, owner: int) -> Response:
        """The response of an owner, as constructed."""
        return self.responses[self.owners[owner][0]]

    def slots(self, owner: int) -> dict[str, int]:
        """Where an owner's free parameters are in the vector."""
        return {name: slot for slot, (i, name) in enumerate(self.names) if i == owner}

    def values(self, vector: Array) -> list[Values]:
        """Every owner's free values."""
        out: list[Values] = [{} for _ in self.owners]
        for (owner, name), value in zip(self.names, vector.tolist(), strict=True):
            out[owner][name] = value
        return out

    def vector(self, values: Mapping[Owner, Values]) -> Array:
        """The vector of given values by owner; what is absent stays at its start."""
        out = self.start.copy()
        for slot, (owner, name) in enumerate(self.names):
            out[slot] = values.get(self.owners[owner], {}).get(name, out[slot])
        return out

    def named(self, vector: Array) -> dict[str, float]:
        """The vector by path: `response/{modality}/{name}`, with the participant between where it owns the response."""
        return {self.path(slot): float(value) for slot, value in enumerate(vector)}

    def path(self, slot: int) -> str:
        """The name of an entry of the vector."""
        owner, name = self.names[slot]
        modality, participant = self.owners[owner]
        return "/".join(["response", modality, *([] if participant is None else [participant]), name])

    def penalty(self, vector: Array) -> tuple[float, Array, Array]:
        """Penalty of a vector, its gradient, and the positive part of its curvature (parameter,)."""
        value, gradient, curvature = 0.0, np.zeros_like(vector), np.zeros_like(vector)
        for slot, x in enumerate(vector.tolist()):
            prior = self._free(slot).prior
            if isinstance(prior, (Normal, LogNormal)):
                log = isinstance(prior, LogNormal)
                distance = ((np.log(x) if log else x) - prior.mean) / prior.sd
                slope = 1 / (prior.sd * x) if log else 1 / prior.sd
                value += 0.5 * distance**2
                gradient[slot] += distance * slope
                curvature[slot] += slope**2
        for slots, strength, log in self._pools:
            x = vector[slots]
            coordinate, slope = (np.log(x), 1 / x) if log else (x, np.ones_like(x))
            deviation = coordinate - coordinate.mean()
            weight = strength / len(slots)
            value += weight * float(deviation @ deviation)
            gradient[slots] += 2 * weight * deviation * slope
            curvature[slots] += 2 * weight * slope**2
        return value, gradient, curvature

    def pooled_values(self, modality: str, vector: Array) -> Values:
        """A modality's free values for a participant not fitted: shared ones, or the participants' mean coordinates."""
        response = self.responses[modality]
        out = {}
        for name in response.free:
            slots = [s for s, (i, n) in enumerate(self.names) if self.owners[i][0] == modality and n == name]
            x = vector[slots]
            out[name] = float(np.exp(np.log(x).mean()) if name in response.positive else x.mean())
        return out
