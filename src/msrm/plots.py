"""Pictures of a fit: latent paths with their data support, responses, loadings, predictions, convergence.

Every function takes xarray objects or a fitted model, draws on the axes it is given (or on a new figure) and returns
the axes. Shaded grey is where no data supports a value; bands are plus or minus two standard deviations. Colours are
those of Okabe and Ito, told apart with any colour vision.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from msrm.responses import Response

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.ticker import MaxNLocator
except ImportError as error:  # pragma: no cover - tested in a child process
    raise ImportError("msrm.plots needs matplotlib, which is not installed. Run: pip install 'msrm[plots]'") from error

__all__ = ["convergence", "latents", "loadings", "observed_predicted", "responses"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#8a8a8a"
_MOST_NAMED = 30


def latents(
    latent: xr.DataTree | xr.Dataset,
    *,
    runs: Sequence[str] | None = None,
    reference: Mapping[str, xr.DataArray] | None = None,
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Draw latent paths over time: a column for each run, a row for each factor.

    Parameters
    ----------
    latent : DataTree by run, or Dataset of one run
        What ``fit.infer_latent(recording)`` returns: ``mean`` (time, factor), ``supported`` (time,), for a GP
        ``variance`` (time, factor), and where participants have their own ``path`` (time, participant, factor).
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
    paths = {"": latent} if isinstance(latent, xr.Dataset) else {n: c.to_dataset() for n, c in latent.children.items()}
    chosen = list(paths) if runs is None else list(runs)
    if unknown := [run for run in chosen if run not in paths]:
        raise ValueError(f"no run {unknown[0]!r} in the latent; it has {', '.join(paths)}")
    count = paths[chosen[0]].sizes["factor"]
    axes = _grid(
        axes, (count, len(chosen)), (max(3.6 * len(chosen), 6.5), 1.5 * count + 0.8), sharex="col", sharey=True
    )
    for column, run in enumerate(chosen):
        data = paths[run]
        times = data["time"].values
        for row in range(count):
            axis, colour = axes[row, column], _COLOURS[row % len(_COLOURS)]
            if "path" in data:
                own = data["path"].transpose("time", "participant", "factor").values[:, :, row]
                axis.plot(times, own, color=colour, lw=0.6, alpha=0.5)
            if "mean" in data:
                path = data["mean"].values[:, row]
                _line_with_support(axis, times, path, _supported(data), colour)
            if "variance" in data:
                _band(axis, times, path, data["variance"].values[:, row], colour)
            if reference is not None and run in reference:
                truth = reference[run]
                axis.plot(truth["time"].values, truth.values[:, row], ":", color="black", lw=1.0, label="reference")
            if column == 0:
                axis.set_ylabel(f"factor {_label(data, 'factor', row)}")
        axes[0, column].set_title(run, fontsize="medium")
        axes[-1, column].set_xlabel("time (s)")
    if reference is not None:
        axes[0, -1].legend(frameon=False, fontsize="small", loc="upper right")
    return axes


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
        Of a model, ``responses_``. A response that differs between participants is a dict by participant.
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
    curves: Mapping[str, Any] = fitted if isinstance(fitted, Mapping) else fitted.responses_
    axes = _grid(axes, (len(curves),), (2.9 * len(curves) + 0.6, 2.6))
    for number, (axis, (modality, given)) in enumerate(zip(axes, curves.items(), strict=True)):
        people = given if isinstance(given, Mapping) else {"": given}
        known = None if reference is None else reference.get(modality)
        lags = _lags([*people.values(), *([known] if known is not None else [])])
        for index, (person, response) in enumerate(people.items()):
            colour = _COLOURS[(index if len(people) > 1 else number) % len(_COLOURS)]
            _curve(axis, response, lags, person, color=colour, lw=1.8)
        if bands is not None and modality in bands:
            band = bands[modality]
            colour = _COLOURS[number % len(_COLOURS)]
            axis.fill_between(band["lag"], band["lower"], band["upper"], color=colour, alpha=0.2, lw=0)
        if known is not None:
            _curve(axis, known, lags, "reference", color="black", ls=":", lw=1.2)
        axis.axhline(0, color=_GREY, lw=0.6, zorder=0)
        axis.axvline(0, color=_GREY, lw=0.6, zorder=0)
        axis.set(title=f"{modality}\n{_in_words(people)}", xlabel="lag (s)", xlim=(lags[0], lags[-1]))
        axis.title.set_fontsize("medium")
        if len(people) > 1 or known is not None:
            axis.legend(frameon=False, fontsize="small")
    axes[0].set_ylabel("response (unit energy)")
    return axes


def loadings(
    fitted: Any,
    *,
    modality: str | None = None,
    participants: Sequence[str] | None = None,
    axes: np.ndarray | None = None,
) -> np.ndarray:
    """Draw the loadings of one modality, a panel of features by factors for each participant.

    Parameters
    ----------
    fitted : fitted model or {"loading/participant/modality": DataArray (feature, factor)}
        Of a model, ``parameters_``.
    modality : str, optional
        May be left out when there is only one.
    participants : sequence of str, optional
        All who have the modality by default.
    axes : ndarray of Axes, optional
        As many as participants; a new figure by default.

    Returns
    -------
    ndarray of Axes, (participant,)

    Raises
    ------
    ValueError
        When the modality or a participant has no loadings, or several modalities leave the choice open.
    """
    found = _loadings_by_pair(fitted if isinstance(fitted, Mapping) else fitted.parameters_)
    names = list(dict.fromkeys(m for _, m in found))
    if modality is None and len(names) != 1:
        raise ValueError(f"which modality? There are {', '.join(names)}; name one with modality=")
    modality = names[0] if modality is None else modality
    people = [p for p, m in found if m == modality]
    chosen = people if participants is None else list(participants)
    if unknown := [person for person in chosen if person not in people]:
        raise ValueError(f"{unknown[0]!r} has no loadings for {modality!r}; those who have: {', '.join(people)}")
    if not chosen:
        raise ValueError(f"no loadings for {modality!r}; there are {', '.join(names)}")
    values = {person: np.asarray(found[person, modality]) for person in chosen}
    height = min(max(2.4, 0.22 * values[chosen[0]].shape[0] + 1.0), 6.0)
    axes = _grid(
        axes, (len(chosen),), (1.5 * len(chosen) + 1.8, height), sharey=len({v.shape for v in values.values()}) == 1
    )
    limit = max(float(np.nanmax(np.abs(v))) for v in values.values()) or 1.0
    for axis, person in zip(axes, chosen, strict=True):
        table = found[person, modality]
        features, factors = values[person].shape
        look: dict[str, Any] = {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r", "aspect": "auto"}
        image = axis.imshow(values[person], interpolation="none", **look)
        axis.set_title(person, fontsize="medium")
        axis.set_xticks(range(factors), [_label(table, "factor", k) for k in range(factors)])
        axis.set_xlabel("factor")
        if axis is axes[0]:
            axis.set_ylabel(f"{modality} feature")
            if features <= _MOST_NAMED:
                axis.set_yticks(range(features), [_label(table, "feature", k) for k in range(features)])
        axis.spines[:].set_visible(False)
        axis.grid(False)
    axes[-1].figure.colorbar(image, ax=list(axes), label="loading", pad=0.02)
    return axes


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
    axes = _grid(axes, (len(chosen), 1), (7.5, 1.5 * len(chosen) + 0.8), sharex=True).ravel()
    seen, times = _supported(predicted), predicted["time"].values
    measured = dict(zip([str(name) for name in observed["feature"].values], observed.values.T, strict=True))
    for axis, name in zip(axes, chosen, strict=True):
        mean = predicted["mean"].values[:, names.index(name)]
        if name in measured:
            style: dict[str, Any] = {"color": _GREY, "lw": 0.8, "marker": ".", "ms": 2.5}
            axis.plot(*_broken(observed["time"].values, measured[name]), label="observed", **style)
        _line_with_support(axis, times, mean, seen, _COLOURS[0], label="predicted")
        if "variance" in predicted:
            _band(axis, times, mean, predicted["variance"].values[:, names.index(name)], _COLOURS[0])
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
    """
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
            {"color": _COLOURS[0], "lw": 1.8, "zorder": 3} if number == winner else {"color": _GREY, "lw": 1.0}
        )
        axes.semilogy(
            np.arange(trace.size), above, marker=".", ms=4, label="best start" if number == winner else None, **style
        )
    axes.set(xlabel="iteration", ylabel="objective above the best (relative)", title=f"best objective {best:.6g}")
    axes.title.set_fontsize("medium")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(traces) > 1:
        axes.legend(frameon=False, fontsize="small")
    _bare(axes)
    return axes


