"""Chains: traces, and ranks that are uniform in every chain when chains agree (Vehtari et al. 2021)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.stats import rankdata

from msrm.plots.panels import COLOURS, GREY, panel_grid

__all__ = ["chosen_quantities", "ranks", "traces"]

_MOST = 8  # panels unless quantities are named


def traces(draws: Any, quantities: Sequence[str] | None = None, *, axes: np.ndarray | None = None) -> np.ndarray:
    """Draw every chain's path, a panel for each quantity.

    Parameters
    ----------
    draws : Draws, DataTree with the group `posterior`, or Dataset (chain, draw, ...)
    quantities : sequence of str, optional
        A variable (``"noise"``: each of its entries) or one entry as in a summary (``"noise[p1/rating]"``); by default
        the first 8 of the log likelihood, responses, length scale, residual timescales and noise.
    axes : ndarray of Axes, optional
        As many as quantities; a new figure by default.

    Returns
    -------
    ndarray of Axes, (quantity,)

    Raises
    ------
    ValueError
        For a quantity that is not there.
    """
    chosen = chosen_quantities(draws, quantities)
    axes = panel_grid(axes, (len(chosen), 1), (7.0, 1.3 * len(chosen) + 0.6), sharex=True).ravel()
    for axis, (name, values) in zip(axes, chosen.items(), strict=True):
        for chain, path in enumerate(values):
            axis.plot(np.arange(len(path)), path, color=COLOURS[chain % len(COLOURS)], lw=0.7, alpha=0.8)
        axis.set_title(name, fontsize="small", loc="left", pad=2)
    axes[-1].set_xlabel("draw")
    return axes


def ranks(
    draws: Any, quantities: Sequence[str] | None = None, *, bins: int = 20, axes: np.ndarray | None = None
) -> np.ndarray:
    """Draw the histogram of each chain's ranks among all draws, a panel for each quantity.

    Parameters
    ----------
    draws, quantities, axes
        As in :func:`traces`.
    bins : int

    Returns
    -------
    ndarray of Axes, (quantity,)
        A dotted line is the count that agreeing chains have.
    """
    chosen = chosen_quantities(draws, quantities)
    axes = panel_grid(axes, (len(chosen), 1), (7.0, 1.3 * len(chosen) + 0.6), sharex=True).ravel()
    for axis, (name, values) in zip(axes, chosen.items(), strict=True):
        edges = np.linspace(0.5, values.size + 0.5, bins + 1)
        ranked = rankdata(values).reshape(values.shape)
        for chain, own in enumerate(ranked):
            counts, _ = np.histogram(own, edges)
            axis.stairs(counts, edges, color=COLOURS[chain % len(COLOURS)], lw=1.2)
        axis.axhline(values.shape[1] / bins, color=GREY, ls=":", lw=1.0)
        axis.set_title(name, fontsize="small", loc="left", pad=2)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("rank among all draws")
    return axes


def chosen_quantities(draws: Any, quantities: Sequence[str] | None) -> dict[str, NDArray[np.float64]]:
    """Draws (chain, draw) of the named quantities."""
    posterior = _posterior(draws)
    usual = ("log_likelihood_marginal", "response", "length_scale", "residual_timescale", "noise")
    found: dict[str, NDArray[np.float64]] = {}
    for name in [name for name in usual if name in posterior] if quantities is None else quantities:
        found |= _entries(posterior, name)
    return dict(list(found.items())[:_MOST]) if quantities is None else found


def _entries(posterior: xr.Dataset, name: str) -> dict[str, NDArray[np.float64]]:
    variable, bracket, entry = name.partition("[")
    if variable not in posterior:
        raise ValueError(f"no quantity {name!r}; there are {', '.join(map(str, posterior.data_vars))}")
    data = posterior[variable]
    others = [dim for dim in data.dims if dim not in ("chain", "draw")]
    if not others:
        return {name: data.transpose("chain", "draw").values}
    labels = [str(label) for label in data[others[0]].values]
    columns = data.transpose("chain", "draw", others[0]).values
    wanted = labels if not bracket else [entry.removesuffix("]")]
    if unknown := [label for label in wanted if label not in labels]:
        raise ValueError(f"{variable} has no entry {unknown[0]!r}; it has {', '.join(labels[:20])}")
    return {f"{variable}[{label}]": columns[..., labels.index(label)] for label in wanted}


def _posterior(draws: Any) -> xr.Dataset:
    tree = getattr(draws, "tree", draws)
    return tree["posterior"].to_dataset() if isinstance(tree, xr.DataTree) else tree
