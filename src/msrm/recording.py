"""Recordings: every stream of every participant and run, labelled, on native clocks.

A recording is a tree participant / run / modality whose leaves hold ``values`` (time, feature) with times in
seconds and NaN where nothing was measured (DESIGN 1). Everything is checked when a recording is made, so the code
behind it trusts sorted float64 seconds and finite or NaN values. One stream is :mod:`msrm.stream`, checks between
streams are :mod:`msrm.recording_checks`, files are :mod:`msrm.recording_file`.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import xarray as xr

from msrm import recording_checks as checks
from msrm.recording_file import RecordingWriter, open_streams, streams_of, write_streams
from msrm.recording_repr import html, text
from msrm.stream import RecordingWarning, Stream, make_stream, ordered, streams_digest

__all__ = ["Recording", "RecordingWarning", "RecordingWriter", "Stream", "concat_runs", "open_recording"]

Names = str | Iterable[str] | None


class Recording:
    """Streams of several participants, runs and modalities.

    Parameters
    ----------
    tree : DataTree
        Groups participant / run / modality; each leaf holds ``values`` (time, feature), or one variable of those
        dimensions, with a coordinate ``time`` in seconds.

    Raises
    ------
    TypeError, ValueError
        For times that do not increase, infinite or non-numeric values, streams without an observed entry, features
        that differ between runs, runs without duration or whose streams share no time, and names that no archive
        could hold. The message says where, what was found and what is wanted.

    Warns
    -----
    RecordingWarning
        Counting features that are constant or missing, participants without some runs, runs without some of the
        participant's modalities, and naming clocks that look like milliseconds or sample numbers.

    Examples
    --------
    >>> import numpy as np
    >>> times = np.arange(10) * 0.5
    >>> recording = Recording.from_dict({"p1": {"run-1": {"rating": (np.cos(times), times)}}})
    >>> recording.stream("p1", "run-1", "rating").values.shape
    (10, 1)
    """

    def __init__(self, tree: xr.DataTree) -> None:
        self._set(ordered(streams_of(tree)))
        checks.refuse(self.streams())
        checks.warn(self.streams())

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> "Recording":
        """A recording from nested dictionaries participant, run, modality.

        Parameters
        ----------
        data : mapping
            Each leaf a DataArray (time, feature), a DataFrame with seconds as its index, or a pair (values, times);
            one-dimensional values are one feature. Floats are kept without a copy.
        """
        streams = []
        for participant, runs in _items(data, "the recording"):
            for run, modalities in _items(runs, f"participant {participant!r}"):
                for modality, value in _items(modalities, f"{run!r} of participant {participant!r}"):
                    streams.append(make_stream(participant, run, modality, value))
        return cls.from_streams(streams)

    @classmethod
    def from_streams(cls, streams: Iterable[Stream]) -> "Recording":
        """A recording of the given streams, in any order."""
        recording = cls._trusted(ordered(streams))
        checks.refuse(recording.streams())
        checks.warn(recording.streams())
        return recording

    @classmethod
    def _trusted(cls, streams: Sequence[Stream]) -> "Recording":
        recording = cls.__new__(cls)
        recording._set(streams)
        return recording

    def _set(self, streams: Sequence[Stream]) -> None:
        self._streams = MappingProxyType({(s.participant, s.run, s.modality): s for s in streams})
        if not streams:
            raise ValueError("An empty recording: no stream in it.")
        if len(self._streams) < len(streams):
            twice = next(s for s in streams if self._streams[s.participant, s.run, s.modality] is not s)
            raise ValueError(f"{twice.label} is given twice.")

    def __reduce__(self) -> tuple[Any, ...]:
        return Recording._trusted, (list(self._streams.values()),)

    @property
    def participants(self) -> tuple[str, ...]:
        """Names, in order of first appearance."""
        return tuple(dict.fromkeys(key[0] for key in self._streams))

    @property
    def runs(self) -> tuple[str, ...]:
        """Names, in order of first appearance."""
        return tuple(dict.fromkeys(key[1] for key in self._streams))

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names, in order of first appearance."""
        return tuple(dict.fromkeys(key[2] for key in self._streams))

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """(participant, modality) of every stream, once each, participants first."""
        found = {(key[0], key[2]) for key in self._streams}
        return tuple((p, m) for p in self.participants for m in self.modalities if (p, m) in found)

    @cached_property
    def tree(self) -> xr.DataTree:
        """The recording as an xarray tree participant / run / modality; leaves hold ``values`` (time, feature)."""
        return xr.DataTree.from_dict(
            {"/".join(key): xr.Dataset({"values": stream.data}) for key, stream in self._streams.items()}
        )

    def streams(
        self, participant: str | None = None, run: str | None = None, modality: str | None = None
    ) -> tuple[Stream, ...]:
        """Streams with the given names, ordered by participant, then run, then modality."""
        wanted = (participant, run, modality)
        return tuple(
            stream
            for key, stream in self._streams.items()
            if all(want is None or want == name for want, name in zip(wanted, key, strict=True))
        )

    def stream(self, participant: str, run: str, modality: str) -> Stream:
        """One stream.

        Raises
        ------
        ValueError
            When it is not there, with the nearest that is.
        """
        if self.has(participant, run, modality):
            return self._streams[participant, run, modality]
        for kind, name, names in (
            ("participant", participant, self.participants),
            ("run", run, self.runs),
            ("modality", modality, self.modalities),
        ):
            if name not in names:
                raise ValueError(f"No {kind} {name!r}; there are {', '.join(names)}.")
        own = [f"{s.run}/{s.modality}" for s in self.streams(participant)]
        raise ValueError(f"Participant {participant} has no {modality!r} in {run}; it has {', '.join(own)}.")

    def has(self, participant: str, run: str, modality: str) -> bool:
        """Whether the stream is there."""
        return (participant, run, modality) in self._streams

    def features(self, participant: str, modality: str) -> np.ndarray:
        """Names of a participant's features of a modality, (feature,) of str, the same in every run."""
        for stream in self._streams.values():
            if (stream.participant, stream.modality) == (participant, modality):
                return stream.features
        own = ", ".join(f"{p}/{m}" for p, m in self.pairs)
        raise ValueError(f"Participant {participant!r} has no modality {modality!r}; there are {own}.")

    def select(self, *, participants: Names = None, runs: Names = None, modalities: Names = None) -> "Recording":
        """The part of the recording with the given names, in the recording's order.

        Raises
        ------
        ValueError
            For a name that is not in the recording, or when nothing is left.
        """
        wanted = self._wanted(participants, runs, modalities)
        return self._part(lambda key: all(name in names for name, names in zip(key, wanted, strict=True)), "select")

    def drop(
        self,
        *,
        participants: Names = None,
        runs: Names = None,
        modalities: Names = None,
        targets: Mapping[str, Names] | None = None,
    ) -> "Recording":
        """The recording without the given participants, without the given runs and without the given modalities.

        Parameters
        ----------
        targets : {participant: modalities}, optional
            Streams to drop of single participants, in every run.
        """
        gone = self._wanted(participants or (), runs or (), modalities or ())
        pairs = set()
        for participant, names in (targets or {}).items():
            for modality in (names,) if isinstance(names, str) else names or ():
                self.features(participant, modality)
                pairs.add((participant, modality))
        return self._part(
            lambda key: (key[0], key[2]) not in pairs and not any(n in g for n, g in zip(key, gone, strict=True)),
            "drop",
        )

    def _wanted(self, *asked: Names) -> list[tuple[str, ...]]:
        wanted = []
        for kind, names, ask in zip(
            ("participant", "run", "modality"), (self.participants, self.runs, self.modalities), asked, strict=True
        ):
            chosen = names if ask is None else (ask,) if isinstance(ask, str) else tuple(ask)
            for name in chosen:
                if name not in names:
                    raise ValueError(f"No {kind} {name!r}; there are {', '.join(names)}.")
            wanted.append(chosen)
        return wanted

    def _part(self, keep: Any, verb: str) -> "Recording":
        streams = [stream for key, stream in self._streams.items() if keep(key)]
        if not streams:
            raise ValueError(f"Nothing is left to {verb}: no stream has all of these names.")
        part = self._trusted(streams)
        for run in part.runs:
            checks.positive_duration(part.streams(run=run))
        return part

    def digest(self) -> str:
        """SHA-256 (hexadecimal) over names, units, times and values, the same for equal values however stored.

        Reads the values one block at a time; for a recording opened from an archive the stored block digests are
        used, which :meth:`verify` checks against the values.
        """
        return streams_digest(self.streams())

    def verify(self) -> None:
        """Read every value of a recording opened from an archive and compare it with the archive's digests.

        Raises
        ------
        ValueError
            Naming the stream and features that differ.
        """
        for stream in self._streams.values():
            if stream.stored is not None:
                for _ in stream.blocks():
                    pass

    def to_netcdf(self, path: str | Path) -> None:
        """Write the recording to one netCDF-4 file that plain xarray reads, too.

        Values are stored as they are (float32 or float64) in chunks of features and read and written a block at a
        time. The file appears under its name when it is complete; until then the previous file stays, and it may be
        the one that this recording is read from.
        """
        write_streams(path, self.streams())

    def __repr__(self) -> str:
        return text(self.streams())

    def _repr_html_(self) -> str:
        return html(self.streams())


