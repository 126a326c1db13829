"""Latent paths over time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from msrm.plots.panels import COLOURS, band, label, line_with_support, panel_grid, supported


def latents(
    latent: Any,
    *,
    runs: Sequence[str] | None = None,
    reference: Mapping[str, xr.DataArray] | None = None,
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Draw latent paths over time: a column for each run, a row for each factor.

    Parameters
    ----------
    latent : DataTree by run, Dataset of one run, or Draws
        What ``fit.infer_latent(recording)`` returns: ``mean`` (time, factor), ``supported`` (time,), for a GP
        ``variance`` (time, factor); of draws the latents of their runs, averaged. Where participants have
        their own, ``path`` (time, participant, factor).
    runs : sequence of str, optional
        The runs to draw; all by default.
    reference : {run: DataArray (time, factor)}, optional
        Paths to compare with, dotted, such as a simulation's truth, in the same order and orientation of factors.
    axes : ndarray of Axes, (factor, run), optional
        Where to draw; a new figure by default.

    Returns
    -------
    ndarray of Axes, (factor, run)

    Raises
    ------
    ValueError
        When a run is not in `latent`, or `axes` has the wrong shape.
    """
    if hasattr(latent, "ensemble"):
        latent = latent.infer_latent()
    paths = {"": latent} if isinstance(latent, xr.Dataset) else {n: c.to_dataset() for n, c in latent.children.items()}
    chosen = list(paths) if runs is None else list(runs)
    if unknown := [run for run in chosen if run not in paths]:
        raise ValueError(f"no run {unknown[0]!r} in the latent; it has {', '.join(paths)}")
    count = paths[chosen[0]].sizes["factor"]
    axes = panel_grid(
        axes, (count, len(chosen)), (max(3.6 * len(chosen), 6.5), 1.5 * count + 0.8), sharex="col", sharey=True
    )
    for column, run in enumerate(chosen):
        data = paths[run]
        times = data["time"].values
        for row in range(count):
            axis, colour = axes[row, column], COLOURS[row % len(COLOURS)]
            if "path" in data:
                own = data["path"].transpose("time", "participant", "factor").values[:, :, row]
                axis.plot(times, own, color=colour, lw=0.6, alpha=0.5)
            if "mean" in data:
                path = data["mean"].values[:, row]
                line_with_support(axis, times, path, supported(data), colour)
            if "variance" in data:
                band(axis, times, path, data["variance"].values[:, row], colour)
            if reference is not None and run in reference:
                truth = reference[run]
                axis.plot(truth["time"].values, truth.values[:, row], ":", color="black", lw=1.0, label="reference")
            if column == 0:
                axis.set_ylabel(f"factor {label(data, 'factor', row)}")
        axes[0, column].set_title(run, fontsize="medium")
        axes[-1, column].set_xlabel("time (s)")
    if reference is not None:
        axes[0, -1].legend(frameon=False, fontsize="small", loc="upper right")
    return axes
