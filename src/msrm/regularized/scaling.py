"""Training mean and sd of each feature, and which features and rows carry data (DESIGN 2).

One pass over a participant-modality's streams, in feature blocks. A feature without a finite entry, or constant over
all training runs, takes no part: its cells stay NaN and every other number is as if it were absent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrm.rotation import feature_blocks
from msrm.stream import Stream

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PairScale:
    """Standardization of one participant-modality.

    Attributes
    ----------
    mean, sd : (feature,)
        Over every finite training entry of all runs (population sd); NaN where a feature takes no part.
    counts : tuple of (time,) int
        Finite entries of each row of each run, over the features that take part.
    """

    mean: Array
    sd: Array
    counts: tuple[NDArray[np.int64], ...]

    @property
    def present(self) -> NDArray[np.bool_]:
        """Features that take part."""
        return np.isfinite(self.mean)


def pair_scale(streams: Sequence[Stream]) -> PairScale:
    """Means, sds and counts from one pass over the streams of one participant-modality, one per run."""
    n_features = streams[0].n_features
    mean, sd = np.full((2, n_features), np.nan)
    counts = np.zeros(sum(stream.n_times for stream in streams), np.int64)
    for span, pieces in feature_blocks(streams):
        data = np.concatenate(pieces) if len(pieces) > 1 else pieces[0]
        with np.errstate(over="ignore"):
            centre, spread = _moments(data)
        if np.isinf(spread).any():
            name = str(streams[0].features[span][np.flatnonzero(np.isinf(spread))[0]])
            raise ValueError(
                f"{streams[0].modality!r} of {streams[0].participant}: feature {name!r} has values so "
                "large that their variance overflows. Rescale them, or mend the reading."
            )
        taking_part = spread > 0
        mean[span], sd[span] = np.where(taking_part, (centre, spread), np.nan)
        if taking_part.all() and np.isfinite(data.sum()):
            counts += data.shape[1]
        else:
            counts += np.isfinite(data[:, taking_part]).sum(1)
    cuts = np.cumsum([stream.n_times for stream in streams])[:-1]
    return PairScale(mean, sd, tuple(np.split(counts, cuts)))


def _moments(data: Array) -> tuple[Array, Array]:
    """Mean and population sd of each column's finite entries; sd is exactly 0 for a constant column, NaN for none."""
    # Deviations from the column's first finite entry are exact zeros where it is constant.
    base = data[0]
    if not np.isfinite(base).all():
        base = data[np.isfinite(data).argmax(0), np.arange(data.shape[1])]
    shifted = data - base
    total = shifted.sum(0)
    if np.isfinite(total.sum()):
        shift = total / len(data)
        shifted -= shift
        return base + shift, np.sqrt(np.einsum("tf,tf->f", shifted, shifted) / len(data))
    finite = np.isfinite(shifted)
    number = finite.sum(0)
    with np.errstate(invalid="ignore"):
        shift = np.where(finite, shifted, 0.0).sum(0) / number
        deviation = np.where(finite, shifted - shift, 0.0)
        return base + shift, np.sqrt(np.einsum("tf,tf->f", deviation, deviation) / number)