def open_recording(path: str | Path, *, verify: bool | None = None) -> Recording:
    """Open a recording written by :meth:`Recording.to_netcdf`, or any netCDF file of the same layout.

    Values are read when they are used, one block of features at a time.

    Parameters
    ----------
    verify : bool, optional
        Whether to compare the whole file with its checksum before reading anything: by default for files up to
        256 MB. Length, names, times and counts are always checked at opening, values whenever they are first read.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        When the file is truncated, damaged, changed since it was written, or not a recording.

    Examples
    --------
    >>> import msrm
    >>> from tempfile import TemporaryDirectory
    >>> recording, _ = msrm.simulate(features=4, participants=2, seconds=30.0)
    >>> with TemporaryDirectory() as folder:
    ...     recording.to_netcdf(f"{folder}/rec.nc")
    ...     msrm.open_recording(f"{folder}/rec.nc").digest() == recording.digest()
    True
    """
    streams = open_streams(path, verify)
    return Recording.from_streams(streams)


def concat_runs(recordings: Iterable[Recording], *, keys: Iterable[str] | None = None) -> Recording:
    """One recording with the runs of several.

    Parameters
    ----------
    recordings : iterable of Recording
        With different runs: equal names would claim one timeline.
    keys : iterable of str, optional
        A prefix for the runs of each recording, such as the session: run-1 becomes ses-2_run-1.

    Raises
    ------
    ValueError
        When two recordings have a run of the same name.

    Examples
    --------
    >>> import msrm
    >>> first, second = (msrm.simulate(features=4, participants=2, seconds=30.0, seed=i)[0] for i in (1, 2))
    >>> concat_runs([first, second], keys=["ses-1", "ses-2"]).runs
    ('ses-1_run-1', 'ses-2_run-1')
    """
    parts = list(recordings)
    prefixes = [""] * len(parts) if keys is None else [f"{key}_" for key in keys]
    if len(prefixes) != len(parts):
        raise ValueError(f"{len(prefixes)} keys for {len(parts)} recordings.")
    streams: list[Stream] = []
    seen: set[str] = set()
    for prefix, part in zip(prefixes, parts, strict=True):
        names = {prefix + run for run in part.runs}
        if seen & names:
            raise ValueError(
                f"More than one recording has {', '.join(sorted(seen & names))}; a run's name stands for one timeline. "
                "Tell them apart with keys=[...], such as the sessions."
            )
        seen |= names
        streams += [make_stream(s.participant, prefix + s.run, s.modality, s) for s in part.streams()]
    return Recording.from_streams(streams)


def _items(data: Any, where: str) -> Iterable[tuple[Any, Any]]:
    if not isinstance(data, Mapping):
        raise TypeError(f"Expected {{participant: {{run: {{modality: data}}}}}}; {where} is a {type(data).__name__}.")
    if not data:
        raise ValueError(f"An empty recording: {where} has nothing in it.")
    return data.items()
