"""Recordings on disk: one netCDF-4 file, written stream by stream and read block by block.

Group ``participant/run/modality`` holds ``values`` (time, feature) in chunks of all times x some features, ``time``,
``feature``, and what one pass found: ``observed``, ``minimum``, ``maximum`` (feature), ``row_observed`` (time) and
``sha256`` of each chunk. The file is sealed (:mod:`msrm.sealed`).

What is checked when: that the file is complete and everything but the values is as written, at every opening; the
whole file's SHA-256 at opening up to 256 MB or on request; values through HDF5's own checksum whenever a chunk is read,
and through its SHA-256 when it is first read.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Any
from weakref import WeakValueDictionary, finalize

import netCDF4
import numpy as np
import xarray as xr
from xarray.backends import BackendArray
from xarray.core import indexing

from msrm import __version__
from msrm import recording_checks as checks
from msrm.intake import check_features, check_name, check_times
from msrm.sealed import FORMAT, check_seal, is_sealed, replacing, seal
from msrm.stream import (
    Stored,
    Stream,
    Summary,
    Tally,
    block_digest,
    chunk_width,
    make_stream,
    ordered,
    stream_label,
    streams_digest,
)

KIND = "recording"
VERIFIED_BYTES = 2**28
CHUNK_TIMES = 2**19
_OPEN: WeakValueDictionary[tuple[int, int], "OpenFile"] = WeakValueDictionary()


class RecordingWriter:
    """Writes a recording, which may be larger than memory, one stream at a time.

    Parameters
    ----------
    path : path
        Appears when the ``with`` block ends without an error; a previous file stays until then.

    Examples
    --------
    >>> import numpy as np
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, RecordingWriter(f"{folder}/rec.nc") as writer:
    ...     for run in ("run-1", "run-2"):
    ...         writer.add("p1", run, "brain", np.eye(4), np.arange(4.0))
    """

    def __init__(self, path: str | Path) -> None:
        self._replacing = replacing(path)
        self._streams: list[Stream] = []

    def __enter__(self) -> "RecordingWriter":
        self._path = self._replacing.__enter__()
        self._file = netCDF4.Dataset(self._path, "w", format="NETCDF4")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except BaseException as failure:
            self._replacing.__exit__(type(failure), failure, failure.__traceback__)
            raise
        finally:
            if self._file.isopen():
                self._file.close()
        self._replacing.__exit__(kind, error, trace)

    def add(
        self, participant: str, run: str, modality: str, values: Any, times: Any = None, features: Any = None
    ) -> None:
        """Check and write one stream.

        Parameters
        ----------
        values : array (time, feature)
            Anything with ``shape`` and ``dtype`` that can be sliced, such as a memory map: read a block of features
            at a time. Without ``times``, anything that :meth:`Recording.from_dict` accepts.
        times : (time,) float64
            Seconds.
        features : (feature,) of str, optional
            Names; "0", "1", ... by default.
        """
        if times is None:
            self.write(make_stream(participant, run, modality, values))
            return
        for name, kind in ((participant, "participant"), (run, "run"), (modality, "modality")):
            check_name(name, kind)
        label = stream_label(participant, run, modality)
        seconds = check_times(xr.DataArray(np.asarray(times), dims="time"), label)
        names = np.arange(values.shape[1]).astype(str) if features is None else np.asarray(features)
        if tuple(values.shape) != (len(seconds), len(names)):
            raise ValueError(f"{label}: values {values.shape} for {len(seconds)} times and {len(names)} features.")
        if np.dtype(values.dtype).kind not in "fiub":
            raise ValueError(f"{label}: values are {values.dtype}; wanted numbers.")
        self.write(Stream(participant, run, modality, seconds, check_features(names, label), values))

    def write(self, stream: Stream) -> None:
        """Write a stream."""
        names = (stream.participant, stream.run, stream.modality)
        if any(names == (other.participant, other.run, other.modality) for other in self._streams):
            raise ValueError(f"{stream.label} is given twice.")
        group = self._file.createGroup("/".join(names))
        group.createDimension("time", stream.n_times)
        group.createDimension("feature", stream.n_features)
        width = chunk_width(stream.n_times)
        variable = group.createVariable(
            "values",
            "f4" if stream.data.dtype == np.float32 else "f8",
            ("time", "feature"),
            chunksizes=(min(stream.n_times, CHUNK_TIMES), min(width, stream.n_features)),
            fletcher32=True,
            fill_value=False,
        )
        variable.setncatts(getattr(stream.data, "attrs", {}))
        tally, digests = Tally(stream), []
        for block, values in stream.blocks():
            tally.add(block, values)
            digests += [block_digest(values[:, i : i + width]) for i in range(0, values.shape[1], width)]
            variable[:, block] = values
        stored = Stored(tally.summary(), tuple(digests))
        empty = xr.DataArray(np.empty((0, 0)), dims=("time", "feature"))
        self._streams.append(Stream(*names, stream.times, stream.features, empty, stored))

    def _finish(self) -> None:
        if not self._streams:
            raise ValueError("An empty recording: no stream was added.")
        streams = ordered(self._streams)
        checks.refuse(streams)
        # All variables before all values: netCDF goes through the whole file whenever it changes from one to the other.
        groups = [self._file["/".join((s.participant, s.run, s.modality))] for s in self._streams]
        for stream, group in zip(self._streams, groups, strict=True):
            _define(group, len(stream.digests))
        for stream, group in zip(self._streams, groups, strict=True):
            for name, values in _contents(stream).items():
                group[name][:] = values
        attributes = {
            "kind": KIND,
            "msrm_format": FORMAT,
            "msrm_version": __version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "digest": streams_digest(streams),
            "contents": _contents_digest(streams),
        }
        self._file.setncatts(attributes)
        self._file.close()
        seal(self._path)


def _define(group: Any, chunks: int) -> None:
    """The variables of a stream beside its values."""
    group.createDimension("chunk", chunks)
    group.createDimension("byte", 32)
    group.createVariable("feature", str, ("feature",))
    for name, kind, dimensions in (
        ("time", "f8", ("time",)),
        ("observed", "i8", ("feature",)),
        ("minimum", "f8", ("feature",)),
        ("maximum", "f8", ("feature",)),
        ("row_observed", "i8", ("time",)),
        ("sha256", "u1", ("chunk", "byte")),
    ):
        group.createVariable(name, kind, dimensions, contiguous=True, fill_value=False)
    group["time"].units = "s"


def _contents(stream: Stream) -> dict[str, np.ndarray]:
    """What is stored of a stream beside its values."""
    summary = stream.summary
    return {
        "time": stream.times,
        "feature": stream.features.astype(object),
        "observed": summary.observed,
        "minimum": summary.minimum,
        "maximum": summary.maximum,
        "row_observed": summary.row_observed,
        "sha256": np.frombuffer(bytes.fromhex("".join(stream.digests)), np.uint8).reshape(-1, 32),
    }


def _contents_digest(streams: Iterable[Stream]) -> str:
    """SHA-256 of the summaries, which the recording's digest does not cover."""
    digest = hashlib.sha256()
    for stream in streams:
        for name, values in _contents(stream).items():
            if name in ("observed", "minimum", "maximum", "row_observed"):
                digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def write_streams(path: str | Path, streams: Iterable[Stream]) -> None:
    """Write a recording's streams."""
    with RecordingWriter(path) as writer:
        for stream in streams:
            writer.write(stream)


