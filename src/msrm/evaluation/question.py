"""What a held-out evaluation asks: which values are to be predicted, from which, after which training (DESIGN 5).

Every predictor, fitted model or baseline, answers the same `Question` in training sd units about the training mean.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from msrm.recording import Recording
from msrm.regularized.scaling import PairScale, pair_scale
from msrm.stream import Stream

Array = NDArray[np.float64]
Pair = tuple[str, str]
Targets = Mapping[str, Sequence[str]]
Questions = Sequence[Targets]
SOURCES = ("within", "across", "both")
# A gap is more than this many median intervals, as in the cells of the objective (DESIGN 2).
_GAP = 2.0 * (1.0 + 1e-9)


class NotApplicableError(ValueError):
    """Why a baseline cannot answer a question."""


@dataclass(frozen=True)
class Learned:
    """What was learned from, and the training mean and sd of each participant-modality, computed once.

    Attributes
    ----------
    recording : Recording or None
        The training recording, None when it is not known.
    scales : {(participant, modality): PairScale}
        Those known so far; a model may bring its own.
    """

    recording: Recording | None
    scales: dict[Pair, PairScale] = field(default_factory=dict, repr=False)

    def streams(self, pair: Pair) -> tuple[Stream, ...]:
        """Training streams of a participant-modality, one per run.

        Raises
        ------
        NotApplicableError
            When the training recording is not given, or does not have it.
        """
        participant, modality = pair
        if self.recording is None:
            raise NotApplicableError("needs training=, the recording that the model was fitted to")
        streams = self.recording.streams(participant=participant, modality=modality)
        if not streams:
            raise NotApplicableError(f"needs {modality!r} of {participant} in the training recording")
        return streams

    def scale(self, pair: Pair) -> PairScale:
        """Training mean and sd of a participant-modality."""
        if pair not in self.scales:
            self.scales[pair] = pair_scale(self.streams(pair))
        return self.scales[pair]


@dataclass(frozen=True)
class Question:
    """One target stream of a held-out evaluation.

    Attributes
    ----------
    pair : (participant, modality)
    truth : tuple of Stream
        Held-out values, one per run; NaN where not held out.
    learned : Learned
    sources : Recording
        What may be seen besides, the held-out values removed.
    source : {"within", "across", "both"}
    """

    pair: Pair
    truth: tuple[Stream, ...]
    learned: Learned
    sources: Recording
    source: str = "both"

    def allows(self, participant: str) -> bool:
        """Whether `source` admits streams of this participant."""
        own = participant == self.pair[0]
        return self.source == "both" or own == (self.source == "within")

    def visible(self, run: str, pair: Pair) -> Stream | None:
        """A stream that may be seen in a held-out run."""
        return self.sources.stream(pair[0], run, pair[1]) if self.sources.has(pair[0], run, pair[1]) else None

    def scale(self) -> PairScale:
        """Training mean and sd of the target."""
        return self.learned.scale(self.pair)


def standardized(values: Array, scale: PairScale, span: slice) -> Array:
    """``(values - mean) / sd`` of a block of features; NaN for features that are constant in training."""
    return (values - scale.mean[span]) / scale.sd[span]


def resampled(values: Array, times: Array, at: Array) -> Array:
    """Linear interpolation of (time, feature) values at other times; NaN outside, in gaps and beside missing values.

    A gap is an interval of more than twice the median one.
    """
    rows = np.isfinite(values).any(axis=1)
    if not rows.all():
        values, times = values[rows], times[rows]
    if len(times) < 2:
        return np.full((len(at), values.shape[1]), np.nan)
    intervals = np.diff(times)
    left = np.clip(np.searchsorted(times, at, side="right") - 1, 0, len(times) - 2)
    share = ((at - times[left]) / intervals[left])[:, None]
    # A weight of exactly 0 must not let the other neighbour's NaN in.
    between = np.where(share == 0, values[left], (1.0 - share) * values[left] + share * values[left + 1])
    between = np.where(share == 1, values[left + 1], between)
    inside = (share >= 0) & (share <= 1)
    known = inside & ((intervals[left] <= _GAP * np.median(intervals))[:, None] | (share == 0) | (share == 1))
    return np.where(known, between, np.nan)
