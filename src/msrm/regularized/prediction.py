"""Predictions of streams, and inferred latents, as labelled trees (DESIGN 5, 9).

Targets are removed by name before any value is read: a target's own values never enter what is predicted for it. For
each target participant the sources are chosen (`within`, `across`, `both`), the latents inferred from them alone, and
passed through the target's response and loadings.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from msrm.asking import SOURCES, Targets, Times, check_features, check_runs, chosen_pairs, run_times, wanted_times
from msrm.coverage import inside
from msrm.recording import Recording
from msrm.regularized.filters import Pair
from msrm.regularized.inference import InferredRun, RowTerms, infer_run, row_terms
from msrm.regularized.model import Model
from msrm.regularized.problem import Key, key_of
from msrm.responses import Identity
from msrm.runtime import blas_threads
from msrm.stream import Stream

Array = NDArray[np.float64]


def predict(model: Model, recording: Recording, targets: Targets, source: str, times: Times) -> xr.DataTree:
    """Predictions of every target in every run; see :meth:`msrm.RMSRM.predict`."""
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, got {source!r}.")
    if source == "across" and model.settings.latent_pooling == "separate":
        raise ValueError("latent_pooling='separate' shares no latent across participants; source='across' has none.")
    check_runs(times, recording.runs)
    chosen = chosen_pairs(list(model.pairs), recording, targets)
    removed = set() if targets is None else set(chosen)
    sources = [s for s in recording.streams() if (s.participant, s.modality) not in removed]
    check_known(model, sources)
    inference = _Inference(model, sources)
    nodes, found = {}, False
    for participant, modality in chosen:
        wanted = wanted_times(recording, participant, modality, times)
        for run, at in wanted.items():
            inferred = inference.run(run, participant, source)
            found |= inferred is not None
            nodes[f"{participant}/{run}/{modality}"] = _node(model, inferred, (participant, modality), at)
    if not nodes:
        raise ValueError("None of the targets is measured in any run of the recording. Say when to predict: times=...")
    if not found:
        raise ValueError(
            f"No run has a usable row of a source stream (source={source!r}) once the targets are removed. "
            "Choose another source or fewer targets, or fit with edges='extend'."
        )
    return xr.DataTree.from_dict(nodes)


def infer_latent(model: Model, recording: Recording, times: Times) -> xr.DataTree:
    """Latent paths of every run; see :meth:`msrm.RMSRM.infer_latent`."""
    streams = list(recording.streams())
    check_known(model, streams)
    check_runs(times, recording.runs)
    inference = _Inference(model, streams)
    nodes = {}
    for run in recording.runs:
        inferred = inference.run(run, None, "both")
        if inferred is None:
            raise ValueError(f"{run}: no stream has a usable row. Fit with edges='extend', or drop the run.")
        at = run_times(times, run)
        nodes[run] = _latent_node(model, inferred, inferred.grid.times if at is None else at)
    return xr.DataTree.from_dict(nodes)


class _Inference:
    """Latents of runs from sets of source streams, each stream's values read once."""

    def __init__(self, model: Model, streams: Sequence[Stream]) -> None:
        self.model, self.streams = model, streams
        self._terms: dict[Key, RowTerms] = {}
        self._runs: dict[tuple, InferredRun | None] = {}

    def run(self, run: str, participant: str | None, source: str) -> InferredRun | None:
        """The latents of a run, for predicting a participant from the given sources; None where there is no source."""
        own = [s for s in self.streams if s.run == run and self._allowed(s, participant, source)]
        also = () if participant is None or self.model.settings.latent_pooling != "population" else (participant,)
        key = (run, tuple(key_of(s) for s in own), also)
        if key not in self._runs:
            for stream in own:
                if key_of(stream) not in self._terms:
                    pair = self.model.pairs[stream.participant, stream.modality]
                    self._terms[key_of(stream)] = row_terms(stream, pair)
            with blas_threads(1):
                self._runs[key] = infer_run(self.model, own, [self._terms[key_of(s)] for s in own], also)
        return self._runs[key]

    def _allowed(self, stream: Stream, participant: str | None, source: str) -> bool:
        separate = self.model.settings.latent_pooling == "separate"
        if participant is None or (source == "both" and not separate):
            return True
        return (stream.participant == participant) == (source != "across")


def check_known(model: Model, streams: Sequence[Stream]) -> None:
    """Refuse streams whose participant-modality or features the fit does not know.

    Raises
    ------
    ValueError
        Naming the stream and what the fit knows.
    """
    for stream in streams:
        pair = (stream.participant, stream.modality)
        if pair not in model.pairs:
            known = ", ".join(f"{p}/{m}" for p, m in model.pairs)
            raise ValueError(
                f"{stream.label}: not in the fit, which has {known}. "
                "Calibrate the participant first, or drop the stream."
            )
        check_features(stream, model.pairs[pair].features)


def _node(model: Model, inferred: InferredRun | None, pair: Pair, at: Array) -> xr.Dataset:
    fitted = model.pairs[pair]
    seen, supported = np.full((len(at), fitted.loading.shape[1]), np.nan), np.zeros(len(at), bool)
    if inferred is not None:
        path = inferred.path_of(pair[0])
        seen = inferred.response_values(at, fitted.response, path)
        supported = inferred.supported(at, fitted.response, path) & np.isfinite(seen).all(1)
    mean = (seen @ fitted.loading.T) * fitted.sd + fitted.mean
    return xr.Dataset(
        {"mean": (("time", "feature"), mean), "supported": ("time", supported)},
        {"time": ("time", at, {"units": "s"}), "feature": fitted.features},
    )


def _latent_node(model: Model, inferred: InferredRun, at: Array) -> xr.Dataset:
    paths = inferred.at(at)
    supported = np.stack([inside(at, Identity(), covered) for covered in inferred.covered], axis=1)
    coords: dict[str, Any] = {
        "time": ("time", at, {"units": "s"}),
        "factor": np.arange(1, paths.shape[2] + 1),
    }
    variables: dict[str, Any] = {}
    if model.settings.latent_pooling != "separate":
        variables["mean"] = (("time", "factor"), paths.mean(1))
        variables["supported"] = ("time", supported.any(1))
    if inferred.participants:
        coords["participant"] = list(inferred.participants)
        variables["path"] = (("time", "participant", "factor"), paths)
        variables["path_supported"] = (("time", "participant"), supported)
    return xr.Dataset(variables, coords)
