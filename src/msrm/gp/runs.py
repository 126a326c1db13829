"""Independent posteriors of the parts of a recording: each fitted and sampled in its own process (DESIGN 8).

A group's process gets one BLAS thread (and one GPU, where devices are named), writes blocks while it samples and one
archive at its end. What a group is bound to (data, model, sampling settings, seed, version) is stored with it, so that
finished archives are kept and unfinished ones go on, and longer where their blocks were kept; a group that fails, even
by a crash, costs no other. A process is sent its own part of the recording, or where that lies on disk.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import xarray as xr

from msrm import __version__
from msrm.asking import takes_recording
from msrm.evaluation.holdout import make_folds
from msrm.evaluation.report import clone
from msrm.gp.draws import Draws
from msrm.gp.estimator import GPMSRM
from msrm.gp.run_draws import RunDraws
from msrm.gp.sampling import checked_options, sample
from msrm.gp.storage import differences
from msrm.gp.tree import model_arguments
from msrm.recording import Recording
from msrm.runtime import blas_threads
from msrm.runtime import progress as progress_bar
from msrm.runtime.warn import visible_gpus
from msrm.runtime.workers import accept_interrupts, clean_start, worker_count
from msrm.sealed import replacing

__all__ = ["BY", "RunDraws", "sample_runs"]

BY = ("run", "participant", "fold")
_TOLD = ("mean", "sd", "q5", "median", "q95", "ess_bulk", "r_hat")
_PER_CHANNEL = ("offset[", "loading_norm2[")  # too many for a table of groups
_STOP_SECONDS = 20.0


@dataclass(frozen=True, eq=False)
class _Group:
    """One posterior to sample: its data, where it goes and what it is bound to."""

    name: str
    recording: Recording
    estimator: Any
    sampling: dict[str, Any]
    folder: Path
    keep_blocks: bool = False

    @property
    def stem(self) -> Path:
        escaped = quote(self.name, safe=" +=,@")
        return self.folder / ("%2E" + escaped[1:] if escaped.startswith(".") else escaped)

    @property
    def archive(self) -> Path:
        return self.stem.with_name(self.stem.name + ".nc")

    @property
    def blocks(self) -> Path:
        return self.stem.with_name(self.stem.name + ".blocks")

    @property
    def report(self) -> Path:
        return self.stem.with_name(self.stem.name + ".json")

    def identity(self) -> dict[str, Any]:
        """What the group's draws belong to, plain; the seed follows from it."""
        bound = {
            "group": self.name,
            "data": self.recording.digest(),
            "model": model_arguments(self.estimator),
            "sampling": self.sampling,
            "version": __version__,
        }
        return json.loads(json.dumps(bound, default=np.ndarray.tolist))

    def seed(self) -> int:
        """From the identity apart from the number of draws, so that a run may be extended."""
        bound = self.identity()
        bound["sampling"].pop("draws")
        digest = hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


