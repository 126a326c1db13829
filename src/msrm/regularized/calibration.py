"""New participants on known runs: their loadings, and responses of their own, at the fitted latents.

The new streams enter the training objective with its normalizers; the latents and everything fitted before stay.
Loadings are ridge solves; a response that participants do not share starts at the participants' mean and, in turn with
the loadings, goes to its own minimum (a partially pooled one is drawn to that mean).
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from msrm.priors import LogNormal, Normal
from msrm.recording import Recording
from msrm.regularized.alternation import best_responses
from msrm.regularized.gauge import Latents
from msrm.regularized.model import Model, PairModel
from msrm.regularized.objective import Objective
from msrm.regularized.problem import Frame, build_problem
from msrm.responses import Free, Response
from msrm.runtime import blas_threads

Array = NDArray[np.float64]

_SWEEPS = 50
_SETTLED = 1e-10


def calibrated(model: Model, recording: Recording) -> Model:
    """The model with the recording's participant-modalities added; see :meth:`msrm.RMSRM.calibrate`."""
    settings = model.settings
    _check(model, recording)
    recording = recording.select(modalities=[m for m in recording.modalities if settings.weight(m) > 0])
    own = replace(settings, responses={m: _joining(model, m) for m in recording.modalities})
    frame = Frame(
        {run: paths.grid for run, paths in model.runs.items()},
        {run: paths.limits for run, paths in model.runs.items()},
        model.n_participant_runs,
        len(model.ridges),
    )
    problem, training = build_problem(recording, own, frame)
    objective = Objective(problem)
    latents = tuple(
        np.repeat(model.runs[s.run].paths.mean(1, keepdims=True), s.n_paths, axis=1) for s in problem.systems
    )
    with blas_threads(1):
        loading, vector = _fitted(objective, latents, {m for _, m in model.pairs})
        errors, _ = objective.column_sums(loading, vector, latents)
    values = problem.filters.values(vector)
    pairs = dict(model.pairs)
    for pair, columns in zip(problem.pairs, problem.columns, strict=True):
        weight = sum(f for (p, _, m), f in training.factors.items() if (p, m) == pair)
        response = own.responses[pair[1]].with_values(values[problem.filters.of_pair[pair]])
        pairs[pair] = PairModel(
            recording.features(*pair),
            training.reduced[pair].to_features(loading[columns]),
            training.scales[pair].mean,
            training.scales[pair].sd,
            response,
            float(errors[columns].sum()) / weight,
        )
    return replace(model, pairs=pairs, factors=model.factors | training.factors)


def _check(model: Model, recording: Recording) -> None:
    """Refuse what cannot be calibrated.

    Raises
    ------
    ValueError
    """
    if model.settings.latent_pooling == "separate":
        raise ValueError("latent_pooling='separate' shares no latent, so there is nothing to calibrate on; fit anew.")
    known = [pair for pair in recording.pairs if pair in model.pairs]
    if known:
        raise ValueError(
            f"{known[0][1]!r} of {known[0][0]} is in the fit already; calibrate takes new participants or modalities "
            f"only. Drop it: recording.drop(targets={{{known[0][0]!r}: [{known[0][1]!r}]}})."
        )
    strange = [run for run in recording.runs if run not in model.runs]
    if strange:
        raise ValueError(
            f"{strange[0]} is not a run of the fit, whose latents are known for {', '.join(model.runs)}. "
            "Select those runs, or fit anew."
        )
    model.settings.check_modalities(recording.modalities)


def _joining(model: Model, modality: str) -> Response:
    """A modality's response for one who joins: held at the fitted values, or free from the participants' mean."""
    response = model.settings.responses[modality]
    fitted = [pair.response.start for (_, m), pair in model.pairs.items() if m == modality]
    if not fitted or not response.free:
        return response
    start: dict[str, Free] = {}
    for name, free in response.free.items():
        log = name in response.positive
        coordinates = [np.log(values[name]) if log else values[name] for values in fitted]
        mean = float(np.mean(coordinates))
        prior = free.prior if response.pooling == "separate" else None
        if response.pooling_strength is not None:
            n = len(fitted)
            # Half the squared distance over sd^2 is what joining adds to the pooling penalty.
            sd = float(np.sqrt((n + 1) ** 2 / (2 * response.pooling_strength * n)))
            prior = LogNormal(mean, sd) if log else Normal(mean, sd)
        centre = float(np.clip(np.exp(mean) if log else mean, *free.bounds))
        start[name] = Free(centre, free.bounds, prior)
    pooling = "shared" if response.pooling == "shared" else "separate"
    return replace(response, **start, pooling=pooling, pooling_strength=None)


def _fitted(objective: Objective, latents: Latents, fitted: set[str]) -> tuple[Array, Array]:
    """Loadings and responses at fixed latents; responses that the fit has shared stay where it has them."""
    filters = objective.problem.filters
    vector = filters.start.copy()
    owners = [filters.owners[owner] for owner, _ in filters.names]
    moving = np.array([participant is not None or m not in fitted for m, participant in owners], bool)
    loading = objective.loadings(vector, latents)
    for _ in range(_SWEEPS if moving.any() else 0):
        before = vector
        vector = np.where(moving, best_responses(objective, loading, vector, latents), vector)
        loading = objective.loadings(vector, latents)
        if np.abs(vector - before).max() <= _SETTLED:
            break
    return loading, vector
