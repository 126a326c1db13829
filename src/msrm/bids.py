"""Recordings from a BIDS folder: physiology, stimulus features, parcel time series and images through a masker.

Owns file names, entities, sidecars (with inheritance) and the reading of tables; images are :mod:`msrm.nifti`.
Every file keeps its own clock: sample i is at ``StartTime + i / SamplingFrequency`` seconds of its run.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from msrm.recording import Recording
from msrm.stream import Stream, make_stream

__all__ = ["bids_streams", "read_bids"]

SUFFIXES = ("physio.tsv.gz", "stim.tsv.gz", "timeseries.tsv", "timeseries.tsv.gz", "bold.nii.gz", "bold.nii")
Labels = str | Sequence[str]


def read_bids(
    root: str | Path,
    *,
    task: str,
    participants: Labels | None = None,
    masker: Any = None,
    confounds: Callable[[Path], Any] | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    **entities: Labels,
) -> Recording:
    """A recording from the files of one task in a BIDS dataset or derivative.

    Reads ``*_physio.tsv.gz`` and ``*_stim.tsv.gz`` (no header row; the sidecar has ``Columns``), parcel series in
    ``*_timeseries.tsv`` (with a header row), and ``*_bold.nii.gz`` when there is a masker. Participants are named by
    their label, runs ``run-1`` (with ``ses-...`` before it unless one session is asked for), modalities by the
    ``recording`` label, or ``bold``, ``physio``, ``stim``, or the ``seg``, ``atlas`` or ``desc`` label of a parcel
    series. Confound tables (``desc-confounds``) are read only when ``desc`` asks for them.

    Parameters
    ----------
    root : path
        The folder with ``sub-*`` in it.
    task : str
        Label of the task.
    participants : str or sequence of str, optional
        Labels, with or without ``sub-``.
    masker : nilearn masker or {participant: masker}, optional
        Turns images into features (extra ``neuro``). One that is not fitted is fitted to each participant's first
        image, so that its runs have the same features.
    confounds : callable, optional
        From the path of an image to what the masker regresses out: a table, or a table and the indices of volumes
        to keep, as ``nilearn.interfaces.fmriprep.load_confounds`` returns. Other volumes become missing rows.
    columns : {modality: names}, optional
        The columns to keep of a table, in this order.
    **entities : str or sequence of str
        Labels that files may carry, such as ``ses="01"``, ``space="MNI152NLin2009cAsym"`` or
        ``recording=["cardiac", "emotion"]``. Files with another label are left out, files without the entity stay.

    Returns
    -------
    Recording

    Raises
    ------
    FileNotFoundError
        When no file fits.
    ImportError
        When a masker is given and the extra ``neuro`` is not installed.
    ValueError
        When a table does not fit its sidecar, holds text, or two files claim one stream; files are named.

    Examples
    --------
    >>> import gzip, json
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as root:
    ...     name = f"{root}/sub-01/func/sub-01_task-film_recording-heart_physio"
    ...     Path(name).parent.mkdir(parents=True)
    ...     _ = Path(f"{name}.tsv.gz").write_bytes(gzip.compress(b"70\\nn/a\\n72\\n"))
    ...     _ = Path(f"{name}.json").write_text(
    ...         json.dumps({"SamplingFrequency": 4, "StartTime": -0.25, "Columns": ["rate"]})
    ...     )
    ...     recording = read_bids(root, task="film")
    >>> recording.stream("01", "run-1", "heart").times.tolist()
    [-0.25, 0.0, 0.25]
    """
    return Recording.from_streams(
        bids_streams(
            root,
            task=task,
            participants=participants,
            masker=masker,
            confounds=confounds,
            columns=columns,
            **entities,
        )
    )


def bids_streams(
    root: str | Path,
    *,
    task: str,
    participants: Labels | None = None,
    masker: Any = None,
    confounds: Callable[[Path], Any] | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    **entities: Labels,
) -> Iterator[Stream]:
    """The streams of :func:`read_bids`, one at a time, to be written by ``RecordingWriter`` without holding all."""
    if confounds is not None and masker is None:
        raise ValueError("confounds are regressed out by a masker; give masker=..., or clean the tables beforehand.")
    if masker is not None and find_spec("nilearn") is None:
        raise ImportError("Reading images needs nilearn, which is not installed. Run: pip install 'msrm[neuro]'")
    files = _chosen(Path(root), task, participants, masker is not None, entities)
    single = isinstance(entities.get("ses"), str)
    names = {file: (file.entities["sub"], file.run(single), file.modality) for file in files}
    _check_distinct(names)
    wanted = dict(columns or {})
    for modality in wanted:
        if modality not in {name[2] for name in names.values()}:
            raise ValueError(f"columns: no modality {modality!r}; there are {_listed(n[2] for n in names.values())}.")
    images: Any = None if masker is None else import_module("msrm.nifti").ImageReader(masker, confounds)
    for file, (participant, run, modality) in names.items():
        if file.is_image:
            yield make_stream(participant, run, modality, images.read(file, participant))
        else:
            yield make_stream(participant, run, modality, _read_table(file, wanted.get(modality)))


@dataclass(frozen=True, eq=False)
class BidsFile:
    """One data file: its entities from its name, its metadata from all sidecars that apply to it."""

    path: Path
    root: Path

    @cached_property
    def entities(self) -> dict[str, str]:
        """Label by entity."""
        return _entities(self.path.name)

    @cached_property
    def suffix(self) -> str:
        """What stands between the last entity and the extension."""
        return self.path.name.split(".", 1)[0].rsplit("_", 1)[-1]

    @property
    def is_image(self) -> bool:
        """Whether a masker is needed."""
        return self.suffix == "bold"

    @property
    def modality(self) -> str:
        """The recording's name for what the file holds."""
        kinds = ("recording",) if self.suffix != "timeseries" else ("recording", "seg", "atlas", "desc")
        return next((self.entities[kind] for kind in kinds if kind in self.entities), self.suffix)

    def run(self, single_session: bool) -> str:
        """The recording's name for the run."""
        kinds = ("run",) if single_session else ("ses", "run")
        return "_".join(f"{kind}-{self.entities[kind]}" for kind in kinds if kind in self.entities) or "run-1"

    @cached_property
    def sidecars(self) -> list[Path]:
        """JSON files that apply, from the general to the particular (BIDS inheritance)."""
        folders = [self.root, *reversed([p for p in self.path.parents if self.root in p.parents])]
        found = []
        for folder in folders:
            own = [
                path
                for path in folder.glob(f"*{self.suffix}.json")
                if path.stem.rsplit("_", 1)[-1] == self.suffix and _entities(path.name).items() <= self.entities.items()
            ]
            found += sorted(own, key=lambda path: len(_entities(path.name)))
        return found

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What the sidecars say together."""
        merged: dict[str, Any] = {}
        for path in self.sidecars:
            try:
                content = json.loads(path.read_text(encoding="utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{path} is not valid JSON: {error}") from error
            merged |= content
        return merged

    def number(self, key: str, default: float | None = None) -> float:
        """A number of the sidecars."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
            where = self.sidecars[-1] if self.sidecars else f"{self.path} has no sidecar (.json) and"
            raise ValueError(f"{where}: {key} is {value!r}; {self.path.name} needs a number there.")
        return float(value)


