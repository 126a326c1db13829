"""The baseline that does a little: ridge regression of the target on the source streams at a few lags (DESIGN 5).

Sources are interpolated at the target's times less each lag, standardized on the training runs, missing values set to
their mean, and

    B = (X'X + strength n I)^-1 X'y,    X and y centred rows of a fold or of all n training rows,

with one strength for the stream, chosen by cross-validation over training runs (contiguous blocks where there is one).
When there are more columns than rows the design is replaced by its coordinates in the row space, which is exact.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.linalg import eigh

from msrm.evaluation.baselines import Prediction, residual_variance
from msrm.evaluation.question import Array, NotApplicableError, Pair, Question, resampled, standardized
from msrm.recording import Recording
from msrm.rotation import feature_blocks
from msrm.stream import Stream

LAGS = (0.0, 2.0, 4.0)
STRENGTHS = np.logspace(-3.0, 3.0, 25)
BLOCKS = 5
LARGEST = 5000
Place = tuple[Recording, str, Array]


class Ridge:
    """Ridge regression from the streams that the model may use, too.

    Parameters
    ----------
    question : Question
    lags : sequence of float
        Seconds by which a source precedes the target.
    """

    def __init__(self, question: Question, lags: Sequence[float] = LAGS) -> None:
        self.companions: tuple[Stream, ...] = ()
        trained = question.learned.streams(question.pair)
        training = question.learned.recording
        assert training is not None  # refused in the line above the last
        places: list[Place] = [(training, stream.run, stream.times) for stream in trained]
        places += [(question.sources, stream.run, stream.times) for stream in question.truth]
        sources = [
            pair
            for pair in question.sources.pairs
            if pair != question.pair and question.allows(pair[0]) and pair in training.pairs
        ]
        if not sources:
            raise NotApplicableError("needs a source stream that was also measured in training")
        design = _design(question, sources, places, lags)
        cuts = np.cumsum([len(times) for _, _, times in places])[:-1]
        pieces = np.split(design, cuts)
        self._observed = np.concatenate([stream.summary.row_observed > 0 for stream in trained])
        self._training = np.concatenate(pieces[: len(trained)])[self._observed]
        self._held_out = pieces[len(trained) :]
        folds = _folds([int(np.sum(stream.summary.row_observed > 0)) for stream in trained])
        rows = len(self._training)
        self._parts = [_Part(self._training[folds != fold], rows) for fold in np.unique(folds)]
        self._folds, self._whole = folds, _Part(self._training, rows)
        error = np.zeros(len(STRENGTHS))
        for span, blocks in feature_blocks(trained):
            target = standardized(np.concatenate(blocks)[self._observed], question.scale(), span)
            for at, strength in enumerate(STRENGTHS):
                error[at] += np.nansum((target - self._cross_validated(target, strength)) ** 2)
        self.strength = float(STRENGTHS[int(np.argmin(error))])

    def _cross_validated(self, target: Array, strength: float) -> Array:
        """Predictions of each training row from the other folds, (row, block)."""
        out = np.empty_like(target)
        for part, fold in zip(self._parts, np.unique(self._folds), strict=True):
            held_out = self._folds == fold
            out[held_out] = part.predict(target[~held_out], self._training[held_out], strength)
        return out

    def predict(self, span: slice, training: list[Array], companions: list[Array]) -> list[Prediction]:
        """Regression on all training rows; the variance is that of the cross-validated residuals."""
        target = np.concatenate(training)[self._observed]
        variance = residual_variance([target], [self._cross_validated(target, self.strength)])
        means = [self._whole.predict(target, rows, self.strength) for rows in self._held_out]
        return [(mean, np.broadcast_to(variance, mean.shape)) for mean in means]


class _Part:
    """The centred design of some training rows and the eigenvectors of its covariance.

    Parameters
    ----------
    design : (row, column)
    rows : int
        All training rows: the prior on B, and so the penalty of a sum over rows, is the same for a part.
    """

    def __init__(self, design: Array, rows: int) -> None:
        self._times_strength = rows / len(design)
        self._centre = design.mean(axis=0)
        self._rows = design - self._centre
        values, self._vectors = eigh(self._rows.T @ self._rows / len(design), check_finite=False)
        self._values = np.maximum(values, 0.0)

    def predict(self, target: Array, rows: Array, strength: float) -> Array:
        """Predictions at other rows of the design, (row, block), from the target at this part's rows.

        Missing entries leave their row out of their own feature's covariances only.
        """
        finite = np.isfinite(target)
        entries = np.maximum(finite.sum(axis=0), 1)
        mean = np.where(finite, target, 0.0).sum(axis=0) / entries
        covariance = self._rows.T @ np.where(finite, target - mean, 0.0) / entries
        weights = self._vectors @ (
            (self._vectors.T @ covariance) / (self._values + self._times_strength * strength)[:, None]
        )
        return mean + (rows - self._centre) @ weights


def _folds(lengths: list[int]) -> np.ndarray:
    """The fold of each training row: its run, or one of `BLOCKS` contiguous blocks of the only run."""
    if len(lengths) > 1:
        return np.repeat(np.arange(len(lengths)), lengths)
    return np.arange(lengths[0]) * BLOCKS // lengths[0]


def _design(question: Question, sources: list[Pair], places: list[Place], lags: Sequence[float]) -> Array:
    """Lagged sources at the times of every place, (row, column), or their exact coordinates in the row space."""
    rows = sum(len(times) for _, _, times in places)
    columns = len(lags) * sum(len(question.sources.features(*pair)) for pair in sources)
    if min(rows, columns) > LARGEST:
        raise NotApplicableError(
            f"needs a dense problem of order {min(rows, columns)}, more than {LARGEST}; leave it out of baselines="
        )
    kept, gram = [], np.zeros((rows, rows) if columns > rows else (0, 0))
    for pair in sources:
        for block in _lagged_blocks(question, pair, places, lags):
            if columns > rows:
                gram += block @ block.T
            else:
                kept.append(block)
    if columns <= rows:
        return np.concatenate(kept, axis=1)
    values, vectors = eigh(gram, check_finite=False)
    present = values > values[-1] * rows * np.finfo(float).eps
    return vectors[:, present] * np.sqrt(values[present])


def _lagged_blocks(question: Question, pair: Pair, places: list[Place], lags: Sequence[float]) -> Iterator[Array]:
    """Blocks (row, lag x feature) of one source, standardized on the training runs, 0 where missing."""
    scale = question.learned.scale(pair)
    there = [at for at, (recording, run, _) in enumerate(places) if recording.has(pair[0], run, pair[1])]
    streams = [places[at][0].stream(pair[0], places[at][1], pair[1]) for at in there]
    for span, blocks in feature_blocks(streams):
        use = np.flatnonzero(scale.present[span])
        out = [np.zeros((len(times), len(lags) * len(use))) for _, _, times in places]
        for at, stream, values in zip(there, streams, blocks, strict=True):
            own = standardized(values, scale, span)[:, use]
            lagged = [resampled(own, stream.times, places[at][2] - lag) for lag in lags]
            out[at] = np.nan_to_num(np.concatenate(lagged, axis=1))
        yield np.concatenate(out)
