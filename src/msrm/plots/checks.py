"""Replicated data against the data: where each statistic lies among its replicates."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from msrm.plots.panels import COLOURS, GREY, panel_grid

__all__ = ["predictive_check"]


def predictive_check(
    check: xr.Dataset,
    *,
    streams: Sequence[str] | None = None,
    statistics: Sequence[str] | None = None,
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Draw replicates (5 to 95 %, median) and the observed value of each statistic, a row for each stream and run.

    Parameters
    ----------
    check : Dataset
        Of ``draws.predictive_check(recording)``.
    streams : sequence of "participant/run/modality", optional
        All by default.
    statistics : sequence of str, optional
        All by default.
    axes : ndarray of Axes, optional
        As many as statistics; a new figure by default.

    Returns
    -------
    ndarray of Axes, (statistic,)
        A filled mark lies inside the interval, an open one outside.

    Raises
    ------
    ValueError
        For a stream or statistic that was not checked.
    """
    names = [str(name) for name in check["stream_run"].values]
    known = [str(name) for name in check["statistic"].values]
    rows, columns = list(streams or names), list(statistics or known)
    for wanted, there, what in ((rows, names, "stream"), (columns, known, "statistic")):
        if unknown := [name for name in wanted if name not in there]:
            raise ValueError(f"{what} {unknown[0]!r} was not checked; there are {', '.join(there[:20])}")
    size = (2.3 * len(columns) + 1.2, 0.32 * len(rows) + 1.1)
    axes = panel_grid(axes, (len(columns),), size, sharey=True)
    places = np.arange(len(rows))
    for axis, column in zip(axes, columns, strict=True):
        own = check.sel(stream_run=rows, statistic=column)
        low, middle, high = np.quantile(own["replicated"].values, (0.05, 0.5, 0.95), axis=0)
        axis.hlines(places, low, high, color=COLOURS[0], lw=3.0, alpha=0.4)
        axis.plot(middle, places, "|", color=COLOURS[0], ms=8)
        observed = own["observed"].values
        inside = (observed >= low) & (observed <= high)
        axis.plot(observed[inside], places[inside], "o", color="black", ms=4)
        axis.plot(observed[~inside], places[~inside], "o", color=COLOURS[1], mfc="white", ms=5)
        axis.set_title(column, fontsize="medium")
        axis.grid(axis="y", color=GREY, lw=0.3, alpha=0.5)
    axes[0].set_yticks(places, rows)
    axes[0].invert_yaxis()
    return axes