def _entities(name: str) -> dict[str, str]:
    return dict(re.findall(r"(?:^|_)([a-zA-Z]+)-([^_.]+)", name.split(".", 1)[0]))


def _chosen(
    root: Path, task: str, participants: Labels | None, images: bool, entities: Mapping[str, Labels]
) -> list[BidsFile]:
    """The files to read, ordered by participant and name."""
    if not root.is_dir():
        raise FileNotFoundError(f"There is no folder {root}.")
    kinds = [suffix for suffix in SUFFIXES if images or not suffix.startswith("bold")]
    everything = [BidsFile(path, root) for kind in kinds for path in sorted(root.glob(f"sub-*/**/*_{kind}"))]
    of_task = [file for file in everything if file.entities.get("task") == task]
    if not of_task:
        tasks = _listed(file.entities["task"] for file in everything if "task" in file.entities)
        also = "" if images else " Images are read when there is a masker."
        raise FileNotFoundError(f"{root}: no file of task {task!r} in sub-*; tasks with data are {tasks}.{also}")
    filters = {kind: {labels} if isinstance(labels, str) else set(labels) for kind, labels in entities.items()}
    if participants is not None:
        chosen = [participants] if isinstance(participants, str) else participants
        filters["sub"] = {name.removeprefix("sub-") for name in chosen}
    for kind, labels in filters.items():
        carried = {file.entities[kind] for file in of_task if kind in file.entities}
        if lacking := sorted(labels - carried):
            raise ValueError(f"{root}: no file of task {task!r} has {kind}-{lacking[0]}; there are {_listed(carried)}.")
    kept = [file for file in of_task if all(file.entities.get(k) in {None, *v} for k, v in filters.items())]
    if "confounds" not in filters.get("desc", ()):
        kept = [file for file in kept if (file.suffix, file.entities.get("desc")) != ("timeseries", "confounds")]
    if not kept:
        raise FileNotFoundError(f"{root}: no file of task {task!r} has all of {filters}.")
    return sorted(kept, key=lambda file: str(file.path))


