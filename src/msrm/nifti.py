"""Images of a BIDS folder through a nilearn masker; needs the extra ``neuro``.

Volume i is at ``StartTime + i * RepetitionTime`` seconds of its run, or at ``StartTime + VolumeTiming[i]``.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nibabel
import numpy as np
import xarray as xr
from nibabel.filebasedimages import ImageFileError
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

if TYPE_CHECKING:
    from msrm.bids import BidsFile

UNITS = {"sec": 1.0, "msec": 1e-3, "usec": 1e-6}


class ImageReader:
    """Features of images, with one fitted masker for each participant.

    Parameters
    ----------
    masker : nilearn masker or {participant: masker}
    confounds : callable, optional
        From an image's path to a table, or a table and the volumes to keep.
    """

    def __init__(self, masker: Any, confounds: Callable[[Path], Any] | None) -> None:
        self._masker = masker
        self._confounds = confounds
        self._fitted: dict[str, Any] = {}

    def read(self, file: "BidsFile", participant: str) -> xr.DataArray:
        """The features of one image, (time, feature); volumes that are not kept are missing rows."""
        with _naming(file.path):
            image: Any = nibabel.load(file.path)
        if len(image.shape) != 4:
            raise ValueError(f"{file.path} has {len(image.shape)} dimensions; a series of volumes has 4.")
        count = image.shape[3]
        table, kept = self._cleaning(file.path, count)
        volumes = None if kept.all() else np.flatnonzero(kept)
        with _naming(file.path):
            masker = self._masker_of(participant, image)
            found = masker.transform(image, confounds=table, sample_mask=volumes)
        values = np.full((count, found.shape[1]), np.nan, dtype=found.dtype)
        values[kept] = found
        times = volume_times(file, image)
        return xr.DataArray(values, {"time": times, "feature": _names(masker, found.shape[1])}, ("time", "feature"))

    def _cleaning(self, path: Path, count: int) -> tuple[Any, np.ndarray]:
        kept = np.ones(count, dtype=bool)
        if self._confounds is None:
            return None, kept
        table, volumes = self._confounds(path), None
        if isinstance(table, tuple):
            table, volumes = table
        if volumes is not None:
            kept = np.zeros(count, dtype=bool)
            kept[np.asarray(volumes)] = True
        if table is not None:
            cells = np.asarray(table, dtype=np.float64)
            if cells.ndim != 2 or len(cells) != count:
                raise ValueError(f"{path}: confounds of shape {cells.shape} for {count} volumes.")
            if not np.isfinite(cells).all():
                rows = np.flatnonzero(~np.isfinite(cells).all(axis=1))
                raise ValueError(
                    f"{path}: the confounds of {len(rows)} volumes are not finite, the first is volume {rows[0]}. "
                    "Fill or drop those columns: derivatives have no first value."
                )
        return table, kept

    def _masker_of(self, participant: str, image: Any) -> Any:
        if participant not in self._fitted:
            masker = self._masker
            if isinstance(masker, Mapping):
                if participant not in masker:
                    raise ValueError(f"No masker for participant {participant}; there are {', '.join(masker)}.")
                masker = masker[participant]
            try:
                check_is_fitted(masker)
            except NotFittedError:
                given = getattr(masker, "mask_img", None) is not None
                masker = clone(masker).fit(None if given else image)
            self._fitted[participant] = masker
        return self._fitted[participant]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, ImageFileError) as error:
        raise ValueError(f"{path} cannot be read: {error}. Is it damaged?") from error


def volume_times(file: "BidsFile", image: Any) -> np.ndarray:
    """Seconds of an image's volumes, (time,).

    Raises
    ------
    ValueError
        When sidecar and header disagree on the repetition time, or neither has it.
    """
    count = image.shape[3]
    start = file.number("StartTime", 0.0)
    if "VolumeTiming" in file.metadata:
        timing = np.asarray(file.metadata["VolumeTiming"], dtype=np.float64)
        if timing.shape != (count,):
            raise ValueError(f"{file.sidecars[-1]}: {timing.size} VolumeTiming for {count} volumes in {file.path}.")
        return start + timing
    zoom = float(image.header.get_zooms()[3])
    header = zoom * UNITS.get(image.header.get_xyzt_units()[1], 0.0)
    if "RepetitionTime" not in file.metadata and header > 0:
        return start + header * np.arange(count)
    step = file.number("RepetitionTime")
    if step <= 0 or (header > 0 and abs(step - header) > 1e-3 * step):
        raise ValueError(
            f"{file.sidecars[-1]}: RepetitionTime is {step:g} s, while the header of {file.path} has {header:g} s. "
            "Correct the one that is wrong."
        )
    return start + step * np.arange(count)


def _names(masker: Any, count: int) -> list[str]:
    """Region names or ids where the masker has distinct ones, else positions."""
    for attribute in ("region_names_", "region_ids_"):
        found = getattr(masker, attribute, None)
        names = [str(name) for name in found.values()] if isinstance(found, Mapping) else []
        if len(set(names)) == count:
            return names
    return [str(index) for index in range(count)]
