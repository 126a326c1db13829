"""One bar for all chains of a run: sweeps (NUTS: also leapfrogs) per second, time left, effective draws so far.

The effective draws are those of the slowest invariant. Workers write how far they are and their blocks of draws into
the run's folder; a thread of the parent reads them. Off a terminal there is neither bar nor thread.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from msrm.diagnostics import block_statistics
from msrm.gp.storage import DrawStore
from msrm.runtime import progress

__all__ = ["Watch", "slowest"]

_POLL_SECONDS = 0.5
_ESS_SECONDS = 15.0
_FEWEST = 20  # draws of a chain that an effective number is told from


class Watch:
    """A progress bar over the chains of a folder while the block runs.

    Parameters
    ----------
    store : DrawStore
    chains : int
    total : int
        Sweeps of all chains, warm-up included.
    labels : {stored name: names of its entries}
        The invariants whose effective draws are told; each stored as (draw,) or (draw, entry).
    enabled : bool, optional
        As in :func:`msrm.runtime.progress`.
    """

    def __init__(
        self,
        store: DrawStore,
        chains: int,
        total: int,
        labels: Mapping[str, Sequence[str]],
        *,
        enabled: bool | None = None,
    ) -> None:
        self._store, self._chains, self._labels = store, chains, labels
        self._bar = progress(total, desc="sampling", enabled=enabled)
        self._bar.unit = "sweep"
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if not self._bar.disable:
            # What a resumed run has done already tells nothing of its speed.
            self._bar.n = self._bar.initial = self._progress("sweeps")
            self._thread = threading.Thread(target=self._follow, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._bar.close()

    def _follow(self) -> None:
        begun = told = time.monotonic()
        before, ess = self._progress("leapfrogs"), ""
        while not self._ended.wait(_POLL_SECONDS):
            self._bar.n = self._progress("sweeps")
            if time.monotonic() - told > _ESS_SECONDS:
                told = time.monotonic()
                found = slowest(self._store, self._chains, self._labels)
                if found is not None:
                    ess = f"ESS {found[1]:.0f} ({found[0]})"
            leapfrogs = self._progress("leapfrogs") - before
            rate = f"{leapfrogs / (time.monotonic() - begun):.0f} leapfrogs/s" if leapfrogs > 0 else ""
            self._bar.set_postfix_str(", ".join(filter(None, (rate, ess))), refresh=False)
            self._bar.refresh()

    def _progress(self, name: str) -> int:
        return sum(self._store.chain(index).told(name) for index in range(self._chains))


def slowest(store: DrawStore, chains: int, labels: Mapping[str, Sequence[str]]) -> tuple[str, float] | None:
    """Name and bulk ESS so far of the invariant with the fewest effective draws; None while there are too few draws."""
    try:
        parts: list[dict[str, Any]] = [store.chain(index).read(labels) for index in range(chains)]
    except ValueError:
        return None  # a block is just being replaced
    if not all(parts):
        return None
    length = min(len(next(iter(part.values()))) for part in parts)
    if length < _FEWEST:
        return None
    names = [name for key in labels for name in labels[key]]
    columns = [
        np.concatenate([part[key][:length].reshape(length, -1) for key in labels], axis=1, dtype=float)
        for part in parts
    ]
    block = np.moveaxis(np.array(columns), 2, 0)
    moving = np.isfinite(block).all(axis=(1, 2)) & (np.ptp(block, axis=(1, 2)) > 0.0)
    if not moving.any():
        return None
    ess = block_statistics(np.ascontiguousarray(block[moving]))["ess_bulk"]
    least = int(np.argmin(ess))
    return np.array(names)[moving][least], float(ess[least])
