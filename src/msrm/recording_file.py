"""Recordings on disk: one netCDF-4 file, written stream by stream and read block by block.

Group ``participant/run/modality`` holds ``values`` (time, feature) in chunks of all times x some features, ``time``,
``feature``, and what one pass found: ``observed``, ``minimum``, ``maximum`` (feature), ``row_observed`` (time) and
``sha256`` of each chunk. The file is sealed (:mod:`msrm.sealed`).

What is checked when: that the file is complete at every opening; the whole file's SHA-256 at opening up to 256 MB or
on request; names, times and chunk digests at every opening, through the recording's digest; values through HDF5's own
checksum whenever a chunk is read, and through its SHA-256 when it is first read.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import netCDF4
import numpy as np
import xarray as xr

from msrm import __version__
from msrm import recording_checks as checks
from msrm.sealed import FORMAT, check_seal, is_sealed, replacing, seal
from msrm.stream import (
    Stored,
    Stream,
    Summary,
    Tally,
    block_digest,
    check_features,
    check_name,
    check_times,
    chunk_width,
    make_stream,
    ordered,
    stream_label,
    streams_digest,
)

KIND = "recording"
VERIFIED_BYTES = 2**28


class RecordingWriter:
    """Writes a recording, which may be larger than memory, one stream at a time.

    Parameters
    ----------
    path : path
        Appears when the ``with`` block ends without an error; a previous file stays until then.

    Examples
    --------
    >>> import numpy as np
    >>> with RecordingWriter("rec.nc") as writer:  # doctest: +SKIP
    ...     writer.add("p1", "run-1", "brain", np.load("p1.npy", mmap_mode="r"), times)
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
        if values.ndim != 2 or values.shape != (len(seconds), len(names)):
            raise ValueError(f"{label}: values {values.shape} for {len(seconds)} times and {len(names)} features.")
        self.write(Stream(participant, run, modality, seconds, check_features(names, label), values))

    def write(self, stream: Stream) -> None:
        """Write a stream."""
        group = self._file.createGroup("/".join((stream.participant, stream.run, stream.modality)))
        tally, digests = Tally(stream), []
        width = chunk_width(stream.n_times)
        group.createDimension("time", stream.n_times)
        group.createDimension("feature", stream.n_features)
        group.createDimension("chunk", -(-stream.n_features // width))
        kind = "f4" if stream.data.dtype == np.float32 else "f8"
        chunks = (min(stream.n_times, 2**24), min(width, stream.n_features))
        variable = group.createVariable(
            "values", kind, ("time", "feature"), chunksizes=chunks, fletcher32=True, fill_value=False
        )
        variable.setncatts(getattr(stream.data, "attrs", {}))
        _put(group, "time", stream.times, "time").units = "s"
        group.createVariable("feature", str, ("feature",))[:] = stream.features.astype(object)
        for block, values in stream.blocks():
            tally.add(block, values)
            digests += [block_digest(values[:, i : i + width]) for i in range(0, values.shape[1], width)]
            variable[:, block] = values
        summary = tally.summary()
        _put(group, "observed", summary.observed, "feature")
        _put(group, "minimum", summary.minimum, "feature")
        _put(group, "maximum", summary.maximum, "feature")
        _put(group, "row_observed", summary.row_observed, "time")
        group.createVariable("sha256", str, ("chunk",))[:] = np.array(digests, dtype=object)
        self._file.sync()
        stored = Stored(summary, tuple(digests))
        empty = xr.DataArray(np.empty((0, 0)), dims=("time", "feature"))
        names = (stream.participant, stream.run, stream.modality)
        self._streams.append(Stream(*names, stream.times, stream.features, empty, stored))

    def _finish(self) -> None:
        if not self._streams:
            raise ValueError("An empty recording: no stream was added.")
        streams = ordered(self._streams)
        checks.refuse(streams)
        attributes = {
            "kind": KIND,
            "msrm_format": FORMAT,
            "msrm_version": __version__,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "digest": streams_digest(streams),
        }
        self._file.setncatts(attributes)
        self._file.close()
        seal(self._path)


def _put(group: Any, name: str, values: np.ndarray, dimension: str) -> Any:
    kind = "i8" if values.dtype.kind == "i" else "f8"
    variable = group.createVariable(name, kind, (dimension,), fletcher32=True, fill_value=False)
    variable[:] = values
    return variable


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
    try:
        tree = xr.open_datatree(
            file, engine="netcdf4", cache=False, decode_times=False, decode_timedelta=False, mask_and_scale=not sealed
        )
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise ValueError(f"{file} is not a readable netCDF file, perhaps truncated or damaged: {error}") from error
    kind = tree.attrs.get("kind") if "msrm_format" in tree.attrs else None
    if kind is None:
        return ordered(streams_of(tree))
    if kind != KIND:
        raise ValueError(f"{file} holds a {kind}, not a recording; open it with msrm.open_fit.")
    if not sealed:
        raise ValueError(f"{file} was truncated or changed since it was written: the checksum at its end is gone.")
    streams = ordered(streams_of(tree, stored=True))
    if streams_digest(streams) != tree.attrs["digest"]:
        raise ValueError(f"{file} is damaged: its names, times or digests differ from what was written.")
    return streams


def streams_of(tree: xr.DataTree, stored: bool = False) -> list[Stream]:
    """The streams of a tree participant / run / modality, with what an archive recorded about them if it is one."""
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
        streams.append(make_stream(names[0], names[1], names[2], dataset[name], _stored(dataset) if stored else None))
    return streams


def _stored(dataset: xr.Dataset) -> Stored:
    fields = {name: dataset[name].values for name in ("observed", "row_observed", "minimum", "maximum")}
    return Stored(Summary(**fields), tuple(str(digest) for digest in dataset["sha256"].values))
