"""What was measured beside what was predicted."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from msrm.plots.panels import COLOURS, GREY, band, broken, line_with_support, panel_grid, supported


def observed_predicted(
    observed: xr.DataArray,
    predicted: xr.Dataset,
    *,
    features: Sequence[Any] | None = None,
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Draw what was measured and what was predicted for one stream, a row for each feature.

    Parameters
    ----------
    observed : DataArray (time, feature)
        For instance ``recording.stream(participant, run, modality).data``.
    predicted : Dataset
        A leaf of what ``fit.predict`` returns: ``mean`` (time, feature), ``supported`` (time,) and for a GP
        ``variance`` (time, feature).
    features : sequence of feature names, optional
        The first four by default.
    axes : ndarray of Axes, optional
        As many as features; a new figure by default.

    Returns
    -------
    ndarray of Axes, (feature,)

    Raises
    ------
    ValueError
        When a feature is not predicted.
    """
    names = [str(name) for name in predicted["feature"].values]
    chosen = names[:4] if features is None else [str(name) for name in features]
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"feature {unknown[0]!r} is not predicted; there are {', '.join(names[:20])}")
    axes = panel_grid(axes, (len(chosen), 1), (7.5, 1.5 * len(chosen) + 0.8), sharex=True).ravel()
    seen, times = supported(predicted), predicted["time"].values
    measured = dict(zip([str(name) for name in observed["feature"].values], observed.values.T, strict=True))
    for axis, name in zip(axes, chosen, strict=True):
        mean = predicted["mean"].values[:, names.index(name)]
        if name in measured:
            style: dict[str, Any] = {"color": GREY, "lw": 0.8, "marker": ".", "ms": 2.5}
            axis.plot(*broken(observed["time"].values, measured[name]), label="observed", **style)
        line_with_support(axis, times, mean, seen, COLOURS[0], label="predicted")
        if "variance" in predicted:
            band(axis, times, mean, predicted["variance"].values[:, names.index(name)], COLOURS[0])
        axis.set_ylabel(f"feature {name}" if name.isdigit() else name)
        if name in measured and np.array_equal(times, observed["time"].values):
            both = seen & np.isfinite(measured[name]) & np.isfinite(mean)
            if both.sum() > 2 and np.ptp(mean[both]) > 0 and np.ptp(measured[name][both]) > 0:
                correlation = np.corrcoef(measured[name][both], mean[both])[0, 1]
                axis.set_title(f"r = {correlation:.2f}", loc="right", fontsize="small", pad=3)
    axes[0].legend(
        frameon=False, fontsize="small", ncols=2, loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2
    )
    axes[-1].set_xlabel("time (s)")
    return axes
