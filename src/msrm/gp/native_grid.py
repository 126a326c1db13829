"""The state-space backend of `msrm.gp.statespace`, its log evidence computed by JAX on the default device.

Everything but the gradient of :meth:`NativeGrid.evidence` is inherited: grids, spacings, residual variances, posteriors
for predictions, and values alone, which choose a grid: compiling each would take longer than all of them do. Compiled
functions are shared by all spacings and by copies of one backend. A response that outgrows its windows compiles once
more, for the longest that its bounds allow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from msrm.gp.jax_backend import NativeStateSpace
from msrm.gp.jax_statespace import STATUS
from msrm.gp.statespace import StateSpace
from msrm.nodes import Evidence, GroupStatistics

__all__ = ["NativeGrid"]

_OUTGROWN = STATUS[3]
_ROOM = 1.25


@dataclass(frozen=True)
class NativeGrid(StateSpace):
    """`StateSpace` on a device.

    Attributes
    ----------
    compiled : dict
        Compiled runs by name, spacing and use of residual variances.
    """

    compiled: dict[tuple[str, float, frozenset[str]], NativeStateSpace] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, backend: StateSpace) -> "NativeGrid":
        """The same grids on the device."""
        return cls(**({one.name: getattr(backend, one.name) for one in fields(StateSpace)} | {"moments": 0}))

    def with_moments(self, moments: int) -> "NativeGrid":
        """Itself: cells with moments have no compiled form, and grids are refined instead."""
        return self

    def evidence(
        self,
        run: str,
        response_values: Mapping[str, Mapping[str, float]],
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run and its derivatives (`msrm.nodes.Backend`)."""
        if not gradient:
            return super().evidence(run, response_values, length_scale, statistics, False)
        key = run, self.step, self.residual
        for room in (_ROOM, np.inf):
            if key not in self.compiled:
                plain = {one.name: getattr(self, one.name) for one in fields(StateSpace)}
                backend = StateSpace(**(plain | {"groups": {run: self.groups[run]}, "moments": 0}))
                self.compiled[key] = NativeStateSpace(backend, values=response_values, room=room)
            found = self.compiled[key].evidence(run, response_values, length_scale, statistics)
            if found.ok or found.diagnostic != _OUTGROWN:
                break
            del self.compiled[key]
        return found
