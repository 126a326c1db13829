"""One stream of a recording: the measurements of one participant, run and modality on their own clock.

Owns the summary of what is observed in a stream, its digests, and reading it in blocks of features. What users may
give for a stream is :mod:`msrm.intake`. What needs several streams of a recording is in :mod:`msrm.recording_checks`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from msrm.intake import attributes, check_features, check_name, check_times, labelled, numbers

BLOCK_BYTES = 2**26
CHUNK_BYTES = 2**22


class RecordingWarning(UserWarning):
    """Something allowed in a recording that deserves a look; the message counts and names it."""


@dataclass(frozen=True)
class Summary:
    """What a stream holds, from one pass over it.

    Attributes
    ----------
    observed : (feature,) int64
        Finite entries of each feature.
    row_observed : (time,) int64
        Finite entries of each row.
    minimum, maximum : (feature,) float64
        Over the finite entries, NaN where there are none.
    """

    observed: np.ndarray
    row_observed: np.ndarray
    minimum: np.ndarray
    maximum: np.ndarray


@dataclass(frozen=True)
class Stored:
    """What an archive recorded about a stream: its summary and the digests of its feature chunks."""

    summary: Summary
    digests: tuple[str, ...]
    verified: set[int] = field(default_factory=set, repr=False)


@dataclass(frozen=True, eq=False, repr=False)
class Stream:
    """The values of one participant, run and modality.

    Attributes
    ----------
    participant, run, modality : str
    times : (time,) float64
        Seconds, strictly increasing; equal times in two streams of a run mean the same moment.
    features : (feature,) of str
    data : DataArray (time, feature)
        As stored (float32 or float64), NaN where missing; not yet read when the recording is opened from a file.
    stored : Stored, optional
        Present when the stream comes from an archive of this package.
    """

    participant: str
    run: str
    modality: str
    times: np.ndarray
    features: np.ndarray
    data: xr.DataArray
    stored: Stored | None = None

    def __repr__(self) -> str:
        return f"<msrm.Stream {self.label}: {self.n_times} times x {self.n_features} features>"

    @property
    def label(self) -> str:
        """How messages name the stream."""
        return stream_label(self.participant, self.run, self.modality)

    @property
    def n_times(self) -> int:
        """Rows."""
        return len(self.times)

    @property
    def n_features(self) -> int:
        """Columns."""
        return len(self.features)

    @property
    def values(self) -> np.ndarray:
        """All values, (time, feature) float64, NaN where missing; read-only, and read anew on each call when lazy."""
        return self._read(0, self.n_features)

    def blocks(self, size: int | None = None) -> Iterator[tuple[slice, np.ndarray]]:
        """Blocks of features, read one at a time.

        Parameters
        ----------
        size : int, optional
            Features in a block; by default about 64 MB of float64, a whole number of stored chunks.

        Yields
        ------
        slice
            Of the features.
        (time, block) float64
            Their values, NaN where missing; read-only.
        """
        if size is None:
            size = chunk_width(self.n_times) * max(1, BLOCK_BYTES // CHUNK_BYTES)
        if size < 1:
            raise ValueError(f"A block needs at least one feature, got size={size}.")
        for start in range(0, self.n_features, size):
            stop = min(start + size, self.n_features)
            yield slice(start, stop), self._read(start, stop)

    @cached_property
    def summary(self) -> Summary:
        """Counts and ranges of the finite entries, from the archive or from one pass over the values."""
        return summarize(self) if self.stored is None else self.stored.summary

    @property
    def missing(self) -> float:
        """The share of entries that are missing."""
        return 1.0 - float(self.summary.observed.sum()) / (self.n_times * self.n_features)

    @property
    def interval(self) -> tuple[float, float]:
        """First and last time with a finite entry, seconds."""
        rows = np.flatnonzero(self.summary.row_observed)
        return float(self.times[rows[0]]), float(self.times[rows[-1]])

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """SHA-256 of each chunk of features as float64, from the archive or from one pass over the values."""
        if self.stored is not None:
            return self.stored.digests
        return tuple(block_digest(values) for _, values in self.blocks(chunk_width(self.n_times)))

    def _read(self, start: int, stop: int) -> np.ndarray:
        """Features start to stop, checked against the archive's digests when first read."""
        if self.stored is None:
            return self._fetch(start, stop)
        width = chunk_width(self.n_times)
        first, last = start // width, -(-stop // width)
        if all(chunk in self.stored.verified for chunk in range(first, last)):
            return self._fetch(start, stop)
        values = self._fetch(first * width, min(last * width, self.n_features))
        for chunk in range(first, last):
            begin = (chunk - first) * width
            if block_digest(values[:, begin : begin + width]) != self.stored.digests[chunk]:
                raise ValueError(self._damaged(f"features {chunk * width} to {chunk * width + width - 1} changed"))
            self.stored.verified.add(chunk)
        return values[:, start - first * width : stop - first * width]

    def _fetch(self, start: int, stop: int) -> np.ndarray:
        try:
            values = np.asarray(self.data[:, start:stop], dtype=np.float64).view()
        except (OSError, RuntimeError) as error:
            raise ValueError(self._damaged(str(error))) from error
        values.flags.writeable = False
        return values

    def _damaged(self, what: str) -> str:
        return f"{self.label}: the file it is read from is damaged or was replaced ({what}). Restore it from a copy."


