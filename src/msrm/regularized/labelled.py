"""What a fitted model shows its user: labelled arrays made from plain ones (DESIGN 9)."""

from typing import Any

import numpy as np
import xarray as xr

from msrm.regularized.assembly import Assembled
from msrm.regularized.model import Model
from msrm.responses import Response


def responses(model: Model) -> dict[str, Response | dict[str, Response]]:
    """Fitted responses by modality, by participant where they are not shared."""
    out: dict[str, Any] = {}
    for (participant, modality), pair in model.pairs.items():
        given = model.settings.responses[modality]
        if given.pooling == "shared":
            out.setdefault(modality, pair.response)
        else:
            out.setdefault(modality, {})[participant] = pair.response
    return out


def parameters(model: Model) -> dict[str, xr.DataArray | float]:
    """Loadings, training means and sds, and free response parameters, by path."""
    out: dict[str, xr.DataArray | float] = {}
    for (participant, modality), pair in model.pairs.items():
        where = f"{participant}/{modality}"
        feature = {"feature": pair.features}
        out[f"loading/{where}"] = xr.DataArray(
            pair.loading, {**feature, "factor": np.arange(1, pair.loading.shape[1] + 1)}, ("feature", "factor")
        )
        out[f"offset/{where}"] = xr.DataArray(pair.mean, feature, ("feature",))
        out[f"scale/{where}"] = xr.DataArray(pair.sd, feature, ("feature",))
    for modality, response in responses(model).items():
        free = model.settings.responses[modality].free
        people = response if isinstance(response, dict) else {"": response}
        for participant, own in people.items():
            path = f"response/{modality}/{participant}" if participant else f"response/{modality}"
            out |= {f"{path}/{name}": own.start[name] for name in free}
    return out


def latents(model: Model) -> xr.DataTree:
    """Latent paths of the training runs on their grids."""
    nodes: dict[str, xr.Dataset] = {}
    for run, found in model.runs.items():
        coords: dict[str, Any] = {
            "time": ("time", found.grid.times, {"units": "s"}),
            "factor": np.arange(1, found.paths.shape[2] + 1),
        }
        variables: dict[str, Any] = {}
        if model.settings.latent_pooling != "separate":
            variables["mean"] = (("time", "factor"), found.paths.mean(1))
        if found.participants:
            coords["participant"] = list(found.participants)
            variables["path"] = (("time", "participant", "factor"), found.paths)
        nodes[run] = xr.Dataset(variables, coords)
    return xr.DataTree.from_dict(nodes)


def residual_variance(model: Model) -> xr.DataArray:
    """Weighted mean squared residual of each stream, in squared training sds."""
    streams = {"stream": [f"{p}/{m}" for p, m in model.pairs]}
    return xr.DataArray([pair.residual_variance for pair in model.pairs.values()], streams, ("stream",))


def explained_variance(found: Assembled) -> tuple[xr.DataArray, xr.DataArray]:
    """Share of the standardized variance that each factor alone explains: over all streams, and of each."""
    factor = {"factor": np.arange(1, len(found.total) + 1)}
    streams = {"stream": [f"{p}/{m}" for p, m in found.explained]}
    by_stream = np.stack(list(found.explained.values()))
    return (
        xr.DataArray(found.total, factor, ("factor",)),
        xr.DataArray(by_stream, streams | factor, ("stream", "factor")),
    )
