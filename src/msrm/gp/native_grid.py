"""The state-space backend of `msrm.gp.statespace`, its log evidence computed by JAX on the default device.

Everything but :meth:`NativeGrid.evidence` is inherited: grids, spacings, residual variances, posteriors for
predictions. Compiled functions are shared by all spacings and by copies of one backend; a response that outgrows its
windows compiles them anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from msrm.gp.jax_backend import NativeStateSpace
from msrm.gp.jax_statespace import STATUS
from msrm.gp.statespace import StateSpace
from msrm.nodes import Evidence, GroupStatistics

__all__ = ["NativeGrid"]

_OUTGROWN = STATUS[3]


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
        key = run, self.step, self.residual
        for _ in range(2):
            if key not in self.compiled:
                plain = {one.name: getattr(self, one.name) for one in fields(StateSpace)}
                backend = StateSpace(**(plain | {"groups": {run: self.groups[run]}, "moments": 0}))
                self.compiled[key] = NativeStateSpace(backend, values=response_values)
            found = self.compiled[key].evidence(run, response_values, length_scale, statistics, gradient)
            if found.ok or found.diagnostic != _OUTGROWN:
                return found
            del self.compiled[key]
        return found
