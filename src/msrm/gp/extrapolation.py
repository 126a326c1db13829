"""The state-space likelihood for a vanishing grid spacing, extrapolated from two grids (DESIGN 3.3).

The log likelihood of a grid converges as ``step^p``, ``p = 2 dimension`` for a Matern process with ``dimension``
states, so that Richardson's combination of a coarse and a fine grid ::

    L = (r L(fine) - L(coarse)) / (r - 1),  r = (coarse / fine)^p

is closer to the limit than the finer of the two by orders of magnitude. It is linear: derivatives combine alike, and
the gradient is exactly that of the value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from msrm.gp.posterior import Posterior
from msrm.gp.statespace import StateSpace
from msrm.latent_grid import Matern
from msrm.nodes import Evidence, GroupStatistics

__all__ = ["Extrapolated", "extrapolation_weight"]

Values = Mapping[str, Mapping[str, float]]


def extrapolation_weight(coarse: float, fine: float, matern: Matern) -> float:
    """The weight of the fine grid's log likelihood, ``r / (r - 1)``; the coarse one has ``1 - weight``."""
    ratio = (coarse / fine) ** (2 * matern.dimension)
    return ratio / (ratio - 1.0)


@dataclass(frozen=True, eq=False)
class Extrapolated:
    """Two state-space backends of the same nodes, combined.

    Attributes
    ----------
    coarse, fine : StateSpace
        The same but for the spacing.
    """

    coarse: StateSpace
    fine: StateSpace
    weight: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.fine.step < self.coarse.step:
            raise ValueError(f"spacings must differ: coarse {self.coarse.step:g} s, fine {self.fine.step:g} s.")
        weight = extrapolation_weight(self.coarse.step, self.fine.step, self.fine.matern)
        object.__setattr__(self, "weight", weight)

    @property
    def step(self) -> float:
        """Spacing of the fine grid, seconds."""
        return self.fine.step

    @property
    def coarse_step(self) -> float:
        """Spacing of the coarse grid, seconds."""
        return self.coarse.step

    @property
    def residual(self) -> frozenset[str]:
        """Modalities whose residual variances are used."""
        return self.fine.residual

    def evidence(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run and its derivatives (:class:`msrm.nodes.Backend`)."""
        fine = self.fine.evidence(run, response_values, length_scale, statistics, gradient)
        if not fine.ok:
            return fine
        coarse = self.coarse.evidence(run, response_values, length_scale, statistics, gradient)
        if not coarse.ok:
            return coarse
        made = {
            name: _combined(getattr(fine, name), getattr(coarse, name), self.weight)
            for name in Evidence.__dataclass_fields__
            if name not in ("ok", "diagnostic")
        }
        return replace(fine, **made)

    def posterior(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
    ) -> Posterior:
        """The states of one run given the data, on the fine grid."""
        return self.fine.posterior(run, response_values, length_scale, statistics)


def _combined(fine: Any, coarse: Any, weight: float) -> Any:
    """``weight fine + (1 - weight) coarse`` through nested dictionaries."""
    if isinstance(fine, dict):
        return {name: _combined(value, coarse[name], weight) for name, value in fine.items()}
    # The difference is small: rounding then stays that of the fine grid's value.
    return fine + (weight - 1.0) * (np.subtract(fine, coarse) if isinstance(fine, np.ndarray) else fine - coarse)
