"""Intervals of one quantity over groups: runs, participants or folds sampled on their own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from msrm.plots.panels import COLOURS, GREY, panel_grid

__all__ = ["forest"]

_MOST = 6


def forest(runs: Any, quantities: Sequence[str] | None = None, *, axes: np.ndarray | None = None) -> np.ndarray:
    """Draw median and central 90 % interval of quantities for every group, a panel for each quantity.

    Parameters
    ----------
    runs : RunDraws, or Dataset by group and quantity with `q5`, `median`, `q95`
        What ``msrm.sample_runs`` returns. Groups whose R-hat exceeds 1.01 are drawn open.
    quantities : sequence of str, optional
        As in a summary, such as ``"response[rating/lag]"``; by default the first 6.
    axes : ndarray of Axes, optional
        As many as quantities; a new figure by default.

    Returns
    -------
    ndarray of Axes, (quantity,)

    Raises
    ------
    ValueError
        For a quantity that is not there.
    TypeError
        For anything else than groups, such as the draws of one.
    """
    table = getattr(runs, "quantities", runs)
    if not isinstance(table, xr.Dataset):
        raise TypeError(
            f"forest compares the groups of msrm.sample_runs, found {type(runs).__name__}; for the draws of one fit "
            "use plots.traces, or their summary()"
        )
    known = [str(name) for name in table["quantity"].values]
    chosen = known[:_MOST] if quantities is None else list(quantities)
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"no quantity {unknown[0]!r}; there are {', '.join(known[:20])}")
    groups = [str(name) for name in table["group"].values]
    places = np.arange(len(groups))
    axes = panel_grid(axes, (len(chosen),), (2.3 * len(chosen) + 1.0, 0.32 * len(groups) + 1.1), sharey=True)
    for axis, name in zip(axes, chosen, strict=True):
        own = table.sel(quantity=name)
        axis.hlines(places, own["q5"], own["q95"], color=COLOURS[0], lw=2.0)
        agreed = ~(own["r_hat"].values > 1.01)
        for marked, face in ((agreed, COLOURS[0]), (~agreed, "white")):
            axis.plot(own["median"].values[marked], places[marked], "o", color=COLOURS[0], mfc=face, ms=5)
        axis.set_title(name, fontsize="small")
        axis.grid(axis="y", color=GREY, lw=0.3, alpha=0.5)
    axes[0].set_yticks(places, groups)
    axes[0].invert_yaxis()
    return axes
