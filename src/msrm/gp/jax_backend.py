"""GP-MSRM's likelihood compiled: the state-space backend of one run, and the log likelihood of a whole recording.

Two faces of `msrm.gp.jax_statespace`. `NativeStateSpace` gives `msrm.nodes.Evidence` like any backend.
`NativeLikelihood` is all of `msrm.gp.likelihood` as one pure function of named parameters in the coordinates of its
data (rotated features: DESIGN 3.2), for accelerators, samplers and users' own transformations. Arrays of the
recording's size are in `data`, an argument, so that compiled code is small. On a CPU the NumPy likelihood is faster.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from msrm.gp.blocks import Sequential, Solver
from msrm.gp.cyclic import Parallel
from msrm.gp.extrapolation import Extrapolated
from msrm.gp.jax_pairs import ModalitySums
from msrm.gp.jax_settings import FLOAT
from msrm.gp.jax_statespace import STATUS, ExtrapolatedChain, NodeStatistics, StateSpaceChain
from msrm.gp.likelihood import Likelihood
from msrm.gp.node_terms import class_sums
from msrm.gp.parameters import FreeLengthScale, Parameters
from msrm.gp.programs import Program
from msrm.gp.statespace import StateSpace
from msrm.nodes import Evidence, GroupStatistics

__all__ = ["SOLVERS", "NativeLikelihood", "NativeStateSpace"]

SOLVERS: dict[str, Solver] = {"parallel": Parallel(), "sequential": Sequential()}
Values = Mapping[str, Mapping[str, float]]


def _solver(solver: str | Solver) -> Solver:
    if not isinstance(solver, str):
        return solver
    if solver not in SOLVERS:
        raise ValueError(f"solver must be one of {', '.join(SOLVERS)} or a Solver, found {solver!r}.")
    return SOLVERS[solver]


class NativeStateSpace:
    """The state-space backend in JAX, one run at a time (a `msrm.nodes.Backend`).

    Parameters
    ----------
    backend : StateSpace
        Grids, spacing, Matern order and use of residual variances.
    solver : {"parallel", "sequential"} or Solver
    values : {modality: {name: float}}, optional
        Free response parameters where supports are measured; the responses' starts by default.
    room : float
        How much longer than there supports may become.

    Raises
    ------
    ValueError
        For an unknown solver.
    """

    def __init__(
        self,
        backend: StateSpace,
        *,
        solver: str | Solver = "parallel",
        values: Values | None = None,
        room: float = 1.25,
    ) -> None:
        self.backend = backend
        self._chains = {
            run: StateSpaceChain(
                replace(backend, groups={run: groups}), _solver(solver), length_scale=None, values=values, room=room
            )
            for run, groups in backend.groups.items()
        }
        self._compiled: dict[tuple[str, bool], Any] = {}

    def evidence(
        self,
        run: str,
        response_values: Values,
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Log evidence of one run and its derivatives (`msrm.nodes.Backend`)."""
        groups = self.backend.groups[run]
        values = {
            modality: {name: np.asarray(float(response_values[modality][name])) for name in group.response.free}
            for modality, group in groups.items()
        }
        given = {modality: _traced(one) for modality, one in statistics.items()}
        made = self._function(run, gradient)(values, np.asarray(float(length_scale)), given, self._chains[run].data)
        (value, status), slopes = made if gradient else (made, None)
        if status or not np.isfinite(value):
            return Evidence.failed(STATUS[int(status)] or "the log evidence is not finite")
        if slopes is None:
            return Evidence(float(value))
        on_values, on_length_scale, on_statistics = jax.tree.map(np.asarray, slopes)
        second, coefficients = {}, {}
        for modality, one in on_statistics.items():
            each = -(one.precision + np.swapaxes(one.precision, 1, 2))
            index = statistics[modality].index if len(each) > 1 else np.zeros(1, int)
            second[modality] = class_sums(each, index, len(statistics[modality].precision))
            if one.coefficients is not None:
                coefficients[modality] = one.coefficients
        return Evidence(
            float(value),
            True,
            "",
            {modality: one.information for modality, one in on_statistics.items()},
            second,
            {modality: {name: float(slope) for name, slope in of.items()} for modality, of in on_values.items()},
            float(on_length_scale) if self.backend.length_scale_slope else 0.0,
            coefficients,
        )

    def _function(self, run: str, gradient: bool) -> Any:
        if (run, gradient) not in self._compiled:
            chain = self._chains[run]

            def value(values: Any, length_scale: Any, statistics: Any, data: Any) -> tuple[Array, Array]:
                return chain.log_evidence(data, values, length_scale, statistics)

            made = jax.value_and_grad(value, argnums=(0, 1, 2), has_aux=True) if gradient else value
            made_of = self.backend, run, chain.geometry, chain.solver, gradient
            self._compiled[run, gradient] = Program(made, made_of)
        return self._compiled[run, gradient]


def _traced(one: GroupStatistics) -> NodeStatistics:
    precision = one.precision if len(one.precision) == 1 else one.precision[one.index]
    return NodeStatistics(precision, one.information, one.coefficients)


