"""How the starts of a fit converged."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from msrm.plots.panels import COLOURS, GREY, bare, plt


def convergence(objectives: Any, *, axes: Axes | None = None) -> Axes:
    """Draw how far each start's objective lies above the best one found, over its iterations.

    Parameters
    ----------
    objectives : fitted model, or sequence of (iteration,) arrays, one for each start
        Of a model, the ``objectives`` of each of ``starts_``, or ``history_`` where only the best start is kept.
    axes : Axes, optional
        Where to draw; a new figure by default.

    Returns
    -------
    Axes

    Raises
    ------
    TypeError
        For draws, whose chains are judged otherwise.
    """
    if hasattr(objectives, "ensemble"):
        raise TypeError(
            "convergence shows the search of a fit; for draws use plots.traces, plots.ranks or their summary(), and "
            "for the search that they started from draws.model"
        )
    if hasattr(objectives, "history_"):
        objectives = [objectives.history_]
    starts = objectives.starts_ if hasattr(objectives, "starts_") else objectives
    traces = [np.atleast_1d(np.asarray(getattr(start, "objectives", start), dtype=float)) for start in starts]
    if axes is None:
        _, axes = plt.subplots(figsize=(4.8, 3.2), layout="constrained")
    best = min(float(np.nanmin(trace)) for trace in traces)
    scale = max(abs(best), np.finfo(float).tiny)
    winner = int(np.argmin([np.nanmin(trace) for trace in traces]))
    for number, trace in enumerate(traces):
        # The best value itself has distance 0, which a logarithm cannot show.
        above = np.where(trace > best, trace - best, np.nan) / scale
        style: dict[str, Any] = (
            {"color": COLOURS[0], "lw": 1.8, "zorder": 3} if number == winner else {"color": GREY, "lw": 1.0}
        )
        axes.semilogy(
            np.arange(trace.size), above, marker=".", ms=4, label="best start" if number == winner else None, **style
        )
    axes.set(xlabel="iteration", ylabel="objective above the best (relative)", title=f"best objective {best:.6g}")
    axes.title.set_fontsize("medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(traces) > 1:
        axes.legend(frameon=False, fontsize="small")
    bare(axes)
    return axes