@takes_recording
def sample_runs(
    recording: Recording,
    estimator: Any,
    *,
    path: str | Path,
    by: str = "run",
    n_jobs: int = 1,
    devices: Sequence[int] | None = None,
    resume: bool = False,
    keep_blocks: bool = False,
    sampler: str = "gibbs",
    chains: int = 4,
    warmup: int = 1000,
    draws: int = 1000,
    seed: int = 0,
    progress: bool | None = None,
    **settings: Any,
) -> RunDraws:
    """Fit and sample every run, participant or fold of a recording on its own.

    Parameters
    ----------
    recording : Recording
    estimator : GPMSRM
        Left as it is; every group fits a copy.
    path : path-like
        A folder for the archives (``GROUP.nc``) and, while groups are sampled, their blocks.
    by : {"run", "participant", "fold"}
        One posterior for each run, for each participant, or with each run left out in turn.
    n_jobs : int
        Groups at a time, each in a process with one BLAS thread; -1 for every core that this process may use. Chains of
        a group run one after the other.
    devices : sequence of int, optional
        CUDA devices, counted among those that this process sees: one process at a time on each, which sees no other
        (CUDA_VISIBLE_DEVICES); `n_jobs` is then their number.
    resume : bool
        Keep finished archives that belong to the same data and settings, and go on with the others. Archives of fewer
        `draws` are extended where their blocks were kept.
    keep_blocks : bool
        Leave the blocks of draws beside every archive, about as large again, so that it can be extended.
    sampler, chains, warmup, draws
        As in :meth:`msrm.GPMSRM.sample`.
    seed : int
        Together with a group's data and settings it gives the group's own seed.
    progress : bool, optional
        A bar over groups; by default on a terminal only.
    **settings
        Of the sampler, as in :meth:`msrm.GPMSRM.sample`.

    Returns
    -------
    RunDraws
        Archives by group, and a table of verdicts. A group that failed is in it by name, with what went wrong.

    Raises
    ------
    FileExistsError
        When the folder holds archives of these groups and `resume` is not set.
    TypeError
        For an estimator that is no GPMSRM, or a setting that the sampler does not have.
    RuntimeError
        For `devices` where no card is visible.
    ValueError
        For another `by`, a sampler or counts that cannot be, devices that are not there, a fold of the only run,
        archives in the folder that belong to other data or settings (every difference named), or that have more
        `draws`, or fewer and no blocks to extend.
    KeyboardInterrupt
        On Ctrl-C; finished archives and blocks stay, `resume` goes on.
    """
    if by not in BY:
        raise ValueError(f"by must be one of {', '.join(map(repr, BY))}, found {by!r}.")
    if not isinstance(estimator, GPMSRM):
        raise TypeError(
            f"sample_runs takes a GPMSRM, got {type(estimator).__name__}, which has no posterior to sample."
        )
    cards = _cards(devices)
    folder = Path(path)
    counts = {"chains": chains, "warmup": warmup, "draws": draws, "seed": seed}
    checked_options(sampler, counts, settings, path=None, resume=False)
    sampling = {"sampler": sampler, **counts, **settings}
    groups = [
        _Group(name, part, estimator, sampling, folder, keep_blocks) for name, part in _parts(recording, by).items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [group for group in groups if not _is_finished(group, resume=resume)]
    slots: Sequence[str | None] = cards or [None] * worker_count(n_jobs, len(groups))
    problems = _run(waiting, slots, progress)
    return _collected(groups, problems)


def _cards(devices: Sequence[int] | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the devices; refuses those that this process was not given.

    What was asked for a card runs neither on the CPU nor on somebody else's card.
    """
    if devices is None:
        return []
    if isinstance(devices, str) or not isinstance(devices, Sequence) or any(type(one) is not int for one in devices):
        raise TypeError(f"devices takes a list of numbers of cards, such as [0, 1], found {devices!r}.")
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices={list(devices)} names a card twice; each runs one process at a time.")
    found = visible_gpus()
    if not found:
        raise RuntimeError(
            f"devices={list(devices)}: no NVIDIA card is visible to this process. Look at: nvidia-smi, "
            "CUDA_VISIBLE_DEVICES, JAX_PLATFORMS; without devices groups run on the CPU."
        )
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(len(found))] if given is None else [name.strip() for name in given.split(",")]
    if not devices or not set(devices) <= set(range(len(names))):
        raise ValueError(f"devices must be some of 0 to {len(names) - 1}, found {list(devices)}.")
    return [names[device] for device in devices]


def _parts(recording: Recording, by: str) -> dict[str, Recording]:
    if by == "run":
        return {run: recording.select(runs=[run]) for run in recording.runs}
    if by == "participant":
        return {person: recording.select(participants=[person]) for person in recording.participants}
    if len(recording.runs) < 2:
        raise ValueError(
            f"by='fold' leaves out one run in turn and needs at least 2, found {', '.join(recording.runs)}."
        )
    return {f"without {fold.name}": fold.training(recording) for fold in make_folds(recording, "runs")}


def _is_finished(group: _Group, *, resume: bool) -> bool:
    """Whether a group's archive and report are there, and its own."""
    if not (group.archive.exists() and group.report.exists()):
        return False
    if not resume:
        raise FileExistsError(
            f"{group.archive} is there already; keep finished groups with resume=True, or give another path."
        )
    report, now = json.loads(group.report.read_text()), group.identity()
    has, asked = report["identity"]["sampling"].pop("draws"), now["sampling"].pop("draws")
    if found := list(differences(report["identity"], now, "")):
        raise ValueError(
            f"{group.archive} belongs to another run. Different: {'; '.join(found)}. Restore these, or give another "
            "path."
        )
    if report.get("problem"):
        return False
    if has > asked:
        raise ValueError(
            f"{group.archive} has {has} draws of a chain, more than draws={asked}; ask for at least as many."
        )
    if has < asked and not group.blocks.exists():
        raise ValueError(
            f"{group.archive} has {has} draws of a chain, draws={asked} are asked, and the blocks that it could go on "
            f"from were not kept. Keep draws={has}, or give another path, with keep_blocks=True to extend it later."
        )
    return has == asked


def _run(waiting: list[_Group], slots: Sequence[str | None], progress: bool | None) -> dict[str, str]:
    """Run every group in a process of its own, as many at a time as there are slots; problems by group."""
    context, problems, free = multiprocessing.get_context("spawn"), {}, list(slots)
    running: dict[int, tuple[Any, _Group, str | None]] = {}
    left = list(waiting)
    with progress_bar(len(waiting), desc="posteriors", enabled=progress) as bar:
        try:
            while left or running:
                while left and free:
                    device, group = free.pop(0), left.pop(0)
                    group.report.unlink(missing_ok=True)
                    process = context.Process(target=_sampled, args=(group,))
                    with clean_start(), _visible(device):
                        process.start()
                    running[process.sentinel] = process, group, device
                for sentinel in wait(list(running)):
                    process, group, device = running.pop(sentinel)  # type: ignore[arg-type]
                    process.join()
                    free.append(device)
                    bar.update()
                    problem = _problem(process.exitcode, group)
                    if problem:
                        problems[group.name] = problem
        except BaseException:
            deadline = time.monotonic() + _STOP_SECONDS
            for process, _, _ in running.values():
                # On a terminal they got the interrupt too and are writing their last block.
                process.join(max(0.0, deadline - time.monotonic()))
                process.terminate()
            raise
    return problems


class _visible:
    """CUDA_VISIBLE_DEVICES for processes started in the block."""

    def __init__(self, device: str | None) -> None:
        self.device, self.before = device, os.environ.get("CUDA_VISIBLE_DEVICES")

    def __enter__(self) -> None:
        if self.device is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.device

    def __exit__(self, *_: object) -> None:
        if self.device is not None:
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            if self.before is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = self.before


def _problem(code: int | None, group: _Group) -> str:
    """What went wrong with a group whose process ended; empty if nothing."""
    if code == 0 and group.report.exists():
        return str(json.loads(group.report.read_text()).get("problem", ""))
    return f"its process ended with exit code {code}" + (" (killed: out of memory?)" if code == -9 else "")


def _sampled(group: _Group) -> None:
    """Fit, sample, save and report one group; in a process of its own."""
    accept_interrupts()
    start = time.perf_counter()
    report: dict[str, Any] = {"identity": group.identity()}
    with warnings.catch_warnings(record=True) as said, blas_threads(1):
        warnings.simplefilter("always")
        try:
            fitted = clone(group.estimator).fit(group.recording)
            options = {**group.sampling, "seed": group.seed(), "path": group.blocks}
            resumed = (group.blocks / "identity.json").exists()
            draws = sample(fitted, group.recording, resume=resumed, n_jobs=1, progress=False, **options)
            draws.tree.attrs["group"] = group.name
            draws.save(group.archive)
            report |= _summarized(draws)
        except KeyboardInterrupt:
            return
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            report["problem"] = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    report["warnings"] = [str(one.message) for one in said]
    report["seconds"] = time.perf_counter() - start
    with replacing(group.report) as aside:
        aside.write_text(json.dumps(report))
    if "problem" not in report and not group.keep_blocks:
        shutil.rmtree(group.blocks)


def _summarized(draws: Draws) -> dict[str, Any]:
    found = draws.summary(n_jobs=1)
    table = found.table
    least = np.minimum(table["ess_bulk"].values, table["ess_tail"].values)
    names = [str(name) for name in table["quantity"].values]
    kept = [i for i, name in enumerate(names) if not name.startswith(_PER_CHANNEL)]
    return {
        "converged": found.converged,
        "verdict": found.verdict,
        "r_hat": float(table["r_hat"].max()),
        "ess": float(least.min()),
        "slowest": names[int(least.argmin())],
        "quantities": {names[i]: [float(table[key][i]) for key in _TOLD] for i in kept},
    }


def _collected(groups: list[_Group], problems: dict[str, str]) -> RunDraws:
    """Reports of all groups as tables."""
    reports = []
    for group in groups:
        own = json.loads(group.report.read_text()) if group.name not in problems else {}
        reports.append({"problem": problems.get(group.name, ""), **own})
    columns: dict[str, tuple[type, Any]] = {
        "converged": (bool, False),
        "r_hat": (float, np.nan),
        "ess": (float, np.nan),
        "seconds": (float, np.nan),
        "slowest": (str, ""),
        "verdict": (str, ""),
        "problem": (str, ""),
    }
    names = [group.name for group in groups]
    table = xr.Dataset(
        {
            key: ("group", np.array([report.get(key, missing) for report in reports], dtype=kind))
            for key, (kind, missing) in columns.items()
        }
        | {"archive": ("group", [str(group.archive) for group in groups])},
        {"group": names},
    )
    told = list(dict.fromkeys(name for report in reports for name in report.get("quantities", {})))
    nothing = [np.nan] * len(_TOLD)
    values = np.array([[report.get("quantities", {}).get(name, nothing) for name in told] for report in reports])
    values = values.reshape(len(groups), len(told), len(_TOLD))
    quantities = xr.Dataset(
        {key: (("group", "quantity"), values[..., i]) for i, key in enumerate(_TOLD)},
        {"group": names, "quantity": told},
    )
    return RunDraws(table, quantities)