class NativeLikelihood:
    """The latent-marginal log likelihood of a recording, compiled whole.

    Parameters
    ----------
    likelihood : Likelihood
        With a state-space backend, on one grid or extrapolated from two: specification, data (raw or rotated), grid.
    solver : {"parallel", "sequential"} or Solver
    parameters : {name: array}, optional
        Where a search or chain starts; the responses' starts by default.
    room : float
        How much longer than there supports may become; blocks are larger by as much.

    Attributes
    ----------
    data : pytree of arrays
        First argument of `log_likelihood`.
    chain : StateSpaceChain or ExtrapolatedChain

    Raises
    ------
    TypeError
        If the backend is neither a `StateSpace` nor an `Extrapolated` one.
    ValueError
        For an unknown solver.
    """

    def __init__(
        self,
        likelihood: Likelihood,
        *,
        solver: str | Solver = "parallel",
        parameters: Mapping[str, Any] | None = None,
        room: float = 1.25,
    ) -> None:
        backend, specification = likelihood.backend, likelihood.specification
        if not isinstance(backend, StateSpace | Extrapolated):
            raise TypeError(
                f"the compiled likelihood needs the state-space backend, found {type(backend).__name__}; "
                'prepare it with likelihood="statespace"'
            )
        self.likelihood = likelihood
        scale = specification.length_scale
        values = None if parameters is None else specification.response_values(parameters)
        length_scale = None if isinstance(scale, FreeLengthScale) else float(scale)
        settings: dict[str, Any] = {"length_scale": length_scale, "values": values, "room": room}
        self.chain: StateSpaceChain | ExtrapolatedChain
        if isinstance(backend, StateSpace):
            self.chain = StateSpaceChain(backend, _solver(solver), **settings)
        else:
            self.chain = ExtrapolatedChain(backend, _solver(solver), **settings)
        self._sums, observed = {}, {}
        for modality in self.chain.counts:
            terms = [one for one in likelihood.terms if one.pair.modality == modality]
            self._sums[modality], observed[modality] = ModalitySums.of(specification, likelihood.nodes, terms, modality)
        self.data = {"observed": observed, "rows": self.chain.data}

    def log_likelihood(self, data: Any, parameters: Mapping[str, Array]) -> Array:
        """Log likelihood as a pure function; NaN where a factorization fails or a response outgrows its window.

        Parameters
        ----------
        data : pytree
            The attribute `data`.
        parameters : {name: array}
            As in the likelihood's layout: ``loading/{p}/{m}`` (coordinate, factor), ``noise/{p}/{m}`` (), ...
        """
        return self._value(data, parameters)[0]

    def value(self, parameters: Mapping[str, Any]) -> float:
        """Log likelihood at some parameters."""
        return float(self._compiled[0](self.data, self._packed(parameters))[0])

    def value_and_gradient(self, parameters: Mapping[str, Any]) -> tuple[float, Parameters]:
        """Log likelihood and its derivatives, named like the parameters."""
        (value, _), gradient = jax.device_get(self._compiled[1](self.data, self._packed(parameters)))
        return float(value), self.likelihood.layout.unpacked(gradient)

    def diagnostic(self, parameters: Mapping[str, Any]) -> str:
        """Why the log likelihood is not finite; empty where it is."""
        value, status = self._compiled[0](self.data, self._packed(parameters))
        return STATUS[int(status)] or ("" if np.isfinite(value) else "the residual sums of squares are not finite")

    @cached_property
    def _compiled(self) -> tuple[Any, Any]:
        """Value, and value and gradient, of packed parameters: one transfer each way whatever their number."""

        def value(data: Any, vector: Array) -> tuple[Array, Array]:
            layout = self.likelihood.layout
            spans = layout.slices.items()
            return self._value(data, {name: vector[span].reshape(layout.shapes[name]) for name, span in spans})

        of, chain = self.likelihood, self.chain
        made_of = of.specification, of.backend, of.layout.shapes, self._sums, chain.geometry, chain.solver
        return Program(value, made_of), Program(jax.value_and_grad(value, argnums=1, has_aux=True), (made_of, "slopes"))

    def _packed(self, parameters: Mapping[str, Any]) -> Array:
        return jax.device_put(np.asarray(self.likelihood.layout.packed(dict(parameters)), dtype=FLOAT))

    def _value(self, data: Any, parameters: Mapping[str, Array]) -> tuple[Array, Array]:
        statistics, constant = {}, jnp.zeros(())
        for modality, sums in self._sums.items():
            statistics[modality], added = sums(data["observed"][modality], parameters)
            constant = constant + added
        values = {
            modality: {name: parameters[f"response/{modality}/{name}"] for name in response.free}
            for modality, response in self.likelihood.specification.responses.items()
            if modality in self._sums
        }
        value, status = self.chain.log_evidence(data["rows"], values, parameters.get("length_scale"), statistics)
        return value + constant, status