def open_streams(path: str | Path, verify: bool | None) -> Sequence[Stream]:
    """The streams of a file, values not yet read; see :func:`msrm.open_recording`."""
    file = Path(path)
    sealed = is_sealed(file)
    if verify and not sealed:
        raise ValueError(f"{file} has no checksum to verify: it is no msrm archive, or was cut short or edited.")
    if sealed and (verify or (verify is None and file.stat().st_size <= VERIFIED_BYTES)):
        check_seal(file)
    _check_length(file)
    with _naming(file):
        opened = open_file(file)
        attributes = opened.attributes()
        kind = attributes.get("kind") if "msrm_format" in attributes else None
        if kind is None:
            tree = xr.open_datatree(file, engine="netcdf4", cache=False, decode_times=False, decode_timedelta=False)
    if kind is None:
        return ordered(streams_of(tree))
    if kind != KIND:
        raise ValueError(f"{file} holds a {kind}, not a recording; open it with msrm.open_fit.")
    if not sealed:
        raise ValueError(f"{file} was truncated or changed since it was written: the checksum at its end is gone.")
    with _naming(file):
        streams = ordered(opened.streams())
        intact = streams_digest(streams) == attributes["digest"] and _contents_digest(streams) == attributes["contents"]
    if not intact:
        raise ValueError(f"{file} is damaged: its names, times or counts differ from what was written.")
    return streams


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """HDF5 reports damage as whatever error it stumbles over."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} is not a readable netCDF-4 file, perhaps truncated or damaged: {error}") from error


def _check_length(path: Path) -> None:
    """Refuse a file shorter than HDF5 recorded before HDF5 tries, whose failed attempts stay open and spoil others."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head.startswith(b"\x89HDF\r\n\x1a\n") or len(head) < 64:
        raise ValueError(f"{path} is not a readable netCDF-4 file, perhaps truncated or damaged.")
    end = {0: 40, 1: 44}.get(head[8], 28)
    recorded, size = int.from_bytes(head[end : end + 8], "little"), path.stat().st_size
    if size < recorded:
        raise ValueError(f"{path} is truncated: {size} of {recorded} bytes are there. Copy or save it again.")


