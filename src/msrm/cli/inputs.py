"""What commands are given, checked and opened: recordings, settings, targets, times, and where to write."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msrm import archive
from msrm.bids import read_bids
from msrm.cli.settings import estimator_of, read_settings
from msrm.gp.storage import DrawStore
from msrm.recording import Recording, open_recording
from msrm.runtime import guard
from msrm.sealed import target_of

__all__ = ["check_out", "open_any", "open_fitted", "regular_times", "targets_of", "training_of", "unfitted"]


def check_out(out: Path, *inputs: Path | None) -> None:
    """Refuse, before any work, to write over what is read or where nothing can be written."""
    target = target_of(out)
    for given in inputs:
        if given is not None and target == Path(given).resolve():
            raise ValueError(f"{out} is an input; give OUT another name")


def unfitted(
    config: Path | None,
    assignments: Sequence[str] | None,
    flags: Mapping[str, Any],
    path: Path,
    selection: Mapping[str, Any],
) -> tuple[Any, Recording]:
    """The estimator of settings, and the part of a recording that they and the options name."""
    settings, part = read_settings(config, assignments, flags)
    made = estimator_of(settings), open_any(path, {**part, **selection})
    guard()
    return made


def open_any(path: Path | None, selection: Mapping[str, Any]) -> Recording:
    """The recording of a .nc file or, with a task, of a BIDS folder; the part of it that `selection` names.

    Raises
    ------
    FileNotFoundError, ValueError
        When nothing is there, a folder has no task, or a name is not in the recording.
    """
    if path is None or not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    names = ("participants", "runs", "modalities")
    part = {name: value for name, value in selection.items() if name in names and value is not None}
    rest = {name: value for name, value in selection.items() if name not in names}
    if path.is_dir():
        if "task" not in rest:
            raise ValueError(f"{path} is a folder: name the BIDS task to read with --task")
        recording = read_bids(path, **rest)
    elif rest:
        raise ValueError(f"{path} is no BIDS folder: {next(iter(rest))!r} cannot be chosen in it")
    else:
        recording = open_recording(path)
    return recording.select(**part) if part else recording


def targets_of(given: Sequence[str] | None) -> dict[str, list[str]] | None:
    """{participant: [modality]} of PARTICIPANT/MODALITY words."""
    if not given:
        return None
    targets: dict[str, list[str]] = {}
    for word in given:
        participant, slash, modality = word.partition("/")
        if not slash or not participant or not modality:
            raise ValueError(f"--target {word}: wanted PARTICIPANT/MODALITY, such as p1/rating")
        targets.setdefault(participant, []).append(modality)
    return targets


def open_fitted(path: Path) -> Any:
    """The fit or the draws of an archive.

    Raises
    ------
    IsADirectoryError, FileNotFoundError, ValueError
        For anything else; of blocks of draws, how they become an archive.
    """
    if DrawStore(path).is_used:
        raise IsADirectoryError(
            f"{path} holds blocks of draws, not an archive of them; `msrm info {path}` says how to go on"
        )
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name an archive made by msrm fit or msrm sample")
    return archive.open_fit(path)


def training_of(fitted: Any, made: Mapping[str, Any]) -> Recording:
    """The recording that a fit was made from, recognized by its digest."""
    if made["training"] is None:
        raise ValueError(
            "--fit needs --training, the recording that the fit was made from; the baselines learn from it"
        )
    pairs = [
        name.split("/")[1:] for name in getattr(fitted, "model", fitted).parameters_ if name.startswith("loading/")
    ]
    people, modalities = (list(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    whole = open_any(made["training"], {"runs": made["runs"]} if made["runs"] else {})
    known = set(people) <= set(whole.participants) and set(modalities) <= set(whole.modalities)
    training = whole.select(participants=people, modalities=modalities) if known else whole
    if training.digest() != fitted.recording_digest_:
        raise ValueError(
            f"{made['training']} is not what {made['path']} was fitted to (runs {', '.join(training.runs)}); "
            "name its runs with --training-run"
        )
    return training


def regular_times(recording: Recording, every: float) -> dict[str, np.ndarray]:
    """{run: times} every so many seconds over what was recorded."""
    if not every > 0:
        raise ValueError(f"--every must be above 0 seconds, found {every:g}")
    spans = {r: [s.times for s in recording.streams(run=r)] for r in recording.runs}
    limits = {r: (min(t[0] for t in times), max(t[-1] for t in times)) for r, times in spans.items()}
    return {
        r: low + every * np.arange(math.floor((high - low) / every + 1e-9) + 1) for r, (low, high) in limits.items()
    }