def _check_distinct(names: Mapping[BidsFile, tuple[str, str, str]]) -> None:
    seen: dict[tuple[str, str, str], BidsFile] = {}
    for file, name in names.items():
        if name in seen:
            differing = sorted(dict(seen[name].entities.items() ^ file.entities.items()))
            how = f"Choose by {', '.join(f'{kind}=...' for kind in differing)}." if differing else "Remove one."
            raise ValueError(f"{seen[name].path} and {file.path} are both {name[2]!r} of {name[0]} in {name[1]}. {how}")
        seen[name] = file


def _read_table(file: BidsFile, columns: Sequence[str] | None) -> xr.DataArray:
    """A table (time, feature) on its own clock."""
    opened: Any = gzip.open if file.path.suffix == ".gz" else open
    try:
        with opened(file.path, "rt", encoding="utf-8-sig") as stream:
            lines = stream.read().splitlines()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"{file.path} cannot be read: {error}. Is it damaged, or not compressed?") from error
    if file.suffix == "timeseries":
        header = lines.pop(0).split("\t") if lines else []
        source = f"its header row has {len(header)}"
    else:
        header = file.metadata.get("Columns", [])
        if not isinstance(header, list) or not header:
            where = file.sidecars[-1] if file.sidecars else "a sidecar (.json), which is missing,"
            raise ValueError(f"{file.path}: {where} must name its 'Columns'; such files have no header row.")
        source = f"{file.sidecars[-1]} names {len(header)} Columns"
    if not lines:
        raise ValueError(f"{file.path} has no rows.")
    for row, line in enumerate(lines):
        if not line or line.count("\t") + 1 != len(header):
            found = len(line.split("\t")) if line else 0
            raise ValueError(
                f"{file.path}: row {row} has {found} columns and {source}. Correct the table or the names."
            )
    names = [str(name) for name in header]
    for name in columns or ():
        if name not in names:
            raise ValueError(f"{file.path}: no column {name!r}; there are {_listed(names)}.")
    kept = names if columns is None else list(columns)
    values = _numbers(file.path, lines, {name: names.index(name) for name in kept})
    seconds: np.ndarray
    if file.suffix != "timeseries" or "SamplingFrequency" in file.metadata:
        seconds = np.arange(len(lines)) / _positive(file, "SamplingFrequency")
    else:
        seconds = np.arange(len(lines)) * _positive(file, "RepetitionTime")
    start = file.number("StartTime", 0.0 if file.suffix == "timeseries" else None)
    return xr.DataArray(values, {"time": start + seconds, "feature": kept}, ("time", "feature"))


def _positive(file: BidsFile, key: str) -> float:
    number = file.number(key)
    if number <= 0:
        raise ValueError(f"{file.sidecars[-1]}: {key} is {number}; {file.path.name} needs a positive number there.")
    return number


def _numbers(path: Path, lines: list[str], columns: Mapping[str, int]) -> np.ndarray:
    """The cells of the given columns, every line a row and n/a as NaN."""
    text = re.sub(r"(?m)(?:(?<=\t)|^)n/a(?=\t|$)", "nan", "\n".join(lines))
    try:
        return np.loadtxt(io.StringIO(text), delimiter="\t", comments=None, ndmin=2, usecols=list(columns.values()))
    except ValueError as error:
        for row, line in enumerate(lines):
            cells = line.split("\t")
            for name, column in columns.items():
                if cells[column] != "n/a" and not _is_number(cells[column]):
                    raise ValueError(
                        f"{path}: row {row} of column {name!r} is {cells[column]!r}; wanted a number or n/a. "
                        "Mend the table, or leave the column out with columns={modality: names}."
                    ) from None
        raise ValueError(f"{path} cannot be read: {error}") from error


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(set(names))) or "none"
