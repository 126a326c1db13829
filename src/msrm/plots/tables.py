"""Loadings as tables of features by factors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrm.plots.panels import label, panel_grid

_MOST_NAMED = 30


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
        Of a model, ``parameters_``; of draws, the MAP's.
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
    fitted = getattr(fitted, "model", fitted)
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
    axes = panel_grid(
        axes, (len(chosen),), (1.5 * len(chosen) + 1.8, height), sharey=len({v.shape for v in values.values()}) == 1
    )
    limit = max(float(np.nanmax(np.abs(v))) for v in values.values()) or 1.0
    for axis, person in zip(axes, chosen, strict=True):
        table = found[person, modality]
        features, factors = values[person].shape
        look: dict[str, Any] = {"vmin": -limit, "vmax": limit, "cmap": "RdBu_r", "aspect": "auto"}
        image = axis.imshow(values[person], interpolation="none", **look)
        axis.set_title(person, fontsize="medium")
        axis.set_xticks(range(factors), [label(table, "factor", k) for k in range(factors)])
        axis.set_xlabel("factor")
        if axis is axes[0]:
            axis.set_ylabel(f"{modality} feature")
            if features <= _MOST_NAMED:
                axis.set_yticks(range(features), [label(table, "feature", k) for k in range(features)])
        axis.spines[:].set_visible(False)
        axis.grid(False)
    axes[-1].figure.colorbar(image, ax=list(axes), label="loading", pad=0.02)
    return axes


def _loadings_by_pair(parameters: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """{(participant, modality): loadings} of a flat dict of parameters."""
    paths = [path.split("/") for path in parameters if path.startswith("loading/")]
    return {(p, m): parameters[f"loading/{p}/{m}"] for _, p, m in paths}
