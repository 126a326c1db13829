"""Draws on disk as they are made: one file per block, written aside and renamed, and what they belong to.

A folder holds ``identity.json`` (data, settings, versions and device of the run, DESIGN 5) and for each chain a folder
with ``warmup.npz`` (the chain's state during warm-up, replaced at each checkpoint) and ``draws-<first>.npz`` blocks.
Every block carries the state after its last draw, so a chain continues bit for bit from whatever is there: a kill
costs what was made since the last block, a full disk the block that did not fit.
"""

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrm.sealed import replacing

try:
    import fcntl
except ImportError:  # Windows has none, and there nothing keeps two processes apart
    fcntl = None  # type: ignore[assignment]

__all__ = ["ChainStore", "Checkpoint", "DrawStore", "differences", "generator_from_state", "generator_state"]

FLUSH_SECONDS = 20.0  # between blocks of draws
PROGRESS_SECONDS = 1.0  # between a chain's words on how far it is
_RUNNING, _LOCK = "running", "lock"
_PROGRESS = "progress.json"
_FORMAT = 1
_BLOCK_NAME = re.compile(r"draws-(\d{9})\.npz")
Arrays = Mapping[str, NDArray[Any]]


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes; a process that dies lets go of it."""
    with (folder / _LOCK).open("w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RuntimeError(
                    f"another process is sampling into {folder}. Wait for it, or give another path"
                ) from None
        yield


def generator_state(rng: np.random.Generator) -> NDArray[np.uint64]:
    """The state of a PCG64 generator as six integers; `generator_from_state` undoes it."""
    found: Any = rng.bit_generator.state
    if found["bit_generator"] != "PCG64":
        raise TypeError(f"only PCG64 generators are stored, found {found['bit_generator']}")
    words = [part >> shift & 0xFFFFFFFFFFFFFFFF for part in found["state"].values() for shift in (0, 64)]
    return np.array([*words, found["has_uint32"], found["uinteger"]], dtype=np.uint64)


def generator_from_state(words: NDArray[np.uint64]) -> np.random.Generator:
    """The generator that continues where the stored one stood."""
    low, high, inc_low, inc_high, has_uint32, uinteger = (int(word) for word in words)
    generator = np.random.PCG64()
    generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": low | high << 64, "inc": inc_low | inc_high << 64},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
    return np.random.Generator(generator)


@dataclass(frozen=True)
class Checkpoint:
    """Where a chain stands on disk.

    Attributes
    ----------
    warmup : int
        Warm-up sweeps done.
    draws : int
        Draws on disk.
    state : dict of arrays
        All the chain needs to continue, random generator included.
    """

    warmup: int
    draws: int
    state: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class ChainStore:
    """The files of one chain.

    Attributes
    ----------
    folder : Path
    """

    folder: Path

    def checkpoint(self, warmup: int, state: Arrays) -> None:
        """Replace the warm-up state: `warmup` sweeps are done.

        Raises
        ------
        OSError
            When it cannot be written, for instance on a full disk; the earlier one is intact.
        """
        self._write("warmup.npz", warmup, 0, {}, state)

    def append(self, first: int, warmup: int, draws: Arrays, state: Arrays) -> None:
        """Write the draws from number `first` on as one block.

        Parameters
        ----------
        first : int
            Number of draws already on disk.
        warmup : int
            Warm-up sweeps that the chain made.
        draws : dict of (draw, ...)
        state : dict of arrays
            The chain after the last of them.

        Raises
        ------
        OSError
            When it cannot be written, for instance on a full disk; earlier blocks are intact.
        """
        count = len(next(iter(draws.values())))
        self._write(f"draws-{first:09d}.npz", warmup, first + count, draws, state)

    def last(self) -> Checkpoint | None:
        """The last state on disk, or None when the chain has not written one."""
        blocks = self.blocks()
        path = blocks[-1] if blocks else self.folder / "warmup.npz"
        if not path.exists():
            return None
        content = _read(path)
        state = {name.removeprefix("state/"): value for name, value in content.items() if name.startswith("state/")}
        return Checkpoint(int(content["warmup"]), int(content["end"]), state)

    def blocks(self) -> list[Path]:
        """Block files in order of their draws.

        Raises
        ------
        ValueError
            When a block in the middle is missing.
        """
        found = sorted(path for path in self.folder.glob("draws-*.npz") if _BLOCK_NAME.fullmatch(path.name))
        expected = 0
        for path in found:
            if (first := int(path.name[6:15])) != expected:
                raise ValueError(f"{self.folder}: draws {expected} to {first - 1} are missing; restore their file")
            expected = int(_read(path, ("end",))["end"])
        return found

    def read(self, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
        """All draws on disk, {name: (draw, ...)}; of the given names only, when given."""
        wanted = None if names is None else {f"draws/{name}" for name in names}
        parts = [_read(path, wanted) for path in self.blocks()]
        keys = [key for key in (parts[0] if parts else ()) if key.startswith("draws/")]
        return {key.removeprefix("draws/"): np.concatenate([part[key] for part in parts]) for key in keys}

    def tell(self, **counts: int) -> None:
        """Write how far the chain is, by name, for whoever watches."""
        (self.folder / _PROGRESS).write_text(json.dumps(counts))

    def told(self, name: str) -> int:
        """How far the chain said it was; 0 before it has."""
        try:
            return int(json.loads((self.folder / _PROGRESS).read_text())[name])
        except (OSError, ValueError, KeyError):
            return 0

    def _write(self, name: str, warmup: int, end: int, draws: Arrays, state: Arrays) -> None:
        content: dict[str, Any] = {f"draws/{key}": value for key, value in draws.items()}
        content |= {f"state/{key}": value for key, value in state.items()}
        try:
            with replacing(self.folder / name) as aside, aside.open("wb") as file:
                np.savez(file, warmup=warmup, end=end, **content)
        except OSError as error:
            # Blocks are listed by name only: reading them back could fail on the same disk.
            raise OSError(
                error.errno,
                f"cannot write {name} of {self.folder.name} ({os.strerror(error.errno or 0)}); every earlier block is "
                f"safe in {self.folder}. Free space and sample again with resume=True",
            ) from error


@dataclass(frozen=True)
class DrawStore:
    """The folder of a sampling run.

    Attributes
    ----------
    folder : Path
    """

    folder: Path

    @classmethod
    def create(cls, folder: Path, identity: Mapping[str, Any]) -> "DrawStore":
        """Start a run in an empty or new folder.

        Parameters
        ----------
        folder : Path
        identity : dict of dicts
            What the draws belong to: ``data``, ``settings``, ``versions``, ``device``; plain values.

        Raises
        ------
        FileExistsError
            When a run is there already.
        ValueError
            When blocks are there that nothing says what they belong to.
        """
        made = cls(folder)
        made.check_unused()
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(made.record) as aside:
            aside.write_text(json.dumps({"format": _FORMAT, **identity}, indent=1, sort_keys=True))
        return made

    @classmethod
    def resume(cls, folder: Path, identity: Mapping[str, Any]) -> "DrawStore":
        """Continue the run of a folder, which must be of the same identity; start it when there is none.

        Raises
        ------
        ValueError
            When data, settings, versions or device differ; every difference is named.
        """
        made = cls(folder)
        if not made.record.exists():
            return cls.create(folder, identity)
        there = made.identity()
        here = json.loads(json.dumps({"format": _FORMAT, **identity}))
        found = list(differences(there, here, ""))
        if found:
            raise ValueError(
                f"cannot resume {folder}: not the run that started there. Different: {'; '.join(found)}. "
                "Restore these, or sample to another path"
            )
        return made

    @property
    def record(self) -> Path:
        """The file that says what the draws belong to."""
        return self.folder / "identity.json"

    @property
    def is_used(self) -> bool:
        """Whether a run has written here."""
        return self.record.exists() or next(self.folder.glob("chain-*/*.npz"), None) is not None

    def identity(self) -> dict[str, Any]:
        """What the draws belong to.

        Raises
        ------
        ValueError
            When its file is missing or damaged.
        """
        if not self.record.exists():
            raise ValueError(
                f"{self.folder} holds blocks of draws but not {self.record.name}, which says what they belong to: "
                "restore it, give another path, or delete the folder"
            )
        try:
            found: dict[str, Any] = json.loads(self.record.read_text())
        except ValueError as error:
            raise ValueError(
                f"{self.record}: damaged ({error}). Restore it, or delete {self.folder} and sample again"
            ) from error
        return found

    def check_unused(self) -> None:
        """Raise as :meth:`create` when a run is there already."""
        if self.record.exists():
            raise FileExistsError(
                f"{self.folder} holds the draws of an earlier run. Continue it with resume=True, give another path, or "
                "delete the folder"
            )
        if self.is_used:
            self.identity()  # says what is missing

    def chain(self, index: int) -> ChainStore:
        """The files of chain `index`, counted from 0."""
        folder = self.folder / f"chain-{index:02d}"
        folder.mkdir(exist_ok=True)
        return ChainStore(folder)

    def read(self, chains: int) -> dict[str, NDArray[Any]]:
        """All draws on disk, {name: (chain, draw, ...)}, of chains that have equally many."""
        parts = [self.chain(index).read() for index in range(chains)]
        return {name: np.stack([part[name] for part in parts]) for name in parts[0]}

    @property
    def is_running(self) -> bool:
        """Whether chains shall go on: false once :meth:`running` has ended or one of them said :meth:`stop`."""
        return (self.folder / _RUNNING).exists()

    def stop(self) -> None:
        """Tell all chains of the folder to stop."""
        (self.folder / _RUNNING).unlink(missing_ok=True)

    def checkpoints(self) -> list[Checkpoint | None]:
        """The last state of every chain that has a folder."""
        return [ChainStore(folder).last() for folder in sorted(self.folder.glob("chain-*"))]

    def progress(self) -> str | None:
        """What its chains have on disk, in words; None when they have nothing."""
        lasts = [last for last in self.checkpoints() if last is not None]
        if not lasts:
            return None
        counts = sorted(last.draws for last in lasts) if any(last.draws for last in lasts) else []
        what = "draws" if counts else "sweeps of warm-up"
        counts = counts or sorted(last.warmup for last in lasts)
        span = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
        return f"{span} {what} of {len(lasts)} chain{'s' if len(lasts) > 1 else ''}"

    def last_of(self, index: int) -> Checkpoint | None:
        """The last state of a chain, which need not have started."""
        return ChainStore(self.folder / f"chain-{index:02d}").last() if self.folder.exists() else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Chains of the folder run while the block does: they stop, their draws on disk, when its mark is gone.

        A mark that is removed also stops them on a full disk, where none could be made.

        Raises
        ------
        RuntimeError
            When another process has its chains running there.
        """
        with _only_one(self.folder):
            (self.folder / _RUNNING).touch()
            try:
                yield
            finally:
                self.stop()

    def remove(self) -> None:
        """Delete the folder: its draws are archived."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        self.folder.rmdir()


def _read(path: Path, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
    """Arrays of an .npz file, whose zip checksums are verified as they are read."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {name: file[name] for name in file.files if names is None or name in names}
    except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
        raise ValueError(
            f"{path}: damaged ({error}). Restore it, or delete it and all later blocks of its chain, then resume"
        ) from error


def differences(there: Any, here: Any, where: str) -> Iterable[str]:
    """Where two identities differ, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted(there.keys() | here.keys()):
            yield from differences(there.get(key, "nothing"), here.get(key, "nothing"), f"{where}.{key}".lstrip("."))
    elif there != here:
        yield f"{where} ({there} on disk, {here} now)"
