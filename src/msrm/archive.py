"""The fit archive (DESIGN 6): one netCDF-4 file, written whole or not at all, refused when a bit of it changed.

An archive is a DataTree of plain numbers and text (`msrm.netcdf`), a ``runtime`` group that says what made it, and the
seal of `msrm.sealed`.
"""

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import xarray as xr

import msrm
from msrm import __version__, netcdf, runtime
from msrm.sealed import FORMAT, check_seal, replacing, seal

__all__ = ["FITTED", "FORMAT", "open_fit", "read_tree", "save_fit", "write_tree"]

_RESERVED = ("kind", "msrm_format", "msrm_version", "created")
# Fitted classes of the package, each with `to_tree` and `from_tree`; the name is the archive's kind.
FITTED = ("RMSRM", "GPMSRM")
_OPENED = (*FITTED, "Draws")


def write_tree(tree: xr.DataTree, path: str | os.PathLike[str], *, kind: str) -> Path:
    """Save a tree as an archive: written under a temporary name in the same folder, sealed, then renamed.

    A full disk, an error or a kill leaves what was at `path` as it was; a tree read from `path` may be saved
    back to it.

    Parameters
    ----------
    tree : DataTree
        Plain numbers and text; ``attrs`` may hold ``recording_digest``. A ``runtime`` group is added.
    path : path-like
        The file to make or replace. Its folder must exist.
    kind : str
        What the tree holds, the name that `open_fit` dispatches on.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    FileNotFoundError
        When the folder does not exist.
    OSError
        When the file cannot be written, for instance on a full disk.
    TypeError, ValueError
        For what plain netCDF cannot hold, named by group and variable.
    """
    path = Path(path)
    if "runtime" in tree.children or any(name in tree.attrs for name in _RESERVED):
        raise ValueError(f"the archive itself adds 'runtime' and the attributes {', '.join(_RESERVED)}; leave them out")
    sealed = tree.copy(deep=False)
    sealed.attrs = {
        "kind": kind,
        "msrm_format": FORMAT,
        "msrm_version": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        **tree.attrs,
    }
    sealed["runtime"] = xr.DataTree(xr.Dataset(attrs=runtime.describe()))
    with replacing(path) as aside:
        size = sum(node.to_dataset(inherit=False).nbytes for node in tree.subtree)
        if size > (free := shutil.disk_usage(aside.parent).free):
            raise OSError(f"cannot save {path}: it needs {size / 1e6:.1f} MB and {free / 1e6:.1f} MB are free")
        try:
            netcdf.write_groups(sealed, aside)
        except RuntimeError as error:  # netCDF's own word for any failed write
            raise OSError(f"cannot save {path}: {error}; is the disk full or a quota reached?") from error
        seal(aside)
    return path


def read_tree(path: str | os.PathLike[str]) -> xr.DataTree:
    """The tree of an archive, in memory, after its checksum was found right.

    Parameters
    ----------
    path : path-like
        A file made by `write_tree`.

    Returns
    -------
    DataTree
        What was written, with the ``runtime`` group and the attributes ``kind``, ``msrm_format``,
        ``msrm_version`` and ``created``.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        When the file is no msrm archive, is damaged or cut short, or has a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    check_seal(path)
    return netcdf.read_groups(path)


def save_fit(fitted: Any, path: str | os.PathLike[str]) -> Path:
    """Save a fitted model, whose class must be one that `open_fit` can build again.

    Parameters
    ----------
    fitted : estimator
        With ``to_tree()``.
    path : path-like
        The file to make or replace.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    TypeError
        For an object that is not one of the package's fitted models.
    """
    kind = type(fitted).__name__
    if kind not in FITTED:
        raise TypeError(f"cannot archive a {kind}; known are {', '.join(FITTED)}")
    return write_tree(fitted.to_tree(), path, kind=kind)


def open_fit(path: str | os.PathLike[str]) -> Any:
    """The fitted model or the draws of an archive; they predict identically to those that were saved.

    Parameters
    ----------
    path : path-like
        A file made by ``fit.save`` or ``draws.save``.

    Returns
    -------
    estimator or Draws
        Of the class that was saved.

    Raises
    ------
    FileNotFoundError
        When there is no such file.
    ValueError
        When the file is no msrm archive, is damaged, has a newer format or holds no fitted model.
    """
    tree = read_tree(path)
    kind = tree.attrs["kind"]
    if kind not in _OPENED:
        raise ValueError(
            f"{path}: holds a {kind!r}, not a fitted model ({', '.join(FITTED)}) or draws; use msrm.archive.read_tree"
        )
    # By the package's own name, which says what to install when the model's extra is missing.
    return getattr(msrm, kind).from_tree(tree)
