"""Files written whole or not at all, and sealed: a last line of text with the SHA-256 of everything before it.

HDF5 ignores what lies past its recorded end, so xarray, netCDF4 and h5py open a sealed file as any other. The line is
checked before HDF5 sees a byte, because damaged HDF5 can crash the process that opens it.
"""

import glob
import hashlib
import os
import re
import secrets
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from msrm import __version__

__all__ = ["FORMAT", "check_seal", "is_sealed", "replacing", "seal", "target_of"]

FORMAT = 1
_LINE = re.compile(rb"\nmsrm archive (\d{1,4}) sha256 ([0-9a-f]{64})\n\Z")
_LINE_BYTES = 128


def target_of(path: str | os.PathLike[str]) -> Path:
    """The file that writing to ``path`` makes or replaces; links are followed.

    Raises
    ------
    FileNotFoundError, IsADirectoryError, PermissionError
        When its folder does not exist or cannot be written to, or ``path`` is a folder itself.
    """
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {target.parent} to save {target.name} in.")
    if target.is_dir():
        raise IsADirectoryError(f"cannot save {path}: it is a folder; give a file name such as fit.nc")
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(f"cannot save {path}: you may not write in {target.parent}")
    return target


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place, on disk, when the block ends without an error.

    Raises
    ------
    OSError
        When nothing can be written there.
    """
    target = target_of(path)
    prefix = f".{target.name}.{uuid.getnode():x}-"
    _remove_stale(target.parent, prefix)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{prefix}{os.getpid()}.", suffix=".part")
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.chmod(target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(target.parent)


def seal(path: Path) -> None:
    """Append the checksum line to a complete file."""
    with path.open("r+b") as file:
        digest = hashlib.file_digest(file, "sha256")
        file.seek(0, os.SEEK_END)
        file.write(_line(FORMAT, digest))


def is_sealed(path: Path) -> bool:
    """Whether the file ends in a checksum line; its bytes are not read."""
    with path.open("rb") as file:
        return _found(file) is not None


def check_seal(path: Path) -> None:
    """Raise ValueError unless the file is as it was written, in this or an older format."""
    with path.open("rb") as file:
        found = _found(file)
        if found is None:
            raise ValueError(
                f"{path}: not a complete msrm archive (the checksum line at its end is missing: cut short, "
                "edited, or made by another program)"
            )
        version = int(found[1])
        digest = _digest_of_first(file, path.stat().st_size - len(found[0]))
    if not secrets.compare_digest(_line(version, digest), found[0]):
        raise ValueError(f"{path}: damaged: its bytes do not match its checksum. Restore a copy or make it again")
    if version > FORMAT:
        raise ValueError(
            f"{path}: archive format {version} is newer than this msrm {__version__} reads (up to {FORMAT}). "
            "Run: pip install --upgrade msrm"
        )


def _found(file: Any) -> re.Match[bytes] | None:
    file.seek(0, os.SEEK_END)
    file.seek(max(0, file.tell() - _LINE_BYTES))
    return _LINE.search(file.read())


def _line(version: int, digest: Any) -> bytes:
    """The last line; the checksum covers the format number as well."""
    head = f"\nmsrm archive {version} sha256 ".encode()
    digest.update(head)
    return head + digest.hexdigest().encode() + b"\n"


def _digest_of_first(file: Any, count: int) -> Any:
    """SHA-256 of the first `count` bytes of an open file."""
    digest = hashlib.sha256()
    file.seek(0)
    while count > 0 and (block := file.read(min(count, 1 << 22))):
        digest.update(block)
        count -= len(block)
    return digest


def _remove_stale(folder: Path, prefix: str) -> None:
    """Delete what writes of the same file left behind whose process, on this machine, was killed."""
    for path in folder.glob(f"{glob.escape(prefix)}*.part"):
        owner = path.name.removeprefix(prefix).split(".")[0]
        if owner.isdigit() and not _is_alive(int(owner)):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 would end the process there
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut, where the system lets a folder be synced."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