def stream_label(participant: str, run: str, modality: str) -> str:
    """``'rating' of p2 in run-1``."""
    return f"{modality!r} of {participant} in {run}"


def chunk_width(n_times: int) -> int:
    """Features in one stored and digested chunk: about 4 MB of float64."""
    return max(1, CHUNK_BYTES // (8 * n_times))


def block_digest(values: np.ndarray) -> str:
    """SHA-256 of float64 values in row order, little-endian, every NaN counted as the same."""
    canonical = np.array(values, dtype="<f8", order="C")
    canonical[np.isnan(canonical)] = np.nan
    return hashlib.sha256(canonical.data).hexdigest()


class Tally:
    """Adds up a stream's summary from its blocks of features."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.observed = np.zeros(stream.n_features, dtype=np.int64)
        self.row_observed = np.zeros(stream.n_times, dtype=np.int64)
        self.minimum, self.maximum = np.full((2, stream.n_features), np.nan)

    def add(self, block: slice, values: np.ndarray) -> None:
        """Count (time, block) float64 values, refusing infinite ones."""
        self.minimum[block] = np.fmin.reduce(values, axis=0)
        self.maximum[block] = np.fmax.reduce(values, axis=0)
        if np.isinf(self.minimum[block]).any() or np.isinf(self.maximum[block]).any():
            rows, columns = np.nonzero(np.isinf(values))
            raise ValueError(
                f"{self.stream.label}: {len(rows)} infinite values, the first at {self.stream.times[rows[0]]:g} s in "
                f"feature {str(self.stream.features[block][columns[0]])!r}. Use NaN for what is missing."
            )
        finite = ~np.isnan(values)
        self.observed[block] = finite.sum(axis=0)
        self.row_observed += finite.sum(axis=1)

    def summary(self) -> Summary:
        """The counts, refused when nothing is observed."""
        if not self.observed.any():
            raise ValueError(f"{self.stream.label}: every entry is missing. Leave the stream out of the recording.")
        return Summary(self.observed, self.row_observed, self.minimum, self.maximum)


def summarize(stream: Stream) -> Summary:
    """The summary of a stream from one pass over its values."""
    tally = Tally(stream)
    for block, values in stream.blocks():
        tally.add(block, values)
    return tally.summary()


def streams_digest(streams: Iterable[Stream]) -> str:
    """SHA-256 over names, times and the digests of all blocks of values, in the given order."""
    digest = hashlib.sha256()
    for stream in streams:
        names = [stream.participant, stream.run, stream.modality, stream.n_times, *stream.features.tolist()]
        digest.update(json.dumps(names).encode())
        digest.update(stream.times.astype("<f8").tobytes())
        digest.update("".join(stream.digests).encode())
    return digest.hexdigest()


def ordered(streams: Iterable[Stream]) -> list[Stream]:
    """Streams by participant, run and modality, each in order of first appearance in that order itself."""
    result = list(streams)
    keys: list[tuple[int, ...]] = [()] * len(result)
    for kind in ("participant", "run", "modality"):
        names = [getattr(stream, kind) for stream in result]
        rank = {name: index for index, name in enumerate(dict.fromkeys(names))}
        keys = [(*key, rank[name]) for key, name in zip(keys, names, strict=True)]
        order = sorted(range(len(result)), key=keys.__getitem__)
        result, keys = [result[i] for i in order], [keys[i] for i in order]
    return result


def make_stream(participant: str, run: str, modality: str, value: Any, stored: Stored | None = None) -> Stream:
    """A checked stream from what :meth:`Recording.from_dict` accepts.

    Parameters
    ----------
    value : DataArray (time, feature), DataFrame, Series, (values, times) or Stream
        A DataFrame's index and a DataArray's ``time`` coordinate are seconds. One-dimensional values are one feature.
    stored : Stored, optional
        What an archive says of the values, which are then not read.

    Raises
    ------
    TypeError, ValueError
        With the stream, the row or feature, what was found and what is wanted.
    """
    check_name(participant, "participant")
    check_name(run, "run")
    check_name(modality, "modality")
    label = stream_label(participant, run, modality)
    if isinstance(value, Stream):
        return Stream(participant, run, modality, value.times, value.features, value.data, value.stored)
    array = labelled(value, label)
    times = check_times(array["time"], label)
    features = check_features(array["feature"].values, label)
    data = xr.DataArray(
        numbers(array, features, label),
        {"time": ("time", times, {"units": "s"}), "feature": features},
        ("time", "feature"),
        attrs=attributes(array),
    )
    stream = Stream(participant, run, modality, times, features, data, stored)
    _ = stream.summary
    return stream
