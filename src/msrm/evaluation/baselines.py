"""Predictions that do nothing clever: what a model has to beat (DESIGN 5).

`TrainingMean`, `Interpolation` of the same stream around a held-out block, `AcrossParticipants` (mean of the others).
The one that does a little, ridge regression, is :mod:`msrm.evaluation.ridge`. A baseline is built from a `Question`,
or raises `NotApplicableError` with the reason; it then predicts one block of features at a time.
"""

from typing import Protocol

import numpy as np

from msrm.evaluation.question import Array, NotApplicableError, Question, resampled, standardized
from msrm.stream import Stream

Prediction = tuple[Array, Array | None]


class Baseline(Protocol):
    """Predictions of one target stream in every held-out run.

    Attributes
    ----------
    companions : tuple of Stream
        Streams with the target's features, read along with it.
    """

    companions: tuple[Stream, ...]

    def predict(self, span: slice, training: list[Array], companions: list[Array]) -> list[Prediction]:
        """Mean and variance (time, block) for each held-out run, training sd units; variance None where not modelled.

        Parameters
        ----------
        span : slice
            The block of features.
        training : list of (time, block)
            The target's training values, standardized, one per training run.
        companions : list of (time, block)
            Values of `companions`, data units.
        """
        ...


class TrainingMean:
    """The training mean of each feature, with the training variance."""

    def __init__(self, question: Question) -> None:
        self.companions: tuple[Stream, ...] = ()
        self._rows = [stream.n_times for stream in question.truth]

    def predict(self, span: slice, training: list[Array], companions: list[Array]) -> list[Prediction]:
        """Zeros and ones: the units are training standard deviations about the training mean."""
        width = span.stop - span.start
        return [(np.zeros((rows, width)), np.ones((rows, width))) for rows in self._rows]


class Interpolation:
    """A straight line between the nearest samples of the same feature on either side of the held-out block.

    Legitimate only where the rest of the same stream may be seen. It has no variance.
    """

    def __init__(self, question: Question) -> None:
        own = [question.visible(stream.run, question.pair) for stream in question.truth]
        seen = [stream for stream in own if stream is not None]
        if len(seen) < len(own):
            raise NotApplicableError("needs held-out blocks: the same stream around them is not to be seen here")
        self.companions = tuple(seen)
        self._question = question

    def predict(self, span: slice, training: list[Array], companions: list[Array]) -> list[Prediction]:
        """Interpolated values, the nearest sample's before the first and after the last."""
        scale = self._question.scale()
        return [
            (_interpolated(standardized(values, scale, span), seen.times, stream.times), None)
            for values, seen, stream in zip(companions, self.companions, self._question.truth, strict=True)
        ]


def _interpolated(values: Array, times: Array, at: Array) -> Array:
    """Linear interpolation of each feature between its own finite entries; 0 (the training mean) where it has none."""
    finite = np.isfinite(values)
    out = np.zeros((len(at), values.shape[1]))
    for column in np.flatnonzero(finite.any(axis=0)):
        rows = finite[:, column]
        out[:, column] = np.interp(at, times[rows], values[rows, column])
    return out


class AcrossParticipants:
    """The mean over the other participants that have the modality with the same features, each in its own sd units.

    Where nobody else was measured it says the training mean. Its variance is that of its training residuals, where
    the training recording is known.
    """

    def __init__(self, question: Question) -> None:
        participant, modality = question.pair
        features, training = question.truth[0].features, question.learned.recording
        self._others = [
            other
            for other, m in question.sources.pairs
            if m == modality
            and other != participant
            and question.allows(other)
            and (training is None or (other, m) in training.pairs)
            and np.array_equal(question.sources.features(other, m), features)
        ]
        if not self._others:
            raise NotApplicableError("needs another participant, among the sources, with the same features")
        self._question, self._modality = question, modality
        self._scales = {other: question.learned.scale((other, modality)) for other in self._others}
        # One list of (place, participant) in the order of the companions; places are training runs, then held-out runs.
        trained = () if training is None else question.learned.streams(question.pair)
        places = [(training, s.run, s.times) for s in trained]
        places += [(question.sources, s.run, s.times) for s in question.truth]
        found = [
            (place, other, recording.stream(other, run, modality))
            for place, (recording, run, _) in enumerate(places)
            for other in self._others
            if recording is not None and recording.has(other, run, modality)
        ]
        self._keys = [(place, other) for place, other, _ in found]
        self.companions = tuple(stream for _, _, stream in found)
        self._times = [times for _, _, times in places]

    def predict(self, span: slice, training: list[Array], companions: list[Array]) -> list[Prediction]:
        """The mean of the others at the target's times."""
        width = span.stop - span.start
        total = [np.zeros((len(times), width)) for times in self._times]
        count = [np.zeros((len(times), width)) for times in self._times]
        for (place, other), stream, values in zip(self._keys, self.companions, companions, strict=True):
            own = resampled(standardized(values, self._scales[other], span), stream.times, self._times[place])
            known = np.isfinite(own)
            total[place] += np.where(known, own, 0.0)
            count[place] += known
        means = [t / np.maximum(c, 1.0) for t, c in zip(total, count, strict=True)]
        if not training:
            return [(mean, None) for mean in means]
        variance = residual_variance(training, means[: len(training)])
        return [(mean, np.broadcast_to(variance, mean.shape)) for mean in means[len(training) :]]


def residual_variance(truth: list[Array], predicted: list[Array]) -> Array:
    """Mean squared error of each feature over its finite entries, at least 1e-6 training variances, (block,)."""
    squares = sum(np.nansum((y - p) ** 2, axis=0) for y, p in zip(truth, predicted, strict=True))
    entries = sum(np.isfinite(y).sum(axis=0) for y in truth)
    # A constant feature's NaN would spread to the features scored with it.
    return np.maximum(squares / np.maximum(entries, 1), 1e-6)
