"""A DataTree as plain netCDF-4, bit for bit: what `msrm.archive` stores, without its checksum.

Written and read through netCDF4 itself: nothing is filled, scaled or decoded, and a tree of hundreds of small
groups (one for each participant and modality) takes a fifth of xarray's own time. What is written opens under a plain
``xarray.open_datatree``; three things need care (DESIGN 11).

- Names: a group whose name netCDF does not allow (leading dot, trailing space, decomposed accents) gets an escaped
  one and keeps its own in the attribute ``msrm_name``.
- Units: xarray decodes variables in ``seconds`` to durations, so these are written as ``s``.
- Attributes that netCDF cannot hold (None, bool, lists of text, dicts) are JSON text after ``json:``.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import xarray as xr

from msrm.intake import UNDECODED

__all__ = ["read_groups", "write_groups"]

_ORIGINAL_NAME = "msrm_name"
_JSON = "json:"
_LONGEST_NAME = 255
# Attributes that change the values a reader sees.
_DECODED = {
    "_FillValue",
    "missing_value",
    "scale_factor",
    "add_offset",
    "_Unsigned",
    "dtype",
    "calendar",
    "coordinates",
}


def write_groups(tree: xr.DataTree, path: Path) -> None:
    """Write every node of `tree` as a group of a new netCDF-4 file.

    Parameters
    ----------
    tree : DataTree
        Nodes of real numbers, booleans and text, each of any dimensions.
    path : Path
        The file to create.

    Raises
    ------
    TypeError
        For values that plain netCDF cannot hold: complex, dates, durations, Python objects.
    ValueError
        For variable, dimension and attribute names that netCDF does not allow, and for attributes that would
        make a reader change the values.
    """
    with netCDF4.Dataset(path, "w", format="NETCDF4") as file:
        _write_node(tree, file)


def read_groups(path: Path) -> xr.DataTree:
    """The tree of a netCDF-4 file, every value in memory and none decoded.

    Parameters
    ----------
    path : Path
        A file made by `write_groups`.

    Returns
    -------
    DataTree
    """
    datasets: dict[str, xr.Dataset] = {}
    with netCDF4.Dataset(path, "r") as file:
        file.set_auto_maskandscale(False)
        _read_node(file, "/", datasets)
    return xr.DataTree.from_dict(datasets)


def _write_node(node: xr.DataTree, group: netCDF4.Dataset) -> None:
    """Write one node's variables and attributes, then its children."""
    dataset = node.to_dataset(inherit=False)
    for name, size in dataset.sizes.items():
        group.createDimension(_legal(name, node.path), size)
    for name, variable in dataset.variables.items():
        _write_variable(_legal(name, node.path), variable, group, node.path.rstrip("/"))
    auxiliary = [str(name) for name in dataset.coords if name not in dataset.sizes]
    if spaced := [name for name in auxiliary if " " in name]:
        raise ValueError(f"{node.path}: coordinate {spaced[0]!r} has a space; rename it, for instance with '_'")
    attributes = dict(dataset.attrs)
    if auxiliary:
        attributes["coordinates"] = " ".join(auxiliary)
    _write_attributes(attributes, group, node.path)
    taken = {name for name in node.children if _is_legal(name)} | set(group.variables)
    for name, child in node.children.items():
        stored = name if _is_legal(name) else _escape(name, taken)
        taken.add(stored)
        below = group.createGroup(stored)
        if stored != name:
            below.setncattr_string(_ORIGINAL_NAME, name)
        _write_node(child, below)


def _write_variable(name: str, variable: xr.Variable, group: netCDF4.Dataset, path: str) -> None:
    """Write one array in its own type, text as netCDF strings, booleans as int8 marked for xarray."""
    values = np.asarray(variable.values)
    attributes = dict(variable.attrs)
    if unsafe := sorted(_DECODED & set(attributes)):
        raise ValueError(f"{path}/{name}: attribute {unsafe[0]!r} would change the values when read; rename it")
    units = attributes.get("units")
    if isinstance(units, str):
        if " since " in units:
            raise ValueError(
                f"{path}/{name}: units {units!r} are a calendar; store seconds from the run's start as 's'"
            )
        attributes["units"] = UNDECODED.get(units, units)
    if values.dtype == bool:
        values, attributes["dtype"] = values.astype(np.int8), "bool"
    kind: Any = values.dtype.newbyteorder("=")
    if values.dtype.kind == "U" or (values.dtype == object and all(isinstance(item, str) for item in values.flat)):
        kind, values = str, values.astype(object)
    elif values.dtype.kind not in "iuf" or values.dtype.itemsize not in (1, 2, 4, 8) or values.dtype == np.float16:
        raise TypeError(f"{path}/{name}: cannot archive values of type {values.dtype}; use float64, integers or text")
    dimensions = tuple(str(dimension) for dimension in variable.dims)
    target = group.createVariable(name, kind, dimensions, fill_value=None if kind is str else False)
    target.set_auto_maskandscale(False)
    _write_attributes(attributes, target, f"{path}/{name}")
    if values.size:
        target[...] = values if values.ndim else values[()]


