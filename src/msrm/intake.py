"""What a user gives for one stream, made uniform: labels, seconds, distinct feature names, real numbers.

Every function refuses what it cannot take without guessing, with the stream, the place, what was found and what is
wanted. The result is a :class:`msrm.stream.Stream`.
"""

import unicodedata
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

NAME_BYTES = 200
UNDECODED = {
    "days": "d",
    "hours": "h",
    "minutes": "min",
    "seconds": "s",
    "milliseconds": "ms",
    "microseconds": "us",
    "nanoseconds": "ns",
}
SECONDS = ("s", "sec", "secs", "second", "seconds")


def check_name(name: object, kind: str) -> str:
    """The name of a participant, run or modality, refused unless every archive can hold it unchanged.

    Raises
    ------
    TypeError
        When it is not text.
    ValueError
        When it is empty, too long, or has characters that a path or a netCDF name cannot keep.
    """
    if not isinstance(name, str):
        raise TypeError(f"{kind} {name!r} is a {type(name).__name__}, not text; use {str(name)!r}.")
    reason = ""
    if not name or name != name.strip():
        reason = "is empty or has spaces around it"
    elif "/" in name:
        reason = 'has a "/" in it, which separates groups in an archive; use "-" or "_"'
    elif any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") for c in name):
        reason = "has control characters in it"
    elif name != unicodedata.normalize("NFC", name):
        reason = "is not in Unicode's composed form; pass it through unicodedata.normalize('NFC', name)"
    elif name[0].isascii() and not (name[0].isalnum() or name[0] == "_"):
        reason = f"starts with {name[0]!r}; start with a letter, a digit or an underscore"
    elif len(name.encode()) > NAME_BYTES:
        reason = f"is longer than {NAME_BYTES} bytes"
    if reason:
        raise ValueError(f"The name of {kind} {name!r} {reason}.")
    return name


_CLOCK_NAMES = ("time", "times", "seconds", "onset", "timestamp", "time_s", "t_s")


def labelled(value: Any, label: str) -> xr.DataArray:
    """The value as a DataArray (time, feature) with both coordinates, not yet checked."""
    if isinstance(value, pd.Series):
        value = value.to_frame(name="0" if value.name is None else value.name)
    if isinstance(value, pd.DataFrame):
        clocks = [str(name) for name in value.columns if str(name).lower() in _CLOCK_NAMES]
        if clocks:
            raise ValueError(
                f"{label}: column {clocks[0]!r} looks like the clock, not a feature. The index holds the seconds: "
                f"frame.set_index({clocks[0]!r})."
            )
        if isinstance(value.index, pd.RangeIndex) and value.index.equals(pd.RangeIndex(len(value))) and len(value) > 1:
            rising = [
                str(n) for n in value.columns if value[n].dtype.kind in "fiu" and value[n].is_monotonic_increasing
            ]
            column = rising[0] if rising else "COLUMN"
            raise ValueError(
                f"{label}: the index counts rows 0, 1, 2, ...; it must hold the seconds: frame.set_index({column!r}), "
                "or frame.index = seconds (for one row a second, frame.index.astype(float))."
            )
        value = xr.DataArray(
            value.to_numpy(), {"time": value.index.to_numpy(), "feature": list(value.columns)}, ("time", "feature")
        )
    elif isinstance(value, tuple) and len(value) == 2:
        values, times = (v if hasattr(v, "shape") else np.asarray(v) for v in value)
        if times.ndim != 1 or values.shape[:1] != times.shape:
            raise ValueError(f"{label}: values of shape {values.shape} do not fit times of shape {times.shape}.")
        value = (
            xr.DataArray(values, {"time": times}, ("time", "feature")[: values.ndim]) if values.ndim <= 2 else values
        )
    if not isinstance(value, xr.DataArray):
        shape = f" of shape {value.shape}" if hasattr(value, "shape") else ""
        raise TypeError(
            f"{label}: expected a DataArray (time, feature), a DataFrame indexed by seconds, or a pair "
            f"(values, times); got {type(value).__name__}{shape}."
        )
    if value.ndim == 1 and value.dims == ("time",):
        value = value.expand_dims(feature=["0" if value.name is None else str(value.name)], axis=1)
    if set(value.dims) != {"time", "feature"}:
        raise ValueError(f"{label}: dimensions {value.dims}; wanted ('time', 'feature'). Rename them with .rename().")
    if "time" not in value.coords:
        raise ValueError(f"{label}: no coordinate 'time'. Add the seconds: data.assign_coords(time=seconds).")
    if 0 in value.shape:
        raise ValueError(f"{label}: {value.sizes['time']} rows and {value.sizes['feature']} features. Leave it out.")
    if "feature" not in value.coords:
        value = value.assign_coords(feature=[str(i) for i in range(value.sizes["feature"])])
    return value.transpose("time", "feature")