def _grid(axes: Any, shape: tuple[int, ...], size: tuple[float, float], **sharing: Any) -> np.ndarray:
    """The given axes, checked, or those of a new figure, of the given shape."""
    if axes is None:
        rows, columns = (1, *shape)[-2:]
        _, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **sharing)
    panels = np.asarray(axes, dtype=object)
    if panels.size != int(np.prod(shape)):
        raise ValueError(f"needs {int(np.prod(shape))} axes of shape {shape}, found {panels.size}")
    for axis in panels.flat:
        _bare(axis)
    return panels.reshape(shape)


def _bare(axis: Axes) -> None:
    """Take away what carries no information."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize="small")


def _supported(data: xr.Dataset) -> np.ndarray:
    """(time,) bool: where data supports the mean; everywhere when not told."""
    return data["supported"].values.astype(bool) if "supported" in data else np.ones(data.sizes["time"], dtype=bool)


def _line_with_support(
    axis: Axes, times: np.ndarray, path: np.ndarray, seen: np.ndarray, colour: str, **named: Any
) -> None:
    """A full line where data supports it; elsewhere thin and dashed on grey."""
    axis.plot(*_broken(times, np.where(seen, path, np.nan)), color=colour, lw=1.4, **named)
    if seen.all():
        return
    # The thin line is carried one point into the supported part so that no gap shows.
    edge = ~seen | ~np.r_[seen[1:], True] | ~np.r_[True, seen[:-1]]
    axis.plot(*_broken(times, np.where(edge, path, np.nan)), color=colour, lw=0.8, ls=(0, (4, 2)), alpha=0.8)
    starts = np.flatnonzero(~seen & np.r_[True, seen[:-1]])
    stops = np.flatnonzero(~seen & np.r_[seen[1:], True])
    half = 0.5 * float(np.median(np.diff(times))) if times.size > 1 else 0.0
    for start, stop in zip(starts, stops, strict=True):
        axis.axvspan(times[start] - half, times[stop] + half, color="0.9", lw=0, zorder=-1)


def _band(axis: Axes, times: np.ndarray, mean: np.ndarray, variance: np.ndarray, colour: str) -> None:
    """Plus and minus two standard deviations."""
    width = 2.0 * np.sqrt(variance)
    clock, lower = _broken(times, mean - width)
    axis.fill_between(clock, lower, _broken(times, mean + width)[1], color=colour, alpha=0.2, lw=0)


def _broken(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times and values with NaN inside every gap of more than twice the usual interval, where no line is drawn."""
    gaps = np.diff(times)
    places = np.flatnonzero(gaps > 2.5 * np.median(gaps)) + 1 if times.size > 2 else np.empty(0, dtype=int)
    return np.insert(times, places, times[places - 1]), np.insert(np.asarray(values, dtype=float), places, np.nan)


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


def _loadings_by_pair(parameters: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """{(participant, modality): loadings} of a flat dict of parameters."""
    paths = [path.split("/") for path in parameters if path.startswith("loading/")]
    return {(p, m): parameters[f"loading/{p}/{m}"] for _, p, m in paths}


def _label(data: Any, dimension: str, index: int) -> str:
    """A coordinate's label, or the position counted from 1."""
    if dimension in getattr(data, "coords", {}):
        return str(data[dimension].values[index])
    return str(index + 1)
