"""Response curves, with bands over draws."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from msrm.plots.panels import COLOURS, GREY, panel_grid
from msrm.responses import Response


def responses(
    fitted: Any,
    *,
    bands: Mapping[str, xr.Dataset] | None = None,
    reference: Mapping[str, Response] | None = None,
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Draw response curves h(u), a panel for each modality.

    Parameters
    ----------
    fitted : fitted model or {modality: Response}
        Of a model, ``responses_``; of draws, the MAP's with bands over draws. A response that differs between
        participants is a dict by participant.
    bands : {modality: Dataset}, optional
        ``lower`` and ``upper`` over a coordinate ``lag`` in seconds, for instance quantiles over draws.
    reference : {modality: Response}, optional
        Curves to compare with, dotted, such as a simulation's truth.
    axes : ndarray of Axes, optional
        As many as there are modalities; a new figure by default.

    Returns
    -------
    ndarray of Axes, (modality,)
    """
    if bands is None and hasattr(fitted, "ensemble"):
        bands = response_bands(fitted)
    fitted = getattr(fitted, "model", fitted)
    curves: Mapping[str, Any] = fitted if isinstance(fitted, Mapping) else fitted.responses_
    axes = panel_grid(axes, (len(curves),), (2.9 * len(curves) + 0.6, 2.6))
    for number, (axis, (modality, given)) in enumerate(zip(axes, curves.items(), strict=True)):
        people = given if isinstance(given, Mapping) else {"": given}
        known = None if reference is None else reference.get(modality)
        lags = _lags([*people.values(), *([known] if known is not None else [])])
        for index, (person, response) in enumerate(people.items()):
            colour = COLOURS[(index if len(people) > 1 else number) % len(COLOURS)]
            _curve(axis, response, lags, person, color=colour, lw=1.8)
        if bands is not None and modality in bands:
            band = bands[modality]
            colour = COLOURS[number % len(COLOURS)]
            axis.fill_between(band["lag"], band["lower"], band["upper"], color=colour, alpha=0.2, lw=0)
        if known is not None:
            _curve(axis, known, lags, "reference", color="black", ls=":", lw=1.2)
        axis.axhline(0, color=GREY, lw=0.6, zorder=0)
        axis.axvline(0, color=GREY, lw=0.6, zorder=0)
        axis.set(title=f"{modality}\n{_in_words(people)}", xlabel="lag (s)", xlim=(lags[0], lags[-1]))
        axis.title.set_fontsize("medium")
        if len(people) > 1 or known is not None:
            axis.legend(frameon=False, fontsize="small")
    axes[0].set_ylabel("response (unit energy)")
    return axes


def response_bands(draws: Any, *, interval: float = 0.9, thin: int = 1) -> dict[str, xr.Dataset]:
    """Central intervals of response curves over draws.

    Parameters
    ----------
    draws : Draws
    interval : float
        Share of draws inside, at each lag.
    thin : int
        Use every so many draws of a chain.

    Returns
    -------
    {modality: Dataset}
        ``lower``, ``median`` and ``upper`` over ``lag`` (s), of responses with sampled parameters.
    """
    out: dict[str, xr.Dataset] = {}
    if "response" not in draws.posterior:
        return out
    sampled = draws.posterior["response"][:, ::thin]
    for modality, response in draws.model.responses.items():
        names = [name for name in sampled["parameter"].values if str(name).rpartition("/")[0] == modality]
        if not names:
            continue
        values = sampled.sel(parameter=names).transpose("chain", "draw", "parameter").values.reshape(-1, len(names))
        keys = [str(name).rpartition("/")[2] for name in names]
        curves = [response.with_values(dict(zip(keys, own.tolist(), strict=True))) for own in values]
        lags = _lags([curves[i] for i in np.unique(np.concatenate([values.argmin(axis=0), values.argmax(axis=0)]))])
        heights = np.array([curve.curve(lags) for curve in curves])
        low, middle, high = np.quantile(heights, (0.5 - interval / 2, 0.5, 0.5 + interval / 2), axis=0)
        held = {"lower": ("lag", low), "median": ("lag", middle), "upper": ("lag", high)}
        out[modality] = xr.Dataset(held, {"lag": lags})
    return out


def _lags(curves: Sequence[Response]) -> np.ndarray:
    """Lags that show where the curves are not negligible, with 0 in view."""
    low, high = -0.5, 0.5
    for response in curves:
        if response.is_identity:
            continue
        fine = np.linspace(*response.support(), 4001)
        height = np.abs(response.curve(fine))
        visible = fine[height > 1e-3 * height.max()]
        low, high = min(low, visible[0]), max(high, visible[-1])
    return np.linspace(low - 0.05 * (high - low), high + 0.05 * (high - low), 800)


def _curve(axis: Axes, response: Response, lags: np.ndarray, label: str, **style: Any) -> None:
    """One curve, or an arrow for the unit impulse."""
    if not response.is_identity:
        axis.plot(lags, response.curve(lags), label=label or None, **style)
        return
    look = {"arrowstyle": "-|>", "color": style["color"], "lw": style["lw"], "ls": style.get("ls", "-")}
    axis.annotate("", (0, 1), (0, 0), arrowprops=look)
    axis.plot([], [], label=label or None, **style)
    axis.set_ylim(-0.05, 1.15)
    axis.set_yticks([])


def _in_words(people: Mapping[str, Response]) -> str:
    """Family and values, for a title; the values only when all participants share them."""
    response = next(iter(people.values()))
    name = type(response).__name__
    if len(people) > 1 or response.is_identity:
        return name
    return (
        name + " (" + ", ".join(f"{key.replace('_', ' ')} {value:.3g}" for key, value in response.start.items()) + ")"
    )
