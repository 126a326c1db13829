"""The fit archive (DESIGN 6): one netCDF-4 file, written whole or not at all, refused when a bit of it changed.

An archive is a DataTree of plain numbers and text (`msrm.netcdf`), a ``runtime`` group that says what made it, and a
line of text after the end of the HDF5 data with the SHA-256 of everything before. HDF5 ignores what lies past its
recorded end, so xarray, netCDF4 and h5py open the file as any other; `read_tree` checks the line before HDF5 sees a
byte, because damaged HDF5 can crash the process that opens it.
"""

import hashlib
import os
import re
import secrets
import shutil
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import xarray as xr

from msrm import __version__, netcdf, runtime
from msrm.recording_file import replacing

__all__ = ["FORMAT", "open_fit", "read_tree", "save_fit", "write_tree"]

FORMAT = 1
_SEAL = re.compile(rb"\nmsrm archive (\d{1,4}) sha256 ([0-9a-f]{64})\n\Z")
_SEAL_BYTES = 128
_RESERVED = ("kind", "msrm_format", "msrm_version", "created")
# Class name, which is also the archive's kind -> module that defines it with `to_tree` and `from_tree`.
_HOMES = {"RMSRM": "msrm.regularized"}


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
    if path.is_dir():
        raise IsADirectoryError(f"cannot save {path}: it is a folder; give a file name such as fit.nc")
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
        _seal(aside)
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
    _check_seal(path)
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
    if kind not in _HOMES:
        raise TypeError(f"cannot archive a {kind}; known are {', '.join(_HOMES)}")
    return write_tree(fitted.to_tree(), path, kind=kind)


def open_fit(path: str | os.PathLike[str]) -> Any:
    """The fitted model of an archive; it predicts identically to the one that was saved.

    Parameters
    ----------
    path : path-like
        A file made by ``fit.save``.

    Returns
    -------
    estimator
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
    if kind not in _HOMES:
        raise ValueError(
            f"{path}: holds a {kind!r}, not a fitted model ({', '.join(_HOMES)}); use msrm.archive.read_tree"
        )
    return getattr(import_module(_HOMES[kind]), kind).from_tree(tree)


def _seal(path: Path) -> None:
    """Append the checksum line."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256")
        file.seek(0, os.SEEK_END)
        file.write(_seal_line(FORMAT, digest))


def _seal_line(version: int, digest: Any) -> bytes:
    """The last line of an archive; the checksum covers the format number as well."""
    head = f"\nmsrm archive {version} sha256 ".encode()
    digest.update(head)
    return head + digest.hexdigest().encode() + b"\n"


def _check_seal(path: Path) -> None:
    """Raise ValueError unless the file is as it was written, by this or an older format."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _SEAL_BYTES))
        found = _SEAL.search(file.read())
        if found is None:
            raise ValueError(
                f"{path}: not a complete msrm archive (the checksum line at its end is missing: cut short, "
                "edited, or made by another program)"
            )
        version = int(found[1])
        digest = _digest_of_first(file, size - len(found[0]))
    if not secrets.compare_digest(_seal_line(version, digest), found[0]):
        raise ValueError(f"{path}: damaged: its bytes do not match its checksum. Restore a copy or fit again")
    if version > FORMAT:
        raise ValueError(
            f"{path}: archive format {version} is newer than this msrm {__version__} reads (up to {FORMAT}). "
            "Run: pip install --upgrade msrm"
        )


def _digest_of_first(file: Any, count: int) -> Any:
    """SHA-256 of the first `count` bytes of an open file."""
    digest = hashlib.sha256()
    file.seek(0)
    while count > 0 and (block := file.read(min(count, 1 << 22))):
        digest.update(block)
        count -= len(block)
    return digest
