"""What all pictures share: panels, colours, lines with their data support, bands.

Shaded grey is where no data supports a value; bands are plus or minus two standard deviations. Colours are those of
Okabe and Ito, told apart with any colour vision.
"""

from typing import Any

import numpy as np
import xarray as xr

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
except ImportError as error:  # pragma: no cover - tested in a child process
    raise ImportError("msrm.plots needs matplotlib, which is not installed. Run: pip install 'msrm[plots]'") from error

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#8a8a8a"


def panel_grid(axes: Any, shape: tuple[int, ...], size: tuple[float, float], **sharing: Any) -> np.ndarray:
    """The given axes, checked, or those of a new figure, of the given shape."""
    if axes is None:
        rows, columns = (1, *shape)[-2:]
        _, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **sharing)
    panels = np.asarray(axes, dtype=object)
    if panels.size != int(np.prod(shape)):
        raise ValueError(f"needs {int(np.prod(shape))} axes of shape {shape}, found {panels.size}")
    for axis in panels.flat:
        bare(axis)
    return panels.reshape(shape)


def bare(axis: Axes) -> None:
    """Take away what carries no information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize="small")


def supported(data: xr.Dataset) -> np.ndarray:
    """(time,) bool: where data supports the mean; everywhere when not told."""
    return data["supported"].values.astype(bool) if "supported" in data else np.ones(data.sizes["time"], dtype=bool)


def line_with_support(
    axis: Axes, times: np.ndarray, path: np.ndarray, seen: np.ndarray, colour: str, **named: Any
) -> None:
    """A full line where data supports it; elsewhere thin and dashed on grey."""
    axis.plot(*broken(times, np.where(seen, path, np.nan)), color=colour, lw=1.4, **named)
    if seen.all():
        return
    # The thin line is carried one point into the supported part so that no gap shows.
    edge = ~seen | ~np.r_[seen[1:], True] | ~np.r_[True, seen[:-1]]
    axis.plot(*broken(times, np.where(edge, path, np.nan)), color=colour, lw=0.8, ls=(0, (4, 2)), alpha=0.8)
    starts = np.flatnonzero(~seen & np.r_[True, seen[:-1]])
    stops = np.flatnonzero(~seen & np.r_[seen[1:], True])
    half = 0.5 * float(np.median(np.diff(times))) if times.size > 1 else 0.0
    for start, stop in zip(starts, stops, strict=True):
        axis.axvspan(times[start] - half, times[stop] + half, color="0.9", lw=0, zorder=-1)


def band(axis: Axes, times: np.ndarray, mean: np.ndarray, variance: np.ndarray, colour: str) -> None:
    """Plus and minus two standard deviations."""
    width = 2.0 * np.sqrt(variance)
    clock, lower = broken(times, mean - width)
    axis.fill_between(clock, lower, broken(times, mean + width)[1], color=colour, alpha=0.2, lw=0)


def broken(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times and values with NaN inside every gap of more than twice the usual interval, where no line is drawn."""
    gaps = np.diff(times)
    places = np.flatnonzero(gaps > 2.5 * np.median(gaps)) + 1 if times.size > 2 else np.empty(0, dtype=int)
    return np.insert(times, places, times[places - 1]), np.insert(np.asarray(values, dtype=float), places, np.nan)


def label(data: Any, dimension: str, index: int) -> str:
    """A coordinate's label, or the position counted from 1."""
    if dimension in getattr(data, "coords", {}):
        return str(data[dimension].values[index])
    return str(index + 1)
