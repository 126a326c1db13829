"""A fitted GP-MSRM as plain values: what prediction, calibration and archives need, and nothing of the recording.

What the training data say of each run's nodes (:class:`TrainingNodes`: D and h, free of features) is kept, so that the
latents of the training runs, and new participants on them, need no second look at the data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import xarray as xr

from msrm.gp.backends import LatentBackend, select_likelihood
from msrm.gp.data import Key
from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import FreeLengthScale, Parameters, Specification
from msrm.gp.statespace import StateSpace
from msrm.gp.terms import OrnsteinUhlenbeck, Residual
from msrm.nodes import GroupStatistics, NodeGroup
from msrm.responses import Response

_FINER_STEP = 1.0 / 3.0  # of a first spacing: where predictions of fits with moments are made
FEATURE_KINDS = ("loading", "offset", "run_offset")  # parameters with a value for every feature


@dataclass(frozen=True, eq=False)
class Standardization:
    """Mean and scale of each feature of a participant-modality, data units."""

    mean: np.ndarray
    scale: np.ndarray


@dataclass(frozen=True, eq=False)
class TrainingNodes:
    """The nodes of one run and modality, and what the data say of them.

    Attributes
    ----------
    times : (time,)
        Seconds.
    pairs : (node, 2) int or None
    statistics : GroupStatistics
    """

    times: np.ndarray
    pairs: np.ndarray | None
    statistics: GroupStatistics


@dataclass(frozen=True, eq=False)
class FittedGP:
    """A specification with its parameters, all in standardized units where the data were standardized.

    Attributes
    ----------
    specification : Specification
    edges : str
    backend : str
        ``"dense"`` or ``"statespace"``.
    step : float
        Grid spacing of the fit, seconds; NaN for an exact backend.
    coarse_step : float
        Spacing of the coarser grid that the fit's likelihood was extrapolated with; NaN without one.
    moments : int
        Of each grid cell, in the fit's likelihood.
    residual : frozenset of str
        Modalities whose residual variances the fit used.
    features : {(participant, modality): (feature,) of str}
    standardization : {(participant, modality): Standardization}
        Empty unless standardized.
    parameters : Parameters
        In raw features; NaN in loadings and offsets of features that took no part.
    runs : {run: {modality: TrainingNodes}}
    domains : {run: (first, last)}
        Seconds with data.
    """

    specification: Specification
    edges: str
    backend: str
    step: float
    coarse_step: float
    moments: int
    residual: frozenset[str]
    features: dict[Key, np.ndarray]
    standardization: dict[Key, Standardization]
    parameters: Parameters
    runs: dict[str, dict[str, TrainingNodes]]
    domains: dict[str, tuple[float, float]]

    @property
    def participants(self) -> tuple[str, ...]:
        """Participants with loadings."""
        return tuple(dict.fromkeys(participant for participant, _ in self.features))

    @cached_property
    def responses(self) -> dict[str, Response]:
        """Responses with every parameter fixed at its fitted value."""
        values = self.specification.response_values(self.parameters)
        return {m: response.with_values(values.get(m, {})) for m, response in self.specification.responses.items()}

    @cached_property
    def labelled(self) -> dict[str, xr.DataArray | float]:
        """Parameters with features and factors named; zero, their mode, for features that took no part."""
        factor = {"factor": np.arange(1, self.specification.n_factors + 1)}
        out: dict[str, xr.DataArray | float] = {}
        for name, value in self.parameters.items():
            kind, *rest = name.split("/")
            if kind in FEATURE_KINDS:
                coords = {"feature": self.features[rest[0], rest[-1]]} | (factor if value.ndim == 2 else {})
                out[name] = xr.DataArray(np.nan_to_num(value), coords, tuple(coords))
            else:
                out[name] = float(value)
        return out

    @cached_property
    def length_scale(self) -> float:
        """Seconds."""
        return self.specification.length_scale_of(self.parameters)

    @cached_property
    def held(self) -> Specification:
        """The specification with responses, residual timescales and length scale fixed at their fitted values."""
        residuals: dict[str, Residual] = {
            modality: OrnsteinUhlenbeck(self.specification.timescale_of(self.parameters, modality))
            for modality, residual in self.specification.residuals.items()
            if isinstance(residual, OrnsteinUhlenbeck)
        }
        return replace(
            self.specification, responses=self.responses, length_scale=self.length_scale, residuals=residuals
        )

    def backend_for(
        self,
        groups: Mapping[str, Mapping[str, NodeGroup]],
        reach: Mapping[str, tuple[float, float]] | None = None,
    ) -> LatentBackend:
        """The fit's backend for other nodes, its latent over ``reach`` (seconds) by run.

        At the fit's spacing; finer where moments let that be coarse, since functionals that share a cell are asked for.
        """
        chosen = select_likelihood(
            self.backend,
            groups,
            self.specification.n_factors,
            matern=self.specification.matern,
            length_scale=self.length_scale,
            length_scale_slope=False,
        ).backend
        if not isinstance(chosen, StateSpace):
            return chosen
        step = _FINER_STEP * chosen.step if self.moments else self.step
        finer = replace(chosen.at_step(step), reach=reach or {})
        identity, filtered = finer.off_grid
        return finer.with_residual(identity | (self.residual & filtered))

    def training_groups(self) -> dict[str, dict[str, NodeGroup]]:
        """Node groups of the training runs."""
        return {
            run: {m: NodeGroup(m, nodes.times, self.responses[m], nodes.pairs) for m, nodes in own.items()}
            for run, own in self.runs.items()
        }

    def training_statistics(self) -> dict[str, dict[str, GroupStatistics]]:
        """What the training data say of their nodes."""
        return {run: {m: nodes.statistics for m, nodes in own.items()} for run, own in self.runs.items()}


def training_nodes(likelihood: Likelihood, parameters: Parameters) -> dict[str, dict[str, TrainingNodes]]:
    """Nodes and their statistics at some parameters, by run and modality."""
    statistics = likelihood.statistics(parameters)
    return {
        run: {m: TrainingNodes(group.times, group.pairs, statistics[run][m]) for m, group in groups.items()}
        for run, groups in likelihood.nodes.groups.items()
    }


def starting_length_scale(specification: Specification) -> float:
    """The length scale, or where learning it starts, seconds."""
    scale = specification.length_scale
    return scale.start if isinstance(scale, FreeLengthScale) else float(scale)