def check_times(times: xr.DataArray, label: str) -> np.ndarray:
    """Strictly increasing finite seconds, float64."""
    unit = str(times.attrs.get("units", "s")).strip()
    if unit.lower() not in SECONDS:
        raise ValueError(f"{label}: time is in {unit!r}; convert it to seconds and set its units to 's'.")
    seconds = times.values
    if seconds.dtype.kind in "mM":
        raise ValueError(
            f"{label}: times are {seconds.dtype}; wanted seconds, for example (t - t[0]) / np.timedelta64(1, 's')."
        )
    if seconds.dtype.kind not in "fiu":
        raise ValueError(
            f"{label}: times are {seconds.dtype}, the first {seconds.tolist()[0]!r}; wanted seconds as numbers."
        )
    seconds = np.array(seconds, dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(seconds))
    if bad.size:
        raise ValueError(f"{label}: the time of row {bad[0]} is {seconds[bad[0]]}. Drop the row or mend its time.")
    bad = np.flatnonzero(np.diff(seconds) <= 0)
    if bad.size:
        row, before, after = bad[0] + 1, seconds[bad[0]], seconds[bad[0] + 1]
        if before == after:
            raise ValueError(f"{label}: rows {row - 1} and {row} are both at {after:.12g} s. Drop one of them.")
        raise ValueError(
            f"{label}: time must increase; row {row} is {after:.12g} s after {before:.12g} s. "
            f"Sort the rows or drop row {row}."
        )
    seconds.flags.writeable = False
    return seconds


def check_features(names: np.ndarray, label: str) -> np.ndarray:
    """Distinct names of features, as text."""
    features = np.array([str(name) for name in names.tolist()])
    for index, name in enumerate(features.tolist()):
        if not name or "\0" in name:
            raise ValueError(f"{label}: the name of feature {index} is {name!r}; give it a name.")
    unique, counts = np.unique(features, return_counts=True)
    if len(unique) < len(features):
        twice = unique[counts > 1]
        raise ValueError(f"{label}: {len(twice)} feature names occur more than once, such as {str(twice[0])!r}.")
    features.flags.writeable = False
    return features


def numbers(array: xr.DataArray, features: np.ndarray, label: str) -> Any:
    """The values as float32 or float64: still lazy, or read-only; copied where the caller could change them later."""
    variable = array.variable
    if not variable._in_memory and variable.dtype in (np.float32, np.float64):
        return variable
    values = variable.values
    if values.dtype.kind not in "fiub":
        values = _parsed(values, features, label)
    kept = values.astype(np.float32 if values.dtype == np.float32 else np.float64, copy=False)
    # Checks and digests hold for the values that were given: nobody may change them afterwards.
    kept = kept.copy() if np.may_share_memory(kept, values) and _writeable(values) else kept.view()
    kept.flags.writeable = False
    return kept


def _writeable(values: np.ndarray) -> bool:
    """Whether an array can be changed, through itself or through what it is a view of."""
    owner: Any = values
    while isinstance(owner, np.ndarray):
        if owner.flags.writeable:
            return True
        owner = owner.base
    return owner is not None


def _parsed(values: np.ndarray, features: np.ndarray, label: str) -> np.ndarray:
    """Numbers kept as Python objects, with None or NA where missing, as float64."""
    parsed = np.full(values.shape, np.nan)
    for (row, column), cell in np.ndenumerate(values.astype(object)):
        if isinstance(cell, (float, int, np.floating, np.integer)):
            parsed[row, column] = cell
        elif isinstance(cell, (str, complex)) or not pd.isna(cell):
            raise ValueError(
                f"{label}: row {row} of feature {str(features[column])!r} is {cell!r}; wanted a real number. "
                "Convert text to numbers first, and use NaN for what is missing."
            )
    return parsed


def attributes(array: xr.DataArray) -> dict[str, str]:
    """Description and units, spelled so that xarray does not decode the values as dates or durations."""
    kept = {key: str(array.attrs[key]) for key in ("long_name", "description", "units") if key in array.attrs}
    if "units" in kept:
        kept["units"] = UNDECODED.get(kept["units"].lower(), kept["units"]).replace(" since ", " from ")
    return kept
