"""The state of a Gibbs chain: parameters in rotated coordinates, and what one sweep adds to them.

Between sweeps a chain is its parameters; latent paths, functionals and sufficient statistics live inside a sweep
(:class:`Current`), because every sweep begins by integrating the latents out (DESIGN 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from msrm.gp.data import Key
from msrm.gp.gibbs.design import Design
from msrm.gp.posterior import Posterior
from msrm.nodes import GroupStatistics

__all__ = ["Current", "State"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class State:
    """Parameters of a chain.

    Attributes
    ----------
    rows : {(participant, modality): (coordinate, k)}
        Rows [w b c...], null stand-ins included (:mod:`msrm.gp.gibbs.design`).
    noise : {(participant, modality): float}
        Variances.
    responses : {modality: {name: float}}
    length_scale : float
        Seconds.
    timescales : {modality: float}
        Of the residuals, seconds; NaN for white ones.
    """

    rows: dict[Key, Array]
    noise: dict[Key, float]
    responses: dict[str, dict[str, float]]
    length_scale: float
    timescales: dict[str, float]

    def with_parameter(self, name: str, value: float) -> "State":
        """The state with one scalar changed: ``response/m/name``, ``residual_timescale/m`` or ``length_scale``."""
        kind, *rest = name.split("/")
        if kind == "length_scale":
            return replace(self, length_scale=value)
        if kind == "residual_timescale":
            return replace(self, timescales=self.timescales | {rest[0]: value})
        modality, parameter = rest
        return replace(self, responses=self.responses | {modality: self.responses[modality] | {parameter: value}})

    def parameter(self, name: str) -> float:
        """One scalar of :meth:`with_parameter`."""
        kind, *rest = name.split("/")
        if kind == "length_scale":
            return self.length_scale
        if kind == "residual_timescale":
            return self.timescales[rest[0]]
        return self.responses[rest[0]][rest[1]]

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """The state as named arrays, for storage; :meth:`from_arrays` undoes it."""
        out = {f"rows.{place}": rows for place, rows in enumerate(self.rows.values())}
        out["noise"] = np.array(list(self.noise.values()))
        out["scalars"] = np.array(
            [value for values in self.responses.values() for value in values.values()]
            + [self.length_scale, *self.timescales.values()]
        )
        return out

    def from_arrays(self, arrays: Mapping[str, NDArray[np.float64]]) -> "State":
        """A state of the same layout as this one, from its stored arrays."""
        scalars = iter(arrays["scalars"].tolist())
        responses = {m: {name: next(scalars) for name in values} for m, values in self.responses.items()}
        return State(
            {key: np.array(arrays[f"rows.{place}"]) for place, key in enumerate(self.rows)},
            dict(zip(self.noise, arrays["noise"].tolist(), strict=True)),
            responses,
            next(scalars),
            {modality: next(scalars) for modality in self.timescales},
        )


@dataclass(eq=False)
class Current:
    """A chain in the middle of a sweep: the state, what it means for the nodes, and latents once they are drawn.

    Attributes
    ----------
    state : State
    design : Design
        At the state's residual timescales.
    statistics : {run: {modality: GroupStatistics}}
        D and h of the nodes.
    posteriors : {run: Posterior}
        Latent states given the parameters.
    constant : float
        Log likelihood without the latents.
    states : {run: (grid point * state, K)}
    functionals : {run: {modality: (node, K)}}
    acceptance : {block or move: float}
        Acceptance probabilities of this sweep.
    """

    state: State
    design: Design
    statistics: dict[str, dict[str, GroupStatistics]]
    posteriors: dict[str, Posterior]
    constant: float
    states: dict[str, Array]
    functionals: dict[str, dict[str, Array]]
    acceptance: dict[str, float] = field(default_factory=dict)

    @property
    def log_likelihood(self) -> float:
        """Latent-marginal log likelihood; NaN where a factorization failed."""
        return self.constant + sum(posterior.log_evidence for posterior in self.posteriors.values())