def _read_node(group: netCDF4.Dataset, path: str, datasets: dict[str, xr.Dataset]) -> None:
    """Add the dataset of one group, and of those below it, to `datasets`."""
    attributes = _read_attributes(group)
    attributes.pop(_ORIGINAL_NAME, None)
    auxiliary = attributes.pop("coordinates", "").split()
    variables = {}
    for name, source in group.variables.items():
        extra = _read_attributes(source)
        values = np.asarray(source[...])
        if source.dtype is str:
            values = values.astype(str) if values.size else np.empty(values.shape, dtype="<U1")
        elif extra.pop("dtype", None) == "bool":
            values = values.astype(bool)
        variables[name] = xr.Variable(source.dimensions, values, extra)
    datasets[path] = xr.Dataset(variables, attrs=attributes).set_coords(auxiliary)
    for stored, below in group.groups.items():
        name = below.getncattr(_ORIGINAL_NAME) if _ORIGINAL_NAME in below.ncattrs() else stored
        _read_node(below, f"{path.rstrip('/')}/{name}", datasets)


def _write_attributes(attributes: dict[Any, Any], target: Any, path: str) -> None:
    """Numbers and number vectors as they are, text as netCDF strings, everything else as JSON text."""
    for name, value in attributes.items():
        if not isinstance(name, str) or not _is_legal(name) or name == _ORIGINAL_NAME:
            raise ValueError(f"{path}: netCDF allows no attribute named {name!r}")
        if _is_numeric(value):
            target.setncattr(name, value)
        elif isinstance(value, str) and not value.startswith(_JSON):
            target.setncattr_string(name, value)
        else:
            target.setncattr_string(name, _JSON + json.dumps(value, default=_plain, ensure_ascii=False))


def _is_numeric(value: Any) -> bool:
    """Whether an attribute comes back from netCDF as it was: a number, or a vector of two or more."""
    if isinstance(value, np.ndarray):
        return value.ndim == 1 and value.size > 1 and value.dtype.kind in "iuf"
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def _read_attributes(source: Any) -> dict[str, Any]:
    """The attributes of a group or variable, JSON text decoded."""
    stored = {name: source.getncattr(name) for name in source.ncattrs()}
    # Single numbers come back as NumPy scalars, whatever they were.
    attributes = {name: value.item() if isinstance(value, np.generic) else value for name, value in stored.items()}
    return {
        name: json.loads(value.removeprefix(_JSON)) if isinstance(value, str) and value.startswith(_JSON) else value
        for name, value in attributes.items()
    }


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON numbers and lists."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"cannot archive an attribute of type {type(value).__name__}: {value!r}; use text or numbers")


def _is_legal(name: str) -> bool:
    """Whether netCDF stores `name` unchanged as the name of a group, variable, dimension or attribute."""
    start = name[:1]
    return (
        bool(name)
        and (start.isalnum() or start == "_" or ord(start) > 127)
        and not name.endswith(" ")
        and all(ord(character) >= 32 and character not in "/\x7f" for character in name)
        and unicodedata.normalize("NFC", name) == name
        and len(name.encode()) <= _LONGEST_NAME
    )


def _legal(name: Any, path: str) -> str:
    """`name`, refused where netCDF would not store it."""
    if not isinstance(name, str) or not _is_legal(name):
        raise ValueError(f"{path}: netCDF allows no variable or dimension named {name!r}")
    return name


def _escape(name: str, taken: set[str]) -> str:
    """A legal stand-in for a group's name, different from every one in `taken`."""
    stored = "_" + "".join(c if c.isascii() and c.isalnum() else f"%{ord(c):02X}" for c in name)[: _LONGEST_NAME - 9]
    count = 0
    candidate = stored
    while candidate in taken:
        count += 1
        candidate = f"{stored}_{count}"
    return candidate