def open_file(path: Path) -> "OpenFile":
    """The open file at a path; one that was overwritten in place is closed first, as HDF5 would mix old and new."""
    found = path.stat()
    key, stamp = (found.st_dev, found.st_ino), (found.st_size, found.st_mtime_ns)
    opened = _OPEN.get(key)
    if opened is not None and opened.stamp != stamp:
        opened.close()
        opened = None
    if opened is None:
        opened = _OPEN[key] = OpenFile(path.resolve(), stamp)
    return opened


class OpenFile:
    """A recording's file, kept open so that replacing it by name changes nothing; opened anew where it is unpickled."""

    def __init__(self, path: Path, stamp: tuple[int, int]) -> None:
        self.path = path
        self.stamp = stamp
        self.lock = RLock()
        self.dataset = netCDF4.Dataset(path)
        self.dataset.set_auto_maskandscale(False)
        # The dataset refers to itself through its groups: without this it stays open until the next collection.
        self.close = finalize(self, self.dataset.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return open_file, (self.path,)

    def attributes(self) -> dict[str, Any]:
        """Of the root group."""
        return {name: self.dataset.getncattr(name) for name in self.dataset.ncattrs()}

    def streams(self) -> list[Stream]:
        """All streams, values not read."""
        return [
            self._stream(participant, run, modality, group)
            for participant, runs in self.dataset.groups.items()
            for run, modalities in runs.groups.items()
            for modality, group in modalities.groups.items()
        ]

    def _stream(self, participant: str, run: str, modality: str, group: Any) -> Stream:
        found = {name: np.asarray(variable[:]) for name, variable in group.variables.items() if name != "values"}
        variable = group["values"]
        values = FileValues(self, group.path, variable)
        array = xr.DataArray(
            xr.Variable(("time", "feature"), indexing.LazilyIndexedArray(values)),
            {"time": found["time"], "feature": found["feature"]},
            attrs={name: variable.getncattr(name) for name in variable.ncattrs() if not name.startswith("_")},
        )
        summary = Summary(found["observed"], found["row_observed"], found["minimum"], found["maximum"])
        digests = tuple(chunk.tobytes().hex() for chunk in found["sha256"])
        return make_stream(participant, run, modality, array, Stored(summary, digests))


class FileValues(BackendArray):
    """The values of one stream in an open file, read when they are indexed."""

    def __init__(self, file: OpenFile, group: str, variable: Any) -> None:
        self.file = file
        self.group = group
        self.shape = variable.shape
        self.dtype = np.dtype(variable.dtype)

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        return indexing.explicit_indexing_adapter(key, self.shape, indexing.IndexingSupport.OUTER, self._read)

    def _read(self, key: Any) -> np.ndarray:
        with self.file.lock:
            return self.file.dataset[self.group]["values"][key]


def streams_of(tree: xr.DataTree) -> list[Stream]:
    """The streams of a tree participant / run / modality."""
    streams = []
    for node in tree.subtree:
        if not node.data_vars:
            continue
        names = [part for part in node.path.split("/") if part]
        if len(names) != 3:
            raise ValueError(f"Data at {node.path!r}; a recording has them in groups participant/run/modality only.")
        dataset = node.to_dataset(inherit=False)
        fits = [str(name) for name, array in dataset.data_vars.items() if set(array.dims) == {"time", "feature"}]
        name = "values" if "values" in dataset.data_vars else fits[0] if len(fits) == 1 else None
        if name is None:
            raise ValueError(
                f"{stream_label(names[0], names[1], names[2])}: no variable 'values' (time, feature); found "
                f"{', '.join(map(str, dataset.data_vars))}."
            )
        streams.append(make_stream(names[0], names[1], names[2], dataset[name]))
    return streams
