"""New participants on known runs: loadings, offsets and noise at held responses and known latents (DESIGN 5).

The training data enter as what they say of their nodes (:class:`~msrm.gp.fitted.TrainingNodes`), known participants in
the new recording likewise; only the newcomers' parameters move, by the same whitened search as the MAP.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from msrm.asking import check_features
from msrm.gp.ascent import Ascent, expectation_steps
from msrm.gp.data import NodeLayout, pair_data
from msrm.gp.fitted import FittedGP, Standardization
from msrm.gp.likelihood import Likelihood
from msrm.gp.parameters import Parameters
from msrm.gp.starts import parameters_at_rest
from msrm.nodes import Backend, Evidence, GroupStatistics, NodeGroup, usable_rows
from msrm.quasi_newton import minimize
from msrm.recording import Recording

_KNOWN = "known\x00"  # no modality has a NUL in its name
_EM_STEPS = 6


@dataclass(frozen=True, eq=False)
class Anchored:
    """A backend with further nodes whose statistics are fixed.

    Attributes
    ----------
    inner : Backend
        For the newcomers' nodes and the fixed ones.
    statistics : {run: {name: GroupStatistics}}
        Of the fixed ones.
    """

    inner: Backend
    statistics: Mapping[str, Mapping[str, GroupStatistics]]

    def evidence(
        self,
        run: str,
        response_values: Mapping[str, Mapping[str, float]],
        length_scale: float,
        statistics: Mapping[str, GroupStatistics],
        gradient: bool = True,
    ) -> Evidence:
        """Evidence of the newcomers' and the fixed nodes together (:class:`msrm.nodes.Backend`)."""
        everything = {**statistics, **self.statistics.get(run, {})}
        return self.inner.evidence(run, response_values, length_scale, everything, gradient)


def calibrated(
    fitted: FittedGP,
    recording: Recording,
    standardization: Mapping[tuple[str, str], Standardization],
    *,
    max_iter: int,
    tolerance: float,
) -> tuple[FittedGP, bool, str]:
    """The fit with new participants added.

    Parameters
    ----------
    fitted : FittedGP
    recording : Recording
        Streams of participants that the fit does not have, in its runs, and nothing else.
    standardization : {(participant, modality): Standardization}
        Of the newcomers; empty unless the fit standardized.
    max_iter : int
    tolerance : float
        Newton decrement, nats.

    Returns
    -------
    FittedGP, bool, str
        With whether the search converged, and why it ended.

    Raises
    ------
    ValueError
        For a known participant, an unknown run or modality, or features that differ between participants' streams.
    """
    _check(fitted, recording)
    usable = usable_rows(recording, fitted.specification.responses, edges=fitted.edges)
    pairs = []
    for participant, modality in recording.pairs:
        scaling = standardization.get((participant, modality))
        mean, scale = (None, None) if scaling is None else (scaling.mean, scaling.scale)
        made = pair_data(recording, usable, participant, modality, mean=mean, scale=scale, reduce=True)
        if made is None:
            raise ValueError(f"{participant}: no usable row of {modality!r} in any run.")
        pairs.append(made)
    held = fitted.held
    nodes = NodeLayout.of(pairs, held.responses, {m: held.residual(m) for m in held.responses})
    known = fitted.training_groups()
    groups: dict[str, dict[str, NodeGroup]] = {
        run: own | {_KNOWN + m: replace(group, modality=_KNOWN + m) for m, group in known[run].items()}
        for run, own in nodes.groups.items()
    }
    fixed = {
        run: {_KNOWN + m: statistics for m, statistics in own.items()}
        for run, own in fitted.training_statistics().items()
    }
    likelihood = Likelihood(held, nodes, Anchored(fitted.backend_for(groups), fixed))
    ascent = Ascent(likelihood)
    point = ascent.point(ascent.packed(parameters_at_rest(likelihood)))
    if point is None:
        raise FloatingPointError(likelihood.diagnostic(parameters_at_rest(likelihood)))
    point = expectation_steps(point, _EM_STEPS)
    lower, upper = ascent.bounds
    outcome = minimize(ascent.point, point, lower, upper, max_iter=max_iter, tol=tolerance / max(abs(point.value), 1.0))
    parameters = raw_parameters(likelihood, outcome.point.parameters)
    joined = replace(
        fitted,
        features=fitted.features | {pair: recording.features(*pair) for pair in recording.pairs},
        standardization=fitted.standardization | dict(standardization),
        parameters=fitted.parameters | parameters,
    )
    return joined, outcome.converged, outcome.reason


def raw_parameters(likelihood: Likelihood, parameters: Parameters) -> Parameters:
    """Parameters in raw features: loadings and offsets turned back, features that took no part NaN."""
    out = dict(parameters)
    for pair in likelihood.nodes.pairs:
        if pair.reduced is None:
            continue
        name = f"{pair.participant}/{pair.modality}"
        names = [f"loading/{name}", f"offset/{name}"]
        names += [f"run_offset/{pair.participant}/{run}/{pair.modality}" for run in pair.rows]
        names = [name for name in names if name in parameters]
        columns = [parameters[name].reshape(pair.n_coordinates, -1) for name in names]
        stops = np.cumsum([column.shape[1] for column in columns])
        raw = np.split(pair.reduced.to_features(np.concatenate(columns, axis=1)), stops[:-1], axis=1)
        for key, value in zip(names, raw, strict=True):
            out[key] = value.reshape(-1, *parameters[key].shape[1:])
    return out


def _check(fitted: FittedGP, recording: Recording) -> None:
    for participant in recording.participants:
        if participant in fitted.participants:
            raise ValueError(f"Participant {participant!r} is in the fit already; select the new ones first.")
    for run in recording.runs:
        if run not in fitted.runs:
            raise ValueError(f"{run!r} is no run of the fit, which has {', '.join(fitted.runs)}; use condition().")
    for stream in recording.streams():
        if stream.modality not in fitted.specification.responses:
            raise ValueError(f"{stream.label}: the fit has no response for {stream.modality!r}.")
        check_features(stream, recording.features(stream.participant, stream.modality))
